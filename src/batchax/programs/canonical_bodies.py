"""Calls, loops and branches in canonical form.

A call is what it calls. A body of a loop or branch is read like the program around it. What it
takes from there enters it as *captured*, whatever the order in which it is passed; it is not the
same as outside, since what a loop computes from it is computed at each step. A ``shard_map`` is
what it calls, too, between nodes that say how arrays are cut into shards and put together.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from batchax import _compat
from batchax.jaxprs.bodies import Body, bodies_of
from batchax.jaxprs.primitive_facts import body_parameter
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.words import Eqn
from batchax.programs.canonical import CanonicalProgram, rules, rules_by_fact
from batchax.programs.canonical_values import CanonicalValue, is_placed, typed, whole, without_ones

_WITH_RULES = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}
"""Calls that have rules of their own for derivatives or batches, and what holds their program."""


def _call(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    holder = _WITH_RULES.get(eqn.primitive.name) or body_parameter(eqn.primitive, eqn.params)
    return p.read(_compat.close(eqn.params[holder]), args)


def _captured(
    p: CanonicalProgram, x: CanonicalValue, where: Hashable, reads: Sequence[int]
) -> CanonicalValue:
    """`x` inside the body `where`, seen as outside."""
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
    for each in bodies:

        def inputs(level: int, each: Body = each) -> list[CanonicalValue]:
            avals = [v.aval for v in each.jaxpr.invars][each.same :]
            return [
                *(_captured(p, args[i], level, reads) for i in each.operands[: each.same]),
                *(p.entry("carried", (level, i), a, reads) for i, a in enumerate(avals)),
            ]

        outs, effects = p.body(_compat.close(each.program), inputs)
        nodes = [p.plain(y).node for y in outs]
        inner += nodes
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

    def key(spec: Any, v: Any) -> Hashable:
        return where, (*spec, *[None] * (len(v.aval.shape) - len(spec)))

    inputs = [
        p.entry("shard", key(spec, v), v.aval, [p.plain(x).node]) if any(spec) else x
        for spec, v, x in zip(eqn.params["in_specs"], program.jaxpr.invars, args, strict=True)
    ]
    results = []
    # A node for each result: what nobody needs is gone, in whatever order they are returned.
    for spec, v, x in zip(
        eqn.params["out_specs"], eqn.outvars, p.read(program, inputs), strict=True
    ):
        shape, dtype = typed(v.aval)
        node = (p.plain(x).node,)
        made = p.node(eqn, "shard_map", key(spec, v), [node], without_ones(shape), dtype)
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


def _same_on_all(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    return args  # only its type says that it may differ


def _reshard(p: CanonicalProgram, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
    # Of what a `shard_map` closes over only the type changes, if types say nothing of the mesh.
    return p.opaque(eqn, args) if is_placed(eqn.params["dst_sharding"]) else args


rules_by_fact.update(is_plain_call=_call, again=_call)
rules.update(dict.fromkeys(_WITH_RULES, _call), scan=_loop, cond=_cond, shard_map=_shard_map)
rules["while"] = _loop
rules.update(psum=_sum_over_devices, psum_invariant=_sum_over_devices, pvary=_same_on_all)
rules.update(reshard=_reshard)
