"""What is declared of arrays: the dimensions that one example has, the core, and its notations."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.tree_util import KeyPath

from batchax.errors import ArgumentTypeError
from batchax.frontend.in_axes import is_position
from batchax.jaxprs.error_format import brief


@dataclass(frozen=True)
class Dim:
    """Holds one core dimension."""

    text: str = ""  # as it was written; empty if only its being there was declared
    size: int | None = None  # if that was declared
    name: str | None = None  # dimensions of one name have one size
    or_one: bool = False  # whether its size may also be 1
    formula: bool = False  # whether `text` is computed from other names, such as ``n+1``


@dataclass(frozen=True)
class Core:
    dims: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        return len(self.dims)

    def __str__(self) -> str:
        texts = [d.text for d in self.dims]
        return f"({', '.join(texts)})" if all(texts) else f"rank {self.rank}"


_MOST = 64  # dimensions of an array of NumPy

RankTree: TypeAlias = Any
"""A rank, None for what is not batched, or a pytree of these that is a prefix of an argument."""


def is_rank(spec: object) -> bool:
    """Whether `spec` declares a rank by itself."""
    return isinstance(spec, Core) or is_position(spec)


def as_cores(where: str, spec: RankTree) -> RankTree:
    """Returns a rank, None, or a tree of them, with a `Core` for each rank."""

    def one(keys: KeyPath, leaf: object) -> Core | None:
        if leaf is None or isinstance(leaf, Core):
            return leaf
        if not is_position(leaf) or not 0 <= leaf <= _MOST:
            raise ArgumentTypeError(
                f"the rank given for {where}{jax.tree_util.keystr(keys)} must be the number of "
                f"dimensions of one example, or None for what is not batched; got {brief(leaf)}."
            )
        return Core((Dim(),) * int(leaf))

    return jax.tree_util.tree_map_with_path(one, spec, is_leaf=lambda x: x is None)


class CoreSizes:
    """Holds the sizes of the named dimensions of one call, as they are found."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self._found_at: dict[str, str] = {}

    def problem(self, path: str, core: Core, shape: Sequence[Any]) -> str:
        """Says what is wrong with the core `shape` of the array at `path`; empty if nothing is."""
        for position, (dim, size) in enumerate(zip(core.dims, shape, strict=True)):
            expected = self._expected(dim)
            if size is None or (dim.or_one and size == 1):  # None: each row has its own
                continue
            if expected is None:
                if dim.name is not None:
                    self.known[dim.name] = size
                    self._found_at[dim.name] = path
            elif size != expected and dim.name is None and not dim.formula:
                return f"core dimension {position} has size {size}, but {expected} was declared"
            elif size != expected:
                at = self._found_at.get(dim.name or "")
                source = f", as in {at}" if at else ""
                return (
                    f"core dimension {position} ({dim.text}) has size {size}, but "
                    f"{dim.text} is {expected}{source}"
                )
        return ""

    def _expected(self, dim: Dim) -> int | None:
        if dim.formula:
            try:
                # The text is that of an annotation in the user's own code, without builtins.
                return eval(dim.text, {"__builtins__": {}}, dict(self.known))
            except Exception:  # of names that no argument has had so far
                return None
        return dim.size if dim.name is None else self.known.get(dim.name)


def annotated_ranks(fun: Callable[..., Any]) -> dict[str, Any]:
    """Returns a `Core` for each parameter of `fun` that is annotated with a shape."""
    name = getattr(fun, "__name__", "the function")
    try:
        parameters = inspect.signature(fun).parameters
        hints = typing.get_type_hints(fun)
    except Exception as error:
        raise ArgumentTypeError(
            f"the annotations of {name} cannot be read ({type(error).__name__}: {error}). Declare "
            "ranks instead: batchax.auto_vmap(1, 2), or by parameter name."
        ) from None
    cores = {p: _annotated_core(f"{name}({p})", hints[p]) for p in parameters if p in hints}
    ranks = {p: core for p, core in cores.items() if core is not None}
    if not ranks:
        raise ArgumentTypeError(
            f"no parameter of {name} is annotated with a shape, as in x: Float[Array, 'n m'] "
            "(jaxtyping). Declare ranks instead: batchax.auto_vmap(1, 2), or by parameter name."
        )
    return ranks


def _annotated_core(where: str, annotation: Any) -> Core | None:
    """Returns the core an annotation declares; None if it declares none."""
    text = getattr(annotation, "dim_str", None)
    if isinstance(text, str):
        return Core(tuple(_annotated_dim(where, part) for part in text.split()))
    if hasattr(annotation, "leaftype"):  # PyTree[Float[Array, "n"]]
        return _annotated_core(where, annotation.leaftype)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        cores = [_annotated_core(where, part) for part in typing.get_args(annotation)]
        cores = list(dict.fromkeys(core for core in cores if core is not None))
        if len({core.rank for core in cores}) > 1:
            raise ArgumentTypeError(
                f"the annotation of {where} allows arrays of several ranks: "
                f"{', '.join(map(str, cores))}. Declare one: batchax.auto_vmap(1, 2), or by name."
            )
        return cores[0] if cores else None
    return None


def _annotated_dim(where: str, text: str) -> Dim:
    if text == "..." or "*" in text[:2]:
        raise ArgumentTypeError(
            f"the annotation of {where} has any number of dimensions ({text}), and so no rank. "
            "Annotate what one example has, or declare ranks: batchax.auto_vmap(1, 2)."
        )
    # The notation of jaxtyping: ``name=size`` documents a size, # allows broadcasting, ? is for
    # trees.
    bare = text.split("=")[-1].lstrip("#?")
    or_one = "#" in text
    if bare.startswith("_"):
        return Dim(bare)
    if bare.isdigit():
        return Dim(bare, size=int(bare), or_one=or_one)
    if bare.isidentifier():
        # Of one name in a tree ("?n") each leaf has its size.
        return Dim(bare, name=None if "?" in text else bare, or_one=or_one)
    return Dim(bare, or_one=or_one, formula=True)


_CORE = r"\(\s*(?:\w+(?:\s*,\s*\w+)*)?\s*\)"
_LIST = rf"\s*(?:{_CORE}(?:\s*,\s*{_CORE})*)?\s*"
_SIGNATURE = re.compile(rf"({_LIST})->({_LIST})")


def parse_signature(text: str) -> tuple[list[Core], list[Core]]:
    """Returns the cores of the inputs and of the outputs."""
    match = _SIGNATURE.fullmatch(text)
    if match is None:
        raise ArgumentTypeError(
            f"{brief(text)} is not a signature of core dimensions: expected the form "
            '"(n),(n,m)->(m)", with a name or a size for each dimension, and () for a scalar.'
        )
    inputs, outputs = (list(map(_core, re.findall(_CORE, part))) for part in match.groups())
    return inputs, outputs


def _core(text: str) -> Core:
    return Core(tuple(map(_dim, re.findall(r"\w+", text))))


def _dim(text: str) -> Dim:
    if text.isdigit():
        return Dim(text, size=int(text))
    if not text.isidentifier():
        raise ArgumentTypeError(
            f"{brief(text)} is neither a name nor the size of a core dimension."
        )
    return Dim(text, name=text)
