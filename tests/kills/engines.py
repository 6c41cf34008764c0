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
from batchax.datasets.job_files import JobFiles
from batchax.datasets.journal import read_journal
from kills.tally import Tally

from support.engine_calls import ROWS, write_inputs

ENGINES = ["", "processes:1", "processes:2", "processes:3", "shard:0/2", "shard:1/2", "shard:2/3"]
PATIENCE = 5  # kills, after which a call may end
SECONDS = 4.0  # in which a call has begun, and is mostly not yet done


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
            time.sleep(draw.random() * SECONDS)
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
