"""Masked lanes: no values, gradients or callbacks of theirs, and no waiting; each lane as alone."""

import functools

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.analysis.thresholds import TABLE
from batchax.divergence.runner import Runner
from batchax.rules.linalg import least_lanes
from batchax.rules.masking import safe_lanes

from support.oracle import agree, at_once, example, in_turn, same

# Each function is fine where x > 0; for other lanes it or its derivative is NaN or inf.
TRAPS = {
    "log": jnp.log,
    "sqrt": jnp.sqrt,
    "power": lambda x: x**1.5,
    "reciprocal": lambda x: 1 / x,
    "xlogx": lambda x: x * jnp.log(x),
    "norm": lambda x: jnp.linalg.norm(x * jnp.ones(2)),
    "arcsine": lambda x: jnp.arcsin(x / (1 + x)),
    "nan": lambda x: x * jnp.where(x > 0, 1.0, jnp.nan),
    "inner jit": lambda x: jax.jit(jnp.log)(x) * x,
    "inner scan": lambda x: lax.scan(
        lambda c, y: (c * y, c), jnp.sqrt(x), jnp.log(x) * jnp.ones(2)
    )[0],
}
POINTS = {
    "mixed": [0.5, 0.0, -1.0, 2.0],
    "first masked": [-jnp.inf, 2.0, 0.0, 0.25],
    "none": [0.0, -1.0, -jnp.inf, -0.5],
    "all": [0.5, 1.0, 2.0, 0.25],
}


@pytest.mark.parametrize("name", TRAPS)
def test_traps_reach_no_gradient(name):
    """Neither of the operand nor of a weight all lanes share, of first and second order."""
    trap = TRAPS[name]
    f = lambda x, w: lax.cond(x > 0, lambda: jnp.sum(trap(x) * w @ w), lambda: -x)

    def total(x, w, active):
        return jnp.where(jnp.isinf(x), 0.0, bx.vmap(f, in_axes=(0, None))(x, w)).sum()

    def untrapped(x, w, active):
        safe = jnp.where(active, x, 1.0)
        taken = jax.vmap(lambda x: jnp.sum(trap(x) * w @ w))(safe)
        return jnp.where(active, taken, jnp.where(jnp.isinf(x), 0.0, -x)).sum()

    w = example((2, 2))

    def everything(f, x, active):
        tangents = (x * 0 + 1.0, w)
        point = lambda x, w: f(x, w, active)
        gradient = jax.grad(point, (0, 1))
        return jax.jvp(point, (x, w), tangents), jax.jvp(gradient, (x, w), tangents)

    @jax.jit
    def both(x, active):
        values = bx.vmap(f, (0, None))(x, w), in_turn(f, (0, None))(x, w)
        return everything(total, x, active), everything(untrapped, x, active), values

    for points in POINTS.values():
        x = jnp.array(points)
        got, expected, values = jax.tree.map(np.asarray, both(x, x > 0))
        assert all(np.isfinite(y).all() for y in jax.tree.leaves(got[1])), points
        same(got, expected, dict(rtol=1e-4, atol=1e-4), str(points))
    same(*values)


# Functions whose derivative is the same everywhere: they need no protection.
LINEAR = [
    lambda x, w: x + w - 2 * x,
    lambda x, w: (x * 3.0 + w / 4.0).sum(),
    lambda x, w: jnp.maximum(x, w) - jnp.minimum(w, x),
    lambda x, w: lax.clamp(-1.0, x, 1.0) + jnp.clip(w, 0.0),
    lambda x, w: jnp.concatenate([x[::-1], w[1:], jnp.pad(x, 1)]),
    lambda x, w: jnp.cumsum(x) + w[jnp.array([2, 0, 0])],
    lambda x, w: w.at[jnp.array([1, 1])].add(x[:2]),
    lambda x, w: lax.dynamic_update_slice(w, lax.dynamic_slice(x, (1,), (2,)), (0,)),
    lambda x, w: jnp.where(x > 0, x, w) + jnp.where(w > x, 1.0, 2.0),
    lambda x, w: lax.complex(x, w).conj().real + lax.complex(w, x).imag,
    lambda x, w: lax.reduce_precision(x, 8, 7) + w.astype(jnp.bfloat16).astype(jnp.float32),
    lambda x, w: jax.jit(lambda x: jnp.stack([x, w]).reshape(3, 2).T)(x),
]


