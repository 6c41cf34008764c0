"""Functions with derivative rules of their own, as the calls that hold them do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

# There is a public setting, but no public context of it.
from jax._src.config import custom_vjp3 as _with_vjp3
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


class ResidualsDescription:
    """What `out_trees` of a ``custom_vjp`` call returns, which can be set here.

    JAX remembers every trace of a forward rule, one for each set of arguments to differentiate, but
    describes the residuals of the latest one alone, and of none after a trace that failed. The
    object that holds the description is private, and is found in closures by its class name.
    """

    def __init__(self, out_trees: Callable[[], Any]) -> None:
        holders, unseen = [], [out_trees]
        while unseen:
            x = unseen.pop()
            if type(x).__name__ in {"Store", "EqualStore"}:
                holders.append(x)
            unseen += [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
        (self._holder,) = holders

    def get(self) -> Any:
        """The description; None after a trace that failed, and before the first."""
        try:
            return self._holder.val
        except Exception:
            return None

    def set(self, description: Any) -> None:
        """From now on the residuals have this description."""
        self._holder.reset()
        self._holder.store(description)


def cotangents_and_logs(result: Any) -> tuple[list[Any], Any]:
    """What the reverse rule of a custom_vjp returned: a list, and since JAX 0.11.1 logs with it."""
    if isinstance(result, tuple) and len(result) == 2:
        return list(result[0]), result[1]
    return list(result), None


def as_custom_vjp(prim: Any) -> Callable[..., list[Any]] | None:
    """A ``custom_vjp`` function as JAX makes it without ``jax_custom_vjp3``, or None.

    With that option, JAX 0.10 turns a call into an object of a private class. JAX 0.12 hides the
    rules of the caller in the object, and raises where 0.10 returns wrong gradients.

    Args:
      prim: the object of a ``call_hi_primitive``.

    Returns:
      A function of flat arguments. None for all other objects.
    """
    if type(prim).__name__ != "CustomVJPTraced" or not hasattr(prim, "static_argnums"):
        return None
    static = {i: prim.in_avals[i].val for i in sorted(prim.static_argnums)}

    def forward(*args: Any) -> Any:
        rest = iter(args)
        return prim.fwd(*(static[i] if i in static else next(rest) for i in range(n)))

    def backward(residuals: Any, cotangents: Any) -> Any:
        return prim.bwd(*static.values(), residuals, cotangents)

    n = len(prim.in_avals)
    with _with_vjp3(False):
        function: Any = jax.custom_vjp(lambda *args: prim.traced(*args))
    function.__name__ = prim.traced.fun_name
    function.defvjp(
        forward, backward, symbolic_zeros=prim.symbolic_zeros, optimize_remat=prim.opt_remat
    )

    def call(*xs: Any) -> list[Any]:
        args = jax.tree.unflatten(prim.in_tree, xs)
        args = [x for i, x in enumerate(args) if i not in static]
        return jax.tree.leaves(function(*args))

    return call


def is_checkpoint(prim: Any) -> bool:
    """Whether the object of a ``call_hi_primitive`` is ``jax.checkpoint`` with ``jax_remat3``.

    The class is private. It is recognized by its name and parameters.
    """
    return type(prim).__name__ == "RematTraced" and {"jaxpr", "policy"} <= set(prim.params)
