"""Decompositions and products of many small matrices, one element of all of them at a time.

A library is called once for each matrix, which takes longer than the arithmetic where matrices
have a few rows. Here lanes come last: what is done to an element is done to those of all lanes,
in a loop that a compiler vectorises. (Dongarra et al. 2017, "The design and performance of batched
BLAS on modern high-performance computing systems", and the compact layout of Intel's MKL.)

Each module holds one decomposition, a function of arrays ``[rows, columns, lanes]`` that returns
what the primitive of JAX returns, lanes last. `table.py` has them all, `pays.py` says from how many
lanes on, and up to which size, they take less time than the library. What batches with them is
`rules/linalg.py`.
"""
