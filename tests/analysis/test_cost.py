"""What equations cost, against XLA's own analysis of the same program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

import batchax as bx
from batchax.analysis.cost import Cost, cost_of_equation, cost_of_program, reading_symbols
from batchax.analysis.inner import integers_in, programs_in
from benchmarks.workloads import WORKLOADS

LANES = 4
X = jnp.linspace(0.1, 1.0, 24, dtype=jnp.float32).reshape(4, 6)


# --- against XLA -------------------------------------------------------------------------------


def analysis(program):
    """XLA's flops, transcendentals and bytes of a staged program, before it is optimised."""
    lowered = jax.jit(jaxpr_as_fun(program)).lower(*program.in_avals)
    found = lowered.cost_analysis() or {}
    names = ("flops", "transcendentals", "bytes accessed")
    return np.array([max(0.0, found.get(name, 0.0)) for name in names])


def by_xla(program):
    """The same, with the body of a loop as often as it runs: XLA counts it once."""
    return analysis(program) + more_than_once(program, integers_in(program))


def more_than_once(program, integers):
    total = np.zeros(3)
    for eqn in program.eqns:
        for inner in programs_in(eqn, integers):
            closed = ClosedJaxpr(inner.jaxpr, ()) if hasattr(program, "jaxpr") else inner.jaxpr
            again = more_than_once(closed, inner.integers)
            if inner.role == "body" and inner.times != 1:
                again = again * (inner.times or 1) + analysis(closed) * ((inner.times or 1) - 1)
            total += again
    return total


CONTRACTIONS, ELSEWHERE = (0.98, 1.02), (0.8, 1.25)
OPAQUE = "XLA sees calls of LAPACK, which it counts as nothing or as one operation a number"
SEARCH = "the loop is inside a primitive in JAX 0.12; XLA counts a pass"
TOTALS = "XLA adds up each total again, as it would a window"
LGAMMA = OPAQUE + "; JAX 0.12 has a longer series for lgamma"
THREEFRY = "XLA counts one of the five groups of rounds of threefry, which are a loop"
OF_DIMENSION = "XLA takes the logarithm of all elements, not of those that are sorted together"
DEAD = "JAX removes dead code when it lowers a program"
EXCEPTIONS = {
    "per example gradients": (CONTRACTIONS, DEAD),
    "function with custom jvp": ((1.0, 1.4), DEAD),
    "cholesky solve": ((4, 6), OPAQUE),
    "general solve": ((9, 12), OPAQUE),
    "symmetric eigenvalues": ((30, 45), OPAQUE),
    "qr and singular values": ((50, 75), OPAQUE),
    "triangular solve with shared matrix": (None, OPAQUE),
    "triangular solve with own matrix": ((1.5, 2.5), OPAQUE),
    "mixture density": ((1.4, 2.0), LGAMMA),
    "kalman filter": ((0.9, 2.5), OPAQUE),
    "distances of points": ((0.75, 1.25), "XLA counts what begins a sum of a few terms"),
    "random numbers shared by lanes": ((1.5, 3.5), THREEFRY),
    "sort and argsort": ((0.4, 1.0), OF_DIMENSION),
    "sort by two keys": ((0.75, 1.0), OF_DIMENSION),
    "take along own order": ((0.6, 1.0), OF_DIMENSION),
    "running totals": ((0.01, 0.05), TOTALS),
    "interpolation in a shared table": ((0.9, 4.0), SEARCH),
    "spectral filter": ((0.2, 0.5), "XLA counts log2 n of each dimension multiplied, not added"),
}
# Broadcasts of a scalar are operations of their own to XLA, and a reshape is one that copies.
BYTES = (0.35, 1.6)
BYTES_OF = {
    "sort and argsort": ((0.1, 2.0), "on a CPU, XLA counts both branches of a sort of floats"),
    "per example gradients": ((1.0, 2.5), DEAD),
    "cholesky solve": ((1.0, 2.5), OPAQUE),
    "triangular solve with shared matrix": ((1.0, 7.0), OPAQUE),
    **{
        f"random {name}": ((0.03, 0.2), "XLA runs threefry unfused, here it is one operation")
        for name in ("normals per lane", "choices per lane", "numbers shared by lanes")
    },
}
CONTRACTS = frozenset(["dot_general", "conv_general_dilated"])


