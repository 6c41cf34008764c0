"""What each primitive is: said once, by the module that has its rule, and asked by many.

How lanes are masked, rows packed, programs compared and costs estimated depends on properties of
primitives. A family says them beside its rules, in a table: words, and the primitives they are
true of. What nobody has said is taken to be false, which is safe, and may be slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchax import _compat


@dataclass(frozen=True)
class Facts:
    """What is true of a primitive.

    Attributes:
      elementwise: it acts on matching elements of operands that broadcast.
      neutral: of a reduction over dimensions named by the parameter `axes`: for the dtype of
        its operand, a value that changes no result; None if there is none, or it is not known.
      reduces: whether it is such a reduction.
    """

    elementwise: bool = False
    reduces: bool = False
    neutral: Callable[[Any], Any] | None = None


UNKNOWN = Facts()

# By name what is of JAX: some of its primitives are exported nowhere, and some exist only once
# the module that owns them is imported. A third party's may have the same name.
_facts: dict[_compat.Primitive | str, Facts] = {}


def describe(primitives: Sequence[_compat.Primitive | str], **facts: Any) -> None:
    """Enters what is true of some primitives, besides what has been entered."""
    for primitive in primitives:
        _facts[primitive] = replace(_facts.get(primitive, UNKNOWN), **facts)


def forget(primitive: _compat.Primitive) -> None:
    """Takes back what a maker of rules said of a primitive, whose rule is another one now."""
    _facts.pop(primitive, None)


def facts_of(primitive: _compat.Primitive) -> Facts:
    """What is known of a primitive."""
    found = _facts.get(primitive)
    if found is not None:
        return found
    found = _facts.get(primitive.name)
    return UNKNOWN if found is None or _compat.is_namesake(primitive) else found
