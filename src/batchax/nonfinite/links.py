"""The way that what is not finite takes from value to value, followed for a whole program at once.

While a program is evaluated, one number is computed of each value, the greatest of its magnitudes,
and what it was made of is written down. When origins are asked for, all values on the way are
looked at together: each points to the operand that is to blame, and pointers are followed by
doubling (Wyllie 1979), in as many rounds as the length of the way has bits. To mark each result
when it is made took 30 equations for one of the user's, and as much longer to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.words import Value

FINITE, INFINITE, NAN = 0, 1, 2
KIND, PLACE, TURNED, FIRST_LOOP = 0, 1, 2, 3
"""What the integers of an origin are: the kind of value; the place it came from; of an infinity
that became a NaN, where it did; and for each loop around the place, the iteration."""

_MOST_PARENTS = 4  # of a link: the table of them is as wide as the widest


@dataclass(eq=False)
class Link:
    """A value on the way to a result.

    Attributes:
      worst: the bits of the greatest magnitude in it, NaN if there is one. None if its origin is
        known, or if it stands for several operands, of which it is the worst.
      parents: the values that it was made of.
      number: of the place that made it.
      iterations: of the loops around that, outermost first.
      origin: where it came from, once that has been asked.
    """

    worst: Any
    parents: tuple[Link, ...] = ()
    number: int = 0
    iterations: tuple[Any, ...] = ()
    origin: Any = None


@dataclass(frozen=True)
class Lanes:
    """The lanes of a program that was batched, in which each value has a mark for each lane.

    Attributes:
      size: The number of lanes.
      axis_of: Says where a result of an equation, or a value of a type, has the batch axis; None
        if it has none, or if that is not known.
    """

    size: int
    axis_of: Callable[[Any, Any], int | None]


def link(
    x: Value,
    number: int,
    iterations: tuple[Any, ...] = (),
    parents: Sequence[Link] = (),
    axis: int | None = None,
    lanes: Lanes | None = None,
) -> Link:
    """The link of a value that was made at a place, of others."""
    while len(parents) > _MOST_PARENTS:
        groups = range(0, len(parents), _MOST_PARENTS)
        parents = [Link(None, tuple(parents[k : k + _MOST_PARENTS])) for k in groups]
    if axis is None:
        worst = _worst(x)
        worst = worst if lanes is None else jnp.broadcast_to(worst, (lanes.size,))
    else:
        worst = jax.vmap(_worst, axis)(x)
    return Link(worst, tuple(parents), number, iterations)


def _worst(x: Value) -> Value:
    """The greatest magnitude in a value, as bits.

    Bits without the sign are in the order of magnitudes, infinity and NaN last. Of floats a maximum
    would be lost: that of XLA for CPUs (0.10.2, 0.12) passes over NaN in large arrays.
    """
    if jnp.iscomplexobj(x):
        x = jnp.maximum(_magnitude(x.real), _magnitude(x.imag))
    else:
        x = _magnitude(x)
    if has_elements(x):
        return lax.reduce_max(x, tuple(range(x.ndim))) if x.ndim else x
    return jnp.max(x, initial=0)


def _magnitude(x: Value) -> Value:
    """The bits of floats without the sign; those of small floats as of float32."""
    x = x.astype(np.float32) if x.dtype.itemsize < 4 else x
    return lax.bitcast_convert_type(x, _bits(x.dtype)) << 1


def _bits(dtype: Any) -> Any:
    return np.dtype(f"uint{8 * dtype.itemsize}")


def kind_of(x: Value) -> Any:
    """Whether a value has a NaN, else an infinity, or all of it is finite."""
    return _kinds(_worst(x))


def has_elements(x: Any) -> bool:
    """Whether a value, or a variable's type, has elements for certain: its sizes may be symbols."""
    return all(isinstance(n, int) and n > 0 for n in x.shape)


def nowhere(depth: int, lanes: Lanes | None = None) -> Any:
    """The origin of what is finite, in a program with loops nested so deep."""
    shape = () if lanes is None else (lanes.size,)
    return jnp.zeros((*shape, FIRST_LOOP + depth), np.int32)


