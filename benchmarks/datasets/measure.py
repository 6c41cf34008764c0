"""Each limit, the map, and other ways, in turns; memory and jobs of many units by themselves."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import batchax as bx
from batchax.datasets.journal import Journal
from batchax.datasets.plan import Record, Unit
from benchmarks.datasets.by_hand import WORKLOADS as BY_HAND
from benchmarks.datasets.by_hand import AgainstByHand, ByHand, measured_by_hand
from benchmarks.datasets.limits import limits
from benchmarks.datasets.ways import NEEDS, OTHERS, OURS, WAYS, mapped, prepare
from benchmarks.datasets.workloads import WORKLOADS as OVER_FILES
from benchmarks.datasets.workloads import DatasetWorkload
from benchmarks.measure import Ratio, ratio_of_medians

TURNS = 3
ENOUGH = 4.0  # seconds, after which what is not ours, nor a limit, has no further turn
STEADY = "bx.map, steady"
GIGABYTES = (1, 4)
UNITS = 10_000


@dataclass(frozen=True)
class Timed:
    """A function over a dataset.

    Attributes:
      work: which.
      rows: how many.
      seconds: of each turn: of the limits, of the map once it is under way, for all rows; of whole
        calls in each way.
      missing: ways that need a library that is not installed.
    """

    work: DatasetWorkload
    rows: int
    seconds: dict[str, list[float]]
    missing: list[str]

    @property
    def slowest(self) -> str:
        """The limit that binds."""
        return max(("reading", "computing", "writing"), key=lambda x: np.median(self.seconds[x]))

    @property
    def steady(self) -> Ratio:
        """The map under way over the slowest limit."""
        return ratio_of_medians(self.seconds[STEADY], self.seconds[self.slowest])

    def against(self, way: str) -> Ratio:
        """The whole call of the map to Zarr over another way's."""
        return ratio_of_medians(self.seconds[OURS], self.seconds[way])


