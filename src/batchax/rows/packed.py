"""Packed rows: the elements of all rows one after another, and nothing else.

An operation that acts on each element of a row alone does so whatever row an element is of.
Packed, it is the operation on one long row, and there the rules for padded rows serve: behind
the last row there may be padding. Besides those, values that differ between rows are given to
each element of a row, and reductions over a row become reductions over segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.engine.axis import Axis, AxisPosition, move_axis
from batchax.engine.interpreter import batch_equation
from batchax.rows.index import RowIndex
from batchax.rows.padded import Operation, Row, fold_known, run_equation
from batchax.rows.segments import REDUCTIONS, reduce_segments
from batchax.rows.sizes import Sizes, depends_on_sizes, has_symbols, is_symbolic
from batchax.rules.elementwise import NARY, UNARY


@dataclass(frozen=True)
class Packed:
    """A value of all rows.

    Attributes:
      value: an array.
      shape: the shape of the part of one row.
      axis: where `value` has an axis for the rows, or None: it has none because rows do not
        differ, or because it is packed along the ragged axis that `shape` has.
    """

    value: Any
    shape: tuple[Any, ...]
    axis: AxisPosition = None


@dataclass(frozen=True)
class Segments:
    """Where the rows of one size are in packed arrays.

    Attributes:
      index: the rows.
      capacity: the size of packed arrays.
    """

    index: RowIndex
    capacity: int

    @cached_property
    def rows(self) -> Any:
        """The row of each element."""
        return self.index.row_of(self.capacity)

    @cached_property
    def places(self) -> Any:
        """The place of each element in its row."""
        return self.index.place_of(self.capacity)


@dataclass(frozen=True)
class PackedRows:
    """All rows of a batch, for the sizes that there are.

    Attributes:
      axis: the axis being mapped, whose lanes are rows.
      segments: by the name of each size.
    """

    axis: Axis
    segments: Mapping[str, Segments]

    @cached_property
    def sizes(self) -> Sizes:
        """Those of one long row, which packed arrays are."""
        totals = {
            name: np.int32(s.capacity) if s.index.exact else jnp.sum(s.index.lengths)
            for name, s in self.segments.items()
        }
        exact = frozenset(name for name, s in self.segments.items() if s.index.exact)
        return Sizes({name: s.capacity for name, s in self.segments.items()}, totals, exact)

    def size_of_rows(self, dim: Any) -> Any:
        """The size `dim` of each row, with the rows in front."""
        lengths = {name: jnp.asarray(s.index.lengths) for name, s in self.segments.items()}
        return _compat.evaluate_size(dim, lengths)


def ragged_axis(shape: Sequence[Any]) -> int | None:
    """Where a shape has its ragged size; it must have one at most."""
    return next((i for i, dim in enumerate(shape) if is_symbolic(dim)), None)


def is_packable(shape: Sequence[Any]) -> bool:
    """Whether values of that shape can be packed: with a row's size, once or not at all."""
    sizes = [dim for dim in shape if is_symbolic(dim)]
    return len(sizes) < 2 and all(str(dim).isidentifier() for dim in sizes)


def run_packed(rows: PackedRows, eqn: Any, values: Sequence[Packed]) -> list[Packed]:
    """The results of an equation that `can_pack` accepts, for all rows."""
    shapes = [v.aval.shape for v in eqn.outvars]
    if not depends_on_sizes(eqn):
        operands, axes = [v.value for v in values], [v.axis for v in values]
        outs = fold_known(eqn, operands)
        out_axes: Sequence[AxisPosition] = [None] * len(shapes)
        if outs is None:
            outs, out_axes = batch_equation(rows.axis, eqn, operands, axes)
        return [Packed(*out) for out in zip(outs, shapes, out_axes, strict=True)]
    name = eqn.primitive.name
    if name == "dim_as_value":
        sizes = rows.size_of_rows(eqn.params["dim"])
        return [Packed(lax.convert_element_type(sizes, eqn.outvars[0].aval.dtype), (), 0)]
    if name == "iota" and is_symbolic(shapes[0][eqn.params["dimension"]]):
        return [_places(rows, eqn)]
    at = ragged_axis(values[0].shape) if values else None
    if name in REDUCED and at is not None and at in eqn.params["axes"]:
        return [_reduce(rows, eqn, values[0], at)]
    operands = [_for_each_element(rows, eqn, v, shapes[0]) for v in values]
    if name == "broadcast_in_dim" and values[0].axis is not None:
        return [Packed(operands[0].value, shapes[0])]
    outs = run_equation(rows.sizes, eqn, operands)
    return [Packed(row.value, row.shape) for row in outs]


