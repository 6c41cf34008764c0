"""Inputs, outputs, code and folders that change under a map: seen, and never mixed in silence."""

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
import types
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest
import tensorstore
import zarr

import batchax as bx
from batchax.datasets import disk, objects, pipeline
from batchax.datasets import source as source_module
from batchax.datasets.addresses import address
from batchax.datasets.inspect import verify
from batchax.datasets.journal import JobFiles, read_journal
from batchax.datasets.objects import place_of
from batchax.datasets.plan import crc32c
from batchax.datasets.source import _SMALL, Files
from batchax.datasets.store import Store

FLOAT = jax.dtypes.canonicalize_dtype(float)
ROWS, UNIT = 12, dict(batch_size=2, commit_rows=2, progress=False)
X = np.arange(1.0, 1 + 3 * ROWS).reshape(ROWS, 3).astype(FLOAT)
LONG = np.tile(X, (10, 1))  # more units than are read before the first is written


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.setattr(pipeline, "_PAUSE", 0.0)


def double(x):
    return x * 2


def save_zarr(path, x):
    zarr.create_array(path, data=x, chunks=(2, 3), overwrite=True)


@pytest.fixture
def before_write(monkeypatch):
    """Has something done before the write of this number, counted from 0."""

    def before(number, work):
        write, done = Store.write, []

        def counted(self, *args):
            done.append(args)
            if len(done) == number + 1:
                work()
            return write(self, *args)

        monkeypatch.setattr(Store, "write", counted)

    return before


def written_again():
    save_zarr("x.zarr", np.tile(-X, (10, 1)))


def a_chunk_gone():
    next(p for p in sorted(Path("x.zarr").rglob("*")) if "c" in p.parts and p.is_file()).unlink()


KINDS = {
    "path": lambda: "x.zarr",
    "zarr": lambda: zarr.open_array("x.zarr", mode="r"),
    "tensorstore": lambda: tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": os.path.abspath("x.zarr")}}
    ).result(),
}


@pytest.mark.parametrize("change", [written_again, a_chunk_gone])
@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_changes_in_mid_run(kind, change, before_write):
    save_zarr("x.zarr", np.tile(X, (10, 1)))  # more units than are read before the first is written
    before_write(1, change)
    with pytest.raises(bx.StorageError, match=r"x.*x\.zarr was changed since"):
        bx.map(double, KINDS[kind](), out="y.npy", **UNIT)
    with pytest.raises(bx.JobError, match=r"y\.npy holds results of another call"):
        bx.map(double, KINDS[kind](), out="y.npy", **UNIT)


def written_in_place(x, path="x.npy"):
    """As `rsync --inplace --times` and `tar` do it: the time is what it was."""
    times = os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns
    with open(path, "r+b") as file:
        file.seek(128)
        file.write(np.ascontiguousarray(x).tobytes())
    os.utime(path, ns=times)


@pytest.mark.parametrize("small", [True, False])
def test_an_input_that_is_written_in_place_and_has_its_time_restored(
    small, before_write, monkeypatch
):
    x = np.tile(X, (10, 1))
    np.save("x.npy", x)
    monkeypatch.setattr(source_module, "_SMALL", 2**24 * small)
    time.sleep(0.02)  # a time has no more digits than the clock of the system
    before_write(1, lambda: written_in_place(-x))
    with pytest.raises(
        bx.StorageError, match=r"x \(x\.npy\): .*x\.npy was changed since it was op"
    ):
        bx.map(double, "x.npy", out="y.npy", **UNIT)
    with pytest.raises(
        bx.JobError, match=r"x .*x.npy. (is not what it was|was written again since)"
    ):
        bx.map(double, "x.npy", out="y.npy", **UNIT)
    written_in_place(x)
    if small:  # which is known by what it holds
        assert bx.map(double, "x.npy", out="y.npy", **UNIT).rows == len(x)


def memory_moves_time(folder):
    """Whether writes to a memory map move the time of a file, as on a disk."""
    x = np.lib.format.open_memmap(folder / "probe.npy", "w+", FLOAT, (4,))
    x.flush()
    before = os.stat(folder / "probe.npy").st_mtime_ns
    time.sleep(0.02)
    x[0] = 1
    return os.stat(folder / "probe.npy").st_mtime_ns != before


