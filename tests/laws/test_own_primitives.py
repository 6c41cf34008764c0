"""Primitives of batchax around operations of any kind, in every way, against the loop.

Since 0.12 JAX describes some operations (`jnp.searchsorted`, `jnp.nonzero`, ...) by objects, which
authors of libraries could do before. What holds such a "high" operation has to say how it is
replaced, before anything else is lowered.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax import _compat
from batchax.contractions.contracted import outer_product_sum_p
from batchax.custom_rules.own_derivatives import linear_with_transpose
from batchax.execution.gathered_lanes import put
from batchax.execution.slices import with_derivative_of
from batchax.kernel.impl_programs import impl_program_p
from batchax.kernel.own_primitive import declared
from batchax.rows.dynamic_sizes import found_switch_p
from batchax.rows.index import row_places
from batchax.rows.padded_rules.own_steps import Steps, run_own_steps
from batchax.rows.places_where import places_where
from batchax.rows.row_rules import call_later
from batchax.rows.segments import reduced_rows_p
from batchax.rows.sizes import found_places_p
from batchax.rules.calls import in_turn
from batchax.rules.contraction import thin_product_p
from batchax.rules.in_place import some_active_p
from batchax.rules.reductions import short_reduction_p
from batchax.rules.sorting_by_image import sorted_floats_p
from batchax.rules.sorting_network import sorted_rows_p

from support.high_operations import OLD, cube
from support.operations import operations
from support.oracle import same

TABLE = np.linspace(0.0, 4.0, 5, dtype=np.float32)
X = np.linspace(0.3, 2.1, 3, dtype=np.float32)
SQUARE = np.array([[1, 2], [3, 5]], np.float32)
# Where two rows of 2 and of 3 numbers are.
ROWS = [np.array(x, np.int32) for x in ([0, 2], [2, 3], [0, 0, 1, 1, 1])]


def root(x):
    """The square root of 1 + x, found."""
    solve = lambda f, guess: lax.fori_loop(0, 8, lambda _, r: r - f(r) / (2 * r), guess)
    return lax.custom_root(
        lambda r: r * r - 1 - x, 1 + x, solve, lambda g, y: y / g(jnp.ones_like(y))
    )


# Functions of a number, which is about 1. With JAX 0.12 each holds a high operation, one of each
# kind that JAX has: `interp`, `histogram`, `digitize`, `unique`, `argwhere` are made of these.
HIGH = {
    "of an author's": lambda x: 0.1 * cube(x),
    "searchsorted": lambda x: x * jnp.searchsorted(TABLE, x),
    "interp": lambda x: jnp.interp(x, TABLE, TABLE * TABLE),
    "nonzero": lambda x: x * jnp.nonzero(x < TABLE, size=3)[0].sum(),
    "ldexp": lambda x: jnp.ldexp(x, 2),
    "frexp": lambda x: jnp.frexp(x)[0],
    "root": root,
}


def small(x):
    """Of about 1 again, with the kinds of high operations that there are on each version of JAX."""
    return 0.3 * cube(jnp.sin(x)) + 0.2 * jnp.searchsorted(TABLE, x)


def diverging(f, loop):
    """A loop that takes another number of steps for each example, and the same as a plain loop."""
    return lambda x: loop(lambda c: c[0] < 1 + x, lambda c: (c[0] + 1, c[1] + f(c[1])), (0.0, x))[1]


def taken(cond, body, carry, most=4):
    def step(_, carry):
        return jax.tree.map(functools.partial(jnp.where, cond(carry)), body(carry), carry)

    return lax.fori_loop(0, most, step, carry)


def bounded(cond, body, carry, **options):
    return bx.bounded_while(cond, body, carry, 4, **options)


def by_rule(f):
    @bx.custom_vmap
    def called(x):
        return f(x)

    called.def_vmap(lambda axis_size, in_batched, x: (jax.vmap(f)(x), True))
    return called


def by_impl(f):
    """`f` as a primitive of a library whose `impl` it is."""

    def called(x):
        program = jax.make_jaxpr(f)(x)
        return impl_program_p.bind(x, program=program, of=program)[0]

    return called


def steps(f, **options):
    step = lambda c, t: (f(c) + t, c)
    scan = bx.scan(step, **options) if options else functools.partial(lax.scan, step)
    return lambda x: scan(x, x * TABLE[:2])[0]


def along_columns(f):
    """As `steps`, over an array whose columns are the entries."""
    step = lambda c, t: (f(c) + t[0], c)
    return lambda x: bx.scan(step, 1, 0)(x, x * TABLE[None, :2])[0]


def either(f):
    return lambda x: lax.cond(x > 1, lambda x: f(x) / x, f, x)


def loud(f):
    """`f`, with a call of the host where its values are computed."""

    @jax.custom_jvp
    def called(x):
        jax.debug.callback(lambda x: None, x)
        return f(x)

    called.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return lambda x: lax.cond(x > 1, called, f, x)


def gradient(f):
    return lambda x: jax.grad(f)(x)


def derivatives_of(name, f):
    """Of some primitives `AROUND` has derivatives already, and a `while` has none in reverse."""
    if name == "reverse_sweep":
        return []
    if name == "divergent_loop":
        return [lambda xs: jax.jvp(f, (xs,), (jnp.cos(xs),))[1]]
    return [lambda xs: jax.grad(lambda xs: (f(xs) * jnp.cos(xs)).sum())(xs)]


COMPACT = {"divergence": bx.Compact(width=2)}
SILENT = {"progress": lambda done, total: None}
FACTORS = TABLE[1:4]


def each(f, mapped=lax.map):
    """The sum over a few numbers, of a loop over them if nothing else is said."""
    if mapped is lax.map:
        mapped = lambda f: functools.partial(lax.map, f)
    return lambda x: mapped(f)(x * FACTORS).sum()


def factored(f):
    """`f` of a number that is what it was before its square was factored, with many others."""

    def of_root(x):
        root = jnp.linalg.cholesky(jnp.diag(jnp.stack([x * x, f(x)])))
        return f(root[0, 0]) * root[1, 1] ** 2

    return of_root


def together(f):
    """`f` of a number, as one of many lanes."""
    return lambda x: bx.vmap(f)(jnp.broadcast_to(x, (512,))).mean()


def drawing(f):
    """`f` times a number that is drawn with a key of the lane's own."""

    def drawn(x):
        key = jax.random.wrap_key_data(jnp.stack([lax.convert_element_type(x, np.uint32)] * 2))
        return f(x) * jax.random.uniform(jax.random.fold_in(jax.random.split(key)[1], 3))

    return drawn


