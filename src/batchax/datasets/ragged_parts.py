"""Rows of different lengths as a map keeps them, and as `vmap` takes and gives them."""

from __future__ import annotations

from typing import Any

import numpy as np

from batchax.datasets.parts import Rows
from batchax.rows.arrow import by_axis, together
from batchax.rows.building import as_tuple
from batchax.rows.ragged import Ragged


def kept(x: Ragged, rows: int) -> Rows:
    """The first rows of a batch, so many, on the host."""
    each = [np.asarray(n)[:rows].astype(np.int64) for n in x.each_length]
    got = Rows(np.asarray(x.data), together(each))
    data = np.moveaxis(got.data, x.element_axis, 0)
    return got._replace(data=np.ascontiguousarray(data[: got.elements.sum()]))


def as_ragged(
    x: Rows, axes: int | tuple[int, ...], bounds: tuple[int, ...] | None = None, dtype: Any = None
) -> Ragged:
    """Rows as a batch.

    Args:
      x: the rows.
      axes: along which they are ragged.
      bounds: of the lengths along each; None: the greatest ones.
      dtype: of lengths; None: as they are.
    """
    each = by_axis(x.lengths).astype(dtype or x.lengths.dtype)
    data = np.moveaxis(x.data, 0, as_tuple(axes)[0])
    return Ragged(data, list(each.T), bounds, axis=as_tuple(axes))


def one_row(elements: np.ndarray, lengths: Any) -> np.ndarray:
    """The elements of a row, as `Rows` has them, as an array with the ragged axes in front."""
    return elements.reshape(*np.atleast_1d(lengths), *elements.shape[1:])
