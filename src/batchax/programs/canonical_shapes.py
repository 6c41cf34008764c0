"""Operations that only move elements, in canonical form: often just another way to see a node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from batchax.jaxprs.words import Eqn
from batchax.programs.canonical import CanonicalProgram, rules
from batchax.programs.canonical_rules import aligned, spread
from batchax.programs.canonical_values import CanonicalValue, is_placed, typed


def _rev(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    (x,) = map(p.solid, args)
    by_dim = [d in eqn.params["dimensions"] and n != 1 for d, n in enumerate(x.shape)]
    if not any(by_dim):
        return [x]
    return aligned(p, eqn, "rev", [x], x.shape, by_dim=by_dim)


def _slice(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    return [_cut(p, eqn, args[0], list(zip(starts, limits, strides, strict=True)))]


def _cut(
    p: CanonicalProgram, eqn: Eqn, x: CanonicalValue, cuts: Sequence[tuple[Any, Any, Any]]
) -> CanonicalValue:
    """`x` between bounds; `cuts` has start, limit and stride of each dimension."""
    by_dim = [
        None if cut == (0, n, 1) else cut
        for cut, n in zip(cuts, x.shape, strict=True)
    ]  # fmt: skip
    if not any(by_dim):
        return x
    shape = [
        n if c is None else -((c[0] - c[1]) // c[2]) for c, n in zip(by_dim, x.shape, strict=True)
    ]
    (y,) = aligned(p, eqn, "slice", [x], shape, by_dim=by_dim)
    return y


def _split(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    (x,), axis, start, outs = args, eqn.params["axis"], 0, []
    for size in eqn.params["sizes"]:
        cuts = [(0, n, 1) for n in x.shape]
        cuts[axis] = (start, start + size, 1)
        outs.append(_cut(p, eqn, x, cuts))
        start += size
    return outs


def _pad(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    x, fill = args
    shape, _ = typed(eqn.outvars[0].aval)
    by_dim = [tuple(map(int, c)) for c in eqn.params["padding_config"]]
    if shape == x.shape and all(c == (0, 0, 0) for c in by_dim):
        return [x]
    return aligned(p, eqn, "pad", [x, spread(fill, len(shape))], shape, by_dim=by_dim)


def _concatenate(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    shape, _ = typed(eqn.outvars[0].aval)
    by_dim = [d == eqn.params["dimension"] for d in range(len(shape))]
    return aligned(p, eqn, "concatenate", args, shape, by_dim=by_dim)


def _stack(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    shape, _ = typed(eqn.outvars[0].aval)
    along = eqn.params["axis"] % len(shape)
    dims: list[int | None] = list(range(len(shape) - 1))
    dims.insert(along, None)
    one = [1 if d == along else n for d, n in enumerate(shape)]
    args = [x.see(dims, one, eqn) for x in args]
    if len(args) == 1:
        return args
    by_dim = [d == along for d in range(len(shape))]
    return aligned(p, eqn, "concatenate", args, shape, by_dim=by_dim)


def _transpose(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    order = list(map(int, eqn.params["permutation"]))
    return [args[0].see(order, [args[0].shape[d] for d in order], eqn)]


def _squeeze(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    (x,) = args
    gone = [d % len(x.shape) for d in eqn.params["dimensions"]]
    kept = [d for d in range(len(x.shape)) if d not in gone]
    return [x.see(kept, [x.shape[d] for d in kept], eqn)]


def _broadcast_in_dim(
    p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]
) -> list[CanonicalValue]:
    if len(args) > 1 or is_placed(eqn.params.get("sharding")):
        return p.opaque(eqn, args)
    (x,), shape = args, eqn.params["shape"]
    dims: list[int | None] = [None] * len(shape)
    for d, at in enumerate(eqn.params["broadcast_dimensions"]):
        dims[int(at)] = d
    return [x.see(dims, shape, eqn)]


def _iota(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    if args or is_placed(eqn.params.get("sharding")):
        return p.opaque(eqn, args)
    shape, dtype = typed(eqn.outvars[0].aval)
    along = eqn.params["dimension"]
    if shape[along] == 1:
        return p.opaque(eqn, args)
    node = p.node(eqn, "iota", (), (), shape[along : along + 1], dtype)
    axes = tuple(0 if d == along else None for d in range(len(shape)))
    return [CanonicalValue(node, axes, shape, eqn)]


def _reshape(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    x, (shape, dtype) = args[0], typed(eqn.outvars[0].aval)
    sized = all(isinstance(n, int) and n > 0 for n in (*x.shape, *shape))
    fits = sized and math.prod(x.shape) == math.prod(shape)  # JAX finds out when it is compiled
    if len(args) > 1 or not fits or is_placed(eqn.params.get("sharding")):
        return p.opaque(eqn, args)
    if eqn.params["dimensions"] is not None:
        order = eqn.params["dimensions"]
        x = x.see(order, [x.shape[d] for d in order], eqn)
    runs = _runs(x.shape, shape)
    if all(len(before) == len(after) == 1 for before, after in runs):
        dims: list[int | None] = [None] * len(shape)
        for (before,), (after,) in runs:
            dims[after] = before
        return [x.see(dims, shape, eqn)]
    x = p.solid(
        x, [d for before, after in runs for d in before if (len(before), len(after)) != (1, 1)]
    )
    # A run that is one repeated dimension before and after stays a way to see the node.
    real = [r for r in runs if x.axes[r[0][0]] is not None]
    real.sort(key=lambda run: min(x.axes[d] for d in run[0]))  # pyright: ignore
    params = tuple(
        (tuple(x.axes[d] for d in before), tuple(shape[d] for d in after)) for before, after in real
    )
    order = [d for _, after in real for d in after]
    node = p.node(eqn, "reshape", params, [(x.node,)], [shape[d] for d in order], dtype)
    axes = tuple(order.index(d) if d in order else None for d in range(len(shape)))
    return [CanonicalValue(node, axes, shape, eqn)]


def _runs(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dimensions, ones left out, that a reshape turns into each other."""
    left = [d for d, n in enumerate(before) if n != 1]
    right = [d for d, n in enumerate(after) if n != 1]
    runs = []
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        m, n = before[a[0]], after[b[0]]
        while m != n:
            if m < n:
                a.append(left.pop(0))
                m *= before[a[-1]]
            else:
                b.append(right.pop(0))
                n *= after[b[-1]]
        runs.append((a, b))
    return runs


rules.update(
    rev=_rev,
    slice=_slice,
    split=_split,
    pad=_pad,
    concatenate=_concatenate,
    stack=_stack,
    transpose=_transpose,
    squeeze=_squeeze,
    broadcast_in_dim=_broadcast_in_dim,
    iota=_iota,
    reshape=_reshape,
)