@pytest.mark.parametrize("kind", ["small", "on a disk"])
def test_an_input_that_somebody_writes_through_a_memory_map(
    kind, before_write, monkeypatch, tmp_path
):
    """Also into pages that they have written to before, which moves no time by itself."""
    folder = tmp_path
    if kind == "small" and os.access("/dev/shm", os.W_OK):
        folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        monkeypatch.setattr(Files, "check", lambda self: None)  # wherever it is
    elif kind != "small":
        monkeypatch.setattr(source_module, "_SMALL", 0)
        if not memory_moves_time(tmp_path):
            pytest.skip("this file system moves no time")
    path, x = str(folder / "x.npy"), np.tile(X, (10, 1))
    mapped = np.lib.format.open_memmap(path, "w+", FLOAT, x.shape)
    mapped[:] = x  # pages that are not written out

    def write():
        mapped[-1] = 0

    time.sleep(0.02)
    before_write(1, write)
    with pytest.raises(bx.StorageError, match=r"x\.npy was changed since it was opened"):
        bx.map(double, path, out="y.npy", **UNIT)
    assert not Path("y.npy.job/done.json").exists()
    if folder != tmp_path:
        shutil.rmtree(folder)


def test_who_is_told_of_progress_may_write_to_an_input():
    np.save("x.npy", np.ones((64, 3), np.float32))
    told = []

    def write(done, total):
        if not told:
            np.save("x.npy", np.zeros((64, 3), np.float32))
        told.append(done)

    with contextlib.suppress(bx.StorageError):  # if there was something left to read
        report = bx.map(jnp.sum, "x.npy", **{**UNIT, "progress": write})
        np.testing.assert_array_equal(report.outputs, 3)
    assert told
    np.testing.assert_array_equal(np.load("x.npy"), 0)


@pytest.mark.parametrize("write", ["append", "cut"])
def test_the_function_itself_may_write_to_an_input(write):
    """What it is computed of is a copy."""
    np.save("x.npy", np.tile(X, (100, 1)))

    def on_host(x):
        if write == "cut":
            os.truncate("x.npy", 200)
        else:
            with open("x.npy", "ab") as file:
                file.write(b" ")
        return x

    fun = lambda x: jax.pure_callback(on_host, x, x, vmap_method="sequential")
    for source in ("x.npy", np.load("x.npy", mmap_mode="r")):
        with pytest.raises(bx.StorageError, match="was changed since it was opened"):
            bx.map(fun, source, **UNIT)
        np.save("x.npy", np.tile(X, (100, 1)))


def save_h5(path, x, name="x"):
    with h5py.File(path, "a") as file:
        if name in file:
            del file[name]
        file[name] = x


def replace_h5(path, x):
    """Replaces a file: writes to one that the process also reads stay in memory for a while."""
    save_h5("new.h5", x)
    os.replace("new.h5", path)


def linked_from(kind):
    """A path of these rows, which lie in another file, and that file."""
    if kind == "external link":
        save_h5("other.h5", LONG)
        with h5py.File("middle.h5", "w") as middle, h5py.File("x.h5", "w") as file:
            middle["y"] = h5py.ExternalLink("other.h5", "/x")
            file["a/soft"] = h5py.SoftLink("y")
            file["a/y"] = h5py.ExternalLink("middle.h5", "y")
        return "x.h5:a/soft", lambda x: replace_h5("other.h5", x)
    if kind == "virtual":
        save_h5("other.h5", LONG)
        layout = h5py.VirtualLayout(LONG.shape, LONG.dtype)
        layout[:] = h5py.VirtualSource("other.h5", "x", LONG.shape)
        with h5py.File("x.h5", "w") as file:
            file.create_virtual_dataset("x", layout)
        return "x.h5:x", lambda x: replace_h5("other.h5", x)
    if kind == "raw":
        LONG.tofile("other.bin")
        where = [(os.path.abspath("other.bin"), 0, LONG.nbytes)]
        with h5py.File("x.h5", "w") as file:
            file.create_dataset("x", LONG.shape, LONG.dtype, external=where)
        return "x.h5:x", lambda x: x.tofile("other.bin")
    save_zarr("other.zarr", LONG)
    shutil.copytree("other.zarr", "x.zarr")
    chunks = "c" if kind == "linked folder" else "c/3/0"
    (shutil.rmtree if kind == "linked folder" else os.unlink)(f"x.zarr/{chunks}")
    os.symlink(os.path.abspath(f"other.zarr/{chunks}"), f"x.zarr/{chunks}")
    return "x.zarr", lambda x: save_zarr("other.zarr", x)


