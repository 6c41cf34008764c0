"""`map` called in odd ways: paths, names, numbers of rows, arguments of the wrong kind."""

import io
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import xarray

import batchax as bx
from batchax.command import main
from batchax.datasets import journal
from batchax.datasets.inspect import status, verify
from batchax.datasets.plan import sealed, unsealed

from support import steps
from support.processes import python

FLOAT = jax.dtypes.canonicalize_dtype(float)


@pytest.fixture
def x():
    x = np.random.default_rng(0).standard_normal((10, 3)).astype(FLOAT)
    np.save("x.npy", x)
    return x


def same(x):
    return x


def quiet(fun, *args, **options):
    return bx.map(fun, *args, **{"progress": False, **options})


def test_one_input_by_many_names(x, tmp_path, monkeypatch):
    quiet(same, "x.npy", out="y.npy")
    os.symlink(tmp_path, tmp_path / "link")
    os.symlink("x.npy", tmp_path / "also.npy")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    for name in ("../x.npy", "../link/x.npy", "../also.npy", tmp_path / "x.npy"):
        assert quiet(same, name, out="../y.npy").reused == 10
    assert quiet(same, "../x.npy", out=tmp_path / "link" / "y.npy").reused == 10


def test_a_folder_is_what_ends_in_a_slash(x):
    report = quiet(same, "x.npy", out="v1.2/")
    assert report.outputs == "v1.2:result"
    assert quiet(same, "x.npy", out="v1.2/").reused == 10
    assert status("v1.2/").done == 10
    assert verify("v1.2")
    with pytest.raises(bx.ArgumentTypeError, match="results are written to"):
        quiet(same, "x.npy", out="v1.2")


NO_OUTPUT = ["", ".", "..", "/", "a/..", 3, True, b"y.npy", "s3://bucket", "y.h5"]


@pytest.mark.parametrize("out", NO_OUTPUT)
def test_what_cannot_be_an_output(x, out, tmp_path):
    with pytest.raises(bx.ArgumentTypeError, match="out"):
        quiet(same, "x.npy", out=out)
    assert os.listdir(tmp_path) == ["x.npy"]


@pytest.mark.parametrize("folder", ["", "memory://odd/"])
def test_an_output_within_that_of_another_call(x, folder):
    called = []
    kept = lambda row: {"r": row}
    quiet(kept, x, out=f"{folder}y.zarr")
    for within in ("y.zarr/z.zarr", "y.zarr/r/z.parquet", "y.zarr.job/z.zarr"):
        with pytest.raises(
            bx.JobError, match=r"is of another call of map.* outside of that folder"
        ):
            quiet(lambda row: called.append(row) or row, x, out=f"{folder}{within}", batch_size=2)
    assert all(isinstance(row, jax.core.Tracer) for row in called)
    assert quiet(kept, x, out=f"{folder}y.zarr").reused == 10
    assert verify(f"{folder}y.zarr")


NAMES = ["a.b", "a'b", 'a"b', "a[0]", "a b", "ä", "c", ".hidden", "a/b"]


@pytest.mark.parametrize("out", ["y.zarr", "y.parquet"])
@pytest.mark.compiles(60)
def test_names_of_results_are_the_keys_of_dicts(x, out):
    fun = lambda x: {name: x + i for i, name in enumerate(NAMES)}
    report = quiet(fun, "x.npy", out=out)
    for i, name in enumerate(NAMES):
        where = f"{out}/{name}" if out == "y.zarr" else f"{out}:{name}"
        assert report.outputs[name] == where
        np.testing.assert_array_equal(quiet(same, where).outputs, x + FLOAT.type(i))


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("out", [None, "y.npy", "y.zarr", "y.parquet"])
def test_hardly_any_rows(x, rows, out):
    for again in range(2):
        report = quiet(same, x[:rows], out=out)
        assert (report.rows, report.reused) == (rows, rows if again and out else 0)
    if out:
        assert verify(out)
        assert status(out).finished


def test_the_kind_of_a_key_counts(x):
    draw = lambda key, x: x + jax.random.uniform(key)
    call = lambda kind: quiet(draw, "x.npy", out="y.npy", key=jax.random.key(1, impl=kind))
    call("rbg")
    assert call("rbg").reused == 10
    with pytest.raises(bx.JobError, match=r"key was rbg .*, is unsafe_rbg"):
        call("unsafe_rbg")


