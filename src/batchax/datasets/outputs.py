"""What the function of a row returns: arrays with rows, rows of different lengths, reductions."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.datasets.fingerprint import digest
from batchax.datasets.parts import Leaf
from batchax.datasets.source import native
from batchax.errors import ArgumentTypeError, UnsupportedError
from batchax.execution.sections import result_type
from batchax.frontend import reductions
from batchax.frontend.containers import is_container
from batchax.frontend.in_axes import is_position, spread_specs
from batchax.frontend.outputs import (
    AUTO,
    Reduce,
    check_lanes,
    check_reduces,
    is_added,
    is_output_spec,
)
from batchax.frontend.reductions import Reduction
from batchax.rows.building import without
from batchax.rows.ragged import Ragged


@dataclass(frozen=True)
class Output:
    """One leaf of what the function returns.

    Attributes:
      path: for messages: "out['loss']".
      leaf: the array of all rows; what is reduced over them has the shape of one row.
      spec: how it is reduced over the rows; None if each row has its own.
      row: the type of what one row has, if it is reduced.
    """

    path: str
    leaf: Leaf
    spec: Reduce | None = None
    row: Any = None

    @property
    def reduces(self) -> Reduction | None:
        """The reduction over the rows, if it is reduced."""
        return None if self.spec is None else self.spec.reduction

    @functools.cached_property
    def state(self) -> Any:
        """The types of what is known of some of the rows, if it is reduced."""
        assert self.spec is not None
        return reductions.state_type(self.spec.reduction, self.row)

    @property
    def described(self) -> int | str:
        """For JSON: where it has the rows, or which reduction it is."""
        if self.spec is None:
            return self.leaf.axis
        if isinstance(self.spec.kind, str):
            return self.spec.kind
        parts = functools.partial(reductions.in_two_parts, self.spec.kind)
        return digest(jax.make_jaxpr(parts)(self.row, self.row))

    @property
    def of_row(self) -> Any:
        """The type of what one row has; of rows of different lengths of an element."""
        shape = [n for i, n in enumerate(self.leaf.shape) if i != self.leaf.axis]
        return self.row if self.reduces else jax.ShapeDtypeStruct(shape, self.leaf.dtype)

    @property
    def row_bytes(self) -> int:
        """What a row of it takes; of rows of different lengths an element."""
        shape = [n for i, n in enumerate(self.leaf.shape) if self.reduces or i != self.leaf.axis]
        return int(np.prod(shape)) * self.leaf.dtype.itemsize


def find_outputs(types: Any, out_axes: Any, rows: int, grows: bool = False) -> list[Output]:
    """The outputs for all rows.

    Args:
      types: of the outputs of one batch, as `lanes_of` has them.
      out_axes: as the user gave it.
      rows: how many there are.
      grows: whether that is only how many there are at most.

    Raises:
      UnsupportedError: an output cannot be kept.
      AxisError: `out_axes` does not fit the outputs.
    """
    leaves, _ = spread_specs(out_axes, types, "out", "out_axes", is_output_spec, by_name=True)
    named, _ = jax.tree_util.tree_flatten_with_path(types, is_leaf=is_container)
    outputs, size = [], 0 if grows else rows  # of arrays, to begin with
    for leaf, (keys, _) in zip(leaves, named, strict=True):
        x, spec = leaf.value, leaf.spec
        name = jax.tree_util.keystr(keys, simple=True, separator="/")  # of "out['a'][0].b": "a/0/b"
        if isinstance(x, Ragged):
            if not is_position(spec):
                raise UnsupportedError(
                    f"{leaf.path} has rows of different lengths, and out_axes gives {spec!r}: such "
                    "rows are kept one after another, and out_axes is 0."
                )
            row, dtype = without(x.data.shape, [x.element_axis]), native(x.data.dtype, leaf.path)
            outputs.append(Output(leaf.path, Leaf(name, (size, *row), dtype, 0, x.axis, grows)))
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
            one = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
            check_reduces(spec, one, leaf.path)
            check_lanes(spec, rows, leaf.path, "there are no rows")
            reduction, result = spec.reduction, result_type(spec.reduction, x, 0)
            if reduction.index and rows > np.iinfo(np.int32).max:
                raise UnsupportedError(
                    f"out_axes gives {spec!r} for {leaf.path}, and there are {rows:,} rows: their "
                    "numbers do not fit into an int32. Map fewer rows in a call."
                )
            whole = Leaf(name, result.shape, np.dtype(result.dtype))
            outputs.append(Output(leaf.path, whole, spec, one))
        elif is_position(spec) or spec is AUTO:
            axis = 0 if spec is AUTO else int(spec) % len(x.shape)
            shape, dtype = (*x.shape[:axis], size, *x.shape[axis + 1 :]), native(x.dtype, leaf.path)
            outputs.append(Output(leaf.path, Leaf(name, shape, dtype, axis, None, grows)))
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


def lanes_of(out_axes: Any, added: bool = False) -> Any:
    """`out_axes` for the lanes of everything: of what is reduced or left to us, too.

    added: what `states_to_add` made is added up.
    """

    def of_one(x: Any) -> Any:
        if added and is_added(x):
            return _TOTAL
        return 0 if isinstance(x, Reduce) or x is AUTO else x

    is_leaf = lambda x: x is None or is_output_spec(x)
    return jax.tree.map(of_one, out_axes, is_leaf=is_leaf)


_TOTAL = Reduce(Reduction(jnp.add, 0))


def states_to_add(out: Any, out_axes: Any, counts: Any = None) -> Any:
    """What a row returned, with the states of what rows add up in the place of that.

    So lanes are added up by `vmap`, which needs no array for each of them (`sums/`).

    Args:
      out: what it returned.
      out_axes: as the user gave it.
      counts: whether the row is not left out of sums; None: it is not.
    """
    leaves, rebuild = spread_specs(out_axes, out, "out", "out_axes", is_output_spec, by_name=True)

    def state(x: Any, reduction: Reduction) -> Any:
        x = jnp.asarray(x)
        x = x if reduction.lane is None else reduction.lane(x)
        return x if counts is None else lax.select(counts, x, lax.full_like(x, 0))

    values = (state(x.value, x.spec.reduction) if is_added(x.spec) else x.value for x in leaves)
    return rebuild(iter(values))


def arrays_of(outputs: Sequence[Output], out: Any, numbers: Any, real: Any = None) -> list[Any]:
    """Inside a program: what the lanes of a batch come to.

    Args:
      outputs: all of them.
      out: what the function of a batch returned: lanes, but for what it added up.
      numbers: of the rows of the batch in the dataset.
      real: which lanes count in reductions; None: all.

    Returns:
      An array, a `Ragged` or the state of a reduction for each output.
    """
    leaves = jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, Ragged))
    arrays = []
    for output, x in zip(outputs, leaves, strict=True):
        if output.reduces is not None and not is_added(output.spec):
            index = numbers.astype(np.int32)
            states = reductions.states_of(output.reduces, x, 0, index, real)
            x = reductions.folded(output.reduces, *states)
        arrays.append(x)
    return arrays


def combined(output: Output, parts: Sequence[Any]) -> Any:
    """States of some of the rows as one, in double precision."""
    assert output.reduces is not None
    return reductions.on_host(output.reduces, [jax.tree.map(_wide, part) for part in parts])


def of_no_rows(output: Output) -> Any:
    """A state that changes no other."""
    assert output.reduces is not None
    return jax.tree.map(
        lambda x, none: np.full(x.shape, none, x.dtype),
        output.state,
        reductions.neutral_like(output.reduces, output.state),
    )


def finished(output: Output, whole: Any, rows: int) -> np.ndarray:
    """A reduction over so many rows, from the state of all."""
    assert output.reduces is not None
    return reductions.finished_on_host(output.reduces, whole, rows, output.leaf.dtype)


def named_parts(output: Output, state: Any) -> dict[str, np.ndarray]:
    """The arrays of a state by names, as a journal keeps them."""
    arrays = jax.tree.leaves(state)
    return dict(zip(_part_names(output, len(arrays)), arrays, strict=True))


def state_of(output: Output, named: Mapping[str, np.ndarray]) -> Any:
    """What `named_parts` was given."""
    structure = jax.tree.structure(output.state)
    names = _part_names(output, structure.num_leaves)
    return structure.unflatten([named[name] for name in names])


def _part_names(output: Output, count: int) -> list[str]:
    name = output.leaf.name
    return [name] if count == 1 else [f"{name}#{i}" for i in range(count)]


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
