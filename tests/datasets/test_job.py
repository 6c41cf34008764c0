"""A job that is begun, killed, resumed, shared and finished; what is refused."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

import batchax
from batchax.datasets import disk
from batchax.datasets.disk import Lock, is_held, last_holder
from batchax.datasets.file_stores import NpyStore
from batchax.datasets.plan import Plan, Record, checksum
from batchax.errors import JobError, StorageError

from support.small_jobs import CALL, LEAF, PLAN, computed, opened


@pytest.fixture
def out(tmp_path):
    return tmp_path / "y.npy"


def folder(out):
    return out.with_name(out.name + ".job")


def completed(out, **more):
    with opened(out) as job:
        computed(job, range(5), **more)
        job.finish({"rows": 20})


def test_begun_gone_on_with_and_finished(out):
    with opened(out) as job:
        assert (job.plan, job.done, job.finished) == (PLAN, {}, None)
        computed(job, [0, 3])
        assert set(job.done) == {0, 3}
        with pytest.raises(JobError, match=r"3 of 5 units of .* are not done"):
            job.finish({})
    with opened(out, plan=Plan(20, 2, 8)) as job:
        assert job.plan == PLAN  # that of who began
        assert set(job.done) == {0, 3}
        assert job.done[3].unit == PLAN.unit(3)
        computed(job, [1, 2, 4])
        job.finish({"rows": (20, 1)})
        unit = [0, list(job.done[0].checksums)]  # by which another output is told from this
        said = {"rows": [20, 1], "bad": [], "reduced": {}, "unit": unit}
        assert job.finished == said
    job = opened(out)
    assert job.finished == said
    assert set(job.done) == set(range(5))
    with pytest.raises(JobError, match="is not open for writing"):
        job.record([])
    with opened(out) as other:  # it is only read
        assert other.finished


def test_another_call_is_refused_and_nothing_is_touched(out):
    completed(out)
    before = {p: p.read_bytes() for p in out.parent.rglob("*") if p.is_file()}
    for change, says in [
        ({"options": {"batch_size": 4}}, "batch_size was 2, is 4"),
        ({"program": "q"}, "the function computes something else"),
        ({"jax": "2"}, "JAX was 1, is 2"),
        ({"version": "b"}, "version was not given, is b"),
    ]:
        with pytest.raises(
            JobError, match=rf"another call: {says}\. .* another out=, or overwrite=True"
        ):
            opened(out, {**CALL, **change})
    assert before == {p: p.read_bytes() for p in out.parent.rglob("*") if p.is_file()}


def test_a_description_that_is_damaged_or_gone(out):
    completed(out)
    path = folder(out) / "job.json"
    content = path.read_bytes()
    for damaged in (b"", content[:50], content.replace(b"20", b"21", 1)):
        path.write_bytes(damaged)
        with pytest.raises(JobError, match=r"job\.json is damaged, .* Restore it, or delete"):
            opened(out)
    path.unlink()
    with pytest.raises(JobError, match=r"job\.json is missing from"):
        opened(out)


def test_a_description_of_another_version(out, monkeypatch):
    completed(out)
    monkeypatch.setattr("batchax.datasets.journal._FORMAT", 2)
    with pytest.raises(JobError, match="written by another version"):
        opened(out)


def test_a_job_is_finished_only_as_long_as_nothing_of_the_journal_is_lost(out):
    completed(out)
    (folder(out) / "done.json").write_bytes(b"{")
    with opened(out) as job:
        assert job.finished is None
        assert len(job.done) == 5
        job.finish({})
    journal = folder(out) / "journal" / "main.jsonl"
    with open(journal, "ab") as file:
        file.write(b"more")
    assert opened(out).finished
    journal.write_bytes(journal.read_bytes()[:-5])
    with opened(out) as job:
        assert job.finished is None


def test_a_unit_whose_attempts_differ_is_computed_again(out):
    with opened(out) as job:
        computed(job, range(5))
        unit = job.plan.unit(2)
        for later in ([7, 8, 9, 9], [1, 2, 3, 4]):  # written over, and over
            job.record([Record(unit, [checksum(np.array(later))])])
        job.store.write(unit, [np.array([7, 8, 9, 9])])
        job.look_again()
        job.settle()
        assert set(job.done) == {0, 1, 3, 4}  # which of them is there, is not known
        job.settle()
        computed(job, [2])
        job.finish({})


def test_a_journal_of_another_job_is_refused(out):
    completed(out)
    other = out.with_name("other.npy")
    opened(other, plan=Plan(20, 2, 8)).close()
    (folder(out) / "journal").rename(folder(other) / "journal")
    with pytest.raises(JobError, match=r"not the journal of this job: .* rows 0 to 4"):
        opened(other)
    assert not is_held(folder(other) / "lock")


def test_a_store_that_cannot_be_made(out):
    class Refusing(NpyStore):
        def prepare(self):
            raise StorageError("no space")

    with pytest.raises(StorageError, match="no space"):
        opened(out, store=lambda out, plan: Refusing(out, [LEAF], plan.unit_rows))
    assert not is_held(folder(out) / "lock")
    out.mkdir()  # not left by that, and so it stays
    with pytest.raises(JobError, match="output of something else"):
        opened(out)
    out.rmdir()
    completed(out)


def test_what_was_half_made_of_another_output_stays(out):
    class Stopping(NpyStore):
        def prepare(self):
            self.out.mkdir()
            (self.out / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened(out, store=lambda out, plan: Stopping(out, [LEAF], plan.unit_rows))
    with pytest.raises((JobError, StorageError)):
        opened(out)
    assert (out / "half").exists()
    shutil.rmtree(out)
    completed(out)
    assert not (folder(out) / "preparing").exists()


# A process without JAX, which takes a second to start and does not like to be forked.
BEGIN = f"""
import sys, types
batchax = sys.modules["batchax"] = types.ModuleType("batchax")
batchax.__path__ = {list(batchax.__path__)}
"""


def command(script, path):
    return [sys.executable, "-c", BEGIN + script, path]


HOLD = """
from pathlib import Path
from batchax.datasets.disk import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_another_process_is_named_and_what_a_dead_one_held_is_free(out, monkeypatch):
    opened(out).close()
    path = folder(out) / "lock"
    assert not is_held(path)
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen(command(HOLD, path), **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        assert is_held(path)
        with pytest.raises(JobError, match=rf"held by process {other.pid}, since 20.* Wait for it"):
            opened(out)
        monkeypatch.setattr(disk.socket, "gethostname", lambda: "elsewhere")
        with pytest.raises(JobError, match=rf"held by process {other.pid} on "):
            opened(out)
        other.kill()
    assert not is_held(path)
    assert last_holder(path).pid == other.pid
    opened(out).close()


def test_looking_whether_a_lock_is_held_does_not_stop_who_takes_it(tmp_path):
    path = tmp_path / "lock"
    assert not is_held(path)
    assert last_holder(path) is None
    Lock(path).release()
    for _ in range(200):
        lock = Lock(path)
        assert is_held(path)
        lock.release()
        assert not is_held(path)


FORK = """
import os, signal, time
from pathlib import Path
from batchax.datasets.disk import Lock, is_held
path = Path(sys.argv[1])
lock = Lock(path)
child = os.fork()
if not child:
    print(lock.held)
    lock.release()
    print(is_held(path), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(lock.held, is_held(path), flush=True)
left = os.fork()
if not left:
    time.sleep(60)
    os._exit(0)
time.sleep(0.05)
lock.release()  # as at the end of the process
print(is_held(path))
os.kill(left, signal.SIGKILL)
"""


def test_a_child_does_not_have_the_lock_and_does_not_keep_it(tmp_path):
    printed = subprocess.check_output(command(FORK, tmp_path / "lock"), text=True)
    assert printed.split() == ["False", "True", "True", "True", "False"]
