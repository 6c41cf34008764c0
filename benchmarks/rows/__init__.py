"""Rows of different lengths under `vmap` of a `Ragged`, and what one would write without it.

Run ``python -m benchmarks rows`` from the root of the repository.
"""
