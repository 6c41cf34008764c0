"""A job that is begun, killed, resumed, shared and finished; what is refused."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from batchax.datasets import disk
from batchax.datasets.disk import Lock, is_held, last_holder
from batchax.datasets.job import open_job
from batchax.datasets.plan import Bad, Plan, Record, checksum
from batchax.errors import JobError, StorageError

from support import kills
from support.tiny_store import TinyStore

PLAN = Plan(20, 2, 4)
CALL = {"program": "p", "inputs": [], "options": {"batch_size": 2}, "jax": "1", "version": None}


@pytest.fixture
def out(tmp_path):
    return tmp_path / "y.tiny"


def opened(out, call=CALL, plan=PLAN, **options):
    return open_job(out, lambda _: call, lambda: plan, lambda plan: TinyStore(out, plan), **options)


def folder(out):
    return out.with_name(out.name + ".job")


def computed(job, numbers, **more):
    for number in numbers:
        unit = job.plan.unit(number)
        result = np.arange(unit.start, unit.stop)
        job.store.write(unit, [result])
        job.record([Record(unit, [checksum(result)], **more)])


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


@pytest.mark.parametrize("size", [2, 2000])
def test_what_is_said_at_the_end(out, size):
    bad = [Bad(3, "ValueError", "where"), Bad(5, "x")]
    with opened(out) as job:
        computed(job, range(5))
        job.finish({"bad": bad, "reduced": {"": np.arange(size), "a": 1.5}, "seconds": 2.5})
    for said in (job.finished, opened(out).finished):
        assert said["bad"] == bad
        assert said["seconds"] == 2.5
        np.testing.assert_array_equal(said["reduced"][""], np.arange(size))
        assert said["reduced"]["a"] == 1.5
    if size > 2:  # it is beside, and if it is damaged, the job is to be ended again
        (folder(out) / "partials" / "all.bin").write_bytes(b"x")
        with opened(out) as job:
            assert job.finished is None
            job.finish({})


def test_a_journal_of_another_job_is_refused(out):
    completed(out)
    other = out.with_name("other")
    open_job(
        other, lambda _: CALL, lambda: Plan(20, 2, 8), lambda plan: TinyStore(other, plan)
    ).close()
    (folder(out) / "journal").rename(folder(other) / "journal")
    with pytest.raises(JobError, match=r"not the journal of this job: .* rows 0 to 4"):
        opened(other)
    assert not is_held(folder(other) / "lock")


def test_a_store_that_cannot_be_made(out):
    class Refusing(TinyStore):
        def prepare(self):
            raise StorageError("no space")

    with pytest.raises(StorageError, match="no space"):
        open_job(out, lambda _: CALL, lambda: PLAN, lambda plan: Refusing(out, plan))
    assert not is_held(folder(out) / "lock")
    out.mkdir()  # not left by that, and so it stays
    with pytest.raises(JobError, match="output of something else"):
        opened(out)
    out.rmdir()
    completed(out)


def test_what_was_half_made_of_another_output_stays(out):
    class Stopping(TinyStore):
        def prepare(self):
            self.out.mkdir()
            (self.out / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_job(out, lambda _: CALL, lambda: PLAN, lambda plan: Stopping(out, plan))
    with pytest.raises((JobError, StorageError)):
        opened(out)
    assert (out / "half").exists()
    shutil.rmtree(out)
    completed(out)
    assert not (folder(out) / "preparing").exists()


HOLD = """
import sys
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
    with subprocess.Popen(kills.command(HOLD, path), **pipes) as other:
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
import os, signal, sys, time
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
    assert kills.run(FORK, tmp_path / "lock").split() == ["False", "True", "True", "True", "False"]


