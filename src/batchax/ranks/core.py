"""What is declared of an array: the dimensions that one example has, the core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from batchax.errors import ArgumentTypeError
from batchax.frontend.in_axes import is_position
from batchax.jaxprs.spoken import brief


@dataclass(frozen=True)
class Dim:
    """One core dimension.

    Attributes:
      text: how it was written; empty if only its being there was declared.
      size: its size, if that was declared.
      name: a name: dimensions of one name have one size.
      or_one: whether its size may also be 1.
      formula: whether `text` is to be computed from other names, such as ``n+1``.
    """

    text: str = ""
    size: int | None = None
    name: str | None = None
    or_one: bool = False
    formula: bool = False


@dataclass(frozen=True)
class Core:
    """The core dimensions of an array."""

    dims: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        """How many there are."""
        return len(self.dims)

    def __str__(self) -> str:
        texts = [d.text for d in self.dims]
        return f"({', '.join(texts)})" if all(texts) else f"rank {self.rank}"


def is_rank(spec: Any) -> bool:
    """Whether `spec` declares a rank by itself."""
    return isinstance(spec, Core) or is_position(spec)


def as_cores(where: str, spec: Any) -> Any:
    """A rank, None, or a tree of them, with a `Core` for each rank.

    Raises:
      ArgumentTypeError: something in it is neither a rank nor None.
    """

    def one(keys: Any, leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, Core):
            return leaf
        if not is_position(leaf) or leaf < 0:
            raise ArgumentTypeError(
                f"the rank given for {where}{jax.tree_util.keystr(keys)} must be the number of "
                f"dimensions of one example, or None for what is not batched; got {brief(leaf)}."
            )
        return Core((Dim(),) * int(leaf))

    return jax.tree_util.tree_map_with_path(one, spec, is_leaf=lambda x: x is None)


class CoreSizes:
    """The sizes of the named dimensions of one call, as they are found."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self._found_at: dict[str, str] = {}

    def problem(self, path: str, core: Core, shape: Sequence[Any]) -> str:
        """What is wrong with the core `shape` of the array at `path`; empty if nothing is."""
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
                return eval(dim.text, {"__builtins__": {}}, dict(self.known))
            except Exception:  # of names that no argument has had so far
                return None
        return dim.size if dim.name is None else self.known.get(dim.name)
