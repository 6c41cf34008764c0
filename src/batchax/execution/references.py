"""References, turned into values: what uses them can then be cut into parts.

Of those that a program creates JAX does that. It also opens operations inside of loops and branches
that it lowers early, such as functions with derivatives of their own: these would be lost,
silently. So an equation that has nothing to do with references is held, meanwhile, as one that JAX
knows nothing of.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.core import Tracer

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.call import Call, Outputs
from batchax.frontend.objects import is_array
from batchax.frontend.outputs import FlatOutputs, OutputArray
from batchax.frontend.prefixes import SpecifiedLeaf
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Value
from batchax.kernel.inner import remembered
from batchax.kernel.own_primitive import placeholder
from batchax.programs.rewritten import Inside, rewritten

_held_p = placeholder(
    "held", lambda *_, held: ([v.aval for v in held.eqn.outvars], held.eqn.effects)
)


@dataclass(frozen=True, eq=False)
class _Held:
    """An equation, known by identity."""

    eqn: Eqn


def without_references(program: ClosedJaxpr, name: Hashable | None, size: Value) -> ClosedJaxpr:
    """`program`, which may use the axis `name`, without the references that it creates."""
    if not _compat.makes_references(program.effects):
        return program

    def with_values() -> ClosedJaxpr:
        held = rewritten(program, _hold)
        return rewritten(_compat.without_references(held, name, size), _release)

    return remembered(program, ("without references", name, size), with_values)


def _hold(eqn: Eqn, inside: Inside) -> Any:
    if _compat.touches_references(eqn):
        return eqn.replace(params=inside())
    return eqn.replace(primitive=_held_p, params={"held": _Held(eqn)})


def _release(eqn: Eqn, inside: Inside) -> Any:
    if eqn.primitive is not _held_p:
        return eqn.replace(params=inside())
    was = eqn.params["held"].eqn
    return eqn.replace(primitive=was.primitive, params=was.params, effects=was.effects)


def mapped_as_values(call: Call) -> tuple[Call, Callable[[Outputs], Outputs]]:
    """A call of the values of references that are mapped, and what writes the new ones back.

    Each lane has a part of its own of such a reference, so lanes may run in any order. A reference
    that is created inside holds that part. Its last value is one more output.
    """
    at = [i for i, m in enumerate(call.mapped) if m.axis is not None and _is_reference(m.value)]
    if not at:
        return call, lambda results: results
    references = [call.mapped[i].value for i in at]

    def function(*examples: Any) -> tuple[list[Any], FlatOutputs]:
        own = [jax.new_ref(x) if i in at else x for i, x in enumerate(examples)]
        arrays, outputs = call.function(*own)
        parts = [OutputArray(call.mapped[i].path, call.mapped[i].axis) for i in at]
        described = [*outputs.described, *parts]
        return [*arrays, *(own[i][...] for i in at)], replace(outputs, described=described)

    def write(results: Outputs) -> Outputs:
        arrays, outputs = results
        for reference, i, new in zip(references, at, arrays[-len(at) :], strict=True):
            old = mapped[i].value
            here = isinstance(old, Tracer) or isinstance(new, Tracer)
            reference[...] = new if here else jax.device_put(new, old.sharding)  # from a mesh
        return arrays[: -len(at)], replace(outputs, described=outputs.described[: -len(at)])

    _compat.named_after(function, call.function)
    mapped = [m.put(m.value[...]) if i in at else m for i, m in enumerate(call.mapped)]
    return replace(call, function=function, mapped=mapped), write


def check_not_shared(shared: Iterable[SpecifiedLeaf]) -> None:
    """Refuses references among arguments that all lanes share, by name.

    Raises:
      UnsupportedError: there is one.
    """
    for leaf in shared:
        for keys, x in jax.tree_util.tree_flatten_with_path(leaf.value)[0]:
            if _is_reference(x):
                raise UnsupportedError(shared_reference(leaf.path + jax.tree_util.keystr(keys)))


def shared_reference(which: str) -> str:
    """What a message says of a reference that all lanes share."""
    return (
        f"{which} is a reference (jax.new_ref) that all lanes share, and batch_size or mesh was "
        "given: what a lane reads would depend on which lanes have run. Give the reference an axis "
        "in in_axes, create it inside the function, or pass its value, reference[...]."
    )


def _is_reference(x: Value) -> bool:
    return is_array(x) and _compat.is_reference(x)
