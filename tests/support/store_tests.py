"""What every store does, as tests."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchax.datasets.plan import Leaf, Rows, Unit
from batchax.datasets.store import Store, described_leaves
from batchax.datasets.stores import STORES
from batchax.errors import JobError, StorageError

from support.processes import python

UNITS = Unit(0, 0, 4), Unit(1, 4, 8), Unit(2, 8, 10)
_LENGTHS = np.array([0, 3, 1, 0, 2, 5, 0, 0, 1, 0])


class StoreTests:
    """Tests of a kind of store. Subclass it, and name the class.

    A store that writes with `disk.replace_file` is also killed at each step of that, in
    a process of its own; the module that defines it must be one that can be imported.

    Attributes:
      store: the class.
      suffix: of its outputs; empty if it writes no files.
      dtypes: that it has a form for.
      trees: whether it keeps several results.
      ragged: whether it keeps rows of different lengths.
      empty: whether it keeps rows without elements.
      fixes: whether a unit that is cut short or missing is found when it is read, and is whole once
        it is written again.

    Example:
      ::

        class TestTinyStore(StoreTests):
            store, suffix = TinyStore, "tiny"
    """

    store: type[Store]
    suffix: str
    dtypes: tuple[str, ...] = ("float32", "float64", "int32", "uint8", "bool")
    trees = True
    ragged = True
    empty = True
    mends = True

    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        """Where results go: nothing is there."""
        return tmp_path / "folder" / (f"x.{self.suffix}" if self.suffix else "x")

    @pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 10])
    def test_what_is_written_is_read_back(self, out: Path, rows: int) -> None:
        leaves, units = [_leaf(shape=(rows, 3))], _units(rows)
        self._check(self._written(out, leaves, units), leaves, units)

    def test_its_suffix_finds_it(self) -> None:
        assert not self.suffix or STORES[self.suffix] is self.store

    def test_every_dtype(self, out: Path) -> None:
        for i, dtype in enumerate(self.dtypes):
            leaves = [_leaf(dtype=dtype)]
            self._check(self._written(out.with_name(f"{i}{out.name}"), leaves), leaves)

    @pytest.mark.parametrize(
        ("shape", "axis"), [((10,), 0), ((3, 10), 1), ((2, 10, 5), 1), ((2, 3, 10), 2)]
    )
    def test_rows_lie_along_any_axis(self, out: Path, shape: tuple[int, ...], axis: int) -> None:
        leaves = [_leaf(shape=shape, axis=axis)]
        self._check(self._written(out, leaves), leaves)

    def test_units_of_several_chunks(self, out: Path) -> None:
        leaves = [_leaf()]
        units = Unit(0, 0, 4), Unit(1, 4, 6), Unit(2, 6, 10)
        self._check(self._written(out, leaves, units, unit_rows=2), leaves, units)

    def test_a_tree_of_results(self, out: Path) -> None:
        if not self.trees:
            pytest.skip("one result only")
        leaves = [_leaf("y"), _leaf("a/b", (10,), "int32"), _leaf("a/0", (2, 10), "float64", 1)]
        store = self._written(out, leaves)
        self._check(store, leaves)
        assert list(store.result()) == ["y", "a/b", "a/0"]

    def test_rows_of_different_lengths(self, out: Path) -> None:
        if not self.ragged:
            pytest.skip("no rows of different lengths")
        leaves = [_leaf("r", ragged=0), _leaf("s", (10,)), _leaf("t", ragged=1)]
        leaves = leaves if self.trees else leaves[:1]
        self._check(self._written(out, leaves), leaves)

    def test_rows_without_elements(self, out: Path) -> None:
        if not self.empty:
            pytest.skip("no rows without elements")
        leaves = [_leaf(shape=(10, 0))]
        self._check(self._written(out, leaves), leaves)

    def test_units_are_written_from_several_threads(self, out: Path) -> None:
        leaves, units = [_leaf(shape=(100, 3))], _units(100)
        store = self._store(out, leaves)
        store.prepare()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda unit: store.write(unit, [_rows(leaves[0], unit)]), units))
        self._check(store, leaves, units)

    def test_another_process_opens_it_by_what_it_says_of_itself(self, out: Path) -> None:
        self._needs_files()
        leaves = [_leaf()]
        said = json.loads(json.dumps(self._written(out, leaves).describe()))
        again = self.store(out, described_leaves(said), said["unit_rows"])
        again.check()
        self._check(again, leaves)

    def test_what_is_there_is_never_written_over(self, out: Path) -> None:
        self._needs_files()
        out.mkdir(parents=True)
        (out / "precious").write_text("data")
        with pytest.raises(JobError):
            self._store(out, [_leaf()]).prepare()
        assert _files(out) == {"precious": b"data"}

    def test_an_output_that_is_gone(self, out: Path) -> None:
        self._needs_files()
        with pytest.raises(StorageError):
            self._store(out, [_leaf()]).check()

    def test_the_same_results_make_the_same_bytes_whatever_was_there(self, out: Path) -> None:
        self._needs_files()
        store = self._written(out, [_leaf()])
        before, rows = _files(out), _rows(_leaf(), UNITS[2])
        store.write(UNITS[2], [rows + 1])
        assert _files(out) != before
        store.write(UNITS[2], [rows])
        assert _files(out) == before

    @pytest.mark.parametrize("number", [0, 2])
    def test_damage(self, out: Path, number: int) -> None:
        self._needs_files()
        if not self.mends:
            pytest.skip("damage is not fixed")
        unit, leaf = UNITS[number], _leaf()
        store = self._written(out, [leaf])
        before = _files(out)
        store.write(unit, [_rows(leaf, unit) + 1])
        (name,) = {name for name, content in _files(out).items() if content != before[name]}
        content = before[name]
        for damaged in (content[: len(content) // 2], b"", None):
            _put(out / name, damaged)
            with pytest.raises(StorageError):
                store.read(unit)
            store.write(unit, [_rows(leaf, unit)])
            assert _files(out) == before
        for at in range(0, len(content), max(1, len(content) // 20)):
            _put(out / name, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with contextlib.suppress(StorageError):
                store.read(unit)  # other numbers, perhaps: the journal has checksums of them
        store.write(unit, [_rows(leaf, unit)])
        assert _files(out) == before

    def test_a_process_that_is_killed_at_any_step(self, out: Path, tmp_path: Path) -> None:
        """What it makes is there or not there; what it writes is fixed; nothing stays behind."""
        self._needs_files()
        where = [self.store.__module__, self.store.__qualname__, str(tmp_path), out.name]
        done = python("-W", "ignore", "-c", _MAKE_AND_DIE, *where)
        assert not done.returncode, done.stderr
        ends = [int(line) for line in done.stdout.split()]
        killed = ends.index(0)
        assert killed >= 2, "no step of disk.replace_file was reached"
        assert ends[:killed] == [9] * killed
        leaf = _leaf()
        self._written(out, [leaf])
        for left in range(killed + 1):
            place = tmp_path / str(left) / out.name
            store = self._store(place, [leaf])
            if os.path.lexists(store.at):
                store.check()
            else:
                store.prepare()
            store.clean()
            for unit in UNITS:
                store.write(unit, [_rows(leaf, unit)])
            store.end(UNITS[-1].stop)
            assert _files(place.parent) == _files(out.parent)

    def _needs_files(self) -> None:
        if not self.suffix:
            pytest.skip("no files")

    def _store(self, out: Path, leaves: Sequence[Leaf], unit_rows: int = 4) -> Store:
        return self.store(out, leaves, unit_rows)

    def _written(
        self, out: Path, leaves: Sequence[Leaf], units: Sequence[Unit] = UNITS, unit_rows: int = 4
    ) -> Store:
        store = self._store(out, leaves, unit_rows)
        store.prepare()
        for unit in reversed(units):
            store.write(unit, [_rows(leaf, unit) for leaf in leaves])
        store.end(max((unit.stop for unit in units), default=0))
        return store

    def _check(self, store: Store, leaves: Sequence[Leaf], units: Sequence[Unit] = UNITS) -> None:
        for unit in units:
            for leaf, got in zip(leaves, store.read(unit), strict=True):
                expected = _rows(leaf, unit)
                assert isinstance(got, Rows) == isinstance(expected, Rows)
                for array, right in zip(_arrays(got), _arrays(expected), strict=True):
                    assert array.dtype == right.dtype
                    assert array.flags.c_contiguous
                    np.testing.assert_array_equal(array, right)


# TensorStore has threads, and ends a process that forks after it was used.
_MAKE_AND_DIE = """
import importlib, os, pathlib, sys
from support import steps
from support.store_tests import UNITS, _leaf, _rows

