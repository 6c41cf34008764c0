"""`map` from disk to disk: what is done stays, and another call is told from the same one."""

import itertools
import json
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.datasets import inspect, pipeline, plan
from batchax.datasets.source import Source
from batchax.datasets.store import Store

from support.map_calls import values

FLOAT = jax.dtypes.canonicalize_dtype(float)
ROWS, SIZE = 40, dict(batch_size=4, commit_rows=8, progress=False)


@pytest.fixture
def x():
    x = np.random.default_rng(0).standard_normal((ROWS, 3)).astype(FLOAT)
    np.save("x.npy", x)
    return x


def double(x):
    return x * 2


def stopped_after(monkeypatch, units):
    """From now on a store takes so many units, whichever threads bring first, and no more."""
    write, room = Store.write, threading.Semaphore(units)

    def some(self, *args):
        if not room.acquire(blocking=False):
            raise OSError("no more")
        return write(self, *args)

    monkeypatch.setattr(Store, "write", some)
    monkeypatch.setattr(pipeline, "_PAUSE", 0.0)


def test_a_finished_job_compiles_nothing(x, monkeypatch):
    bx.map(double, "x.npy", out="y.zarr", **SIZE)
    monkeypatch.setattr("batchax.datasets.pipeline.Program", None)
    assert bx.map(double, "x.npy", out="y.zarr", **SIZE).reused == ROWS


def with_rule(rule, of=bx.custom_vmap):
    """A function that is always the same for one row, with a rule for a batch."""
    fun = of(lambda x: x * 2)
    fun.def_vmap(lambda size, batched, x: (rule(x), True))
    return fun


@pytest.mark.parametrize("of", [bx.custom_vmap, jax.custom_batching.custom_vmap])
def test_a_rule_for_a_batch_is_part_of_the_function(x, of, monkeypatch):
    rules = [lambda x: x * 2, lambda y: y * 2, lambda x: x * 200]
    one, same, other = (with_rule(rule, of) for rule in rules)
    with monkeypatch.context() as patched:
        stopped_after(patched, 1)
        with pytest.raises(OSError, match="no more"):
            bx.map(one, x, out="y.npy", **SIZE)
    with pytest.raises(bx.JobError, match="computes something else"):
        bx.map(other, x, out="y.npy", **SIZE)
    assert bx.map(same, x, out="y.npy", **SIZE).reused >= 8
    np.testing.assert_array_equal(np.load("y.npy"), x * 2)


def test_a_rule_for_a_batch_that_calls_the_host_needs_a_version(x):
    on_host = lambda x: jax.pure_callback(lambda a: a * 2, x, x)
    with pytest.raises(bx.UnsupportedError, match=r"calls Python on the host .* version="):
        bx.map(with_rule(on_host), x, out="y.npy", **SIZE)
    assert not list(Path().glob("y.npy*"))
    bx.map(with_rule(on_host), x, out="y.npy", version="1", **SIZE)
    np.testing.assert_array_equal(np.load("y.npy"), x * 2)


@pytest.mark.parametrize("name", ["fold", "combine", "neutral", "lane", "finish"])
def test_all_functions_of_a_reduction_are_part_of_the_call(x, name):
    def total(factor=1, **more):
        parts = {
            "combine": lambda a, b: factor * a + b,
            "lane": lambda x: factor * x,
            "fold": lambda s: factor * s.sum(0),
            "finish": lambda s, n: factor * s,
            "neutral": factor - 1,
        }
        plain = dict(combine=lambda a, b: a + b, neutral=0, fold=lambda s: s.sum(0))
        given = plain if factor == 1 else plain | {name: parts[name]}
        return bx.Reduce(bx.Reduction(given.pop("combine"), given.pop("neutral"), **given))

    call = lambda spec: bx.map(lambda x: x, x, out="y.zarr", out_axes=spec, **SIZE)
    whole = call(total()).reduced
    np.testing.assert_array_equal(call(total()).reduced, whole)
    with pytest.raises(bx.JobError, match=r"out_axes was|computes something else"):
        call(total(100))


def test_rows_that_are_not_finite_may_be_left_out_later(x):
    x[21, 0] = np.nan
    np.save("x.npy", x)
    with pytest.raises(bx.RowError, match=r'row 21 .*\n.*on_nonfinite="quarantine"'):
        bx.map(double, "x.npy", out="y.npy", on_nonfinite="raise", **SIZE)
    report = bx.map(double, "x.npy", out="y.npy", on_nonfinite="quarantine", **SIZE)
    assert (report.reused, report.quarantined) == (16, 1)
    with pytest.raises(bx.JobError, match="on_nonfinite was given, is not given"):
        bx.map(double, "x.npy", out="y.npy", **SIZE)


