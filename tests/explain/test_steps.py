"""What `explain` counts in loops and branches is what a Python loop over the examples takes."""

import random

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh

import batchax as bx
from batchax.explain.compiled import count_steps

from support.forced import FORCED

LANES = 6
NUMBERS = np.array([0, 3, 7, 1, 12, 5], np.int32)


def steps_of(fun, *args, in_axes=0, **options):
    """The counts of a call, without all else that is measured."""
    batched = bx.vmap(fun, in_axes, **options)
    listed = {e.number: e for e in bx.explain(batched, compile=False)(*args).walk()}
    return count_steps(batched, args, {}, listed, "batch_size" in options)


def count_down(n):
    return lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, c[1] + 1.0), (n, 0.0))[1]


# --- random programs ----------------------------------------------------------------------------


def random_program(rng, depth=0):
    """Statements: ("set", k), ("while", m, statements), ("scan", n, ...), ("cond", two of them)."""
    program = []
    for _ in range(rng.randint(1, 2)):
        kind = rng.choice(["while", "while", "scan", "cond"]) if depth < 3 else "set"
        inside = lambda: random_program(rng, depth + 1)
        match kind:
            case "set":
                program.append((kind, rng.randrange(9)))
            case "cond":
                program.append((kind, inside(), inside()))
            case _:
                program.append((kind, rng.randint(2, 3), inside()))
    return program


def in_jax(program, x):
    for kind, *of in program:
        match kind:
            case "set":
                x = (x * 3 + of[0]) % 17
            case "scan":
                x = lax.scan(lambda x, _: (in_jax(of[1], x), None), x, None, length=of[0])[0]
            case "cond":
                first, second = (lambda x, p=p: in_jax(p, x) for p in of)
                x = lax.cond(x % 2 == 1, second, first, x + 1)
            case "while":
                step = lambda c, p=of[1]: (c[0] - 1, in_jax(p, c[1]))
                x = lax.while_loop(lambda c: c[0] > 0, step, (x % of[0], x + 1))[1]
    return x


def in_python(program, xs, active, counts, place=()):
    """The same for all lanes; in `counts` what each loop and branch needs, and masked lanes do.

    Its keys are the places of statements in the program, and of branches.
    """

    def runs(key, inside, xs, active):
        needed, done = counts.get(key, (0, 0))
        counts[key] = needed + sum(active), done + len(xs)
        return in_python(inside, xs, active, counts, key)

    for k, (kind, *of) in enumerate(program):
        at = (*place, k)
        match kind:
            case "set":
                xs = [(x * 3 + of[0]) % 17 if on else x for x, on in zip(xs, active, strict=True)]
            case "scan":
                for _ in range(of[0]):
                    xs = runs(at, of[1], xs, active)
            case "cond":
                odd = [x % 2 for x in xs]
                xs = [x + on for x, on in zip(xs, active, strict=True)]
                for i in range(2):
                    mine = [on and x == i for on, x in zip(active, odd, strict=True)]
                    xs = runs((*at, i), of[i], xs, mine)
            case "while":
                left = [x % of[0] if on else 0 for x, on in zip(xs, active, strict=True)]
                xs = [x + on for x, on in zip(xs, active, strict=True)]
                while any(left):
                    on = [n > 0 for n in left]
                    xs = runs(at, of[1], xs, on)
                    left = [n - o for n, o in zip(left, on, strict=True)]
    return xs


def places(program, place=()):
    """The key of each row that is expected, in order, and whether it is of a `while`."""
    for k, (kind, *of) in enumerate(program):
        at = (*place, k)
        if kind == "cond":
            yield (*at, 0), False
            yield (*at, 1), False
            for i in range(2):
                yield from places(of[i], (*at, i))
        elif kind != "set":
            yield at, kind == "while"
            yield from places(of[1], at)


@pytest.mark.parametrize(
    ("seed", "options"),
    [(1, {}), (3, {"divergence": FORCED}), (5, {"batch_size": 4, "divergence": bx.Compact(2)})],
    ids=["masked", "flat", "windows in chunks"],
)
def test_random_programs(seed, options):
    program = random_program(random.Random(seed))
    counts, size = {}, options.get("batch_size", LANES)
    for start in range(0, LANES, size):
        xs = NUMBERS[start : start + size].tolist()
        in_python(program, xs, [True] * len(xs), counts)
    steps = steps_of(lambda x: in_jax(program, x), NUMBERS, **options)
    expected = list(places(program))
    assert len(steps) == len(expected)
    for step, (key, is_while) in zip(steps, expected, strict=True):
        needed, masked = counts.get(key, (0, 0))
        assert not step.why
        assert step.needed == needed, (step, key)
        if is_while:
            assert step.masked == masked
        if step.way == "masked" and is_while and not options:
            assert step.done == masked
        assert step.done >= step.least >= step.needed


