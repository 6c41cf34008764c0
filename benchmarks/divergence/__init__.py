"""Lanes that part ways: `divergence="compact"` measured against masked lanes and others.

Run ``python -m benchmarks divergence`` from the root of the repository.
"""
