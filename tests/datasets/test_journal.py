"""What the journal says: nothing but what was appended, whatever happens to its file."""

import os
import time
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchax.datasets import disk
from batchax.datasets.journal import Journal, read_journal
from batchax.datasets.plan import Bad, Record, Unit
from batchax.errors import ArgumentTypeError, StorageError


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "job" / "journal"


def record(number, **more):
    return Record(Unit(number, 4 * number, 4 * number + 4), [number, 2**32 - 1], **more)


def appended(folder, records, writer="main"):
    journal = Journal(folder, writer)
    records = [journal.append(r) for r in records]
    journal.close()
    return records


def test_what_was_appended_is_read(folder):
    assert read_journal(folder) == {}
    bad = (Bad(5, "wrong \ud800 ü\n", "where"), Bad(6, "too"))
    records = appended(folder, [record(0), record(1, attempt=2, seconds=0.5, quarantined=bad)])
    assert time.time() - 60 < records[0].ended <= records[1].ended <= time.time()
    assert list(read_journal(folder).values()) == records
    more = appended(folder, [record(7)])
    assert read_journal(folder) == {r.unit.number: r for r in [*records, *more]}


def test_writers_are_merged_and_the_first_stands(folder):
    late = appended(folder, [record(0, attempt=1)], "a")
    early = appended(folder, [record(0, ended=1.0), record(1)], "b")
    assert read_journal(folder)[0] == early[0] != late[0]
    assert set(read_journal(folder)) == {0, 1}
    assert set(disk.log_sizes(folder)) == {"a.jsonl", "b.jsonl"}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["append", "withdraw", "cut"]), st.integers(0, 5), st.integers(1, 400)
        ),
        max_size=20,
    )
)
def test_it_says_what_was_appended_last(tmp_path_factory, history):
    """Against a dictionary: appended, withdrawn, and cut anywhere in what was appended last."""
    folder = tmp_path_factory.mktemp("job") / "journal"
    path, done = folder / "main.jsonl", {}
    for clock, (what, number, amount) in enumerate(history, 1):
        if what == "append":
            many = [record(i, ended=float(clock)) for i in range(number, number + amount % 4)]
            Journal(folder, "main").append_many(many)
            done = {r.unit.number: r for r in many} | done
        elif what == "withdraw" and number in done:
            Journal(folder, "main").withdraw([read_journal(folder)[number]], "damaged")
            del done[number]  # whichever of them was first
        elif what == "cut":
            before = path.stat().st_size if path.exists() else 0
            Journal(folder, "main").append(record(number, ended=float(clock)))
            os.truncate(path, before + amount % (path.stat().st_size - before))
        assert read_journal(folder) == done


def test_a_flipped_bit_anywhere_is_told_and_no_wrong_record_is_read(folder):
    records = appended(folder, [record(i) for i in range(4)])
    path = folder / "main.jsonl"
    content = path.read_bytes()
    last = content[:-1].rindex(b"\n")
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = list(read_journal(folder).values())
        assert all(r in records for r in found)
        assert len(found) >= len(records) - (2 if content[place] == ord("\n") else 1)
        if place < last:
            assert len(found) < len(records)
            line = content[:place].count(b"\n") + 1
            (warning,) = (w for w in told if w.category is not ResourceWarning)  # of others
            assert f"line {line}" in str(warning.message) or damaged[place] == ord("\n")
            assert "main.jsonl" in str(warning.message)


@pytest.mark.parametrize("size", [3, 2000])
def test_parts_of_reductions(folder, size):
    reduced = {
        "": np.arange(size, dtype=np.float32),
        "a/b": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "c": np.ones((2, 0), bool),
        "d": np.full((), 1.5, ml_dtypes.bfloat16),
        "e": 3 + 4j,
    }
    appended(folder, [record(3, reduced=reduced)])
    assert (folder.parent / "partials").exists() == (size == 2000)
    found = read_journal(folder)[3].reduced
    assert set(found) == set(reduced)
    for name, value in reduced.items():
        value = np.asarray(value)
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        np.testing.assert_array_equal(found[name], value)


def test_parts_of_reductions_that_are_damaged(folder):
    appended(folder, [record(3, reduced={"": np.arange(2000.0)})])
    found = read_journal(folder)[3].reduced
    (path,) = (folder.parent / "partials").iterdir()
    content = path.read_bytes()
    for damaged in (content[:-1], b"\1" + content[1:]):
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=rf"{path.name} is .* damaged.*batchax verify"):
            found[""]
    path.unlink()
    with pytest.raises(StorageError, match="is missing or damaged"):
        found[""]


def test_what_is_no_array_is_refused(folder):
    with pytest.raises(ArgumentTypeError, match="the reduction 'a' is kept as an array of numbers"):
        appended(folder, [record(0, reduced={"a": {}})])
