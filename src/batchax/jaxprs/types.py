"""Words for what annotations are of: an equation, a program, the type of a value, a value, a tree.

JAX's own classes say of a variable no more than that it has some type, and parts of a program that
we make look like programs, too. So these say what is read of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from batchax import _compat

Value: TypeAlias = Any
"""What a program computes with: an array of JAX or NumPy's, a tracer, a number, a reference."""

Values: TypeAlias = Sequence[Value]

Aval: TypeAlias = Any
"""The type of a value: shape, dtype, and more of some. JAX has no class for what all have."""

Tree: TypeAlias = Any
"""Values in tuples, lists, dicts and other containers, or one value, as `jax.tree` has them."""

AxesTree: TypeAlias = Any
"""What `in_axes` and `out_axes` may be: an axis, None, or a tree of these as a prefix."""

Params: TypeAlias = dict[str, Any]
"""The parameters of an equation, by name."""

ClosedJaxpr: TypeAlias = _compat.ClosedJaxpr
"""A program with the values of its constants."""


class Eqn(Protocol):
    @property
    def primitive(self) -> Any: ...

    @property
    def invars(self) -> Sequence[Any]:
        """Its operands: variables, or literals, which have a value."""
        ...

    @property
    def outvars(self) -> Sequence[Any]: ...

    @property
    def params(self) -> dict[str, Any]:
        """What else the operation needs to know, programs inside it among that."""
        ...

    @property
    def effects(self) -> Any:
        """What it does besides."""
        ...

    @property
    def source_info(self) -> Any:
        """The user's line, and the stack of names."""
        ...

    @property
    def ctx(self) -> Any:
        """The surroundings that it was staged in."""
        ...

    def replace(self, **changes: Any) -> Any:
        """The same with changes."""


class Jaxpr(Protocol):
    """A program, or a part of one; the values of its constants are passed separately."""

    @property
    def eqns(self) -> Sequence[Any]:
        """The equations, in order."""
        ...

    @property
    def constvars(self) -> Sequence[Any]:
        """Its constants."""
        ...

    @property
    def invars(self) -> Sequence[Any]:
        """Its arguments."""
        ...

    @property
    def outvars(self) -> Sequence[Any]:
        """Its results: variables or literals."""
        ...

    def replace(self, **changes: Any) -> Any:
        """The same with changes."""
