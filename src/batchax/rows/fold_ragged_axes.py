"""Packed rows that are ragged along several axes: those axes are one, with all elements of a row.

What acts on each element of a row alone does not ask how many axes these lie along. So an equation
whose values have such axes, the same ones in the same order, is one of values that have one axis
in their place, of a size of its own; and then all is as for rows with one ragged axis. What tells
the axes apart (a transpose, a sum along one of them) is no such equation, and runs padded.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchax import _compat
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import Aval, Eqn
from batchax.memo import Memo
from batchax.rows.sizes import Lengths, SizeOfRow, is_symbolic, ragged_axes

Names = tuple[str, ...]
"""The sizes of rows along each of several ragged axes, by name."""


@dataclass(frozen=True)
class _Typed:
    """A variable of a merged equation."""

    aval: Aval


@dataclass(frozen=True, eq=False)
class Merged:
    """An equation whose values have one ragged axis in place of several.

    Attributes:
      names: of the sizes along these.
      size: the name of the size along that.
      primitive, invars, outvars, params, effects, source_info, ctx: those of an equation.
    """

    names: Names
    size: str
    primitive: Any
    invars: Sequence[Any]
    outvars: Sequence[Any]
    params: dict[str, Any]
    effects: Any
    source_info: Any
    ctx: Any

    def replace(self, **changes: Any) -> Merged:
        return replace(self, **changes)


def has_several(eqn: Eqn) -> bool:
    atoms = (*eqn.invars, *eqn.outvars)
    return any(len(ragged_axes(getattr(v.aval, "shape", ()))) > 1 for v in atoms)


def groups_in(eqn: Eqn) -> set[Names | None]:
    """The sizes of values of an equation that are ragged along several axes."""
    shapes = (getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars))
    return {names_of(shape) for shape in shapes if len(ragged_axes(shape)) > 1}


def can_hold(room: Container[Names], shape: Sequence[Any]) -> bool:
    """Whether values of that shape are packed: with sizes of the row.

    Those of several axes are so if arguments are (`room`): of others nobody knows how many elements
    there are at most, or they are made and used up on the way.
    """
    names = names_of(shape)
    return names is not None and (len(names) < 2 or names in room)


def names_of(shape: Sequence[Any]) -> Names | None:
    """The sizes along ragged axes; None where one is computed, such as ``n - 1``."""
    names = tuple(str(shape[at]) for at in ragged_axes(shape))
    return names if all(map(str.isidentifier, names)) else None


def merged_shape(shape: Sequence[Any]) -> tuple[Any, ...]:
    """A shape with one axis in place of its ragged ones, where the first of them is."""
    at, names = ragged_axes(shape), names_of(shape)
    if len(at) < 2 or names is None:
        return tuple(shape)
    kept = [dim for dim in shape if not is_symbolic(dim)]
    kept.insert(at[0], merged_size(names))
    return tuple(kept)


_sizes = Memo("sizes of rows along several axes together", most=64)


def merged_size(names: Names) -> Any:
    own = Lengths({"_".join(("of", *names)): np.arange(2)}, False)
    made = lambda: _compat.row_symbols(SizeOfRow, list(own.values), own)[0]
    return _sizes.get(names, made)


def merge(eqn: Eqn) -> Merged | None:
    """The equation of values that have one ragged axis; None if it tells several apart."""
    shapes = [tuple(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
    ragged = {names_of(shape) for shape in shapes if ragged_axes(shape)}
    names = next(iter(ragged))
    if len(ragged) != 1 or names is None or len(eqn.outvars) != 1:
        return None
    facts, params = facts_of(eqn.primitive), eqn.params
    name = eqn.primitive.name
    invars = [_Typed(_with_shape(v.aval, merged_shape(v.aval.shape))) for v in eqn.invars]
    if name in _PARAMS:
        changed = _PARAMS[name](eqn, invars)
        if changed is None:
            return None
        params = {**params, **changed}
    elif not facts.elementwise or not _as_wide(eqn, invars):
        return None
    out = eqn.outvars[0].aval
    outvars = [_Typed(_with_shape(out, merged_shape(out.shape)))]
    size = str(merged_size(names))
    return Merged(
        names, size, eqn.primitive, invars, outvars, params, eqn.effects, eqn.source_info, eqn.ctx
    )


def _with_shape(aval: Aval, shape: tuple[Any, ...]) -> Aval:
    return aval if shape == tuple(aval.shape) else aval.update(shape=shape, sharding=None)


def _as_wide(eqn: Eqn, invars: list[Any]) -> bool:
    """Whether operands without ragged axes, which JAX repeats, have one element along each."""
    ragged = ragged_axes(eqn.outvars[0].aval.shape)
    for i, v in enumerate(eqn.invars):
        shape = v.aval.shape
        if not shape or ragged_axes(shape):
            continue
        if any(shape[at] != 1 for at in ragged):
            return False
        kept = tuple(dim for k, dim in enumerate(shape) if k not in ragged[1:])
        invars[i] = _Typed(_with_shape(v.aval, kept))
    return True


def _places(shape: Sequence[Any]) -> dict[int, int]:
    """Where each axis of a shape is in the merged one; those that are merged where that axis is."""
    at = ragged_axes(shape)
    if len(at) < 2:
        return {i: i for i in range(len(shape))}
    return {i: at[0] if i in at else i - sum(k < i for k in at[1:]) for i in range(len(shape))}


def _all_or_none(eqn: Eqn, axes: Sequence[int]) -> list[int] | None:
    """Axes of the first operand in the merged one, of which ragged ones are all meant or none."""
    shape = eqn.invars[0].aval.shape
    meant = set(ragged_axes(shape)) & set(axes)
    if meant and len(meant) < len(ragged_axes(shape)):
        return None
    places = _places(shape)
    return sorted({places[axis] for axis in axes})


def _reduced(eqn: Eqn, invars: list[Any]) -> dict[str, Any] | None:
    axes = _all_or_none(eqn, eqn.params["axes"])
    return None if axes is None else {"axes": tuple(axes)}


def _along(name: str) -> Callable[[Eqn, list[Any]], dict[str, Any] | None]:
    """Of an operation along one axis, which is none of the ragged ones."""

    def change(eqn: Eqn, invars: list[Any]) -> dict[str, Any] | None:
        shape, axis = eqn.invars[0].aval.shape, eqn.params[name]
        if axis in ragged_axes(shape) or not all(ragged_axes(v.aval.shape) for v in eqn.invars):
            return None
        return {name: _places(shape)[axis]}

    return change


def _broadcast(eqn: Eqn, invars: list[Any]) -> dict[str, Any] | None:
    """Of rows along other axes, or of what each row has one of along these."""
    (x, *others), shape = (v.aval.shape for v in eqn.invars), eqn.params["shape"]
    dims, to, places = eqn.params["broadcast_dimensions"], ragged_axes(shape), _places(shape)
    if others or not to:
        return None
    ragged = ragged_axes(x)
    if ragged and [dims[k] for k in ragged] != to:
        return None
    if any(dims[k] in to and x[k] != 1 for k in range(len(x)) if k not in ragged):
        return None
    own = _places(x)
    kept = [k for k in range(len(x)) if k in ragged[:1] or dims[k] not in to]
    invars[0] = _Typed(
        _with_shape(eqn.invars[0].aval, tuple(_merged_dims(x, kept, invars[0], own)))
    )
    return {
        "shape": merged_shape(shape),
        "broadcast_dimensions": tuple(places[dims[k]] for k in kept),
        "sharding": None,
    }


def _merged_dims(x: Any, kept: Sequence[int], merged: Any, own: dict[int, int]) -> list[Any]:
    return [merged.aval.shape[own[k]] if is_symbolic(x[k]) else x[k] for k in kept]


def _squeezed(eqn: Eqn, invars: list[Any]) -> dict[str, Any]:
    places = _places(eqn.invars[0].aval.shape)
    return {"dimensions": tuple(places[axis] for axis in eqn.params["dimensions"])}


def _sliced(eqn: Eqn, invars: list[Any]) -> dict[str, Any] | None:
    """Of a slice that takes all along ragged axes."""
    params, shape = eqn.params, eqn.invars[0].aval.shape
    starts, limits = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(shape)
    at = ragged_axes(shape)
    if any(starts[k] != 0 or limits[k] is not shape[k] or strides[k] != 1 for k in at):
        return None
    kept = [k for k in range(len(shape)) if k not in at[1:]]
    size = merged_shape(shape)[at[0]]
    return {
        "start_indices": tuple(starts[k] for k in kept),
        "limit_indices": tuple(size if k == at[0] else limits[k] for k in kept),
        "strides": tuple(strides[k] for k in kept),
    }


def _reshaped(eqn: Eqn, invars: list[Any]) -> dict[str, Any] | None:
    """Of a reshape between, before or behind ragged axes, which stay apart or together."""
    before, after = eqn.invars[0].aval.shape, eqn.params["new_sizes"]
    if eqn.params["dimensions"] is not None or _between(before) != _between(after):
        return None
    return {"new_sizes": merged_shape(after), "sharding": None}


def _between(shape: Sequence[Any]) -> list[int]:
    """How many elements there are before, between and behind ragged axes."""
    sizes = [1]
    for dim in shape:
        if is_symbolic(dim):
            sizes.append(1)
        else:
            sizes[-1] *= dim
    return sizes


def _product(eqn: Eqn, invars: list[Any]) -> dict[str, Any] | None:
    """Of rows with what all share, along other axes."""
    (contracted, batch), shapes = (
        eqn.params["dimension_numbers"],
        [v.aval.shape for v in eqn.invars],
    )
    if all(map(ragged_axes, shapes)) or any(map(len, batch)):
        return None
    if any(set(ragged_axes(s)) & set(axes) for s, axes in zip(shapes, contracted, strict=True)):
        return None
    moved = tuple(
        tuple(_places(s)[axis] for axis in axes) for s, axes in zip(shapes, contracted, strict=True)
    )
    return {"dimension_numbers": (moved, batch), "out_sharding": None}


_PARAMS: dict[str, Callable[[Eqn, list[Any]], dict[str, Any] | None]] = {
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod"),
        _reduced,
    ),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    "concatenate": _along("dimension"),
    "squeeze": _squeezed,
    "slice": _sliced,
    "reshape": _reshaped,
    "broadcast_in_dim": _broadcast,
    "dot_general": _product,
}
"""What is other in the parameters of merged equations; None for what tells axes apart."""
