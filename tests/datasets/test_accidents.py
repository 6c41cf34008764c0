"""What happens to disks, files and processes while `map` is at work, or between two calls."""

import itertools
import os
import resource
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import batchax as bx
from batchax.datasets import pipeline
from batchax.datasets.arrays import Mapped
from batchax.datasets.inspect import status, verify
from batchax.datasets.store import Store

from support.map_calls import values

FLOAT = jax.dtypes.canonicalize_dtype(float)
ROWS, SIZE = 40, dict(batch_size=4, commit_rows=4)
OUTS = ["y.zarr", "y.npy", "y.parquet"]


@pytest.fixture
def x(monkeypatch):
    monkeypatch.setattr(pipeline, "_PAUSE", 0.0)
    x = np.random.default_rng(0).standard_normal((ROWS, 300)).astype(FLOAT)
    np.save("x.npy", x)
    return x


def double(x):
    return x * 2


def doubled(out, **options):
    return bx.map(double, "x.npy", out=out, **{**SIZE, "progress": False, **options})


@pytest.fixture
def at_write(monkeypatch):
    """Has something done just before the write of this number."""

    def at(number, work):
        write, count = Store.write, itertools.count(1)

        def counted(self, *args):
            if next(count) == number:
                work()
            return write(self, *args)

        monkeypatch.setattr(Store, "write", counted)

    return at


@pytest.fixture
def half_done(at_write):
    """Makes an output, and ends in the middle."""

    def fail():
        raise OSError("enough")

    def half(out):
        at_write(6, fail)
        with pytest.raises(OSError, match="enough"):
            doubled(out, retries=0)

    return half


def check(out, x):
    """The output is whole, and what was asked for."""
    assert verify(out)
    np.testing.assert_array_equal(values(out), x * 2)


def copy(old, new):
    (shutil.copytree if Path(old).is_dir() else shutil.copy)(old, new)


@pytest.mark.parametrize("out", OUTS)
def test_an_output_goes_on_elsewhere_with_its_folder_and_not_without(x, half_done, out):
    half_done(out)
    os.mkdir("far")
    partial = "" if out == "y.zarr" else ".partial"
    for new in (f"far/{out}", f"far/other{Path(out).suffix}"):
        copy(f"{out}{partial}", f"{new}{partial}")
        copy(f"{out}.job", f"{new}.job")
        assert 0 < doubled(new).reused < ROWS
        check(new, x)
    copy(f"{out}{partial}", f"far/without-{out}{partial}")
    with pytest.raises(bx.JobError, match=f"without-{out}{partial} is there already"):
        doubled(f"far/without-{out}")
    copy(f"{out}.job", f"far/gone-{out}.job")
    with pytest.raises(bx.JobError, match=f"gone-{out} is missing"):
        doubled(f"far/gone-{out}")
    assert 0 < doubled(out).reused < ROWS
    check(out, x)


def no_file_grows(bytes):
    """From now on no file of this process's gets longer than that: as on a disk that is full."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, hard))


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("bytes", [0, 1500])  # none for the journal, or for results alone
def test_no_space_is_left(x, at_write, out, bytes):
    at_write(6, lambda: no_file_grows(bytes))
    try:
        with pytest.raises(bx.StorageError, match=r"y\..*no space is left.*committed units"):
            doubled(out, retries=0)
    finally:
        no_file_grows(resource.RLIM_INFINITY)
    done = status(out).done
    assert done < ROWS
    assert verify(out)
    assert doubled(out).reused == done
    check(out, x)


@pytest.mark.parametrize("out", OUTS)
def test_damage_is_found_and_the_same_call_mends_it(x, out):
    doubled(out)
    left = {path: path.read_bytes() for path in files(out)}
    largest = max(left, key=lambda path: (len(left[path]), path))
    with open(largest, "r+b") as file:
        file.seek(len(left[largest]) - 700)
        file.write(b"\x55" * 8)
    found = verify(out)
    assert len(found.damaged) == 1
    assert "damaged" in str(found.damaged[0]) or found.damaged[0].unit.rows == 4
    assert doubled(out).reused == ROWS - 4
    assert {path: path.read_bytes() for path in files(out)} == left
    assert verify(out)


def files(out):
    return [p for p in [Path(out), *Path(out).rglob("*")] if p.is_file()]


@pytest.mark.parametrize("order", "CF")
def test_a_mapped_array_is_not_read_through_its_mapping(x, order, monkeypatch):
    np.save("long.npy", np.asarray(x, order=order).astype(">f4"))
    x = x.astype(np.float32)
    source = Mapped(*[np.load("long.npy", mmap_mode="r")] * 2, "xs")
    cut = lambda files: os.truncate("long.npy", 1000)  # just after it was looked at
    np.testing.assert_array_equal(source.read(0, 2, ROWS), x[2:])
    np.testing.assert_array_equal(source.whole(), x)
    monkeypatch.setattr(type(source.files), "check", cut)
    with pytest.raises(bx.StorageError):
        source.read(0, 2, ROWS)