LINKS = ["external link", "virtual", "raw", "linked folder", "linked chunk"]


@pytest.mark.parametrize("kind", LINKS)
def test_an_input_that_lies_in_other_files(kind, before_write):
    """Is what these hold: when they change the call ends, and another one is another call."""
    path, save = linked_from(kind)
    bx.map(double, path, out="whole.npy", **UNIT)
    np.testing.assert_array_equal(np.load("whole.npy"), LONG * 2)
    time.sleep(0.02)
    before_write(0, lambda: save(-LONG))
    with pytest.raises(bx.StorageError, match=r"was changed since it was opened"):
        bx.map(double, path, out="y.npy", **UNIT)
    with pytest.raises(bx.JobError, match=r"whole\.npy holds results of another call: x "):
        bx.map(double, path, out="whole.npy", **UNIT)


@pytest.mark.parametrize("kind", LINKS)
def test_an_input_that_lies_in_other_files_that_are_gone(kind):
    path, _ = linked_from(kind)
    if kind == "virtual":
        bx.map(double, h5py.File("x.h5")["x"], progress=False)
    name = {"external link": "other.h5", "virtual": "other.h5", "raw": "other.bin"}
    os.rename(name.get(kind, "other.zarr"), "gone")
    with pytest.raises(bx.StorageError, match=rf"{name.get(kind, 'c')}"):
        bx.map(double, path, progress=False)
    if kind == "virtual":
        with (
            h5py.File("x.h5") as file,
            pytest.raises(bx.StorageError, match=r"other\.h5, which is"),
        ):
            bx.map(double, file["x"], progress=False)


def test_values_in_a_file_that_depends_on_the_folder_of_the_process():
    X.tofile("other.bin")
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("x", X.shape, X.dtype, external=[("other.bin", 0, X.nbytes)])
    with pytest.raises(bx.StorageError, match=r"'other\.bin', in the folder of whichever"):
        bx.map(double, "x.h5:x", progress=False)


