"""Kills calls of `map`, each again and again until it ends, and compares what they leave.

The oracle is the same call that nobody killed: each file of the output has the same bytes, and what
is reported is the same. Units that the journal has are never recomputed.

Each call is a process of its own, forked from this one. That takes a tenth of a second, not the one
or two that JAX takes to start, and is sound as long as nothing that has threads was used here: not
JAX's backend, nor TensorStore.
"""

from __future__ import annotations

import collections
import os
import pickle
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Before they are imported: libraries that would begin threads.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

import jax
import tensorstore  # noqa: F401  (imported once, for all that are forked)

from batchax.datasets.inspect import status, verify
from kills.jobs import (
    AGAIN,
    JOBS,
    STREAMS,
    parquet,
    stream_zarr,
    write_inputs,
    zarr,
    zarr_group,
    zeros,
)
from kills.left import left_by, rows_of, units_done
from kills.tally import Tally

from support import steps

AT_ANY_TIME = "at any time"
Job = Callable[[Path, Path], Any]
MOMENTS = [*steps.STEPS, AT_ANY_TIME]
PATIENCE = 10  # kills, after which a call may end


class Watch:
    """Counts steps, and kills this process when it is at one for so many times."""

    def __init__(self, moment: str = "", count: int = 0) -> None:
        self._fatal = moment, count
        self._lock = threading.Lock()  # several threads write
        self.seen: collections.Counter[str] = collections.Counter()

    def __call__(self, step: str) -> None:
        with self._lock:
            self.seen[step] += 1
            if (step, self.seen[step]) == self._fatal:
                os.kill(os.getpid(), signal.SIGKILL)


def call(job: Job, inputs: Path, out: Path, watch: Watch) -> Any:
    """What a child does: the call, and what it returned."""
    steps.watch(watch)
    report = job(inputs, out)
    (path,) = out.glob("*.job")
    assert verify(path.with_suffix(""))
    reduced = jax.tree.map(lambda x: (str(x.dtype), x.shape, x.tobytes()), report.reduced)
    bad = [(b.row, b.error) for b in report.bad]
    return report.reused, (report.rows, report.quarantined, bad, reduced), watch.seen


def forked(
    job: Job, inputs: Path, out: Path, watch: Watch, seconds: float | None = None
) -> tuple[int, Any]:
    """A call in a child, killed after so many seconds; its exit code, and what `call` returned."""
    return forked_to_do(lambda: call(job, inputs, out, watch), seconds)


def forked_to_do(work: Callable[[], Any], seconds: float | None = None) -> tuple[int, Any]:
    """Work in a child, killed after so many seconds; its exit code, and what it returned."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            answer = pickle.dumps(work())
            with os.fdopen(writing, "wb") as file:
                file.write(answer)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    killer = threading.Timer(600 if seconds is None else seconds, os.kill, (child, signal.SIGKILL))
    killer.start()
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    killer.cancel()
    killer.join()  # no thread is left when the next child is forked
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code, pickle.loads(answer) if code == 0 else None


class Whole(NamedTuple):
    """What a call returns and leaves that nobody kills."""

    told: Any
    left: dict[str, Any]
    seen: collections.Counter[str]
    seconds: float


def whole(job: Job, inputs: Path, out: Path) -> Whole:
    out.mkdir()
    begin = time.perf_counter()
    code, answer = forked(job, inputs, out, Watch())
    assert code == 0, f"{job.__name__} fails by itself"
    reused, told, seen = answer
    assert reused == 0
    assert set(seen) == set(steps.STEPS)
    return Whole(told, left_by(out), seen, time.perf_counter() - begin)


def one_output(
    job: Job,
    inputs: Path,
    out: Path,
    expected: Whole,
    draw: random.Random,
    tally: Tally,
    loses: bool = False,
    again: bool = False,
) -> None:
    """Computes an output by calls that are killed, and compares it.

    Args:
      loses: whether files of results are deleted between the calls, too.
      again: whether the job takes back what was done: it starts over, or gets more rows.
    """
    out.mkdir()
    code, answer, before, kills = -1, None, [], 0
    while code:
        before = units_done(out)
        moment = draw.choice(MOMENTS) if kills < PATIENCE else ""
        watch = Watch(moment, 1 + int(expected.seen[moment] * draw.random() ** 2))
        after = draw.random() * expected.seconds if moment == AT_ANY_TIME else None
        code, answer = forked(job, inputs, out, watch, after)
        assert code in (0, -signal.SIGKILL), f"{job.__name__}, killed {kills} times: {code}"
        done = units_done(out)
        assert again or done[: len(before)] == before, "what the journal said, it says no more"
        once = loses or again or len(set(done)) == len(done)
        assert once, "a unit that was done was recomputed"
        if code:
            tally[moment] += 1
            kills += 1
            if loses:
                lose_one(out, draw)
            if loses or again:
                continue
            for folder in out.glob("*.job"):
                if (folder / "job.json").exists():
                    assert status(folder.with_suffix("")).done == rows_of(done)
    reused, told, _ = answer
    assert loses or again or reused == rows_of(before)
    assert told == expected.told, f"{job.__name__} reports {told}, and not {expected.told}"
    found, left = left_by(out), expected.left
    others = [name for name in {**found, **left} if found.get(name) != left.get(name)]
    assert not others, f"{job.__name__} leaves {others} in {out} otherwise"
    tally["outputs"] += 1
    tally["reused"] += len(before)


def lose_one(out: Path, draw: random.Random) -> None:
    """Deletes one of the files that hold results, if there are any."""
    files = [f for name in ("c.*", "part-*") for f in out.glob(f"*/**/{name}") if f.is_file()]
    if files:
        draw.choice(sorted(files)).unlink()


def run_losing(count: int, seed: int, root: Path) -> Tally:
    """The same, and files of results are lost between the calls."""
    return run(count, seed, root, [zarr, zarr_group, parquet, zeros, stream_zarr], loses=True)


def run_again(count: int, seed: int, root: Path) -> Tally:
    """Calls that start over, and whose inputs get more rows: what is left is as of one call."""
    return run(count, seed, root, [job for job, _ in AGAIN], again=dict(AGAIN))


def run(
    count: int,
    seed: int,
    root: Path,
    jobs: Sequence[Job] = JOBS + STREAMS,
    loses: bool = False,
    again: Mapping[Job, Job] | None = None,
) -> Tally:
    """Kills so many calls, and a few more."""
    draw, tally = random.Random(seed), Tally(dict.fromkeys(MOMENTS, 0))
    jax.config.update("jax_platforms", "cpu")
    (inputs := root / "inputs").mkdir()
    write_inputs(inputs)
    expected: dict[str, Whole] = {}
    jobs = draw.sample(jobs, len(jobs))
    while tally.kills < count:
        job = jobs[tally["outputs"] % len(jobs)]
        if job.__name__ not in expected:
            same = again[job] if again else job
            expected[job.__name__] = whole(same, inputs, root / job.__name__)
        out = root / f"{tally['outputs']}-{job.__name__}"
        one_output(job, inputs, out, expected[job.__name__], draw, tally, loses, bool(again))
    return tally
