"""Rules of the user for packed rows: `custom_vmap` functions with `def_rows`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.errors import ArgumentTypeError, AxisError

from support.oracle import example, same
from support.rows import check_rows, ragged, ways

WAYS = ways("auto", "padded", "packed", "chunks", "buckets")
LENGTHS = (3, 5, 0, 1, 2)
W, S = example((3, 2), seed=1), example((5,), seed=2)


@pytest.fixture
def told():
    """What rules were told."""
    return []


@pytest.fixture
def norms(told):
    """A function with a result for each row, one for each element, and one that rows share."""

    @bx.custom_vmap
    def fun(x, w, s):
        return s * jnp.sum((x @ w) ** 2), jax.nn.softmax(x[:, 0]), jnp.sin(w).sum()

    @fun.def_rows
    def _(rows, ragged, x, w, s):
        told.append(len(rows))
        of_x, of_w, of_s = ragged
        assert of_x is True
        assert (of_w, of_s) == tuple(
            None if jnp.ndim(a) == n else False for a, n in ((w, 2), (s, 0))
        )
        pad = lambda a: jnp.concatenate([a, a[:1]])[rows.ids] if len(rows) else a
        y = x @ w if of_w is None else jnp.einsum("ni,nij->nj", x, pad(w))
        total = jax.ops.segment_sum((y**2).sum(1), rows.ids, len(rows))
        z = x[:, 0]
        top = jax.ops.segment_max(jax.lax.stop_gradient(z), rows.ids, len(rows) + 1)
        weights = jnp.exp(z - top[rows.ids])
        weights /= jax.ops.segment_sum(weights, rows.ids, len(rows) + 1)[rows.ids]
        return ((s * total, weights, jnp.sin(w).sum((-2, -1))), (False, True, of_w))

    return fun


def alone(norms):
    return norms


def within(norms):
    """Between what must be padded, and what must not."""

    def fun(x, w, s):
        a, b, c = norms(jnp.cumsum(x, 0) / 4, w, s)
        return a, jnp.sort(b), b[:, None] * x, c

    return fun


def gradient(norms):
    """A derivative of one row, for what it has and for what rows share."""

    def fun(x, w, s):
        return jax.grad(lambda x, w: sum(jnp.sin(y).sum() for y in norms(x, w, s)), (0, 1))(x, w)

    return fun


@pytest.mark.parametrize("made", [alone, within, gradient])
@pytest.mark.each_commit(1, "alone")
def test_in_every_way(made, norms, told):
    x = ragged(3, lengths=LENGTHS)
    derivatives = made is alone
    check_rows(made(norms), x, W, S, in_axes=(0, None, 0), ways=WAYS, derivatives=derivatives)
    assert set(told) >= {5, 2}


def test_where_rows_are(told):
    x = bx.Ragged(jnp.concatenate([jnp.arange(1.0, 9.0), jnp.full(3, jnp.nan)]), [3, 0, 5], 7)

    @bx.custom_vmap
    def fun(x):
        return 2 * x

    @fun.def_rows
    def _(rows, ragged, x):
        assert (len(rows), rows.max_length) == (3, 7)
        jax.debug.callback(lambda *xs: told.append(xs), rows.offsets, rows.lengths, rows.ids, x)
        return 2 * x, True

    for lengths in (x.lengths, jnp.asarray(x.lengths)):
        told.clear()
        out = jax.jit(lambda n: bx.vmap(fun)(bx.Ragged(x.data, n, 7)))(lengths)
        same([*out.rows()], [2 * row for row in x.rows()])
        jax.effects_barrier()
        ((offsets, own, ids, given),) = told
        assert offsets.tolist() == [0, 3, 3, 8]
        assert own.tolist() == [3, 0, 5]
        assert ids.tolist() == [0, 0, 0, *[2] * 5, *[3] * 3]
        assert given.tolist() == [*range(1, 9), 0, 0, 0]  # and no NaN
        assert {v.dtype for v in (offsets, own, ids)} == {np.dtype("int32")}


def test_of_closed_over(told):
    """What function and rule close over, traced, differentiated and batched"""

    def make(w):
        @bx.custom_vmap
        def fun(x):
            return jnp.sum(jnp.sin(x * w))

        @fun.def_rows
        def _(rows, ragged, x):
            told.append(len(rows))
            return jax.ops.segment_sum(jnp.sin(x * w), rows.ids, len(rows)), False

        return fun

    x = ragged(lengths=LENGTHS)

    def total(w):
        return bx.vmap(make(w))(x).sum()

    def loops():
        rows = [np.asarray(row) for row in x.rows()]
        alone = [[np.sin(row * w).sum() for row in rows] for w in (0.7, *np.asarray(S))]
        slope = sum((row * np.cos(row * 0.7)).sum() for row in rows)
        return sum(alone[0]), slope, [alone[1 + k][k] for k in range(len(rows))]

    def ours(x):
        # Each row has a value of its own, at last: of that the rule knows nothing.
        return *jax.value_and_grad(total)(0.7), bx.vmap(lambda x, w: make(w)(x))(x, S)

    for got, expected in zip(jax.jit(ours)(x), loops(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert told


def test_of_arrays(told):
    """Lanes of one size are the other rule's; without it, those of any function"""

    @bx.custom_vmap
    def fun(x):
        return x.sum()

    @fun.def_rows
    def _(rows, ragged, x):
        told.append("rows")
        return jax.ops.segment_sum(x, rows.ids, len(rows)), False

    x = example((4, 3))
    for vmap in (bx.vmap, jax.vmap):
        same(vmap(fun)(x), x.sum(1))
        same(vmap(jax.grad(fun))(x), jnp.ones_like(x))

    @fun.def_vmap
    def _(size, in_batched, x):
        told.append("lanes")
        return x.sum(1), True

    same(bx.vmap(fun)(x), x.sum(1))
    assert told == ["lanes"]
    same(bx.vmap(fun)(ragged(lengths=(2, 0))).shape, (2,))
    assert told == ["lanes", "rows"]


