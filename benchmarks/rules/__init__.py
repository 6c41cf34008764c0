"""Functions with a batching rule of their own measured against the same without one.

Run ``python -m benchmarks rules`` from the root of the repository.
"""
