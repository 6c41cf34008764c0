"""Columns of tables as sources of rows."""

import numpy as np
import pytest

import batchax as bx
from batchax.datasets.sources import as_source
from batchax.rows.converters import from_dense

from support.source_tests import SourceTests

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

LISTS = [[1.0, 2.0], [], [3.0], [], [], [4.0, 5.0, 6.0], [7.0]]
LENGTHS = [len(row) for row in LISTS]


def table():
    wide = arrow.FixedSizeListArray.from_arrays(np.arange(14.0), 2)
    inner = arrow.FixedSizeListArray.from_arrays(np.arange(14, dtype=np.int16), 2)
    return arrow.table(
        {
            "number": arrow.array(range(7), arrow.int32()),
            "flag": arrow.array([i % 3 == 0 for i in range(7)]),
            "half": arrow.array(np.arange(7, dtype=np.float16)),
            "wide": wide,
            "lists": arrow.array(LISTS, arrow.list_(arrow.float32())),
            "large": arrow.array(LISTS, arrow.large_list(arrow.float32())),
            "wide lists": arrow.ListArray.from_arrays([0, 2, 2, 3, 3, 3, 6, 7], inner),
            "a.b/c": arrow.array(np.arange(7.0)),
            "text": list("abcdefg"),
            "nulls": [1, None, 3, 4, 5, 6, 7],
            "deep": arrow.array([[[1]]] * 7, arrow.list_(arrow.list_(arrow.int8()), 1)),
            "dates": arrow.array([0] * 7, arrow.date32()),
        }
    )


def in_memory(at, name):
    return table().column(name)


def sliced(at, name):
    array = table().column(name).combine_chunks()
    return arrow.concat_arrays([array, array])[3:].slice(4, 7)


def chunked(at, name):
    array = table().column(name).combine_chunks()
    return arrow.chunked_array([array[:3], array[3:3], array[3:]])


def one_file(at, name):
    parquet.write_table(table(), at / "t.parquet")
    return f"{at}/t.parquet:{name}"


def row_groups(at, name):
    parquet.write_table(table(), at / "t.parquet", row_group_size=2)
    return f"{at}/t.parquet:{name}"


def folder(at, name):
    (at / "t").mkdir()
    for i, start in enumerate((0, 3, 5)):
        stop = (3, 5, 7)[i]
        parquet.write_table(table()[start:stop], at / "t" / f"{i}.parquet", row_group_size=2)
    return f"{at}/t:{name}"


@pytest.fixture(params=[in_memory, sliced, chunked, one_file, row_groups, folder])
def column(request, tmp_path):
    return lambda name: as_source(request.param(tmp_path, name), "args[0]")


class TestColumns(SourceTests):
    empty = False
    lengths = tuple(LENGTHS)

    @pytest.fixture(params=["arrow", "parquet"])
    def source_of(self, request, tmp_path):
        def source_of(x):
            column = from_dense(x)
            if request.param == "arrow":
                return as_source(column, "x")
            parquet.write_table(arrow.table({"x": column}), tmp_path / "x.parquet", 2)
            return as_source(f"{tmp_path}/x.parquet:x", "x")

        return source_of

    @pytest.fixture
    def ragged_of(self):
        return lambda rows: as_source(arrow.array(rows, arrow.list_(arrow.float32())), "x")


def test_lists_of_lists_are_refused():
    column = arrow.array([[[1.0], [2.0]], [[1.0], [2.0, 3.0]]])
    with pytest.raises(bx.ArgumentTypeError, match="or lists of these"):
        as_source(column, "x")


