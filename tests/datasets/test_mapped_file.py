"""Files that are mapped: nothing is copied, and nobody can change or cut them under a map."""

import contextlib
import fcntl
import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.datasets import mapped_file, pipeline
from batchax.datasets.mapped_file import MappedArray, MappedFile
from batchax.datasets.npy_layout import Layout
from batchax.datasets.source import Source
from batchax.datasets.sources import as_source

try:
    with open(__file__) as _file:
        fcntl.fcntl(_file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    LEASES = True
except (AttributeError, OSError):
    LEASES = False
needs_leases = pytest.mark.skipif(not LEASES, reason="no leases on this file system")

ROWS = 24
X = np.random.default_rng(0).integers(0, 99, (ROWS, 4096)).astype(np.float32)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mapped_file, "_LEAST", 0)
    monkeypatch.setattr(pipeline, "_PAUSE", 0.0)
    np.save("x.npy", X)


def layout_of(path):
    with open(path, "rb") as file:
        return Layout.of(file)


def waits(path, flags=os.O_WRONLY):
    """Whether who opens the file now, to write to it, would have to wait."""
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK))
    except BlockingIOError:
        return True
    return False


SAVED = {
    "C": (X, 0),
    "Fortran, rows last": (np.asfortranarray(X), 1),
    "of three axes": (X.reshape(ROWS, 64, 64), 0),
}


@needs_leases
@pytest.mark.parametrize("kind", SAVED)
def test_parts_are_the_pages_of_the_file(kind):
    x, axis = SAVED[kind]
    np.save("kind.npy", x)
    layout = layout_of("kind.npy")
    array = MappedArray(Path("kind.npy"), layout)
    part: Any = array.part(axis, slice(3, 9))
    picked = (slice(None),) * axis + (slice(3, 9),)
    np.testing.assert_array_equal(part, x[picked])
    assert not part.flags.writeable
    assert part.flags.f_contiguous if layout.fortran else part.flags.c_contiguous
    again: Any = array.part(axis, slice(3, 9))
    assert np.shares_memory(part, again)  # so it is no copy
    del part, again
    array.release()


@needs_leases
def test_what_does_not_lie_in_one_piece_is_read():
    array = MappedArray(Path("x.npy"), layout_of("x.npy"))
    assert array.part(1, slice(0, 8)) is None
    np.testing.assert_array_equal(as_source("x.npy", "x").read(1, 0, 8, fresh=False), X[:, :8])


@needs_leases
@pytest.mark.parametrize("of", [lambda: "x.npy", lambda: np.load("x.npy", mmap_mode="r")])
def test_who_writes_waits_until_nobody_uses_what_is_mapped(of):
    source = as_source(of(), "x")
    part = source.read(0, 0, 4, fresh=False)
    assert not part.flags.owndata
    assert not part.flags.writeable
    fresh = source.read(0, 4, 8)
    fresh[:] = 0
    done = threading.Event()
    writer = threading.Thread(target=lambda: (os.truncate("x.npy", 200), done.set()))
    writer.start()
    assert not done.wait(4 * mapped_file._LOOK)
    np.testing.assert_array_equal(part, X[:4])  # else the process would have ended here
    np.testing.assert_array_equal(source.read(0, 4, 8, fresh=False), X[4:8])  # read, not mapped
    del part
    assert done.wait(40)  # after 45 seconds the system waits no longer
    writer.join()
    with pytest.raises(bx.StorageError, match=r"x\.npy was changed since it was opened"):
        source.read(0, 0, 4, fresh=False)


@needs_leases
@pytest.mark.parametrize("change", [
    lambda: os.truncate("x.npy", 200),
    lambda: np.save("x.npy", -X),
    lambda: os.remove("x.npy"),
])  # fmt: skip
def test_a_file_that_is_changed_in_mid_run(change, monkeypatch):
    read, reads = Source.read, []

    def counted(self, *args, **how):
        reads.append(args)
        if len(reads) == 5:
            change()  # waits until what was read is computed, and nobody has it
        return read(self, *args, **how)

    monkeypatch.setattr(Source, "read", counted)
    call = functools.partial(
        bx.map, lambda x: x * 2, "x.npy", out="y.npy", batch_size=1, commit_rows=1, progress=False
    )
    with pytest.raises(bx.StorageError, match=r"x \(.*x\.npy was changed since"):
        call()
    with pytest.raises((bx.JobError, bx.StorageError), match=r"x\.npy"):
        call()


