"""Programs in canonical form: equal ones compute the same, and rewritten ones are equal."""

from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun

import batchax as bx
from batchax import _compat
from batchax.analysis.canonical import CanonicalProgram, Table

from support.programs import function_of, random_program

# Random expressions of small arrays, mostly of operations that move axes about.

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


# A staged program written differently.

COMMUTING = ("add", "mul", "max", "min", "and", "or", "xor", "eq", "ne")


def rewritten(program, rng):
    """A function of the inputs of `program` that computes the same."""

    def change(eqn, args):
        if eqn.primitive.name in COMMUTING and rng.random() < 0.5:
            args = args[::-1]
        args = [_turned_twice(x) if np.ndim(x) > 1 and rng.random() < 0.3 else x for x in args]
        if rng.random() < 0.2:
            _bind(eqn, [lax.neg(x) if _is_float(x) else x for x in args])  # nothing needs this
            _bind(eqn, args)
        if rng.random() < 0.3:
            return jax.jit(lambda *xs: _bind(eqn, xs))(*args)
        return _bind(eqn, args)

    return _run(program, change)


def _run(program, change):
    def run(*inputs):
        jaxpr = program.jaxpr
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *inputs], strict=True))

        def value(v):
            return (
                lax.convert_element_type(v.val, v.aval.dtype) if isinstance(v, Literal) else env[v]
            )

        for eqn in jaxpr.eqns:
            outs = change(eqn, [value(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [value(v) for v in jaxpr.outvars]

    return run


def _bind(eqn, args):
    if eqn.primitive.name.startswith(("custom_jvp", "custom_vjp")):
        return jax.extend.core.jaxpr_as_fun(eqn.params["call_jaxpr"])(*args)
    out = eqn.primitive.bind(*args, **eqn.params)
    return out if eqn.primitive.multiple_results else [out]


def _turned_twice(x):
    return jax.numpy.swapaxes(jax.numpy.swapaxes(x, 0, -1), 0, -1)


def _is_float(x):
    return jax.numpy.issubdtype(jax.numpy.result_type(x), jax.numpy.floating)


REAL = jax.dtypes.canonicalize_dtype(float)


SEEDS = (2, 18, 23, 24, 27, 39, 40, 42, 54, 55, 59)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.each_commit(6)
def test_a_program_written_differently_is_the_same(seed):
    program = random_program(seed, 24)
    with jax.enable_x64(True):
        types = [t.struct for t in program.arguments]
        staged = _compat.without_dead(jax.make_jaxpr(function_of(program))(*types))
        other = rewritten(staged, np.random.default_rng(seed))
        found = bx.same_program(jaxpr_as_fun(staged), other, *types)
    assert found, found


@pytest.mark.parametrize(
    ("count", "least"), [(300, 2), pytest.param(900, 20, marks=pytest.mark.nightly)]
)
@pytest.mark.compiles(100)
def test_equal_expressions_compute_the_same(count, least):
    rng = np.random.default_rng(0)
    shapes = [(2, 3), (3, 2), (3,), (2, 2), (1, 3), (2, 1, 3)]
    arrays = [jnp.asarray(rng.normal(size=s) * 2, REAL) for s in shapes]
    table, groups = Table(), defaultdict(list)
    for _ in range(count):
        fun, shape = random_expression(rng, shapes, 3)
        program = _compat.without_dead(jax.make_jaxpr(lambda *a, fun=fun: fun(a))(*arrays))
        groups[CanonicalProgram(table, program).outputs[0], shape].append(program)
    # A group computes one value; equal programs need not be run.
    several = [{str(p): p for p in group} for group in groups.values()]
    several = [list(group.values()) for group in several if len(group) > 1]
    assert len(several) > least
    for first, *others in several:
        expected = jaxpr_as_fun(first)(*arrays)[0]
        for other in others[:5]:
            np.testing.assert_allclose(
                jaxpr_as_fun(other)(*arrays)[0], expected, rtol=1e-4, atol=1e-4
            )