def _places(rows: PackedRows, eqn: Any) -> Packed:
    """Each element's place in its row, as counted by an `iota` over the row."""
    aval, at = eqn.outvars[0].aval, eqn.params["dimension"]
    segments = rows.segments[str(aval.shape[at])]
    places = jnp.asarray(segments.places, aval.dtype)
    bounds = rows.sizes.bounds_of(aval.shape)
    return Packed(lax.broadcast_in_dim(places, bounds, (at,)), aval.shape)


# How segments are reduced for each reduction over a row.
REDUCED = {
    **{name: name for name in REDUCTIONS},
    "reduce_and": "reduce_min",
    "reduce_or": "reduce_max",
}


def _reduce(rows: PackedRows, eqn: Any, x: Packed, at: int) -> Packed:
    """A reduction over the row, and perhaps over other axes."""
    name, axes = eqn.primitive.name, eqn.params["axes"]
    segments = rows.segments[str(x.shape[at])]
    value = x.value
    others = tuple(a for a in axes if a != at)
    if others:  # those first: what is left is smaller
        params = {**eqn.params, "axes": others}
        value = eqn.primitive.bind(value, **eqn.primitive.get_bind_params(params))
    value = move_axis(value, at - sum(a < at for a in others), 0)
    op = Operation(eqn, rows.sizes)
    value = op.cut(value, (x.shape[at], *value.shape[1:]))
    found = reduce_segments(
        REDUCED[name], value, jnp.asarray(segments.rows), len(segments.index.starts)
    )
    return Packed(found, eqn.outvars[0].aval.shape, 0)


def _for_each_element(rows: PackedRows, eqn: Any, x: Packed, shape: Sequence[Any]) -> Row:
    """An operand as it is in one long row: what differs between rows, for each element."""
    if x.axis is None:
        return Row(x.value, x.shape)
    at = ragged_axis(shape)
    assert at is not None
    segments = rows.segments[str(shape[at])]
    dims = eqn.params.get("broadcast_dimensions", range(len(x.shape)))
    if len(x.shape) == 0:
        dims = ()
    # As many axes as the result, of size one where the operand does not vary.
    value = move_axis(x.value, x.axis, 0)
    spread = [1] * len(shape)
    for d, size in zip(dims, x.shape, strict=True):
        spread[d] = size
    if spread[at] != 1:
        raise AssertionError("a dense operand that is as large as a row")
    del spread[at]
    value = move_axis(lax.reshape(value, (value.shape[0], *spread)), 0, at)
    value = jnp.take(
        value, jnp.asarray(segments.rows), axis=at, mode="clip", indices_are_sorted=True
    )
    bounds = rows.sizes.bounds_of(shape)
    value = lax.broadcast_in_dim(value, bounds, tuple(range(len(bounds))))
    return Row(Operation(eqn, rows.sizes).cut(value, shape), tuple(shape))


# Which equations act on each element of a row alone, by primitive.


def _apart(*names: str) -> Callable[[Any, int], bool]:
    """A check that axes in these parameters are not the ragged one."""

    def check(eqn: Any, at: int) -> bool:
        for name in names:
            axes = eqn.params[name]
            if at in (axes if isinstance(axes, (tuple, list)) else (axes,)):
                return False
        return True

    return check


