"""The rules of the canonical form of jaxprs, and which results are the same in several of them.

- Operations element by element, along an axis, or over some: each becomes a node that is the same
  wherever the axes of its operands are. So do contractions and convolutions.
- Operations that only move elements are often just another view of a node.
- A call is the jaxpr that it calls. A body of a loop or branch is read like the jaxpr around it.
  Its operands from there enter it as *captured*, in whatever order they are passed; a captured node
  differs from the one outside, since a loop computes from it in each step. A ``shard_map`` is the
  jaxpr that it calls, between nodes that cut arrays into shards and join them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from batchax import _compat
from batchax.analysis.canonical import (
    CanonicalProgram,
    CanonicalValue,
    Table,
    is_placed,
    rules,
    rules_by_fact,
    typed,
    whole,
    without_ones,
)
from batchax.jaxprs.bodies import Body, bodies_of
from batchax.jaxprs.primitive_facts import body_parameter
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn

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
    """Reads an operation whose operands and results share their dimensions.

    All `args` have the rank of `shape`, the shape of each result. `by_dim` is what it does along
    each dimension, if that differs, and `sizes` whether the size of a broadcast dimension matters.
    `commutes`: operands may swap.
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
    # For commuting operands, take the smaller of both orders.
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
    """Orders the dimensions that matter as the operands' nodes have them."""
    # The result is the same for transposed operands: dimensions follow the nodes, not the program.
    order: list[int] = []
    for x in args:
        seen = [(a, d) for d, a in enumerate(x.axes) if a is not None and d not in order]
        order += [d for _, d in sorted(seen)]
    mattering = (d for d in range(len(shape)) if any(s != 1 for s in (shape[d], *_sizes(args, d))))
    return order + [d for d in mattering if d not in order]


def _sizes(args: Sequence[CanonicalValue], d: int) -> list[Any]:
    return [x.shape[d] for x in args]


def spread(x: CanonicalValue, rank: int) -> CanonicalValue:
    """Gives a scalar `rank` dimensions of size one."""
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
    # x > y is y < x.
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
    # Over dimensions of size one a sum is a squeeze. An index reduction is not: it returns zeros.
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
    """Slices `x`; `cuts` has start, limit, and stride of each dimension."""
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


# A stack is a concatenation of slices of size one.
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
        # Along a dimension of size one an iota is zero.
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
    """Splits a reshape into the shortest runs of dimensions that map to each other."""
    left = [d for d, n in enumerate(before) if n != 1]
    right = [d for d, n in enumerate(after) if n != 1]
    runs = []
    while left and right:
        a, b = [left.pop(0)], [right.pop(0)]
        m, n = before[a[0]], after[b[0]]
        # Extend the smaller side until both have the same number of elements.
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


