"""Contractions and convolutions in canonical form, which is the same wherever their axes are."""

from __future__ import annotations

from typing import Any

from batchax.jaxprs.words import Eqn
from batchax.programs.canonical import CanonicalProgram, rules
from batchax.programs.canonical_rules import others
from batchax.programs.canonical_values import CanonicalValue, typed, whole, without_ones


def _dot_general(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    (contracted, batch), precision = eqn.params["dimension_numbers"], eqn.params["precision"]
    both = isinstance(precision, tuple) and len(precision) == 2
    out_shape, dtype = typed(eqn.outvars[0].aval)
    args = list(map(p.solid, args))
    params = others(p, eqn, "dimension_numbers", "precision", "preferred_element_type")
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