def primitives(program):
    for eqn in program.eqns:
        yield eqn.primitive.name
        for inner in programs_in(eqn):
            yield from primitives(inner.jaxpr)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.each_commit(12)
def test_workloads_cost_what_xla_counts(name):
    workload = WORKLOADS[name]
    program = jax.make_jaxpr(workload.batched_by(bx.vmap))(*workload.data(LANES))
    cost = cost_of_program(program)
    flops, transcendentals, moved = by_xla(program)
    usual = CONTRACTIONS if CONTRACTS & set(primitives(program)) else ELSEWHERE
    bounds, reason = EXCEPTIONS.get(name, (usual, ""))
    if bounds is not None:
        assert bounds[0] * flops <= cost.flops <= bounds[1] * flops, cost.flops / flops
    if reason not in (DEAD, LGAMMA, TOTALS):
        assert cost.transcendentals == pytest.approx(transcendentals, rel=0.1)
    low, high = BYTES_OF.get(name, (BYTES, ""))[0]
    assert low * moved <= cost.bytes <= high * moved, cost.bytes / moved


# --- one equation at a time --------------------------------------------------------------------


def cost(fun, *args):
    return cost_of_program(jax.make_jaxpr(fun)(*args))


SQUARE = jnp.eye(6) * 3
TEXTBOOK = [
    ("qr", lambda a: lax.linalg.qr(a, full_matrices=False), 4 * 2 * 6**3 / 3),
    ("svd", lambda a: lax.linalg.svd(a, compute_uv=False), 8 * 6**3 / 3),
    ("lu", lambda a: lax.linalg.lu(a)[0], 2 * 6**3 / 3),
    ("eigh", lambda a: lax.linalg.eigh(a, symmetrize_input=False)[0], 9 * 6**3),
    ("triangular solve", lambda a: lax.linalg.triangular_solve(a, a, left_side=True), 6**3),
    ("fft", lambda a: lax.fft(lax.complex(a, a), "FFT", (6,)), 5 * 36 * np.log2(6)),
    ("rfft", lambda a: lax.fft(a, "RFFT", (6,)), 2.5 * 36 * np.log2(6)),
    ("sort", lambda a: lax.sort(a, dimension=1), 36 * 3),
    ("cumsum", lambda a: lax.cumsum(a, axis=0), 36),
    ("power", lambda a: a**-5, 36 * 4),
    ("sum", lambda a: lax.reduce_sum_p.bind(a, axes=(0,), out_sharding=None), 30),
    ("transpose", lambda a: a.T, 0),
]


@pytest.mark.parametrize(("name", "fun", "flops"), TEXTBOOK, ids=[name for name, *_ in TEXTBOOK])
def test_operations_by_the_textbook(name, fun, flops):
    equations = jax.make_jaxpr(fun)(SQUARE).eqns
    assert max(cost_of_equation(eqn).flops for eqn in equations) == round(flops)


@pytest.mark.parametrize("padding", ["SAME", "VALID", [(2, 1), (0, 3)]])
@pytest.mark.parametrize("options", [{}, {"window_strides": (2, 3)}, {"lhs_dilation": (2, 1)}])
def test_convolutions_count_no_padding(padding, options):
    if isinstance(padding, str) and "lhs_dilation" in options:
        padding = [(0, 0), (1, 1)]
    options = {"window_strides": (1, 1), "rhs_dilation": (1, 2), "padding": padding, **options}
    program = jax.make_jaxpr(lambda x, k: lax.conv_general_dilated(x, k, **options))(
        jnp.ones((2, 3, 9, 8)), jnp.ones((4, 3, 3, 2))
    )
    assert cost_of_program(program).flops == analysis(program)[0]


def test_what_is_cut_or_written_counts_not_the_whole():
    x = jnp.zeros(1000, jnp.float32)
    assert cost(lambda i: lax.dynamic_slice(x, (i,), (10,)), 3).bytes < 200
    assert cost(lambda i: x.at[i].set(1.0, mode="promise_in_bounds"), 3).bytes < 200
    assert cost(lambda i: x[i], jnp.arange(3)).bytes < 400
    assert cost(lambda x: x.reshape(10, 100), x).bytes == 0


