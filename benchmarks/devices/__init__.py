"""`vmap(mesh=)` measured against `shard_map` written by hand.

Run ``python -m benchmarks devices`` from the root of the repository.
"""