def find_origins(links: Iterable[Link], depth: int, lanes: Lanes | None = None) -> None:
    """Finds the origins of some values, for each of the lanes if there are any: they have them."""
    asked = [x for x in dict.fromkeys(links) if x.origin is None]
    if not asked:
        return
    order = _on_the_way(asked)
    roots = [x for x in order if x.origin is not None]
    by_type: dict[Any, list[Link]] = {}
    for x in order:
        if x.origin is None and x.worst is not None:
            by_type.setdefault(x.worst.dtype, []).append(x)
    joints = [x for x in order if x.origin is None and x.worst is None]
    made = [x for alike in by_type.values() for x in alike]
    at = {x: k for k, x in enumerate([*made, *roots, *joints])}
    every = made, roots, joints, asked

    def find(worsts: list[list[Any]], origins: list[Any]) -> Any:
        return _found(every, at, depth, _lengths(order), worsts, origins)

    worsts = [[x.worst for x in alike] for alike in by_type.values()]
    rows = (find if lanes is None else jax.vmap(find))(worsts, [x.origin for x in roots])
    for k, x in enumerate(asked):
        x.origin = rows[..., k, :]


def _found(
    every: tuple[Sequence[Link], ...],
    at: dict[Link, int],
    depth: int,
    lengths: dict[Link, int],
    worsts: list[list[Any]],
    origins: list[Any],
) -> Any:
    """The origins of the links that are asked for."""
    made, roots, joints, asked = every
    kinds = [_kinds(jnp.stack(alike)) for alike in worsts]
    kinds += [jnp.stack([origin[KIND] for origin in origins])] if origins else []
    kind = jnp.concatenate(kinds)
    for x in joints:  # in order: a joint of joints comes after these
        parents = np.array([at[p] for p in x.parents])
        kind = jnp.append(kind, kind[parents].max())
    blamed, has_parent = _blamed([*made, *roots, *joints], at, kind)
    numbers = jnp.asarray([x.number for x in at], np.int32)
    turned = jnp.where(has_parent & (kind == NAN) & (kind[blamed] < NAN), numbers, 0)
    for _ in range(max(lengths.values()).bit_length()):
        turned = jnp.where(turned > 0, turned, turned[blamed])
        blamed = blamed[blamed]
    own = [_row(x, depth) for x in made] + origins
    own += [nowhere(depth)] * len(joints)
    places = np.array([at[x] for x in asked])
    kind, turned = kind[places], turned[places]
    rows = jnp.stack(own)[blamed[places]]
    rows = rows.at[:, KIND].set(kind)
    rows = rows.at[:, TURNED].set(jnp.where(turned > 0, turned, rows[:, TURNED]))
    return jnp.where(kind[:, None] > 0, rows, 0)


def _on_the_way(links: Iterable[Link]) -> list[Link]:
    """The links that lead to some, parents first, up to those whose origin is known."""
    order: dict[Link, None] = {}
    stack = [(x, False) for x in links]
    while stack:  # not by recursion: programs are long
        x, after_parents = stack.pop()
        if x in order:
            continue
        if after_parents or x.origin is not None or not x.parents:
            order[x] = None
            continue
        stack.append((x, True))
        stack += [(p, False) for p in x.parents]
    return list(order)


def _lengths(order: Iterable[Link]) -> dict[Link, int]:
    """For each link, of the longest way to it."""
    lengths: dict[Link, int] = {}
    for x in order:
        before = () if x.origin is not None else x.parents
        lengths[x] = 1 + max((lengths[p] for p in before), default=0)
    return lengths


def _blamed(order: Sequence[Link], at: dict[Link, int], kind: Any) -> tuple[Any, Any]:
    """For each link the first of its worst parents, or itself; and whether a parent is to blame."""
    parents = [() if x.origin is not None else x.parents for x in order]
    width = max(1, *map(len, parents))
    nobody = len(order)  # whose kind is finite
    table = np.full((len(order), width), nobody)
    for k, of in enumerate(parents):
        table[k, : len(of)] = [at[p] for p in of]
    kinds = jnp.append(kind, FINITE)[table]
    first = jnp.argmax(kinds, axis=1)[:, None]
    of_worst = jnp.take_along_axis(kinds, first, axis=1)[:, 0]
    chosen = jnp.take_along_axis(jnp.asarray(table), first, axis=1)[:, 0]
    has_parent = of_worst > FINITE
    return jnp.where(has_parent, chosen, np.arange(len(order))), has_parent


def _kinds(worst: Any) -> Any:
    bits = worst.dtype
    infinity = np.array(np.inf, f"float{8 * bits.itemsize}").view(bits) << bits.type(1)
    kind = jnp.where(worst > infinity, NAN, jnp.where(worst == infinity, INFINITE, FINITE))
    return kind.astype(np.int32)


def _row(x: Link, depth: int) -> Any:
    """The origin of what was made at a link's place. Its kind is entered later."""
    rest = [-1] * (depth - len(x.iterations))
    entries = [0, x.number, 0, *x.iterations, *rest]
    if not any(isinstance(entry, jax.Array) for entry in entries):
        return np.array(entries, np.int32)
    return jnp.stack([jnp.asarray(entry, np.int32) for entry in entries])
