"""Names for what annotations are of: values, their types, equations, jaxprs, and pytrees.

JAX has no public class for some of these. Its class of variables says only that each has some type,
and parts of a jaxpr that batchax makes look like jaxprs, too: so protocols say what is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import jax.extend.core as jex_core
from jax.extend.source_info_util import SourceInfo

Primitive = jex_core.Primitive
ClosedJaxpr = jex_core.ClosedJaxpr
"""A jaxpr with the values of its constants."""

Value: TypeAlias = Any
"""An operand or result: an array of JAX or NumPy, a tracer, a number, or a reference."""

Values: TypeAlias = Sequence[Value]

Aval: TypeAlias = Any
"""The type of a value: shape, dtype, and more. JAX has no class for what all of them have."""

Tree: TypeAlias = Any
"""Values in tuples, lists, dicts and other containers, or one value, as `jax.tree` has them."""

AxesTree: TypeAlias = Any
"""What `in_axes` and `out_axes` may be: an axis, None, or a tree of these as a prefix."""

Params: TypeAlias = dict[str, Any]
"""The parameters of an equation, by name."""

Effects: TypeAlias = Iterable[Any]
"""JAX has no public class for what is read of an effect: its name, or its input."""

Var = jex_core.Var
Atom: TypeAlias = jex_core.Var | jex_core.Literal
"""What an equation reads, or a jaxpr returns."""

Dim: TypeAlias = Any
"""A size of an array: an int, or a symbolic one."""

HighOperation: TypeAlias = Any
"""An operation that JAX describes by an object, see ``jax.experimental.hijax``."""


class Eqn(Protocol):
    @property
    def primitive(self) -> Primitive: ...

    @property
    def invars(self) -> Sequence[Any]:
        """Its operands: variables, or literals, which have a value."""
        ...

    @property
    def outvars(self) -> Sequence[Any]: ...

    @property
    def params(self) -> Params:
        """What else the operation needs to know, programs inside it among that."""
        ...

    @property
    def effects(self) -> Effects:
        """What it does besides."""
        ...

    @property
    def source_info(self) -> SourceInfo:
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


Program: TypeAlias = Jaxpr | jex_core.ClosedJaxpr
"""A jaxpr with or without the values of its constants. Since JAX 0.11, both are of one class."""
