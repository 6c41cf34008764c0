"""What engines of `bx.map` cost, measured on one machine, and what that means for a cluster.

Run ``python -m benchmarks cluster`` from the root of the repository.
"""
