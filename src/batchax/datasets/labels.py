"""What rows are called: the dimension and the coordinates of arrays of xarray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Labels:
    """What an array of xarray calls its rows.

    Attributes:
      dimension: the name of the axis along which rows lie.
      coordinates: the coordinates along it, and those of the whole array, by name.
    """

    dimension: str = "row"
    coordinates: Mapping[str, Any] = field(default_factory=dict)


def labels_of(x: Any, axis: int) -> Labels | None:
    """Those of an array of xarray's; None of any other."""
    if type(x).__module__.split(".")[0] != "xarray":
        return None
    dimension = x.dims[axis]
    along = {str(name): c for name, c in x.coords.items() if c.dims in ((), (dimension,))}
    return Labels(str(dimension), along)
