"""Functions whose derivative rules are not the true ones."""

import jax
import jax.numpy as jnp


def tripled_jvp(closed=None):
    """sin(x) * y with a JVP rule that is three times the true one, so that its use shows.

    `closed`: a value that the rule closes over, and multiplies by instead.
    """

    @jax.custom_jvp
    def f(x, y):
        return jnp.sin(x) * y

    @f.defjvp
    def rule(primals, tangents):
        (x, y), (tx, ty) = primals, tangents
        scale = 3 if closed is None else closed
        return f(x, y), scale * (jnp.cos(x) * tx * y + jnp.sin(x) * ty)

    return f
