"""`RaggedDict`: a dict of batches of rows that share their lengths, under ``jax.jit``, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from batchax.frontend.containers import BatchOfRows, DictOfBatches


class RaggedDict(DictOfBatches):
    """A dict with batches of rows in it, of which those with the same lengths share one array.

    A pytree with the leaves of a plain dict. A transformation puts another object into the place
    of each leaf, so lengths that were one array would become several. The structure of the pytree
    therefore holds which of them are one, and what JAX builds of new leaves has one again.
    """

    def copy(self) -> RaggedDict:
        return RaggedDict(self)

    def __or__(self, other: Any) -> Any:
        return RaggedDict({**self, **other}) if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return RaggedDict({**other, **self}) if isinstance(other, dict) else NotImplemented


def _flatten(batches: RaggedDict) -> tuple[list[Any], tuple[Any, ...]]:
    distinct: list[Any] = []

    def number(lengths: Any) -> int:
        for i, other in enumerate(distinct):
            if _are_one(lengths, other):
                return i
        distinct.append(lengths)
        return len(distinct) - 1

    def numbered(x: Any) -> Any:
        # A tree of what stands for leaves, such as their shardings, keeps the structure it has.
        if not _are_arrays(x):
            return x
        part = _part_of(x, x.lengths)
        part.shared = tuple(map(number, x.each_length))
        return part

    keys = sorted(batches)  # as JAX does it for a dict
    return [_map_rows(numbered, batches[key]) for key in keys], tuple(keys)


def _flatten_with_keys(batches: RaggedDict) -> tuple[Iterable[Any], tuple[Any, ...]]:
    children, keys = _flatten(batches)
    return zip(map(jax.tree_util.DictKey, keys), children, strict=True), keys


def _unflatten(keys: tuple[Any, ...], children: Iterable[Any]) -> Any:
    first: dict[int, Any] = {}
    rows = False

    def relinked(x: Any) -> Any:
        nonlocal rows
        rows = True
        if x.shared is None or not _are_arrays(x):
            return x
        each = x.each_length
        if x.rebuilt:  # and not one that a function was given, which has its lengths still
            each = tuple(map(_one_of, map(first.setdefault, x.shared, each), each))
        return _part_of(x, each if isinstance(x.lengths, tuple) else each[0])

    values = [_map_rows(relinked, x) for x in children]
    # Without rows it is a row, or a result for each batch.
    return (RaggedDict if rows else dict)(zip(keys, values, strict=True))


def _map_rows(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, BatchOfRows):
        return function(tree)
    is_rows = lambda x: isinstance(x, BatchOfRows)
    return jax.tree.map(lambda x: function(x) if is_rows(x) else x, tree, is_leaf=is_rows)


def _one_of(first: Any, lengths: Any) -> Any:
    """The first of lengths that were one array, unless it is seen that they no longer are.

    Those on a device are trusted: a look at them would wait for what computes them.
    """
    on_host = isinstance(first, np.ndarray) and isinstance(lengths, np.ndarray)
    same = _are_one(first, lengths) if on_host else first.shape == lengths.shape
    return first if same else lengths


def _are_one(a: Any, b: Any) -> bool:
    """Whether lengths are one array, or seen to be equal."""
    if a is b:
        return True
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or a.dtype != b.dtype:
        return False
    return a.shape == b.shape and (a.dtype == jax.dtypes.float0 or np.array_equal(a, b))


def _are_arrays(rows: Any) -> bool:
    return all(hasattr(lengths, "dtype") for lengths in rows.each_length)


def _part_of(rows: Any, lengths: Any) -> Any:
    return rows.tree_unflatten((rows.max_length, rows.axis, None), (rows.data, lengths))


jax.tree_util.register_pytree_with_keys(RaggedDict, _flatten_with_keys, _unflatten, _flatten)
