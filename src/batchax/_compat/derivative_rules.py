"""Functions with derivative rules of their own, as the calls that hold them do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend import linear_util


def wrapped_parts(x: Any) -> list[Any]:
    """What a wrapped function of JAX holds; its class has no public accessors.

    Arguments that its `nondiff_argnums` set apart are in boxes, recognised by their class name.
    """
    if isinstance(x, linear_util.WrappedFun):
        return [x.f, x.transforms, x.params]
    return [x.val] if type(x).__name__ == "Unhashable" else []


def is_tracing_state(x: Any) -> bool:
    """Whether `x` is what JAX keeps, with a derivative rule, of the trace it was staged in.

    It has no say in what the rule does. The types are private; they are recognised by name.
    """
    states = {"DynamicJaxprTrace", "Store", "EqualStore", "InitialResultPaths"}
    return type(x) is object or type(x).__name__ in states


def rewrapped(fun: Callable[..., Any], like: Any) -> Any:
    """`fun` as primitives that take functions want it, known by the name of `like`."""
    return linear_util.wrap_init(fun, debug_info=like.debug_info)


def cotangents_and_logs(result: Any) -> tuple[list[Any], Any]:
    """What the reverse rule of a custom_vjp returned: a list, and since JAX 0.11.1 logs with it."""
    if isinstance(result, tuple) and len(result) == 2:
        return list(result[0]), result[1]
    return list(result), None
