"""From how many lanes on decompositions with lanes last take less time than the library, on a CPU.

By measurements, on two cores, of 1 to 10,000 matrices of 1 to 10 rows.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST: dict[str, dict[str, Sequence[int | None]]] = {
    "cholesky": {
        "float32": (32, 64, 64, 64, 64, 64),
        "float64": (32, 64, 64, 64, 64),
        "complex64": (32, 64, 64, 64),
        "complex128": (32, 64, 64),
    },
}
"""For each primitive and dtype the least number of lanes for matrices of 1, 2, 3 ... rows."""


def pays(primitive: str, dtype: str, rows: int, lanes: int) -> bool:
    """Whether so many matrices of so many rows take less time with lanes last."""
    least = LEAST.get(primitive, {}).get(dtype, ())
    enough = least[rows - 1] if 0 < rows <= len(least) else None
    return enough is not None and lanes >= enough
