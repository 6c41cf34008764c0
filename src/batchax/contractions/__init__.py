"""Sums over lanes as contractions, where what is summed is made of products.

The sum over lanes k of ``outer(a_k, b_k) * s_k`` is one product of matrices, which needs no array
for each lane. `contracted.py` finds such products in the program of one example; `operations.py`
has the rules by which they pass through operations, and `inside.py` those by which they leave
loops. `deferred.py` adds them up over lanes. `squares.py` has their sums of squares.

Who clips gradients so by hand calls it ghost clipping: Li, Tramèr, Liang and Hashimoto, "Large
language models can be strong differentially private learners", ICLR 2022; Bu, Wang, Zha and
Karypis, "Differentially private optimization on large model at small cost", ICML 2023.
"""
