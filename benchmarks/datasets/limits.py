"""What a map cannot be faster than: reading alone, computing alone, writing alone.

Each with the code that a map runs, over all units, without the others beside it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from batchax.datasets.checksums import checksum
from batchax.datasets.inputs import find_inputs
from batchax.datasets.pipeline import WRITERS
from batchax.datasets.plan import Plan
from batchax.datasets.program import Program, RowFunction
from batchax.datasets.stores import open_store
from batchax.datasets.units import Policy, compute_unit
from benchmarks.datasets.workloads import DatasetWorkload


def limits(work: DatasetWorkload, x: Path, rows: int) -> dict[str, Callable[[Path], float]]:
    """From the place of an output to the seconds that each limit takes alone, for all rows."""
    fun = work.make()
    inputs = find_inputs(fun, 0, (x,))
    options = {"divergence": "predicate", "mesh": None}
    function = RowFunction(fun, inputs, 0, 0, None, options)
    plan = Plan(rows, work.batch_size, work.commit_rows)
    units = [plan.unit(k) for k in range(len(plan))]
    (mapped,) = inputs.mapped
    program, policy = Program(function, work.batch_size), Policy("raise", None)
    unit = units[0]
    data = [mapped.source.read(0, unit.start, unit.stop)]
    results = compute_unit(program, unit, data, policy).results

    def reading(_: Path) -> float:
        return _seconds(lambda: deque((mapped.source.read(0, u.start, u.stop) for u in units), 0))

    def computing(_: Path) -> float:
        return _seconds(
            lambda: deque((compute_unit(program, unit, data, policy) for _ in units), 0)
        )

    def writing(out: Path) -> float:
        store = open_store(out.with_suffix(".zarr"), [o.leaf for o in function.outputs], plan)
        store.prepare()

        def write(u: Any) -> None:
            store.write(u, results)
            list(map(checksum, results))

        def all_units() -> None:
            with ThreadPoolExecutor(WRITERS) as writers:
                list(writers.map(write, units))

        return _seconds(all_units)

    return {"reading": reading, "computing": computing, "writing": writing}


def _seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
