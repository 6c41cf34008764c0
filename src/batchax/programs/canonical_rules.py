"""How operations see their operands, by family: which axes they name, and which they carry along.

Each family turns an equation into a node that is the same wherever the axes of the operands are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

from batchax.programs.canonical import Program, Value, rules, typed, whole, without_ones

ELEMENTWISE = """
    abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj
    convert_element_type cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor
    imag integer_pow is_finite lgamma log log1p logistic neg not
    population_count real reduce_precision round rsqrt sign sin sinh sqrt
    square tan tanh
    add add_any and atan2 complex div eq ge gt igamma igamma_grad_a igammac le lt
    max min mul mulhi ne nextafter or polygamma pow regularized_incomplete_beta rem
    shift_left shift_right_arithmetic shift_right_logical sub xor zeta
    clamp select_n
""".split()

COMMUTING = frozenset({"add", "mul", "max", "min", "and", "or", "xor", "eq", "ne"})
RENAMED = {"add_any": "add"}
TURNED = {"gt": "lt", "ge": "le"}
IDENTITIES = ("copy", "copy_p", "name", "stop_gradient")
CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
REDUCTIONS = tuple(f"reduce_{name}" for name in ("sum", "prod", "max", "min", "and", "or", "xor"))
INDEX_REDUCTIONS = ("argmax", "argmin")


def aligned(
    p: Program,
    eqn: Any,
    name: str,
    args: Sequence[Value],
    shape: Sequence[Any],
    *,
    params: Hashable = (),
    by_dim: Sequence[Hashable] | None = None,
    sizes: bool = True,
    commutes: bool = False,
    results: int | None = None,
) -> list[Value]:
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
      results: how many there are, if there may be several.
    """

    def form(args: Sequence[Value]) -> tuple[Any, list[int]]:
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
    if results is None:
        return [Value(node, axes, tuple(shape), eqn)]
    parts = [
        p.leaf("result", i, [node], kept_shape, typed(v.aval)[1]) for i, v in enumerate(eqn.outvars)
    ]
    return [Value(part, axes, tuple(shape), eqn) for part in parts]


def _order(args: Sequence[Value], shape: Sequence[Any]) -> list[int]:
    """The dimensions that matter, in the order in which the nodes of the operands have them."""
    order: list[int] = []
    for x in args:
        seen = [(a, d) for d, a in enumerate(x.axes) if a is not None and d not in order]
        order += [d for _, d in sorted(seen)]
    mattering = (d for d in range(len(shape)) if any(s != 1 for s in (shape[d], *_sizes(args, d))))
    return order + [d for d in mattering if d not in order]


def _sizes(args: Sequence[Value], d: int) -> list[Any]:
    return [x.shape[d] for x in args]


def _spread(x: Value, rank: int) -> Value:
    """A scalar as an array of ones; anything else as it is."""
    return x if len(x.shape) == rank else Value(x.node, (None,) * rank, (1,) * rank, x.eqn)


def _others(p: Program, eqn: Any, *left_out: str) -> Hashable:
    return p.parameters({k: v for k, v in eqn.params.items() if k not in left_out}, (), [])