def sorting(f, sort=jnp.sort):
    """`f` times a number that depends on the order of others."""
    return lambda x: f(x) * sort(jnp.stack([x, 2 - x, x * x])) @ FACTORS


def sorting_with(f, sort):
    """`f` times numbers that are sorted by others."""

    def sorted_by_others(x):
        keys = x * jnp.array([1.0, 2.0, -1.0])
        return sort((keys, f(x) * jnp.arange(3.0)), num_keys=1)[1] @ jnp.array([1.0, -1.0, 3.0])

    return sorted_by_others


def with_found_sizes(f):
    """`f` as what follows from a size that is found: of one element at most, or of two."""

    def found(x):
        program = _compat.stage(lambda x: [f(x)], [jax.typeof(x)])
        count = lax.convert_element_type(x > 1, np.int32)[None]
        return found_switch_p.bind(count, x, programs=(program,) * 2, bounds=((0,), (1,)))[0]

    return found


# For each primitive, of a function of a number: a function with the primitive around that one or
# beside it, and the same without.
def in_steps(f, run=lambda scan, loop, values: scan(*values)):
    """A function applied twice, by a scan or a loop."""
    scan = lambda x: [lax.scan(lambda x, _: (f(x), None), x, length=2)[0]]
    step = lambda state: (state[0] + 1, f(state[1]))
    loop = lambda x: [lax.while_loop(lambda state: state[0] < 2, step, (0, x))[1]]
    return lambda x: run(scan, loop, [x])[0]