def test_an_input_may_be_known_by_what_it_holds(x):
    options = dict(out="y.zarr", inputs_by="content", **SIZE)
    bx.map(double, "x.npy", **options)
    os.mkdir("elsewhere")
    os.replace("x.npy", "elsewhere/x.npy")
    assert bx.map(double, "elsewhere/x.npy", **options).reused == ROWS
    np.save("elsewhere/x.npy", x + 1)
    with pytest.raises(bx.JobError, match=r"x has other values"):
        bx.map(double, "elsewhere/x.npy", **options)
    with pytest.raises(bx.OptionError, match="inputs_by must be"):
        bx.map(double, "elsewhere/x.npy", **{**options, "inputs_by": "name"})


def test_disable_jit_is_not_for_the_program_of_a_batch(x):
    options = dict(out_axes=(0, bx.Reduce("sum")), out="y.npy", progress=False)
    with jax.disable_jit():
        report = bx.map(lambda row: (jnp.sin(row), row.sum()), "x.npy", **options)
    np.testing.assert_allclose(np.load("y.npy"), np.sin(x), rtol=1e-6)
    np.testing.assert_allclose(report.reduced[1], x.sum(), rtol=1e-5)


def test_rows_that_fail_are_written_down(x):
    def on_host(i, x):
        if int(i) in (5, 17):
            raise ValueError("spoilt")
        return x

    fun = lambda i, x: jax.pure_callback(on_host, x, i, x, vmap_method="sequential")
    i = np.arange(ROWS, dtype=np.int32)
    options = dict(out="y.npy", version="1", **SIZE)
    with pytest.raises(bx.RowError, match="row 5 of "):
        bx.map(fun, i, "x.npy", **options)
    report = bx.map(fun, i, "x.npy", on_error="quarantine", **options)  # may be thought better of
    assert report.quarantined == 2
    lines = list(map(json.loads, Path("y.npy.job/quarantine.jsonl").read_text().splitlines()))
    assert [(line["row"], line["error"]) for line in lines] == [
        (5, "ValueError: spoilt"),
        (17, "ValueError: spoilt"),
    ]
    ok = np.load("y.npy.job/ok.npy")
    np.testing.assert_array_equal(np.flatnonzero(~ok), [5, 17])
    y = np.load("y.npy")
    np.testing.assert_array_equal(y[ok], x[ok])
    assert np.isnan(y[~ok]).all()
    again = bx.map(fun, i, "x.npy", on_error="quarantine", **options)
    assert (again.reused, again.quarantined) == (ROWS, 2)
    assert [b.row for b in again.bad] == [5, 17]


@pytest.mark.parametrize("fails", [1, 2, 3])
def test_storage_that_fails_is_tried_again(x, fails, monkeypatch):
    monkeypatch.setattr(pipeline, "_PAUSE", 0.0)
    write, left = Store.write, [fails]

    def flaky(self, *args):
        if left[0]:
            left[0] -= 1
            raise bx.StorageError("y.zarr could not be written")
        return write(self, *args)

    monkeypatch.setattr(Store, "write", flaky)
    run = lambda: bx.map(double, "x.npy", out="y.zarr", **{**SIZE, "commit_rows": ROWS})
    if fails <= 2:
        run()
        np.testing.assert_array_equal(values("y.zarr"), x * 2)
    else:
        with pytest.raises(bx.StorageError, match=r"y\.zarr could not be written"):
            run()


def interrupted_at(*rows):
    """A function that is slow, and sends what Ctrl-C sends when it was called for so many rows."""
    count = [0]

    def wait(x):
        count[0] += 1
        if count[0] in rows:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)
        return x * 2

    return lambda x: jax.pure_callback(wait, x, x, vmap_method="sequential")


def test_control_c_keeps_what_was_computed(x, capsys):
    slowly, options = (
        interrupted_at(14),
        dict(out="y.npy", version="1", **SIZE | {"progress": True}),
    )
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        bx.map(slowly, "x.npy", **options)
    assert signal.getsignal(signal.SIGINT) is handler
    told = capsys.readouterr().err
    assert "Interrupted: what is being computed is finished and kept" in told
    assert "the same call resumes" in told
    report = bx.map(slowly, "x.npy", **options)
    assert 0 < report.reused < ROWS
    assert f"{report.reused} of {ROWS} rows are done already" in capsys.readouterr().err
    np.testing.assert_array_equal(np.load("y.npy"), x * 2)


@pytest.mark.parametrize("on_error", ["raise", "quarantine"])
def test_control_c_twice_is_no_failure_of_a_row(x, on_error):
    slowly, options = interrupted_at(14, 15), dict(out="y.npy", version="1", **SIZE)
    with pytest.raises(KeyboardInterrupt):
        bx.map(slowly, "x.npy", on_error=on_error, **options)
    report = bx.map(slowly, "x.npy", **options)
    assert (report.reused, report.quarantined) == (8, 0)
    np.testing.assert_array_equal(np.load("y.npy"), x * 2)


