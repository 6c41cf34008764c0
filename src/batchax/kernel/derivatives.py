"""Derivatives of flat functions: what primitives whose derivatives are primitives again need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

Flat = Callable[..., list[Any]]
"""A function of arrays that returns a list of arrays."""


def with_values(xs: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """`xs` with `values` at `places`."""
    full = list(xs)
    for i, x in zip(places, values, strict=True):
        full[i] = x
    return full


def tangents_of(
    function: Flat,
    primals: Sequence[Any],
    moving: Sequence[int],
    tangents: Sequence[Any],
    of: Sequence[int],
) -> tuple[list[Any], list[Any]]:
    """The results `of` of `function`, and their tangents, from those of the `moving` operands."""

    def of_moving(*values: Any) -> list[Any]:
        outs = function(*with_values(primals, moving, values))
        return [outs[k] for k in of]

    return jax.jvp(of_moving, tuple(primals[i] for i in moving), tuple(tangents))


def transposed(
    function: Flat,
    others: Sequence[Any],
    linear: Sequence[int],
    types: Sequence[Any],
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