def own_steps(scan, loop, values):
    taking = lambda f: lambda _, values: f(*values)
    return run_own_steps(taking(scan), taking(loop), Steps(0, 2, values), values, 2)


AROUND = {
    "chunk_loop": lambda f: (each(f, functools.partial(bx.vmap, batch_size=2)), each(f)),
    "divergent_loop": lambda f: (
        each(diverging(f, lax.while_loop), functools.partial(bx.vmap, **COMPACT)),
        each(diverging(f, lax.while_loop)),
    ),
    "bounded_loop": lambda f: (diverging(f, bounded), diverging(f, taken)),
    "reverse_sweep": lambda f: (gradient(diverging(f, bounded)), gradient(diverging(f, taken))),
    "custom_batched_call": lambda f: (by_rule(f), f),
    "impl_program": lambda f: (by_impl(f), f),
    "linear_with_transpose": lambda f: (
        lambda x: linear_with_transpose(
            *[lambda r, x: [f(r[0]) * x[0]]] * 2, [lax.stop_gradient(x)], [x]
        )[0],
        lambda x: f(lax.stop_gradient(x)) * x,
    ),
    "tell_progress": lambda f: (
        each(f, functools.partial(bx.vmap, batch_size=100, **SILENT)),
        each(f),
    ),
    "scan_steps": lambda f: (along_columns(f), steps(f)),
    "progress_back": lambda f: (steps(f, **SILENT), steps(f)),
    "follow": lambda f: (lambda x: with_derivative_of(f(x), f(x)), f),
    "call_later": lambda f: (lambda x: call_later(lambda x: [f(x)], [jax.typeof(x)], x)[0], f),
    "found_places": lambda f: (
        lambda x: f(x) * found_places_p.bind(x < TABLE, size=2, limit=None, called="")[0],
        lambda x: f(x) * jnp.argmax(x < TABLE),
    ),
    "found_switch": lambda f: (with_found_sizes(f), f),
    "places_where": lambda f: (
        lambda x: f(x) * places_where(x < TABLE, 2)[0][0],
        lambda x: f(x) * jnp.argmax(x < TABLE),
    ),
    "row_places": lambda f: (
        lambda x: f(x) * row_places((x + TABLE[:2]).astype(np.int32), 4, 3)[1].sum(),
        lambda x: f(x) * jnp.minimum((x + TABLE[:2]).astype(np.int32).sum(), 4),
    ),
    "own_steps": lambda f: (in_steps(f, own_steps), in_steps(f)),
    "reduced_rows": lambda f: (
        lambda x: reduced_rows_p.bind(x * TABLE + f(x), *ROWS, kind="reduce_sum", in_full=True)[1],
        lambda x: (x * TABLE[2:] + f(x)).sum(),
    ),
    "in_turn": lambda f: (lambda x: in_turn([f(x)], [f(2 * x)])[1][0], lambda x: f(2 * x)),
    "safe_lanes": lambda f: (each(either(f), bx.vmap), each(either(f))),
    "lane_calls": lambda f: (each(loud(f), bx.vmap), each(f)),
    "some_active": lambda f: (
        lambda x: x * some_active_p.bind(x > 1, f(x) > 0),
        lambda x: x * ((x > 1) & (f(x) > 0)),
    ),
    "summed": lambda f: (lambda x: outer_product_sum_p.bind(f(x), x, terms=()), f),
    "small_matrices": lambda f: (together(factored(f)), lambda x: f(x) * f(x)),
    "thin_product": lambda f: (
        lambda x: thin_product_p.bind(jnp.stack([x, f(x)]), x * SQUARE, precision=None).sum(),
        lambda x: (jnp.stack([x, f(x)]) @ (x * SQUARE)).sum(),
    ),
    "short_reduction": lambda f: (
        lambda x: short_reduction_p.bind(x * TABLE + f(x), of="reduce_max", over=(0,)),
        lambda x: jnp.max(x * TABLE + f(x)),
    ),
    "sorted_floats": lambda f: (
        each(sorting(f, functools.partial(sorted_floats_p.bind, dimension=0)), bx.vmap),
        each(sorting(f)),
    ),
    "sorted_rows": lambda f: (
        sorting_with(
            f,
            lambda xs, num_keys: sorted_rows_p.bind(
                *xs, dimension=0, num_keys=num_keys, is_stable=True
            ),
        ),
        sorting_with(f, lax.sort),
    ),
    "put": lambda f: (
        lambda x: put(jnp.stack([x, x]), jnp.stack([f(x), x]), np.array([1, 4], np.int32), 0)[1],
        f,
    ),
    "drawn": lambda f: (each(drawing(f), bx.vmap), each(drawing(f))),
}


