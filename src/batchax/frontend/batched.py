"""What type checkers and editors know of a function that was batched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from batchax.jaxprs.types import Tree

P = ParamSpec("P")
Out = TypeVar("Out", covariant=True)
Else = TypeVar("Else", covariant=True)
Fun = TypeVar("Fun", covariant=True)

_Of1: TypeAlias = Callable[[Any], Any]
_Of2: TypeAlias = Callable[[Any, Any], Any]
_Of3: TypeAlias = Callable[[Any, Any, Any], Any]
_Of4: TypeAlias = Callable[[Any, Any, Any, Any], Any]
_Of5: TypeAlias = Callable[[Any, Any, Any, Any, Any], Any]
_Of6: TypeAlias = Callable[[Any, Any, Any, Any, Any, Any], Any]
_Of7: TypeAlias = Callable[[Any, Any, Any, Any, Any, Any, Any], Any]
_Of8: TypeAlias = Callable[[Any, Any, Any, Any, Any, Any, Any, Any], Any]


class Batched(Protocol[P, Out, Else]):
    """Is a function of a batch, made of a function of one example whose parameters are `P`."""

    # What a batch of a type is, types cannot say: of a float it is an array, and an array for one
    # example may be a `Ragged`. So the first signature has the names that editors show, and returns
    # `Out`. The others take as many arguments by position, of any types, and return `Else`: type
    # checkers report an argument that is missing or misspelled.
    __name__: str

    @property
    def __wrapped__(self) -> Callable[P, Out]: ...
    @property
    def _batchax_else(self) -> Else: ...  # for types alone

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Out: ...
    @overload
    def __call__(self: _Wraps[_Of1, Else], a: Tree, /) -> Else: ...
    @overload
    def __call__(self: _Wraps[_Of2, Else], a: Tree, b: Tree, /) -> Else: ...
    @overload
    def __call__(self: _Wraps[_Of3, Else], a: Tree, b: Tree, c: Tree, /) -> Else: ...
    @overload
    def __call__(self: _Wraps[_Of4, Else], a: Tree, b: Tree, c: Tree, d: Tree, /) -> Else: ...
    @overload
    def __call__(
        self: _Wraps[_Of5, Else], a: Tree, b: Tree, c: Tree, d: Tree, e: Tree, /
    ) -> Else: ...
    @overload
    def __call__(
        self: _Wraps[_Of6, Else], a: Tree, b: Tree, c: Tree, d: Tree, e: Tree, f: Tree, /
    ) -> Else: ...
    @overload
    def __call__(
        self: _Wraps[_Of7, Else], a: Tree, b: Tree, c: Tree, d: Tree, e: Tree, f: Tree, g: Tree, /
    ) -> Else: ...
    @overload
    def __call__(
        self: _Wraps[_Of8, Else],
        a: Tree,
        b: Tree,
        c: Tree,
        d: Tree,
        e: Tree,
        f: Tree,
        g: Tree,
        h: Tree,
        /,
    ) -> Else: ...
    # A method of a class that was batched is bound to objects, as any function is.
    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Else]: ...


class _Wraps(Protocol[Fun, Else]):
    """Is a batched function, made of one that takes so many arguments by position."""

    @property
    def __wrapped__(self) -> Fun: ...
    @property
    def _batchax_else(self) -> Else: ...
