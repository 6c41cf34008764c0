"""Programs of other libraries as their users write them: the thresholds were not set by them.

What is not installed is left out, with a line that says so. More than the tests need, each
installed without its dependencies: gymnax (gymnasium), jax-md, distrax and dynamax (tfp-nightly,
dm-tree, chex, decorator, fastprogress below 1.0.4), jaxopt, tinygp, ott-jax, evosax, dm-haiku
(jmp, tabulate), jraph, e3nn-jax (sympy, mpmath).
"""
