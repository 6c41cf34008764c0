"""Units that take half a second each, run by each engine: how much longer than that they take."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import batchax as bx
from batchax.datasets.engines.engine import find_pool
from batchax.datasets.journal import read_journal

WORKERS = 2
UNIT = 0.5  # seconds


@dataclass(frozen=True)
class EngineResult:
    """What was measured of an engine.

    Attributes:
      name: of the engine.
      overhead: by how much longer than its own work a unit takes, one for each repetition.
      seconds: what the engine takes for a task that does nothing.
    """

    name: str
    overhead: list[float]
    seconds: float


def rest(x: Any) -> Any:
    """A row that takes its time, and no processor, of which there may be fewer than workers."""

    def sleep(x: Any) -> Any:
        time.sleep(UNIT)
        return x

    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(sleep, kind, x, vmap_method="broadcast_all")


def measured(engine: str, quick: bool) -> EngineResult:
    """One engine."""
    units, times = (4, 1) if quick else (40, 3)
    with ENGINES[engine]() as executor:
        overhead = [_overhead(executor, units) for _ in range(times)]
        return EngineResult(engine, overhead, _seconds_of_nothing(executor, 20 if quick else 300))


def _overhead(executor: Any, units: int) -> float:
    """From when all workers have begun to when all is done."""
    workers = 1 if executor is None else WORKERS
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "y.npy"
        bx.map(
            rest,
            np.zeros(units, np.float32),
            out=out,
            batch_size=1,
            commit_rows=1,
            version="1",
            executor=executor,
            progress=False,
        )
        journal = read_journal(Path(folder) / "y.npy.job" / "journal")
    ended = sorted(record.ended for record in journal.values())
    took = ended[-1] - ended[workers - 1]
    return took * workers / ((units - workers) * UNIT) - 1


def nothing() -> None:
    """A task."""


def _seconds_of_nothing(executor: Any, count: int) -> float:
    if executor is None:
        return 0.0
    pool = find_pool(executor)()
    pool.submit("nothing", nothing).result()  # workers begin
    begun = time.perf_counter()
    waiting = [pool.submit("nothing", nothing) for _ in range(count)]
    for future in waiting:
        future.result()
    took = (time.perf_counter() - begun) / count
    pool.close()
    return took


@contextmanager
def _threads() -> Iterator[Any]:
    yield None


@contextmanager
def _processes() -> Iterator[Any]:
    yield f"processes:{WORKERS}"


@contextmanager
def _dask() -> Iterator[Any]:
    from distributed import Client, LocalCluster

    options = dict(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None)
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client


ENGINES: dict[str, Callable[[], Any]] = {
    "threads of one process": _threads,
    "processes": _processes,
    "Dask": _dask,
}
