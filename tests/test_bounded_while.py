"""`bx.bounded_while` against a Python loop, and against `lax.while_loop`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import batchax as bx
from batchax.execution.bounded_loop import bounded_loop, n_checkpoints, reverse_sweep
from batchax.execution.progress import Steps

from support.forced import FORCED
from support.mistakes import cases
from support.oracle import at_once, direction, example, same, same_type, total

MOST = 12


def in_python(cond, body, init, max_steps):
    """The loop, with a step that is not taken selected away."""
    val, going_on = init, True
    for _ in range(max_steps):
        going_on = going_on & cond(val)
        new = body(val)
        val = jax.tree.map(lambda x, y, go=going_on: jnp.where(go, x, y), new, val)
    return val


def newton(loop, x, w):
    """A count, a carry that moves, one that only follows, and closed-over values."""

    def body(val):
        y, n, seen = val["y"], val["n"], val["seen"]
        return {"y": jnp.sin(w @ y) + x, "n": n + 1, "seen": seen + y[0] * n}

    init = {"y": jnp.ones(2) * x, "n": 0, "seen": jnp.zeros(())}
    return loop(lambda val: val["n"] < 3 + 7 * x, body, init, MOST)


def smooth(loop):
    """`newton` as a function of arrays, its results without the count."""

    def f(x, w):
        out = newton(loop, x, w)
        return out["y"], out["seen"]

    return f


W = example((2, 2), seed=3)
XS = jnp.array([-1.0, 0.0, 0.3, 0.7])  # none, 3, 6 and 8 steps


# Values, types and derivatives


def test_equals_a_python_loop():
    loops = [functools.partial(newton, loop) for loop in (bx.bounded_while, in_python)]
    smooths = [smooth(loop) for loop in (bx.bounded_while, in_python)]
    every = at_once(*loops, *smooths, *map(derivatives_of, smooths))
    for x, steps in ((-1.0, 0), (0.3, 6), (5.0, MOST)):  # no step, some, and all there may be
        results = every(jnp.asarray(x), W)
        for got, expected in zip(results[::2], results[1::2], strict=True):
            same(got, expected)
        got = newton(bx.bounded_while, x, W)  # outside of jit
        same(got, results[1])
        assert int(got["n"]) == steps


def test_no_steps():
    """The carry as it came, in whichever way it is run, and derivatives that pass through."""
    told = []

    def f(x, progress=False):
        init = {"y": x, "n": 0, "w": jnp.ones(2)}
        cond, body = lambda c: c["n"] < x.sum(), lambda c: {**c, "y": jnp.sin(c["y"] / 0)}
        return bx.bounded_while(cond, body, init, 0, progress=progress)["y"]

    xs = example((5, 2))
    ways = [{}, {"batch_size": 2}, {"divergence": "compact"}, {"mesh": "all"}]
    for way in ways:
        batched = [bx.vmap(g, **way) for g in (f, jax.jacrev(f), jax.jacfwd(f))]
        values, *derivatives = jax.jit(lambda xs, fs=batched: [g(xs) for g in fs])(xs)
        same(values, xs)
        for found in derivatives:
            same(found, jnp.broadcast_to(jnp.eye(2), (5, 2, 2)))
    same(f(xs[0], lambda *counts: told.append(counts)), xs[0])
    jax.effects_barrier()
    assert told == [(0, 0)]


def derivatives_of(f):
    """Both modes, in one program."""

    def g(*args):
        out, pull = jax.vjp(f, *args)
        return jax.jvp(f, args, direction(args, 1))[1], pull(direction(out, 2))

    return g


def scalar(loop):
    """A function of two numbers."""

    def f(x, w):
        body = lambda c: (c[0] + 1, jnp.sin(w * c[1]) + x)
        return loop(lambda c: c[0] < 3 + 7 * x, body, (0, x), 9)[1]

    return f


# Every way to take derivatives twice.
TWICE = {
    "reverse over reverse": lambda f: jax.grad(total(jax.grad(f, (0, 1))), 1),
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(f)),
    "reverse over forward": lambda f: jax.grad(jax.jacfwd(f)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
}


@pytest.mark.parametrize("way", TWICE)
def test_second_derivatives(way):
    twice = [TWICE[way](scalar(loop)) for loop in (bx.bounded_while, in_python)]
    same(*at_once(*twice)(0.3, 1.3), LOOSE)


LOOSE = dict(rtol=2e-4, atol=2e-4)  # sums of many terms


def test_types_are_those_of_while_loop():
    def loop(while_):
        init = (0, 1.0, 0, np.float32(1))  # the third is promoted by what is added to it
        step = lambda c: (c[0] + 1, c[1] * 2.0, c[2] + jnp.ones(()), c[3])
        return while_(lambda c: c[0] < 3, step, init)

    f = lambda: loop(lambda *args: bx.bounded_while(*args, max_steps=9))
    g = lambda: loop(lax.while_loop)
    same(f(), g())
    jax.tree.map(same_type, f(), g())
    jax.tree.map(same_type, jax.eval_shape(f), jax.eval_shape(g))


# Batched


def test_the_loop_ends_with_the_slowest_lane():
    """In the values and in the derivative; not one step more is taken."""
    seen = []

    def f(x, limit):
        def body(c):
            jax.debug.callback(lambda n: seen.append(int(n)), c[0])
            return c[0] + 1, jnp.sin(c[1])

        return bx.bounded_while(lambda c: c[0] < limit, body, (0, x), 1000)[1]

    def numbers(call):
        seen.clear()
        jax.block_until_ready(call())
        jax.effects_barrier()
        return seen[:]

    xs, limits = jnp.ones(3), jnp.array([4, 0, 2])
    assert numbers(lambda: f(1.0, 3)) == [0, 1, 2]
    assert len(numbers(lambda: bx.vmap(f)(xs, limits))) <= 4 * 3
    assert len(numbers(lambda: jax.jit(jax.grad(f))(1.0, 3))) <= 3 * 3
    assert len(numbers(lambda: jax.jit(bx.vmap(jax.grad(f)))(xs, limits))) <= 3 * 4 * 3


# Collectives, devices, effects


def test_collectives_where_lanes_leave_at_different_steps():
    """A lane that is done takes part with what it has, as under `jax.vmap`."""

    def f(while_, x):
        body = lambda c: (c[0] + 1, c[1] + 0.1 * lax.psum(jnp.sin(c[1]), "i"))
        return while_(lambda c: c[0] < x, body, (0, x))[1]

    bounded = lambda *args: bx.bounded_while(*args, max_steps=4)
    got = bx.vmap(functools.partial(f, bounded), axis_name="i")
    expected = jax.vmap(functools.partial(f, lax.while_loop), axis_name="i")
    xs = jnp.array([1.0, 3.0, 2.0])
    same(got(xs), expected(xs))
    tangents = [jax.jvp(h, (xs,), (jnp.cos(xs),))[1] for h in (got, expected)]
    same(*tangents)
    pulled = jax.vjp(got, xs)[1](jnp.sin(xs))[0]
    same(pulled @ jnp.cos(xs), jnp.sin(xs) @ tangents[1])
    one_by_one = bx.vmap(jax.grad(functools.partial(f, bounded)), axis_name="i")
    with pytest.raises(bx.UnsupportedError, match="grad of vmap"):
        one_by_one(xs)


def test_effects():
    seen = []

    def body(c):
        io_callback(lambda n: seen.append(int(n)), None, c[0], ordered=True)
        return c[0] + 1, c[1] * 2

    f = lambda x, n: bx.bounded_while(lambda c: c[0] < n, body, (0, x), 9)[1]
    jax.block_until_ready(f(1.0, 3))
    jax.effects_barrier()
    assert seen == [0, 1, 2]
    seen.clear()
    same(bx.vmap(f)(jnp.ones(2), jnp.array([1, 2])), jnp.array([2.0, 4.0]))
    jax.effects_barrier()
    assert seen == [0, 0, 1]
    with pytest.raises(bx.UnsupportedError, match="do it twice"):
        jax.grad(f)(1.0, 3)


# Compiling, memory


# Checkpoints


@pytest.mark.parametrize("length", [0, 1, 2, 3, 12, 13, 4096, 10**6])
def test_no_more_checkpoints_than_needed(length):
    c = n_checkpoints(length)
    assert c * (c + 1) / 2 > length >= c * (c - 1) / 2


def evaluations(steps, most):
    """How often the gradient of a loop computes its steps, by theory.

    Each once forward; once more where it is gone back over; and those before which the carry was
    not kept, once. Of the carries, that after the last step included, `n_checkpoints` are kept.
    """
    return 2 * steps + max(0, steps + 1 - n_checkpoints(most))


@pytest.mark.parametrize("most", [1, 2, 12, 50])
def test_gradients_and_their_cost_for_every_number_of_steps(most):
    """The gradient is that of a Python loop, and computes no more steps than it has to."""
    seen = []

    def f(x, w, n):
        step = lambda c: (counted(c[0]), jnp.sin(c[1] * w) + 0.3)
        return bx.bounded_while(lambda c: c[0] < n, step, (0, x), most)[1]

    def counted(n):
        jax.debug.callback(lambda n: seen.append(int(n)), n)
        return n + 1

    def in_turn(x, w, n):
        for _ in range(n):
            x = jnp.sin(x * w) + 0.3
        return x

    w, gradient = 1.7, jax.jit(jax.grad(f, (0, 1)))
    limits = sorted({0, 1, 2, most // 3, most // 2, most - 1, most, most + 3})
    for n in limits:
        seen.clear()
        found = jax.block_until_ready(gradient(0.4, w, n))
        jax.effects_barrier()
        steps = min(n, most)
        same(found, jax.grad(in_turn, (0, 1))(0.4, w, steps), LOOSE)
        assert len(seen) == evaluations(steps, most)
        assert set(seen) == set(range(steps))


@pytest.mark.compiles(150)
@pytest.mark.parametrize("given", ["recorded", "of more steps", "none"])
@pytest.mark.each_commit(1, "of more steps")
def test_a_sweep_makes_do_with_any_checkpoints(given):
    """Also with those of a loop that took more steps, and with none at all."""
    most = 23

    def step(consts, carry, x):
        return [jnp.cos(carry[0] + x[0])], []

    def back(consts, cts, x):
        carry, x = x
        ct = cts[0] * -jnp.sin(carry + x)
        return [ct], [ct, consts[0] * ct]

    def sweep(n, x, xs, extra):
        options = dict(steps=Steps(most), x_axes=[0])
        found = bounded_loop(
            step, [2.0], [x], [xs], count=n + extra, y_axes=(), kept=[0], **options
        )
        kept = None if given == "none" else found.checkpoints
        return reverse_sweep(
            step, back, [2.0], [x], kept, [1.0], [xs], count=n, y_axes=(0, None), **options
        )

    def expected(n, x, xs):
        loop = lambda x, xs: functools.reduce(lambda c, x: jnp.cos(c + x), xs[:n], x)
        return jax.grad(loop, (0, 1))(x, xs)

    xs, sweep = example((most,)), jax.jit(sweep)
    for n in (0, 1, 2, 9, 16, most):
        for extra in range(4 if given == "of more steps" else 1):
            (ct,), (ct_xs, total) = sweep(np.int32(n), 0.3, xs, np.int32(extra))
            of_x, of_xs = expected(n, 0.3, xs)
            same((ct, ct_xs, total), (of_x, of_xs, 2 * of_xs.sum()), LOOSE)


@pytest.mark.parametrize("divergence", ["predicate", bx.Compact(width=2), FORCED])
def test_a_lane_goes_back_with_what_all_lanes_recorded(divergence):
    """A function that goes back is taken out of a `vmap`, and used for one lane; and into one."""
    f = scalar(bx.bounded_while)
    pull_of = lambda x: jax.vjp(f, x, 1.3)[1]
    expected = jax.vmap(jax.grad(scalar(in_python), (0, 1)), (0, None))(XS, 1.3)
    pulls = jax.jit(bx.vmap(pull_of, divergence=divergence))(XS)
    in_turn, apart = jax.lax.map(lambda pull: pull(1.0), pulls), jax.lax.map(pull_of, XS)
    together = [v(lambda pull: pull(1.0))(apart) for v in (jax.vmap, bx.vmap)]
    for found in (in_turn, *together):
        same(found, expected, LOOSE)


def test_memory_of_the_gradient_grows_with_the_square_root():
    def needed(max_steps, size=1000):
        f = lambda x: newton_like(x, max_steps).sum()
        x = jnp.ones(size)
        compiled = jax.jit(jax.grad(f)).lower(x).compile()
        return compiled.memory_analysis().temp_size_in_bytes / x.nbytes

    def newton_like(x, max_steps):
        return bx.bounded_while(lambda c: c.sum() > 1, lambda c: jnp.sin(c) * c, x, max_steps)

    for most in (100, 10_000):
        assert needed(most) < n_checkpoints(most) + 6


def test_nothing_is_kept_in_forward_mode():
    x = jnp.ones(1000)
    f = lambda x: bx.bounded_while(lambda c: c.sum() > 1, lambda c: jnp.sin(c) * c, x, 1000)
    compiled = jax.jit(lambda x: jax.jvp(f, (x,), (x,))).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * x.nbytes


def test_what_going_back_does_not_need_is_not_kept():
    """A count, a sum, an array that is written to."""
    most, size = 100, 50

    def f(loop, x, w):
        def step(c):
            new = jnp.sin(c["x"] * w)
            seen = c["seen"].at[c["n"]].set(new)
            return {"n": c["n"] + 1, "x": new, "sum": c["sum"] + new**2, "seen": seen}

        seen = jnp.zeros((most, size), x.dtype)
        init = {"n": 0, "x": x, "sum": jnp.zeros_like(x), "seen": seen}
        out = loop(lambda c: c["n"] < 20, step, init, most)
        return (out["sum"] * out["x"]).sum() + (out["seen"] * jnp.arange(size)).sum()

    x, w = example((size,)), example((size,), seed=1)
    gradients = [
        jax.jit(jax.grad(functools.partial(f, loop), (0, 1)))
        for loop in (bx.bounded_while, in_python)
    ]
    same(*(gradient(x, w) for gradient in gradients), LOOSE)
    memory = gradients[0].lower(x, w).compile().memory_analysis().temp_size_in_bytes
    assert memory < (n_checkpoints(most) + 3 * most) * x.nbytes


# Mistakes


MISTAKES = {
    bx.ArgumentTypeError: {
        "cond_fun": (lambda: bx.bounded_while(1, id, 0, 3), "as cond_fun"),
        "max_steps": (
            lambda: bx.bounded_while(bool, abs, 0, 2.0),
            "max_steps must be a non-negative int of .*, got 2.0 of type float",
        ),
        "no array": (
            lambda: bx.bounded_while(lambda c: True, lambda c: c, {"a": "text"}, 3),
            r"init_val\['a'\], of the first carry, is of type str",
        ),
        "predicate": (
            lambda: bx.bounded_while(lambda c: c, lambda c: c, 0.0, 3),
            r"must return one truth value.*returned float(32|64)\[\]",
        ),
        "predicates": (
            lambda: bx.bounded_while(lambda c: c > 0, lambda c: c, jnp.ones(2), 3),
            r"returned bool\[2\]",
        ),
        "structure": (
            lambda: bx.bounded_while(lambda c: True, lambda c: (c,), 0.0, 3),
            r"must have the structure",
        ),
        "no array returned": (
            lambda: bx.bounded_while(lambda c: True, lambda c: "text", 0.0, 3),
            "that '<lambda>' returns is of type str, not an array",
        ),
        "type": (
            lambda: bx.bounded_while(
                lambda c: True, lambda c: (c[0], c[0]), (0.5, jnp.int32(1)), 3
            ),
            r"carry\[1\]: int32\[\] became float(32|64)\[\]",
        ),
    },
    bx.OptionError: {
        "fewer than none": (
            lambda: bx.bounded_while(bool, abs, 0, -1),
            "non-negative int of .* -1",
        ),
        "too many": (lambda: bx.bounded_while(bool, abs, 0, 2**31), "at most 2,147,483,647"),
    },
}


@pytest.mark.parametrize(("error", "call", "message"), cases(MISTAKES))
def test_mistakes(error, call, message):
    with pytest.raises(error, match=message):
        call()


def with_rules_that_close_over(which, w, x):
    """Of the function of a step, the forward or the reverse rule closes over `w`."""

    @jax.custom_vjp
    def double(y):
        return 2 * y

    zero = 0 * jnp.sin(w)
    forward, reverse = (zero, 0.0) if which == "forward" else (0.0, zero)
    double.defvjp(lambda y: (2 * y + forward, ()), lambda _, g: (2 * g + reverse,))
    body = lambda c: (c[0] + 1, double(c[1]))
    return bx.bounded_while(lambda c: c[0] < 3, body, (0, x), 5)[1]


@pytest.mark.parametrize("which", ["forward", "reverse"])
def test_reverse_rules_that_close_over_traced_values_are_named(which):
    f = functools.partial(with_rules_that_close_over, which)
    same(jax.grad(f, 1)(0.5, 1.0), jnp.asarray(8.0))  # what is closed over is not traced
    first, both = jax.grad(f, 1), jax.grad(f, (0, 1))
    of_sum = jax.grad(lambda w, x: bx.vmap(f)(w, x).sum(), 1)
    ways = jax.jit(jax.vmap(first)), jax.vmap(both), bx.vmap(both), jax.jit(of_sum)
    for way in (*ways, bx.vmap(first, batch_size=1), lambda w, x: both(w[0], x[0])):
        with pytest.raises(bx.UnsupportedError, match=r"a rule of .*double at .* argument"):
            way(jnp.ones(2), jnp.ones(2))


def test_references_are_refused():
    def f(x):
        ref = jax.new_ref(x)

        def body(c):
            ref[...] += c
            return c + 1

        return bx.bounded_while(lambda c: c < 3, body, 0.0, 5), ref[...]

    with pytest.raises(bx.UnsupportedError, match="Put the array into the carry"):
        jax.jit(f)(1.0)


def test_loop_without_a_bound_inside():
    """It has a derivative in forward mode, and the outer loop with it."""

    def f(x):
        twice = lambda x: jax.lax.while_loop(lambda c: c < 4.0, lambda c: 2.0 * c, x)
        return bx.bounded_while(lambda x: x < 50.0, lambda x: twice(x) * 3.0, x, 10)

    x = jnp.array([0.3, 1.0, 100.0])
    primal, tangent = jax.jvp(bx.vmap(f), (x,), (jnp.ones(3),))
    same(primal, jnp.stack(list(map(f, x))))
    same(tangent, primal / x)
    with pytest.raises(bx.UnsupportedError, match="no derivative in reverse"):
        jax.grad(f)(0.3)


def test_what_only_decides_has_no_cotangent():
    """A zero would be multiplied by what infinite values have as derivatives."""

    def f(x):
        limit = jax.nn.logsumexp(x)
        going_on = lambda c: (c[0] < 3) & (limit > c[0])
        return bx.bounded_while(going_on, lambda c: (c[0] + 1, -c[1]), (0, x), 4)[1]

    x = jnp.array([[1.0, jnp.nan], [5.0, 6.0], [jnp.inf, 2.0]])
    pull = lambda f: jax.vjp(f, x)[1](jnp.ones_like(x))[0]
    np.testing.assert_array_equal(jax.jit(lambda: pull(bx.vmap(f)))(), [[1, 1], [-1, -1], [-1, -1]])


def test_loops_that_are_batched_once_are_not_confused():
    """What JAX keeps of a loop is kept batched, too: by its predicate, its bound, and lanes."""
    doubled = lambda c: (c[0] + 1, 2 * c[1])
    numbers = np.arange(1, 5, dtype=np.float32)
    for _ in range(3):
        for limit, most in (2, 8), (4, 8), (4, 3):
            for lanes in 3, 4:
                x = numbers[:lanes]
                loop = lambda n, x, limit=limit, most=most: bx.bounded_while(
                    lambda c: (c[0] < limit) & (c[0] < n), doubled, (jnp.int32(0), x), most
                )[1]
                counts = np.arange(lanes, dtype=np.int32) + 1
                staged = jax.make_jaxpr(bx.vmap(loop))(counts, x)
                (got,) = jax.core.eval_jaxpr(staged.jaxpr, staged.consts, counts, x)
                taken = np.minimum(np.minimum(counts, limit), most)
                np.testing.assert_array_equal(got, x * 2.0**taken)


def test_python_that_needs_what_is_carried_is_told_so():
    body = lambda x: x + 1 if x > 1 else x + 2
    test = lambda x: bool(x < 3)
    for call, fun in (
        (lambda: bx.bounded_while(lambda x: x < 3, body, 0.0, 3), body),
        (lambda: bx.bounded_while(test, lambda x: x + 1, 0.0, 3), test),
    ):
        with pytest.raises(jax.errors.TracerBoolConversionError) as told:
            call()
        message = str(told.value)
        assert message.startswith("`if`, `while`, `and`, `or` and `not` of Python need a concrete")
        assert "the carry of a loop is traced. Use jax.numpy.where" in message
        assert f"{fun.__name__} at {__file__}" in message
