"""Columns of tables as sources of rows."""

import itertools

import numpy as np
import pytest

import batchax as bx
from batchax.datasets.sources import as_source
from batchax.rows.converters import from_dense

from support.source_tests import SourceTests

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def sliced(column):
    """From the middle of an array, whose buffers begin before it."""
    return arrow.concat_arrays([column, column, column]).slice(len(column), len(column))


def chunked(column):
    return arrow.chunked_array([column[:1], column[1:1], column[1:]], column.type)


def one_file(at, column, name="x"):
    parquet.write_table(arrow.table({name: column}), at / "x.parquet", row_group_size=2)
    return f"{at}/x.parquet:{name}"


def folder(at, column):
    (at / "x").mkdir(exist_ok=True)
    for i in range(3):
        start, stop = i * len(column) // 3, (i + 1) * len(column) // 3
        part = arrow.table({"x": column[start:stop]})
        parquet.write_table(part, at / "x" / f"{i}.parquet", row_group_size=2)
    return f"{at}/x:x"


KINDS = {
    "arrow": lambda at, column: column,
    "sliced": lambda at, column: sliced(column),
    "chunked": lambda at, column: chunked(column),
    "a file": one_file,
    "a folder": folder,
}


@pytest.fixture(params=KINDS)
def column(request, tmp_path):
    count = itertools.count()

    def column(array):
        (at := tmp_path / str(next(count))).mkdir()
        return as_source(KINDS[request.param](at, array), "args[0]")

    return column


class TestColumns(SourceTests):
    empty = False
    dtypes = (*SourceTests.dtypes, "float16")
    lengths = (2, 0, 1, 0, 0, 3, 1)

    @pytest.fixture
    def source_of(self, column):
        return lambda x: column(from_dense(x))

    @pytest.fixture(params=["list_", "large_list"])
    def ragged_of(self, column, request):
        of = getattr(arrow, request.param)
        return lambda rows: column(arrow.array(rows, of(arrow.float32())))


def test_rows_with_further_axes(column):
    inner = arrow.FixedSizeListArray.from_arrays(np.arange(14, dtype=np.int16), 2)
    source = column(arrow.ListArray.from_arrays([0, 2, 2, 3, 3, 3, 6, 7], inner))
    assert source.shape == (7, 2)
    got = source.read(0, 2, 6)
    np.testing.assert_array_equal(got.data, np.arange(14).reshape(7, 2)[2:6])
    np.testing.assert_array_equal(got.lengths, [1, 0, 0, 3])


REFUSED = {
    "text": arrow.array(list("abcdefg")),
    "deep": arrow.array([[[1]]] * 7, arrow.list_(arrow.list_(arrow.int8()), 1)),
    "dates": arrow.array([0] * 7, arrow.date32()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_number_is_refused_by_name(name, column):
    with pytest.raises(bx.ArgumentTypeError, match=r"args\[0\].*Arrow's type"):
        column(REFUSED[name])


def test_nulls_are_refused_when_they_are_read(column):
    source = column(arrow.array([1, None, 3, 4, 5, 6, 7]))
    np.testing.assert_array_equal(source.read(0, 4, 7), [5, 6, 7])
    with pytest.raises(bx.ArgumentTypeError, match=r"args\[0\].*1 entries are null"):
        source.read(0, 0, 2)


def test_parts_must_have_one_type(tmp_path):
    parquet.write_table(arrow.table({"x": [1, 2]}), tmp_path / "0.parquet")
    parquet.write_table(arrow.table({"x": [1.0, 2.0]}), tmp_path / "1.parquet")
    with pytest.raises(bx.StorageError, match=r"double in .*1\.parquet.*int64"):
        as_source(f"{tmp_path}:x", "args[0]")


def test_damage_names_the_file_and_the_rows(tmp_path):
    table = arrow.table({"number": np.arange(7, dtype=np.int32)})
    parquet.write_table(table, tmp_path / "t.parquet", write_page_checksum=True)
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
    source = as_source(one_file(tmp_path, from_dense(np.zeros((0, 2)))), "x")
    assert source.whole().shape == (0, 2)
    source = as_source(one_file(tmp_path, arrow.array([], arrow.list_(arrow.float32()))), "x")
    assert source.lengths.shape == (0,)
    assert source.whole().data.shape == (0,)


def test_row_groups_are_decoded_once_where_units_follow_each_other(tmp_path, monkeypatch):
    source = as_source(one_file(tmp_path, arrow.array(range(7))), "x")
    decoded, decode = [], source._decode
    monkeypatch.setattr(source, "_decode", lambda i: decoded.append(i) or decode(i))
    for start in range(7):
        source.read(0, start, start + 1)
    assert decoded == [0, 1, 2, 3]
