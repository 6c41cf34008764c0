"""Random programs: straight-line code, branches and loops over small arrays.

`random_program(seed)` draws a per-example function from a table of operations.
It is a plain Python function of JAX operations, so the same program can run in
a loop, under any vmap, and be differentiated.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FLOAT, INT, BOOL = "f", "i", "b"

# (name, kinds of the operands, function). Floats stay of moderate size: every
# operation that could grow is followed by a bounded one.
UNARY = {
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "square": lambda x: jnp.tanh(x * x),
    "sqrt": lambda x: jnp.sqrt(jnp.abs(x) + 0.1),
    "log": lambda x: jnp.log1p(jnp.abs(x)),
    "neg": lambda x: -x,
    "logistic": jax.nn.sigmoid,
    "gelu": jax.nn.gelu,
    "softmax": lambda x: jax.nn.softmax(x, axis=-1) if x.ndim else x,
    "logsumexp": lambda x: jax.nn.logsumexp(x),
    "sum": lambda x: jnp.sum(x) * 0.3,
    "mean0": lambda x: jnp.mean(x, axis=0) if x.ndim else x,
    "max": lambda x: jnp.max(x, axis=-1) if x.ndim else x,
    "prod": lambda x: jnp.tanh(jnp.prod(x, axis=-1)) if x.ndim else x,
    "cumsum": lambda x: jnp.tanh(jnp.cumsum(x, axis=0)) if x.ndim else x,
    "cummax": lambda x: lax.cummax(x, axis=x.ndim - 1, reverse=True) if x.ndim else x,
    "sort": lambda x: jnp.sort(x, axis=-1) if x.ndim else x,
    "argmax": lambda x: jnp.argmax(x, axis=-1) if x.ndim else jnp.int32(0),
    "argsort": lambda x: jnp.argsort(x.ravel())[0],
    "transpose": lambda x: x.T,
    "reverse": lambda x: x[::-1] if x.ndim else x,
    "ravel": lambda x: x.ravel(),
    "expand": lambda x: x[None] if x.ndim < 2 else x,
    "roll": lambda x: jnp.roll(x, 1, axis=-1) if x.ndim else x,
    "pad": lambda x: jnp.pad(x, 1, constant_values=0.5)[..., 1:] if x.ndim == 1 else x,
    "tile": lambda x: jnp.tile(x, 2)[..., : x.shape[-1]] if x.ndim else x,
    "gram": lambda x: jnp.tanh(x @ x.T) if x.ndim == 2 else x,
    "conv": lambda x: jnp.convolve(x, jnp.array([0.5, 0.25]), mode="same") if x.ndim == 1 else x,
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)) * 0.3 if x.ndim else x,
    "cholesky": lambda x: (
        jnp.linalg.cholesky(x @ x.T + 2 * jnp.eye(x.shape[0])) if x.ndim == 2 else x
    ),
    "solve": lambda x: (
        jnp.linalg.solve(x @ x.T + 2 * jnp.eye(x.shape[0]), jnp.ones(x.shape[0]))
        if x.ndim == 2
        else x
    ),
    "positive": lambda x: x > 0,
    "round": lambda x: jnp.clip(jnp.round(lax.stop_gradient(x) * 2), -3, 3).astype(jnp.int32),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))),
    "jit": jax.jit(lambda x: jnp.cos(x) * 2 - 1),
    "vmap": lambda x: jax.vmap(lambda r: r * jnp.tanh(r.sum()))(x) if x.ndim else x,
    "jvp": lambda x: jax.jvp(lambda y: jnp.sin(y) * y, (x,), (jnp.ones_like(x),))[1],
    "grad": lambda x: jax.grad(lambda y: jnp.sum(jnp.sin(y) ** 2))(x),
    "random": lambda x: x + jax.random.uniform(jax.random.key(3), x.shape),
}

BINARY = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: jnp.tanh(x * y),
    "sub": lambda x, y: x - 0.5 * y,
    "div": lambda x, y: x / (1 + y * y),
    "maximum": jnp.maximum,
    "atan2": lambda x, y: jnp.arctan2(x, 1 + y * y),
    "power": lambda x, y: jnp.power(jnp.abs(x) + 0.5, jnp.tanh(y)),
    "less": lambda x, y: x < y,
    "dot": lambda x, y: (
        jnp.tanh(x @ y) if x.ndim and y.ndim and x.shape[-1] == y.shape[0] else x.sum() - y.sum()
    ),
    "outer": lambda x, y: jnp.outer(x.ravel()[:2], y.ravel()[:3]),
    "concatenate": lambda x, y: jnp.concatenate([x.ravel()[:2], y.ravel()[:2]]),
    "searchsorted": lambda x, y: jnp.searchsorted(jnp.sort(x.ravel()), y.ravel()[0]),
    "update": lambda x, y: x.at[..., 0].set(y.ravel()[0].astype(x.dtype)) if x.ndim else x,
}

INDEXED = {
    "take": lambda x, i: x[i] if x.ndim else x,
    "slice": lambda x, i: lax.dynamic_slice_in_dim(x, i, 2) if x.ndim and len(x) > 1 else x,
    "put": lambda x, i: x.at[i].add(0.25) if x.ndim else x,
    "one_hot": lambda x, i: x.sum() * jax.nn.one_hot(i, 3),
    "shift": lambda x, i: x * (i % 3).astype(x.dtype),
    "fold": lambda x, i: x + jax.random.normal(jax.random.fold_in(jax.random.key(0), i)),
}


def random_program(seed, steps=10, depth=2):
    """A per-example function of a vector, a matrix and an integer, and its weights.

    Returns a function ``f(vector, matrix, integer, weights) -> tuple of arrays``.
    """
    rng, real = np.random.default_rng(seed), jax.dtypes.canonicalize_dtype(float)
    inputs = [
        jax.ShapeDtypeStruct((3,), real),
        jax.ShapeDtypeStruct((2, 3), real),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((3, 3), real),
    ]
    run = _block(rng, inputs, steps, depth)

    def program(vector, matrix, integer, weights):
        values = run([vector, matrix, integer, weights])
        return tuple(values[-3:])

    return program


def _block(rng, avals, steps, depth):
    """Draws `steps` operations on values of types `avals`; returns a function of lists."""
    avals = list(avals)
    drawn = []
    while len(drawn) < steps:
        step, operands = _operation(rng, avals, depth)
        out = jax.eval_shape(step, *[avals[i] for i in operands])
        if not isinstance(out, jax.ShapeDtypeStruct) or out.size > 40 or out.size == 0:
            continue
        drawn.append((step, operands))
        avals.append(out)

    def run(values):
        values = list(values)
        for step, operands in drawn:
            values.append(step(*[values[i] for i in operands]))
        return values

    return run


def _operation(rng, avals, depth):
    floats = [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.floating)]
    integers = [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.integer)]
    booleans = [i for i, a in enumerate(avals) if a.dtype == jnp.bool_]
    recent = floats[-6:]
    kind = rng.choice(
        [
            "unary",
            "binary",
            "indexed",
            "where",
            "cond",
            "switch",
            "scan",
            "while",
            "fori",
            "custom",
        ],
        p=[0.34, 0.2, 0.1, 0.06, 0.06, 0.05, 0.06, 0.06, 0.03, 0.04],
    )
    x = int(rng.choice(recent))
    if kind == "unary":
        return _choice(rng, UNARY), [x]
    if kind == "binary":
        name = rng.choice(list(BINARY))
        fun = BINARY[name]
        y = int(rng.choice(floats))
        if name in ("dot", "outer", "concatenate", "searchsorted", "update"):
            return fun, [x, y]
        same = [i for i in floats if avals[i].shape in (avals[x].shape, ())]
        return fun, [x, int(rng.choice(same))]
    scalars = [i for i in integers if avals[i].shape == ()]
    if kind == "indexed" and scalars:
        return _choice(rng, INDEXED), [x, int(rng.choice(scalars))]
    if kind == "where" and booleans:
        b = int(rng.choice(booleans))
        same = [i for i in floats if avals[i].shape in (avals[b].shape, ())]
        y = int(rng.choice(same))
        return lambda b, y: jnp.where(b, jnp.sin(y), 0.5), [b, y]
    if kind == "custom":
        return _custom(rng), [x]
    if depth == 0:
        return jnp.sin, [x]
    body = _endomap(rng, avals[x], [avals[i] for i in floats[:2]], depth - 1)
    other = _endomap(rng, avals[x], [avals[i] for i in floats[:2]], depth - 1)
    operands = [x, *floats[:2]]
    if kind == "cond":
        return lambda x, *r: lax.cond(x.sum() > 0, body, other, x, *r), operands
    if kind == "switch" and scalars:
        i = int(rng.choice(scalars))
        third = lambda x, *r: x
        return (lambda i, x, *r: lax.switch(i, [body, other, third], x, *r), [i, *operands])
    if kind == "scan":
        reverse = bool(rng.integers(2))

        def scan(x, *r):
            step = lambda c, e: (body(c, *r), jnp.sum(c) * e)
            c, ys = lax.scan(step, x, jnp.arange(3.0), reverse=reverse)
            return c + ys.sum() * 0.1

        return scan, operands
    if kind == "while":
        # Trip counts differ by lane; a forward-mode-only loop is kept out of
        # gradients by stop_gradient.
        def loop(x, *r):
            n = 1 + jnp.abs(jnp.round(lax.stop_gradient(x).sum() * 3)).astype(jnp.int32) % 4
            _, out = lax.while_loop(
                lambda s: s[0] < n,
                lambda s: (s[0] + 1, body(s[1], *map(lax.stop_gradient, r))),
                (0, lax.stop_gradient(x)),
            )
            return out + x

        return loop, operands
    if kind == "fori":
        return lambda x, *r: lax.fori_loop(0, 3, lambda i, c: body(c, *r) * 0.9, x), operands
    return jnp.cos, [x]


def _endomap(rng, aval, others, depth):
    """A drawn function from a value and some others to a value of the same type."""
    run = _block(rng, [aval, *others], 2, depth)

    def fun(x, *r):
        y = run([x, *r])[-1]
        return jnp.tanh(x + 0.5 * jnp.mean(y.astype(x.dtype)))

    return fun


def _custom(rng):
    """A function with derivatives of its own; which kind is drawn."""
    factor = float(rng.integers(1, 4))
    if rng.integers(2):
        jvp = jax.custom_jvp(lambda x: jnp.sin(x) * factor)
        jvp.defjvp(lambda p, t: (jnp.sin(p[0]) * factor, t[0] * jnp.cos(p[0]) * factor))
        return jvp
    vjp = jax.custom_vjp(lambda x: jnp.sin(x) * factor)
    vjp.defvjp(lambda x: (jnp.sin(x) * factor, x), lambda x, g: (g * jnp.cos(x) * factor,))
    return vjp


def _choice(rng, table):
    return table[rng.choice(list(table))]
