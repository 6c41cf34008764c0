"""What the function of a row returns: arrays with rows, rows of different lengths, reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax.datasets.parts import Leaf
from batchax.datasets.source import native
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.execution.streaming import partial_result, reduced_type, where_real
from batchax.frontend.containers import is_container
from batchax.frontend.in_axes import is_position
from batchax.frontend.outputs import AUTO, Reduce, is_output_spec, reduce_batch
from batchax.frontend.prefixes import spread_specs
from batchax.rows.ragged import Ragged
from batchax.rules.neutral import NEUTRAL


@dataclass(frozen=True)
class Output:
    """One leaf of what the function returns.

    Attributes:
      path: for messages: "out['loss']".
      leaf: the array of all rows; what is reduced over them has the shape of one row.
      reduces: how it is reduced over the rows; None if each row has its own.
    """

    path: str
    leaf: Leaf
    reduces: str | None = None

    @property
    def row_bytes(self) -> int:
        """What a row of it takes; of rows of different lengths an element."""
        shape = [n for i, n in enumerate(self.leaf.shape) if self.reduces or i != self.leaf.axis]
        return int(np.prod(shape)) * self.leaf.dtype.itemsize


def find_outputs(found: Any, out_axes: Any, rows: int) -> list[Output]:
    """The outputs for all rows.

    Args:
      found: the types of the outputs of one batch, as `lanes_of` has them.
      out_axes: as the user gave it.
      rows: how many there are.

    Raises:
      UnsupportedError: an output cannot be kept.
      AxisError: `out_axes` does not fit the outputs.
    """
    leaves, _ = spread_specs(out_axes, found, "out", "out_axes", is_output_spec, by_name=True)
    named, _ = jax.tree_util.tree_flatten_with_path(found, is_leaf=is_container)
    outputs = []
    for leaf, (keys, _) in zip(leaves, named, strict=True):
        x, spec = leaf.value, leaf.spec
        name = jax.tree_util.keystr(keys, simple=True, separator="/")  # of "out['a'][0].b": "a/0/b"
        if isinstance(x, Ragged):
            if not is_position(spec) or x.axis:
                raise UnsupportedError(
                    f"{leaf.path} has rows of different lengths, along axis {x.axis}, and out_axes "
                    f"gives {spec!r}: rows are kept if they differ along axis 0, and out_axes is 0."
                )
            shape, dtype = (rows, *x.data.shape[1:]), native(x.data.dtype, leaf.path)
            outputs.append(Output(leaf.path, Leaf(name, shape, dtype, 0, 0)))
            continue
        if is_container(x):
            raise UnsupportedError(
                f"{leaf.path} is of type {type(x).__name__}, which is kept as no array. Return "
                "the arrays that it is made of."
            )
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise UnsupportedError(
                f"{leaf.path} are random keys, which are kept as no array. Return "
                "jax.random.key_data(key)."
            )
        if isinstance(spec, Reduce):
            if spec.unmapped == "keep":
                raise UnsupportedError(
                    f"out_axes gives {spec!r} for {leaf.path}: map reduces what it is told to; "
                    'leave out unmapped="keep".'
                )
            if not rows and spec.kind in ("max", "min"):
                raise AxisError(
                    f"out_axes gives {spec!r} for {leaf.path}, and there are no rows: of nothing "
                    f"there is no {spec.kind}."
                )
            dtype = np.dtype(reduced_type(spec.kind, x).dtype)
            outputs.append(Output(leaf.path, Leaf(name, x.shape[1:], dtype), spec.kind))
        elif is_position(spec) or spec is AUTO:
            axis = 0 if spec is AUTO else int(spec) % len(x.shape)
            shape = (*x.shape[:axis], rows, *x.shape[axis + 1 :])
            outputs.append(Output(leaf.path, Leaf(name, shape, native(x.dtype, leaf.path), axis)))
        else:
            raise UnsupportedError(
                f"out_axes gives {spec!r} for {leaf.path}: map keeps what each row has, at an axis "
                'given by its number, and reductions, batchax.Reduce("mean").'
            )
    names = [o.leaf.name for o in outputs]
    if len(set(names)) < len(names) or ("" in names and len(names) > 1):
        raise ArgumentTypeError(
            "the outputs need names of their own, which are their paths, but they are "
            f"{', '.join(map(repr, names))}. Return a dict with a name for each."
        )
    return outputs


def lanes_of(out_axes: Any) -> Any:
    """`out_axes` for the lanes of everything: of what is reduced or left to us, too."""
    is_leaf = lambda x: x is None or is_output_spec(x)
    first = lambda x: 0 if isinstance(x, Reduce) or x is AUTO else x
    return jax.tree.map(first, out_axes, is_leaf=is_leaf)


def arrays_of(outputs: Sequence[Output], out: Any, real: Any = None) -> list[Any]:
    """Inside a program: what the lanes of a batch come to, an array or a `Ragged` for each output.

    Reductions leave out lanes that are not `real`, if that is given, and are in the dtype in which
    they are added up.
    """
    leaves = jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, Ragged))
    arrays = []
    for output, x in zip(outputs, leaves, strict=True):
        if output.reduces is None:
            arrays.append(x)
            continue
        x = x if real is None else where_real(real, x, 0, output.reduces)
        part, _ = partial_result(output.reduces, x, 0)
        if output.reduces == "prod":
            part = part[0]
        elif output.reduces in ("max", "min"):
            part = reduce_batch(output.reduces, part, 0)
        arrays.append(part)
    return arrays


def combined(kind: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Parts of a reduction as one: neighbours first, then neighbours of those.

    That order depends on nothing but how many there are.
    """
    parts = [_wide(x) for x in parts]
    while len(parts) > 1:
        pairs = [_COMBINE[kind](a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*pairs, *parts[len(pairs) * 2 :]]
    return parts[0]


def of_no_rows(output: Output) -> np.ndarray:
    """A part of a reduction that changes no other."""
    kind = "sum" if output.reduces == "mean" else output.reduces
    assert kind is not None
    return np.full(output.leaf.shape, NEUTRAL[kind](output.leaf.dtype), output.leaf.dtype)


def finished(output: Output, whole: np.ndarray, rows: int) -> np.ndarray:
    """A reduction over so many rows, from all its parts."""
    with np.errstate(all="ignore"):
        value = whole / rows if output.reduces == "mean" else whole
        return np.asarray(value).astype(output.leaf.dtype)


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def _wide(x: np.ndarray) -> np.ndarray:
    """In the widest dtype of its kind: so that parts of many rows add up."""
    if x.dtype == np.bool_:
        return x
    for kind, wide in (
        (np.complexfloating, np.complex128),
        (np.unsignedinteger, np.uint64),
        (np.signedinteger, np.int64),
    ):
        if np.issubdtype(x.dtype, kind):
            return x.astype(wide)
    return x.astype(np.float64)  # bfloat16, too, which NumPy has no kind for


def nothing(dtype: np.dtype) -> Any:
    """What stands where a row has no result: NaN, or zero where there is none."""
    has_nan = jnp.issubdtype(dtype, jnp.inexact)
    return np.array(np.nan if has_nan else 0).astype(dtype)
