"""What operations cost on each kind of device, in nanoseconds; `make calibrate` writes it."""

from __future__ import annotations

from typing import NamedTuple


class Costs(NamedTuple):
    """The row of a kind of device, measured on one of its kind."""

    element: float
    """a number that an elementwise operation reads and writes, of many"""
    gather: float
    """a number that is read from an index of its own"""
    scatter: float
    """a number that is written to an index of its own"""
    launch: float
    """to begin an operation that is not fused with the one before"""
    step: float
    """a step of a loop that begins one operation"""
    compile: float
    """to compile one more operation"""


CALIBRATED = {
    "cpu": Costs(
        element=0.1,
        gather=3.0,
        scatter=3.0,
        launch=300.0,
        step=300.0,
        compile=1000000.0,
    ),
    "gpu": Costs(
        element=0.0005,
        gather=0.02,
        scatter=0.02,
        launch=3000.0,
        step=30000.0,
        compile=1000000.0,
    ),
}
