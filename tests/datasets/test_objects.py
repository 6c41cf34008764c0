"""Maps from and to stores of objects: S3 as moto has it, Azure as Azurite has it, and memory."""

import contextlib
import datetime
import io
import json
import logging
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.command import main
from batchax.datasets import objects
from batchax.datasets.addresses import address, masked
from batchax.datasets.disk import LockedError
from batchax.datasets.inspect import status, verify
from batchax.datasets.job import open_job
from batchax.datasets.journal import JobFiles, read_journal
from batchax.datasets.objects import place_of
from batchax.datasets.plan import Leaf, Plan
from batchax.datasets.stores import open_store

from support import object_servers, steps
from support.map_calls import stops_at
from support.ports import reserved_port

X = np.arange(60, dtype=np.float32).reshape(20, 3)
UNIT = dict(batch_size=2, commit_rows=4, progress=False)


@pytest.fixture(scope="session")
def s3():
    with object_servers.s3() as server:
        yield server


@pytest.fixture(scope="session")
def azure():
    if object_servers.azurite() is None:
        pytest.skip("Azurite is not installed: make azurite, which needs npm")
    with object_servers.azure():
        yield


@pytest.fixture(scope="session")
def google():
    if object_servers.fake_google() is None:
        pytest.skip("fake-gcs-server is not installed: make fake-gcs")
    with object_servers.google() as server:
        yield server


@pytest.fixture(
    params=["memory", "s3", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("gs", "az"))]
)
def root(request):
    """Where nothing is, in each of the stores."""
    if request.param != "memory":
        request.getfixturevalue({"gs": "google", "az": "azure"}.get(request.param, request.param))
    return f"{request.param}://{object_servers.BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(params=["disk", "memory", "s3"])
def anywhere(request):
    """The same, or a folder."""
    fixture = {"disk": "tmp_path", "s3": "on_s3"}.get(request.param, request.param)
    return request.getfixturevalue(fixture)


@pytest.fixture(autouse=True)
def nobody_watches():
    yield
    steps.watch()


@pytest.fixture
def memory():
    return f"memory://{object_servers.BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def on_s3(s3):
    return f"s3://{object_servers.BUCKET}/{uuid.uuid4().hex}"


def double(x):
    return x * 2


def triple(x):
    return x * 3


