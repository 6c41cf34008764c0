"""Ranks from annotations of jaxtyping: ``x: Float[Array, "n m"]`` is of rank 2."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from batchax.errors import ArgumentTypeError
from batchax.ranks.core import Core, Dim


def annotated_ranks(fun: Callable[..., Any]) -> dict[str, Any]:
    """A `Core` for each parameter of `fun` that is annotated with a shape.

    Raises:
      ArgumentTypeError: there is none, or one has no fixed rank.
    """
    name = getattr(fun, "__name__", "the function")
    parameters = inspect.signature(fun).parameters
    try:
        hints = typing.get_type_hints(fun)
    except Exception as error:
        raise ArgumentTypeError(
            f"the annotations of {name} cannot be read ({type(error).__name__}: {error}). Declare "
            "ranks instead: batchax.auto_vmap(1, 2), or by parameter name."
        ) from None
    cores = {p: _core(f"{name}({p})", hints[p]) for p in parameters if p in hints}
    ranks = {p: core for p, core in cores.items() if core is not None}
    if not ranks:
        raise ArgumentTypeError(
            f"no parameter of {name} is annotated with a shape, as in x: Float[Array, 'n m'] "
            "(jaxtyping). Declare ranks instead: batchax.auto_vmap(1, 2), or by parameter name."
        )
    return ranks


def _core(where: str, annotation: Any) -> Core | None:
    """The core an annotation declares; None if it declares none."""
    text = getattr(annotation, "dim_str", None)
    if isinstance(text, str):
        return Core(tuple(_dim(where, part) for part in text.split()))
    if hasattr(annotation, "leaftype"):  # PyTree[Float[Array, "n"]]
        return _core(where, annotation.leaftype)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        cores = [_core(where, part) for part in typing.get_args(annotation)]
        cores = list(dict.fromkeys(core for core in cores if core is not None))
        if len({core.rank for core in cores}) > 1:
            raise ArgumentTypeError(
                f"the annotation of {where} allows arrays of several ranks: "
                f"{', '.join(map(str, cores))}. Declare one: batchax.auto_vmap(1, 2), or by name."
            )
        return cores[0] if cores else None
    return None


def _dim(where: str, text: str) -> Dim:
    if text == "..." or "*" in text[:2]:
        raise ArgumentTypeError(
            f"the annotation of {where} has any number of dimensions ({text}), and so no rank. "
            "Annotate what one example has, or declare ranks: batchax.auto_vmap(1, 2)."
        )
    bare = text.split("=")[-1].lstrip("#?")
    or_one = "#" in text
    if bare.startswith("_"):
        return Dim(bare)
    if bare.isdigit():
        return Dim(bare, size=int(bare), or_one=or_one)
    if bare.isidentifier():
        # Of one name in a tree ("?n") each leaf has a size of its own.
        return Dim(bare, name=None if "?" in text else bare, or_one=or_one)
    return Dim(bare, or_one=or_one, formula=True)
