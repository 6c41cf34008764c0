"""How long rows take in each layout: the table of the guide on rows.

    python -m benchmarks.rows.layouts [--only attention]

Of each workload, its values and its gradient, with lengths known and traced: the default, then all
that `layout=` and `buckets=` ask for. All programs of a line run in turns, and times are of the
processor, medians of the turns: what other programs the machine runs weighs little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import batchax as bx
from benchmarks.measure import in_turns
from benchmarks.rows.measure import COUNT
from benchmarks.rows.workloads import WORKLOADS, data

WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "padded": {"layout": "padded"},
    "packed": {"layout": "packed"},
    "buckets=4": {"buckets": 4},
}
TURNS = 15


@dataclass(frozen=True)
class Rows:
    """Rows, and a function of one of them.

    Attributes:
      name: of the workload.
      row: a function of one row, of what rows share, and perhaps of more rows of these lengths.
      ragged: the rows.
      shared: what the gradient is with respect to, if rows share it; else that is the rows.
    """

    name: str
    row: Callable[..., Any]
    ragged: bx.Ragged
    shared: Any = None

    def program(self, known: bool, gradient: bool, options: dict[str, Any]) -> Any:
        """The compiled program, and what it is given."""
        x = self.ragged
        batched = bx.vmap(self.row, in_axes=(0, None), **options)

        def run(given: Any, shared: Any) -> Any:
            own = x.with_data(given) if known else given
            return batched(own, shared)

        def loss(shared: Any, data: Any, given: Any) -> Any:
            rows = data if known else given.with_data(data)
            leaves = jax.tree.leaves(run(rows, shared), is_leaf=lambda y: isinstance(y, bx.Ragged))
            return sum(jnp.sum((y.data if isinstance(y, bx.Ragged) else y) ** 2) for y in leaves)

        def slope(given: Any, shared: Any) -> Any:
            to = 1 if self.shared is None else 0
            return jax.grad(loss, to)(shared, given if known else given.data, given)

        given = x.data if known else _traced(x)
        start = time.process_time()
        program = jax.jit(slope if gradient else run).lower(given, self.shared).compile()
        return program, (given, self.shared), time.process_time() - start


def _traced(x: bx.Ragged) -> bx.Ragged:
    lengths = jax.tree.map(jnp.asarray, x.lengths)
    return bx.Ragged(x.data, lengths, x.max_length, axis=x.axis)


def energy(atoms: Any, strengths: Any) -> Any:
    """Of one molecule, from where its atoms are: all pairs attract and repel each other."""
    first, second = jnp.arange(atoms.shape[0])[:, None], jnp.arange(atoms.shape[0])
    squares = jnp.sum((atoms[:, None] - atoms) ** 2, -1)
    sixth = (1 / jnp.where(first == second, 1.0, squares)) ** 3
    return jnp.where(first < second, 4 * (sixth**2 - sixth), 0.0).sum()


def _molecules() -> bx.Ragged:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(2.8, 0.7, 400), 3, 80).astype(np.int32)
    corners = np.arange(lengths.sum())[:, None] // np.array([1, 9, 81]) % 9
    shaken = 1.2 * corners + 0.05 * generator.normal(size=(lengths.sum(), 3))
    return bx.Ragged(jnp.asarray(shaken, jnp.float32), lengths)


def _workload(name: str, count: int = COUNT) -> Rows:
    workload = WORKLOADS[name]
    batch, weights = data(workload, count)
    lengths = jax.tree.map(np.asarray, batch.ragged.lengths)
    x = bx.Ragged(batch.ragged.data, lengths, batch.ragged.max_length, axis=batch.ragged.axis)
    return Rows(name, workload.row, x, weights)


def workloads() -> Iterator[Rows]:
    """All that the table has lines of."""
    molecules = Rows("molecules, energies and forces", jax.value_and_grad(energy), _molecules())
    yield molecules
    yield replace(molecules, name="molecules, energies", row=energy)
    for name in (
        "attention",
        "attention, longer tail",
        "transformer encoder, 16 rows",
        "images, two convolutions",
        "recurrence",
        "network for each element, mean",
    ):
        yield _workload(name)
    sort = _workload("sort")
    yield replace(sort, row=lambda x, shared: jnp.sort(x), shared=None)


def measured(rows: Rows, known: bool, gradient: bool) -> dict[str, tuple[float, float, int]]:
    """Of each way milliseconds, seconds to trace and compile, and bytes of temporaries."""
    programs = {w: rows.program(known, gradient, options) for w, options in WAYS.items()}

    def running(program: Any, args: Any) -> Callable[[], int]:
        def run() -> int:
            jax.block_until_ready(program(*args))
            return 1

        return run

    calls = [running(program, args) for program, args, _ in programs.values()]
    for call in calls:
        call()
    times = in_turns(calls, TURNS, time.process_time)
    return {
        way: (1e3 * float(np.median(t)), s, program.memory_analysis().temp_size_in_bytes)
        for (way, (program, _, s)), t in zip(programs.items(), times, strict=True)
    }


def line(rows: Rows, gradient: bool, known: bool) -> str:
    """A line of the table; the default over the best way behind it."""
    found = measured(rows, known, gradient)
    best = min(ms for ms, _, _ in found.values())
    cells = [f"{ms:.3g} ({s:.1f} s, {b / 1e6:.3g} MB)" for ms, s, b in found.values()]
    name = f"{rows.name}{', gradient' * gradient}, {'known' if known else 'traced'}"
    return f"| {name} | {' | '.join(cells)} | {found['default'][0] / best:.2f} |"


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="workloads whose name has this")
    only = parser.parse_args().only
    print(f"| | {' | '.join(WAYS)} | default over best |")
    print("|---|" + "---:|" * (1 + len(WAYS)))
    for rows in workloads():
        if only and not any(text in rows.name for text in only):
            continue
        for gradient in (False, True):
            for known in (True, False):
                print(line(rows, gradient, known), flush=True)


if __name__ == "__main__":
    main()