RACE = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from batchax.datasets.job import open_job
from batchax.datasets.plan import Plan
from batchax.errors import JobError
from support.tiny_store import TinyStore
root = Path(sys.argv[1])
for trial in range(8):
    out = root / str(trial)
    go, stop, told = os.pipe(), os.pipe(), os.pipe()
    children = []
    for i in range(4):
        child = os.fork()
        if not child:
            os.close(go[1]); os.close(stop[1])
            os.read(go[0], 1)
            try:
                plan, store = Plan(20, 2, 4), lambda plan: TinyStore(out, plan)
                job = open_job(out, lambda _: {}, lambda: plan, store)
            except JobError as error:
                os.write(told[1], f"{os.getpid()} {error}\\n".encode())
                os._exit(0)
            os.write(told[1], f"{os.getpid()} won\\n".encode())
            os.read(stop[0], 1)
            os._exit(0)
        children.append(child)
    os.close(go[0]); os.close(go[1]); os.close(told[1]); os.close(stop[0])
    lines = b""
    while lines.count(b"\\n") < 4:
        lines += os.read(told[0], 4096)
    os.close(stop[1]); os.close(told[0])
    for child in children:
        os.waitpid(child, 0)
    lines = lines.decode().splitlines()
    (winner,) = [x.split()[0] for x in lines if x.endswith(" won")]
    losers = [x for x in lines if not x.endswith(" won")]
    assert all(f"held by process {winner}, since" in x for x in losers), lines
print("ok")
"""


def test_of_several_that_begin_at_once_one_wins(tmp_path):
    assert kills.run(RACE, tmp_path, Path(kills.__file__).parents[1]) == "ok\n"


KILL = """
import json, random, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
import numpy as np
from batchax.datasets.plan import checksum
from batchax.datasets.job import open_job
from batchax.datasets.journal import JobFiles
from batchax.datasets.journal import read_journal
from batchax.datasets.plan import Bad, Record
from batchax.datasets.plan import Plan
from support.tiny_store import TinyStore

plan = Plan(20, 2, 4)
draw = random.Random(int(sys.argv[3]))
count = kills = reused = begun = finished = 0

def result(unit):
    return np.arange(unit.start, unit.stop)

def part(unit):
    return np.full(600 if unit.number % 2 else 3, unit.number, np.float64)

def work():
    with open_job(out, lambda _: {}, lambda: plan, lambda plan: TinyStore(out, plan)) as job:
        if job.finished is not None:
            return
        pending = []
        for number in range(len(plan)):
            if number in job.done:
                continue
            unit = plan.unit(number)
            job.store.write(unit, [result(unit)])
            bad = [Bad(unit.start, "wrong")] if number == 3 else []
            pending.append(Record(unit, [checksum(result(unit))], 0, 0.1, bad, {"": part(unit)}))
            if number % 3 == 2:
                job.record(pending)
                pending = []
        job.record(pending)
        job.finish({"ok": True})

for trial in range(int(sys.argv[4])):
    out = Path(sys.argv[1]) / str(trial)
    code = None
    while code != 0:
        before = set(read_journal(JobFiles(out).journal))
        code, passed = killed_at(draw.randint(1, 45) if draw.random() < 0.9 else 1000, work)
        assert code in (0, -9), code
        kills += code == -9
        after = read_journal(JobFiles(out).journal)
        assert before <= set(after)
        reused += len(before) if code == 0 else 0
        store = TinyStore(out, plan)
        for record in after.values():
            assert record.unit == plan.unit(record.unit.number)
            assert [checksum(x) for x in store.read(record.unit)] == record.checksums
            assert (record.reduced[""] == part(record.unit)).all()
    assert len(after) == 5
    assert JobFiles(out).read_end()["ok"] is True
    assert b"".join(store.file(plan.unit(i)).read_bytes() for i in range(5)) == (
        np.arange(20).tobytes())
    row, = (JobFiles(out).quarantine).read_text().splitlines()
    assert json.loads(row)["row"] == 12
    left = [*JobFiles(out).folder.iterdir(), *JobFiles(out).partials.iterdir()]
    assert not [p for p in left if p.name.endswith(".unfinished")]
print(json.dumps([kills, reused]))
"""


def test_killed_at_any_step_and_nothing_is_lost(tmp_path):
    begin = time.perf_counter()
    output = kills.run(KILL, tmp_path, Path(kills.__file__).parents[1], 0, 60)
    killed, reused = json.loads(output)
    print(f"{killed} kills, {reused} units reused, {time.perf_counter() - begin:.1f} s")
    assert killed > 100
    assert reused > 50
