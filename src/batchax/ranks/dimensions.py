"""Batch dimensions: what is in front of the core of each array, broadcast together.

No array is broadcast. Each keeps the batch dimensions that it has, and a vmap over a
dimension maps those that have it. Neighbouring dimensions that the same arrays have are
one dimension.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax.errors import AxisError
from batchax.frontend.containers import is_container
from batchax.jaxprs.types import Value
from batchax.ranks.declared import Core, CoreSizes
from batchax.rows.ragged import Ragged
from batchax.vmap import vmap


@dataclass(frozen=True)
class Argument:
    path: str
    value: Any
    core: Core

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of all of it; None where the rows of a `Ragged` have their own size."""
        return self.value.shape if isinstance(self.value, Ragged) else np.shape(self.value)

    @functools.cached_property
    def is_container(self) -> bool:
        """Whether it is no array, and can be mapped but not reshaped."""
        return is_container(self.value) and not isinstance(self.value, Ragged)

    @functools.cached_property
    def batch(self) -> tuple[int, ...]:
        return self.shape[: len(self.shape) - self.core.rank]

    @functools.cached_property
    def core_shape(self) -> tuple[int, ...]:
        return self.shape[len(self.shape) - self.core.rank :]


@dataclass(frozen=True)
class Group:
    """Holds batch dimensions that one vmap maps: how many lanes, and which arrays have it."""

    size: int
    has: tuple[bool, ...]


def check_cores(arguments: Sequence[Argument], sizes: CoreSizes) -> None:
    """Raises AxisError for arrays whose core is not what was declared."""
    short = [a for a in arguments if len(a.shape) - isinstance(a.value, Ragged) < a.core.rank]
    if short:
        raise AxisError(
            "an argument has fewer dimensions than one example was declared to have:\n"
            + "\n".join(f"  {a.path}: shape {a.shape}, declared {a.core}" for a in short)
        )
    problems = [(a, sizes.problem(a.path, a.core, a.core_shape)) for a in arguments]
    wrong = [f"  {a.path}: {_split(a)}: {problem}" for a, problem in problems if problem]
    if wrong:
        raise AxisError("the core dimensions of the arguments disagree:\n" + "\n".join(wrong))


def broadcast_batch(arguments: Sequence[Argument]) -> tuple[int, ...]:
    """Returns the batch shape of all arguments together, by NumPy's rules."""
    ndim = max((len(a.batch) for a in arguments), default=0)
    shape = []
    for d in range(-ndim, 0):
        sizes = [a.batch[d] for a in arguments if len(a.batch) >= -d]
        distinct = list(dict.fromkeys(n for n in sizes if n != 1))
        if len(distinct) > 1:
            raise AxisError(_clash(arguments, d, sizes))
        shape.append(distinct[0] if distinct else 1)
    return tuple(shape)


def _clash(arguments: Sequence[Argument], d: int, sizes: Sequence[int]) -> str:
    usual = max((n for n in sizes if n != 1), key=sizes.count)
    lines = []
    for a in arguments:
        odd = len(a.batch) >= -d and a.batch[d] not in (1, usual)
        mark = (
            f"   <- {a.batch[d]} in batch dimension {d}, where others have {usual}" if odd else ""
        )
        lines.append(f"  {a.path}: {_split(a)}{mark}")
    return "the batch dimensions of the arguments do not broadcast:\n" + "\n".join(lines)


def _split(a: Argument) -> str:
    return f"shape {a.shape} = batch {a.batch} + core {a.core_shape}"


def find_groups(
    arguments: Sequence[Argument], batch: Sequence[int], apart: bool = False
) -> list[Group]:
    """Lists the vmaps that are needed, outermost first; if `apart`, one a batch dimension."""
    groups: list[Group] = []
    mergeable = not (apart or any(map(_is_sharded, arguments)))
    for d in range(-len(batch), 0):
        size = batch[d]
        if size == 1 and not apart:
            continue
        has = tuple(len(a.batch) >= -d and a.batch[d] == size for a in arguments)
        repeated = [
            a
            for a, h in zip(arguments, has, strict=True)
            if a.is_container and len(a.batch) >= -d and not h
        ]
        if repeated:
            raise AxisError(
                f"batch dimension {d} of {repeated[0].path} has one element, where others have "
                f"{size}: a {type(repeated[0].value).__name__} is not repeated. Remove its batch "
                f"dimensions from there on, or repeat it to {size} elements."
            )
        # Adjacent dimensions that the same arrays have become one, with the lanes of both.
        if groups and groups[-1].has == has and mergeable:
            groups[-1] = Group(groups[-1].size * size, has)
        else:
            groups.append(Group(size, has))
    return groups


