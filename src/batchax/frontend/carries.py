"""The carry of a loop as the user gives it, and what each step must make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax

from batchax import _compat
from batchax.errors import ArgumentTypeError
from batchax.frontend.objects import is_array
from batchax.jaxprs.spoken import name_of
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel.rule_results import describe_returned

T = TypeVar("T")


def flatten_carry(init: Any, name: str, loop: str, advice: str) -> tuple[list[Any], Any]:
    """The arrays of the first carry, and its structure.

    Args:
      init: the first carry.
      name: what messages call it.
      loop: what they call the loop.
      advice: what they say to do with other objects.

    Raises:
      ArgumentTypeError: a leaf is not an array.
    """
    leaves, structure = jax.tree.flatten(init)
    for keys, leaf in zip(carry_keys(init), leaves, strict=True):
        if not is_array(leaf):
            raise ArgumentTypeError(
                f"{name}{keys}, of the first carry, is of type {type(leaf).__name__}, which is "
                f"not an array. The carry of a {loop} must be a pytree of arrays and numbers; "
                f"{advice}."
            )
    return leaves, structure


def carry_keys(init: Any) -> list[str]:
    """Where each leaf is in the carry."""
    leaves = jax.tree_util.tree_flatten_with_path(init)[0]
    return [jax.tree_util.keystr(keys) for keys, _ in leaves]


def settle(
    stage: Callable[[Sequence[Any]], tuple[ClosedJaxpr | None, ClosedJaxpr, T]],
    carry: Sequence[Value],
) -> tuple[ClosedJaxpr | None, ClosedJaxpr, T, Sequence[Any]]:
    """What `stage` returns for the carry (predicate, if any; step; description), and the carry.

    Python scalars in the carry have got the types that steps return. Inside ``shard_map`` a
    carry varies over the axes of the mesh that a step, or the predicate, makes it vary over.
    """
    while True:
        tested, staged, description = stage(carry)
        promoted = list(map(_promoted, carry, staged.out_avals))
        if tested is not None:
            promoted = [_compat.varying_as(x, tested.out_avals[0]) for x in promoted]
        if all(new is old for new, old in zip(promoted, carry, strict=True)):
            return tested, staged, description, carry
        carry = promoted


def _promoted(x: Value, new: Any) -> Any:
    """As in ``lax.scan``: a weakly typed `x` takes part in promotion with its next value."""
    x = _compat.varying_as(x, new)
    old = jax.typeof(x)
    if not getattr(old, "weak_type", False) or _same_type(old, new):
        return x
    struct = jax.ShapeDtypeStruct(new.shape, new.dtype, weak_type=new.weak_type)
    return lax.convert_element_type(x, jax.dtypes.result_type(x, struct))


def check_structure(fun: Callable[..., Any], old: Any, new: Any) -> None:
    """Refuses a step that changes the structure of the carry."""
    first, then = jax.tree.structure(old), jax.tree.structure(new)
    if first != then:
        shown = [str(tree).removeprefix("PyTreeDef(").removesuffix(")") for tree in (first, then)]
        raise ArgumentTypeError(
            f"the carry that {name_of(fun)!r} returns must have the structure of the one it is "
            "given, but (each * an array)\n  {}\nbecame\n  {}".format(*shown)
        )


def check_types(
    fun: Callable[..., Any], keys: Sequence[str], carry: Sequence[Value], outs: Sequence[Value]
) -> None:
    """Refuses a step that changes the shapes or dtypes of the carry."""
    wrong = [
        f"  carry{path}: {old.str_short()} became {new.str_short()}"
        for path, old, new in zip(keys, map(jax.typeof, carry), outs, strict=False)
        if not _same_type(old, new)
    ]
    if wrong:
        raise ArgumentTypeError(
            f"the carry that {name_of(fun)!r} returns must have the shapes and dtypes of the one "
            "it is given, but\n" + "\n".join(wrong) + "\nGive a first carry of the type that each "
            "step returns, or convert the carry in the step."
        )


def check_predicate(fun: Callable[..., Any], out: Any) -> Any:
    """`out`, which `fun` returned, if it is one truth value."""
    try:
        aval = jax.typeof(out)
    except TypeError:
        aval = None
    if aval is None or aval.shape != () or aval.dtype != np.bool_:
        returned = describe_returned(out) if aval is None else aval.str_short()
        raise ArgumentTypeError(
            f"{name_of(fun)!r} must return one truth value, a boolean array of shape (), but it "
            f"returned {returned}."
        )
    return out


def _same_type(a: Any, b: Any) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)
