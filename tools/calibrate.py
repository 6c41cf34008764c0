"""Measures what operations cost on this kind of device: `make calibrate`.

It writes the row of the device in `src/batchax/analysis/calibrated.py`. The cost model and the
thresholds of divergent lanes are multiples of these numbers. The file is committed, so a program
depends on the kind of the device, and not on the load of the machine that compiles it.

A CPU is measured by the time of the process and on one core; another device by the clock. Each cost
is a slope: the difference between a program with many of a thing and one with few. Programs take
turns, and the least time of all turns counts: other programs only add to it. Costs are rounded to
1 or 3 and a power of ten, so that all machines of a kind have the same ones.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
from jax import lax

from batchax.analysis import calibrated
from batchax.analysis.calibrated import CALIBRATED, Costs

TABLE = Path(calibrated.__file__)
HEAD = "CALIBRATED = {\n"  # what stands before it is kept
TURNS = 9
FEW, MANY = 1 << 18, 1 << 21  # numbers: what all lanes hold lies in no cache
STEPS, MANY_STEPS = 20, 1_000
CHAIN = 8, 40  # operations that are not fused
NARROW = 64  # numbers in each of those


def clock() -> float:
    """Seconds: of the process on a CPU, where others run at the same time."""
    return time.process_time() if jax.default_backend() == "cpu" else time.perf_counter()


def loop_of(step: Callable[[Any], Any], value: Any, steps: int) -> Callable[[], Any]:
    """What runs so many steps of a loop, compiled."""
    run = jax.jit(lambda x: lax.fori_loop(0, steps, lambda _, x: step(x), x))
    run = run.lower(value).compile()
    return lambda: jax.block_until_ready(run(value))


def least(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """The least nanoseconds that each takes."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(TURNS):
        for run, mine in zip(runs, times, strict=True):
            begun = clock()
            run()
            mine.append(1e9 * (clock() - begun))
    return list(map(min, times))


def each(make: Callable[[int], Callable[[], Any]], few: int, many: int) -> float:
    """The nanoseconds of one more, of what `make` makes of so many."""
    short, long = least([make(few), make(many)])
    return (long - short) / (many - few)


def elementwise(size: int) -> Callable[[], Any]:
    """Steps that multiply and add."""
    return loop_of(lambda x: x * 0.999 + 1.0, jnp.ones(size), STEPS)


def chain(count: int, x: Any) -> Any:
    """So many operations of which none is fused with the next."""
    for _ in range(count):
        x = jnp.cumsum(x) * 0.01
    return x


def launches(count: int) -> Callable[[], Any]:
    """Steps of a chain."""
    return loop_of(functools.partial(chain, count), jnp.ones(NARROW), MANY_STEPS)


def compiled(count: int) -> Callable[[], Any]:
    """Compiles a chain, which is another one each time: what is compiled already is found."""
    sizes = itertools.count(NARROW)
    run = jax.jit(functools.partial(chain, count))
    lowered = [run.lower(jnp.ones(next(sizes))) for _ in range(TURNS)]
    return lambda: lowered.pop().compile()


def measured() -> Costs:
    """The costs of the default device."""
    found = Costs(
        element=each(elementwise, FEW, MANY) / STEPS,
        launch=each(launches, *CHAIN) / MANY_STEPS,
        compile=each(compiled, *CHAIN),
    )
    print(found)
    return Costs(*map(rounded, found))


def rounded(cost: float) -> float:
    """The nearest of 1, 3, 10, 30 and so on, by its ratio."""
    twice = round(2 * math.log10(max(cost, 1e-9)))
    return float(f"{10 ** (twice / 2):.0e}")


def main() -> None:
    """Writes the row of the default device."""
    jax.config.update("jax_enable_compilation_cache", False)
    rows = CALIBRATED | {jax.default_backend(): measured()}
    before = TABLE.read_text().partition(HEAD)[0]
    TABLE.write_text(
        "".join([before, HEAD, *itertools.starmap(shown, sorted(rows.items())), "}\n"])
    )


def shown(kind: str, row: Costs) -> str:
    """A row of the table, as a formatter leaves it."""
    values = "".join(f"        {name}={cost},\n" for name, cost in row._asdict().items())
    return f'    "{kind}": Costs(\n{values}    ),\n'


if __name__ == "__main__":
    main()