NUMBERS = {
    "number": np.arange(7, dtype=np.int32),
    "flag": np.arange(7) % 3 == 0,
    "half": np.arange(7, dtype=np.float16),
    "a.b/c": np.arange(7.0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name, column):
    source, expected = column(name), NUMBERS[name]
    assert source.shape == (7,)
    assert source.dtype == expected.dtype
    assert source.lengths is None
    for start in range(8):
        for stop in range(start, 8):
            got = source.read(0, start, stop)
            assert got.dtype == expected.dtype
            assert got.flags.writeable
            np.testing.assert_array_equal(got, expected[start:stop])
    np.testing.assert_array_equal(source.whole(), expected)
    assert source.identity() == source.identity()


def test_lists_of_one_size_are_axes(column):
    source, expected = column("wide"), np.arange(14.0).reshape(7, 2)
    assert source.shape == (7, 2)
    np.testing.assert_array_equal(source.read(0, 2, 6), expected[2:6])
    np.testing.assert_array_equal(source.read(1, 1, 2), expected[:, 1:])
    assert source.read(1, 1, 2).flags.c_contiguous


@pytest.mark.parametrize("name", ["lists", "large"])
def test_lists_of_any_size_are_rows(name, column):
    source = column(name)
    assert source.ragged
    assert source.shape == (7,)
    assert source.dtype == np.float32
    np.testing.assert_array_equal(source.lengths, LENGTHS)
    for start in range(8):
        for stop in range(start, 8):
            got = source.read(0, start, stop)
            np.testing.assert_array_equal(got.data, [x for row in LISTS[start:stop] for x in row])
            np.testing.assert_array_equal(got.lengths, LENGTHS[start:stop])
            assert got.data.dtype == np.float32
            assert got.data.flags.writeable
    assert len(source.whole().data) == 7


def test_rows_with_further_axes(column):
    source = column("wide lists")
    assert source.shape == (7, 2)
    got = source.read(0, 2, 6)
    np.testing.assert_array_equal(got.data, np.arange(14).reshape(7, 2)[2:6])
    np.testing.assert_array_equal(got.lengths, [1, 0, 0, 3])


@pytest.mark.parametrize("name", ["text", "deep", "dates"])
def test_what_is_no_number_is_refused_by_name(name, column):
    with pytest.raises(bx.ArgumentTypeError, match=r"args\[0\].*Arrow's type"):
        column(name)


def test_nulls_are_refused_when_they_are_read(column):
    source = column("nulls")
    np.testing.assert_array_equal(source.read(0, 4, 7), [5, 6, 7])
    with pytest.raises(bx.ArgumentTypeError, match=r"args\[0\].*1 entries are null"):
        source.read(0, 0, 2)


def test_columns_that_are_not_there(tmp_path):
    for make in (one_file, folder):
        with pytest.raises(bx.ArgumentTypeError, match=r"no column 'x' in .*; there are: number"):
            as_source(make(tmp_path, "x"), "args[0]")


def test_parts_must_have_one_type(tmp_path):
    parquet.write_table(arrow.table({"x": [1, 2]}), tmp_path / "0.parquet")
    parquet.write_table(arrow.table({"x": [1.0, 2.0]}), tmp_path / "1.parquet")
    with pytest.raises(bx.StorageError, match=r"double in .*1\.parquet.*int64"):
        as_source(f"{tmp_path}:x", "args[0]")


def test_damage_names_the_file_and_the_rows(tmp_path):
    parquet.write_table(table(), tmp_path / "t.parquet", write_page_checksum=True)
    content = bytearray((tmp_path / "t.parquet").read_bytes())
    source = as_source(f"{tmp_path}/t.parquet:number", "args[0]")
    content[40] ^= 1
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(bx.StorageError, match=r"t\.parquet was changed since"):
        source.read(0, 0, 2)
    source = as_source(f"{tmp_path}/t.parquet:number", "args[0]")
    with pytest.raises(bx.StorageError, match=r"t\.parquet.*rows 0 to 2"):
        source.read(0, 0, 2)


def test_a_file_without_rows(tmp_path):
    parquet.write_table(table()[:0], tmp_path / "t.parquet")
    source = as_source(f"{tmp_path}/t.parquet:wide", "x")
    assert source.whole().shape == (0, 2)
    source = as_source(f"{tmp_path}/t.parquet:lists", "x")
    assert source.lengths.shape == (0,)
    assert source.whole().data.shape == (0,)


def test_row_groups_are_decoded_once_where_units_follow_each_other(tmp_path, monkeypatch):
    source = as_source(row_groups(tmp_path, "number"), "x")
    decoded, decode = [], source._decode
    monkeypatch.setattr(source, "_decode", lambda i: decoded.append(i) or decode(i))
    for start in range(7):
        source.read(0, start, start + 1)
    assert decoded == [0, 1, 2, 3]
