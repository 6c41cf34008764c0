"""Functions with batching rules: the one that changes nothing, and one that tells."""

import jax
import jax.numpy as jnp

import batchax as bx


def with_identity_rule(fun, vmap=bx.vmap, keep_unbatched=True):
    """`fun` as a `custom_vmap` function whose rule does what would be done without it.

    keep_unbatched: results that do not depend on the batch are returned unbatched.
    """
    own = bx.custom_vmap(fun)

    @own.def_vmap
    def identity(axis_size, in_batched, *args, **kwargs):
        count = len(args)
        values = [*args, *kwargs.values()]
        axes = tuple(jax.tree.map(lambda b: 0 if b else None, in_batched))

        def flat(*values):
            return fun(*values[:count], **dict(zip(kwargs, values[count:], strict=True)))

        def over(function, out_axes):
            return vmap(function, in_axes=axes, out_axes=out_axes, axis_size=axis_size)

        def batched(k):
            try:
                jax.eval_shape(over(lambda *xs: jax.tree.leaves(flat(*xs))[k], None), *values)
            except ValueError:
                return True
            return False

        structure = jax.tree.structure(jax.eval_shape(over(flat, 0), *values))
        flags = [not keep_unbatched or batched(k) for k in range(structure.num_leaves)]
        flags = jax.tree.unflatten(structure, flags)
        out_axes = jax.tree.map(lambda b: 0 if b else None, flags)
        return over(flat, out_axes)(*values), flags

    return own


class Telling:
    """A function of elementwise operations whose rule tells of each batch it has.

    Attributes:
      function: computes `fun` for one example; its rule computes `by_rule` for all lanes.
      seen: the size, and which arguments were batched, of each batch.
    """

    def __init__(self, fun, by_rule):
        self.seen = set()
        self.function = bx.custom_vmap(fun)

        @self.function.def_vmap
        def rule(axis_size, in_batched, *args):
            self.seen.add((axis_size, tuple(in_batched)))
            ranks = [x.ndim - b for x, b in zip(args, in_batched, strict=True)]
            aligned = [  # the axes of one example are broadcast, the lanes stay the first
                jnp.expand_dims(x, tuple(range(1, 1 + max(ranks) - rank))) if b else x
                for x, b, rank in zip(args, in_batched, ranks, strict=True)
            ]
            return by_rule(*aligned), True
