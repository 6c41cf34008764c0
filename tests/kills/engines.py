"""Kills processes of a map, callers and workers, until the output is that of a map nobody killed.

Which engine a call has, and how many workers, is drawn for each.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from batchax.datasets.inspect import status, verify
from batchax.datasets.journal import JobFiles, read_journal
from kills.tally import Tally

from support.engine_calls import ROWS, write_inputs

ENGINES = ["", "processes:1", "processes:2", "processes:3", "shard:0/2", "shard:1/2", "shard:2/3"]
PATIENCE = 5  # kills, after which a call may end
SECONDS = 4.0  # in which a call has begun, and is mostly not yet done
BEGUN = 0.7  # of the kills come after something was committed, however long it took to begin


def started(engine: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "support.engine_calls", "slowly", engine]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def descendants(pid: int) -> list[int]:
    """The processes that a process began, and those that these did."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [p for child in map(int, children) for p in (child, *descendants(child))]


def one_output(draw: random.Random, engines: Sequence[str], folder: Path) -> Tally:
    """In an empty folder: computes an output by calls that are killed."""
    folder.mkdir()
    os.chdir(folder)
    x, out, kills = write_inputs(), Path("y.npy"), Tally({"outputs": 1})
    done: set[int] = set()
    while not (JobFiles(out).read() and status(out).finished):
        engine = draw.choice(engines) if kills.kills < PATIENCE else ""
        call = started(engine)
        if kills.kills < PATIENCE:
            wait(draw, out, call)
            whom = draw.choice([call.pid, *descendants(call.pid)])
            if call.poll() is None:
                os.kill(whom, signal.SIGKILL)
                kills["callers" if whom == call.pid else "workers"] += 1
        assert call.wait(120) in (0, -signal.SIGKILL), f"a call with {engine!r} failed"
        kills["reused"] = len(done)
        done = grown(out, done)
    assert_whole(out, x)
    os.chdir("/")
    return kills


def wait(draw: random.Random, out: Path, call: subprocess.Popen[bytes]) -> None:
    """Until a moment that is drawn: some time after the call was made, or has committed a unit."""
    if draw.random() < BEGUN:
        before, end = _committed(out), time.monotonic() + 60
        while call.poll() is None and _committed(out) <= before and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(draw.random() * SECONDS / 8)
    else:
        time.sleep(draw.random() * SECONDS)


def _committed(out: Path) -> int:
    """How long all journals are."""
    return sum(p.stat().st_size for p in out.parent.glob(f"{out.name}.job/journal/*.jsonl"))


def grown(out: Path, before: set[int]) -> set[int]:
    """The units that are done, those among them that were before."""
    now = set(read_journal(JobFiles(out).journal))
    assert before <= now, "what was done is not done any more"
    return now


def assert_whole(out: Path, x: np.ndarray) -> None:
    np.testing.assert_array_equal(np.load(out), x * 2)
    assert verify(out)
    assert status(out).done == ROWS


def run(count: int, seed: int, root: Path, engines: Sequence[str] = ENGINES) -> Tally:
    """Kills so many, and a few more."""
    draw, tally = random.Random(seed), Tally()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    while tally.kills < count:
        tally.update(one_output(draw, engines, root / str(tally["outputs"])))
    return tally
