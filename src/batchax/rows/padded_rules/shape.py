"""Operations that arrange axes, and make rows."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.rows.comparisons import may_differ
from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.padded_rules.moving import moved, pad_end
from batchax.rows.sizes import is_symbolic


@padded_rule("dim_as_value")
def _dim_as_value(op: Operation, *, dim: Any) -> Any:
    value = op.sizes.value(dim)
    aval = op.eqn.outvars[0].aval
    return lax.convert_element_type(value, aval.dtype)


@padded_rule("iota")
def _iota(op: Operation, **params: Any) -> Any:
    return op.bind()


@padded_rule("transpose", "squeeze")
def _rearranged(op: Operation, x: Row, **params: Any) -> Row:
    return op.result(op.bind(x.value), x.fill)


@padded_rule("broadcast_in_dim")
def _broadcast_in_dim(op: Operation, x: Row, **params: Any) -> Row:
    out = op.bind(x.value)
    return op.result(out if x.known else op.cut(out, op.out_shape))


@padded_rule("empty", "empty2")
def _empty(op: Operation, **params: Any) -> Any:
    return op.bind()


@padded_rule("stack")
def _stack(op: Operation, *rows: Row, **params: Any) -> Row:
    fill = rows[0].fill
    same = all(row.fill is not None and row.fill == fill for row in rows)
    return op.result(op.bind(*(row.value for row in rows)), fill if same else None)


@padded_rule("unstack")
def _unstack(op: Operation, x: Row, *, axis: int, **params: Any) -> list[Row]:
    if is_symbolic(x.shape[axis]):
        raise op.refuse(
            f"it takes apart an axis of size {x.shape[axis]}, which differs from row to row. "
            "Index the axis instead."
        )
    return [op.result(out, x.fill, i) for i, out in enumerate(op.bind(x.value))]


@padded_rule("reshape")
def _reshape(op: Operation, x: Row, *, new_sizes: Any, dimensions: Any, **params: Any) -> Any:
    if may_differ(math.prod(x.shape), math.prod(new_sizes)):
        raise op.refuse(
            f"rows of shape {tuple(x.shape)} are reshaped to {tuple(new_sizes)}, which "
            "for some of them is another number of elements. Pad them first, with jnp.pad, or give "
            "-1 for the size."
        )
    if dimensions is not None:
        order = tuple(dimensions)
        x = Row(lax.transpose(x.value, order), tuple(x.shape[i] for i in order), x.fill)
    bounds = op.sizes.bounds_of(new_sizes)
    groups = _groups(x.shape, new_sizes)
    moving = [not (_leads(op, olds) and _leads(op, news)) for olds, news in groups]
    total = [math.prod(op.sizes.bounds_of(olds)) for olds, _ in groups]
    new_total = [math.prod(op.sizes.bounds_of(news)) for _, news in groups]
    if not any(moving) and total == new_total:
        return op.result(lax.reshape(x.value, bounds), x.fill)
    out = lax.reshape(x.value, total)
    for axis, (olds, news) in enumerate(groups):
        if moving[axis]:
            out = moved(out, axis, _places(op, news, olds), _places(op, olds, news))
        else:
            out = pad_end(out, axis, new_total[axis] - total[axis])
            out = lax.slice_in_dim(out, 0, new_total[axis], axis=axis)
    return lax.reshape(out, bounds)


def _groups(olds: Sequence[Any], news: Sequence[Any]) -> list[tuple[list[Any], list[Any]]]:
    """Dimensions that go together: the elements of the first of each pair fill the second."""
    groups: list[tuple[list[Any], list[Any]]] = []
    products = list(itertools.accumulate(news, operator.mul))
    start, done, product = 0, 0, 1
    for i, dim in enumerate(olds):
        product = product * dim
        for j in range(done, len(news)):
            if products[j] == product:
                groups.append((list(olds[start : i + 1]), list(news[done : j + 1])))
                start, done = i + 1, j + 1
                break
    if start < len(olds) or done < len(news):  # of size one, or a product that was not found
        if not groups:
            groups.append(([], []))
        groups[-1][0].extend(olds[start:])
        groups[-1][1].extend(news[done:])
    return groups


def _leads(op: Operation, dims: Sequence[Any]) -> bool:
    """Whether elements of a row stay together: nothing but the first dimension is padded."""
    inner = [dim for dim in dims if not (isinstance(dim, int) and dim == 1)][1:]
    return all(map(op.sizes.is_exact, inner))


def _places(op: Operation, news: Sequence[Any], olds: Sequence[Any]) -> Any:
    """For each element of `news`, flattened, its place in `olds`; -1 for what is padding."""
    bounds = op.sizes.bounds_of(news)
    at = [c.ravel().astype(np.int32) for c in np.indices(bounds)]
    linear: Any = np.zeros(math.prod(bounds), np.int32)
    inside: Any = np.ones(math.prod(bounds), bool)
    for place, dim in zip(at, news, strict=True):
        size = op.sizes.size(dim)
        linear, inside = linear * size + place, inside & (place < size)
    in_olds: Any = 0
    stride = 1
    for dim in reversed(olds):
        size = jnp.maximum(op.sizes.size(dim), 1)
        in_olds = in_olds + linear % size * stride
        linear, stride = linear // size, stride * op.sizes.bound(dim)
    return jnp.where(inside, in_olds, -1)