@pytest.fixture
def versioned(s3):
    """A bucket that keeps all versions, whose names are in answers about objects, not in lists."""
    xml = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    for path, content in [("versioned", b""), ("versioned?versioning", xml)]:
        request = urllib.request.Request(
            f"{s3}/{path}", content, {"Content-Type": "application/xml"}, method="PUT"
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()
    return f"s3://versioned/{uuid.uuid4().hex}"


def put(url, content):
    objects.put(address(url, "x"), content)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def below(url):
    """The objects below, by what follows."""
    path = address(url, "x")
    return {p.key[len(path.key) + 1 :]: objects.read(p) for p, _ in objects.below(path)}


def on_disk(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def in_folder(url, folder):
    """Puts all files of a folder."""
    for name, content in on_disk(folder).items():
        put(f"{url}/{name}", content)


def described(x):
    return {"y": x * 2, "in": {"sum": x.sum()}, "mean": x.mean(), "outer": jnp.outer(x, x)}


AXES = {"y": 1, "in": {"sum": 0}, "mean": bx.Reduce("mean"), "outer": bx.Reduce("sum")}


def test_a_map_leaves_the_bytes_that_it_leaves_on_a_disk(root, tmp_path):
    put(f"{root}/x.npy", npy(X))
    local = bx.map(described, X, out=tmp_path / "y.zarr", out_axes=AXES, **UNIT)
    report = bx.map(described, f"{root}/x.npy", out=f"{root}/y.zarr", out_axes=AXES, **UNIT)
    assert report.outputs["in"]["sum"] == f"{root}/y.zarr/in/sum"
    assert below(f"{root}/y.zarr") == on_disk(tmp_path / "y.zarr")
    np.testing.assert_array_equal(report.reduced["outer"], local.reduced["outer"])
    assert status(f"{root}/y.zarr").finished
    assert verify(f"{root}/y.zarr")
    again = bx.map(described, f"{root}/x.npy", out=f"{root}/y.zarr", out_axes=AXES, **UNIT)
    assert again.reused == 20
    np.testing.assert_array_equal(again.reduced["mean"], local.reduced["mean"])


@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_files_along_any_axis(memory, order):
    x = np.asarray(np.arange(24).reshape(2, 4, 3), dtype=np.float32, order=order)
    put(f"{memory}/x.npy", npy(x))
    got = bx.map(double, f"{memory}/x.npy", in_axes=1, batch_size=3, progress=False).outputs
    np.testing.assert_array_equal(got, 2 * x.swapaxes(0, 1))


@pytest.mark.parametrize(
    "how",
    [
        dict(zarr_format=2),
        dict(zarr_format=2, chunk_key_encoding={"name": "v2", "separator": "/"}),
        dict(zarr_format=3),
        dict(zarr_format=3, chunk_key_encoding={"name": "v2", "separator": "."}),
        dict(zarr_format=3, shards=(8, 4)),
    ],
)
def test_zarr_arrays_of_others(memory, how, tmp_path):
    import zarr

    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    x[8:12] = 0  # a chunk that is not there
    zarr.create_array(str(tmp_path / "x.zarr"), data=x, chunks=(4, 2), **how)
    in_folder(f"{memory}/x.zarr", tmp_path / "x.zarr")
    got = bx.map(double, f"{memory}/x.zarr", batch_size=3, progress=False).outputs
    np.testing.assert_array_equal(got, 2 * x)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(x="http://host/x.npy"), "http:// address"),
        (dict(x="file:///x.npy"), "file:// address"),
        (dict(x="hdfs://host/x.npy"), "hdfs:// address"),
        (dict(x=Path("gs://bucket/x.npy")), r"pathlib\.Path"),
        (dict(x="s3://bucket"), "must name a bucket and what is in it"),
        (dict(x="s3://bucket/../x.npy"), "must name a bucket and what is in it"),
        (dict(x="s3://key:hidden@bucket/x.npy"), "with a user, a query"),
        (dict(x="az://box/x.npy?sig=hidden"), "with a user, a query"),
        (dict(x="memory://bucket/x.h5:a"), r"supports \.npy, \.zarr, and \.parquet"),
        (dict(x="memory://bucket/none.npy"), "no such object"),
        (dict(x="memory://bucket/none.zarr"), "no such object"),
        (dict(out="ftp://host/y.zarr"), "ftp:// address"),
        (dict(out="gs://bucket/y.npy"), "outputs in .zarr and in Parquet files"),
        (dict(out="gs://bucket/y.h5"), "outputs in .zarr and in Parquet files"),
        (dict(out=Path("s3://bucket/y.zarr")), r"pathlib\.Path"),
        (dict(out="s3://a:hidden@bucket/y.zarr"), "with a user, a query"),
        (dict(out="memory://bucket/y.zarr", executor="processes:2"), "memory of this process"),
        (dict(out="memory://bucket/y.zarr", executor="shard:0/2"), "memory of this process"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(given, says, tmp_path):
    given = {"x": X, **given}
    with pytest.raises((bx.BatchaxError, TypeError), match=says) as caught:
        bx.map(double, given.pop("x"), **given, progress=False)
    assert "hidden" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["zarr", "parquet"])
def test_an_output_that_somebody_changes_in_mid_run(root, kind):
    """An object that was written is another one, or gone; the same call then computes it again."""
    out = f"{root}/y.{kind}"
    begins = ("c.", "part-")

    def of_units():
        return [p for p, _ in objects.below(address(out, "out")) if p.name.startswith(begins)]

    for change in (objects.remove, lambda path: objects.put(path, objects.read(path)[::-1])):
        changed = []

        def once(*_, change=change, changed=changed):
            if not changed:
                changed.append(max(of_units()))
                change(changed[0])

        with pytest.raises(bx.JobError, match=rf"y\.{kind} does not hold what was written to it"):
            bx.map(double, X, out=out, **{**UNIT, "progress": once})
        assert changed
        assert not verify(out)
        assert bx.map(double, X, out=out, **UNIT).reused == 16
        assert verify(out)
        for path in list(objects.below(address(root, "out"))):
            objects.remove(path[0])


def test_a_store_that_is_there_is_not_written_over(root):
    put(f"{root}/y.zarr/mine", b"precious")
    with pytest.raises(bx.JobError, match="is there already"):
        bx.map(double, X, out=f"{root}/y.zarr", **UNIT)
    assert below(root) == {"y.zarr/mine": b"precious"}


def stopped(out, fun=double, rows=10):
    """A job that somebody left when it had so many rows."""
    with pytest.raises(TimeoutError):
        bx.map(fun, X, out=out, **{**UNIT, "progress": stops_at(rows)})


def test_a_job_goes_on_and_another_call_is_refused(root):
    stopped(f"{root}/y.zarr")
    with pytest.raises(bx.StorageError, match="job that is not finished"):
        bx.map(double, f"{root}/y.zarr", progress=False)
    with pytest.raises(bx.JobError, match="computes something else"):
        bx.map(triple, X, out=f"{root}/y.zarr", **UNIT)
    with pytest.raises(bx.JobError, match='resume="never"'):
        bx.map(double, X, out=f"{root}/y.zarr", resume="never", **UNIT)
    report = bx.map(double, X, out=f"{root}/y.zarr", **UNIT)
    assert report.reused >= 8
    got = bx.map(double, f"{root}/y.zarr", progress=False).outputs
    np.testing.assert_array_equal(got, 4 * X)


def test_damage_is_found_and_mended(root, capsys):
    out = f"{root}/y.zarr"
    bx.map(double, X, out=out, **UNIT)
    put(f"{out}/c.1.0", below(out)["c.2.0"])
    objects.remove(address(f"{out}/c.3.0", "x"))
    assert main(["verify", out]) == 1
    assert "c.3.0 is missing" in capsys.readouterr().out
    assert bx.map(double, X, out=out, **UNIT).reused == 12
    assert main(["verify", out]) == 0
    assert main(["status", out]) == 0
    assert "finished" in capsys.readouterr().out


PATTERNS = [
    "data/year=*/x.npy",
    "data/**/x.npy",
    "**/x.npy",
    "data/year=[12]/*.npy",
    "y.zarr:a/b",
    "*.zarr:a/b",
    "y.zarr:c",
    "*.parquet:c",
]


def test_what_lists_and_answers_say_of_a_version_is_the_same(versioned):
    for kind, member in [("zarr", ""), ("parquet", ":result")]:
        bx.map(jnp.sum, X, out=f"{versioned}/y.{kind}", **UNIT)
        got = bx.map(double, f"{versioned}/y.{kind}{member}", progress=False).outputs
        np.testing.assert_allclose(got, 2 * X.sum(1))


def test_patterns_and_arrays_in_groups(memory):
    put(f"{memory}/data/year=1/x.npy", npy(X[:5]))
    put(f"{memory}/data/year=2/x.npy", npy(X[5:]))
    put(f"{memory}/data/.kept/x.npy", npy(X))  # no star stands for a dot
    bx.map(lambda x: {"a": {"b": x}, "c": x}, X, out=f"{memory}/y.zarr", **UNIT)
    bx.map(lambda x: {"c": x}, X, out=f"{memory}/t.parquet", **UNIT)
    for pattern in PATTERNS:
        got = bx.map(lambda x: x, f"{memory}/{pattern}", progress=False).outputs
        np.testing.assert_array_equal(got, X, err_msg=pattern)
    with pytest.raises(bx.StorageError, match="no object fits the pattern"):
        bx.map(lambda x: x, f"{memory}/none*/x.npy")
    with pytest.raises(bx.ArgumentTypeError, match="which would change while it is read"):
        bx.map(lambda x: x, f"{memory}/*.parquet:c", out=f"{memory}/z.parquet", **UNIT)
    out = f"{memory}/sums.zarr"
    bx.map(jnp.sum, f"{memory}/data/year=*/x.npy", out=out, **UNIT)
    put(f"{memory}/data/year=3/x.npy", npy(X))
    with pytest.raises(bx.JobError, match="results of another call"):
        bx.map(jnp.sum, f"{memory}/data/year=*/x.npy", out=out, **UNIT)


@pytest.mark.parametrize("silent", ["/c.2", "done.json"])
def test_a_store_that_does_not_answer_is_not_damaged(memory, monkeypatch, silent):
    """Else a network that is cut while somebody verifies would have all recomputed."""
    out = f"{memory}/y.zarr"
    bx.map(double, X, out=out, **UNIT)

    def ask(path, done, ask, real=objects._request):
        def fail():
            raise OSError("no answer")

        return real(path, done, fail if silent in str(path) else ask)

    with monkeypatch.context() as context:
        context.setattr(objects, "_request", ask)
        with pytest.raises(bx.StorageError, match="no answer"):
            verify(out) if silent != "done.json" else status(out)
    assert verify(out)
    assert bx.map(double, X, out=out, **UNIT).reused == len(X)


@pytest.mark.parametrize("kind", ["npy", "zarr", "parquet"])
def test_an_input_that_changes_in_mid_run_is_told(root, kind):
    url, x = f"{root}/x.{kind}", np.tile(X, (8, 1))
    if kind == "npy":
        put(url, npy(x))
    else:
        bx.map(double, x, out=url, **UNIT)
    source = f"{url}:result" if kind == "parquet" else url

    def change(done, total):
        last = {"npy": url, "zarr": f"{url}/c.39.0", "parquet": f"{url}/part-00000039.parquet"}
        put(last[kind], objects.read(address(last[kind], "x")) + b" ")

    with pytest.raises(bx.StorageError, match="was changed since it was opened"):
        bx.map(triple, source, out=f"{root}/y.zarr", **{**UNIT, "progress": change}, retries=0)


def job_of(url, call="f", resume="auto"):
    leaf = Leaf("", X.shape, X.dtype)
    return open_job(
        address(url, "out"),
        lambda _: {"function": call},
        lambda: Plan.of(20, 2, 12, 0.0, 4),
        lambda plan: open_store(url, [leaf], plan),
        resume,
    )


def test_of_two_callers_one_has_the_job_and_the_other_is_told_who(anywhere):
    with job_of(f"{anywhere}/y.zarr"):
        with pytest.raises(LockedError, match=r"y\.zarr\.job/lock is held by this process"):
            job_of(f"{anywhere}/y.zarr")
        assert str(status(f"{anywhere}/y.zarr").holder).startswith("this process")
        assert not verify(f"{anywhere}/y.zarr").damaged
    job_of(f"{anywhere}/y.zarr").close()
    assert status(f"{anywhere}/y.zarr").holder is None


def test_of_many_callers_at_once_one_has_the_job(anywhere):
    jobs, refused, go = [], [], threading.Barrier(4)

    def call():
        go.wait()
        try:
            jobs.append(job_of(f"{anywhere}/y.zarr"))
        except (bx.JobError, LockedError) as error:
            refused.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(jobs) == 1
    assert len(refused) == 3
    jobs[0].close()


def test_shards_exclude_who_wants_all_and_the_other_way_round(root):
    out = address(f"{root}/y.zarr", "out")
    files = JobFiles(out)
    with job_of(str(out)), pytest.raises(LockedError):
        files.place.lock(files.lock_of("shard-0-of-2"))
    one = files.place.lock(files.lock_of("shard-0-of-2"))
    other = files.place.lock(files.lock_of("shard-1-of-2"))
    with pytest.raises(LockedError, match="shard-0-of-2 is held"):
        job_of(str(out))
    one.release()
    with pytest.raises(LockedError, match="shard-1-of-2 is held"):
        job_of(str(out))
    other.release()
    job_of(str(out)).close()


def test_shards(on_s3):
    out = f"{on_s3}/y.zarr"
    left = [bx.map(double, X, out=out, executor=f"shard:{i}/2", **UNIT).left for i in range(2)]
    assert left == [8, 0]
    assert {r.writer for r in read_journal(JobFiles(address(out, "out")).journal).values()} == {
        "shard-0-of-2",
        "shard-1-of-2",
    }
    np.testing.assert_array_equal(bx.map(double, out, progress=False).outputs, 4 * X)


def expire(monkeypatch):
    """From now on a lease lasts for a moment, unless it is renewed; those there are are not."""
    for lease in list(objects._held):
        lease._stop.set()
    monkeypatch.setattr(objects, "LASTS", 0.0)


class Paused:
    """A call in a thread, which is stopped at a step with all of its threads, and goes on."""

    def __init__(self, call, step, count=1):
        self.error, self._at, self._go = None, threading.Event(), threading.Event()
        self._step, self._left, self._whom = step, count, None
        self._thread = threading.Thread(target=self._run, args=(call,))
        steps.watch(self._reached)
        self._thread.start()
        assert self._at.wait(60)
        time.sleep(0.2)  # what others of its threads do comes to its end, or to a step
        self._whom = set(threading.enumerate()) - {threading.main_thread()}

    def _run(self, call):
        try:
            call()
        except BaseException as error:
            self.error = error

    def _reached(self, step):
        if not self._at.is_set() and step == self._step:
            self._left -= 1
            if not self._left:
                self._at.set()
        if self._at.is_set() and (self._whom is None or threading.current_thread() in self._whom):
            assert self._go.wait(120)

    def goes_on(self):
        self._go.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        steps.watch()


@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize("step", [steps.BEFORE_WRITE, steps.IN_JOURNAL])
def test_who_was_stopped_writes_nothing_once_its_lease_was_taken(root, step, deleted, monkeypatch):
    """It goes on right before a write, after it has looked whether it may."""
    out = f"{root}/y.zarr"
    count = 4 if step == steps.BEFORE_WRITE else 1  # lines may go to the journal together
    old = Paused(lambda: bx.map(double, X, out=out, **UNIT, retries=0), step, count)
    expire(monkeypatch)
    if deleted:
        for folder in (out, f"{out}.job"):
            place_of(address(out, "out")).remove_all(address(folder, "out"))
    fun = triple if deleted else double
    stopped(out, fun, rows=12)
    before = journal(out)
    old.goes_on()
    assert isinstance(old.error, bx.JobError), old.error
    assert "or taken" in str(old.error)
    assert journal(out) == before
    bx.map(fun, X, out=out, **UNIT)
    assert verify(out)
    got = bx.map(double, out, progress=False).outputs
    np.testing.assert_array_equal(got, 2 * np.asarray(fun(X)))


def journal(out):
    """What is in the journal of the job that is there now."""
    files = below(f"{out}.job")
    name = json.loads(files["job.json"])["name"]
    return {k: v for k, v in files.items() if k.startswith(f"{name}/journal")}


@pytest.mark.parametrize("store", ["memory", pytest.param("on_s3", marks=pytest.mark.nightly)])
def test_a_lease_lasts_as_long_as_it_is_renewed(store, request, monkeypatch):
    path = address(f"{request.getfixturevalue(store)}/y.zarr.job/lock", "x")
    with monkeypatch.context() as patched:
        patched.setattr(objects, "LASTS", 0.4)  # so it is renewed every tenth of a second
        lease = objects.Lease(path)
    begun, end = objects.meta(path).modified, time.monotonic() + 60
    while objects.meta(path).modified == begun:
        assert time.monotonic() < end
        time.sleep(0.02)
    # As if that much later, when one that was not renewed would be free.
    monkeypatch.setattr(objects, "_now", lambda _: begun + objects.LASTS)
    with pytest.raises(LockedError):
        objects.Lease(path)
    assert lease.holds
    lease.release()
    other = objects.Lease(path)
    assert not lease.renew()
    assert not lease.holds
    other.release()


@pytest.mark.parametrize("proc", [True, False])
def test_a_lease_of_a_process_that_is_gone_is_free(root, monkeypatch, proc):
    """Also where the system has no /proc, as macOS."""
    if not proc:
        monkeypatch.setattr(objects, "_PROC", "/nowhere")
    path = address(f"{root}/y.zarr.job/lock", "x")
    lease = objects.Lease(path)
    with pytest.raises(LockedError, match="is held by this process"):
        objects.Lease(path)
    told = json.loads(objects.read(path))
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    for change, free in [
        ({"machine": "another one"}, False),
        ({"pid": 2**22 + 1}, True),
        ({"pid": ended.pid}, True),
        ({"pid": 1}, False),
        ({"released": True}, True),
        ({"machine": None, "pid": "no"}, False),
    ]:
        objects.put(path, json.dumps({**told, **change}).encode())
        assert objects.is_held(path) is not free, change
    objects.put(path, b"\xff")
    assert not objects.is_held(path)
    assert objects.last_holder(path) is None
    assert not lease.holds


def test_answers_that_are_lost_requests_that_fail_and_slow_ones(s3, on_s3, tmp_path, monkeypatch):
    """Each put of a name is done and its answer lost once; a fifth of all fails, some are slow."""
    seen, draw, fates, lock = Counter(), random.Random(0), Counter(), threading.Lock()
    out = f"{on_s3}/y.zarr"
    moment = datetime.timedelta(milliseconds=1)
    backoff = {**objects.RETRIES["backoff"], "init_backoff": moment, "max_backoff": moment}
    monkeypatch.setitem(objects.RETRIES, "backoff", backoff)

    def fate(method, path):
        with lock:
            seen[method, path] += 1
            first = method == "PUT" and seen[method, path] == 1
            chance = draw.random()
            told = "lose" if first else "fail" if chance < 0.2 else "slow" if chance < 0.22 else ""
            fates[told or "pass"] += 1
            return told or "pass"

    with (
        object_servers.proxy(s3, fate) as between,
        object_servers.environment(AWS_ENDPOINT_URL=between),
        fresh_clients(),
    ):
        bx.map(described, X, out=out, out_axes=AXES, **UNIT, retries=8)
    assert fates["lose"] > 15
    assert fates["fail"] > 2
    bx.map(described, X, out=tmp_path / "y.zarr", out_axes=AXES, **UNIT)
    assert below(out) == on_disk(tmp_path / "y.zarr")
    assert verify(out)
    entries = b"".join(journal(out).values()).split(b"\n")
    units = [json.loads(line)["unit"] for line in entries if b'"unit"' in line]
    assert sorted(units) == list(range(5)), "each is said to be done once"


@contextlib.contextmanager
def fresh_clients():
    """Clients are kept, with the environment in which they were made."""
    objects._opened.cache_clear()
    try:
        yield
    finally:
        objects._opened.cache_clear()


def test_credentials_are_in_no_message_no_log_and_no_file(s3, on_s3, monkeypatch, capfd, caplog):
    caplog.set_level(logging.DEBUG)
    secrets = [object_servers.KEY, object_servers.SECRET]
    monkeypatch.setitem(objects.RETRIES, "max_retries", 0)
    out, messages = f"{on_s3}/y.zarr", []
    bx.map(double, X, out=out, **{**UNIT, "progress": True})
    stopped(f"{on_s3}/z.zarr")
    told = lambda method, path: "fail"
    with object_servers.proxy(s3, told) as failing, reserved_port() as closed:
        for server in (failing, f"http://127.0.0.1:{closed}"):
            with object_servers.environment(AWS_ENDPOINT_URL=server), fresh_clients():
                with pytest.raises(bx.StorageError, match=re.escape(on_s3)) as caught:
                    bx.map(double, X, out=f"{on_s3}/new.zarr", **UNIT, retries=0)
                messages.append(repr(caught.value) + str(caught.getrepr(style="long")))
                assert main(["status", out]) == 1
    captured = capfd.readouterr()
    told = [*messages, captured.out, captured.err, caplog.text]
    told += [content.decode("latin1") for content in below(on_s3).values()]
    for secret in secrets:
        assert not any(secret in text for text in told)
    assert any("AKID" not in text for text in told)
    error = RuntimeError(f"https://h/x?sig=abc%2Fdef&se=1 key {secrets[0]} refused {secrets[1]}")
    assert objects.without_secrets(error) == "https://h/x?sig=...&se=1 key ... refused ...."


ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "az": "AZURE_STORAGE_ENDPOINT", "gs": "GOOGLE_BASE_URL"}


