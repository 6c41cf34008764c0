"""What operations cost on each kind of device, in nanoseconds; `make calibrate` writes it.

The row of the GPU is not written by it yet: it was entered from measurements of an H100.
"""

from __future__ import annotations

from typing import NamedTuple


class Costs(NamedTuple):
    """Holds the costs of a kind of device, measured on one of that kind."""

    element: float
    """a number that an elementwise operation reads and writes, of many"""
    launch: float
    """to begin an operation that is not fused with the one before"""
    compile: float
    """to compile one more operation"""


CALIBRATED = {
    "cpu": Costs(
        element=0.1,
        launch=300.0,
        compile=1000000.0,
    ),
    "gpu": Costs(
        element=0.0005,
        launch=3000.0,
        compile=1000000.0,
    ),
}
