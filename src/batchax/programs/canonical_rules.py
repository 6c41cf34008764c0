"""Operations whose operands and results have their dimensions in common.

Element by element, along an axis, or over some: each becomes a node that is the same wherever
the axes of its operands are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from batchax.jaxprs.words import Eqn
from batchax.programs.canonical import CanonicalProgram, rules, rules_by_fact
from batchax.programs.canonical_values import CanonicalValue, is_placed, typed

COMMUTING = frozenset({"add", "mul", "max", "min", "and", "or", "xor", "eq", "ne"})
RENAMED = {"add_any": "add"}
TURNED = {"gt": "lt", "ge": "le"}
IDENTITIES = ("copy", "name", "stop_gradient")
CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
REDUCTIONS = tuple(f"reduce_{name}" for name in ("sum", "prod", "max", "min", "and", "or", "xor"))
INDEX_REDUCTIONS = ("argmax", "argmin")


def aligned(
    p: CanonicalProgram,
    eqn: Eqn,
    name: str,
    args: Sequence[CanonicalValue],
    shape: Sequence[Any],
    *,
    params: Hashable = (),
    by_dim: Sequence[Hashable] | None = None,
    sizes: bool = True,
    commutes: bool = False,
    several: bool = False,
) -> list[CanonicalValue]:
    """An operation whose operands and results have their dimensions in common.

    Args:
      p: the program being read.
      eqn: the equation.
      name: what the node is called.
      args: the operands, all of the rank of `shape`.
      shape: the shape of each result.
      params: what else decides what the operation does.
      by_dim: what it does along each dimension, if that differs.
      sizes: whether the size of a dimension along which an operand is broadcast matters.
      commutes: whether the operands may change places.
      several: whether there are several results.
    """

    def form(args: Sequence[CanonicalValue]) -> tuple[Any, list[int]]:
        order = _order(args, shape)
        refs = tuple(
            (
                x.node,
                tuple(-1 if x.axes[d] is None else x.axes[d] for d in order),
                tuple(x.shape[d] for d in order) if sizes else (),
            )
            for x in args
        )
        return refs, order

    refs, order = form(args)
    if commutes:
        refs, order = min((refs, order), form(args[::-1]), key=lambda f: (str(f[0]), f[1]))
    along = () if by_dim is None else tuple(by_dim[d] for d in order)
    kept = [d for d in order if shape[d] != 1]
    axes = tuple(kept.index(d) if d in kept else None for d in range(len(shape)))
    _, dtype = typed(eqn.outvars[0].aval)
    kept_shape = [shape[d] for d in kept]
    node = p.node(eqn, name, (params, along), refs, kept_shape, dtype)
    if not several:
        return [CanonicalValue(node, axes, tuple(shape), eqn)]
    parts = [
        p.leaf("result", i, [node], kept_shape, typed(v.aval)[1]) for i, v in enumerate(eqn.outvars)
    ]
    return [CanonicalValue(part, axes, tuple(shape), eqn) for part in parts]


def _order(args: Sequence[CanonicalValue], shape: Sequence[Any]) -> list[int]:
    """The dimensions that matter, in the order in which the nodes of the operands have them."""
    order: list[int] = []
    for x in args:
        seen = [(a, d) for d, a in enumerate(x.axes) if a is not None and d not in order]
        order += [d for _, d in sorted(seen)]
    mattering = (d for d in range(len(shape)) if any(s != 1 for s in (shape[d], *_sizes(args, d))))
    return order + [d for d in mattering if d not in order]


def _sizes(args: Sequence[CanonicalValue], d: int) -> list[Any]:
    return [x.shape[d] for x in args]


def spread(x: CanonicalValue, rank: int) -> CanonicalValue:
    """A scalar as an array of ones; anything else as it is."""
    return x if len(x.shape) == rank else CanonicalValue(x.node, (None,) * rank, (1,) * rank, x.eqn)


def others(p: CanonicalProgram, eqn: Eqn, *left_out: str) -> Hashable:
    params = {k: v for k, v in eqn.params.items() if k not in left_out}
    for name in ("sharding", "out_sharding"):
        if name in params and not is_placed(params[name]):
            params[name] = None
    return p.parameters(params, (), [])


def _elementwise(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    shape, dtype = typed(eqn.outvars[0].aval)
    name: str = eqn.primitive.name
    name = RENAMED.get(name, name)
    unplaced = not is_placed(eqn.params.get("sharding"))
    if name == "convert_element_type" and unplaced and typed(eqn.invars[0].aval)[1] == dtype:
        return args
    if name in TURNED:
        name, args = TURNED[name], args[::-1]
    args = [spread(x, len(shape)) for x in args]
    # Where no operand has an axis, the program repeated one and works on each copy.
    alone = [d for d in range(len(shape)) if all(x.axes[d] is None for x in args)]
    args = [p.solid(x, alone) for x in args]
    params = others(p, eqn, "weak_type")
    commutes = name in COMMUTING
    return aligned(p, eqn, name, args, shape, params=params, sizes=False, commutes=commutes)


def _identity(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    return args


def _cumulative(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    (x,) = map(p.solid, args)
    if x.shape[eqn.params["axis"]] == 1:
        return [x]
    by_dim = [d == eqn.params["axis"] for d in range(len(x.shape))]
    params = others(p, eqn, "axis")
    return aligned(p, eqn, eqn.primitive.name, [x], x.shape, params=params, by_dim=by_dim)


def _reduction(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    (x,) = map(p.solid, args)
    name, gone = eqn.primitive.name, set(map(int, eqn.params["axes"]))
    kept = [d for d in range(len(x.shape)) if d not in gone]
    if name in REDUCTIONS and all(x.shape[d] == 1 for d in gone):
        return [x.see(kept, [x.shape[d] for d in kept], eqn)]
    shape = [1 if d in gone else s for d, s in enumerate(x.shape)]
    by_dim = [d in gone for d in range(len(shape))]
    params = others(p, eqn, "axes")
    (y,) = aligned(p, eqn, name, [x], shape, params=params, by_dim=by_dim)
    return [y.see(kept, [shape[d] for d in kept], eqn)]


def _sort(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    args = list(map(p.solid, args))
    shape = args[0].shape
    by_dim = [d == eqn.params["dimension"] for d in range(len(shape))]
    params, several = others(p, eqn, "dimension"), len(args) > 1
    return aligned(p, eqn, "sort", args, shape, params=params, by_dim=by_dim, several=several)


for _names, _rule in (
    (IDENTITIES, _identity),
    (CUMULATIVE, _cumulative),
    ((*REDUCTIONS, *INDEX_REDUCTIONS), _reduction),
):
    rules.update(dict.fromkeys(_names, _rule))
rules["sort"] = _sort
rules_by_fact["elementwise"] = _elementwise