def _elementwise(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    shape, dtype = typed(eqn.outvars[0].aval)
    name = RENAMED.get(eqn.primitive.name, eqn.primitive.name)
    if name == "convert_element_type":
        unplaced = eqn.params.get("sharding") is None
        if unplaced and typed(eqn.invars[0].aval)[1] == dtype:
            return args
    if name in TURNED:
        name, args = TURNED[name], args[::-1]
    args = [_spread(x, len(shape)) for x in args]
    # Where no operand has an axis, the program repeated one and works on each copy.
    alone = [d for d in range(len(shape)) if all(x.axes[d] is None for x in args)]
    args = [p.solid(x, alone) for x in args]
    params = _others(p, eqn, "weak_type")
    commutes = name in COMMUTING
    return aligned(p, eqn, name, args, shape, params=params, sizes=False, commutes=commutes)


def _identity(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    return args


def _cumulative(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    (x,) = map(p.solid, args)
    by_dim = [d == eqn.params["axis"] for d in range(len(x.shape))]
    params = _others(p, eqn, "axis")
    return aligned(p, eqn, eqn.primitive.name, [x], x.shape, params=params, by_dim=by_dim)


def _reduction(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    (x,) = map(p.solid, args)
    name, gone = eqn.primitive.name, set(map(int, eqn.params["axes"]))
    kept = [d for d in range(len(x.shape)) if d not in gone]
    if name in REDUCTIONS and all(x.shape[d] == 1 for d in gone):
        return [x.see(kept, [x.shape[d] for d in kept], eqn)]
    shape = [1 if d in gone else s for d, s in enumerate(x.shape)]
    by_dim = [d in gone for d in range(len(shape))]
    params = _others(p, eqn, "axes")
    (y,) = aligned(p, eqn, name, [x], shape, params=params, by_dim=by_dim)
    return [y.see(kept, [shape[d] for d in kept], eqn)]


def _sort(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    args = list(map(p.solid, args))
    shape = args[0].shape
    by_dim = [d == eqn.params["dimension"] for d in range(len(shape))]
    params, several = _others(p, eqn, "dimension"), len(args) if len(args) > 1 else None
    return aligned(p, eqn, "sort", args, shape, params=params, by_dim=by_dim, results=several)


def _rev(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    (x,) = map(p.solid, args)
    by_dim = [d in eqn.params["dimensions"] for d in range(len(x.shape))]
    return aligned(p, eqn, "rev", [x], x.shape, by_dim=by_dim)


def _slice(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    return [_cut(p, eqn, args[0], list(zip(starts, limits, strides, strict=True)))]


def _cut(p: Program, eqn: Any, x: Value, cuts: Sequence[tuple[Any, Any, Any]]) -> Value:
    """`x` between bounds; `cuts` has start, limit and stride of each dimension."""
    by_dim = [
        None if cut == (0, n, 1) else cut
        for cut, n in zip(cuts, x.shape, strict=True)
    ]  # fmt: skip
    if not any(by_dim):
        return x
    shape = [n if c is None else -((c[0] - c[1]) // c[2]) for c, n in zip(by_dim, x.shape)]
    (y,) = aligned(p, eqn, "slice", [x], shape, by_dim=by_dim)
    return y


def _split(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    (x,), axis, start, outs = args, eqn.params["axis"], 0, []
    for size in eqn.params["sizes"]:
        cuts: list[Any] = [(0, n, 1) for n in x.shape]
        cuts[axis] = (start, start + size, 1)
        outs.append(_cut(p, eqn, x, cuts))
        start += size
    return outs


def _pad(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    x, fill = args
    shape, _ = typed(eqn.outvars[0].aval)
    by_dim = [tuple(map(int, c)) for c in eqn.params["padding_config"]]
    return aligned(p, eqn, "pad", [x, _spread(fill, len(shape))], shape, by_dim=by_dim)


def _concatenate(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    shape, _ = typed(eqn.outvars[0].aval)
    by_dim = [d == eqn.params["dimension"] for d in range(len(shape))]
    return aligned(p, eqn, "concatenate", args, shape, by_dim=by_dim)


def _transpose(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    order = list(map(int, eqn.params["permutation"]))
    return [args[0].see(order, [args[0].shape[d] for d in order], eqn)]


def _squeeze(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    (x,) = args
    gone = [d % len(x.shape) for d in eqn.params["dimensions"]]
    kept = [d for d in range(len(x.shape)) if d not in gone]
    return [x.see(kept, [x.shape[d] for d in kept], eqn)]


def _broadcast_in_dim(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    if len(args) > 1 or eqn.params.get("sharding") is not None:
        return p.opaque(eqn, args)
    (x,), shape = args, eqn.params["shape"]
    dims: list[int | None] = [None] * len(shape)
    for d, at in enumerate(eqn.params["broadcast_dimensions"]):
        dims[int(at)] = d
    return [x.see(dims, shape, eqn)]


def _iota(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    if args or eqn.params.get("sharding") is not None:
        return p.opaque(eqn, args)
    shape, dtype = typed(eqn.outvars[0].aval)
    along = eqn.params["dimension"]
    if shape[along] == 1:
        return p.opaque(eqn, args)
    node = p.node(eqn, "iota", (), (), shape[along : along + 1], dtype)
    axes = tuple(0 if d == along else None for d in range(len(shape)))
    return [Value(node, axes, shape, eqn)]


def _reshape(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    x, (shape, dtype) = args[0], typed(eqn.outvars[0].aval)
    sized = all(isinstance(n, int) and n > 0 for n in (*x.shape, *shape))
    if len(args) > 1 or not sized or eqn.params.get("sharding") is not None:
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
    return [Value(node, axes, shape, eqn)]


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


def _dot_general(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    (contracted, batch), precision = eqn.params["dimension_numbers"], eqn.params["precision"]
    both = isinstance(precision, tuple) and len(precision) == 2
    out_shape, dtype = typed(eqn.outvars[0].aval)
    args = list(map(p.solid, args))
    params = _others(p, eqn, "dimension_numbers", "precision", "preferred_element_type")
    forms = []
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
    labels = [("batch", a) for a, _ in key[0][1]]
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
    return [Value(node, axes, out_shape, eqn)]


def _convolution(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    out_shape, dtype = typed(eqn.outvars[0].aval)
    numbers = eqn.params["dimension_numbers"]
    refs = []
    for x, spec in zip(map(p.solid, args), (numbers.lhs_spec, numbers.rhs_spec), strict=True):
        refs.append((x.node, tuple(x.axes[d] for d in spec), tuple(x.shape[d] for d in spec)))
    shape = [out_shape[d] for d in numbers.out_spec]
    params = _others(p, eqn, "dimension_numbers")
    name = eqn.primitive.name
    node = p.node(eqn, name, (params, tuple(shape)), refs, without_ones(shape), dtype)
    back = [numbers.out_spec.index(d) for d in range(len(shape))]
    return [whole(node, shape).see(back, out_shape, eqn)]


for _names, _rule in (
    (ELEMENTWISE, _elementwise),
    (IDENTITIES, _identity),
    (CUMULATIVE, _cumulative),
    ((*REDUCTIONS, *INDEX_REDUCTIONS), _reduction),
):
    rules.update(dict.fromkeys(_names, _rule))
rules.update(
    sort=_sort,
    rev=_rev,
    slice=_slice,
    split=_split,
    pad=_pad,
    concatenate=_concatenate,
    transpose=_transpose,
    squeeze=_squeeze,
    broadcast_in_dim=_broadcast_in_dim,
    iota=_iota,
    reshape=_reshape,
    dot_general=_dot_general,
    conv_general_dilated=_convolution,
)
