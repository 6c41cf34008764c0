"""Kills clients and schedulers of Dask until the output is that of a map nobody killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from batchax.datasets.inspect import status
from batchax.datasets.journal import JobFiles
from kills.engines import PATIENCE, assert_whole, grown, run, started, wait
from kills.tally import Tally

from support.engine_calls import write_inputs

WORKERS = 2


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A scheduler with workers, as commands start them, and its address."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    env = {**os.environ, "PYTHONPATH": paths, "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "2s"}
    file, running = folder / "scheduler.json", []
    file.unlink(missing_ok=True)

    def start(*args: str) -> None:
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        command = [sys.executable, "-m", "dask", *args]
        running.append(subprocess.Popen(command, env=env, cwd=folder, **quiet))

    begin = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    start(*begin, "--scheduler-file", str(file))
    try:
        end = time.monotonic() + 60
        while not (file.exists() and file.stat().st_size):
            assert time.monotonic() < end, "no scheduler begins"
            time.sleep(0.05)
        for _ in range(WORKERS):
            start("worker", "--scheduler-file", str(file), "--nthreads", "1", "--no-dashboard")
        yield running[0], json.loads(file.read_text())["address"]
    finally:
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run_clients(count: int, seed: int, root: Path) -> Tally:
    """Kills so many clients of one cluster, whose workers go on with what they have."""
    with cluster(root / "cluster") as (_, address):
        return run(count, seed, root, [f"dask:{address}"])


def run_schedulers(count: int, seed: int, root: Path) -> Tally:
    """Kills so many schedulers; each call has one of its own."""
    draw, tally = random.Random(seed), Tally()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    os.environ["DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT"] = "2s"
    while tally.kills < count:
        (folder := root / str(tally["outputs"])).mkdir()
        os.chdir(folder)
        x, out, kills, done = write_inputs(), Path("y.npy"), 0, set[int]()
        while not (JobFiles(out).read() and status(out).finished):
            if kills >= PATIENCE:
                assert started("").wait(120) == 0
                continue
            with cluster(folder / "cluster") as (scheduler, address):
                call = started(f"dask:{address}")
                wait(draw, out, call)
                if call.poll() is None:
                    scheduler.send_signal(signal.SIGKILL)
                    kills += 1
                assert call.wait(120) in (0, 1), "the call did not end by itself"
            done = grown(out, done)
        assert_whole(out, x)
        os.chdir("/")
        tally.update({"schedulers": kills, "outputs": 1, "reused": len(done)})
    return tally