def test_memory_does_not_grow_with_the_dataset(x, monkeypatch):
    """No more units are held than wait between the threads."""
    alive, most = set(), [0]
    read = Source.read

    def watched(self, *args, **how):
        got = read(self, *args, **how)
        number = id(got)
        alive.add(number)
        weakref.finalize(got, alive.discard, number)
        most[0] = max(most[0], len(alive))
        return got

    monkeypatch.setattr(Source, "read", watched)
    np.save("long.npy", np.zeros((800, 3), FLOAT))
    bx.map(double, "long.npy", out="y.zarr", **SIZE)
    assert 1 < most[0] <= pipeline.AHEAD + 3


def test_a_mesh_of_devices_and_rows_that_do_not_come_out_even(x):
    report = bx.map(double, x[:37], mesh="all", **SIZE)
    np.testing.assert_array_equal(report.outputs, x[:37] * 2)


@pytest.mark.parametrize("out", ["y.zarr", "y.npy", "y.parquet"])
def test_units_of_rows_of_different_lengths(x, out, monkeypatch):
    lengths = np.concatenate([np.full(60, 2), np.full(20, 90)])
    rows = [np.full(n, k, FLOAT) for k, n in enumerate(lengths)]
    ragged = bx.Ragged.from_rows(rows)
    monkeypatch.setattr(plan, "_BYTES", 4000)  # so that there are several units
    options = dict(out=out, batch_size=4, progress=False)
    with monkeypatch.context() as patched:
        stopped_after(patched, 2)
        with pytest.raises(OSError, match="no more"):
            bx.map(lambda t: t.sum(), ragged, **options)
    done = inspect.status(out).done
    report = bx.map(lambda t: t.sum(), ragged, **options)
    job = json.loads(Path(f"{out}.job/job.json").read_text())
    ends = job["plan"]["ends"]
    sizes = [lengths[a:b].sum() for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    assert len(ends) > 3
    assert max(sizes) < 1.7 * np.mean(sizes)
    assert max(np.diff([0, *ends])) > 10  # of short rows more
    units = np.diff([0, *ends])
    assert report.reused == done in {sum(two) for two in itertools.combinations(units, 2)}
    back = bx.map(lambda y: y, report.outputs, progress=False)
    np.testing.assert_allclose(back.outputs, lengths * np.arange(80), rtol=1e-6)
    assert inspect.verify(out)


LENGTHS = [3, 4, 0, 2, 1, 5, 2] * 3


def test_rows_that_are_ragged_along_several_axes_stay_in_the_function(x):
    images = bx.Ragged.from_rows([np.ones((2, 3)), np.ones((1, 4))], axis=(0, 1))
    with pytest.raises(bx.UnsupportedError, match=r"x has rows that are ragged along the axes"):
        bx.map(lambda x: x.sum(), images, progress=False)
    rows = [np.arange(n, dtype=FLOAT) for n in LENGTHS]
    between = lambda x: jnp.abs(x[:, None] - x)
    x = bx.Ragged.from_rows(rows)
    with pytest.raises(bx.UnsupportedError, match=r"out has rows that are ragged along the axes"):
        bx.map(between, x, out="y/", progress=False)
    got = bx.map(lambda x: between(x).sum(), x, progress=False).outputs
    np.testing.assert_allclose(got, [np.abs(row[:, None] - row).sum() for row in rows])


def test_ragged_rows_that_are_put_aside(x):
    rows = [np.arange(n, dtype=FLOAT) for n in LENGTHS]
    rows[3][0] = np.nan
    x, how = bx.Ragged.from_rows(rows), dict(batch_size=2, commit_rows=4, progress=False)
    report = bx.map(lambda x: x * 2, x, on_nonfinite="quarantine", **how)
    assert [bad.row for bad in report.bad] == [3]
    assert [len(row) for row in report.outputs.rows()] == [*LENGTHS[:3], 0, *LENGTHS[4:]]

    def picky(x):
        def host(x, n):
            if n == 4:
                raise ValueError("four numbers")
            return np.asarray(x * 2)

        type = jax.ShapeDtypeStruct((), x.dtype)
        whole = jax.pure_callback(
            host, type, x.sum(), jnp.asarray(x.shape[0]), vmap_method="sequential"
        )
        return whole, x + 1

    report = bx.map(picky, x, on_error="quarantine", **how)
    assert [bad.row for bad in report.bad] == [1, 8, 15]
    assert [len(row) for row in report.outputs[1].rows()][:4] == [3, 0, 0, 2]