def test_linear_branches_are_safe_as_they_are():
    x = jnp.array([[1.0, -2.0, 0.5], [jnp.nan] * 3, [jnp.inf] * 3, [-jnp.inf, 0.0, jnp.nan]])
    p = jnp.array([True, False, False, False])

    def total(f):
        return lambda x, w: jnp.nansum(
            bx.vmap(lambda p, x, w: lax.cond(p, f, lambda x, w: 0 * f(w, w), x, w), (0, 0, None))(
                p, x, w
            )
        )

    w = jnp.array([0.25, -1.0, 3.0])
    programs = jax.make_jaxpr(lambda x, w: [total(f)(x, w) for f in LINEAR])(x, w)
    assert "safe_lanes" not in str(programs)

    def gradients(x, w):
        return [jax.grad(total(f), (0, 1))(x, w) for f in LINEAR]

    of_taken = lambda x, w: [jax.grad(lambda x, w: f(x[0], w).sum(), (0, 1))(x, w) for f in LINEAR]
    agree(gradients, of_taken, x, w)


@pytest.mark.parametrize(
    ("of_some", "value", "slope"), [(jnp.sin, np.sin(1.0), np.cos(1.0)), (jnp.log, 0.0, 1.0)]
)
def test_a_branch_that_shares_nothing_costs_nothing_unless_differentiated(of_some, value, slope):
    f = lambda x: lax.cond(x > 0, of_some, lambda x: x * x, x)
    x = jnp.array([1.0, -1.0, -0.0, jnp.nan])
    text = jax.jit(bx.vmap(f)).lower(x).as_text()
    assert "dynamic_slice" not in text
    inside, outside = bx.vmap(jax.grad(f)), jax.grad(lambda x: bx.vmap(f)(x)[:3].sum())
    forward = lambda x: jax.jvp(bx.vmap(f), (x,), (jnp.ones_like(x),))[1][:3]
    twice = lambda x: jax.jvp(inside, (x[:3],), (jnp.ones_like(x[:3]),))[0]
    of = [bx.vmap(f), lambda x: inside(x[:3]), lambda x: outside(x)[:3], forward, twice]
    values, *slopes = at_once(*of)(x)
    same(values, np.array([value, 1.0, 0.0, np.nan], x.dtype))
    for s in slopes:
        same(s, np.array([slope, -2.0, 0.0], x.dtype))


class Visits:
    """Counts how often a program gets to a place, `lanes` of them together."""

    def __init__(self, lanes):
        self.lanes = lanes
        self._seen = 0

    def __call__(self, x):
        def host(x):  # pure, so it is called for masked lanes, too, with what another one has
            self._seen += np.size(x)
            return np.asarray(x)

        return jax.pure_callback(host, jax.typeof(x), x, vmap_method="broadcast_all")

    @property
    def count(self):
        return self._seen / self.lanes


# Numbers to halve down to 1, and how many steps the longest takes.
LANES = [([3, 0, 1, 2], 1), ([0, 9, 0, 1], 3), ([0, 0, 0, 0], 0), ([4, 5, 6, 7], 2)]


@pytest.mark.parametrize("jit", [False, True])
def test_loop_in_a_branch_does_not_wait_for_lanes_that_did_not_take_it(jit):
    # From 0 the loop would never end (JAX issue 2947); here it gives up after 1000.
    visits = Visits(4)

    def f(n):
        def halve(n):
            return lax.while_loop(
                lambda c: (c[0] != 1) & (c[1] < 1000),
                lambda c: (visits(c[0]) // 2, c[1] + 1),
                (n, 0),
            )[1]

        return lax.cond(n > 0, halve, lambda n: -1, n)

    batched = jax.jit(bx.vmap(f)) if jit else bx.vmap(f)
    for lanes, steps in LANES:
        n = jnp.array(lanes)
        before = visits.count
        got = jax.block_until_ready(batched(n))
        assert visits.count - before == max(steps, 0)
        same(got, np.array([n.bit_length() - 1 for n in lanes], got.dtype))


# The primitive by itself.


@pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap])
@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0), (None, 1), (1, 2)])
@pytest.mark.parametrize("depth", [0, 1])
def test_lanes_of_two_axes_are_one_set(vmap, in_axes, depth):
    active = np.array([[False, False], [False, True], [True, False]])
    sizes = {
        (0, 0): (3, 2, 4),
        (0, None): (2, 4),
        (None, 0): (3, 2, 4),
        (None, 1): (2, 3, 4),
        (1, 2): (2, 4, 3),
    }
    x = example(sizes[in_axes])
    mask = {0: active, 1: active.T, None: active[1]}[in_axes[0]]
    got = jax.jit(vmap(functools.partial(safe_lanes, depth=depth), in_axes=in_axes))(mask, x)
    x = np.asarray(x)
    moved = np.broadcast_to(x, (3, 2, 4)) if in_axes[1] is None else np.moveaxis(x, in_axes[1], 0)
    if depth == 0:
        first = active.any(1)[:, None, None] if in_axes[0] is not None else True
        donor = moved[1] if in_axes[1] is not None else moved
        expected = np.where(first, moved, donor)
    else:
        both = active if in_axes[0] is not None else np.broadcast_to(active[1], (3, 2))
        donor = moved[1, 1] if in_axes[0] is not None else moved[:, 1:2]
        expected = np.where(both[:, :, None], moved, donor)
    same(got, expected)


