"""`batch_size`: the same results, with at most so many lanes at a time."""

import jax
import jax.numpy as jnp
import pytest

import batchax as bx
from batchax.cache import Cache
from batchax.execution import chunked

from support.chunks import check_chunks
from support.oracle import example, same

LANES = 5
X = example((LANES, 3), seed=1)
W = example((3,), seed=2)


# --- sizes -----------------------------------------------------------------------------------


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


# --- dtypes ----------------------------------------------------------------------------------


# --- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(batch_size=0), ValueError, r"batch_size is 0. Pass None"),
        (dict(batch_size=-3), ValueError, r"batch_size must be .* got -3"),
        (dict(batch_size=True), TypeError, r"batch_size must be .* got True of type bool"),
        (dict(batch_size="large"), ValueError, r"batch_size must be .* got 'large'"),
        (dict(batch_size=2, memory_limit="1GB"), TypeError, r"memory_limit goes with .*auto"),
        (dict(memory_limit=100), TypeError, r"memory_limit goes with .* batch_size is None"),
        (dict(batch_size=2, residuals="some"), ValueError, r"residuals must be .* got 'some'"),
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
