"""What a map cannot be faster than: reading alone, computing alone, writing alone.

Each with the code that a map runs, over all units, without the others beside it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from batchax.datasets.pipeline import WRITERS, Work
from batchax.datasets.plan import Plan
from batchax.datasets.row_function import RowFunction
from batchax.datasets.stores import open_store
from batchax.datasets.units import Policy
from benchmarks.datasets.workloads import DatasetWorkload


def limits(work: DatasetWorkload, x: Path, rows: int) -> dict[str, Callable[[Path], float]]:
    """From the place of an output to the seconds that each limit takes alone, for all rows."""
    options = {"divergence": "predicate", "mesh": None}
    function = RowFunction.of(work.make(), (x,), 0, 0, None, options)
    plan, policy = Plan(rows, work.batch_size, work.commit_rows), Policy("raise", None)
    units = [plan.unit(k) for k in range(len(plan))]
    steps = Work(function, plan, None, policy, 0)
    data = steps.read(units[0])
    computed = steps.begin(units[0], data)()

    def reading(_: Path) -> float:
        return _seconds(steps.read, units)

    def computing(_: Path) -> float:
        return _seconds(lambda _: steps.begin(units[0], data)(), units)

    def writing(out: Path) -> float:
        store = open_store(out.with_suffix(".zarr"), [o.leaf for o in function.outputs], plan)
        store.prepare()
        write = dataclasses.replace(steps, store=store).write
        with ThreadPoolExecutor(WRITERS) as writers:
            return _seconds(
                lambda all: deque(writers.map(write, all), 0),
                [[dataclasses.replace(computed, unit=unit) for unit in units]],
            )

    return {"reading": reading, "computing": computing, "writing": writing}


def _seconds(work: Callable[[Any], Any], of: Iterable[Any]) -> float:
    """How long `work` takes for all of them, one after another; what it returns is let go of."""
    begun = time.perf_counter()
    deque(map(work, of), maxlen=0)
    return time.perf_counter() - begun
