"""What a batch makes slow under `jax.vmap`, next to programs for the whole batch, written by hand.

Run ``python -m benchmarks slow`` from the root of the repository.
"""