def bounded(n):
    step = lambda c: (c[0] - 1, c[1] * 1.5)
    return bx.bounded_while(lambda c: c[0] > 0, step, (n, 1.0), max_steps=16)


@pytest.mark.parametrize("fun", [count_down, bounded])
def test_windows_do_what_lane_steps_counts(fun):
    compact = bx.Compact(width=2)
    (step,) = steps_of(fun, NUMBERS, divergence=compact)
    counter = bx.LaneSteps()
    bx.vmap(fun, divergence=bx.Compact(width=2, steps=counter))(NUMBERS)
    assert (step.way, step.needed, step.done) == ("compact", counter.useful, counter.run)
    assert step.masked == LANES * 12


def test_what_is_shared_and_what_lanes_meet_in():
    fun = lambda n, k: count_down(n) + count_down(k) + lax.psum(1.0 * n, "i")
    own, shared = steps_of(fun, NUMBERS, 5, in_axes=(0, None), axis_name="i")
    assert (own.needed, own.done, own.way) == (28, 72, "masked")
    assert (shared.way, shared.why) == ("once", "it runs once for all lanes")


def test_loops_in_which_lanes_of_all_chunks_meet():
    def fun(n):
        meet = lambda c, _: (c + lax.psum(c, "i") + count_down(n), None)
        return lax.scan(meet, 1.0, None, length=3)[0] + count_down(n)

    steps = steps_of(fun, NUMBERS, axis_name="i", batch_size=2)
    (apart,) = [step for step in steps if not step.why]
    assert (apart.needed, apart.done) == (28, 44)
    assert [s.why for s in steps if s is not apart] == ["lanes of all chunks meet in it"] * 2


def calls_the_host(n):
    io_callback(lambda n: None, None, n)
    return count_down(n)


def with_reference(n):
    ref = jax.new_ref(0.0)
    ref[...] = count_down(n)
    return ref[...]


@pytest.mark.parametrize(
    ("fun", "why", "options"),
    [
        (calls_the_host, "it has a host callback, which would be called once more", {}),
        (with_reference, "it has references", {}),
        (
            lambda n: count_down(n) * 2,
            "lanes are on several devices",
            {"mesh": Mesh(np.array(jax.devices()[:2]), "d")},
        ),
    ],
)
def test_what_is_not_counted_says_why(fun, why, options):
    (step,) = steps_of(fun, NUMBERS, **options)
    assert step.why == why
    assert step.needed is step.done is step.masked is step.bound is None


@pytest.mark.parametrize(
    ("options", "done"),
    [
        ({"divergence": "predicate"}, LANES * 12),
        ({"divergence": bx.Compact(width=1)}, None),
        ({"divergence": FORCED}, None),
        ({"batch_size": 3}, 3 * (7 + 12)),
    ],
    ids=["masked", "compact", "auto", "chunks"],
)
def test_steps_back_over_a_bounded_loop(options, done):
    """Each lane goes back over as many steps as it took, be they in a loop around."""

    def total(n, x):
        half = lambda c: (c[0] - 1, np.float32(0.5) * lax.sin(c[1]))
        return bx.bounded_while(lambda c: c[0] > 0, half, (n, x), 20)[1]

    forth, back = steps_of(jax.grad(total, 1), NUMBERS, NUMBERS * np.float32(0.1), **options)
    for step in forth, back:
        assert (step.needed, step.longest, step.least) == (28, 12, 28)
        assert step.masked == (3 * (7 + 12) if "batch_size" in options else LANES * 12)
        assert step.done == done or (done is None and 28 <= step.done < LANES * 12)

    def around(n, x):
        return lax.scan(lambda x, _: (total(n, x), None), x, None, length=2)[0]

    steps = steps_of(jax.grad(around, 1), NUMBERS, NUMBERS * np.float32(0.1), **options)
    if options.get("divergence") is FORCED:  # each lane at a place of its own: other loops
        assert all(s.why or s.done >= s.needed for s in steps)
        return
    loops = [s for s in steps if s.longest == 24]
    assert len(loops) == 2
    assert all((s.needed, s.masked) == (56, 2 * forth.masked) for s in loops)


def test_faces_show_counts():
    explanation = bx.explain(count_down, measure=True)(NUMBERS)
    (step,) = explanation.steps
    assert (step.equation, step.needed, step.done) == ("1", 28, 72)
    assert "while  masked  28 of 72, 39%; bound 39%" in str(explanation)
    (data,) = explanation.to_dict()["steps"]
    assert (data["needed"], data["done"], data["utilization"]) == (28, 72, 28 / 72)
    assert bx.explain(count_down)(NUMBERS).steps == ()
