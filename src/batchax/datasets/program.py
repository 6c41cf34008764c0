"""The program that computes a batch of rows: compiled once, and the same for every batch."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from batchax.datasets.inputs import Input, Inputs, elements_of_batches, find_inputs
from batchax.datasets.outputs import Output, arrays_of, find_outputs, lanes_of, states_to_add
from batchax.datasets.parts import Rows
from batchax.datasets.ragged_parts import as_ragged, kept
from batchax.divergence.auto import for_any_machine
from batchax.errors import UnsupportedError
from batchax.execution.eager import whatever_jit
from batchax.execution.memory import Auto, fitting_chunk, parse_limit
from batchax.frontend.advice import come_from
from batchax.frontend.converted import converted
from batchax.frontend.outputs import flatten_arrays
from batchax.jaxprs.inside import with_inside
from batchax.jaxprs.spoken import name_of
from batchax.programs.cost import cost_of_program
from batchax.programs.weights import PLANS
from batchax.rows.arrow import by_axis
from batchax.rows.checks import as_tuple, without
from batchax.rows.ragged import Ragged
from batchax.vmap import vmap

# Of a batch that batch_size="auto" chooses: more rows gain nothing. An accelerator wants more.
_MOST_BYTES, _MOST_ELSEWHERE = 8 * 2**20, 64 * 2**20
_MAPPED = 8  # times as many bytes of a mapped file as others are in a unit: less is handed over
_FEW = 8  # rows, by whose program it is seen what a row takes
_ROOMS = 4  # programs for batches of rows of different lengths, by how many elements these have
_COUNTS = "counts in sums"  # no name that an argument may have
_WORTH = 2**29  # elements that need not be padded, for which compiling all of these is worth it


@dataclass(frozen=True, eq=False)
class RowFunction:
    """The user's function, and how it is to be run.

    Attributes:
      fun: the function of one row.
      arrays: its arguments, as the user gave them.
      inputs: what is known of these.
      in_axes: as for `vmap`, by the place of arguments.
      out_axes: as for `vmap`.
      key: a random key, from which each row gets its own; None for no keys.
      options: other options of `vmap`.
    """

    fun: Callable[..., Any]
    arrays: tuple[Any, ...]
    inputs: Inputs
    in_axes: Any
    out_axes: Any
    key: Any
    options: dict[str, Any]
    _latest: Program | None = None

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        arrays: tuple[Any, ...],
        in_axes: Any,
        out_axes: Any,
        key: Any,
        options: dict[str, Any],
        batched: bool = False,
        start: int = 0,
    ) -> RowFunction:
        """The function with its arguments, of which what is on disk is opened.

        Args:
          fun, arrays, in_axes, out_axes, key, options: attributes.
          batched, start: of streams, see `find_inputs`.

        Raises:
          ArgumentTypeError, AxisError, StorageError: see `find_inputs`.
        """
        in_axes = _by_position(fun, in_axes, len(arrays), key is not None)
        keyed = key is not None and not takes_key_by_name(fun)
        called = functools.partial(fun, key) if keyed else fun
        inputs = find_inputs(called, in_axes, arrays, batched, start)
        return cls(fun, arrays, inputs, in_axes, out_axes, key, options)

    @property
    def name(self) -> str:
        """What people call it."""
        return name_of(self.fun)

    def batched(
        self, numbers: Any, rows: Sequence[Any], shared: Sequence[Any], real: Any = None
    ) -> Any:
        """The outputs of a batch, of which what rows add up is the sum, and the rest is of rows.

        Args:
          numbers: of its rows in the dataset.
          rows: of each mapped argument those rows.
          shared: what all rows share.
          real: which of the rows are added up; None: all.
        """

        @functools.wraps(self.fun)
        def adding(*args: Any, **kwargs: Any) -> Any:
            counts = kwargs.pop(_COUNTS, None)
            return states_to_add(self.fun(*args, **kwargs), self.out_axes, counts)

        more = {} if real is None else {_COUNTS: real}
        added = lanes_of(self.out_axes, added=True)
        return self._vmapped(adding, added, numbers, rows, shared, more)

    def _vmapped(
        self,
        fun: Callable[..., Any],
        out_axes: Any,
        numbers: Any,
        rows: Sequence[Any],
        shared: Sequence[Any],
        more: dict[str, Any],
    ) -> Any:
        """What `vmap` makes of the function, or one like it; `more` it takes by names."""
        args, kwargs = self.inputs.arguments(self._with_same_lengths(rows), shared)
        in_axes = self.in_axes
        if self.key is not None:
            keys = jax.vmap(functools.partial(jax.random.fold_in, self.key))(numbers)
            if takes_key_by_name(self.fun):
                kwargs = {**kwargs, "key": keys}
            else:
                args, in_axes = (keys, *args), _with_key(in_axes, len(args))
        options = dict(self.options)
        # What was begun on one machine may go on on another, and must not round otherwise there.
        options["divergence"] = for_any_machine(options.get("divergence", "auto"))
        with come_from(self.inputs.names):
            outs = vmap(fun, in_axes, out_axes, **options)(*args, **kwargs, **more)
        flatten_arrays(outs, containers=True)  # refuses what is no array, and cannot be kept
        return outs

    def _with_same_lengths(self, rows: Sequence[Any]) -> list[Any]:
        """Mapped arguments, with one array for lengths that are the same: `vmap` cannot see."""
        first = lambda i, k: rows[i].each_length[k]
        return [
            Ragged(x.data, [first(*at) for at in places], x.each_bound, axis=x.axes)
            if isinstance(x, Ragged)
            else x
            for x, places in zip(rows, self._same_lengths, strict=True)
        ]

    @functools.cached_property
    def _same_lengths(self) -> list[list[tuple[int, int]]]:
        """For each ragged axis of each mapped argument the first one, of any argument, along which
        all rows have the same lengths.
        """
        lengths = [m.source.lengths for m in self.inputs.mapped]
        along: dict[tuple[int, int], np.ndarray] = {}
        places = []
        for i, x in enumerate(lengths):
            each = [] if x is None else by_axis(x).T
            along |= {(i, k): n for k, n in enumerate(each)}
            same = lambda n: next(at for at, other in along.items() if np.array_equal(other, n))
            places.append(list(map(same, each)))
        return places

    def types(self, batch_size: int) -> tuple[Any, list[Any], list[Any]]:
        """The types of the arguments of `batched`."""
        numbers = jax.ShapeDtypeStruct((batch_size,), np.uint32)
        rows = [_type_of_batch(m, batch_size) for m in self.inputs.mapped]
        shared = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.inputs.shared]
        return numbers, rows, shared

    def of_one_row(self) -> tuple[Callable[..., Any], list[Any]]:
        """The function of one row, and the types of what it takes."""
        rows = [_type_of_row(m) for m in self.inputs.mapped]
        shared = self.types(1)[2]
        keys = [] if self.key is None else [jax.eval_shape(lambda: self.key)]

        def call(keys: Sequence[Any], rows: Sequence[Any], shared: Sequence[Any]) -> Any:
            args, kwargs = self.inputs.arguments(rows, shared)
            if takes_key_by_name(self.fun):
                kwargs |= dict(zip(["key"], keys, strict=False))
            else:
                args = (*keys, *args)
            return self.fun(*args, **kwargs)

        return call, [keys, rows, shared]

    @functools.cached_property
    def known_by(self) -> Any:
        """What tells it from others, staged, and what that returns: the function of one row, or
        where that finds sizes, and so no row by itself has a program, of a few.
        """
        call, types = self.of_one_row()
        try:
            return jax.make_jaxpr(call, return_shape=True)(*types)
        except UnsupportedError:
            return self._staged

    @property
    def _lanes(self) -> Callable[..., Any]:
        """The function of some rows, none of which are added up."""
        return functools.partial(self._vmapped, self.fun, lanes_of(self.out_axes), more={})

    @functools.cached_property
    def _staged(self) -> Any:
        """The program of a few rows, and what it returns."""
        return jax.make_jaxpr(self._lanes, return_shape=True)(*self.types(_FEW))

    @functools.cached_property
    def runs_python(self) -> bool:
        """Whether a row calls Python on the host, which may do anything."""
        program, _ = self._staged
        return any(e.primitive.name.endswith("callback") for e in with_inside(program.eqns))

    @property
    def _returned(self) -> Any:
        return self._staged[1]

    @functools.cached_property
    def outputs(self) -> list[Output]:
        """What it returns."""
        grows = bool(self.inputs.streams)
        return find_outputs(self._returned, self.out_axes, self.inputs.rows, grows)

    def tree_of(self, leaves: Sequence[Any]) -> Any:
        """What it returns, of leaves for its outputs."""
        is_leaf = lambda x: isinstance(x, Ragged)
        return jax.tree.structure(self._returned, is_leaf=is_leaf).unflatten(leaves)

    @property
    def row_seconds(self) -> float:
        """How long a row takes, going by its operations, on a machine of average speed."""
        program, _ = self._staged
        if any(o.reduces for o in self.outputs):
            program = jax.make_jaxpr(self.batched)(*self.types(_FEW))
        return PLANS.time(cost_of_program(program)) / 1e9 / _FEW

    @property
    def row_bytes(self) -> int:
        """What a row takes, read and written."""
        return sum(m.row_bytes for m in self.inputs.mapped) + sum(o.row_bytes for o in self.outputs)

    @property
    def held_bytes(self) -> float:
        """Of these what a unit holds: parts of mapped files are the system's, but not free."""
        maps = sum(m.row_bytes for m in self.inputs.mapped if m.source.maps)
        return self.row_bytes - maps + maps / _MAPPED

    def fitting(self, memory_limit: Any) -> int:
        """How many rows fit the memory at a time: `batch_size="auto"`."""
        room = _MOST_BYTES if jax.default_backend() == "cpu" else _MOST_ELSEWHERE
        most = max(1, min(self.inputs.rows, room // max(self.row_bytes, 1)))
        auto = Auto(parse_limit(memory_limit), self.name)
        compile_for = lambda size: self.program(size).compiled
        return fitting_chunk(auto, most, ("map", object()), compile_for, all_at_first=True)

    def program(self, batch_size: int) -> Program:
        """The program of a batch. Of the sizes that were asked for the last is kept."""
        if self._latest is None or self._latest.batch_size != batch_size:
            object.__setattr__(self, "_latest", Program(self, batch_size))
        assert self._latest is not None
        return self._latest


class Program:
    """A function of `batch_size` rows, compiled.

    Units have about as many elements each, and batches as many rows. Where lengths
    differ much, there are several programs: for the largest batch, and for half as many elements,
    and so on.

    Attributes:
      function: of a row.
      batch_size: how many rows.
      compiled: the program for the largest batch.
    """

    def __init__(self, function: RowFunction, batch_size: int) -> None:
        self.function, self.batch_size = function, batch_size
        self._types = function.types(batch_size)
        self._programs: dict[tuple[bool, int], Any] = {}
        self._lock = threading.Lock()  # several threads may want one
        self.compiled = self._compiled(0)
        (_, _, places), _ = self.compiled.input_shardings
        self._shared = [
            jax.device_put(x, place)
            for x, place in zip(function.inputs.shared, places, strict=True)
        ]

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
                run = self._run_masked if masked else self._run
                types = [*self._types]
                types[1] = [_in_room(type, room) for type in types[1]]
                if masked:
                    types.append(jax.ShapeDtypeStruct((self.batch_size,), np.bool_))
                # What is not used stays an argument: all programs are called alike.
                compiled = jax.jit(run, keep_unused=True).lower(*types).compile()
                self._programs[masked, room] = compiled
            return self._programs[masked, room]

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


def _capacity(type: Ragged, room: int) -> int:
    """How many elements a program has room for."""
    return -(-type.data.shape[type.element_axis] // 2**room)


def _in_room(type: Any, room: int) -> Any:
    """The type of an argument of the program with that room."""
    if not isinstance(type, Ragged) or room == 0:
        return type
    rest = without(type.data.shape, [type.element_axis])
    return _ragged_type(
        _capacity(type, room), rest, type.dtype, len(type), type.each_bound, type.axes
    )


def _ragged_type(
    capacity: int,
    rest: tuple[int, ...],
    dtype: Any,
    rows: int,
    longest: tuple[int, ...],
    axes: tuple[int, ...],
) -> Any:
    shape = (*rest[: axes[0]], capacity, *rest[axes[0] :])
    data, lengths = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((rows,), np.int32)
    made = lambda data, *each: Ragged(data, each, longest, axis=axes)
    return jax.eval_shape(made, data, *[lengths] * len(axes))


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


def takes_key_by_name(fun: Callable[..., Any]) -> bool:
    """Whether a function takes the key of its row as `key`, rather than as its first argument."""
    try:
        names = list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):  # no signature
        return False
    return "key" in names[1:]


def _by_position(fun: Callable[..., Any], in_axes: Any, count: int, keyed: bool) -> Any:
    """`in_axes` by the place of arguments, of which a key that comes first is none."""
    if not isinstance(in_axes, dict) or not keyed or takes_key_by_name(fun):
        return in_axes
    names = list(inspect.signature(fun).parameters)[1 : count + 1]
    return tuple(in_axes.get(name, 0) for name in names)


def _with_key(in_axes: Any, count: int) -> Any:
    """`in_axes` of a function whose first argument is the key of its row."""
    return (0, *(in_axes if isinstance(in_axes, (tuple, list)) else [in_axes] * count))


def _type_of_row(m: Input) -> Any:
    shape = list(m.source.shape)
    del shape[m.axis]
    for axis, size in zip(as_tuple(m.source.axes), m.longest, strict=False):
        shape.insert(axis, size)
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(m.source.dtype))


def _type_of_batch(m: Input, batch_size: int) -> Any:
    source, dtype = m.source, jax.dtypes.canonicalize_dtype(m.source.dtype)
    if source.lengths is not None:
        elements = elements_of_batches(source.lengths, batch_size)
        capacity = max(1, int(elements.max(initial=0)))
        axes = as_tuple(source.axes)
        return _ragged_type(capacity, source.shape[1:], dtype, batch_size, m.longest, axes)
    shape = (*source.shape[: m.axis], batch_size, *source.shape[m.axis + 1 :])
    return jax.ShapeDtypeStruct(shape, dtype)
