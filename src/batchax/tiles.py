"""`tiles`: blocks of an axis as lanes, and joined again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.frontend.containers import AxisSpec, Parts
from batchax.frontend.in_axes import is_position
from batchax.frontend.options import check_count, check_one_of
from batchax.jaxprs.error_format import brief
from batchax.jaxprs.types import Value, Values
from batchax.rows.ragged import Ragged


@dataclass(frozen=True)
class Tiles(AxisSpec):
    """In `in_axes`: lanes are blocks of an axis. In `out_axes`: blocks are joined to one axis."""

    size: int | None
    count: int | None
    axis: int
    last: Literal["error", "short"]

    def of_argument(self, value: Value, path: str) -> Parts:
        shape, axis = _checked(self, "in_axes", value, path)
        count, size = self._count_and_size(shape, axis, path)
        if count * size < shape[axis]:
            lengths = np.append(np.full(count, size), shape[axis] - count * size).astype(np.int32)
            named = [f"{path} (tiles of {size}, the last of {lengths[-1]})"]
            return Parts([Ragged(value, lengths, axis=axis)], [0], lambda x: x[0], named)
        blocks = jnp.asarray(value)
        _check_shards(blocks, axis, count, path)
        blocks = _reshaped(blocks, axis, 1, (count, size))
        return Parts([blocks], [axis], lambda x: x[0], [f"{path} (tiles of {size})"])

    def _count_and_size(self, shape: Sequence[int], axis: int, path: str) -> tuple[int, int]:
        """How many whole blocks there are, and their size."""
        total = shape[axis]
        parts = self.count if self.size is None else self.size
        if parts is None:
            raise AxisError(
                f"in_axes gives {self!r} for {path}. Pass the size of a tile, or count."
            )
        rest = total % parts
        if rest and self.last == "error":
            what = f"{self.count} tiles" if self.size is None else f"tiles of {self.size}"
            hint = "" if self.size is None else f', or last="short" for a last tile of {rest}'
            raise AxisError(
                f"in_axes gives {self!r} for {path}, of shape {tuple(shape)}: axis {axis} has "
                f"{total} elements, which do not make {what}. Pass what divides {total}{hint}."
            )
        return (parts, total // parts) if self.size is None else (total // parts, parts)

    def of_output(self, value: Value, path: str, size: Any) -> Parts:
        shape, axis = _checked(self, "out_axes", value, path)
        symbolic = not isinstance(shape[axis], int)
        rows = symbolic or self.last == "short"  # they come along axis 0
        if not rows and self.size not in (None, shape[axis]):
            raise AxisError(
                f"out_axes gives {self!r} for {path}, which has shape {tuple(shape)} for each "
                f"lane: axis {axis} has {shape[axis]} elements, not {self.size}. Leave the size "
                "out, batchax.tiles(axis=...), to join whatever there is."
            )
        if self.count not in (None, size):
            raise AxisError(
                f"out_axes gives {self!r} for {path}, but there are {size} lanes to be joined. "
                "Leave the count out, batchax.tiles(axis=...), to join whatever there is."
            )

        def join(outs: Values) -> Value:
            (x,) = outs
            if isinstance(x, Ragged):
                return x.data
            x = jnp.moveaxis(x, 0, axis) if rows else x
            return _reshaped(x, axis, 2, (x.shape[axis] * x.shape[axis + 1],))

        return Parts([value], [0 if rows else axis], join)

    def __repr__(self) -> str:
        given = [f"{k}={v}" for k, v in (("size", self.size), ("count", self.count)) if v]
        given += [f"axis={self.axis}"] * (self.axis != 0)
        given += ['last="short"'] * (self.last == "short")
        return f"batchax.tiles({', '.join(given)})"


@_compat.api_boundary
def tiles(
    size: int | None = None,
    count: int | None = None,
    axis: int = 0,
    last: Literal["error", "short"] = "error",
) -> Tiles:
    """Maps over blocks of an axis (`in_axes`), or joins blocks (`out_axes`).

    Example:
      >>> def attention(x):  # tokens attend to those of their block
      ...     return jax.nn.softmax(x @ x.T) @ x
      >>> bx.vmap(attention, bx.tiles(size=64), bx.tiles())(jnp.ones((256, 8))).shape
      (256, 8)

    The function sees blocks of `size` elements along `axis`, as by ``x.reshape(n // size, size,
    d)``, `vmap`, and a reshape back, without a copy.

    Args:
      size: The number of elements of a block along `axis`.
      count: The number of blocks, in place of `size`. `out_axes` needs neither.
      axis: The axis of the whole array, or of the joined one. Negative ints count from the end.
      last: What happens if `size` does not divide the axis.

        - "error" (default): the call raises.
        - "short": the last block is shorter. The function sees rows with a symbolic size, as those
          of a `Ragged`. Pass it in `out_axes`, too.

    Returns:
      A value for `in_axes` and `out_axes` of `vmap`.

    Raises:
      ArgumentTypeError: An argument has the wrong type, or both `size` and `count` are passed.
      OptionError: `last` is an unknown word, or `size` or `count` is less than one.
    """
    for name, n in (("size", size), ("count", count)):
        if n is not None:
            check_count(f"tiles(): {name}", n, 1)
    if not is_position(axis):
        raise ArgumentTypeError(f"tiles(): axis must be an int, got {brief(axis)}.")
    check_one_of("tiles(): last", last, "error", "short")
    if count is not None and (size is not None or last == "short"):
        other = "size" if size is not None else 'last="short"'
        raise ArgumentTypeError(f"tiles(): pass count or {other}, not both.")
    return Tiles(size, count, int(axis), last)


def _checked(spec: Tiles, what: str, value: Value, path: str) -> tuple[tuple[int, ...], int]:
    """The shape of a value, and the axis with blocks, not negative."""
    try:
        shape = np.shape(value)
        jax.typeof(value)
    except TypeError:
        raise ArgumentTypeError(
            f"{what} gives {spec!r} for {path}, of type {type(value).__name__}: tiles are blocks "
            "of an array."
        ) from None
    if _compat.is_reference(value):
        raise UnsupportedError(
            f"{what} gives {spec!r} for {path}, a reference (jax.new_ref), of which there are no "
            "tiles. Pass the position of an axis, and reshape what is read of it."
        )
    if not shape:
        raise AxisError(f"{what} gives {spec!r} for {path}, which has shape (): it has no axis.")
    if not -len(shape) <= spec.axis < len(shape):
        raise AxisError(
            f"{what} gives {spec!r} for {path}, which has shape {shape}. Pass an axis in "
            f"[{-len(shape)}, {len(shape)})."
        )
    axis = spec.axis % len(shape)
    if not isinstance(shape[axis], int) and what == "in_axes":
        raise AxisError(
            f"{what} gives {spec!r} for {path}, whose axis {axis} has a symbolic size, "
            f"{shape[axis]}: tiles are of axes of a known size."
        )
    return shape, axis


def _check_shards(x: Value, axis: int, count: int, path: str) -> None:
    """Raises for blocks that do not divide evenly over devices, where types carry the sharding.

    Raises:
      UnsupportedError: they cannot.
    """
    sharding: Any = jax.typeof(x).sharding
    entry = sharding.spec[axis]
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    devices = math.prod(sharding.mesh.shape[name] for name in names)
    if count % devices:
        raise UnsupportedError(
            f"{path} is sharded along axis {axis} over {devices} devices, as {sharding.spec}, "
            f"which cannot have equal shares of {count} tiles. Pass tiles that they can, or put "
            "the array on every device before, with jax.sharding.reshard(x, jax.P())."
        )


def _reshaped(x: Value, axis: int, old: int, new: Sequence[int]) -> jax.Array:
    """`x` with `old` axes from `axis` on replaced by axes of the sizes `new`.

    Where types say how an array is sharded, the first of the new axes is as the first old one was.
    """
    shape = (*x.shape[:axis], *new, *x.shape[axis + old :])
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or all(entry is None for entry in sharding.spec):
        return lax.reshape(x, shape)
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    spec[axis : axis + old] = [spec[axis], *[None] * (len(new) - 1)]
    return lax.reshape(x, shape, out_sharding=sharding.update(spec=PartitionSpec(*spec)))
