"""Where conditions are true, and rows in blocks: the loop of a CPU, sums and scatters, Python's."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.rows.blocks import (
    Elements,
    RowsOfBlocks,
    _blocks,
    _elements,
    find_blocks,
    find_elements,
)
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


@pytest.mark.parametrize("kind", [[0, 2, 2, 1, 2, 0, 2, 2, 2, 1], [1] * 9, [2]])
def test_rows_are_in_blocks_of_their_class(kind):
    capacity, blocks, kind = (1, 2, 4), 12, np.array(kind, np.int32)
    others = lambda kind: RowsOfBlocks(kind, *_blocks(kind, capacity=capacity, blocks=blocks))
    for find in (lambda kind: find_blocks(kind, capacity, blocks), others):
        found = jax.tree.map(np.asarray, jax.jit(find)(kind))
        assert (found.row[found.block, found.slot] == np.arange(len(kind))).all()
        assert (found.number[found.block] == kind).all()
        assert (found.slot < found.held[found.block]).all()
        assert found.held.sum() == len(kind)
        # All but the last block of each class are full, and empty ones are behind the others.
        for k, room in enumerate(capacity):
            held = sorted(found.held[found.number == k])
            assert held[1:] == [room] * (len(held) - 1)
        empty = found.held == 0
        assert (np.sort(empty) == empty).all()
        assert (found.number[empty] == len(capacity)).all()
        for row, held in zip(found.row, found.held, strict=True):
            assert (row[held:] == row[0]).all()


@pytest.mark.parametrize(
    ("widths", "held", "size"), [((20, 10, 5), (2, 4, 8), 40), ((21, 10, 5), (1, 2, 4), 21)]
)
def test_elements_are_in_the_slots_of_their_rows(widths, held, size):
    lengths = np.array([20, 3, 0, 7, 11, 5, 1, 10, 6, 4], np.int32)
    capacity, blocks = int(lengths.sum()) + 3, 12  # there are elements of no row
    kind = sum((lengths <= width).astype(np.int32) for width in widths[1:])

    def find(lengths, kind, of):
        starts, sizes, row, places = row_places(lengths, capacity, 20)
        found = find_blocks(kind, held, blocks)
        elements = Elements(starts, row, [places - row * 20], [sizes], None)
        return starts, found, of(found, elements, [widths], size)

    for of in (find_elements, _elements):
        starts, found, places = jax.jit(lambda *xs, of=of: find(*xs, of))(lengths, kind)
        at, back = np.asarray(places.at), np.asarray(places.back)
        assert (at[lengths.sum() :] < 0).all()
        for row, (start, length) in enumerate(zip(np.asarray(starts), lengths, strict=True)):
            own = np.arange(start, start + length)
            first = found.block[row] * size + found.slot[row] * widths[kind[row]]
            assert (at[own] == first + np.arange(length)).all()
            assert (places.there[at[own]] == own).all()
            assert (back[at[own]] == own).all()
        assert (back >= 0).sum() == lengths.sum()
        # Slots of a block without rows hold its first row, and there is nothing behind a row.
        for block, number in enumerate(np.asarray(found.number)[np.asarray(found.held) > 0]):
            width = widths[number]
            for slot in range(held[number]):
                row = int(found.row[block, slot])
                part = np.asarray(places.there)[block * size + slot * width :][:width]
                assert part[: lengths[row]].tolist() == [
                    *range(starts[row], starts[row] + lengths[row])
                ]
                assert (part[lengths[row] :] < 0).all()


def test_steps_that_jax_counts_in_64_bits():
    with jax.enable_x64(True):
        places, _ = places_where(np.array([False, True, True]), 2)
        blocks = find_blocks(np.array([0, 1, 0], np.int32), (2, 4), 3)
        elements = jax.jit(functools.partial(in_blocks, find_elements))(np.ones(90, np.int32))
    assert places.tolist() == [1, 2]
    assert elements.at.dtype == np.int32
    assert blocks.held.sum() == 3


# XLA takes as long to compile a kernel of a sum or a scatter as one of a loop, so kernels count.


def kernels(fun, *args):
    """How many kernels a compiled program calls, about, where a short loop is one."""
    entry = jax.jit(fun).lower(*args).compile().as_text().split("ENTRY")[1]
    return len(re.findall(r" = .* (?:fusion|call|while|scatter|reduce-window|sort)\(", entry))


def in_blocks(find, kind):
    starts, sizes, row, places = row_places(kind * 10, 900, 40)
    elements = Elements(starts, row, [places - row * 40], [sizes], None)
    return find(find_blocks(kind, (1, 2, 4), 80), elements, [(40, 20, 10)], 40)


@pytest.mark.parametrize(
    ("loop", "sums", "x"),
    [
        (lambda x: places_where(x, 50), lambda x: _places(x, size=50), np.ones(90, bool)),
        (
            lambda kind: tuple(find_blocks(kind, (1, 2, 4), 80)),
            lambda kind: _blocks(kind, capacity=(1, 2, 4), blocks=80),
            np.ones(90, np.int32),
        ),
    ],
)
def test_a_loop_is_fewer_kernels(loop, sums, x):
    assert kernels(loop, x) <= kernels(sums, x) // 2


def test_elements_are_found_without_gathers():
    gathers = lambda find: summed("stablehlo.gather", functools.partial(in_blocks, find), kind)
    kind = np.ones(90, np.int32)
    assert not gathers(find_elements)
    assert gathers(_elements)


def summed(pattern, fun, *args):
    return re.findall(pattern, jax.jit(fun).lower(*args).as_text())


def test_programs_find_places_and_blocks_without_sums():
    among = bx.vmap(lambda x: jnp.sum(x[bx.nonzero(x > 0)[0]]))
    assert not summed("scatter|reduce_window", among, np.ones((3, 40), np.float32))
    lengths = np.arange(90, dtype=np.int32) % 12
    rows = bx.Ragged(jnp.ones((lengths.sum(), 2)), jnp.asarray(lengths), 30)
    in_buckets = bx.vmap(lambda x: jnp.tanh(x @ x.T).sum(), buckets=3)
    assert not summed("scatter|reduce_window", in_buckets, rows)


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
