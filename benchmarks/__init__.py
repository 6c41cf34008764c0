"""`bx.vmap` measured against `jax.vmap`, side by side in one process.

Run ``python -m benchmarks`` (or ``make bench``) from the root of the repository.
"""
