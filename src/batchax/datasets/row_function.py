"""The function of a row: what is known of it, of its arguments and of what it returns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from batchax.datasets.inputs import Inputs, find_inputs
from batchax.datasets.outputs import Output, find_outputs, lanes_of, states_to_add
from batchax.datasets.row_types import type_of_batch, type_of_row
from batchax.divergence.runner import for_any_machine
from batchax.errors import UnsupportedError
from batchax.frontend.advice import come_from
from batchax.frontend.outputs import flatten_arrays
from batchax.jaxprs.spoken import name_of
from batchax.programs.cost import PLANS, cost_of_program
from batchax.rows.arrow import by_axis
from batchax.rows.ragged import Ragged
from batchax.vmap import vmap

_FEW = 8  # rows, by whose program it is seen what a row takes
_COUNTS = "counts in sums"  # no name that an argument may have


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
    _latest: Any = None  # the program of a batch that was asked for last

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
        with self.inputs.named(), come_from(self.inputs.names):
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
        rows = [type_of_batch(m, batch_size) for m in self.inputs.mapped]
        shared = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.inputs.shared]
        return numbers, rows, shared

    def of_one_row(self) -> tuple[Callable[..., Any], list[Any]]:
        """The function of one row, and the types of what it takes."""
        rows = [type_of_row(m) for m in self.inputs.mapped]
        shared = self.types(1)[2]
        keys = [] if self.key is None else [jax.eval_shape(lambda: self.key)]

        def call(keys: Sequence[Any], rows: Sequence[Any], shared: Sequence[Any]) -> Any:
            args, kwargs = self.inputs.arguments(rows, shared)
            if takes_key_by_name(self.fun):
                kwargs |= dict(zip(["key"], keys, strict=False))
            else:
                args = (*keys, *args)
            with self.inputs.named():
                return self.fun(*args, **kwargs)

        return call, [keys, rows, shared]

    @property
    def staged_row(self) -> Any:
        """The program of one row, or where the function finds sizes, and so no row by itself has
        a program, of a few.
        """
        call, types = self.of_one_row()
        try:
            return jax.make_jaxpr(call)(*types)
        except UnsupportedError:
            return self._staged[0]

    @property
    def _lanes(self) -> Callable[..., Any]:
        """The function of some rows, none of which are added up."""
        return functools.partial(self._vmapped, self.fun, lanes_of(self.out_axes), more={})

    @functools.cached_property
    def _staged(self) -> Any:
        """The program of a few rows, and what it returns."""
        return jax.make_jaxpr(self._lanes, return_shape=True)(*self.types(_FEW))

    @property
    def _returned(self) -> Any:
        return self._staged[1]

    @functools.cached_property
    def outputs(self) -> list[Output]:
        """What it returns."""
        grows = bool(self.inputs.streams)
        return find_outputs(self._returned, self.out_axes, self.inputs.rows, grows)

    @property
    def of_row(self) -> Any:
        """The types of what it returns."""
        return self.tree_of([o.of_row for o in self.outputs])

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