WAYS = {
    "jax.vmap": jax.vmap,
    "in chunks": functools.partial(bx.vmap, batch_size=2),
    "compact in chunks": functools.partial(bx.vmap, batch_size=2, **COMPACT),
    "one by one": lambda f: lambda xs: jnp.stack([f(x) for x in xs[:1]]),
}
NESTED = {
    "jax.vmap of chunks": lambda f: jax.vmap(bx.vmap(f, batch_size=2)),
    "vmap of compact": lambda f: bx.vmap(bx.vmap(f, **COMPACT)),
}


def test_every_primitive_has_a_case():
    assert {p.name for p in declared()} == set(AROUND)


def in_ways(name, fun, ways, nested):
    def compute(xs, pairs):
        results = {way: WAYS[way](fun)(xs) for way in ways}
        results |= {way: NESTED[way](fun)(pairs)[1, ::-1] for way in nested}
        return results, [d(xs) for d in derivatives_of(name, WAYS["in chunks"](fun))]

    return compute


@pytest.mark.parametrize("name", AROUND)
def test_programs_have_it(name):
    compute = in_ways(name, AROUND[name](small)[0], WAYS, NESTED)
    assert name in operations(compute, X, np.stack([X, X]))


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.each_commit(5, "lane_calls-0")
def test_in_every_way(name, half):
    fun, reference = AROUND[name](small)
    xs, pairs = jnp.asarray(X), jnp.stack([X, X[::-1]])
    compute = in_ways(name, fun, [*WAYS][half::2], [*NESTED][half::2])
    loop = functools.partial(lax.map, reference)
    got, derivatives, expected, theirs = jax.jit(
        lambda xs, pairs: (
            *compute(xs, pairs),
            loop(xs),
            [d(xs) for d in derivatives_of(name, loop)],
        )
    )(xs, pairs)
    same(derivatives, theirs)
    got["at once"] = fun(xs[0])[None]
    got["at once, in chunks"] = bx.vmap(fun, batch_size=2, **COMPACT)(xs)
    for way, value in got.items():
        same(value, expected[: len(value)], where=f"{way}: ")


def test_around_every_operation():
    loops = {kind: diverging(f, lax.while_loop) for kind, f in HIGH.items()}
    all_of = lambda x: {kind: loop(x) for kind, loop in loops.items()}
    batched = bx.vmap(all_of, batch_size=2, **COMPACT)
    expected, got = jax.jit(lambda xs: (lax.map(all_of, xs), batched(xs)))(X)
    same(got, expected)
    same(batched(X), expected)  # outside of `jit`
    if OLD is None:
        for kind, f in HIGH.items():
            high = operations(f, X[0])
            assert "call_hi_primitive" in high, kind
