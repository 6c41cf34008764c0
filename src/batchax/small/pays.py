"""From how many lanes on decompositions with lanes last take less time than the library, on a CPU.

By measurements, on two cores, of 64, 256 and 10,000 matrices of 1 to 10 rows. LU factors of complex
numbers take longer than the library's: a compiler has no vectors of complex quotients.

All take longer to compile, too, 0.1 s (Cholesky factors) to 0.7 s (eigenvalues). Of 256 matrices a
call gains 0.05 to 0.1 ms, which thousands of calls would not make up for; eigenvalues and singular
values, which iterate, gain 0.2 to 0.6 ms.
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
        "complex64": (64, 1024),
        "complex128": (64,),
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


_PAY_BACK = {"eigh": 256, "svd": 256}
"""The least number of lanes that gain something next to what it takes to compile; of others 512."""
