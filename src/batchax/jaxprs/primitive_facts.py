"""What each primitive is: said once, by the module that has its rule, and asked by many.

How lanes are masked, rows packed, programs compared and costs estimated depends on properties of
primitives. A family says them beside its rules, in a table: words, and the primitives they are
true of. What nobody has said is taken to be false, which is safe, and may be slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchax import _compat


@dataclass(frozen=True)
class Facts:
    """What is true of a primitive.

    Attributes:
      elementwise: it acts on matching elements of operands that broadcast.
      linear: its derivative does not depend on its operands: a zero cotangent stays zero
        whatever they are.
      additive: of the sums of two sets of operands it makes the sum of what it makes of each.
      moderate: of numbers that are not enormous it makes numbers that are not: what it returns,
        and its derivatives, are bounded, or sums of products of operands. (A gather does not:
        it makes a NaN of an index out of bounds.)
      alias: its result has the elements of its operand, in order; perhaps in another shape, or
        of another type.
      endless: a loop that ends on values, or a callback: it must not see operands of lanes that
        do not run it. What a user's batching rule will do may be one.
      costly: a loop or a callback: worth skipping when no lane runs it.
      library: on a CPU, a call of a library, in which a thread may wait for others of its pool.
      body: of a call, the parameters that may hold the program that it is a call of.
      again: of a call: in reverse its program is recomputed.
      marked: of a call: it says something of how its program is to be compiled or run.
      once: a call of the host that is made once, for all lanes.
      guarded: what is inside runs for active lanes only, which the primitive is told.
      nests: a loop or branch: what is inside runs more or less often than what is around it.
      combines: a program that it holds is the function with which it combines two elements.
      names: of a primitive that uses named axes without an effect that says so, the parameter
        that holds the names.
      looks: it looks at all lanes, through the batch axis: they share what it makes.
      cast: it changes only what JAX knows of a value along the axes of a mesh.
      reduces: it removes dimensions named by its parameter `axes`.
      neutral: then, for the dtype of its operand, a value that changes no result; None where
        that is not known.
    """

    elementwise: bool = False
    linear: bool = False
    additive: bool = False
    moderate: bool = False
    alias: bool = False
    endless: bool = False
    costly: bool = False
    library: bool = False
    body: tuple[str, ...] = ()
    again: bool = False
    marked: bool = False
    once: bool = False
    guarded: bool = False
    nests: bool = False
    combines: bool = False
    names: str = ""
    looks: bool = False
    cast: bool = False
    reduces: bool = False
    neutral: Callable[[Any], Any] | None = None

    @property
    def is_plain_call(self) -> bool:
        """Whether it does what the program inside does, and no more."""
        return bool(self.body) and not (self.again or self.marked)


UNKNOWN = Facts()

# By name what is of JAX: some of its primitives are exported nowhere, and some exist only once
# the module that owns them is imported. A third party's may have the same name.
_facts: dict[_compat.Primitive | str, Facts] = {}

# What is known of primitives that have been asked about: of each equation many ask several times.
_asked: dict[_compat.Primitive, Facts] = {}


def enter(table: str, **facts: Any) -> tuple[str, ...]:
    """Enters a table of primitives of JAX: in each line words, and the names they are true of.

    Args:
      table: lines of the form ``linear moderate: add sub``. A line without a colon continues with
        the names of the one before. Before a colon there may be nothing: these have an entry,
        and none of the words is true of them.
      **facts: what is true of all of them.

    Returns:
      The names.
    """
    names: list[str] = []
    words: dict[str, Any] = {}
    for line in filter(str.strip, table.splitlines()):
        before, colon, after = line.rpartition(":")
        words = dict.fromkeys(before.split(), True) if colon else words
        describe(after.split(), **facts, **words)
        names += after.split()
    return tuple(names)


def describe(primitives: Iterable[_compat.Primitive | str], **facts: Any) -> None:
    """Enters what is true of some primitives, besides what has been entered."""
    for primitive in primitives:
        _facts[primitive] = replace(_facts.get(primitive, UNKNOWN), **facts)
    _ask_again()


def forget(primitive: _compat.Primitive) -> None:
    """Takes back what a maker of rules said of a primitive, whose rule is another one now."""
    _facts.pop(primitive, None)
    _ask_again()


def _ask_again() -> None:
    global _asked
    _asked = {}  # another one: what a thread has looked up before now goes to the old one


def body_parameter(primitive: _compat.Primitive, params: Mapping[str, Any]) -> str:
    """The parameter of a call, one whose `Facts` say so, that holds the program inside."""
    return next(name for name in facts_of(primitive).body if name in params)


def has_entry(primitive: _compat.Primitive) -> bool:
    """Whether somebody has said what `primitive` is, be it that nothing is true of it."""
    by_name = primitive.name in _facts and not _compat.is_namesake(primitive)
    return by_name or primitive in _facts


def facts_of(primitive: _compat.Primitive) -> Facts:
    """What is known of a primitive."""
    asked = _asked
    facts = asked.get(primitive)
    if facts is None:
        facts = _find(primitive)
        if _compat.find_primitive(primitive.name) is not None:  # whose namesakes are known by now
            asked[primitive] = facts
    return facts


def _find(primitive: _compat.Primitive) -> Facts:
    facts = _facts.get(primitive)
    if facts is not None:
        return facts
    facts = _facts.get(primitive.name)
    return UNKNOWN if facts is None or _compat.is_namesake(primitive) else facts
