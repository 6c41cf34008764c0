"""Functions of one row over files: one that computes, one that reads, one that writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.workload import normal


@dataclass(frozen=True)
class DatasetWorkload:
    """A function of one row, over rows of random numbers in a .npy file.

    Attributes:
      name: what reports call it.
      make: makes the function.
      columns: numbers of a row.
      results: numbers that the function returns, as an array with one axis.
      rows: of a full measurement.
      commit_rows: rows of a unit, and of a slice of loops.
      batch_size: rows that are computed at a time.
    """

    name: str
    make: Callable[[], Callable[[Any], Any]]
    columns: int
    results: int
    rows: int
    commit_rows: int
    batch_size: int

    def save(self, path: Path, rows: int) -> None:
        """Writes the input: the same numbers again and again, for they need not differ."""
        part = np.random.default_rng(0).standard_normal((self.commit_rows, self.columns), "f4")
        shape = rows, self.columns
        dataset = np.lib.format.open_memmap(path, "w+", np.float32, shape)
        for start in range(0, rows, self.commit_rows):
            dataset[start : start + self.commit_rows] = part[: rows - start]
        dataset.flush()


def network(width: int) -> Callable[[], Callable[[Any], Any]]:
    """Three layers, each with weights of its own."""
    shapes = (256, width), (width, width), (width, 64)

    def make() -> Callable[[Any], Any]:
        weights = [normal(*shape) / shape[0] ** 0.5 for shape in shapes]

        def network(x: Any) -> Any:
            for w in weights:
                x = jnp.tanh(x @ w)
            return x

        return network

    return make


def _moments() -> Callable[[Any], Any]:
    return lambda x: jnp.stack([x.mean(), x.max()])


def _products() -> Callable[[Any], Any]:
    return lambda x: (x[:, None] * x).reshape(-1)


WORKLOADS = {
    w.name: w
    for w in (
        DatasetWorkload("a network of each row", network(1024), 256, 64, 65_536, 8192, 1024),
        DatasetWorkload("a larger network", network(2048), 256, 64, 16_384, 2048, 1024),
        DatasetWorkload("mean and maximum of long rows", _moments, 8192, 2, 65_536, 512, 256),
        DatasetWorkload("products of short rows", _products, 48, 2304, 65_536, 1024, 512),
    )
}
