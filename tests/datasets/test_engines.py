"""`map` on pools of processes, on Dask, and in shards: what comes of it is the same."""

import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.datasets.engines import engine as engine_module
from batchax.datasets.engines import worker
from batchax.datasets.engines.engine import Pool
from batchax.datasets.engines.worker import Attempts
from batchax.datasets.inspect import status, verify
from batchax.datasets.journal import read_journal
from batchax.datasets.pipeline import Work
from batchax.datasets.sources import as_source
from kills import jobs
from kills.left import left_by

from support import engine_calls
from support.engine_calls import ROWS, UNIT, call
from support.processes import ENV, python

pytestmark = pytest.mark.only_in_whole_runs  # they start processes


@pytest.fixture
def x():
    return engine_calls.write_inputs()


@pytest.fixture(scope="module")
def processes():
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def dask(tmp_path_factory):
    """A cluster of processes, begun elsewhere: what is relative means something else there."""
    import dask.config
    import distributed

    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("dask"))
    options = dict(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0")
    # A cluster gives up a worker that takes longer than 15 s to start again, forever.
    patience = {"distributed.deploy.lost-worker-timeout": "10 minutes"}
    with (
        dask.config.set(patience),
        distributed.LocalCluster(**options) as cluster,
        distributed.Client(cluster) as client,
    ):
        os.chdir(before)
        yield client


@pytest.fixture(params=["processes", "threads", "dask"])
def engine(request):
    return request.getfixturevalue(request.param)


def command(*args):
    return [sys.executable, "-m", "support.engine_calls", *map(str, args)]


def started(*args, **options):
    pipe = subprocess.PIPE
    return subprocess.Popen(command(*args), stdout=pipe, stderr=pipe, text=True, env=ENV, **options)


def wait_for(condition, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def units_done(out="y.npy"):
    return len(read_journal(Path(f"{out}.job/journal")))


def assert_whole(x, without=()):
    """All is done and as it should be, and nothing is left of who did it."""
    y, found = np.load("y.npy"), status("y.npy")
    kept = np.setdiff1d(np.arange(ROWS), list(without))
    np.testing.assert_array_equal(y[kept], x[kept] * 2)
    assert (found.done, found.finished, found.holder) == (ROWS, True, None)
    assert verify("y.npy")
    assert not list(Path("y.npy.job").glob("engine-*"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What calls leave and report that have no executor."""
    folder = tmp_path_factory.mktemp("expected")
    jobs.write_inputs(folder)
    found = {}
    for job in jobs.JOBS:
        (out := folder / job.__name__).mkdir()
        found[job.__name__] = told(job(folder, out)), left_by(out)
    return folder, found


def told(report):
    reduced = jax.tree.map(lambda x: (str(x.dtype), x.tobytes()), report.reduced)
    return report.rows, report.quarantined, [(b.row, b.error) for b in report.bad], reduced


@pytest.mark.parametrize("job", jobs.JOBS, ids=lambda job: job.__name__)
@pytest.mark.each_commit(6)
def test_the_same_bytes(job, engine, expected, tmp_path):
    inputs, found = expected
    report = job(inputs, tmp_path, executor=engine)
    assert (told(report), left_by(tmp_path)) == found[job.__name__]
    records = [p.read_bytes() for p in tmp_path.glob("*.job/journal/*")]
    assert sum(r.count(b'"unit"') for r in records) == 12  # each once
    assert job(inputs, tmp_path, executor=engine).reused == jobs.ROWS


@pytest.mark.parametrize("count", [1, 3])
def test_shards_that_begin_together(count, expected, tmp_path):
    inputs, found = expected
    for job in (jobs.zarr_group, jobs.quarantine):
        (out := tmp_path / job.__name__).mkdir()
        first = count % 2  # they may be counted from 1, or from 0
        names = [f"shard:{k}/{count}" for k in range(first, first + count)]
        with ThreadPoolExecutor(count) as pool:
            reports = list(pool.map(lambda name: job(inputs, out, executor=name), names))
        (last, *_) = [r for r in reports if not r.left]
        assert (told(last), left_by(out)) == found[job.__name__]
        assert job(inputs, out).reused == jobs.ROWS


def test_shards_run_again_with_another_number(x, capfd):
    for k in (1, 2):
        report = call(engine_calls.slowly, f"shard:{k}/5")
    assert report.left == ROWS - 6 * UNIT
    for k in range(2):
        report = call(engine_calls.slowly, f"shard:{k}/2")
    assert (report.left, report.reused) == (0, ROWS - 5 * UNIT)
    assert_whole(x)


def test_the_same_settings_of_jax(processes, dask):
    x = np.random.default_rng(0).standard_normal((8, 3))
    fun = lambda x: (x @ x.T, jax.random.normal(jax.random.key(0)) + x, jnp.arange(2.0))
    for wide, pool in itertools.product([True, False, True], [processes, dask]):
        with jax.enable_x64(wide):
            key = jax.random.PRNGKey(1)
            fun = lambda key, x: (x.sum() + jax.random.normal(key), jnp.arange(2.0))
            whole = bx.map(fun, x, key=key, progress=False)
            out = f"y{time.monotonic()}.zarr"
            bx.map(fun, x, key=key, progress=False, out=out, executor=pool)
        for k in range(2):
            import zarr

            y = zarr.open_array(f"{out}/{k}", mode="r")[...]
            assert y.dtype == (np.float64 if wide else np.float32)
            np.testing.assert_array_equal(y, whole.outputs[k])


def test_little_goes_through_the_scheduler_and_few_units_wait(x, processes, monkeypatch):
    sizes, most, submit = [], [0], Pool.submit

    def watched(self, name, *args):
        sizes.append(len(cloudpickle.dumps(args)))
        future = submit(self, name, *args)
        future.add_done_callback(lambda f: sizes.append(len(pickle.dumps(f.result()))))
        return future

    take = engine_module.Submitting._take

    def count(self, future):
        most[0] = max(most[0], len(self._running))
        return take(self, future)

    monkeypatch.setattr(Pool, "submit", watched)
    monkeypatch.setattr(engine_module.Submitting, "_take", count)
    w = jnp.ones((3, 100_000))
    fun = lambda x: (x @ w).sum()
    bx.map(fun, x, out="y.npy", executor=processes, batch_size=2, commit_rows=4, progress=False)
    wait_for(lambda: len(sizes) == 2 * ROWS // UNIT)  # futures tell us after they told the map
    assert max(sizes) < 500
    assert most[0] == 4


def test_rows_that_fail(x, engine):
    with pytest.raises(bx.RowError, match=r"row (6|50) of .* fails: ValueError: spoilt"):
        call(engine_calls.spoilt, engine)
    with pytest.raises(bx.RowError, match="2 rows have no result, and max_errors is 1"):
        call(engine_calls.spoilt, engine, on_error="quarantine", max_errors=1)
    report = call(engine_calls.spoilt, engine, on_error="quarantine")
    assert [b.row for b in report.bad] == [6, 50]
    assert_whole(x, [6, 50])


def test_an_outage_stops_all_workers(x, engine):
    """And those who had not seen many rows that fail have quarantined none, either."""
    Path("away").touch()
    with pytest.raises(bx.RowError, match=r"rows of .* fail in succession with ConnectionError"):
        call(engine_calls.while_it_is_there, engine, on_error="quarantine")
    Path("away").unlink()
    assert call(engine_calls.while_it_is_there, engine, on_error="quarantine").quarantined == 0
    assert_whole(x)


def test_no_row_is_quarantined_after_an_outage_ended_the_call(x, monkeypatch):
    """By a unit that ends after its call, just before its record."""
    write, running, begun = Work.write, Attempts.running, []

    def noted(attempts, unit, attempt):
        begun.append(attempts)
        return running(attempts, unit, attempt)

    def as_the_call_ends(work, computed):
        record = write(work, computed)
        if record.quarantined:
            begun[0].end_all()
        return record

    Path("away").touch()
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:  # waits for the units
        patch.setattr(Attempts, "running", noted)
        patch.setattr(Work, "write", as_the_call_ends)
        with pytest.raises(bx.JobError, match="the call has ended"):
            call(engine_calls.while_it_is_there, threads, on_error="quarantine")
    Path("away").unlink()
    assert call(engine_calls.while_it_is_there, None, on_error="quarantine").quarantined == 0
    assert_whole(x)


def test_errors_that_cannot_be_pickled(x, processes):
    class OddError(Exception):
        def __init__(self, a, b):
            super().__init__("odd")

    def fun(x):
        raise OddError(1, 2)

    with pytest.raises(OddError):  # it is found before anything is begun
        bx.map(fun, "x.npy", out="y.npy", executor=processes)
    from batchax.datasets.engines.worker import portable

    assert "odd" in str(portable(OddError(1, 2)))


def test_what_is_no_executor_or_cannot_be_one(x, processes):
    wrong = [
        ("threads", bx.OptionError, "got 'threads' of type str"),
        ("processes:0", bx.OptionError, "got 'processes:0' of type str"),
        ("shard:4/3", bx.OptionError, "numbers go from 0 to 2"),
        (3, bx.ArgumentTypeError, "got 3 of type int"),
        (ProcessPoolExecutor(1), bx.UnsupportedError, "forks its processes"),
    ]
    for executor, error, message in wrong:
        with pytest.raises(error, match=message):
            bx.map(jnp.sin, "x.npy", out="y.npy", executor=executor)
    with pytest.raises(bx.UnsupportedError, match="out=None"):
        bx.map(jnp.sin, "x.npy", executor=processes)
    large = np.broadcast_to(np.float32(0), (2**25, 1))
    with pytest.raises(bx.UnsupportedError, match="rows in the memory of this process"):
        bx.map(jnp.sin, large, out="y.npy", executor=processes, batch_size=2**20, version="1")
    with open("x.npy") as file, pytest.raises(bx.ArgumentTypeError, match="cannot be pickled"):
        bx.map(lambda x: (file.name, x)[1], "x.npy", out="z.npy", executor=processes)


def test_who_computes_reads_files_and_is_handed_sources(x, processes, monkeypatch):
    np.savez("x.npz", x=np.load("x.npy"))
    source = as_source(Path("x.npy").absolute(), "rows")
    monkeypatch.setattr(worker, "_MOST_BYTES", 0)  # of what would be copied
    for i, rows in enumerate(("x.npz:x", source)):
        bx.map(jnp.sin, rows, out=f"y{i}.npy", executor=processes, progress=False)
        np.testing.assert_allclose(np.load(f"y{i}.npy"), np.sin(np.load("x.npy")), rtol=1e-5)


def test_a_pool_that_is_broken_is_replaced(x):
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with pytest.raises(BrokenExecutor):
        pool.submit(os._exit, 1).result()
    call(engine_calls.slowly, pool)
    assert_whole(x)


class DyingPool(Pool):
    """Workers that end while they start, or cannot be started, for the first times."""

    def __init__(self, executor, times, error):
        super().__init__(executor)
        self._left, self._error, self._made = times, error, 0

    workers, generation = 2, property(lambda self: self._made)

    def submit(self, name, fun, *args):
        if isinstance(self._error, OSError) and self._left:
            self._left -= 1
            raise self._error
        if self._left:
            future = Future()
            future.set_exception(self._error)
            return future
        return super().submit(name, fun, *args)

    def restart(self):
        self._left, self._made = max(0, self._left - 1), self._made + 1


@pytest.mark.parametrize("error", [BrokenExecutor("ended"), BlockingIOError(11, "no processes")])
def test_workers_that_end_while_they_start_are_started_again(x, threads, error, monkeypatch):
    monkeypatch.setattr(engine_module, "_PAUSE", 1e-3)

    def begin(times):
        pool = lambda: DyingPool(threads, times, error)
        monkeypatch.setattr("batchax.datasets.engines.engine.find_pool", lambda _: pool)
        return call(engine_calls.spoilt, threads, on_error="quarantine")

    with pytest.raises(bx.JobError, match=r"again and again.* memory may be short"):
        begin(100)
    assert [b.row for b in begin(3).bad] == [6, 50]
    assert_whole(x, [6, 50])


class GoneClient:
    """A client of Dask whose scheduler is killed while it sends a result."""

    status = "running"

    def nthreads(self):
        return {"worker": 1}

    def submit(self, *args, **how):
        future = Future()
        future.set_result(None)
        future.result = self._lose
        return future

    def cancel(self, futures):
        pass

    def _lose(self):
        import distributed

        self.status = "closed"
        raise distributed.comm.CommClosedError("Connection reset by peer")


def test_a_scheduler_that_goes_while_it_sends_a_result(x, threads, monkeypatch):
    pool = lambda: engine_module.DaskPool(GoneClient())
    monkeypatch.setattr("batchax.datasets.engines.engine.find_pool", lambda _: pool)
    with pytest.raises(bx.JobError, match="the scheduler of Dask has stopped"):
        call(engine_calls.spoilt, threads)


def test_units_that_end_their_process(x):
    """They are named, and with quarantine given up: no others, though these were there, too."""
    with pytest.raises(bx.RowError, match=r"rows 40 to 43 of .* ends the process.*smaller batch"):
        call(engine_calls.fatally_at_41, "processes:2")
    report = call(engine_calls.fatally_at_41, "processes:2", on_error="quarantine")
    assert [b.row for b in report.bad] == [40, 41, 42, 43]
    assert "rows 40 to 43, ends the process" in report.bad[0].error
    assert_whole(x, range(40, 44))
    assert np.isnan(np.load("y.npy")[40:44]).all()


@pytest.mark.nightly
def test_units_that_end_workers_of_dask(x, dask):
    before = set(dask.run(os.getpid).values())
    with pytest.raises(bx.RowError, match=r"rows (8 to 11|40 to 43) of .* ends the process"):
        call(engine_calls.fatally, dask)
    report = call(engine_calls.fatally, dask, on_error="quarantine")
    assert [b.row for b in report.bad] == [8, 9, 10, 11, 40, 41, 42, 43]
    assert_whole(x, [b.row for b in report.bad])
    wait_for(lambda: len(dask.nthreads()) == 2)  # the cluster is as it was
    assert set(dask.run(os.getpid).values()) != before


@pytest.mark.nightly
def test_a_unit_that_is_given_up_leaves_reductions_and_lists_as_they_were(x):
    """Of each kind of output."""
    fun = engine_calls.on_host(engine_calls.fatally_at_41)
    i, axes = np.arange(ROWS, dtype=np.int32), {"y": 0, "sum": bx.Reduce("sum"), "n": 0}
    rows = bx.Ragged.from_rows([np.ones(k % 3, np.float32) for k in range(ROWS)])
    report = bx.map(
        lambda i, x, n: {"y": fun(i, x), "sum": jnp.ones(()), "n": n * 2},
        i, "x.npy", rows, out="y.parquet", out_axes=axes, executor="processes:2",
        on_error="quarantine", progress=False, **engine_calls.SIZES,
    )  # fmt: skip
    assert (report.quarantined, report.reduced["sum"]) == (4, ROWS - 4)
    lengths = np.where(np.arange(ROWS) // 4 == 10, 0, np.arange(ROWS) % 3)
    read = bx.map(lambda n: n.size, report.outputs["n"], progress=False)
    np.testing.assert_array_equal(read.outputs, lengths)


@pytest.mark.nightly
def test_what_ends_only_in_company_is_not_blamed(x):
    assert call(engine_calls.fatally_in_company, "processes:2").quarantined == 0
    assert_whole(x)


def test_attempts(tmp_path):
    attempts = Attempts.of_new_call(tmp_path, b"")
    with attempts.running(3, 0):
        assert attempts.is_running(3, 0)
        with pytest.raises(Exception, match="its worker ended"), attempts.running(3, 0):
            pass
    assert not attempts.is_running(3, 0)
    attempts.check()
    other = Attempts.of_new_call(tmp_path, b"")
    attempts.end_all()
    with pytest.raises(bx.JobError, match="the call has ended"):
        attempts.check()
    with attempts.running(4, 0):
        pass
    other.end_all()
    assert list(tmp_path.iterdir()) == []


def test_interrupted(x):
    """Workers finish what they have, and say nothing."""
    with started("patiently", "processes:2", start_new_session=True) as process:
        wait_for(lambda: units_done() > 1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        told = [next(line for line in process.stderr if "Interrupted" in line)]
        Path("go-on").touch()
        err = "".join([*told, *process.stderr])
    assert process.returncode
    assert err.count("Traceback") == 1, err  # of who called
    assert "KeyboardInterrupt" in err
    assert "kept; the same call resumes" in err
    done = units_done()
    assert call(engine_calls.slowly, None).reused == done * UNIT
    assert_whole(x)


SCRIPT = """
import sys
import numpy as np
import batchax as bx

def triple(x):
    return x * factor

factor = 3

def main(out):
    bx.map(lambda x: triple(x) + 1, "x.npy", out=out, executor="processes:1", progress=False)
"""


def test_functions_of_a_script(x):
    Path("script.py").write_text(SCRIPT + "if __name__ == '__main__':\n    main('y.npy')\n")
    done = python("script.py")
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load("y.npy"), x * 3 + 1)
