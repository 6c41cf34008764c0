"""`bx.vmap` with a `batch_size` measured against the other ways to run a batch in chunks.

Run ``python -m benchmarks chunks`` from the root of the repository.
"""