@pytest.mark.parametrize("scheme", ENDPOINTS)
@pytest.mark.parametrize(
    "url",
    [
        "http://user:passw0rd@127.0.0.1:{}",
        "http://user:p%40passw0rd@127.0.0.1:{}",
        "http://user:passw0rd@host:port",
        "http://user:x/passw0rd@127.0.0.1:{}",
        "http://us er:passw0rd@127.0.0.1",
        "user:passw0rd@host",
    ],
)
def test_passwords_of_servers_are_in_no_message(scheme, url, monkeypatch):
    monkeypatch.setitem(objects.RETRIES, "max_retries", 0)
    accounts = {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0"}
    with reserved_port() as port:
        named = {**object_servers.s3_at("http://127.0.0.1"), **accounts}
        named |= {"GOOGLE_SKIP_SIGNATURE": "true", ENDPOINTS[scheme]: url.format(port)}
        caught = pytest.raises(bx.StorageError)
        with object_servers.environment(**named), fresh_clients(), caught as caught:
            bx.map(double, f"{scheme}://bucket/x.npy", progress=False)
    told = repr(caught.value) + str(caught.getrepr(style="short"))
    assert "passw0rd" not in told
    assert "127.0.0.1" in told or ENDPOINTS[scheme] in told


def test_passwords_in_addresses_are_in_no_message():
    for x in (
        "s3://user:passw0rd@b/x.npy",
        "s3:/user:passw0rd@b/x.npy",
        "s3:///user:passw0rd@b",
        "s3://b/http://user:passw0rd@k/",
        "https://user:passw0rd@h/x.npy",
        Path("https://user:passw0rd@h/x.npy"),
    ):
        calls = [lambda x=x: bx.map(double, x)]
        calls += [lambda x=x: bx.map(double, X, out=x)] * isinstance(x, str)
        for call in calls:
            with pytest.raises(bx.BatchaxError) as caught:
                call()
            assert "passw0rd" not in str(caught.value)
    told = masked("no port 'passw0rd@h' of user", "tcp://user:passw0rd@h")
    assert told == "no port '...@h' of user"


@pytest.mark.nightly
@pytest.mark.parametrize("executor", ["processes:2", "dask"])
def test_workers(on_s3, executor):
    """Processes read, compute and write by themselves; what they are handed has no credentials."""
    put(f"{on_s3}/x.npy", npy(X))
    out, seen = f"{on_s3}/y.zarr", []

    def look(done, total):
        for path, _ in objects.below(address(f"{out}.job", "x")):
            if path.name == "call.pickle":
                seen.append(objects.read(path))

    how = {**UNIT, "progress": look}
    with contextlib.ExitStack() as stack:
        engine = executor
        if executor == "dask":
            from distributed import Client, LocalCluster

            cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
            engine = stack.enter_context(Client(stack.enter_context(cluster)))
        report = bx.map(double, f"{on_s3}/x.npy", out=out, executor=engine, **how)
    assert report.rows == 20
    assert seen
    assert not any(object_servers.SECRET.encode() in content for content in seen)
    assert verify(out)
    np.testing.assert_array_equal(bx.map(double, out, progress=False).outputs, 4 * X)
    assert not [name for name in below(f"{out}.job") if name.startswith("engine-")]