def _dot_general(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    (contracted, batch), precision = eqn.params["dimension_numbers"], eqn.params["precision"]
    both = isinstance(precision, tuple) and len(precision) == 2
    out_shape, dtype = typed(eqn.outvars[0].aval)
    args = list(map(p.solid, args))
    params = others(p, eqn, "dimension_numbers", "precision", "preferred_element_type")
    forms = []
    # Both orders of the operands: the smaller key is taken.
    for i, j in ((0, 1), (1, 0)):
        x, y = args[i], args[j]
        pairs = [
            sorted(
                (x.axes[a], y.axes[b]) for a, b in zip(d[i], d[j], strict=True) if x.shape[a] != 1
            )
            for d in (contracted, batch)
        ]
        precisions = (precision[i], precision[j]) if both else precision
        key = (tuple(map(tuple, pairs)), p.parameters(precisions, (), []))
        forms.append(((x.node, y.node, str(key)), key, i, j))
    _, key, i, j = min(forms, key=lambda form: form[0])
    x, y = args[i], args[j]
    used = [{pair[k] for pairs in key[0] for pair in pairs} for k in (0, 1)]
    # The axes of the node: of the batch, of the one operand, of the other.
    labels: list[tuple[Any, Any]] = [("batch", a) for a, _ in key[0][1]]
    for k, z in ((i, x), (j, y)):
        own = sorted(a for a in z.axes if a is not None)
        labels += [(k, a) for a in own if a not in used[0 if k == i else 1]]
    rest = [
        [d for d in range(len(z.shape)) if d not in (*contracted[k], *batch[k])]
        for k, z in enumerate(args)
    ]
    seen = [("batch", x.axes[d]) for d in batch[i]]
    seen += [(k, args[k].axes[d]) for k in (0, 1) for d in rest[k]]
    axes = tuple(None if a is None else labels.index((k, a)) for k, a in seen)
    shape = [out_shape[axes.index(n)] for n in range(len(labels))]
    refs = [(x.node,), (y.node,)]
    node = p.node(eqn, "dot_general", (key, params), refs, shape, dtype)
    return [CanonicalValue(node, axes, out_shape, eqn)]


def _convolution(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    out_shape, dtype = typed(eqn.outvars[0].aval)
    numbers = eqn.params["dimension_numbers"]
    refs = []
    for x, spec in zip(map(p.solid, args), (numbers.lhs_spec, numbers.rhs_spec), strict=True):
        refs.append((x.node, tuple(x.axes[d] for d in spec), tuple(x.shape[d] for d in spec)))
    shape = [out_shape[d] for d in numbers.out_spec]
    params = others(p, eqn, "dimension_numbers")
    name = eqn.primitive.name
    node = p.node(eqn, name, (params, tuple(shape)), refs, without_ones(shape), dtype)
    back = [numbers.out_spec.index(d) for d in range(len(shape))]
    return [whole(node, shape).see(back, out_shape, eqn)]


rules.update(dot_general=_dot_general, conv_general_dilated=_convolution)


_WITH_RULES = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}
"""Calls with custom rules for derivatives or batches, and the parameter with their jaxpr."""


def _call(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    holder = _WITH_RULES.get(eqn.primitive.name) or body_parameter(eqn.primitive, eqn.params)
    return p.read(_compat.close(eqn.params[holder]), args)


def _captured(
    p: CanonicalProgram, x: CanonicalValue, where: Hashable, reads: Sequence[int]
) -> CanonicalValue:
    """Passes `x` into the body `where`, with the same view."""
    node = p.table.nodes[x.node]
    inside = p.leaf("captured", where, [x.node, *reads], node.shape, node.dtype)
    return CanonicalValue(inside, x.axes, x.shape, x.eqn)


def _loop(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    bodies = bodies_of(eqn)
    body = bodies[-1]
    entering = [p.plain(args[i]) for i in (*body.carry_operands, *body.sliced_operands)]
    reads = [x.node for x in entering]
    key: list[Hashable] = [(name, eqn.params.get(name)) for name in _HOW_IT_RUNS]
    inner: list[int] = []
    # The carry enters at a node of the loop's depth, so equal bodies have equal nodes.
    for each in bodies:
        # Constants keep the view that they have outside.
        def inputs(level: int, each: Body = each) -> list[CanonicalValue]:
            avals = [v.aval for v in each.jaxpr.invars][each.same :]
            return [
                *(_captured(p, args[i], level, reads) for i in each.operands[: each.same]),
                *(p.entry("carried", (level, i), a, reads) for i, a in enumerate(avals)),
            ]

        outs, effects = p.body(_compat.close(each.program), inputs)
        nodes = [p.plain(y).node for y in outs]
        inner += nodes
        # The key holds the nodes of the body's results, and not its equations.
        key.append((each.carried, tuple(nodes), effects))
    return p.results(eqn, p.operation(eqn, tuple(key), entering, inner))


_HOW_IT_RUNS = ("length", "reverse", "unroll")


def _cond(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    which, operands = p.plain(args[0]), args[1:]
    key: list[Hashable] = []
    inner: list[int] = []
    for number, branch in enumerate(bodies_of(eqn)):

        def inputs(level: int, number: int = number) -> list[CanonicalValue]:
            return [_captured(p, x, (level, number), [which.node]) for x in operands]

        outs, effects = p.body(branch.program, inputs)
        nodes = [p.plain(y).node for y in outs]
        inner += nodes
        key.append((tuple(nodes), effects))
    return p.results(eqn, p.operation(eqn, tuple(key), [which], inner))


def _shard_map(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    where = value_key(eqn.params["mesh"]), value_key(eqn.params["newly_manual_axes"])
    program = _compat.close(eqn.params["jaxpr"])

    def key(spec: Sequence[Hashable], aval: Aval) -> Hashable:
        return where, (*spec, *[None] * (len(aval.shape) - len(spec)))

    inputs = [
        p.entry("shard", key(spec, v.aval), v.aval, [p.plain(x).node]) if any(spec) else x
        for spec, v, x in zip(eqn.params["in_specs"], program.jaxpr.invars, args, strict=True)
    ]
    results = []
    # A node for each result: unused values are gone, in whatever order they are returned.
    for spec, v, x in zip(
        eqn.params["out_specs"], eqn.outvars, p.read(program, inputs), strict=True
    ):
        shape, dtype = typed(v.aval)
        node = (p.plain(x).node,)
        made = p.node(eqn, "shard_map", key(spec, v.aval), [node], without_ones(shape), dtype)
        results.append(whole(made, shape))
    return results


def _sum_over_devices(
    p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]
) -> list[CanonicalValue]:
    # Where types say what varies over the mesh it is another primitive, that does the same.
    groups = value_key(eqn.params.get("axis_index_groups"))
    nodes = [p.plain(x).node for x in args]
    avals = [typed(v.aval) for v in eqn.outvars]
    return [
        whole(p.node(eqn, "psum", (eqn.params["axes"], groups), [(n,)], without_ones(s), d), s)
        for n, (s, d) in zip(nodes, avals, strict=True)
    ]


def _reshard(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    # Of what a `shard_map` closes over only the type changes, if types say nothing of the mesh.
    return p.opaque(eqn, args) if is_placed(eqn.params["dst_sharding"]) else args


rules_by_fact.update(is_plain_call=_call, again=_call)
rules.update(dict.fromkeys(_WITH_RULES, _call), scan=_loop, cond=_cond, shard_map=_shard_map)
rules["while"] = _loop
# Only the type of a `pvary` says that it may differ between devices.
rules.update(psum=_sum_over_devices, psum_invariant=_sum_over_devices, pvary=_identity)
rules.update(reshard=_reshard)


def canonical(table: Table, program: ClosedJaxpr) -> CanonicalProgram:
    return CanonicalProgram(table, _compat.without_dead(program))


def same_results(programs: Sequence[ClosedJaxpr]) -> list[bool]:
    """Returns for each result of these programs whether all compute it alike."""
    table = Table()
    outputs = [canonical(table, program).outputs for program in programs]
    return [len(set(nodes)) == 1 for nodes in zip(*outputs, strict=True)]