module, name, folder, out = sys.argv[1:]
kind = getattr(importlib.import_module(module), name)
for left in range(60):
    child = os.fork()
    if not child:
        store = kind(pathlib.Path(folder, str(left), out), [_leaf()], 4)

        def at_step(_):
            global left
            if not left:
                os.kill(os.getpid(), 9)
            left -= 1

        steps.watch(at_step)
        store.prepare()
        store.write(UNITS[0], [_rows(_leaf(), UNITS[0])])
        store.end(UNITS[-1].stop)
        os._exit(0)
    ended = os.waitpid(child, 0)[1]
    print(ended)
    if not ended:
        break
"""


def _leaf(
    name: str = "",
    shape: tuple[int, ...] = (10, 3),
    dtype: str = "float32",
    axis: int = 0,
    ragged: int | None = None,
) -> Leaf:
    return Leaf(name, shape, np.dtype(dtype), axis, ragged)


def _units(rows: int) -> list[Unit]:
    return [Unit(i, start, min(start + 4, rows)) for i, start in enumerate(range(0, rows, 4))]


def _rows(leaf: Leaf, unit: Unit) -> Any:
    """Of all rows no two alike, where the dtype can tell them apart."""
    if leaf.ragged is not None:
        data = np.arange(_LENGTHS.sum() * 3).reshape(-1, 3).astype(leaf.dtype)
        first, last = _LENGTHS[: unit.start].sum(), _LENGTHS[: unit.stop].sum()
        return Rows(data[first:last], _LENGTHS[unit.start : unit.stop])
    values = np.arange(int(np.prod(leaf.shape))).reshape(leaf.shape).astype(leaf.dtype)
    return values.take(range(unit.start, unit.stop), leaf.axis)


def _arrays(x: np.ndarray | Rows) -> tuple[np.ndarray, ...]:
    return tuple(x) if isinstance(x, Rows) else (x,)


def _files(folder: Path) -> dict[str, bytes]:
    inside = folder.rglob("*") if folder.is_dir() else [folder]
    return {str(path.relative_to(folder)): path.read_bytes() for path in inside if path.is_file()}


def _put(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
