"""`batch_size`: the same results, with at most so many lanes at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.cache import Cache
from batchax.execution import chunked

from support.chunks import check_chunks
from support.oracle import agree, example, same, same_type

LANES = 5
X = example((LANES, 3), seed=1)
W = example((3,), seed=2)


def loops(fun, *args):
    """How many loops the staged program of `fun` has, chunk loops included."""
    return str(jax.make_jaxpr(fun)(*args)).count("chunk_loop[")


# --- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_sizes_with_and_without_remainder(batch_size):
    check_chunks(
        lambda x, w: (jnp.sin(x) * w).sum(),
        X,
        W,
        in_axes=(0, None),
        batch_size=batch_size,
        second=True,
        against_loop=True,
    )
    check_chunks(
        lambda x: jnp.cos(x), X[:4], batch_size=batch_size, against_loop=True, derivatives=False
    )


@pytest.mark.parametrize("batch_size", [LANES, LANES + 1, 10**9])
@pytest.mark.parametrize("residuals", ["recompute", "keep"])
def test_at_or_over_the_number_of_lanes_it_is_the_plain_program(batch_size, residuals):
    f = lambda x, w: (jnp.tanh(x @ w), w * 2, x)
    options = dict(in_axes=(0, None), out_axes=(0, None, 1), axis_name="i")
    chunked = bx.vmap(f, **options, batch_size=batch_size, residuals=residuals)
    args = X, W
    plain = jax.make_jaxpr(bx.vmap(f, **options))(*args)
    assert str(jax.make_jaxpr(chunked)(*args)) == str(plain)


def test_no_more_lanes_than_asked_for_are_run_at_once():
    widths = []

    def record(x):
        widths.append(len(x))
        return x

    def f(x):
        kind = jax.ShapeDtypeStruct((), x.dtype)
        return jax.pure_callback(record, kind, x, vmap_method="broadcast_all")

    x = jnp.arange(7.0)
    for batch_size, expected in ((1, [1] * 7), (3, [3, 3, 1]), (6, [6, 1]), (7, [7])):
        widths.clear()
        same(jax.jit(bx.vmap(f, batch_size=batch_size))(x), x)
        assert sorted(widths, reverse=True) == expected  # JAX may reorder pure callbacks


def test_lanes_of_size_zero():
    empty = jnp.zeros((0, 3))
    for batch_size in (1, 4):
        check_chunks(lambda x: (jnp.sin(x), x.sum()), empty, batch_size=batch_size)
    # Examples without elements, but with lanes.
    check_chunks(lambda x: (x.sum(), x * 2), jnp.zeros((LANES, 0)), batch_size=2)


# --- axes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_axis", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("out_axis", [0, 1, -1])
@pytest.mark.each_commit(5)
def test_axes(in_axis, out_axis):
    x = jnp.moveaxis(example((LANES, 2, 3)), 0, in_axis)
    check_chunks(
        lambda x, w: jnp.sin(x) * w,
        x,
        W,
        in_axes=(in_axis, None),
        out_axes=out_axis,
        eager=False,
        against_loop=out_axis == 1,
    )


def test_axes_by_name_and_keyword_arguments():
    f = lambda x, w=None, *, scale=1.0, shift: x * (1 if w is None else w) * scale + shift
    scales, shift = example((LANES,), seed=5), example((3, LANES), seed=6)
    by_name = {"x": 0, "w": None, "scale": 0, "shift": 1}
    for batch_size in (2, LANES):
        got = bx.vmap(f, by_name, batch_size=batch_size)(X, W, scale=scales, shift=shift)
        same(got, jnp.stack([f(*(X[i], W), scale=scales[i], shift=shift[:, i]) for i in range(5)]))
        # Keyword arguments that nothing is said of: axis 0.
        got = bx.vmap(f, 0, batch_size=batch_size)(X, shift=scales)
        same(got, X + scales[:, None])


def test_no_mapped_argument():
    batched = bx.vmap(
        lambda w: (w, w[0] * jax.lax.axis_index("i")),
        in_axes=None,
        out_axes=(0, -1),
        axis_name="i",
        axis_size=LANES,
        batch_size=2,
    )
    same(batched(W), (jnp.stack([W] * LANES), W[0] * jnp.arange(LANES)))
    same(jax.jit(batched)(W), batched(W))
    same(bx.vmap(lambda: 3.0, axis_size=LANES, batch_size=2)(), jnp.full(LANES, 3.0))


# --- outputs ---------------------------------------------------------------------------------


def test_outputs_that_do_not_depend_on_the_batch():
    f = lambda x, w: (x * 2, w * 2, jnp.ones(2), 5, w)
    for out_axes in ((0, None, None, None, None), (0, bx.AUTO, bx.AUTO, bx.AUTO, 1), bx.AUTO, 0):
        if out_axes == 0:
            check_chunks(f, X, W, in_axes=(0, None), out_axes=out_axes)
            continue
        options = dict(in_axes=(0, None), out_axes=out_axes)
        chunked, plain = bx.vmap(f, **options, batch_size=2), bx.vmap(f, **options)
        same(chunked(X, W), plain(X, W))
        agree(chunked, plain, X, W)
        jax.tree.map(same_type, chunked(X, W), plain(X, W))


def test_work_that_does_not_depend_on_the_batch_is_done_once():
    calls = []

    def heavy(w):
        calls.append(None)
        return w

    def f(x, w):
        w = jax.pure_callback(heavy, jax.typeof(w), w, vmap_method="sequential")
        return x * w

    same(jax.jit(bx.vmap(f, (0, None), batch_size=1))(X, W), X * W)
    assert len(calls) == 1


def test_literals_and_constants_as_outputs():
    table = jnp.arange(6.0)
    f = lambda x: (1, 2.5, True, table, np.float32(3), jnp.int8(4), 1j)
    out_axes = (0, 0, 0, 1, 0, 0, 0)
    chunked, plain = (bx.vmap(f, 0, out_axes, batch_size=b) for b in (2, None))
    same(chunked(X), plain(X))
    jax.tree.map(same_type, chunked(X), plain(X))
    unbatched = bx.vmap(f, 0, None, batch_size=2)(X)
    assert unbatched[:3] == (1, 2.5, True)


# --- dtypes ----------------------------------------------------------------------------------


def test_keys():
    keys = jax.random.split(jax.random.key(0), (3, LANES))
    f = lambda ks, x: (jax.random.split(ks[0]), ks, jax.random.normal(ks[1], (2,)) * x)
    check_chunks(f, keys, X[:, 0], in_axes=(1, 0), out_axes=(1, 0, 0))
    check_chunks(jax.random.normal, jax.random.split(jax.random.PRNGKey(1), 5), batch_size=2)
    check_chunks(lambda k: k, keys[0], out_axes=0)
    check_chunks(lambda k, x: k, keys[0, 0], X, in_axes=(None, 0), derivatives=False)


# --- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(batch_size=0), ValueError, r"batch_size is 0. Pass None"),
        (dict(batch_size=-3), ValueError, r"batch_size must be .* got -3"),
        (dict(batch_size=2.0), TypeError, r"batch_size must be .* got 2.0 of type float"),
        (dict(batch_size=True), TypeError, r"batch_size must be .* got True of type bool"),
        (dict(batch_size="large"), ValueError, r"batch_size must be .* got 'large'"),
        (dict(batch_size=(2,)), TypeError, r"batch_size must be .* got \(2,\) of type tuple"),
        (
            dict(batch_size=jnp.arange(3)),
            TypeError,
            r"batch_size must be .* an array of shape \(3,\)",
        ),
        (dict(batch_size=2, memory_limit="1GB"), TypeError, r"memory_limit goes with .*auto"),
        (dict(memory_limit=100), TypeError, r"memory_limit goes with .* batch_size is None"),
        (dict(batch_size=2, residuals="some"), ValueError, r"residuals must be .* got 'some'"),
        (dict(residuals=None), TypeError, r"residuals must be .* got None"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_the_function_is_called(options, error, message):
    with pytest.raises(error, match=message) as caught:
        bx.vmap(jnp.sin, **options)
    assert isinstance(caught.value, bx.errors.BatchaxError)


def test_mistakes_are_found_before_any_work():
    calls = []

    def f(x):
        jax.debug.callback(lambda _: calls.append(None), x)
        return x, x.sum()

    batched = bx.vmap(f, 0, (0, None), batch_size=2)
    for call in (batched, jax.jit(batched)):
        with pytest.raises(bx.errors.AxisError, match=r"out\[1\] depends on the batch"):
            call(X)
    with pytest.raises(bx.errors.AxisError, match="out_axes gives 3"):
        bx.vmap(f, 0, 3, batch_size=2)(X)
    with pytest.raises(bx.errors.AxisError, match="must have one size"):
        bx.vmap(lambda x, y: f(x), batch_size=2)(X, X[:3])
    jax.effects_barrier()
    assert not calls


def test_the_same_errors_as_without_chunks():
    def message(batch_size, *args, **options):
        with pytest.raises(bx.errors.BatchaxError) as caught:
            bx.vmap(lambda x, w: (x, w), batch_size=batch_size, **options)(*args)
        return str(caught.value)

    for args, options in (
        ((X, X[:3]), dict()),
        ((X, W), dict(in_axes=(5, None))),
        ((X, W), dict(in_axes=None)),
        ((X, "text"), dict()),
        ((X, W), dict(in_axes=(0, None), out_axes=(None, 0))),
        ((X, W), dict(in_axes=(0, None), out_axes=(0, 9))),
        ((X, W), dict(in_axes=(0, None), out_axes=(0, 0, 0))),
    ):
        assert message(2, *args, **options) == message(None, *args, **options)


def test_references_are_refused_by_name():
    ref = jax.new_ref(jnp.zeros(3))

    def f(x):
        ref[...] += x

    with pytest.raises(bx.errors.UnsupportedError, match=r"reference \(jax.new_ref\)"):
        bx.vmap(f, batch_size=2)(X)


def test_beside_a_reference_operations_keep_their_derivatives():
    """Those that JAX 0.12 lowers early have rules of their own, which what they do has not."""

    def f(x):
        ref = jax.new_ref(jnp.zeros_like(x))
        ref[...] += jnp.sin(x)
        return jnp.frexp(x)[0] + ref[...]

    check_chunks(f, X, eager=False)


@pytest.mark.usefixtures("longer_rows")
def test_a_symbolic_number_of_lanes_is_refused():
    (n,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((n, 3), jnp.float32)
    with pytest.raises(bx.errors.UnsupportedError, match="symbolic size"):
        jax.export.export(jax.jit(bx.vmap(jnp.sin, batch_size=2)))(x)
    rows = bx.Ragged.from_rows([jnp.ones(2), jnp.ones(1)])
    with pytest.raises(
        bx.UnsupportedError, match="length of a row, call the function outside of jit"
    ):
        jax.jit(bx.vmap(bx.vmap(jnp.sin, batch_size=1)))(rows)


def test_a_call_outside_of_jit_is_cut_into_chunks_once(monkeypatch):
    """Calls that do the same share what was staged for chunks; any that differ do not."""
    built = []
    real = chunked.SectionRunner
    monkeypatch.setattr(chunked, "SectionRunner", lambda *a: built.append(1) or real(*a))
    monkeypatch.setattr(chunked, "kept_in_chunks", Cache("for this test", most=2))
    x, w = example((6, 3), seed=1), example((3,), seed=2)

    def check(times, w, x, scale=1.0, **options):
        before = len(built)
        got = bx.vmap(lambda x: jnp.tanh(x @ w) * scale, batch_size=4, **options)(x)
        expected = jnp.tanh(x @ w) * scale
        same(got, expected.sum() if options.get("out_axes") else expected)
        assert len(built) - before == times

    check(1, w, x)
    check(0, w + 1, x * 2)  # other values, of an argument and of what is closed over
    check(1, w, x, scale=2.0)  # another number in the program
    check(1, w, x, out_axes=bx.Reduce("sum"))
    check(1, w, x)  # forgotten: no more than two are kept
    check(1, w, example((7, 3), seed=1))


def test_what_is_remembered_sees_what_a_function_closes_over():
    """An array, a list that changes, and a derivative rule made again each time."""
    scales = [2.0]
    x = example((5,), seed=3)

    def made(factor):
        @jax.custom_jvp
        def f(x):
            return x * factor

        f.defjvp(lambda primals, tangents: (f(*primals), tangents[0] * scales[0]))
        return lambda x: f(x) + scales[0]

    for factor, scale in ((1.0, 2.0), (1.0, 3.0), (4.0, 3.0)):
        scales[0] = scale
        same(bx.vmap(made(factor), batch_size=2)(x), x * factor + scale)
        gradient = jax.grad(lambda x: bx.vmap(made(factor), batch_size=2)(x).sum())(x)
        same(gradient, jnp.full(5, scale))