def test_results_whose_axis_is_left_to_us(x):
    fun = lambda x: (x, x.sum(), 3.0)
    report = quiet(fun, x.T, in_axes=1, out_axes=bx.AUTO, batch_size=4)
    np.testing.assert_array_equal(report.outputs[0], x)
    np.testing.assert_array_equal(report.outputs[2], np.full(10, 3.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_what_is_not_finite_is_seen_in_any_type(x, dtype):
    x[3, 1] = np.nan
    report = quiet(lambda x: x.astype(dtype), x, on_nonfinite="quarantine", batch_size=4)
    assert [bad.row for bad in report.bad] == [3]


@pytest.mark.parametrize("fun", [same, lambda *, x: x, jax.jit(same)])
def test_a_key_and_nobody_who_takes_it(x, fun):
    with pytest.raises(bx.ArgumentTypeError, match=r"key was passed, but .* has no parameter for"):
        quiet(fun, x, key=jax.random.key(0))


def test_an_argument_of_the_function_by_keyword(x):
    with pytest.raises(bx.ArgumentTypeError, match=r"'n'\. Pass arguments of the function by pos"):
        quiet(lambda x, n: n * x, x, n=3)
    assert quiet(lambda x, n: n * x, x, 3, in_axes=(0, None)).rows == len(x)


def test_a_column_that_is_not_named(x):
    quiet(same, x, out="y.parquet")
    with pytest.raises(bx.ArgumentTypeError, match=r"add the name of a column.* result"):
        quiet(same, "y.parquet")


def test_progress_that_fails_loses_nothing(x):
    def fail(done, of):
        raise RuntimeError("a bug in progress")

    with pytest.raises(RuntimeError, match="a bug in progress"):
        bx.map(same, x, out="y.npy", progress=fail)
    assert quiet(same, x, out="y.npy").reused == 10


class Gone(io.StringIO):
    """A file whose reader went away."""

    def write(self, text):
        raise BrokenPipeError


@pytest.mark.parametrize("stderr", [None, Gone()])
def test_nobody_sees_how_far_it_is(x, monkeypatch, capsys, stderr):
    monkeypatch.setattr(sys, "stderr", stderr)
    assert bx.map(same, x, out="y.npy").rows == 10
    assert capsys.readouterr().out == ""


def positive(x):
    """Finds a size, of which a row by itself has no program."""
    return bx.compress(x > 0, x).sum()


@pytest.mark.parametrize(
    "executor", [None, "shard:0/1", pytest.param("processes:1", marks=pytest.mark.nightly)]
)
def test_sizes_that_the_function_finds(x, executor):
    how = dict(out="y.npy", executor=executor, batch_size=2, commit_rows=4)
    assert quiet(positive, "x.npy", **how).reused == 0
    np.testing.assert_allclose(np.load("y.npy"), np.where(x > 0, x, 0).sum(1), 1e-5, 1e-5)
    assert quiet(positive, "x.npy", **how).reused == 10
    with pytest.raises(bx.JobError, match="computes something else"):
        quiet(lambda x: positive(2 * x), "x.npy", out="y.npy", batch_size=2, commit_rows=4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(x=[[1.0, 2.0], [3.0]]), r"x\[0\]\[0\], which is a number.*numpy\.asarray"),
        (dict(x=3), "x, which is a number, and so has no rows"),
        (dict(x={1, 2}), "of type set, which has no rows that can be read"),
        (dict(x=b"x.npy"), "of type bytes, which has no rows that can be read"),
        pytest.param(
            dict(x=iter([np.ma.array([1.0, 2.0], mask=[0, 1])])),
            "item 0 is a masked array",
            id="an iterator",
        ),
        (dict(x=np.ma.masked_less(np.arange(3), 1)), "x is a masked array"),
        (dict(x="x.npy", out=".npy"), r"out='\.npy' is a suffix without a name"),
        (dict(x="x.npy", out="a/.zarr"), r"out='a/\.zarr' is a suffix without a name"),
        (dict(x="x.npy", out="y.npy", executor="shard:0/0"), "one shard at least"),
        (dict(x="x.npy", key=3), "key must be one random key"),
        (dict(x="x.npy", key="a"), "key must be one random key"),
        (dict(x="x.npy", key=jax.random.split(jax.random.key(0))), "key must be one random key"),
        (dict(x="x.npy", key=jax.random.split(jax.random.PRNGKey(0))), "key must be one random"),
        (dict(x="x.npy", progress="no"), "progress must be True, False, or a function"),
        (dict(x="x.npy", version=1), "version must be a string"),
        pytest.param(
            dict(x="x.npy", fun=lambda x: None, out="y.npy"),
            r"returns none with rows\. Remove out=",
            id="a function without an output",
        ),
        (dict(x="x.npy", out="y.npy", out_axes=bx.Reduce("sum")), r"none with rows\. Remove out="),
        (dict(x="x.npy", out=bx.Reduce("sum")), r"path or None, .* Pass it as out_axes\."),
    ],
    ids=str,
)
def test_arguments_of_the_wrong_kind_are_told(x, given, says):
    fun, x = given.pop("fun", same), given.pop("x")
    with pytest.raises(bx.BatchaxError, match=says):
        quiet(fun, x, **given)
    assert os.listdir() == ["x.npy"]


