"""A search for programs that `bx.vmap` makes slower than `jax.vmap`, as users write them."""
