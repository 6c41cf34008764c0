"""Calls, loops and branches in canonical form.

A call is what it calls. A body of a loop or branch is read like the program around it. What it
takes from there enters it as *captured*, whatever the order in which it is passed; it is not the
same as outside, since what a loop computes from it is computed at each step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from batchax import _compat
from batchax.engine.primitive_facts import body_parameter
from batchax.programs.canonical import Program, rules, rules_by_fact
from batchax.programs.canonical_values import Value

_WITH_RULES = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}
"""Calls that have rules of their own for derivatives or batches, and what holds their program."""


def _call(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    holder = _WITH_RULES.get(eqn.primitive.name) or body_parameter(eqn)
    return p.read(_compat.close(eqn.params[holder]), args)


def _captured(p: Program, x: Value, where: Hashable, reads: Sequence[int]) -> Value:
    """`x` inside the body `where`, seen as outside."""
    node = p.table.nodes[x.node]
    inside = p.leaf("captured", where, [x.node, *reads], node.shape, node.dtype)
    return Value(inside, x.axes, x.shape, x.eqn)


def _scan(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    body = eqn.params["jaxpr"]
    consts, carries = _compat.scan_counts(eqn.params)
    avals = [v.aval for v in body.jaxpr.invars]
    init = [p.plain(x) for x in args[consts : consts + carries]]
    steps = [p.plain(x) for x in args[consts + carries :]]
    entering = [x.node for x in (*init, *steps)]

    def inputs(level: int) -> list[Value]:
        return [
            *(_captured(p, x, level, entering) for x in args[:consts]),
            *(
                p.entry("carried", (level, i), a, entering)
                for i, a in enumerate(avals[consts:])
            ),
        ]  # fmt: skip

    outs, effects = p.body(body, inputs)
    nodes = [p.plain(y).node for y in outs]
    params = tuple(
        (name, eqn.params[name]) for name in ("length", "reverse", "unroll") if name in eqn.params
    )
    key = (params, carries, tuple(nodes), effects)
    return p.results(eqn, p.operation(eqn, key, [*init, *steps], nodes))


def _while(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    conds, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    init = [p.plain(x) for x in args[conds + bodies :]]
    entering = [x.node for x in init]
    parts = ((eqn.params["cond_jaxpr"], args[:conds]),
             (eqn.params["body_jaxpr"], args[conds : conds + bodies]))  # fmt: skip
    key: list[Hashable] = []
    inner: list[int] = []
    for program, consts in parts:

        def inputs(level: int, program: Any = program, consts: Any = consts) -> list[Value]:
            avals = [v.aval for v in program.jaxpr.invars][len(consts) :]
            return [
                *(_captured(p, x, level, entering) for x in consts),
                *(p.entry("carried", (level, i), a, entering) for i, a in enumerate(avals)),
            ]

        outs, effects = p.body(program, inputs)
        nodes = [p.plain(y).node for y in outs]
        inner += nodes
        key.append((tuple(nodes), effects))
    return p.results(eqn, p.operation(eqn, tuple(key), init, inner))


def _cond(p: Program, eqn: Any, args: list[Value]) -> list[Value]:
    which, operands = p.plain(args[0]), args[1:]
    key: list[Hashable] = []
    inner: list[int] = []
    for number, branch in enumerate(eqn.params["branches"]):

        def inputs(level: int, number: int = number) -> list[Value]:
            return [_captured(p, x, (level, number), [which.node]) for x in operands]

        outs, effects = p.body(branch, inputs)
        nodes = [p.plain(y).node for y in outs]
        inner += nodes
        key.append((tuple(nodes), effects))
    return p.results(eqn, p.operation(eqn, tuple(key), [which], inner))


rules_by_fact.update(is_plain_call=_call, again=_call)
rules.update(dict.fromkeys(_WITH_RULES, _call), scan=_scan, cond=_cond)
rules["while"] = _while