INPUTS = {
    "npy": lambda: (np.save("x.npy", X), "x.npy")[1],
    "npz": lambda: (np.savez("x.npz", x=X), "x.npz:x")[1],
    "open h5": lambda: (save_h5("x.h5", X), h5py.File("x.h5")["x"])[1],
    "pattern": lambda: (np.save("x.npy", X), "x*.npy")[1],
    "mapped": lambda: (np.save("x.npy", X), np.load("x.npy", mmap_mode="r"))[1],
    "path of zarr": lambda: (save_zarr("x.zarr", X), "x.zarr")[1],
    "in a group": lambda: zarr.open_group("g.zarr", mode="a").create_array("x", data=X),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_the_folder_of_the_process_changes_in_mid_run(kind, tmp_path):
    """Whatever was named by a path from there stays what it was."""
    (elsewhere := tmp_path / "elsewhere").mkdir()
    outs = ["y.npy", "y.zarr", "y.parquet"] if kind == "npy" else ["y.npy"]
    x = INPUTS[kind]()
    for out in outs:
        os.chdir(tmp_path)
        report = bx.map(double, x, out=out, **{**UNIT, "progress": lambda *_: os.chdir(elsewhere)})
        assert not list(elsewhere.iterdir())
        read = [report.outputs] if isinstance(report.outputs, str) else report.outputs
        np.testing.assert_array_equal(bx.map(lambda y: y, *read, progress=False).outputs, X * 2)
        assert verify(tmp_path / out)


def test_a_folder_is_known_by_each_of_its_files():
    """Not by the sum of sizes and the newest time: of files that were swapped these are the same"""
    x = np.random.default_rng(0).standard_normal((4, _SMALL // 16)).astype("float32")
    zarr.create_array("x.zarr", data=x, chunks=(1, _SMALL // 16), compressors=None)
    chunks = sorted(p for p in Path("x.zarr").rglob("*") if "c" in p.parts and p.is_file())
    before = Files(Path("x.zarr"), "x").identity()
    for i, chunk in enumerate(chunks):
        os.utime(chunk, ns=(i, i))
    times = Files(Path("x.zarr"), "x").identity()
    shutil.move(chunks[0], "aside")
    shutil.move(chunks[1], chunks[0])
    shutil.move("aside", chunks[1])
    after = Files(Path("x.zarr"), "x").identity()
    assert "sha256" not in before  # it is too large to be read
    assert after["size"] == times["size"]
    assert after["modified_ns"] == times["modified_ns"]
    assert len({x["files"] for x in (before, times, after)}) == 3


def test_a_small_input_that_was_written_again_and_holds_the_same():
    for write, path in ((np.save, "x.npy"), (save_zarr, "x.zarr")):
        write(path, X)
        out = f"{path}.out.npy"
        bx.map(double, path, out=out, **UNIT)
        write(path, X)
        os.utime(next(p for p in [Path(path), *Path(path).rglob("*")] if p.is_file()), ns=(7, 7))
        assert bx.map(double, path, out=out, **UNIT).reused == ROWS
        write(path, -X)
        with pytest.raises(bx.JobError, match=rf"x \({path}\) was "):
            bx.map(double, path, out=out, **UNIT)


@pytest.fixture
def stopped(before_write):
    """A call that stops before it has written all."""

    def stopped(fun, out, at=3, **how):
        def stop():
            raise RuntimeError("stopped")

        before_write(at, stop)
        with pytest.raises(RuntimeError, match="stopped"):
            bx.map(fun, X, out=out, **UNIT, **how)

    return stopped


def here(out):
    """Where an output is: until it is whole, it may have another name."""
    return JobFiles(address(out, "out")).here


@pytest.mark.parametrize("out", ["y.zarr", "y.npy", "y.parquet"])
def test_an_output_that_is_not_finished_is_no_input(out, stopped):
    """With the folder of its job, and without: then others find no whole array there either."""
    stopped(double, out)
    now = str(here(out))
    shutil.copytree(now, f"copy/{now}") if os.path.isdir(now) else shutil.copy(now, "copy")
    if out == "y.npy":
        os.makedirs("folder")
        shutil.move("copy", f"folder/{now}")
        shutil.move("folder", "copy")
    member = ":result" if "parquet" in out else ""
    says = (
        r"is the output of a job that is not fin|no Zarr array|the format is unknown|no such file"
    )
    for path in (out, now, f"copy/{now}", os.path.abspath(f"copy/{now}")):
        with pytest.raises((bx.StorageError, bx.ArgumentTypeError), match=says):
            bx.map(double, f"{path}{member}", out="z.npy", **UNIT)
    if out == "y.zarr":
        for path in (out, f"copy/{out}"):
            with pytest.raises(FileNotFoundError):
                zarr.open(path, mode="r")
    else:
        assert not os.path.lexists(out)
    bx.map(double, X, out=out, **UNIT)
    assert here(out) == Path(out)
    np.testing.assert_array_equal(
        bx.map(lambda x: x, f"{out}{member}", progress=False).outputs, X * 2
    )


def test_a_copy_of_objects_that_are_not_all_there_is_no_input(stopped, tmp_path):
    out = f"memory://{uuid.uuid4()}/y.parquet"
    stopped(double, out, retries=0)
    root = address(out, "out")
    copy = address(f"memory://{uuid.uuid4()}/y.parquet", "out")
    for path, _ in list(objects.below(root)):
        objects.put(copy / path.name, objects.read(path))
        (tmp_path / "y.parquet").mkdir(exist_ok=True)
        (tmp_path / "y.parquet" / path.name).write_bytes(objects.read(path))
    for place in (copy, "y.parquet"):
        with pytest.raises(bx.StorageError, match="had not finished when it was copied"):
            bx.map(double, f"{place}:result", progress=False)
    bx.map(double, X, out=out, **UNIT)
    np.testing.assert_array_equal(bx.map(double, f"{out}:result", progress=False).outputs, X * 4)


@pytest.mark.parametrize("out", ["y.npy", "y.parquet"])
def test_what_somebody_puts_in_the_place_of_an_output_is_not_written_over(out, before_write):
    before_write(4, lambda: Path(out).write_text("precious"))
    with pytest.raises(bx.JobError, match=rf"{out} was made by something else while its results"):
        bx.map(double, X, out=out, **UNIT)
    assert Path(out).read_text() == "precious"
    Path(out).unlink()
    assert bx.map(double, X, out=out, **UNIT).reused == ROWS


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("out", ["y.zarr", "y.npy"])
def test_an_output_that_was_replaced(out, finished, stopped):
    bx.map(lambda x: x * 3, X, out=f"other{out[1:]}", **UNIT)
    if finished:
        bx.map(double, X, out=out, **UNIT)
    else:
        stopped(double, out)
    now = here(out)
    shutil.rmtree(now) if now.is_dir() else now.unlink()
    Path(f"other{out[1:]}").rename(now)
    with pytest.raises(bx.JobError, match=rf"{out} does not hold what was written to it: rows \d"):
        bx.map(double, X, out=out, **UNIT)
    if out == "y.zarr":  # what is damaged is recomputed
        assert not verify(out)
        assert bx.map(double, X, out=out, **UNIT).reused < ROWS
        np.testing.assert_array_equal(zarr.open_array(out, mode="r")[:], X * 2)


def written_over(out):
    """By another array, in the same file or folder, or in others of the same names."""
    if out.endswith(".zarr"):
        return save_zarr(out, -X)  # which deletes the folder, and makes another
    if out.endswith(".npy"):
        with open(here(out), "wb") as file:
            return np.save(file, -X)
    file = min(here(out).glob("*.parquet"), key=os.path.getmtime)
    table = pyarrow.parquet.read_table(file)
    column = pyarrow.array(list(-X[:2]), table.column(0).type)
    pyarrow.parquet.write_table(pyarrow.table({"result": column}), file)


def moved_away(out):
    """And another one of this shape is put there."""
    now = here(out)
    shutil.move(now, "aside")
    (shutil.copytree if Path("aside").is_dir() else shutil.copy)("aside", now)


def deleted(out):
    os.rename(here(out), "gone")  # at once, whoever writes to it


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("change", [written_over, moved_away, deleted])
@pytest.mark.parametrize("out", ["y.npy", "y.zarr", "y.parquet"])
def test_an_output_that_somebody_changes_in_mid_run(out, change, late, before_write, monkeypatch):
    """Before the last unit is written, and after it."""
    if late:
        check = Store.verify_unchanged

        def changed(self, at_end=False):
            if at_end:
                change(out)
            check(self, at_end)

        monkeypatch.setattr(Store, "verify_unchanged", changed)
    else:
        before_write(4, lambda: change(out))
    told = "(replaced|does not hold|is missing|is truncated|cannot be read)"
    with pytest.raises(bx.BatchaxError, match=rf"{out}.* {told}"):
        bx.map(double, X, out=out, **UNIT)
    assert not Path(f"{out}.job/done.json").exists()


def a_file_of(out, number=3):
    """The file of a unit of an output."""
    place = place_of(address(out, "out"))
    out = str(here(out))
    name = f"c.{number}.0" if ".zarr" in out else f"part-{number:08d}.parquet"
    return place, address(out, "out") / name


def remove_a_file(out, number=3):
    place, file = a_file_of(out, number)
    assert place.exists(file)
    place.remove(file)


def source_of(out):
    return f"{out}:result" if "parquet" in out else out


LISTED = ["y.zarr", "y.parquet", "memory://{}/y.zarr", "memory://{}/y.parquet"]


@pytest.mark.parametrize("out", LISTED)
def test_a_file_of_a_stopped_job_that_is_gone_is_computed_again(out, stopped):
    out = out.format(uuid.uuid4())
    stopped(double, out, 5, retries=0)
    number = min(read_journal(JobFiles(address(out, "out")).journal))
    remove_a_file(out, number)
    report = bx.map(double, X, out=out, **UNIT)
    assert report.rows == ROWS
    assert verify(out)
    np.testing.assert_array_equal(bx.map(double, source_of(out), progress=False).outputs, X * 4)


@pytest.mark.parametrize("out", LISTED)
def test_a_file_of_a_finished_job_that_is_gone(out):
    """Is no zeros for who reads it, and is recomputed by the same call."""
    out = out.format(uuid.uuid4())
    bx.map(double, X, out=out, **UNIT)
    _, file = a_file_of(out)
    remove_a_file(out)
    with pytest.raises(bx.StorageError, match=rf"{file} is missing, and its rows would count as"):
        bx.map(double, source_of(out), progress=False)
    assert bx.map(double, X, out=out, **UNIT).reused == ROWS - 2
    np.testing.assert_array_equal(bx.map(double, source_of(out), progress=False).outputs, X * 4)


@pytest.mark.parametrize("out", LISTED[:2])
def test_a_file_that_goes_while_others_write(out):
    """Whoever wrote it: what is missing at the end is told by name, and recomputed."""
    gone = []

    def remove(done, _):
        if not gone and done == ROWS:
            gone.append(remove_a_file(out))

    with ThreadPoolExecutor(1) as pool:
        how = {**UNIT, "executor": pool, "progress": remove}
        with pytest.raises(bx.JobError, match=rf"{a_name(out)} was overwritten or deleted"):
            bx.map(double, X, out=out, **how)
    assert bx.map(double, X, out=out, **UNIT).reused == ROWS - 2
    np.testing.assert_array_equal(bx.map(double, source_of(out), progress=False).outputs, X * 4)


def a_name(out):
    return r"c\.3\.0" if "zarr" in out else r"part-00000003\.parquet"


def test_a_lock_that_was_deleted(before_write):
    """Who deletes the folder of a job and begins another has that one's results, and no others"""

    def remove():  # once more where a line of the journal was written meanwhile
        while Path("y.npy.job/lock").exists() or Path("y.npy.job/journal").exists():
            shutil.rmtree("y.npy.job", ignore_errors=True)

    before_write(2, remove)
    with pytest.raises(bx.JobError, match=r"y\.npy\.job/lock was deleted while this process"):
        bx.map(double, X, out="y.npy", **UNIT)
    assert not Path("y.npy.job/done.json").exists()


def journal_cut():
    path = Path("y.npy.job/journal/main.jsonl")
    if path.exists():
        os.truncate(path, path.stat().st_size // 2)


FILES_OF_JOBS = {
    "journal deleted": (lambda: shutil.rmtree("y.npy.job/journal", True), "journal of the job of"),
    "journal cut": (journal_cut, "journal of the job of"),
    "job.json": (lambda: Path("y.npy.job/job.json").unlink(missing_ok=True), "job.json in"),
}


@pytest.mark.parametrize("kind", FILES_OF_JOBS)
def test_a_file_of_a_job_that_goes_in_mid_run(kind):
    """Is told, as what it is: not as if somebody had interrupted the call."""
    change, says = FILES_OF_JOBS[kind]
    with pytest.raises(bx.JobError, match=rf"{says} y\.npy"):
        bx.map(double, X, out="y.npy", **{**UNIT, "progress": lambda *_: change()})


@pytest.mark.parametrize("root", ["", "memory://verified/"])
def test_an_array_that_says_no_longer_what_it_is_is_not_verified(root):
    out = f"{root}y.zarr"
    bx.map(double, X, out=out, **UNIT)
    path = address(f"{out}/zarr.json", "path")
    content = place_of(path).read(path)
    assert verify(out)
    place_of(path).replace(path, content.replace(b'"little"', b'"big"'))
    with pytest.raises(bx.JobError, match=r"y\.zarr is not the array that this job made"):
        verify(out)
    place_of(path).remove(path)
    with pytest.raises(bx.StorageError, match=r"y\.zarr/zarr\.json is missing"):
        verify(out)


def test_a_folder_of_the_process_that_goes_in_mid_run(tmp_path):
    (folder := tmp_path / "gone").mkdir()

    def leave(*_):
        if folder.exists():
            os.chdir(folder)
            folder.rmdir()

    report = bx.map(double, X, out="y.npy", **{**UNIT, "progress": leave})
    np.testing.assert_array_equal(np.load(report.outputs), X * 2)
    with pytest.raises(bx.StorageError, match=r"out='z\.npy' is a path from the folder of"):
        bx.map(double, X, out="z.npy", **UNIT)


@pytest.mark.parametrize("removed", ["y.npy.job", "y.npy.job/journal"])
def test_a_folder_that_goes_while_the_journal_is_written(removed, monkeypatch):
    """What is said is what happened: of a deleted job that it was, of a lost journal that it is"""
    begin = disk._AppendedFile._open

    def opened(self):
        shutil.rmtree(removed, ignore_errors=True)
        Path(removed).write_text("a file, so that no folder is made")
        return begin(self)

    monkeypatch.setattr(disk._AppendedFile, "_open", opened)
    error, says = (
        (bx.StorageError, r"could not be written")
        if removed.endswith("journal")
        else (bx.JobError, r"y\.npy\.job/lock was deleted while this process")
    )
    with pytest.raises(error, match=says):
        bx.map(double, X, out="y.npy", **UNIT)


@pytest.mark.parametrize("name", ["lock", "journal/main.jsonl"])
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe"])
def test_links_in_the_folder_of_a_job_are_not_written_through(name, kind, stopped):
    stopped(double, "y.npy")
    place = Path("y.npy.job") / name
    place.unlink()
    Path("mine").write_text("precious")
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(Path("mine" if kind == "link" else "nothing").absolute())
    with pytest.raises(bx.StorageError, match="is a link, or is not a file"):
        bx.map(double, X, out="y.npy", **UNIT)
    assert Path("mine").read_text() == "precious"
    assert not Path("nothing").exists()


@pytest.mark.parametrize("name", ["journal", "partials"])
@pytest.mark.parametrize("there", [True, False])
def test_links_in_place_of_folders_of_a_job_are_not_written_through(name, there, stopped):
    large = lambda x: (x, jnp.zeros(2000))  # its sum does not fit into a line of the journal
    how = dict(out="y.npy", out_axes=(0, bx.Reduce("sum")))
    stopped(large, **how)
    place = Path("y.npy.job") / name
    shutil.move(place, "mine") if there else shutil.rmtree(place)
    place.symlink_to(Path("mine").absolute())
    before = {p: p.read_bytes() for p in Path().glob("mine/*")}
    with pytest.raises(bx.StorageError, match=f"{name} is a link"):
        bx.map(large, X, **UNIT, **how)
    assert before == {p: p.read_bytes() for p in Path().glob("mine/*")}
    assert Path("mine").exists() is there


def test_a_folder_of_a_job_may_be_a_link_itself():
    Path("elsewhere").mkdir()
    Path("y.npy.job").symlink_to("elsewhere")
    bx.map(double, X, out="y.npy", **UNIT)
    assert bx.map(double, X, out="y.npy", **UNIT).reused == len(X)
    assert Path("elsewhere/done.json").exists()


def test_what_workers_are_handed_is_no_others_to_read_and_does_not_stay(stopped):
    """It may hold what a module of the user's does: tokens, and passwords."""
    modes = []

    def look(done, total):
        for path in Path().glob("y.npy.job/engine-*/*.pickle"):
            modes.append((path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777))

    with ThreadPoolExecutor(1) as pool:
        bx.map(double, X, out="y.npy", executor=pool, **{**UNIT, "progress": look})
    assert set(modes) == {(0o600, 0o700)}
    assert not list(Path().glob("*.job/engine-*"))
    stopped(double, "z.npy")
    left = Path("z.npy.job/engine-0123")  # by a call that was killed
    left.mkdir()
    (left / "call.pickle").touch()
    bx.map(double, X, out="z.npy", **UNIT)
    assert not left.exists()


class Disturbed(ThreadPoolExecutor):
    """Workers that import and open by themselves, after something was done."""

    def __init__(self, work):
        super().__init__(2)
        self._work = work

    def submit(self, fun, *args, **kwargs):
        work, self._work = self._work, None
        if work is not None:
            work()
        return super().submit(fun, *args, **kwargs)


@pytest.fixture
def module(monkeypatch):
    module = types.ModuleType("a_module_of_the_users")
    source = "import jax.numpy as jnp\nW = jnp.asarray({})\ndef row(x):\n    return x * W\n"
    exec(source.format(10.0), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.edit = lambda: exec(source.format(20.0), vars(module))
    return module


@pytest.mark.parametrize("what", ["module", "rows", "shared", "call"])
def test_a_worker_that_finds_something_else(what, module):
    np.save("x.npy", X)
    np.save("w.npy", X[0])
    fun = module.row if what == "module" else lambda x, w: x * w
    work = {
        "module": module.edit,
        "rows": lambda: np.save("x.npy", -X),
        "shared": lambda: np.save("w.npy", -X[0]),
        "call": lambda: next(Path().glob("*.job/engine-*/call.pickle")).write_bytes(b"evil"),
    }[what]
    args, in_axes = ("x.npy", Path("w.npy")), (0, None)
    if what == "module":
        args, in_axes = args[:1], 0
    says = {
        "module": "a worker found something else.*the function computes something else",
        "rows": r"a worker found something else.*x \(.*x\.npy\) was",
        "shared": r"a worker found something else.*w has other values",
        "call": r"call\.pickle was changed after the call was made",
    }[what]
    with Disturbed(work) as pool, pytest.raises(bx.JobError, match=says):
        bx.map(fun, *args, in_axes=in_axes, out="y.npy", executor=pool, **UNIT)
    with Disturbed(None) as pool:  # nothing was done yet
        here("y.npy").unlink()
        shutil.rmtree("y.npy.job")
        report = bx.map(fun, *args, in_axes=in_axes, out="y.npy", executor=pool, **UNIT)
    assert report.rows == ROWS


def test_a_shared_integer_that_does_not_fit():
    if jax.config.jax_enable_x64:
        pytest.skip("it fits 64 bits")
    with pytest.raises(bx.ArgumentTypeError, match=r"n: a number of dtype int64 does not"):
        bx.map(lambda x, n: x + n, X, np.int64(2**40), in_axes=(0, None), progress=False)


def test_outputs_that_are_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"'r0' without a suffix \(\.zarr, .*Parquet, which needs"
    ):
        bx.map(double, X, out="r0", progress=False)
    save_zarr("x.zarr", X)
    with pytest.raises(bx.ArgumentTypeError, match=r"out='x\.zarr/y\.npy' lies in x"):
        bx.map(double, "x.zarr", out="x.zarr/y.npy", progress=False)


@pytest.mark.parametrize("name", ["job.json", "done.json", "journal/main.jsonl"])
def test_files_of_a_job_that_somebody_made_up(name):
    """With checksums that are right: a sentence, or what they say counts for nothing"""
    bx.map(double, X, out="y.npy", **UNIT)
    for said in ({"format": 1}, {"unit": "x", "ended": 0}, [1], "x", {"journal": 3, "plan": []}):
        text = json.dumps(said).encode()[:-1]
        (Path("y.npy.job") / name).write_bytes(text + b',"crc32c":"%08x"}\n' % crc32c(text))
        if name == "done.json":
            assert bx.map(double, X, out="y.npy", **UNIT).reused == ROWS
            continue
        Path("y.npy.job/done.json").unlink(missing_ok=True)
        with pytest.raises((bx.JobError, bx.StorageError), match=r"y\.npy\.job"):
            bx.map(double, X, out="y.npy", **UNIT)


def test_what_has_no_rows_that_jax_has_numbers_for():
    with h5py.File("e.h5", "w") as file:
        file["empty"], file["x"] = h5py.Empty("f4"), X
        empty, closed = file["empty"], file["x"]
        with pytest.raises(bx.ArgumentTypeError, match=r"x is empty, and has no shape"):
            bx.map(double, empty, progress=False)
    with pytest.raises(bx.ArgumentTypeError, match=r"e\.h5:empty\) is empty, and has no shape"):
        bx.map(double, "e.h5:empty", progress=False)
    with pytest.raises(bx.StorageError, match=r"x cannot be read"):
        bx.map(double, closed, progress=False)
    with pytest.raises(bx.ArgumentTypeError, match=r"x: JAX has no numbers of dtype float1"):
        bx.map(double, X.astype(np.longdouble), progress=False)


def test_a_scheduler_that_is_not_there(monkeypatch):
    import distributed

    def client(*_, **__):
        raise OSError("Timed out trying to connect to tcp://127.0.0.1:9 after 30 s")

    monkeypatch.setattr(distributed, "Client", client)
    with pytest.raises(bx.JobError, match="there is no scheduler of Dask"):
        bx.map(double, X, out="y.npy", executor="dask:tcp://127.0.0.1:9", **UNIT)


def test_a_traceback_is_kept_once_for_rows_that_fail_alike():
    def fail(x):
        if x[0] > 1:
            raise ValueError(f"no {x[0]:.0f}")
        return x

    fun = lambda x: jax.pure_callback(fail, x, x, vmap_method="sequential")
    options = dict(out="y.npy", version="1", on_error="quarantine", progress=False)
    report = bx.map(fun, X, batch_size=6, commit_rows=6, **options)
    assert [b.row for b in report.bad] == list(range(1, ROWS))
    assert report.bad[4].error == "ValueError: no 16"
    tracebacks = {b.traceback for b in report.bad}
    assert len(tracebacks) <= 4  # for each of two units: alone, and with others
    assert all("in fail" in text for text in tracebacks)
    for file in ("quarantine.jsonl", "done.json", "journal/main.jsonl"):
        assert Path("y.npy.job", file).stat().st_size < 6 * len(max(tracebacks, key=len))
    lines = Path("y.npy.job/quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines] == list(range(1, ROWS))


def test_fewer_units_than_shards():
    options = dict(out="y.npy", batch_size=6, commit_rows=6, progress=False)
    report = bx.map(double, X, executor="shard:1/4", **options)
    assert str(report).startswith("6 of 12 rows, 6 left to other shards")
    assert bx.map(double, X, executor="shard:4/4", **options).left == 0
