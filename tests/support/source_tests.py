"""What every source does, as tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from batchax.datasets.plan import Rows
from batchax.datasets.source import Source
from batchax.errors import AxisError


class SourceTests:
    """Tests of a kind of source. Subclass it, and say in `source_of` how one is made of an array.

    Attributes:
      shape: of the array that most tests read, at least two rows along each axis. Pass another if
        the kind has no form for this one.
      dtypes: that the kind has a form for.
      empty: whether it has a form for arrays without elements.
      lengths: of the rows of `ragged_of`; empty if the kind has no rows of different lengths.

    Example:
      ::

        class TestTinySource(SourceTests):
            @pytest.fixture
            def source_of(self, tmp_path):
                def source_of(x):
                    write_tiny(tmp_path / "x.tiny", x)
                    return TinySource(tmp_path / "x.tiny", "", "x")

                return source_of
    """

    shape: tuple[int, ...] = (4, 5, 3)
    dtypes: tuple[str, ...] = ("float32", "float64", "int32", "uint8", "bool")
    empty = True
    lengths: tuple[int, ...] = ()

    @pytest.fixture
    def source_of(self) -> Callable[[np.ndarray], Source]:
        """A function that makes a source of the rows of an array, as often as it is called."""
        raise NotImplementedError("a subclass says how a source is made of an array")

    @pytest.fixture
    def ragged_of(self) -> Callable[[list[np.ndarray]], Source]:
        """The same of a list of rows, each with a length of its own."""
        pytest.skip("no rows of different lengths")

    @pytest.fixture
    def expected(self) -> np.ndarray:
        """What most tests read."""
        return _numbers(self.shape, "float32")

    @pytest.fixture
    def source(self, source_of: Callable[[np.ndarray], Source], expected: np.ndarray) -> Source:
        """A source of that."""
        return source_of(expected)

    def test_it_says_what_it_is(self, source: Source) -> None:
        assert isinstance(source, Source)
        assert source.shape == self.shape
        assert source.dtype == np.float32
        assert not source.ragged
        assert source.lengths is None

    def test_rows_along_any_axis(self, source: Source, expected: np.ndarray) -> None:
        for axis, size in enumerate(self.shape):
            for start in range(size + 1):
                for stop in range(start, size + 1):
                    part = expected.take(range(start, stop), axis)
                    same(source.read(axis, start, stop), part)
        same(source.whole(), expected)

    def test_what_was_read_is_the_readers(self, source: Source, expected: np.ndarray) -> None:
        source.read(0, 0, len(expected))[:] = 0
        source.whole()[:] = 0
        same(source.whole(), expected)

    def test_several_threads_read(self, source: Source, expected: np.ndarray) -> None:
        def read(i: int) -> None:
            start = i % len(expected)
            same(source.read(0, start, len(expected)), expected[start:])

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, range(20)))

    def test_every_dtype(self, source_of: Callable[[np.ndarray], Source]) -> None:
        for dtype in self.dtypes:
            x = _numbers(self.shape, dtype)
            source = source_of(x)
            assert source.dtype == x.dtype
            same(source.read(0, 1, 2), x[1:2])

    def test_no_elements(self, source_of: Callable[[np.ndarray], Source]) -> None:
        if not self.empty:
            pytest.skip("no arrays without elements")
        for axis in range(len(self.shape)):
            x = _numbers(tuple(n * (i != axis) for i, n in enumerate(self.shape)), "float32")
            source = source_of(x)
            assert source.shape == x.shape
            same(source.whole(), x)
            same(source.read(0, 0, len(x)), x)

    def test_an_identity_is_for_json_and_stays(self, source: Source) -> None:
        identity = source.identity()
        assert json.loads(json.dumps(identity)) == identity == source.identity()
        assert identity["shape"] == list(self.shape)
        assert identity["dtype"] == "float32"

    def test_another_content_is_another_source(
        self, source_of: Callable[[np.ndarray], Source], expected: np.ndarray
    ) -> None:
        before, content = source_of(expected).identity(), source_of(expected).content()
        other = source_of(expected + 1)
        assert other.identity() != before
        assert other.content() != content
        assert source_of(expected).content() == content

    def test_rows_of_different_lengths(
        self, ragged_of: Callable[[list[np.ndarray]], Source]
    ) -> None:
        rows = [_numbers((n,), "float32") + i for i, n in enumerate(self.lengths)]
        source = ragged_of(rows)
        assert source.ragged
        assert source.shape == (len(rows),)
        np.testing.assert_array_equal(source.lengths, self.lengths)
        for start in range(len(rows) + 1):
            for stop in range(start, len(rows) + 1):
                got = source.read(0, start, stop)
                assert isinstance(got, Rows)
                same(got.data, np.concatenate([rows[0][:0], *rows[start:stop]]))
                np.testing.assert_array_equal(got.lengths, self.lengths[start:stop])
        assert ragged_of([row + 1 for row in rows]).identity() != source.identity()
        with pytest.raises(AxisError):
            source.read(1, 0, 1)


def _numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """No two alike where the dtype can tell them apart, and none that fits a narrower one."""
    numbers, kind = np.arange(int(np.prod(shape))).reshape(shape), np.dtype(dtype)
    if kind.kind in "iu":
        return numbers.astype(kind) * kind.type(np.iinfo(kind).max // max(1, numbers.size))
    return (numbers * 1000 / 7 if kind.kind != "b" else numbers % 2).astype(kind)


def same(got: Any, expected: np.ndarray) -> None:
    """Equal, and an array that whoever reads may do with as they like."""
    assert type(got) is np.ndarray
    assert got.dtype == expected.dtype
    assert got.flags.c_contiguous
    assert got.flags.writeable
    np.testing.assert_array_equal(got, expected)