def _always(eqn: Any, at: int) -> bool:
    return True


def _whole_slice(eqn: Any, at: int) -> bool:
    dim = eqn.invars[0].aval.shape[at]
    params = eqn.params
    stride = 1 if params["strides"] is None else params["strides"][at]
    limit = params["limit_indices"][at]
    return bool(params["start_indices"][at] == 0 and limit == dim and stride == 1)


def _plain_reshape(eqn: Any, at: int) -> bool:
    """Whether elements stay where they are, with other axes within each."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    to = ragged_axis(after)
    if to is None or before[at] != after[to] or eqn.params["dimensions"] is not None:
        return False
    return int(np.prod(before[:at])) == int(np.prod(after[:to]))


def _free_in_dot(eqn: Any, at: int) -> bool:
    """Whether a product has the ragged axis of one operand, or the same of both, in its result."""
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    places = [ragged_axis(v.aval.shape) for v in eqn.invars]
    if places[0] in left or places[1] in right:
        return False
    if None not in places:
        return places[0] in left_batch and places[1] in right_batch
    return True


def _looked_up(eqn: Any, at: int) -> bool:
    """Whether a gather takes, for each element, something from what all rows share."""
    table, indices = (v.aval.shape for v in eqn.invars)
    if has_symbols(table):
        dnums, where = eqn.params["dimension_numbers"], ragged_axis(table)
        touched = (*dnums.start_index_map, *dnums.collapsed_slice_dims)
        return not has_symbols(indices) and where not in (*touched, *dnums.operand_batching_dims)
    return ragged_axis(indices) != len(indices) - 1


def _unpadded(eqn: Any, at: int) -> bool:
    return tuple(eqn.params["padding_config"][at]) == (0, 0, 0)


ELEMENTWISE = frozenset(
    (*UNARY, *NARY, "add_any", "clamp", "copy_p", "random_gamma_grad", "select_n")
)

_ACTS_ON_ELEMENTS: dict[str, Callable[[Any, int], bool]] = {
    **dict.fromkeys(ELEMENTWISE, _always),
    **dict.fromkeys(("broadcast_in_dim", "transpose", "squeeze", "expand_dims", "iota"), _always),
    **dict.fromkeys((*REDUCED, "reduce_xor", "argmax", "argmin"), _apart("axes")),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split"), _apart("axis")
    ),
    "concatenate": _apart("dimension"),
    "dot_general": _free_in_dot,
    "gather": _looked_up,
    "pad": _unpadded,
    "reshape": _plain_reshape,
    "rev": _apart("dimensions"),
    "slice": _whole_slice,
    "sort": _apart("dimension"),
}

_MAY_DIFFER_BETWEEN_ROWS = ELEMENTWISE | {"broadcast_in_dim"}


def can_pack(eqn: Any, batched: Sequence[bool]) -> bool:
    """Whether `run_packed` computes an equation.

    Args:
      eqn: an equation of a program of one row.
      batched: which of its operands without a ragged size differ between rows.
    """
    if not depends_on_sizes(eqn):
        return True
    name = eqn.primitive.name
    if name == "dim_as_value":
        return True
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    ragged = {str(d) for shape in shapes for d in shape if is_symbolic(d)}
    if len(ragged) != 1 or not all(map(is_packable, shapes)):
        return False
    check = _ACTS_ON_ELEMENTS.get(name)
    if check is None or (any(batched) and name not in _MAY_DIFFER_BETWEEN_ROWS):
        return False
    places = [at for v in eqn.invars if (at := ragged_axis(v.aval.shape)) is not None]
    if name in REDUCED and places[0] in eqn.params["axes"]:
        return eqn.invars[0].aval.dtype == jnp.bool_ or name in REDUCTIONS
    return all(check(eqn, at) for at in places or [0])
