"""A rule registered here serves `jax.vmap`, and whatever is made of it."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import batching
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx
from batchax import _compat
from batchax.kernel import registry

from support.new_primitive import new_primitive
from support.oracle import example, same


def twisted(x):
    """Mixes the elements of a vector."""
    return x * jnp.flip(x, -1) + jnp.sin(x)


twisted_p = new_primitive("twisted", twisted)
cubed_p = new_primitive("cubed", lambda x: x**3)
hypot_p = new_primitive("hypot", lambda x, y: jnp.sqrt(x * x + y * y + 1))
norm_p = new_primitive("norm", lambda x, *, axes: jnp.sqrt(1 + (x * x).sum(axes)))
both_p = new_primitive("sum_and_max", lambda x, *, axes: [x.sum(axes), x.max(axes)], True)

CALLS = []


@bx.register_rule(twisted_p)
def _(axis, args, axes):
    CALLS.append((axis.size, axis.name, axis.spmd_name))
    return twisted_p.bind(bx.axis_to_front(axis, args[0], axes[0])), 0


bx.vectorized(cubed_p)
bx.broadcasting(hypot_p)
bx.reducing(norm_p, neutral=0)
bx.reducing(both_p)


def of_all(x, c):
    """Uses each of the primitives once; `x` is a vector, `c` a number."""
    y = hypot_p.bind(cubed_p.bind(twisted_p.bind(x)), jnp.reshape(c, (1,)))
    total, most = both_p.bind(y, axes=(0,))
    return y * norm_p.bind(y, axes=(0,)) + total, most


def plain(x, c):
    """The same, of operations that JAX can batch."""
    y = jnp.sqrt(twisted(x) ** 6 + c * c + 1)
    return y * jnp.sqrt(1 + (y * y).sum()) + y.sum(), y.max()


X, C = example((4, 3)), example((4,), seed=1)
XX, CC = example((2, 4, 3)), example((2, 4), seed=1)

WAYS = {
    "vmap": lambda f: jax.vmap(f)(X, C),
    "jit": lambda f: jax.vmap(jax.jit(f))(X, C),
    "loop": lambda f: jax.vmap(lambda x, c: lax.scan(lambda x, _: f(x, c), x, None, 2))(X, C),
    "forward": lambda f: jax.jacfwd(f, (0, 1))(X[0], C[0]),
    "hessian": lambda f: jax.hessian(lambda x: f(x, C[0])[1])(X[0]),
    "jax in bx": lambda f: bx.vmap(jax.vmap(f))(XX, CC),
    "chunks in jax": lambda f: jax.vmap(bx.vmap(f, batch_size=3))(XX, CC),
    "gradients": lambda f: jax.vmap(jax.grad(lambda x, c: f(x, c)[1], (0, 1)))(X, C),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_batch(way):
    run = jax.jit(WAYS[way], static_argnums=0)
    same(run(of_all), run(plain), dict(rtol=1e-4, atol=1e-4))


def test_what_a_rule_is_told_by_jax():
    CALLS.clear()
    mesh = jax.make_mesh((4,), ("m",), axis_types=(AxisType.Auto,))
    f = lambda x: twisted_p.bind(x) + lax.psum(1.0, "i") + lax.axis_index("i")
    same(jax.vmap(f, axis_name="i")(X), twisted(X) + 4 + jnp.arange(4.0)[:, None])
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("m")))
        got = jax.jit(jax.vmap(twisted_p.bind, spmd_axis_name="m"))(x)
    same(got, twisted(X))
    assert CALLS == [(4, "i", None), (4, None, ("m",))]


def test_a_rule_that_jax_has_stays():
    """Whether it was there before, or came later."""
    before, later = (new_primitive(n, jnp.sin) for n in ("before", "later"))
    marked = lambda mark: lambda args, dims: (args[0] * 0 + mark, dims[0])
    batching.primitive_batchers[before] = marked(1)
    for p in (before, later):
        bx.register_rule(p)(lambda axis, args, axes: (args[0] * 0 + 2, axes[0]))
    batching.primitive_batchers[later] = marked(3)
    for p, mark in ((before, 1), (later, 3)):
        same(jax.vmap(p.bind)(X), jnp.full_like(X, mark))
        same(bx.vmap(p.bind)(X), jnp.full_like(X, 2))


@pytest.mark.parametrize("table", ["primitive_batchers", "axis_primitive_batchers"])
@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"divergence": "compact"}], ids=str)
def test_a_rule_of_a_users_in_jaxs_table_is_honoured_for_primitives_with_a_rule_here(
    table, options, monkeypatch
):
    rules, p = batching.fancy_primitive_batchers, jax.lax.erf_inv_p
    monkeypatch.setitem(rules, p, rules[p])  # taken back at the end

    def rule(*given, **params):
        args, dims = given[-2:]
        return p.bind(args[0], **params) * 0 + 7, dims[0]

    getattr(batching, table)[p] = rule
    f = lambda x: jax.lax.erf_inv(x).sum() + jnp.sin(x)  # a new one: JAX keeps what it batched
    for batched in (bx.vmap(f, **options), jax.jit(bx.vmap(f, **options)), jax.vmap(f)):
        same(batched(X / 100), 7.0 * X.shape[1] + jnp.sin(X / 100))
    told = bx.explain(f, compile=False)(X)
    assert [e.service for e in told.walk() if e.primitive == "erf_inv"] == ["jax"]


def test_rules_of_jax_are_known_as_such():
    """Whatever it has in its table is not taken for a user's, in any version."""
    assert sum(rule is not None for rule in registry._of_jax.values()) > 200
    assert not any(map(registry.is_replaced_in_jax, registry._of_jax))
    for rule in (lambda x: x, functools.partial(lambda x: x)):
        assert not _compat.is_jaxs_rule(rule)


@pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap], ids=["bx", "jax"])
def test_a_rule_that_is_replaced_leaves_nothing_behind(vmap):
    p = new_primitive("changing", lambda x: x)
    batched = jax.jit(vmap(jax.jit(p.bind)))
    bx.vectorized(p)
    same(batched(X), X)
    for factor in (2, 3):
        bx.register_rule(p)(lambda axis, args, axes, f=factor: (f * args[0], axes[0]))
        same(batched(X), X * factor)
        same(vmap(jax.jit(p.bind))(X), X * factor)


def test_a_primitive_may_be_called_as_one_of_jaxs():
    p = new_primitive("neg", jnp.exp)
    bx.vectorized(p)
    for vmap in (bx.vmap, jax.vmap):
        same(vmap(lambda x: p.bind(-x))(X), jnp.exp(-X))
    rows = bx.Ragged.from_rows([X[0], X[1, :2]])
    same(bx.vmap(lambda r: p.bind(-r).sum())(rows), jnp.stack([jnp.exp(-r).sum() for r in rows]))


ROWS = [np.arange(1.0, n + 1, dtype=np.float32) / 3 for n in (3, 1, 4, 0)]


@pytest.mark.parametrize("layout", ["packed", "padded", "auto"])
def test_rows(layout):
    """The makers say how rows are treated: elements by themselves, or reduced with padding."""

    def f(row, c):
        y = hypot_p.bind(cubed_p.bind(row), jnp.reshape(c, (1,)))
        return y, norm_p.bind(y, axes=(0,)), norm_p.bind(jnp.stack([y, 2 * y]), axes=(0,)).sum()

    rows, c = bx.Ragged.from_rows(ROWS), jnp.arange(4, dtype=jnp.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole, norms, sums = jax.jit(bx.vmap(f, layout=layout))(rows, c)
        lengths = jnp.asarray([3, 1, 4, 0])  # traced below: rows of one length cannot be grouped
        total = lambda d, n: sum(
            x.sum() for x in bx.vmap(f, layout=layout)(bx.Ragged(d, n, 4), c)[1:]
        )
        gradient = jax.jit(jax.grad(total))(rows.data, lengths)
    for i, (row, x) in enumerate(zip(ROWS, c, strict=True)):
        y, norm, both = alone(f, row, x)
        same(whole.rows()[i], y)
        same((norms[i], sums[i]), (norm, both), dict(rtol=1e-5))
        by_row = gradient[sum(map(len, ROWS[:i])) :][: len(row)]
        same(by_row, alone(jax.grad(lambda r, x: sum(map(jnp.sum, f(r, x)[1:]))), row, x))


def alone(f, row, x):
    return jax.jit(f)(row, x)


@pytest.mark.usefixtures("longer_rows")
def test_rows_reduced_to_what_nobody_said_the_neutral_value_of():
    f = lambda row: both_p.bind(row, axes=(0,))[1]
    rows = bx.Ragged.from_rows(ROWS[:3])
    same(bx.vmap(f)(rows), jnp.asarray([r.max() for r in ROWS[:3]]))  # by length
    with pytest.raises(bx.UnsupportedError, match=r"`sum_and_max` at .*reducing\(primitive, neut"):
        jax.jit(lambda d, n: bx.vmap(f)(bx.Ragged(d, n, 4)))(rows.data, jnp.asarray([3, 1, 4]))
