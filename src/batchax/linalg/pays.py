"""From how many lanes on decompositions with lanes last take less time than the library, on a CPU.

All take longer to compile, and less for each lane. They are taken where so many lanes gain in
`CALLS` calls what compiling takes longer. Sorts are decided by the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence

CALLS = 100
LOOP_STEPS = 80  # of a loop of unknown length


def runs(steps: int) -> int:
    """Returns how often something runs in `CALLS` calls; `steps` are those of loops, as
    `Axis.in_loop`.
    """
    return CALLS * max(1, steps)


def pays_back(gain: float, seconds: float, lanes: int, in_loop: int) -> bool:
    """Whether `CALLS` calls gain (microseconds for each lane) what compiling takes longer
    (seconds).
    """
    return runs(in_loop) * lanes * gain * 1e-6 >= seconds


GAINS: dict[str, dict[str, Sequence[float]]] = {
    "cholesky": {
        "float32": (0.03, 0.05, 0.07, 0.105, 0.11, *[0.12] * 7),
        "float64": (0.03, 0.04, 0.05, 0.05, 0.07, 0.1),
        "complex64": (0.03, 0.05, 0.08, 0.11, 0.16),
        "complex128": (0.03, 0.05, 0.06, 0.1),
    },
    "lu": {
        "float32": (0.03, 0.06, 0.1, 0.16, 0.24, 0.32, 0.4, *[0.5] * 9),
        "float64": (0.03, 0.06, 0.1, 0.16, 0.2, 0.22, 0.27, 0.33),
        "complex64": (0.03, 0.08, 0.13, 0.19, 0.2),
        "complex128": (0.03, 0.09, 0.14, 0.14),
    },
    "triangular_solve": {
        "float32": (0.03, 0.05, 0.07, 0.07, 0.1, 0.12, 0.2, 0.26, *[0.3] * 8),
        "float64": (0.03, 0.05, 0.07, 0.07, 0.1, 0.16, 0.18, 0.2),
        "complex64": (0.03, 0.05, 0.1, 0.11, 0.18, 0.24),
        "complex128": (0.03, 0.05, 0.1, 0.1),
    },
    "eigh": {
        "float32": (0.0, 0.28, 0.75, 1.2, 1.7, 2.1, 2.6, 3.0, 3.4, 3.8),
        "float64": (0.0, 0.26, 0.75, 1.2, 1.6, 1.9, 2.1, 2.3),
        "complex64": (0.0, 0.7, 1.2, 1.7, 2.0, 2.1),
        "complex128": (0.0, 0.6, 1.0, 1.3),
    },
    "qr": {
        "float32": (0.0, 0.17, 0.32, 0.46, 0.6, 0.8, 0.9, 1.05, 1.2, 1.4),
        "float64": (0.0, 0.19, 0.32, 0.47, 0.6, 0.68),
        "complex64": (0.0, 0.3, 0.5, 0.58),
        "complex128": (0.0, 0.24, 0.34),
    },
    "svd": {
        "float32": (0.0, 0.9, 1.7, 2.4, 3.3, 4.2, 5.2, 6.2, 7.2, 8.1),
        "float64": (0.0, 0.9, 1.7, 2.5, 3.3, 4.2, 4.7, 5.2, 5.5, 5.8),
        "complex64": (0.0, 1.5, 2.4, 3.5, 4.3, 5.1, 6.0, 6.7),
        "complex128": (0.0, 1.5, 2.5, 3.4, 4.0, 4.6),
    },
}
"""For each primitive and dtype how many microseconds a matrix of 1, 2, 3 ... rows gains.

Measured, in CPU time, of 4,000 and of 10,000 matrices; those of 64 gain as much each. What is
not here gains nothing.
"""

_LEAST_LANES = 64
"""Of fewer the gain is smaller, of 32 half as large."""

_COMPILING = {
    "cholesky": (0.05, 0.1),
    "lu": (0.03, 0.12),
    "triangular_solve": (0.03, 0.1),
    "eigh": (0.45, 0.75),
    "qr": (0.15, 0.35),
    "svd": (0.6, 0.8),
}
"""For each primitive how many seconds longer compiling takes, for real and for complex numbers.

The 0.1 to 0.2 seconds for the library's call that lanes with a NaN get (`Decomposition.finite`) are
not counted: they buy the right result, not time.
"""


def of_library(primitive: str, dtype: str, rows: int, lanes: int, in_loop: int) -> bool:
    """Whether so many matrices of so many rows are not to be left to a library."""
    gains = GAINS.get(primitive, {}).get(dtype, ())
    if not 0 < rows <= len(gains) or lanes < _LEAST_LANES or not gains[rows - 1]:
        return False
    seconds = _COMPILING[primitive][dtype.startswith("complex")]
    return pays_back(gains[rows - 1], seconds, lanes, in_loop)
