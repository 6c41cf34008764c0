"""What type checkers and editors know of a function that was batched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from batchax.jaxprs.types import Tree

P = ParamSpec("P")
Out = TypeVar("Out", covariant=True)
Else = TypeVar("Else", covariant=True)


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
    def __call__(self: _Takes1[Else], a: Tree, /) -> Else: ...
    @overload
    def __call__(self: _Takes2[Else], a: Tree, b: Tree, /) -> Else: ...
    @overload
    def __call__(self: _Takes3[Else], a: Tree, b: Tree, c: Tree, /) -> Else: ...
    @overload
    def __call__(self: _Takes4[Else], a: Tree, b: Tree, c: Tree, d: Tree, /) -> Else: ...
    @overload
    def __call__(self: _Takes5[Else], a: Tree, b: Tree, c: Tree, d: Tree, e: Tree, /) -> Else: ...
    @overload
    def __call__(
        self: _Takes6[Else], a: Tree, b: Tree, c: Tree, d: Tree, e: Tree, f: Tree, /
    ) -> Else: ...
    @overload
    def __call__(
        self: _Takes7[Else], a: Tree, b: Tree, c: Tree, d: Tree, e: Tree, f: Tree, g: Tree, /
    ) -> Else: ...
    @overload
    def __call__(
        self: _Takes8[Else],
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


# A function of one example that takes so many arguments by position.


class _Else(Protocol[Else]):
    @property
    def _batchax_else(self) -> Else: ...


class _Takes1(_Else[Else], Protocol[Else]):
    @property
    def __wrapped__(self) -> Callable[[Any], Any]: ...


class _Takes2(_Else[Else], Protocol[Else]):
    @property
    def __wrapped__(self) -> Callable[[Any, Any], Any]: ...


class _Takes3(_Else[Else], Protocol[Else]):
    @property
    def __wrapped__(self) -> Callable[[Any, Any, Any], Any]: ...


class _Takes4(_Else[Else], Protocol[Else]):
    @property
    def __wrapped__(self) -> Callable[[Any, Any, Any, Any], Any]: ...


class _Takes5(_Else[Else], Protocol[Else]):
    @property
    def __wrapped__(self) -> Callable[[Any, Any, Any, Any, Any], Any]: ...


class _Takes6(_Else[Else], Protocol[Else]):
    @property
    def __wrapped__(self) -> Callable[[Any, Any, Any, Any, Any, Any], Any]: ...


class _Takes7(_Else[Else], Protocol[Else]):
    @property
    def __wrapped__(self) -> Callable[[Any, Any, Any, Any, Any, Any, Any], Any]: ...


class _Takes8(_Else[Else], Protocol[Else]):
    @property
    def __wrapped__(self) -> Callable[[Any, Any, Any, Any, Any, Any, Any, Any], Any]: ...