@pytest.mark.parametrize("out", ["y.zarr", "memory://empty/y.zarr"])
def test_rows_without_elements_in_zarr(x, out):
    fun = lambda x: {"none": x[:0], "x": x}
    for reused in (0, 10):
        assert quiet(fun, x, out=out, batch_size=4).reused == reused
    assert verify(out)
    assert bx.map(same, f"{out}/none", progress=False).outputs.shape == (10, 0)
    assert quiet(lambda x: x[:0], x, out=out.replace("y.z", "z.z"), batch_size=4).rows == 10


def test_backslashes_in_zarr(x):
    """TensorStore takes them for slashes, and would write elsewhere."""
    with pytest.raises(bx.ArgumentTypeError, match=r"array in a Zarr group\. Choose"):
        quiet(lambda x: {"a\\b": x}, x, out="y.zarr")
    with pytest.raises(bx.ArgumentTypeError, match="has a backslash in its path"):
        quiet(same, x, out="a\\b.zarr")
    assert not list(Path().glob("*.zarr*"))
    assert not Path("a").exists()
    assert quiet(lambda x: {"a\\b": x}, x, out="a\\b.parquet").rows == 10


def test_an_output_in_a_folder_of_parquet_that_is_read(x):
    os.mkdir("rows")
    pyarrow.parquet.write_table(pyarrow.table({"x": [1.0, 2.0]}), "rows/0.parquet")
    for out in ("rows/y.parquet", "rows/y.zarr", "rows"):
        with pytest.raises(bx.ArgumentTypeError, match=r"lies in x \(rows:x"):
            quiet(same, "rows:x", out=out)
    assert quiet(same, "rows/0.parquet:x", out="y.parquet").rows == 2


@pytest.mark.parametrize("out", ["y.npy", "y.zarr"])
def test_a_clock_that_stands_still(x, out, monkeypatch):
    monkeypatch.setattr(journal.time, "time", lambda: 1e9)
    quiet(same, x, out=out, batch_size=2, commit_rows=2)
    damaged = Path("y.zarr/c.1.0" if out == "y.zarr" else out)
    damaged.write_bytes(damaged.read_bytes()[:-2] + b"!!")
    assert len(verify(out).damaged) == 1
    assert quiet(same, x, out=out, batch_size=2, commit_rows=2).reused == 8
    assert verify(out)
    assert quiet(same, x, out=out, batch_size=2, commit_rows=2).reused == 10


def test_ctrl_c_while_a_stream_waits(x):
    rows = queue.Queue()
    [rows.put(row) for row in x[:5]]
    asked = []

    def stream():
        while True:
            if rows.empty():
                asked.append(threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]))
                asked[0].start()
            yield rows.get()

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        quiet(lambda x: x + 1, stream(), out="y.zarr", batch_size=2, commit_rows=2)
    assert time.monotonic() - begun < 20
    [rows.put(row) for row in x[5:]]  # so that the thread that waits comes to its end
    assert quiet(lambda x: x + 1, iter(x), out="y.zarr", batch_size=2, commit_rows=2).reused == 4


TABLES = {
    "pandas": lambda x: pandas.DataFrame({"a": x[:, 0], "b": x[:, 1]}),
    "xarray": lambda x: xarray.Dataset({"a": ("row", x[:, 0]), "b": ("row", x[:, 1])}),
    "pyarrow": lambda x: pyarrow.table({"a": x[:, 0], "b": x[:, 1]}),
}


@pytest.mark.parametrize("library", TABLES)
def test_a_table_is_given_by_its_columns(x, library):
    fun, table = lambda t: t["a"] - t["b"], TABLES[library](x)
    for call in (lambda: quiet(fun, table), lambda: bx.map_batches(fun, table, batch_size=2)):
        with pytest.raises(bx.ArgumentTypeError, match=f"of {library}, each column") as caught:
            call()
    columns = {
        name: eval(
            str(caught.value).split("'a': ")[1].split(", ...")[0].replace("'a'", repr(name)),
            {"t": table},
        )
        for name in "ab"
    }
    np.testing.assert_array_equal(quiet(fun, columns).outputs, x[:, 0] - x[:, 1])


