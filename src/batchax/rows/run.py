"""From a call of `vmap` with ragged arguments to what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.engine.arguments import Mapped
from batchax.engine.axis import Axis
from batchax.engine.inner import example_aval, stage_function
from batchax.engine.outputs import AUTO, FlatOutputs, OutputArray, Reduce
from batchax.errors import AxisError, UnsupportedError
from batchax.rows.index import RowIndex, pack_rows, pad_rows
from batchax.rows.padded import Row, run_padded
from batchax.rows.ragged import Ragged, RaggedSize, known_lengths
from batchax.rows.sizes import Sizes, has_symbols, is_symbolic


@dataclass(frozen=True)
class RowSize:
    """A size that rows have, which some of the ragged arguments share.

    Attributes:
      name: of its symbol.
      symbol: the symbolic size.
      batch: the first argument that has it.
      bound: no row is longer.
    """

    name: str
    symbol: Any
    batch: Ragged
    bound: int

    @property
    def index(self) -> RowIndex:
        """Where the rows of the first argument are."""
        return self.index_in(self.batch)

    def index_in(self, batch: Ragged) -> RowIndex:
        """Where the rows of an argument are."""
        return RowIndex.of(batch.lengths, batch.data.shape[batch.axis], self.bound)


RunDense = Callable[[Axis, Callable[..., Any], list[Mapped], list[FlatOutputs]], list[Any]]


def run_rows(
    axis: Axis,
    one_row: Callable[..., Any],
    mapped: list[Mapped],
    outputs: list[FlatOutputs],
    run_dense: RunDense,
) -> list[Any]:
    """The outputs of a function of one row for all rows.

    Args:
      axis: the axis being mapped, whose lanes are rows.
      one_row: the function; when called it describes what it returned in `outputs`.
      mapped: its arguments, some of which are `Ragged`.
      outputs: see `one_row`.
      run_dense: what `vmap` does with a function of arrays of one size.
    """
    sizes_of, sizes = find_sizes(mapped)
    avals = [_row_aval(axis, m, sizes_of[i]) for i, m in enumerate(mapped)]
    staged = stage_function(axis, one_row, avals, [m.path for m in mapped])
    described = outputs[0].described
    shapes = [aval.shape for aval in staged.out_avals]
    described = [_placed(output, shape) for output, shape in zip(described, shapes, strict=True)]
    bounds = {size.name: size.bound for size in sizes}

    def padded_row(*values: Any) -> list[Any]:
        outputs[0].described[:] = described
        lengths = dict(zip(bounds, values, strict=False))
        arguments = [
            Row(x, aval.shape, None if of is None or _is_key(x) else 0)
            for x, aval, of in zip(values[len(sizes) :], avals, sizes_of, strict=True)
        ]
        rows = run_padded(Sizes(bounds, lengths), staged.jaxpr, staged.consts, arguments)
        return [row.value for row in rows]

    arguments = [
        Mapped(f"the lengths of {size.name}", jnp.asarray(size.index.lengths), 0) for size in sizes
    ]
    for m, size in zip(mapped, sizes_of, strict=True):
        if size is not None:
            fill = None if _is_key(m.value.data) else 0
            padded = pad_rows(m.value.data, size.index_in(m.value), m.value.axis, fill)
            m = Mapped(m.path, padded, 0)
        arguments.append(m)
    outs = run_dense(axis, padded_row, arguments, outputs)
    return [
        _ragged_output(x, shape, sizes) if has_symbols(shape) else x
        for x, shape in zip(outs, shapes, strict=True)
    ]


def find_sizes(mapped: Sequence[Mapped]) -> tuple[list[RowSize | None], list[RowSize]]:
    """The size of each argument, None for those that are not ragged; and all that there are.

    Raises:
      AxisError: arguments whose sizes have one name are known to differ in length.
    """
    groups: list[tuple[str | None, list[int]]] = []
    for i, m in enumerate(mapped):
        if not isinstance(m.value, Ragged):
            continue
        name = m.spec.name if isinstance(m.spec, RaggedSize) else None
        for known_as, members in groups:
            first = mapped[members[0]]
            if name is None and known_as is None and _same_lengths(m.value, first.value):
                members.append(i)
                break
            if name is not None and name == known_as:
                _check_equal(name, first, m)
                members.append(i)
                break
        else:
            groups.append((name, [i]))
    taken = {name for name, _ in groups if name is not None}
    fresh = (s for s in _NAMES if s not in taken)
    names = [name or next(fresh) for name, _ in groups]
    symbols = jax.export.symbolic_shape(", ".join(names)) if names else ()
    sizes_of: list[RowSize | None] = [None] * len(mapped)
    sizes = []
    for (_, members), name, symbol in zip(groups, names, symbols, strict=True):
        bound = min(mapped[i].value.max_length for i in members)
        size = RowSize(name, symbol, mapped[members[0]].value, bound)
        sizes.append(size)
        for i in members:
            sizes_of[i] = size
    return sizes_of, sizes


_NAMES = ["n", "m", "k", "l", *(f"n{i}" for i in range(1, 1000))]


def _same_lengths(a: Ragged, b: Ragged) -> bool:
    if a.lengths is b.lengths:
        return True
    x, y = known_lengths(a.lengths), known_lengths(b.lengths)
    return x is not None and y is not None and np.array_equal(x, y)


def _check_equal(name: str, first: Mapped, second: Mapped) -> None:
    x, y = known_lengths(first.value.lengths), known_lengths(second.value.lengths)
    if x is None or y is None or np.array_equal(x, y):
        return
    i = int(np.argmax(x != y))
    raise AxisError(
        f"in_axes calls the size of the rows of {first.path} and of {second.path} {name!r}, but "
        f"their lengths differ: row {i} has {x[i]} and {y[i]} elements. Give them different names."
    )


def _row_aval(axis: Axis, m: Mapped, size: RowSize | None) -> Any:
    if size is None:
        return example_aval(axis, jax.typeof(m.value), m.axis)
    aval = jax.typeof(m.value.data)
    shape = list(aval.shape)
    shape[m.value.axis] = size.symbol
    return jax.core.ShapedArray(tuple(shape), aval.dtype, weak_type=False)


def _is_key(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, np.generic)


def _placed(output: OutputArray, shape: Sequence[Any]) -> OutputArray:
    """Where an output goes before it is packed.

    Raises:
      AxisError: `out_axes` asks for what a ragged output cannot be.
      UnsupportedError: it is ragged in more than one axis.
    """
    ragged = [i for i, dim in enumerate(shape) if is_symbolic(dim)]
    if not ragged:
        return output
    shown = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
    if len(ragged) > 1:
        raise UnsupportedError(
            f"{output.path} has the shape {shown} for each row, ragged in {len(ragged)} axes; a "
            "Ragged has one. Reduce over one of them in the function, or return it together with "
            "a mask for rows padded to a fixed size, jnp.zeros((size, size)).at[...].set(...)."
        )
    if output.spec is AUTO or output.spec == 0:
        return replace(output, spec=0)
    if isinstance(output.spec, Reduce):
        raise AxisError(
            f"out_axes gives {output.spec} for {output.path}, whose shape for each row is "
            f"{shown}: rows of different lengths cannot be reduced over the batch. Reduce over "
            "the row in the function first."
        )
    raise AxisError(
        f"out_axes gives {output.spec} for {output.path}, whose shape for each row is {shown}: a "
        "ragged output has its rows along axis 0. Give 0 or batchax.AUTO."
    )


def _ragged_output(padded: Any, shape: Sequence[Any], sizes: Sequence[RowSize]) -> Ragged:
    """Padded rows as a `Ragged`."""
    at = next(i for i, dim in enumerate(shape) if is_symbolic(dim))
    dim, bound = shape[at], padded.shape[at + 1]
    for size in sizes:
        if dim == size.symbol:
            lengths, capacity = size.batch.lengths, size.batch.data.shape[size.batch.axis]
            break
    else:
        lengths, capacity = _lengths_of(dim, bound, sizes)
    index = RowIndex.of(lengths, capacity, bound)
    return Ragged(pack_rows(padded, index, at, capacity), lengths, bound, axis=at)


def _lengths_of(dim: Any, bound: int, sizes: Sequence[RowSize]) -> tuple[Any, int]:
    """The size `dim` of each row, and room enough for all rows."""
    used = [size for size in sizes if size.name in _compat.symbols(dim)]
    lengths = {size.name: size.index.lengths for size in used}
    known = all(isinstance(x, np.ndarray) for x in lengths.values())
    numpy = np if known else jnp
    found = numpy.maximum(_compat.evaluate_size(dim, lengths), 0)
    if known:
        found = np.asarray(found, np.int32)
        return found, int(found.sum())
    capacity = len(used[0].batch) * bound
    if len(used) == 1:  # what a linear function of the length comes to for all rows together
        total = used[0].batch.data.shape[used[0].batch.axis]
        at = np.arange(used[0].bound + 1)
        values = np.maximum(_compat.evaluate_size(dim, {used[0].name: at}), 0)
        slope = max([0, *(-(-(v - values[0]) // i) for i, v in enumerate(values) if i)])
        capacity = min(capacity, int(len(used[0].batch) * values[0] + slope * total))
    return found, capacity
