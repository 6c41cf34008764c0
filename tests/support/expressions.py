"""Random expressions of small arrays, mostly of operations that move axes about.

`random_expression(rng, shapes, depth)` draws a function of a list of arrays of these shapes, and
the shape of its result.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

UNARY = {
    "transpose": lambda x, d: lax.transpose(x, d.order),
    "reshape": lambda x, d: lax.reshape(x, d.sizes),
    "sum": lambda x, d: lax.reduce_sum(x, d.axes),
    "max": lambda x, d: lax.reduce_max(x, d.axes),
    "argmax": lambda x, d: 1.0 * lax.argmax(x, d.axis, jnp.int32),
    "expand": lambda x, d: jnp.expand_dims(x, d.axis),
    "squeeze": lambda x, d: jnp.squeeze(x),
    "broadcast": lambda x, d: jnp.stack([x] * d.count, -1),
    "repeat": lambda x, d: jnp.broadcast_to(x, (d.count, *x.shape)),
    "sin": lambda x, d: jnp.sin(x),
    "double": lambda x, d: 2.0 * x,
    "round": lambda x, d: x.astype(jnp.int32).astype(x.dtype),
    "cumsum": lambda x, d: lax.cumsum(x, d.axis, reverse=x.ndim > 1),
    "rev": lambda x, d: lax.rev(x, (d.axis,)),
    "sort": lambda x, d: lax.sort(x, dimension=d.axis),
    "tail": lambda x, d: lax.slice_in_dim(x, x.shape[d.axis] // 2, None, axis=d.axis),
    "split": lambda x, d: jnp.split(x, [1], d.axis)[0],
    "pad": lambda x, d: lax.pad(x, 0.5, [(a == d.axis, 0, 0) for a in range(x.ndim)]),
    "gram": lambda x, d: jnp.tensordot(x, x, (d.axis, d.axis)),
    "scan": lambda x, d: lax.scan(lambda c, y: (c + y.sum(), y * c), 0.5, x)[1],
}

BINARY = {
    "add": lax.add,
    "sub": lax.sub,
    "mul": lax.mul,
    "where": lambda x, y: jnp.where(x > y, x, 2 * y),
    "less": lambda x, y: 1.0 * (y <= x),
    "concatenate": lambda x, y: lax.concatenate([x, y], x.ndim - 1),
}


def random_expression(rng, shapes, depth):
    """A drawn function of a list of arrays of `shapes`, and the shape of what it returns."""
    if depth == 0 or rng.random() < 0.08:
        i = int(rng.integers(len(shapes)))
        return lambda arrays: arrays[i], shapes[i]
    f, s = random_expression(rng, shapes, depth - 1)
    kind = rng.choice(["unary", "binary", "dot"], p=[0.6, 0.25, 0.15])
    if kind == "unary":
        if not 0 < len(s) <= 3:
            return f, s
        fun, drawn = UNARY[rng.choice(list(UNARY))], _draw(rng, s)
        return _applied(lambda x: fun(x, drawn), f)(shapes)
    g, t = random_expression(rng, shapes, depth - 1)
    if kind == "binary" and s and t and not set(s[-len(t) :]) ^ set(t[-len(s) :]):
        fun = BINARY[rng.choice(list(BINARY))]
        try:
            shape = np.broadcast_shapes(s, t)
        except ValueError:
            return f, s
        return _applied(
            fun, lambda a: jnp.broadcast_to(f(a), shape), lambda a: jnp.broadcast_to(g(a), shape)
        )(shapes)
    pairs = [(i, j) for i in _all(s) for j in _all(t) if s[i] == t[j]]
    if kind == "dot" and pairs:
        return _applied(_contraction(rng, pairs), f, g)(shapes)
    return f, s


def _contraction(rng, pairs):
    i, j = pairs[int(rng.integers(len(pairs)))]
    others = [(a, b) for a, b in pairs if a != i and b != j][: int(rng.integers(2))]
    batch = tuple(a for a, _ in others), tuple(b for _, b in others)
    return lambda x, y: lax.dot_general(x, y, (((i,), (j,)), batch))


def _applied(fun, *inner):
    def applied(shapes):
        outer = lambda arrays: fun(*[f(arrays) for f in inner])
        avals = [jax.ShapeDtypeStruct(s, jax.dtypes.canonicalize_dtype(float)) for s in shapes]
        return outer, jax.eval_shape(outer, avals).shape

    return applied


def _all(s):
    return range(len(s))


def _draw(rng, s):
    """What an operation on an array of shape `s` may need to be told."""
    n = int(np.prod(s))
    sizes = [(n,), (n, 1), *((k, n // k) for k in (2, 3) if n % k == 0)]
    return SimpleNamespace(
        axis=int(rng.integers(len(s))),
        axes=tuple(d for d in _all(s) if rng.random() < 0.5),
        order=tuple(map(int, rng.permutation(len(s)))),
        sizes=sizes[int(rng.integers(len(sizes)))],
        count=int(rng.integers(2, 4)),
    )