GROUPS = {
    "DataFrameGroupBy": lambda x: pandas.DataFrame({"a": x[:, 0], "b": x[:, 1] > 0}).groupby("b"),
    "SeriesGroupBy": lambda x: pandas.Series(x[:, 0]).groupby(x[:, 1] > 0),
    "DatasetGroupBy": lambda x: xarray.Dataset({"a": ("t", x[:, 0])}).groupby(
        xarray.DataArray(x[:, 1] > 0, dims="t", name="b")
    ),
    "Rolling": lambda x: pandas.DataFrame({"a": x[:, 0]}).rolling(2),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_groups_are_not_rows(x, kind):
    for call in (quiet, bx.map_batches):
        with pytest.raises(bx.ArgumentTypeError, match=rf"x\['c'\] is a {kind} of .*has groups"):
            call(same, {"c": GROUPS[kind](x)})


@pytest.mark.parametrize("out", ["y.zarr", "y.npy"])
def test_an_interruption_while_the_output_is_made(x, out):
    def interrupt(step):
        if step == steps.BEFORE_RENAME and any(Path().glob(f".{out}*.unfinished")):
            raise KeyboardInterrupt

    steps.watch(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            quiet(same, "x.npy", out=out)
    finally:
        steps.watch()
    assert not list(Path().glob(".*.unfinished"))
    assert quiet(same, "x.npy", out=out).rows == 10


@pytest.mark.parametrize(
    "change",
    [
        {"unit_rows": 0},
        {"batch_size": "x"},
        {"rows": 10**12},
        {"ends": [0, 0, 10]},
        {"ends": [2, 4]},
    ],
    ids=str,
)
def test_plans_that_batchax_did_not_make(x, change):
    quiet(same, x, out="y.npy", batch_size=2)
    Path("y.npy.job/done.json").unlink()
    path = Path("y.npy.job/job.json")
    (content,) = unsealed([path.read_bytes().rstrip(b"\n")])
    del content["crc32c"]
    content["plan"] |= change
    path.write_bytes(sealed(content))
    with pytest.raises(bx.BatchaxError, match=r"job\.json.*(did not write|was changed)"):
        quiet(same, x, out="y.npy", batch_size=2)


def test_the_home_of_nobody(x, capsys):
    for call in (
        lambda: quiet(same, "~nobody-here/x.npy"),
        lambda: quiet(same, x, out="~nobody-here/y.npy"),
        lambda: quiet(same, x, out=Path("~nobody-here/y.npy")),
        lambda: status("~nobody-here/y.npy"),
    ):
        with pytest.raises(
            bx.ArgumentTypeError, match="there is no user 'nobody-here' with a home"
        ):
            call()
    assert not Path("~nobody-here").exists()
    words = ["math:sin", "--in", "~nobody-here/x.npy", "--out", "y.npy"]
    assert main(["map", *words]) == 1
    assert main(["slurm", *words, "--shards", "2"])
    assert "nobody-here" in capsys.readouterr().err
    Path("~x").mkdir()
    np.save("~x/x.npy", x)
    assert quiet(same, "~x/x.npy", out="~x/y.npy").rows == 10


@pytest.mark.parametrize("on_error", ["raise", "quarantine"])
def test_memory_that_is_too_small_names_the_batch(x, on_error):
    fun = lambda x: jnp.sort(jnp.zeros(1 << 42) + x.sum())[0]
    told = r"rows 0 to 3 of x.*batch_size=4 rows does not fit.*Pass a smaller batch_size"
    with pytest.raises(bx.MemoryLimitError, match=told):
        quiet(fun, x, batch_size=4, on_error=on_error)
    with pytest.raises(bx.MemoryLimitError, match=told):
        list(bx.map_batches(fun, x, batch_size=4))


SCRIPT = """
import numpy as np, batchax as bx
{}
bx.map(np.sin if False else (lambda x: x + 1), np.arange(8.0), out="y.npy", executor={})
"""


@pytest.mark.only_in_whole_runs
@pytest.mark.parametrize("executor", ["'processes:2'", "pool"])
def test_a_script_without_a_guard_is_told_so_at_once(x, executor):
    pool = "import multiprocessing as m, concurrent.futures as f\n"
    pool += "pool = f.ProcessPoolExecutor(2, mp_context=m.get_context('spawn'))"
    Path("script.py").write_text(SCRIPT.format(pool, executor))
    begun = time.monotonic()
    done = python("script.py")
    assert done.returncode == 1
    assert "below `if __name__ == '__main__':`" in done.stderr
    assert "LockedError" not in done.stderr
    assert time.monotonic() - begun < 40
