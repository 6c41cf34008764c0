"""Kills processes of a map, callers and workers, until the output is that of a map nobody killed.

`python -m kills.engines --count 30 --seed 0` kills so many. Which engine a call has, and how many
workers, is drawn for each.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from batchax.datasets.inspect import status, verify
from batchax.datasets.job_files import JobFiles
from batchax.datasets.journal import read_journal

from support.engine_calls import ROWS, write_inputs

ENGINES = ["", "processes:1", "processes:2", "processes:3", "shard:0/2", "shard:1/2", "shard:2/3"]
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


def one_output(draw: random.Random) -> int:
    """In an empty folder: computes an output by calls that are killed; how often that was."""
    x, out, kills = write_inputs(), Path("y.npy"), 0
    done: set[int] = set()
    while not (JobFiles(out).read() and status(out).finished):
        call = started(draw.choice(ENGINES) if kills < 5 else "")
        if kills < 5:
            time.sleep(draw.random() * SECONDS)
            whom = draw.choice([call.pid, *descendants(call.pid)])
            if call.poll() is None:
                os.kill(whom, signal.SIGKILL)
                kills += 1
        assert call.wait(120) in (0, -signal.SIGKILL), "a call failed"
        now = set(read_journal(JobFiles(out).journal))
        assert done <= now, "what was done is not done any more"
        done = now
    np.testing.assert_array_equal(np.load(out), x * 2)
    assert verify(out)
    assert status(out).done == ROWS
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(prog="kills.engines", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=30, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, kills, outputs = random.Random(options.seed), 0, 0
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    while kills < options.count:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            kills += one_output(draw)
            os.chdir("/")
        outputs += 1
    print(f"{kills} kills of callers and workers, {outputs} outputs as if nobody had been killed")


if __name__ == "__main__":
    main()
