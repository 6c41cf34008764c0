"""Which rows are committed at once, and files that are whole or not there."""

import errno
import itertools
import json
import os
from dataclasses import asdict

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchax.datasets import disk
from batchax.datasets.plan import Plan, Rows, Unit, checksum, crc32c
from batchax.errors import ArgumentTypeError, AxisError, StorageError

MIB = 2**20


@given(
    st.integers(0, 10**7),
    st.integers(1, 1000),
    st.floats(0, 1e9),
    st.one_of(st.just(0.0), st.floats(1e-12, 10)),
)
def test_each_row_is_in_one_unit(rows, batch_size, row_bytes, row_seconds):
    plan = Plan.of(rows, batch_size, row_bytes, row_seconds)
    assert plan.unit_rows % batch_size == 0
    assert plan.rows == rows
    numbers = {0, 1, len(plan) // 2, len(plan) - 2, len(plan) - 1} & set(range(len(plan)))
    for number in numbers:
        unit = plan.unit(number)
        assert unit.number == number
        assert 0 < unit.rows <= plan.unit_rows
        assert unit.stop == (plan.unit(number + 1).start if number + 1 < len(plan) else rows)
    assert not rows or plan.unit(0).start == 0
    assert plan.unit_rows == batch_size or plan.unit_rows * row_bytes <= 64 * MIB
    assert Plan.from_json(json.loads(json.dumps(asdict(plan)))) == plan


def test_a_unit_is_half_a_second_of_work_and_several_fit_memory():
    assert Plan.of(10**6, 10, 100, 1e-3) == Plan(10**6, 10, 500)
    assert Plan.of(10**6, 64, 100, 1e-3) == Plan(10**6, 64, 512)
    assert Plan.of(10**6, 10, 100, 1.0).unit_rows == 10  # one batch, if that takes longer
    assert Plan.of(10**6, 16, MIB / 8, 1e-9).unit_rows == 64
    assert Plan.of(10**6, 16, 1000 * MIB, 1e-9).unit_rows == 16
    assert Plan.of(100, 16, 4, 1e-9) == Plan(100, 16, 112)
    assert Plan.of(5, 16, 4, 0.0).unit(0) == Unit(0, 0, 5)
    assert len(Plan.of(0, 16, 4, 1.0)) == 0


def test_commit_rows():
    assert Plan.of(1000, 8, 4, 1.0, commit_rows=np.int64(24)).unit_rows == 24
    with pytest.raises(AxisError, match=r"=20 .* batch_size=8.* commit_rows=16 or 24"):
        Plan.of(1000, 8, 4, 1.0, commit_rows=20)
    for wrong in (0, -8, 3):
        with pytest.raises(AxisError, match="Use commit_rows=8, "):
            Plan.of(1000, 8, 4, 1.0, commit_rows=wrong)
    with pytest.raises(ArgumentTypeError, match=r"whole number of rows, and is 2\.5"):
        Plan.of(1000, 8, 4, 1.0, commit_rows=2.5)


def test_crc32c_of_bytes_in_c_order():
    assert crc32c(b"123456789") == 0xE3069283  # the check value of the standard
    assert crc32c(b"6789", crc32c(b"12345")) == 0xE3069283
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert checksum(x) == checksum(np.asfortranarray(x)) == crc32c(x.tobytes())
    assert checksum(x[:, 1]) == crc32c(x[:, 1].tobytes())
    assert checksum(x[:0]) == 0
    assert checksum(np.float32(3)[()].reshape(())) == crc32c(np.float32(3).tobytes())
    half = x.astype(ml_dtypes.bfloat16)
    assert checksum(half) == crc32c(half.tobytes())
    frozen = x.copy()
    frozen.flags.writeable = False
    assert checksum(frozen) == checksum(x)


def test_checksum_of_rows_does_not_depend_on_the_type_of_lengths():
    data, lengths = np.arange(6.0), np.array([1, 2, 3])
    one = checksum(Rows(data, lengths))
    assert one == checksum(Rows(data, lengths.astype(np.int32)))
    assert one != checksum(Rows(data, np.array([2, 1, 3])))


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a"
    disk.replace_file(path, b"old")
    with pytest.raises(TypeError), disk.replacing(path) as beside:
        beside.write_bytes("no bytes")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert path.read_bytes() == b"old"
    with disk.replacing(path) as beside:
        beside.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "no space is left for it .*it resumes from the committed units"),
        (errno.EROFS, "Choose an output that this process may write to"),
        (errno.EIO, "could not be written: Input/output error"),
    ],
)
def test_errors_say_what_to_do(tmp_path, number, says):
    with pytest.raises(StorageError, match=says) as caught, disk.writing(tmp_path / "x.npy"):
        raise OSError(number, os.strerror(number))
    assert caught.value.errno == number
    assert str(tmp_path / "x.npy") in str(caught.value)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=300), st.integers(1, 9), st.integers(1, 8))
def test_units_of_about_as_many_elements(lengths, batch_size, batches):
    even = Plan(len(lengths), batch_size, batch_size * batches)
    plan = even.by_elements(np.array(lengths))
    units = [plan.unit(k) for k in range(len(plan))]
    assert [u.number for u in units] == list(range(len(units)))
    assert units[0].start == 0
    assert units[-1].stop == len(lengths)
    assert all(a.stop == b.start for a, b in itertools.pairwise(units))
    assert all(u.rows > 0 and u.start % plan.chunk_rows == 0 for u in units)
    assert len(plan) <= len(even)
    assert Plan.from_json(json.loads(json.dumps(asdict(plan)))) == plan
    if plan.ends is not None:
        of_batch = max(sum(lengths[i : i + batch_size]) for i in range(0, len(lengths), batch_size))
        share = sum(lengths) / len(even)
        assert all(sum(lengths[u.start : u.stop]) <= share + of_batch for u in units)
