"""From how many lanes on decompositions with lanes last take less time than the library, on a CPU.

By measurements, on two cores, of 64, 256 and 10,000 matrices of 1 to 10 rows.

All take longer to compile, too, 0.1 s (Cholesky factors) to 1.5 s (singular values). What a call of
the least number of lanes gains makes up for it in 2,000 calls at most: so many seconds, divided by
2,000 and by what is gained for each of 10,000 lanes (Cholesky factors 0.07 to 0.11 us, inverses and
solves 0.2 to 0.3, QR 0.7, eigenvalues and singular values 1.5 to 1.8), are lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST: dict[str, dict[str, Sequence[int | None]]] = {
    "cholesky": {
        "float32": (64, 128, 128, 128, 128, 128),
        "float64": (64, 128, 128, 128, 128),
        "complex64": (64, 128, 128, 128),
        "complex128": (64, 128, 128),
    },
    "lu": {
        "float32": (64, 256, 256, 256, 256, 256),
        "float64": (64, 256, 256, 256, 256),
        "complex64": (64, 256, 256, 2048),
        "complex128": (64, 256, 2048),
    },
    "triangular_solve": {
        "float32": (64, 256, 256, 256, 256, 256),
        "float64": (64, 256, 256, 256, 256),
        "complex64": (64, 256, 256, 256, 256, 256),
        "complex128": (64, 256, 256, 1024),
    },
    "eigh": {
        "float32": (None, 128, 128, 128, 128, 128, 256, 256),
        "float64": (None, 256, 256, 128, 128, 128),
        "complex64": (None, 256, 256, 256, 256),
        "complex128": (None, 256),
    },
    "qr": {
        "float32": (None, 128, 256, 256, 256, 256, 256, 256),
        "float64": (None, 256, 256, 256, 256, 256),
        "complex64": (None, 1024, 1024),
    },
    "svd": {
        "float32": (None, 128, 128, 256, 256, 256),
        "float64": (None, 256, 256, 256, 256),
        "complex64": (None, 256, 256, 256),
        "complex128": (None, 256, 256),
    },
}
"""For each primitive and dtype the least number of lanes for matrices of 1, 2, 3 ... rows."""


def of_library(primitive: str, dtype: str, rows: int, lanes: int) -> bool:
    """Whether so many matrices of so many rows take less time with lanes last than a library."""
    least = LEAST.get(primitive, {}).get(dtype, ())
    enough = least[rows - 1] if 0 < rows <= len(least) else None
    return enough is not None and lanes >= max(enough, _PAY_BACK.get(primitive, 512))


_PAY_BACK = {"cholesky": 1000}
"""The least number of lanes of which 2,000 calls gain what compiling takes; of others 512."""
