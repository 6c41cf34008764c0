"""What a loop carries and nothing reads is neither batched, nor moved or written for each lane."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.forced import ALONE, FORCED, KERNELS, LAST

LANES = 256


def solve(x, other=0.0):
    """A loop with a record that no step reads, and one that its predicate does."""

    def step(state):
        k, y, record, seen = state
        y = y - (y * y - x) / (2 * y)
        return k + 1, y, record.at[k % 7].set(y + other), jnp.maximum(seen, jnp.abs(y * y - x))

    start = jnp.int32(0), x + 1, jnp.zeros(7, x.dtype) + 0 * x, 0 * x
    going = lambda state: (jnp.abs(state[1] ** 2 - x) > 1e-4 * x) & (state[0] < 30)
    return lax.while_loop(going, step, start)


def data(dtype=np.float32):
    return jnp.asarray(np.geomspace(0.1, 1e5, LANES), dtype)


WAYS = pytest.mark.parametrize(
    "divergence",
    [FORCED, LAST, KERNELS, ALONE, "compact"],
    ids=["window", "last", "tiles", "alone", "compact"],
)
RECORDS = re.compile(rf"f32\[(\d+,)?{LANES},7")  # in a compiled program


@WAYS
def test_what_is_not_read_is_not_carried(divergence):
    batched = bx.vmap(solve, divergence=divergence)
    some = jax.jit(lambda x: batched(x)[1]).lower(data()).compile()
    every = jax.jit(batched).lower(data()).compile()
    assert RECORDS.search(every.as_text())
    assert not RECORDS.search(some.as_text())


@pytest.mark.each_commit(5)
@WAYS
@pytest.mark.parametrize("read", [[1], [2], [0, 3]])
def test_results_are_those_of_all(read, divergence):
    batched = bx.vmap(solve, in_axes=(0, None), divergence=divergence)
    some = jax.jit(lambda x, y: [batched(x, y)[k] for k in read])(data(), 0.25)
    each = jax.jit(lambda x: lax.map(lambda x: solve(x, 0.25), x))(data())
    for got, k in zip(some, read, strict=True):
        np.testing.assert_allclose(got, each[k], rtol=2e-5, atol=1e-4)


@WAYS
def test_a_loop_of_which_nothing_is_read_is_gone(divergence):
    batched = bx.vmap(solve, divergence=divergence)
    unread = jax.jit(lambda x: (batched(x), x + 1)[1]).lower(data()).compile()
    assert " while(" not in unread.as_text()


@pytest.mark.each_commit(2)
@WAYS
def test_a_callback_in_a_step_is_made_though_nothing_is_read(divergence):
    if divergence == "compact":
        divergence = "auto"  # refuses callbacks
    seen = []

    def noisy(x):
        def step(y):
            jax.debug.callback(lambda v: seen.append(float(v)), y)
            return y * 2

        return lax.while_loop(lambda y: y < 4, step, x)

    jax.jit(lambda x: (bx.vmap(noisy, divergence=divergence)(x), x)[1])(jnp.asarray([1.0, 3.0]))
    jax.effects_barrier()
    assert sorted(seen) == [1.0, 2.0, 3.0]


@pytest.mark.each_commit(2)
@WAYS
def test_derivatives_of_what_is_read(divergence):
    batched = bx.vmap(lambda x: solve(x)[1], divergence=divergence)
    _, tangents = jax.jit(lambda x: jax.jvp(batched, (x,), (jnp.ones_like(x),)))(data())
    of_one = lambda x: jax.jvp(lambda x: solve(x)[1], (x,), (jnp.ones_like(x),))[1]
    own = jax.jit(lambda x: lax.map(of_one, x))(data())
    np.testing.assert_allclose(tangents, own, rtol=1e-3)


@pytest.mark.each_commit(2)
@WAYS
def test_in_both_orders_with_jax_vmap(divergence):
    apart = functools.partial(bx.vmap, divergence=divergence)
    x = jnp.stack([data(), data()[::-1]])
    expected = jax.vmap(jax.vmap(lambda x: solve(x)[1]))(x)
    for outer, inner in [(jax.vmap, apart), (apart, jax.vmap), (apart, apart)]:
        got = jax.jit(lambda x, outer=outer, inner=inner: outer(inner(solve))(x)[1])(x)
        np.testing.assert_allclose(got, expected, rtol=2e-5)


@pytest.mark.each_commit(2)
@WAYS
def test_traced_with_double_precision_and_lowered_without(divergence):
    with jax.enable_x64(True):
        x = data(np.float64)
        traced = jax.jit(lambda x: bx.vmap(solve, divergence=divergence)(x)[1]).trace(x)
        expected = jax.jit(lambda x: lax.map(lambda x: solve(x)[1], x))(x)
    with jax.enable_x64(False):
        compiled = traced.lower().compile()
    with jax.enable_x64(True):
        got = compiled(x)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.each_commit(2)
@WAYS
def test_over_devices_and_exported(divergence):
    kind = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("d",), axis_types=kind, devices=jax.devices()[:2])
    batched = lambda x: bx.vmap(solve, divergence=divergence)(x)[1]
    spread = jax.shard_map(batched, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    expected = jax.jit(lambda x: lax.map(lambda x: solve(x)[1], x))(data())
    np.testing.assert_allclose(jax.jit(spread)(data()), expected, rtol=2e-5)
    exported = jax.export.export(jax.jit(batched))(data())
    np.testing.assert_allclose(exported.call(data()), expected, rtol=2e-5)


def nested(x, other=1.0):
    """Loops in loops that carry a record, and results that hold it; see `INSIDE`."""

    def step(carry, other):
        y, record = carry
        _, y, record, _ = solve_from(y + other, record)
        return (y, record), (y, record[0])

    def solve_from(y, record):
        def once(state):
            k, z, record, seen = state
            z = z - (z * z - y) / (2 * z)
            return k + 1, z, record.at[k % 7].set(z + record[1]), seen + record[2]

        going = lambda state: (jnp.abs(state[1] ** 2 - y) > 1e-4 * y) & (state[0] < 30)
        return lax.while_loop(going, once, (jnp.int32(0), y + 1, record, 0 * y))

    others = (other * jnp.arange(1.0, 4.0)).astype(x.dtype)
    (y, record), (ys, firsts) = lax.scan(step, (x, jnp.full(7, x)), others)
    return y + ys.sum(), record, firsts


def with_rule(x, rate):
    """`nested` in a function whose derivative is a rule."""
    run = jax.custom_jvp(nested)

    @run.defjvp
    def _(primals, tangents):
        out = run(*primals)
        return out, jax.tree.map(lambda y: rate * tangents[0] + 0 * y, out)

    return run(x, 1.0)


INSIDE = {
    "scan": lambda x, p: nested(x),
    "call": lambda x, p: jax.jit(nested)(x),
    "branch": lambda x, p: lax.cond(p > 1, nested, lambda x: nested(2 * x), x),
    "rule": lambda x, p: with_rule(x, 2.0),
    "rule that closes over": lambda x, p: with_rule(x, jnp.sin(p)),
}


@WAYS
@pytest.mark.parametrize("inside", INSIDE)
def test_loops_inside_carry_what_is_read(inside, divergence):
    one = lambda x, p: INSIDE[inside](x, p)[0]
    batched = bx.vmap(one, divergence=divergence)
    x = data()
    kept = re.search(r"f32\[(\d+,)?7\]", str(jax.make_jaxpr(batched)(x, x)))
    # A rule that closes over values is left as it is.
    assert bool(kept) == (inside == "rule that closes over")
    both = lambda f: lambda x, p: jax.jvp(lambda x: f(x, p), (x,), (jnp.ones_like(x),))
    own = jax.jit(lambda x: lax.map(lambda x: both(one)(x, x), x))(x)
    for got, expected in zip(jax.jit(both(batched))(x, x), own, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3)
    np.testing.assert_allclose(batched(x, x), own[0], rtol=1e-3)


def test_chunks_do_not_carry_it_either():
    some = bx.vmap(lambda x: solve(x)[1], batch_size=64, divergence="compact")
    assert not re.search(r"f32\[(\d+,)?7\]", str(jax.make_jaxpr(some)(data())))


def passed_on(x, reads=lambda tangents: tangents[1]):
    """A loop with its own reverse rule, whose carry passes through a function with a rule.

    Equinox and diffrax write loops like that. The rule reads all values; `reads` is its tangent.
    """

    @jax.custom_vjp
    def run(x):
        return solve(x)

    def backward(x, cotangents):
        return (0.5 * cotangents[1] / jnp.sqrt(x),)

    run.defvjp(lambda x: (run(x), x), backward)

    @jax.custom_jvp
    def identity(x, carry):
        return carry

    @functools.partial(identity.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        return primals[1], reads(tangents)

    return identity(x, run(x))


def read_of(x):
    return passed_on(x)[1]


@WAYS
def test_a_rule_reads_what_the_value_does_not(divergence):
    batched = bx.vmap(read_of, divergence=divergence)
    some = jax.jit(batched).lower(data()).compile()
    assert not RECORDS.search(some.as_text())
    all_read = jax.jit(lambda x: bx.vmap(passed_on, divergence=divergence)(x)[1])
    np.testing.assert_allclose(all_read(data()), some(data()), rtol=1e-6)
    own = jax.jit(lambda x: lax.map(read_of, x))(data())
    np.testing.assert_allclose(some(data()), own, rtol=2e-5)
    np.testing.assert_allclose(batched(data()), own, rtol=2e-5)


@pytest.mark.each_commit(2)
@WAYS
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_its_derivatives_are_those_of_the_rules(around, divergence):
    batched = around(bx.vmap(read_of, divergence=divergence))
    one = lambda x: lax.map(jax.grad(read_of), x)
    total = lambda x: batched(x).sum()
    np.testing.assert_allclose(jax.jit(jax.grad(total))(data()), jax.jit(one)(data()), rtol=1e-5)
    inside = bx.vmap(jax.grad(read_of), divergence=divergence)
    np.testing.assert_allclose(jax.jit(inside)(data()), jax.jit(one)(data()), rtol=1e-5)
    chunked = jax.jit(bx.vmap(read_of, divergence=divergence, batch_size=100))
    np.testing.assert_allclose(chunked(data()), batched(data()), rtol=1e-6)


@pytest.mark.each_commit(2)
@WAYS
def test_a_rule_that_raises_does_so_still(divergence):
    def reads(tangents):
        raise RuntimeError("cannot be differentiated")

    batched = jax.jit(bx.vmap(lambda x: passed_on(x, reads)[1], divergence=divergence))
    batched(data())
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        jax.jvp(batched, (data(),), (data(),))
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        jax.grad(lambda x: batched(x).sum())(data())


@pytest.mark.each_commit(2)
@WAYS
def test_a_rule_may_use_values_that_are_not_read(divergence):
    def of_one(x):
        @jax.custom_jvp
        def pick(carry, scale):
            return carry[1]

        @pick.defjvp
        def _(primals, tangents):
            (k, y, record, _), _ = primals
            return y, tangents[1] * record.sum() * k

        return pick(solve(lax.stop_gradient(x)), x)

    batched = bx.vmap(of_one, divergence=divergence)
    both = lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))
    own = jax.jit(lambda x: lax.map(both(of_one), x))(data())
    for around in (jax.jit, lambda f: f):
        for got, expected in zip(jax.jit(both(around(batched)))(data()), own, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-4)
    reverse = jax.jit(jax.grad(lambda x: jax.jit(batched)(x).sum()))(data())
    np.testing.assert_allclose(reverse, own[1], rtol=1e-4)


@pytest.mark.each_commit(2)
@WAYS
def test_rules_in_both_orders_with_jax_vmap(divergence):
    apart = functools.partial(bx.vmap, divergence=divergence)
    x = jnp.stack([data(), data()[::-1]])
    expected = jax.vmap(jax.vmap(read_of))(x)
    slopes = jax.vmap(jax.vmap(jax.grad(read_of)))(x)
    for outer, inner in [(jax.vmap, apart), (apart, jax.vmap), (apart, apart)]:
        got = jax.jit(outer(jax.jit(inner(read_of))))
        np.testing.assert_allclose(got(x), expected, rtol=2e-5)
        reverse = jax.jit(jax.grad(lambda x, got=got: got(x).sum()))(x)
        np.testing.assert_allclose(reverse, slopes, rtol=1e-5)


@pytest.mark.each_commit(2)
@WAYS
def test_a_value_of_all_lanes_whose_derivative_is_of_one(divergence):
    """It has a batch axis where the rule needs one, and else none, as without loops."""

    def of_one(x, shared):
        @jax.custom_jvp
        def first(carry, other):
            return other

        first.defjvp(lambda p, t: (p[1], t[0][1]))
        return solve(x)[1], first(solve(x), shared), 2 * shared, 1.0, x

    batched = bx.vmap(of_one, in_axes=(0, None), out_axes=bx.AUTO, divergence=divergence)
    got = jax.jit(batched)(data(), 3.0)
    assert [x.shape for x in got] == [(LANES,), (LANES,), (), (), (LANES,)]
    _, tangents = jax.jvp(lambda x: jax.jit(batched)(x, 3.0), (data(),), (jnp.ones(LANES),))
    np.testing.assert_allclose(tangents[1], tangents[0], rtol=1e-6)


@pytest.mark.each_commit(1)
@pytest.mark.parametrize("lanes", [200])
def test_forward_mode_where_the_last_lanes_run_alone(lanes):
    """XLA ended the process: nothing read the tangent of an operand of the single kernel."""
    diffrax = pytest.importorskip("diffrax")

    def decay(rate):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, rate: -rate * y),
            *(diffrax.Tsit5(), 0.0, 2.0, 0.1, jnp.float32(1)),
            args=rate,
            stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-4),
            adjoint=diffrax.ForwardMode(),
        ).ys[0]

    rates = jnp.asarray(np.geomspace(0.3, 5, lanes), np.float32)
    slope = lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1]
    got = jax.jit(slope(bx.vmap(decay)))(rates)
    own = jax.jit(lambda x: lax.map(slope(decay), x))(rates)
    np.testing.assert_allclose(got, own, rtol=1e-3, atol=1e-5)
