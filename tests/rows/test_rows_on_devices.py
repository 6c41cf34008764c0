"""Rows of different lengths dealt out to devices: what each computes is what it does alone."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import batchax as bx
from batchax.rows.run import Dealt, kept_on_devices

from support.oracle import agree, at_once, example, same
from support.rows import check_rows, check_rows_of_all, chosen, ragged

W = example((3, 3), seed=1)
LENGTHS = {
    "even": (3, 1, 5, 2, 7, 4, 2, 9),
    "uneven": (3, 1, 5, 2, 7),
    "fewer than devices": (2,),
    "equal": (4,) * 6,
    "some empty": (0, 3, 0, 1, 6),
}
check = functools.partial(check_rows, mesh="all", reverse_traced=True)


def attend(x):
    return jax.nn.softmax(x @ x.T) @ x


FUNCTIONS = {
    "each element": lambda x: jnp.tanh(x @ W),
    "attention": attend,
    "reduced": lambda x: (attend(x).sum(0), x.sum()),
    "other sizes": lambda x: (x[1:], jnp.concatenate([attend(x), x])),
    "of the shape alone": lambda x: (jnp.arange(x.shape[0]), jnp.asarray(x.shape[0])),
    "sorted": lambda x: jnp.cumsum(jnp.sort(x, 0), 0),
    "a scan": lambda x: lax.scan(lambda s, y: (jnp.sin(s + y), s), jnp.zeros(3), x),
}


IN_PACKED_ROWS = ["each element", "of the shape alone"]


@pytest.mark.parametrize("names", [IN_PACKED_ROWS, sorted({*FUNCTIONS} - {*IN_PACKED_ROWS})])
def test_rows_on_devices_are_those_of_a_loop(names):
    x = ragged(3, lengths=LENGTHS["uneven"])
    check_rows_of_all(chosen(FUNCTIONS, names), x, mesh="all", reverse_traced=True)


@pytest.mark.parametrize("lengths", [name for name in LENGTHS if name != "uneven"])
@pytest.mark.each_commit(1, "some empty")
def test_lengths_of_all_kinds(lengths):
    f = lambda x: (attend(x), x.sum(), x[1:])
    check(f, ragged(3, lengths=LENGTHS[lengths]))


def test_rows_without_any_elements():
    f = lambda x: (attend(x), x.sum(), x[1:], x.prod(0))
    check(f, ragged(3, lengths=(0, 0, 0), poison=False), batch_size=1)


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 2}, {"buckets": 2}, {"layout": "padded"}, {"layout": "packed"}],
    ids=str,
)
@pytest.mark.each_commit(2)
def test_with_other_options(options):
    check(lambda x: attend(jnp.tanh(x)), ragged(3, lengths=LENGTHS["uneven"]), **options)


@pytest.mark.nightly
def test_what_rows_have_of_their_own_and_what_they_share():
    def f(x, scale, w):
        return attend(x * scale) @ jnp.sin(w), (x @ w).sum(0) * scale, jnp.cos(w)

    given = ragged(3, lengths=LENGTHS["uneven"]), jnp.linspace(0.1, 1, 5), W
    check(f, *given, in_axes=(0, 0, None))


@pytest.mark.nightly
def test_two_sizes_that_differ():
    lengths = LENGTHS["uneven"]
    x, y = ragged(3, lengths=lengths), ragged(3, lengths=lengths[::-1], seed=1)
    check(lambda x, y: (jax.nn.softmax(x @ y.T).sum(0), attend(y).sum(0) * x.sum()), x, y)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.each_commit(1)
def test_the_ragged_axis_may_be_any(axis):
    check(lambda x: jnp.sort(x, axis) * 2, ragged(2, 3, lengths=LENGTHS["uneven"], axis=axis))


def test_outputs_go_where_out_axes_says():
    x = ragged(3, lengths=LENGTHS["uneven"])
    specs = (*map(bx.Reduce, ["sum", "mean", "max"]), 1, bx.AUTO, None)
    f = lambda x: (*[attend(x).sum(0)] * 3, x.sum(0), W, 2 * W)
    on_devices = bx.vmap(f, out_axes=specs, mesh="all")
    got, expected = at_once(on_devices, bx.vmap(f, out_axes=specs))(x)
    for results in (got, on_devices(x)):
        same(results, expected, dict(rtol=1e-5, atol=1e-5))


def test_a_row_draws_the_same_numbers_wherever_it_is():
    x = ragged(lengths=LENGTHS["uneven"])

    def drawn(key, **options):
        draw = lambda key, x: x + jax.random.normal(key)
        return bx.vmap(draw, (bx.split_key, 0), **options)(key, x).to_padded()

    agree(lambda key: drawn(key, mesh="all"), drawn, jax.random.key(0))


@pytest.mark.nightly
def test_one_axis_of_a_mesh():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    check_rows(attend, ragged(3, lengths=LENGTHS["uneven"]), mesh=(mesh, "b"))


@pytest.mark.parametrize("count", [1, 2, 5, 8, 39])
def test_no_device_has_more_elements_than_another_by_more_than_a_row(count):
    generator = np.random.default_rng(count)
    real = {}

    @jax.jit
    def deal(lengths):
        dealt = {devices: Dealt.of(lengths, devices) for devices in (1, 2, 3, 4, 7)}
        real.update({devices: of.real for devices, of in dealt.items()})
        return {devices: (of.row, of.slot) for devices, of in dealt.items()}

    for _ in range(40):
        lengths = np.minimum(generator.geometric(0.1, count) - 1, 60).astype(np.int32)
        for devices, (row, slot) in jax.device_get(deal(lengths)).items():
            assert row.shape == (devices, -(-count // devices))
            assert sorted(row[real[devices]]) == list(range(count))
            np.testing.assert_array_equal(row.reshape(-1)[slot], np.arange(count))
            elements = lengths[row].sum(1)
            assert elements.max() - elements.min() <= lengths.max()
            room = -(-int(lengths.sum()) // devices) + lengths.max() + lengths.sum() // count
            assert elements.max() <= room


def test_one_program_serves_all_lengths():
    traced = []

    def f(x):
        traced.append(x)
        return attend(x)

    def on_devices(lengths):
        out = bx.vmap(f, mesh="all")(bx.Ragged(jnp.ones((9, 3)), jnp.asarray(lengths), 6))
        jax.block_until_ready(out.data)

    on_devices((3, 1, 5))
    staged, programs = len(traced), len(kept_on_devices)
    on_devices((2, 2, 5))
    assert len(traced) == staged + 1  # to know what the function does
    assert len(kept_on_devices) == programs


def test_programs_that_are_kept_hold_no_arrays():
    x = bx.Ragged(jnp.ones((11, 3)), jnp.asarray([3, 1, 5]), 6)
    bx.vmap(lambda row: jnp.sin(row) * 3, mesh="all")(x)
    gone = weakref.ref(x.data)
    del x
    gc.collect()
    assert gone() is None


REFUSED = {
    "a collective": (
        lambda x: x - lax.pmean(x.sum(), "rows"),
        {"axis_name": "rows"},
        "collective over axis_name='rows'",
    ),
    "rows of one length": (attend, {"layout": "grouped"}, 'layout="grouped"'),
    "what needs a number": (lambda x: jnp.linalg.svd(x)[1], {}, "remove mesh"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_rows_is_refused(name):
    fun, options, match = REFUSED[name]
    with pytest.raises(bx.UnsupportedError, match=match):
        bx.vmap(fun, mesh="all", **options)(ragged(3, lengths=LENGTHS["even"]))


@pytest.mark.parametrize("vmap", [jax.vmap, bx.vmap])
@pytest.mark.compiles(300)
@pytest.mark.each_commit(1, "vmap0")
def test_a_batch_of_batches_outside_of_jit(vmap):
    """Its axis is not spread over devices with that of the rows."""
    data, lengths = example((2, 13), seed=2), np.array([3, 1, 4, 2, 3], np.int32)

    def batch(data):
        rows = bx.Ragged(data, lengths)
        sums, rows = bx.vmap(lambda row: (row.sum(), 2 * row), mesh="all")(rows)
        return sums, rows.data

    parts = [np.split(np.asarray(x), np.cumsum(lengths)[:-1]) for x in data]
    sums = np.array([[row.sum() for row in rows] for rows in parts])
    same(vmap(batch)(data), (sums, 2 * data))