def test_no_derivative_flows_through_masked_lanes():
    active, x = jnp.array([False, True, False]), example((3, 2))
    f = lambda x: safe_lanes(active, x, 1)
    g = lambda x: jnp.where(active[:, None], x, lax.stop_gradient(x[1]))
    t = example((3, 2), seed=1)
    both = lambda h: lambda x, t: (jax.jvp(h, (x,), (t,)), jax.vjp(h, x)[1](t))
    # A linear operand can be transposed, which stop_gradient cannot.
    transposed = lambda x, t: jax.linear_transpose(f, x)(t)
    ways = [both(h) for h in (g, f, jax.jit(f), jax.checkpoint(f))]
    *results, turned = at_once(*ways, transposed)(x, t)
    for got in results:
        same(got, results[0])
    same(turned, (np.where(active[:, None], t, np.zeros_like(t)),))
    shared = lambda w: safe_lanes(jnp.zeros(3, bool), w, 0)
    same(jax.grad(shared)(2.0), 0.0)


def test_loops_of_few_steps_need_no_other_operands():
    """What a counter ends soon may run in masked lanes; what ends on values may not."""

    def repeated(most):
        def run(x):
            going_on = lambda c: (c[0] < most) & (c[1] < 100.0)
            return lax.while_loop(going_on, lambda c: (c[0] + 1, c[1] * 2 + 1), (0, x))[1]

        with_rule = jax.custom_vjp(run)
        with_rule.defvjp(lambda x: (run(x), x), lambda x, g: (g,))
        return with_rule

    def loop(n, x, most):
        step = lambda c: (c[0] + 1, repeated(most)(c[1]) / 7)
        return lax.while_loop(lambda c: c[0] < n, step, (0, x))[1]

    n, xs = jnp.asarray([0, 3, 1, 7]), jnp.asarray(POINTS["mixed"])
    for most in (5, 1000):
        f = lambda n, x, most=most: loop(n, x, most)
        same(bx.vmap(f)(n, xs), in_turn(f, (0, 0))(n, xs), None, f"{most} steps")
        found = str(jax.make_jaxpr(bx.vmap(f))(n, xs))
        assert ("safe_lanes" in found) == (most == 1000)


LA = jnp.linalg
LANES_LANES_ALONE = 10_000
KINDS = 16  # of matrices, one after another, again and again