@needs_leases
def test_a_lease_ends_with_its_map_and_with_its_source(monkeypatch):
    seen = []
    done = lambda *_: seen.append(waits("x.npy", os.O_RDWR))
    bx.map(jnp.sum, "x.npy", batch_size=2, commit_rows=2, progress=done)
    assert seen[0]
    assert not waits("x.npy")
    source = as_source("x.npy", "x")
    source.read(0, 0, 2, fresh=False)
    assert waits("x.npy")
    del source
    deadline = time.monotonic() + 40
    while waits("x.npy") and time.monotonic() < deadline:
        time.sleep(mapped_file._LOOK)
    assert not waits("x.npy")


@needs_leases
def test_a_file_that_somebody_has_open_for_writing_is_read():
    with open("x.npy", "r+b"):
        with pytest.raises(OSError):
            MappedFile(Path("x.npy"))
        np.testing.assert_array_equal(as_source("x.npy", "x").read(0, 0, 2, fresh=False), X[:2])
        assert bx.map(jnp.sum, "x.npy", progress=False).outputs.tolist() == X.sum(1).tolist()


def no_lease(self, path):
    raise OSError("there is no lease to be had")


def test_without_leases_files_are_read(monkeypatch):
    monkeypatch.setattr(MappedFile, "__init__", no_lease)
    part = as_source("x.npy", "x").read(0, 0, 4, fresh=False)
    assert part.flags.writeable
    np.testing.assert_array_equal(part, X[:4])


@needs_leases
def test_pages_that_were_given_back_are_there_again():
    source = as_source("x.npy", "x")
    parts = [source.read(0, i, i + 1, fresh=False) for i in range(ROWS)]
    del parts[::2]
    again = [source.read(0, i, i + 1, fresh=False) for i in range(ROWS)]
    np.testing.assert_array_equal(np.concatenate(parts), X[1::2])
    np.testing.assert_array_equal(np.concatenate(again), X)


def test_what_is_in_memory_is_not_copied():
    source = as_source(X, "x")
    assert np.shares_memory(source.read(0, 2, 4, fresh=False), X)
    assert not np.shares_memory(source.read(0, 2, 4), X)


@pytest.mark.parametrize("fun", [jnp.sum, lambda x: x], ids=["sum", "itself"])
def test_the_same_results_mapped_or_read(fun, monkeypatch):
    results = []
    for _ in range(2):
        results.append(bx.map(fun, "x.npy", batch_size=5, commit_rows=5, progress=False).outputs)
        monkeypatch.setattr(MappedFile, "__init__", no_lease)
    np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(np.load("x.npy"), X)


def test_who_is_told_of_progress_may_write_to_an_input(tmp_path, monkeypatch):
    """It waits for what is being computed, and not for itself; the map sees what it did."""
    monkeypatch.setattr(mapped_file, "_LEAST", 0)
    x, told = tmp_path / "x.npy", []
    np.save(x, np.ones((64, 3), np.float32))

    def write(done, total):
        if not told:
            np.save(x, np.zeros((64, 3), np.float32))
        told.append(threading.current_thread())

    with contextlib.suppress(bx.StorageError):  # if there was something left to read
        report = bx.map(jnp.sum, x, batch_size=2, commit_rows=2, progress=write)
        np.testing.assert_array_equal(report.outputs, 3)
    assert told
    assert threading.main_thread() not in told
    np.testing.assert_array_equal(np.load(x), 0)


@needs_leases
def test_the_function_itself_may_write_to_an_input(monkeypatch):
    """What it is computed from is a copy, so it need not wait for itself (45 seconds)."""

    def write(x):
        with open("x.npy", "ab") as file:
            file.write(b" ")
        return x

    def fun(x):
        total = x.sum()
        type = jax.ShapeDtypeStruct((), total.dtype)
        return jax.pure_callback(write, type, total, vmap_method="sequential")

    begun = time.monotonic()
    with pytest.raises(bx.StorageError, match="was changed since it was opened"):
        bx.map(fun, "x.npy", batch_size=2, commit_rows=2, progress=False)
    assert time.monotonic() - begun < 45