def test_shapes_that_are_not_packed(told):
    """Of these the function itself is batched"""

    def with_rule(fun):
        fun = bx.custom_vmap(fun)
        fun.def_rows(lambda *args: told.append(args))
        return fun

    x, y = ragged(3, lengths=LENGTHS), ragged(3, lengths=LENGTHS[::-1], seed=1)
    for fun, args in (
        (lambda x: jnp.sin(x @ x.T), [x]),
        (lambda x: jnp.concatenate([x, jnp.ones((1, 3), x.dtype)]), [x]),
        (lambda x, y: (x.sum() * y).sum(), [x, y]),
    ):
        if fun(*[a[1] for a in args]).ndim < 2:
            check_rows(with_rule(fun), *args, derivatives=False)
        else:
            check_rows(lambda *xs: with_rule(fun)(*xs).sum(0), *args, derivatives=False)
    inner = with_rule(lambda x: jnp.concatenate([x, x]))
    check_rows(lambda x: inner(x).sum(), x, derivatives=False)
    assert not told


def test_what_has_no_padded_form(told):
    """A rule is all there is to write where a function is refused for rows of traced lengths"""

    @bx.custom_vmap
    def fun(x, i):
        return jnp.linalg.qr(x)[1].T @ jnp.linalg.qr(x)[1], x.T, i + 1

    @fun.def_rows
    def _(rows, ragged, x, i):
        outer = x[:, :, None] * x[:, None, :]
        return (jax.ops.segment_sum(outer, rows.ids, len(rows)), x.T, i + 1), (False, True, False)

    x, i = ragged(2, lengths=(3, 5, 2)), jnp.arange(3, dtype=np.int8)
    for options in WAYS.values():
        gram, across, counts = jax.jit(bx.vmap(fun, **options))(x, i)
        same(gram, jnp.stack([row.T @ row for row in x.rows()]))
        assert across.axis == 1
        same([*across.rows()], [row.T for row in x.rows()])
        same(counts, i + 1)


@pytest.mark.parametrize(
    ("returned", "error", "says"),
    [
        (lambda rows, x: x, ArgumentTypeError, "must return a pair `out, out_ragged`"),
        (lambda rows, x: (x, 0), ArgumentTypeError, "must return True, False or None for each"),
        (lambda rows, x: (x, False), ArgumentTypeError, r"out_ragged = False .* shape \(n,\)"),
        (lambda rows, x: (x, None), ArgumentTypeError, r"out_ragged = None .* shape \(n,\)"),
        (lambda rows, x: ((x, x), True), AxisError, "of the structure of what halves returns"),
        (lambda rows, x: (x[:2], True), AxisError, r"expected shape \(10,\), got \(2,\)"),
        (lambda rows, x: (x.astype(int), True), AxisError, "expected dtype float"),
        (lambda rows, x: (x, (True, True)), AxisError, "out_ragged of the structure of `out`"),
        (lambda rows, x: rows.other, AttributeError, "other"),
    ],
)
def test_a_rule_that_is_wrong(returned, error, says):
    @bx.custom_vmap
    def halves(x):
        return x / 2

    @halves.def_rows
    def rule(rows, ragged, x):
        return returned(rows, x)

    with pytest.raises(error, match=says) as raised:
        bx.vmap(halves)(ragged(lengths=(3, 4), spare=0))
    told = str(raised.value) + "".join(getattr(raised.value, "__notes__", ()))
    assert "test_row_rules.py" in told
    assert "the batching rule of halves" in told
    with pytest.raises(ArgumentTypeError, match="def_rows expects a rule for packed rows"):
        halves.def_rows(3)
