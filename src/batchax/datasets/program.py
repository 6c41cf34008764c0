"""The program that computes a batch of rows: compiled once, and the same for every batch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from batchax.datasets.inputs import elements_of_batches
from batchax.datasets.outputs import Output, arrays_of
from batchax.datasets.parts import Rows
from batchax.datasets.ragged_parts import as_ragged, kept
from batchax.datasets.row_function import RowFunction
from batchax.datasets.row_types import ragged_type
from batchax.execution.eager import whatever_jit
from batchax.execution.memory import Auto, fitting_chunk, parse_limit
from batchax.frontend.options import converted
from batchax.rows.building import without
from batchax.rows.ragged import Ragged

# Of a batch that batch_size="auto" chooses: more rows gain nothing. An accelerator wants more.
_MOST_BYTES, _MOST_ELSEWHERE = 8 * 2**20, 64 * 2**20
_ROOMS = 4  # programs for batches of rows of different lengths, by how many elements these have
_PARTS = 8  # of a batch in which rows that fail are looked for; so many more in each of these
_WORTH = 2**29  # elements that need not be padded, for which compiling all of these is worth it


class Program:
    """A function of `batch_size` rows, compiled.

    Units have about as many elements each, and batches as many rows. Where lengths
    differ much, there are several programs: for the largest batch, and for half as many elements,
    and so on.

    Attributes:
      function: of a row.
      batch_size: how many rows.
    """

    def __init__(
        self, function: RowFunction, batch_size: int, shared: Sequence[Any] | None = None
    ) -> None:
        self._given = function.inputs.shared if shared is None else shared
        self.function, self.batch_size = function, batch_size
        self._types = function.types(batch_size)
        self._programs: dict[tuple[bool, int], Any] = {}
        self._lock = threading.Lock()  # several threads may want one

    @functools.cached_property
    def traced(self) -> Any:
        """The program for the largest batch, before it is compiled."""
        return self._traced(0)

    @property
    def compiled(self) -> Any:
        """The program for the largest batch."""
        return self._compiled(0)

    @functools.cached_property
    def _shared(self) -> list[Any]:
        (_, _, places), _ = self.compiled.input_shardings
        shared = self._given
        return [jax.device_put(x, place) for x, place in zip(shared, places, strict=True)]

    @functools.cached_property
    def smaller(self) -> Program:
        """A program of fewer rows, which looks for those that fail.

        Batches of it divide the batches of this one, so each has elements of rows as it expects.
        """
        most = max(1, self.batch_size // _PARTS)
        size = max(n for n in range(1, most + 1) if self.batch_size % n == 0)
        return Program(self.function, size, self._shared)

    def room_for(self, elements: Sequence[int]) -> int:
        """Which program has room for so many elements of the rows of each argument.

        The one of number `k` has room for the largest batch, halved `k` times: rows of different
        lengths are padded to that. So it depends on nothing but the rows of a batch.
        """
        rows = [x for x in zip(self._types[1], elements, strict=True) if isinstance(x[0], Ragged)]
        fits = lambda room: all(n <= _capacity(type, room) for type, n in rows)
        return max(filter(fits, range(self._rooms)), default=0)

    @functools.cached_property
    def _rooms(self) -> int:
        """How many programs there are. That depends on the lengths of all rows."""
        saved = 0
        for m, type in zip(self.function.inputs.mapped, self._types[1], strict=True):
            if m.source.lengths is not None:
                elements = elements_of_batches(m.source.lengths, self.batch_size)
                rooms = np.array([_capacity(type, room) for room in range(_ROOMS)])
                least = np.where(elements[:, None] <= rooms, rooms, rooms[0]).min(1)
                saved += int((rooms[0] - least).sum())
        return _ROOMS if saved >= _WORTH else 1

    @whatever_jit
    def start(self, numbers: np.ndarray, rows: Sequence[Any], room: int) -> list[Any]:
        """Begins to compute a batch, of rows of these numbers, by the program with that room."""
        return self._compiled(room)(*self._arguments(numbers, rows, room))

    @whatever_jit
    def reduced(
        self, numbers: np.ndarray, rows: Sequence[Any], room: int, real: np.ndarray
    ) -> list[Any]:
        """What those rows of a batch that are `real` are reduced to."""
        arguments = self._arguments(numbers, rows, room)
        return jax.tree.map(np.asarray, self._compiled(room, masked=True)(*arguments, real))

    def _compiled(self, room: int, masked: bool = False) -> Any:
        """The program with that room; `masked` takes rows that count, and has reductions only."""
        with self._lock:
            if (masked, room) not in self._programs:
                largest = room == 0 and not masked
                traced = self.traced if largest else self._traced(room, masked)
                self._programs[masked, room] = traced.lower().compile()
            return self._programs[masked, room]

    @whatever_jit
    def _traced(self, room: int, masked: bool = False) -> Any:
        run = self._run_masked if masked else self._run
        types = [*self._types]
        types[1] = [_in_room(type, room) for type in types[1]]
        if masked:
            types.append(jax.ShapeDtypeStruct((self.batch_size,), np.bool_))
        # What is not used stays an argument: all programs are called alike.
        return jax.jit(run, keep_unused=True).trace(*types)

    def _run(self, *batch: Any) -> list[Any]:
        numbers, *_ = batch
        return arrays_of(self.function.outputs, self.function.batched(*batch), numbers)

    def _run_masked(self, numbers: Any, rows: Any, shared: Any, real: Any) -> list[Any]:
        outputs = self.function.outputs
        out = self.function.batched(numbers, rows, shared, real)
        arrays = arrays_of(outputs, out, numbers, real)
        return [x for x, o in zip(arrays, outputs, strict=True) if o.reduces]

    def _arguments(self, numbers: np.ndarray, rows: Sequence[Any], room: int) -> Any:
        typed = [
            _as_typed(x, _in_room(type, room)) for x, type in zip(rows, self._types[1], strict=True)
        ]
        return numbers.astype(np.uint32), typed, self._shared


def program_of(function: RowFunction, batch_size: int) -> Program:
    """The program of a batch. Of the sizes that were asked for the last is kept."""
    program: Program | None = function._latest
    if program is None or program.batch_size != batch_size:
        program = Program(function, batch_size)
        object.__setattr__(function, "_latest", program)
    return program


def staged_batch(function: RowFunction, batch_size: int) -> Any:
    """The program of a batch, which runs whatever the user gave: rules for a batch and the
    functions of reductions, too. Not over how many devices it is spread, which may change.
    """
    if function.options.get("mesh") is not None:
        function = replace(function, options={**function.options, "mesh": None}, _latest=None)
    return program_of(function, batch_size).traced.jaxpr


def fitting(function: RowFunction, memory_limit: Any) -> int:
    """How many rows fit the memory at a time: `batch_size="auto"`."""
    room = _MOST_BYTES if jax.default_backend() == "cpu" else _MOST_ELSEWHERE
    most = max(1, min(function.inputs.rows, room // max(function.row_bytes, 1)))
    auto = Auto(parse_limit(memory_limit), function.name)
    compile_for = lambda size: program_of(function, size).compiled
    return fitting_chunk(auto, most, ("map", object()), compile_for, all_at_first=True)


def _capacity(type: Ragged, room: int) -> int:
    """How many elements a program has room for."""
    return -(-type.data.shape[type.element_axis] // 2**room)


def _in_room(type: Any, room: int) -> Any:
    """The type of an argument of the program with that room."""
    if not isinstance(type, Ragged) or room == 0:
        return type
    rest = without(type.data.shape, [type.element_axis])
    return ragged_type(
        _capacity(type, room), rest, type.dtype, len(type), type.each_bound, type.axes
    )


def _as_typed(x: Any, type: Any) -> Any:
    """Rows as the program wants them."""
    if isinstance(x, Rows):
        rest = without(type.data.shape, [type.element_axis])
        data = np.zeros((_capacity(type, 0), *rest), type.dtype)
        data[: len(x.data)] = converted(x.data, type.dtype)
        return as_ragged(x._replace(data=data), type.axes, type.each_bound, np.int32)
    return converted(x, type.dtype)


def fetched(outputs: Sequence[Output], arrays: Sequence[Any], rows: int) -> list[Any]:
    """What `Program.start` began, on the host: of each output the first `rows` of the batch."""
    results = []
    for output, x in zip(outputs, arrays, strict=True):
        if isinstance(x, Ragged):
            results.append(kept(x, rows))
        elif output.reduces:
            results.append(jax.tree.map(np.asarray, x))
        else:
            results.append(np.asarray(x)[(slice(None),) * output.leaf.axis + (slice(rows),)])
    return results
