"""Calls of the host are those of the loop over the examples, in whatever way lanes run.

One program has all kinds of calls in all places, each with a tag; one table has the ways to run it.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx
from batchax.errors import UnsupportedError

from support.oracle import same

X = jnp.array([0, 5, 3, 1, 4], jnp.int32)  # on four devices three lanes repeat another


class Calls:
    """The calls that programs make: kinds of calls, and what `run` saw of them."""

    def __init__(self):
        self.made = []

    def _note(self, *call):
        self.made.append(tuple(x if isinstance(x, str) else np.asarray(x).item() for x in call))

    def debug(self, tag, *xs, **how):
        jax.debug.callback(lambda *xs: self._note(tag, *xs), *xs, **how)
        return np.int32(0)

    def io(self, tag, *xs, **how):
        io_callback(lambda *xs: self._note(tag, *xs), None, *xs, **how)
        return np.int32(0)

    def valued(self, tag, *xs, **how):
        def host(*xs):
            self._note(tag, *xs)
            return np.int32(sum(map(int, xs)))

        return io_callback(host, jax.ShapeDtypeStruct((), jnp.int32), *xs, **how)

    def print(self, tag, *xs, **how):
        jax.debug.print(" ".join([tag, *["{}"] * len(xs)]), *xs, **how)
        return np.int32(0)

    def run(self, capsys, function, *args):
        """What a function returns, and what it calls and prints."""
        self.made.clear()
        out = jax.block_until_ready(function(*args))
        jax.effects_barrier()
        return out, [*self.made, *capsys.readouterr().out.splitlines()]


CALLS = Calls()


def everywhere(ordered, turn):
    """A function of one example that has a host callback in all places, of a kind that takes
    turns.
    """
    kinds = [CALLS.debug, CALLS.io, CALLS.valued, *([] if ordered else [CALLS.print])]
    how = {"ordered": True} if ordered else {}

    def tell(tag, *xs):
        place = sum(map(ord, tag)) + turn
        return kinds[place % len(kinds)](tag, *xs, **how)

    def f(x):
        told = tell("top", x) + jax.jit(lambda x: tell("in jit", x))(x)

        def branch(x):
            told = tell("branch", x) + tell("branch, of nothing of the lane")
            told += lax.cond(x > 4, lambda x: tell("nested", x), lambda x: tell("other", x) * 0, x)
            told += jax.jit(lambda x: tell("jit in branch", x))(x)
            told += lax.fori_loop(0, 2, lambda t, c: c + tell("scan in branch", x, t), np.int32(0))
            told += lax.fori_loop(0, x, lambda t, c: c + tell("loop in branch", x, t), np.int32(0))
            return told + rule(x) + jax.checkpoint(lambda x: x * tell("checkpoint", x))(x)

        @jax.custom_jvp
        def rule(x):
            return x + tell("derivative rule", x)

        rule.defjvp(lambda primals, tangents: (rule(*primals), tangents[0]))
        told += lax.cond(x < 3, lambda x: x * 0, branch, x)
        cases = [lambda x: tell("case 0", x), lambda x: tell("case 1", x), lambda x: x * 0]
        told += lax.switch(x % 3, cases, x)
        goes_on = lambda c: c[0] + 0 * tell("condition", x, c[0]) > 0

        def step(c):
            even = lambda: tell("branch in loop", x, c[0])
            return c[0] - 1, c[1] + tell("loop", x, c[0]) + lax.cond(
                c[0] % 2, lambda: np.int32(0), even
            )

        told += lax.while_loop(goes_on, step, (x, np.int32(0)))[1]
        told += bx.bounded_while(lambda c: c[0] > 0, step, (x, np.int32(0)), 9)[1]
        told += lax.scan(lambda c, t: (c + tell("scan", x, t), None), np.int32(0), jnp.arange(2))[0]
        return told

    return f


def row(vmap):
    """As a batch of one row, which `vmap` runs."""
    return lambda f: lambda x: vmap(bx.vmap(f))(x[None])[0]


def column(vmap):
    """As a batch of rows of one lane."""
    return lambda f: lambda x: vmap(bx.vmap(f))(x[:, None])[:, 0]


WAYS = {
    "at once": lambda f: bx.vmap(f),
    "in chunks": lambda f: bx.vmap(f, batch_size=2),
    "compact": lambda f: bx.vmap(f, divergence="compact"),
    "in batchax, of one": row(bx.vmap),
    "in batchax": column(bx.vmap),
}
ON_DEVICES = {
    "on devices": lambda f: bx.vmap(f, mesh="all"),
    "in chunks on devices": lambda f: bx.vmap(f, mesh="all", batch_size=1),
}


def loop(capsys, f):
    """What the loop over the examples returns, and the calls it makes, in order."""
    found = [CALLS.run(capsys, f, x) for x in X]
    return jnp.stack([out for out, _ in found]), [call for _, made in found for call in made]


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.each_commit(1)
def test_calls_are_those_of_the_loop(turn, capsys):
    f = jax.jit(everywhere(False, turn))
    expected, calls = loop(capsys, f)
    for way, batch in (WAYS | ON_DEVICES).items():
        out, made = CALLS.run(capsys, batch(f), X)
        same(out, expected)
        assert Counter(made) == Counter(calls), way


def test_calls_in_order_come_in_the_order_of_the_loop(capsys):
    f = jax.jit(everywhere(True, 0))
    expected, calls = loop(capsys, f)
    for way, batch in WAYS.items():
        out, made = CALLS.run(capsys, batch(f), X)
        same(out, expected)
        assert made == calls, way
    for batch in ON_DEVICES.values():
        with pytest.raises(UnsupportedError, match=r"test_effects.py:.*ordered=True.*devices"):
            batch(f)(X)


def test_no_call_is_made_for_lanes_of_an_outer_axis_that_jax_maps(capsys):
    def f(x):
        seen = lambda x: lax.while_loop(lambda x: x > 0, lambda x: x - 1 + CALLS.debug("in", x), x)
        return lax.cond(x > 2, seen, lambda x: x, x)

    for vmap in (jax.vmap, bx.vmap):
        for batch in (row(vmap), column(vmap)):
            _, made = CALLS.run(capsys, jax.jit(batch(f)), X)
            assert Counter(made) == Counter(("in", i) for x in (5, 3, 4) for i in range(1, x + 1))


PARTS = {
    "at once": {},
    "chunks": {"batch_size": 2},
    "kept": {"batch_size": 2, "residuals": "keep"},
    "devices": {"mesh": "all"},
    "chunks on devices": {"mesh": "all", "batch_size": 1},
    "sharded": {"batch_size": 1},
}


@pytest.mark.parametrize("way", PARTS)
def test_what_all_lanes_have_in_common_is_called_once(way, capsys):
    def f(x, w):
        CALLS.io("before", w)
        CALLS.debug("nothing")
        jax.jit(lambda w: CALLS.print("called", w))(w)
        CALLS.debug("zeros", jnp.zeros_like(x))
        return lax.scan(lambda c, t: (c + x + CALLS.io("step", t), None), x, jnp.arange(2))[0]

    x = X
    if way == "sharded":
        mesh = jax.make_mesh((4,), ("d",), (AxisType.Auto,))
        x = jax.device_put(jnp.arange(8), NamedSharding(mesh, P("d")))
    _, made = CALLS.run(capsys, bx.vmap(f, (0, None), **PARTS[way]), x, 3)
    calls = [("before", 3), ("nothing",), "called 3", ("zeros", 0), ("step", 0), ("step", 1)]
    assert Counter(made) == Counter(calls)


def test_what_all_lanes_have_in_common_and_is_called_for_a_value(capsys):
    before = lambda x, w: x + CALLS.valued("before", w)
    inside = lambda x, w: lax.fori_loop(0, 2, lambda i, c: c + CALLS.valued("step", i) * w, x)
    for f, calls in ((before, [("before", 3)]), (inside, [("step", 0), ("step", 1)])):
        out, made = CALLS.run(capsys, bx.vmap(f, (0, None)), X, 3)
        same(out, X + 3)
        assert made == calls
    out, made = CALLS.run(capsys, bx.vmap(before, (0, None), batch_size=2), X, 3)
    same(out, X + 3)
    assert made == [("before", 3)]
    for f, options in ((before, {"mesh": "all"}), (inside, {"batch_size": 2})):
        with pytest.raises(UnsupportedError, match=r"test_effects.py:.*returns an unbatched value"):
            bx.vmap(f, (0, None), **options)(X, 3)


def test_calls_in_order_around_a_collective_and_what_lanes_share(capsys):
    def f(x):
        CALLS.debug("first", x, ordered=True)
        CALLS.debug("second", x, ordered=True)
        mean = lax.psum(x, "i")
        CALLS.debug("mean", mean, ordered=True)
        CALLS.debug("third", x - mean, ordered=True)
        CALLS.debug("fourth", x, ordered=True)
        return mean

    _, made = CALLS.run(capsys, bx.vmap(f, axis_name="i", out_axes=None), jnp.array([1, 2]))
    assert made == [
        *(("first", 1), ("second", 1), ("first", 2), ("second", 2), ("mean", 3)),
        *(("third", -2), ("fourth", 1), ("third", -1), ("fourth", 2)),
    ]


def test_derivatives_call_as_the_values_do(capsys):
    def f(x):
        def branch(x):
            CALLS.debug("branch", x)
            return jnp.sin(x) * x

        return lax.cond(x > 2, branch, lambda x: x * 3, x)

    loss = lambda x, **options: bx.vmap(f, **options)(x).sum()
    x = X.astype(float)
    expected = jnp.where(x > 2, jnp.sin(x) + x * jnp.cos(x), 3)
    calls = Counter(("branch", float(v)) for v in x if v > 2)
    ways = {
        "inside": bx.vmap(jax.grad(f)),
        "outside": jax.grad(loss),
        "forward": lambda x: jax.jvp(bx.vmap(f), (x,), (jnp.ones_like(x),))[1],
        "between": lambda x: jax.vmap(jax.grad(loss))(x[:, None])[:, 0],
        "devices": jax.grad(lambda x: loss(x, mesh="all")),
        "kept": jax.grad(lambda x: loss(x, batch_size=2, residuals="keep")),
    }
    for way, derivative in ways.items():
        out, made = CALLS.run(capsys, jax.jit(derivative), x)
        same(out, expected)
        assert Counter(made) == calls, way


@pytest.mark.compiles(150)
def test_rows_call_once_each(capsys):
    lists = [np.arange(n, dtype=np.float32) + i for i, n in enumerate([3, 1, 5, 2, 4])]
    rows = bx.Ragged.from_rows(lists)

    def f(x):
        CALLS.debug("length", jnp.ones_like(x).sum())
        large = lambda s: s + CALLS.debug("large", s)
        total = lax.cond(x.sum() > 5, large, lambda s: s, x.sum())
        return lax.while_loop(lambda s: s > 6, lambda s: s / 2 + CALLS.io("halved", s), total)

    def in_order(x):
        CALLS.debug("sum", x.sum(), ordered=True)
        CALLS.debug("most", x.max(), ordered=True)
        return x.sum()

    def loop(f):
        f = jax.jit(f)
        return [call for row in lists for call in CALLS.run(capsys, f, row)[1]]

    expected, sequence = Counter(loop(f)), loop(in_order)
    for options in ({"layout": "padded"}, {"layout": "packed"}, {"batch_size": 2}, {"buckets": 2}):
        _, made = CALLS.run(capsys, bx.vmap(f, **options), rows)
        assert Counter(made) == expected, options
        if "buckets" not in options:
            _, made = CALLS.run(capsys, bx.vmap(in_order, **options), rows)
            assert made == sequence, options
    for function, options in (
        (f, {"mesh": "all"}),
        (in_order, {"buckets": 2}),
        (in_order, {"layout": "grouped"}),
    ):
        with pytest.raises(UnsupportedError, match=r"test_effects.py:\d+.*a callback"):
            bx.vmap(function, **options)(rows)