def _is_sharded(a: Argument) -> bool:
    """Whether the type of the array says how it is sharded: then no dimensions are merged."""
    if a.is_container:
        return False
    sharding = getattr(jax.typeof(a.value), "sharding", None)
    return sharding is not None and any(entry is not None for entry in sharding.spec)


def run(
    one_example: Callable[..., list[Any]],
    arguments: Sequence[Argument],
    options: Mapping[str, Any],
    apart: bool = False,
) -> list[Any]:
    """Runs `one_example`, which takes and returns arrays, for all batch dimensions.

    With `apart`, each has its own vmap, as containers need it.
    """
    if any(isinstance(a.value, Ragged) for a in arguments):
        return _run_rows(one_example, arguments, options, apart)
    batch = broadcast_batch(arguments)
    groups = find_groups(arguments, batch, apart)
    values = [
        a.value
        if a.is_container
        else _with_shape(a.value, (*(g.size for g in groups if g.has[i]), *a.core_shape))
        for i, a in enumerate(arguments)
    ]
    if not groups:
        outs = one_example(*values)
    else:
        function = one_example
        for group, own in reversed(list(zip(groups, _by_group(groups, options), strict=True))):
            axes = tuple(0 if h else None for h in group.has)
            function = vmap(function, axes, **own)
        outs = function(*values)
    kept = len(groups)
    return [x if apart else _with_shape(x, (*batch, *np.shape(x)[kept:])) for x in outs]


def _run_rows(
    one_example: Callable[..., list[Any]],
    arguments: Sequence[Argument],
    options: Mapping[str, Any],
    apart: bool,
) -> list[Any]:
    """Does the same, where the outermost batch dimension is that of the rows of a `Ragged`."""
    first = next(a for a in arguments if isinstance(a.value, Ragged))
    ndim, rows = len(first.batch), len(first.value)
    axes, values, lines = [], [], []
    for a in arguments:
        deepest = len(a.batch) == ndim
        own = a.batch[0] if deepest else 1
        mark = ""
        if len(a.batch) > ndim or (isinstance(a.value, Ragged) and not deepest):
            mark = f"   <- its batch dimensions are {len(a.batch)}, not at most {ndim}"
        elif own not in (1, rows):
            mark = f"   <- {own} in batch dimension {-ndim}, where there are {rows} rows"
        lines.append(f"  {a.path}: {_split(a)}{mark}")
        mapped = isinstance(a.value, Ragged) or (deepest and own == rows)
        axes.append(0 if mapped else None)
        values.append(a.value if mapped or not deepest else a.value[0])
    if any("<-" in line for line in lines):
        raise AxisError(
            f"the rows of {first.path} are the outermost batch dimension, and the batch "
            "dimensions of the arguments do not broadcast with it:\n" + "\n".join(lines)
        )

    def one_row(*parts: Value) -> list[Any]:
        own = [Argument(a.path, x, a.core) for a, x in zip(arguments, parts, strict=True)]
        return run(one_example, own, _for_all(options), apart)

    return vmap(one_row, tuple(axes), **options)(*values)


def _for_all(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the options that each of several nested vmaps has."""
    return {k: v for k, v in options.items() if k in ("divergence", "small_matrices")}


def _by_group(groups: Sequence[Group], options: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the options of each vmap, so that together they run at most so many lanes."""
    lanes = options.get("batch_size")
    if not isinstance(lanes, int):  # "auto" is for the outermost
        return [options, *[_for_all(options) for _ in groups[1:]]]
    own = []
    # The innermost vmap has as many lanes at a time as fit, and those outside share what is left.
    for group in reversed(groups):
        own.append({**options, "batch_size": lanes})
        lanes = max(lanes // max(group.size, 1), 1)
    return own[::-1]


def _with_shape(x: Value, shape: tuple[int, ...]) -> Value:
    if np.shape(x) == shape:
        return x
    assert math.prod(np.shape(x)) == math.prod(shape)
    return jnp.reshape(x, shape)
