"""Derivatives of flat functions: what primitives whose derivatives are primitives again need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from batchax.jaxprs.words import Aval, Value

Flat = Callable[..., list[Any]]
"""A function of arrays that returns a list of arrays."""


def with_values(xs: Sequence[Value], places: Sequence[int], values: Sequence[Value]) -> list[Any]:
    """`xs` with `values` at `places`."""
    full = list(xs)
    for i, x in zip(places, values, strict=True):
        full[i] = x
    return full


def tangents_of(
    function: Flat,
    primals: Sequence[Value],
    moving: Sequence[int],
    tangents: Sequence[Value],
    of: Sequence[int],
) -> tuple[list[Any], list[Any]]:
    """The results of `function`, and tangents of those `of`, from those of `moving` operands."""
    some, points = _of_moving(function, primals, moving, of)
    _, dots, outs = jax.jvp(some, points, tuple(tangents), has_aux=True)
    return outs, dots


def pullback_of(
    function: Flat, primals: Sequence[Value], moving: Sequence[int], of: Sequence[int]
) -> tuple[list[Any], Callable[[Sequence[Any]], Sequence[Any]]]:
    """The results of `function`, and from cotangents of those `of` to those of `moving` operands.

    The latter is a pytree of what it keeps of the former.
    """
    some, points = _of_moving(function, primals, moving, of)
    _, pull, outs = jax.vjp(some, *points, has_aux=True)
    return outs, pull


def _of_moving(
    function: Flat, primals: Sequence[Value], moving: Sequence[int], of: Sequence[int]
) -> tuple[Callable[..., tuple[list[Any], list[Any]]], tuple[Any, ...]]:
    """`function` of some operands, with the results `of` beside all of them; and the operands."""

    def some(*values: Any) -> tuple[list[Any], list[Any]]:
        outs = function(*with_values(primals, moving, values))
        return [outs[k] for k in of], outs

    return some, tuple(primals[i] for i in moving)


def transposed(
    function: Flat,
    others: Sequence[Any],
    linear: Sequence[int],
    types: Sequence[Aval],
    of: Sequence[int],
) -> Callable[[Sequence[Any]], list[Any]]:
    """The transpose of `function`, from cotangents of results to those of `linear` operands.

    Args:
      function: a function that is linear in some operands.
      others: the values of its other operands, in order.
      linear: those it is linear in.
      types: their types.
      of: the results whose cotangents are given; those of the others are zero.
    """
    rest = iter(others)
    blank = [None if i in linear else next(rest) for i in range(len(others) + len(linear))]

    def of_linear(*values: Any) -> list[Any]:
        outs = function(*with_values(blank, linear, values))
        return [outs[k] for k in of]

    pull = jax.linear_transpose(of_linear, *types)
    return lambda cotangents: list(pull(list(cotangents)))
