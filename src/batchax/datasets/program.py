"""The program that computes a batch of rows: compiled once, and the same for every batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from batchax.datasets.inputs import Input, Inputs, capacity_of, find_inputs
from batchax.datasets.outputs import Output, arrays_of, find_outputs, lanes_of
from batchax.datasets.parts import Rows
from batchax.execution.memory import Auto, fitting_chunk, parse_limit
from batchax.programs.cost import cost_of_program
from batchax.rows.ragged import Ragged
from batchax.vmap import vmap

_MOST_BYTES = 64 * 2**20  # of a batch that batch_size="auto" chooses: more rows gain nothing
_FLOPS, _BYTES = 2e10, 1e10  # a second, of an average machine: a plan is the same on all


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

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        arrays: tuple[Any, ...],
        in_axes: Any,
        out_axes: Any,
        key: Any,
        options: dict[str, Any],
    ) -> RowFunction:
        """The function with its arguments, of which what is on disk is opened.

        Raises:
          ArgumentTypeError, AxisError, StorageError: see `find_inputs`.
        """
        in_axes = _by_position(fun, in_axes, len(arrays), key is not None)
        inputs = find_inputs(fun, in_axes, arrays)
        return cls(fun, arrays, inputs, in_axes, out_axes, key, options)

    @property
    def name(self) -> str:
        """What people call it."""
        return getattr(self.fun, "__name__", type(self.fun).__name__)

    def batched(self, numbers: Any, rows: Sequence[Any], shared: Sequence[Any]) -> Any:
        """The outputs of a batch, reductions not yet reduced.

        Args:
          numbers: of its rows in the dataset.
          rows: of each mapped argument those rows.
          shared: what all rows share.
        """
        args, kwargs = self.inputs.arguments(rows, shared)
        in_axes = self.in_axes
        if self.key is not None:
            keys = jax.vmap(functools.partial(jax.random.fold_in, self.key))(numbers)
            if takes_key_by_name(self.fun):
                kwargs = {**kwargs, "key": keys}
            else:
                args, in_axes = (keys, *args), _with_key(in_axes, len(args))
        return vmap(self.fun, in_axes, lanes_of(self.out_axes), **self.options)(*args, **kwargs)

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
    def _returned(self) -> Any:
        return jax.eval_shape(self.batched, *self.types(1))

    @functools.cached_property
    def outputs(self) -> list[Output]:
        """What it returns."""
        return find_outputs(self._returned, self.out_axes, self.inputs.rows)

    def tree_of(self, leaves: Sequence[Any]) -> Any:
        """What it returns, of leaves for its outputs."""
        is_leaf = lambda x: isinstance(x, Ragged)
        return jax.tree.structure(self._returned, is_leaf=is_leaf).unflatten(leaves)

    @property
    def row_seconds(self) -> float:
        """How long a row takes, going by its operations, on a machine of average speed."""
        rows = 8
        cost = cost_of_program(jax.make_jaxpr(self.batched)(*self.types(rows)))
        work = (cost.flops + 10 * cost.transcendentals) / _FLOPS
        return (work + cost.bytes / _BYTES) / rows

    @property
    def row_bytes(self) -> int:
        """What a row takes, read and written."""
        return sum(m.row_bytes for m in self.inputs.mapped) + sum(o.row_bytes for o in self.outputs)

    def fitting(self, memory_limit: Any) -> int:
        """How many rows fit the memory at a time: `batch_size="auto"`."""
        most = max(1, min(self.inputs.rows, _MOST_BYTES // max(self.row_bytes, 1)))
        auto = Auto(parse_limit(memory_limit), self.name)
        compile_for = lambda size: Program(self, size).compiled
        return fitting_chunk(auto, most, ("map", object()), compile_for)


class Program:
    """A function of `batch_size` rows, compiled.

    Attributes:
      function: of a row.
      batch_size: how many rows.
      compiled: what it is compiled to.
    """

    def __init__(self, function: RowFunction, batch_size: int) -> None:
        self.function, self.batch_size = function, batch_size
        self._types = function.types(batch_size)
        outputs = function.outputs
        self.compiled = self._compile(
            lambda *batch: arrays_of(outputs, function.batched(*batch)), []
        )
        (_, _, places), _ = self.compiled.input_shardings
        self._shared = [
            jax.device_put(x, place)
            for x, place in zip(function.inputs.shared, places, strict=True)
        ]

    def _compile(self, run: Callable[..., list[Any]], more: Sequence[Any]) -> Any:
        # What is not used stays an argument: all programs are called alike.
        return jax.jit(run, keep_unused=True).lower(*self._types, *more).compile()

    @functools.cached_property
    def _masked(self) -> Any:
        """What some of the rows are reduced to. Compiled when it is needed."""
        outputs = self.function.outputs

        def reduced(numbers: Any, rows: Any, shared: Any, real: Any) -> list[Any]:
            arrays = arrays_of(outputs, self.function.batched(numbers, rows, shared), real)
            return [x for x, o in zip(arrays, outputs, strict=True) if o.reduces]

        return self._compile(reduced, [jax.ShapeDtypeStruct((self.batch_size,), np.bool_)])

    def start(self, numbers: np.ndarray, rows: Sequence[Any]) -> list[Any]:
        """Begins to compute a batch, of rows of these numbers."""
        return self.compiled(numbers.astype(np.uint32), self._rows(rows), self._shared)

    def reduced(
        self, numbers: np.ndarray, rows: Sequence[Any], real: np.ndarray
    ) -> list[np.ndarray]:
        """What those rows of a batch that are `real` are reduced to."""
        numbers = numbers.astype(np.uint32)
        return list(map(np.asarray, self._masked(numbers, self._rows(rows), self._shared, real)))

    def _rows(self, rows: Sequence[Any]) -> list[Any]:
        _, types, _ = self._types
        return [_as_typed(x, type) for x, type in zip(rows, types, strict=True)]


def _as_typed(x: Any, type: Any) -> Any:
    """Rows as the program wants them."""
    if isinstance(x, Rows):
        data = np.zeros(type.data.shape, type.data.dtype)
        data[: len(x.data)] = x.data
        return Ragged(data, x.lengths.astype(np.int32), type.max_length)
    return np.asarray(x, type.dtype)


def fetched(outputs: Sequence[Output], arrays: Sequence[Any], rows: int) -> list[Any]:
    """What `Program.start` began, on the host: of each output the first `rows` of the batch."""
    results = []
    for output, x in zip(outputs, arrays, strict=True):
        if isinstance(x, Ragged):
            lengths = np.asarray(x.lengths)[:rows]
            results.append(Rows(np.asarray(x.data)[: lengths.sum()], lengths))
        elif output.reduces:
            results.append(np.asarray(x))
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
    shape[m.axis : m.axis + 1] = [] if m.source.lengths is None else [m.longest]
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(m.source.dtype))


def _type_of_batch(m: Input, batch_size: int) -> Any:
    source, dtype = m.source, jax.dtypes.canonicalize_dtype(m.source.dtype)
    if source.lengths is not None:
        capacity = capacity_of(source.lengths, batch_size)
        data = jax.ShapeDtypeStruct((capacity, *source.shape[1:]), dtype)
        lengths = jax.ShapeDtypeStruct((batch_size,), np.int32)
        return jax.eval_shape(lambda *parts: Ragged(parts[0], parts[1], m.longest), data, lengths)
    shape = (*source.shape[: m.axis], batch_size, *source.shape[m.axis + 1 :])
    return jax.ShapeDtypeStruct(shape, dtype)
