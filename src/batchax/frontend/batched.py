"""What type checkers and editors know of a function that was batched."""

from __future__ import annotations

from typing import Any, ParamSpec, Protocol, TypeVar, overload

P = ParamSpec("P")
Out = TypeVar("Out", covariant=True)
Else = TypeVar("Else", covariant=True)


class Batched(Protocol[P, Out, Else]):
    """A function of a batch, made of a function of one example whose parameters are `P`.

    What a batch of a type is, types cannot say: of a float it is an array, and an array for one
    example may be a `Ragged`. So there are two signatures. The first, of the function of one
    example, has the names that editors show, and returns `Out` for what it says of arrays. For
    all else there is the second, which takes anything, and returns `Else`.
    """

    __name__: str

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Out: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> Else: ...
