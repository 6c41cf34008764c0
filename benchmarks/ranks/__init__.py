"""Functions of known ranks measured under `auto_vmap` and what one would use without it.

Run ``python -m benchmarks ranks`` from the root of the repository.
"""
