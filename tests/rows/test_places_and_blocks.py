"""Where conditions are true, and rows in blocks, compared with what Python finds."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.rows.blocks import Elements, back, find_blocks
from batchax.rows.index import row_places
from batchax.rows.places_where import _places, places_where


@pytest.mark.parametrize("size", [1, 3, 7])
def test_places_where_a_condition_is_true(size):
    conditions = np.array([[0, 1, 1, 0, 1, 0, 1], [0] * 7, [1] * 7, [1, 0, 0, 0, 0, 0, 0]], bool)
    one = lambda x: places_where(x, size)
    both = lambda x: (one(x), _places(x, size=size), jax.vmap(one)(x))
    for got in jax.jit(both)(conditions):
        for row, count, condition in zip(*got, conditions, strict=True):
            true = np.flatnonzero(condition)[:size].tolist()
            assert row.dtype == count.dtype == np.int32
            assert row.tolist() == true + [0] * (size - len(true))
            assert count == condition.sum()


def test_places_in_nothing():
    places, count = jax.jit(lambda x: places_where(x, 2))(np.zeros(0, bool))
    assert (places.tolist(), count) == ([0, 0], 0)


@pytest.mark.parametrize(
    "lengths", [[20, 4, 5, 9, 0, 12, 3, 5, 1, 10], [6, 10, 7, 8, 9, 6, 7, 8, 10], [2]]
)
def test_rows_are_in_blocks_of_their_class(lengths):
    capacity, lengths = (1, 2, 4), np.array(lengths, np.int32)
    kind, slots = (lengths <= 10).astype(int) + (lengths <= 5), 4
    find = lambda lengths: find_blocks([lengths], [(10,), (5,)], capacity, 12)[0]
    found = jax.tree.map(np.asarray, jax.jit(find)(lengths))
    at, row = found.places.at, found.places.there.reshape(12, slots)
    assert (row.reshape(-1)[at] == np.arange(len(kind))).all()
    assert (found.number[at // slots] == kind).all()
    assert (at % slots < np.array(capacity)[kind]).all()
    assert len(set(at)) == len(at)
    held = np.bincount(at // slots, minlength=12)
    # All but the last block of each class are full, and empty ones are behind the others.
    for k, room in enumerate(capacity):
        of_class = sorted(held[found.used & (found.number == k)])
        assert of_class[1:] == [room] * (len(of_class) - 1)
    assert (np.sort(held == 0) == (held == 0)).all()
    assert (found.used == (held > 0)).all()
    assert (found.lengths[0].reshape(12, slots)[found.used] == lengths[row[found.used]]).all()
    for rows, count in zip(row, held, strict=True):  # another row stands in for one that is missing
        assert set(rows[count:]) <= (set(rows[:count]) or {0})


@pytest.mark.parametrize(
    ("widths", "held", "size"), [((20, 10, 5), (2, 4, 8), 40), ((21, 10, 5), (1, 2, 4), 21)]
)
def test_elements_are_in_the_slots_of_their_rows(widths, held, size):
    lengths = np.array([20, 3, 0, 7, 11, 5, 1, 10, 6, 4], np.int32)
    capacity, blocks, slots = int(lengths.sum()) + 3, 12, held[-1]  # there are elements of no row
    kind = sum((lengths <= width).astype(np.int32) for width in widths[1:])

    def find(lengths):
        starts, sizes, row, places = row_places(lengths, capacity, 20)
        elements = Elements(starts, row, [places - row * 20], [sizes], None, [widths], size)
        bounds = [(width,) for width in widths[1:]]
        found, (of_elements,) = find_blocks([lengths], bounds, held, blocks, [elements])
        return starts, found, of_elements, back(*of_elements), back(*found.places)

    starts, found, places, of_own, own_rows = jax.tree.map(np.asarray, jax.jit(find)(lengths))
    assert (places.at[lengths.sum() :] < 0).all()
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        own, at = np.arange(start, start + length), found.places.at[row]
        first = at // slots * size + at % slots * widths[kind[row]]
        assert (places.at[own] == first + np.arange(length)).all()
        assert (places.there[places.at[own]] == own).all()
        assert (of_own[places.at[own]] == own).all()
        assert own_rows[at] == row
    assert (of_own >= 0).sum() == lengths.sum()
    assert (own_rows >= 0).sum() == len(lengths)
    # Slots of a block without rows hold another of its rows, and there is nothing behind a row.
    for block, number in enumerate(found.number[found.used]):
        width = widths[number]
        for slot in range(held[number]):
            row = found.places.there[block * slots + slot]
            part = places.there[block * size + slot * width :][:width]
            assert part[: lengths[row]].tolist() == [
                *range(starts[row], starts[row] + lengths[row])
            ]
            assert (part[lengths[row] :] < 0).all()


def test_steps_that_jax_counts_in_64_bits():
    with jax.enable_x64(True):
        places, _ = places_where(np.array([False, True, True]), 2)
        find = lambda lengths: find_blocks([lengths], [(20,), (10,)], (1, 2, 4), 80)[0]
        found = jax.jit(find)(np.ones(90, np.int32))
    assert places.tolist() == [1, 2]
    assert found.number.dtype == found.places.at.dtype == np.int32


# XLA takes as long to compile a kernel of a sum or a scatter as one of a loop, so kernels count.


def kernels(fun, *args):
    """How many kernels a compiled program calls, about, where a short loop is one."""
    entry = jax.jit(fun).lower(*args).compile().as_text().split("ENTRY")[1]
    return len(re.findall(r" = .* (?:fusion|call|while|scatter|reduce-window|sort)\(", entry))


def test_a_loop_is_fewer_kernels():
    x = np.ones(90, bool)
    by_sums = kernels(lambda x: _places(x, size=50), x)
    assert kernels(lambda x: places_where(x, 50), x) <= by_sums / 2


def summed(pattern, fun, *args):
    return re.findall(pattern, jax.jit(fun).lower(*args).as_text())


def test_programs_find_places_without_sums():
    among = bx.vmap(lambda x: jnp.sum(x[bx.nonzero(x > 0)[0]]))
    assert not summed("scatter|reduce_window", among, np.ones((3, 40), np.float32))


def test_blocks_run_until_one_is_empty_and_are_not_counted():
    lengths = np.arange(90, dtype=np.int32) % 12
    rows = bx.Ragged(jnp.ones((lengths.sum(), 2)), jnp.asarray(lengths), 30)
    in_buckets = bx.vmap(lambda x: jnp.tanh(x @ x.T).sum(1), buckets=3)
    entry = jax.jit(in_buckets).lower(rows).compile().as_text().split("ENTRY")[1]
    assert not re.findall(r"= [fs]32\[\][^=]*(?:fusion|reduce|dot)\(", entry)


def test_a_condition_is_computed_once_where_it_is_counted_and_found():
    def one(x):
        places = bx.nonzero((x[:, None] * x > 0.5).reshape(-1))[0]
        return jnp.sum(x[places // 20] * places)

    text = jax.jit(bx.vmap(one)).lower(jnp.ones((8, 20))).compile().as_text()
    assert len(re.findall(r"^ +%\S+ = pred\[8,400\]\S* fusion", text, re.MULTILINE)) == 1
    assert "pred[3200]" not in text
    assert "popcnt" not in text


def test_only_derivatives_find_where_elements_of_shorter_rows_came_from():
    lengths = np.arange(90, dtype=np.int32) % 12 + 2
    rows = bx.Ragged(jnp.ones(lengths.sum()), jnp.asarray(lengths), 30)
    differences = lambda rows: bx.vmap(lambda x: jnp.diff(jnp.sin(x)))(rows).data.sum()
    loops = lambda fun: len(summed("stablehlo.while", fun, rows))
    assert loops(differences) < loops(jax.grad(differences, allow_int=True))


def test_where_elements_are_is_not_computed_unless_needed():
    lengths = np.full(40, 30, np.int32)
    of = lambda which: lambda lengths: [row_places(lengths, 1200, 30)[k] for k in which]
    loops = lambda which: jax.jit(of(which)).lower(lengths).compile().as_text().count(" while(")
    assert loops([0, 1]) < loops([2, 3])
