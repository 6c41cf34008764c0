"""The work of one unit: read, computed, kept. Whoever runs units does it by this."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchax.datasets.bad_rows import Policy
from batchax.datasets.checksums import checksum
from batchax.datasets.parts import Record, Rows, Unit
from batchax.datasets.pipeline import Stop, trying
from batchax.datasets.place import OvertakenError
from batchax.datasets.plan import Plan
from batchax.datasets.program import Program, program_of
from batchax.datasets.row_function import RowFunction
from batchax.datasets.units import Computed, begin_unit


@dataclass(frozen=True, eq=False)
class Work:
    """What there is to do for each unit of a plan.

    Attributes:
      function: of a row.
      plan: which rows are a unit.
      store: keeps results.
      policy: what becomes of rows that fail.
      retries: how many times reading and writing are tried again.
      stop: may say that nothing is to be tried again.
      check: raises an error if nothing may be written.
    """

    function: RowFunction
    plan: Plan
    store: Any
    policy: Policy
    retries: int
    stop: Stop = field(default_factory=Stop)
    check: Callable[[], None] = lambda: None
    _compiling: threading.Lock = field(default_factory=threading.Lock)

    @property
    def program(self) -> Program:
        """The program of a batch. Compiled when it is first asked for."""
        with self._compiling:
            program = program_of(self.function, self.plan.batch_size)
            _ = program.compiled
            return program

    def read(self, unit: Unit) -> list[np.ndarray | Rows]:
        """The rows of a unit, of each mapped argument."""
        parts = []
        for m in self.function.inputs.mapped:
            read = functools.partial(m.source.read, m.axis, unit.start, unit.stop, fresh=False)
            parts.append(trying(read, self.retries, self.stop))
        return parts

    def begin(self, unit: Unit, data: Sequence[np.ndarray | Rows]) -> Callable[[], Computed]:
        """Begins to compute them; returns what waits for the results."""
        return begin_unit(self.program, unit, data, self.policy)

    def write(self, computed: Computed) -> Record:
        """Keeps results; says of them what the journal is to say."""
        trying(functools.partial(self._write, computed), self.retries, self.stop)
        return Record(
            computed.unit,
            list(map(checksum, computed.results)) if self.store.lasts else [],
            seconds=computed.seconds,
            quarantined=computed.bad,
            reduced=computed.reduced,
        )

    def _write(self, computed: Computed) -> None:
        """Looks before each attempt whether it may write: who was overtaken looks once more."""
        while True:
            self.check()
            try:
                return self.store.write(computed.unit, computed.results)
            except OvertakenError:
                continue