@dataclass(frozen=True)
class Memory:
    """The peak resident memory of a process, before a map and with it, by GB of input."""

    before: dict[float, int] = field(default_factory=dict)
    peak: dict[float, int] = field(default_factory=dict)
    seconds: dict[float, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Units:
    """A job of units of one row.

    Attributes:
      count: how many.
      seconds: for all of them.
      reopened: to open it again when it is finished.
      journal: for a line of the journal, by how many are synced at once.
    """

    count: int
    seconds: float
    reopened: float
    journal: dict[int, float]


@dataclass(frozen=True)
class Killed:
    """Calls in processes of their own, of which one is killed when half of its time is over.

    Attributes:
      work: the function and its rows.
      whole: seconds of a call that is not killed, by way.
      again: seconds of the same call after one that was killed.
      missing: ways that need a library that is not installed.
    """

    work: DatasetWorkload
    whole: dict[str, float]
    again: dict[str, float]
    missing: list[str]


WORKLOADS: dict[str, Any] = {
    **OVER_FILES,
    "killed halfway": "killed halfway",
    "memory": "memory",
    "many units": "many units",
    **{f"by hand: {name}": work for name, work in BY_HAND.items()},
}


def measured(work: Any, quick: bool) -> Iterator[Timed | Killed | Memory | Units | AgainstByHand]:
    """One result."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCHMARKS_DISK")) as folder:
        if work == "killed halfway":
            yield _killed(Path(folder), quick)
        elif work == "memory":
            yield _memory(Path(folder), (0.01, 0.02) if quick else GIGABYTES)
        elif work == "many units":
            yield _units(Path(folder), 50 if quick else UNITS)
        elif isinstance(work, ByHand):
            yield measured_by_hand(work, Path(folder), quick)
        else:
            yield _timed(work, Path(folder), quick)


def _timed(work: DatasetWorkload, folder: Path, quick: bool) -> Timed:
    rows = 4 * work.commit_rows if quick else work.rows
    x = folder / "x.npy"
    work.save(x, rows)
    missing = _missing()
    ways = {name: way for name, way in WAYS.items() if name not in missing}
    prepare(ways, x)
    functions = dict(limits(work, x, rows))
    functions[STEADY] = lambda out: _steady(work, x, out)
    for name, way in ways.items():
        functions[name] = lambda out, way=way: _whole(way, work, x, out)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions.items())
    for _ in range(1 if quick else TURNS):
        for name, function in order:
            if name in OTHERS and sum(seconds[name]) > ENOUGH:
                continue
            gc.collect()  # what is still mapped stays in memory
            _forget(x)
            out = folder / "out"
            out.mkdir()
            seconds[name].append(function(out / "y"))
            shutil.rmtree(out)
            os.sync()  # what is removed keeps the disk busy, too
        order.reverse()
    return Timed(work, rows, seconds, missing)


def _missing() -> list[str]:
    """The ways that need a library that is not installed."""
    installed = {d.name for d in importlib.metadata.distributions()}
    return [way for way, libraries in NEEDS.items() if not installed.issuperset(libraries)]


_ONE = """
import sys, time
from pathlib import Path
from benchmarks.datasets.ways import WAYS
from benchmarks.datasets.workloads import WORKLOADS
name, way, x, out = sys.argv[1:]
print("begun", flush=True)
begun = time.perf_counter()
WAYS[way](WORKLOADS[name], Path(x), Path(out))
print(time.perf_counter() - begun)
"""


def _killed(folder: Path, quick: bool) -> Killed:
    missing, work = _missing(), OVER_FILES["a network of each row"]
    ways = {name: WAYS[name] for name in (OURS, *NEEDS) if name not in missing}
    x = folder / "x.npy"
    work.save(x, work.rows if quick else 4 * work.rows)
    prepare(ways, x)
    whole: dict[str, float] = {}
    again: dict[str, float] = {}
    for way in ways:
        for out in ("first", "killed"):
            (folder / out).mkdir()
        whole[way] = _in_process(work, way, x, folder / "first" / "y")
        _in_process(work, way, x, folder / "killed" / "y", kill_after=whole[way] / 2)
        again[way] = _in_process(work, way, x, folder / "killed" / "y")
        for out in ("first", "killed"):
            shutil.rmtree(folder / out)
    return Killed(work, whole, again, missing)


def _in_process(
    work: DatasetWorkload, way: str, x: Path, out: Path, kill_after: float | None = None
) -> float:
    """Seconds of a call in a process of its own; one that is killed takes no time."""
    command = [sys.executable, "-c", _ONE, work.name, way, str(x), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "begun\n":
            assert process.poll() is None, f"{way} fails by itself"
        if kill_after is not None:
            time.sleep(kill_after)
            process.kill()
            return 0.0
        return float(process.stdout.read())


def _whole(way: Callable[..., None], work: DatasetWorkload, x: Path, out: Path) -> float:
    begun = time.perf_counter()
    way(work, x, out)
    return time.perf_counter() - begun


def _steady(work: DatasetWorkload, x: Path, out: Path) -> float:
    """Seconds for all rows at the rate from when a quarter of them is done."""
    done: list[tuple[int, float]] = []
    mapped(work, x, out, lambda rows, total: done.append((rows, time.perf_counter())))
    total = done[-1][0]
    first = next(i for i, (rows, _) in enumerate(done) if rows >= total / 4)
    (rows_then, then), (_, end) = done[first], done[-1]
    return (end - then) / (total - rows_then) * total


def _forget(x: Path) -> None:
    """Files of input are read from the disk, as far as the system does what it is asked to."""
    for file in [x, *x.with_suffix(".arrow").glob("*")]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# The peak is that of this program: what getrusage tells begins with that of who started it.
_MAP = """
import re, sys, time
import jax.numpy as jnp
import batchax as bx
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])
jnp.ones(3).block_until_ready()
before, begun = peak(), time.perf_counter()
bx.map(lambda x: jnp.stack([x.mean(), x.max()]), sys.argv[1], out=sys.argv[2], progress=False)
print(before, peak(), time.perf_counter() - begun)
"""


def _memory(folder: Path, sizes: tuple[float, ...]) -> Memory:
    found = Memory()
    for size in sizes:
        x, columns = folder / "x.npy", 4096
        shape = round(size * 1e9 / columns / 4), columns
        with open(x, "wb") as file:
            header = {"shape": shape, "fortran_order": False, "descr": "<f4"}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 4 * shape[0] * shape[1])  # zeros that take no space
        out = folder / f"y{size}.npy"
        command = [sys.executable, "-c", _MAP, str(x), str(out)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        before, peak, seconds = map(float, said.split())
        found.before[size], found.peak[size] = round(before), round(peak)
        found.seconds[size] = seconds
    return found


def _units(folder: Path, count: int) -> Units:
    x, fun = folder / "x.npy", lambda x: jnp.tanh(x)
    np.save(x, np.zeros((count, 8), np.float32))

    def call() -> float:
        begun = time.perf_counter()
        bx.map(fun, x, out=folder / "y.npy", batch_size=1, commit_rows=1, progress=False)
        return time.perf_counter() - begun

    first, again = call(), call()
    return Units(count, first, again, {group: _line(folder, group) for group in (1, 100)})


def _line(folder: Path, group: int) -> float:
    """Seconds for a line of a journal, of which so many are written down at once."""
    journal = Journal(folder / f"journal{group}", "main")
    records = [Record(Unit(k, k, k + 1), [k], seconds=0.1) for k in range(1000)]
    begun = time.perf_counter()
    for start in range(0, len(records), group):
        journal.append_many(records[start : start + group])
    journal.close()
    return (time.perf_counter() - begun) / len(records)
