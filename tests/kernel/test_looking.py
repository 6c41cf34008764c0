"""``jax.debug_nans`` and ``jax.debug_infs`` find what is of an example, and nothing of padding.

The oracle is the loop over the examples with the same options: whether it raises, and what it says.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx


def untaken(x):
    """A branch that no lane takes, and whose derivative has no value for any."""
    return lax.cond(x < 9, jnp.zeros_like, lambda x: x / (x - x), x)


def taken_by_some(x):
    return lax.cond(x > 1, lambda x: lax.cond(x > 2, jnp.exp, lambda x: 1 / (x - 1), x), jnp.cos, x)


def overflowing(x):
    return lax.cond(x < 9, lambda x: x, lambda x: jnp.log1p(jnp.exp(x * 1000)), x)


def done_early(x):
    """Lanes that are done would go on to divide by zero."""
    body = lambda c: (c[0] - 1, c[1] / c[0])
    return bx.bounded_while(lambda c: c[0] > 0.5, body, (x, x + 1), max_steps=4)[1]


def in_a_scan(x):
    step = lambda c, y: (lax.cond(c == y, jnp.sin, lambda c: 1 / (c - y), c), None)
    return lax.scan(step, x, jnp.arange(2, dtype=x.dtype))[0]


def within(x):
    """Lanes in lanes."""
    return bx.vmap(lambda y: untaken(x * y) + taken_by_some(y + x))(jnp.arange(2.0)).sum()


def largest(x):
    return jnp.max(jnp.stack([x, -x]), where=jnp.array([True, False]), initial=-9.0)


CLEAN = (untaken, taken_by_some, overflowing, done_early, in_a_scan, within, largest)
WAYS = {
    "plain": bx.vmap,
    "compact": lambda f: bx.vmap(f, divergence="compact"),
    "chunks": lambda f: bx.vmap(f, batch_size=2),
    "devices": lambda f: bx.vmap(f, mesh="all"),
}
MODES = {
    "values": lambda g: g,
    "forward": lambda g: lambda x: jax.jvp(g, (x,), (jnp.ones_like(x),)),
    "reverse": lambda g: jax.grad(lambda x: g(x).sum()),
    "reverse of compiled": lambda g: jax.grad(lambda x: jax.jit(g)(x).sum()),
}
X = np.array([0.0, 1.0, 2.0, 3.0, 4.0], np.float32)


TRIED = [
    *(("plain", mode) for mode in MODES),
    ("compact", "reverse"),
    ("chunks", "values"),
    ("chunks", "reverse of compiled"),
    ("devices", "reverse"),
]


@pytest.mark.parametrize(("way", "mode"), TRIED)
@pytest.mark.each_commit(3)
@pytest.mark.compiles(50)
def test_nothing_is_found_where_examples_have_nothing(way, mode):
    every = lambda x: sum(f(x) for f in CLEAN)
    run = MODES[mode](WAYS[way](every))
    with jax.debug_nans(True), jax.debug_infs(True):
        jax.block_until_ready(run(jnp.asarray(X)))


logarithm = lambda x: jnp.log(x - 2) + 1
hidden = lambda x: jnp.where(x > 2, jnp.log(x - 2), 0.0)
in_a_branch = lambda x: lax.cond(x > 1, jnp.cos, lambda x: jnp.log(x - 2), x)


def in_a_loop(x):
    return lax.while_loop(lambda c: c[0] > -0.5, lambda c: (c[0] - 1, c[1] / c[0]), (x, x * 0))[1]


def in_reverse(x):
    return jnp.where(x > 1, jnp.sqrt(x), 0.0)


DIRTY = {
    logarithm: "values",
    hidden: "values",
    jax.jit(hidden): "values",
    jax.jit(logarithm): "values",
    jax.checkpoint(hidden): "forward",
    in_a_branch: "values",
    in_a_loop: "values",
    in_reverse: "reverse",
}


def said(run):
    """What JAX says of it; None if it finds nothing."""
    try:
        jax.block_until_ready(run())
    except FloatingPointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("f", DIRTY, ids=range(len(DIRTY)))
@pytest.mark.each_commit(4)
def test_what_an_example_has_is_found(f, capfd):
    x, mode = jnp.asarray(X), MODES[DIRTY[f]]
    with jax.debug_nans(True):
        expected = said(lambda: [mode(lambda x: f(x))(x) for x in x])
        plain = said(lambda: mode(bx.vmap(f))(x))
        others = [said(lambda w=w: mode(w(f))(x)) for w in (WAYS["chunks"], WAYS["devices"])]
    assert plain == expected
    # There JAX looks at results alone.
    shown = f is not hidden and expected is not None and DIRTY[f] != "forward"
    for message in others:
        assert (message is not None) == shown, message
        assert message is None or "nvalid value (nan) encountered in" in message


def test_the_line_is_told():
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"\bdiv\b") as caught:
        bx.vmap(lambda x: 1 / x - x / x)(jnp.asarray(X))
    assert "test_looking.py" in caught.value.__notes__[0]


def test_a_jit_around_is_not_sent_after_padding(capfd):
    """With a NaN in its results JAX runs a function again, operation by operation."""
    f = lambda x: untaken(x) + in_a_branch(x)
    with jax.debug_nans(True):
        message = said(lambda: jax.jit(bx.vmap(f))(jnp.asarray(X)))
    assert message == "invalid value (nan) encountered in cond"


ROWS = [np.array([1.0, 2.0, 3.0]), np.array([4.0]), np.array([]), np.array([5.0, 6.0])]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_padding_of_rows_is_not_looked_at(layout):
    rows = bx.Ragged.from_rows([np.asarray(row, np.float32) for row in ROWS])

    def f(x):
        return (x / x).sum() + jnp.log(x).sum() + jnp.exp(-jnp.max(x, initial=0.0))

    def total(data):
        return bx.vmap(f, layout=layout)(bx.Ragged(data, rows.lengths, rows.max_length)).sum()

    with jax.debug_nans(True), jax.debug_infs(True):
        jax.block_until_ready(jax.value_and_grad(total)(rows.data))
        total(rows.data)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"batchax\.vmap"):
        total(-rows.data)


@pytest.mark.parametrize("fun", [jnp.sum, lambda x: lax.linalg.cholesky(x * jnp.eye(3))])
@pytest.mark.parametrize("compile", [False, True])
def test_programs_of_many_lanes_outside_of_jit(fun, compile):
    x = jnp.ones((10_000, 3)).at[7].set(jnp.array([jnp.inf, -jnp.inf, -1]))
    batched = bx.vmap(fun)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        (jax.jit(batched) if compile else batched)(x)