def matrices():
    """Of each kind a matrix, and the same symmetric, and one far from singular."""
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((KINDS, 3, 3))
    plain[1] = np.eye(3)
    plain[2] = 0
    plain[3, :, 1] = 2 * plain[3, :, 0]
    plain[4] = np.ones((3, 3))
    plain[5] = np.diag([1, 1, 2])
    plain[6] = np.diag([2, 0, 0])
    plain[7] = [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    plain[8] = [[2, -1, -1], [-1, 2, -1], [-1, -1, 2]]
    plain[9, 0, 0] = np.nan
    plain[10] *= 1e-6
    plain[11] *= 1e6
    plain[12, 2] = plain[12, 0]
    regular = rng.standard_normal((KINDS, 3, 3)) / 4 + 2 * np.eye(3)
    regular[9, 1, 2] = np.nan
    symmetric = plain + plain.swapaxes(1, 2)
    definite = regular @ regular.swapaxes(1, 2)
    return {"a": plain, "s": symmetric, "r": regular, "p": definite}


def gradient(f):
    return jax.grad(lambda *xs: sum(jnp.sum(x * jnp.cos(x)) for x in jax.tree.leaves(f(*xs))))


def complex_of(x):
    return lax.complex(x["s"], x["a"] - x["a"].T)


# Of whatever matrices, of which some have results that are not unique.
CHOICES = {
    "eigh": lambda x: LA.eigh(x["s"]),
    "eigh of upper": lambda x: LA.eigh(x["s"], UPLO="U")[1],
    "eigh of complex": lambda x: LA.eigh(complex_of(x)),
    "svd": lambda x: LA.svd(x["a"]),
    "svd, thin": lambda x: LA.svd(x["a"][:, :2], full_matrices=False),
    "svd, wide": lambda x: LA.svd(x["a"][:2]),
    "qr": lambda x: LA.qr(x["a"]),
    "qr, complete": lambda x: LA.qr(x["a"][:, :2], mode="complete")[0],
    "gradient of an eigenvector": gradient(lambda x: LA.eigh(x["s"])[1][0]),
}
# What is unique of whatever matrices, and so is computed together.
UNIQUE = {
    "eigvalsh": lambda x: LA.eigvalsh(x["s"]),
    "eigvalsh of complex": lambda x: LA.eigvalsh(complex_of(x)),
    "svdvals": lambda x: LA.svdvals(x["a"]),
    "norms": lambda x: (LA.norm(x["a"], 2), LA.norm(x["a"], "nuc")),
    "pinv": lambda x: LA.pinv(x["a"]),
    "det": lambda x: LA.det(x["a"]),
}
# Of matrices far from singular, of which rounding makes no more than rounding.
REGULAR = {
    "qr, upper": lambda x: LA.qr(x["r"], mode="r"),
    "lu": lambda x: jsl.lu(x["r"]),
    "solve": lambda x: LA.solve(x["r"], x["p"]),
    "cond": lambda x: LA.cond(x["r"]),
    "cholesky": lambda x: LA.cholesky(x["p"]),
    "solve_triangular": lambda x: jsl.solve_triangular(x["r"], x["p"], lower=True),
    "expm": lambda x: jsl.expm(x["r"]),
    "gradient of inv": gradient(lambda x: LA.inv(x["r"])),
    "gradient of slogdet": gradient(lambda x: LA.slogdet(x["p"])[1]),
}
FUNCTIONS = CHOICES | UNIQUE | REGULAR
PARTS = 4


def of_part(part):
    names = [*FUNCTIONS][part::PARTS]
    return lambda x: {name: FUNCTIONS[name](x) for name in names}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.each_commit(2)
@pytest.mark.compiles(60)
def test_a_lane_gets_what_it_gets_alone(part):
    f, few = of_part(part), {k: jnp.asarray(x) for k, x in matrices().items()}
    alone = jax.jit(f)
    expected = [alone({k: x[i] for k, x in few.items()}) for i in range(KINDS)]
    every = {k: jnp.tile(x, (LANES_LANES_ALONE // KINDS, 1, 1)) for k, x in few.items()}
    ways = {"all": {}, "chunks": dict(batch_size=3000), "mesh": dict(mesh="all")}
    for way, options in ways.items():
        got = jax.jit(bx.vmap(f, **options))(every)
        for kind, lane in ((k, k + n * KINDS) for k in range(KINDS) for n in (0, 400)):
            take = lambda x, lane=lane: np.asarray(x[lane])
            for name, want in expected[kind].items():
                for x, y in zip(jax.tree.leaves(want), jax.tree.leaves(got[name]), strict=True):
                    alike(np.asarray(x), take(y), f"{name}, {way}, kind {kind}")


def alike(expected, got, where):
    eps = np.finfo(expected.dtype).eps if expected.dtype.kind in "fc" else 0
    size = max(1.0, float(np.max(np.abs(expected), initial=0, where=np.isfinite(expected))))
    np.testing.assert_allclose(got, expected, rtol=300 * eps, atol=300 * eps * size, err_msg=where)


FOUR = np.random.default_rng(0).normal(size=(4, 4)).astype("float32")


def staged(fun, *examples):
    return [jax.make_jaxpr(fun)(*examples)]


def solved(x):
    return jnp.linalg.solve(x @ x.T / 4 + jnp.eye(4, dtype=x.dtype), x)


def refined(count, x):
    """Steps that hold a decomposition."""

    def step(c):
        i, x = c
        return i + 1, solved(x)

    return lax.while_loop(lambda c: c[0] < count, step, (0, x))[1]


def test_a_window_is_wide_enough_to_run_them_so():
    way = Runner(thresholds=TABLE["cpu-small"]._replace(max_devices=1_000))

    def notes(lanes):
        args = jnp.zeros(lanes, int), jnp.zeros((lanes, 4, 4), "float32")
        equations = bx.explain(refined, divergence=way)(*args).equations
        return next(e.notes for e in equations if e.primitive == "while")

    lanes = 1 << 16
    (width,) = notes(lanes)["widths"]
    assert least_lanes(lanes, staged(solved, FOUR)) <= width < lanes
    masked = notes(32)
    assert masked["divergence"] == "masked"
    assert "library" in masked["why"]