# --- programs inside equations -----------------------------------------------------------------


def step(_, x):
    return x * 2


BODY = Cost(flops=24, bytes=24 * 8 + 4)


def counting(start, bound, stride=1, test=lax.lt):
    def loop(x):
        return lax.while_loop(
            lambda s: test(s[0], jnp.int32(bound)),
            lambda s: (s[0] + stride, s[1] * 2),
            (jnp.int32(start), x),
        )[1]

    return loop


@jax.jit
def within_a_call(x):
    return jax.jit(lax.fori_loop, static_argnums=2)(jnp.int32(2), jnp.int32(7), step, x)


LOOPS = [
    ("scan", lambda x: lax.fori_loop(0, 7, step, x), 7),
    ("while", lambda x: lax.fori_loop(jnp.int32(0), jnp.int32(7), step, x), 7),
    ("in a call", within_a_call, 5),
    ("uneven", counting(0, 10, 3), 4),
    ("up to and with", counting(1, 10, test=lax.le), 10),
    ("the other way round", counting(0, 10, test=lambda i, n: n > i), 10),
    ("none", counting(10, 3), 0),
]


@pytest.mark.parametrize(("name", "fun", "times"), LOOPS, ids=[name for name, *_ in LOOPS])
def test_loops_that_count(name, fun, times):
    found = cost(fun, X)
    assert times * BODY.flops <= found.flops <= times * (BODY.flops + 3) + 2
    assert times * BODY.bytes <= found.bytes <= times * (BODY.bytes + 32) + 32
    assert not found.at_least


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: lax.fori_loop(0, jnp.int32(x[0, 0]), step, x),
        lambda x: lax.while_loop(lambda x: x[0, 0] < 5, lambda x: x * 2, x),
        counting(0, 10, -1),
    ],
)
def test_other_loops_cost_at_least_a_step(fun):
    found = cost(fun, X)
    assert found.at_least
    assert BODY.flops <= found.flops <= BODY.flops + 8
    assert cost(jax.jit(lambda x: fun(x) + 1), X).at_least


def test_of_branches_the_most_expensive_counts():
    found = cost(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, lambda x: x * 2 + 1, X), X)
    assert found.at_most
    assert (found.flops, found.transcendentals) == (2 * 24 + 2, 24)
    assert not cost(lambda x: lax.cond(x[0, 0] > 0, lambda x: x + 1, lambda x: x - 1, X), X).at_most


@jax.custom_vjp
def with_rule(x):
    return x * 2


with_rule.defvjp(lambda x: (x * 2, x), lambda x, g: (jnp.sin(x) * g,))


# --- of rows -----------------------------------------------------------------------------------


def test_sizes_of_rows_are_read_as_numbers():
    """Of a scan along the row, and of a convolution: once each counted one element."""
    kernel = jnp.ones((3, 6, 6))

    def f(x):
        y = lax.conv_general_dilated(
            x[None], kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )[0]
        return lax.scan(lambda h, e: (jnp.tanh(h + e), h), x[0], y)

    def cost(x):
        program = jax.make_jaxpr(f)(x)
        with reading_symbols(lambda dim: 20):
            return cost_of_program(program.jaxpr)

    (n,) = jax.export.symbolic_shape("n")
    of_rows, of_arrays = (cost(jax.ShapeDtypeStruct((k, 6), "float32")) for k in (n, 20))
    assert of_rows.transcendentals == of_arrays.transcendentals == 120
    assert of_arrays.flops - 20 < of_rows.flops <= of_arrays.flops + 20


def test_what_a_loop_carries_alike_for_all_lanes_is_no_lanes_share():
    """A Kalman filter: variances do not depend on what is observed."""

    def step(state, y):
        mean, variance = state
        gain = jnp.tanh(jnp.sin(jnp.cos(variance)))
        return (mean + gain * (y - mean), 1 - gain), mean

    program = jax.make_jaxpr(lambda ys: lax.scan(step, (0.0, 1.0), ys))(jnp.ones(10))
    all_of_it, share = (cost_of_program(program.jaxpr, differs=d) for d in (None, [True]))
    assert (all_of_it.transcendentals, share.transcendentals) == (30, 0)
