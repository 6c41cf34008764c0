"""The options of `vmap` for rows of different lengths; where sizes are found that differ."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jax

from batchax.errors import ArgumentTypeError
from batchax.frontend.options import check_count, check_one_of


class Layout(StrEnum):
    """Names the ways to hold rows while they are computed.

    Below `InRows.run` only AUTO, PACKED, and PADDED are known: others are branches there.
    """

    AUTO = "auto"
    PACKED = "packed"
    PADDED = "padded"
    GROUPED = "grouped"


class GroupsOfRows:
    """Base of what `buckets` may be besides a number: which rows run together."""


@dataclass(frozen=True)
class RowOptions:
    """Holds the options of `vmap` for variable-length rows."""

    layout: Layout = Layout.AUTO
    buckets: int | GroupsOfRows | None = None

    def check_used(self) -> None:
        """Raises an error for options of rows if no argument has rows."""
        given = {"buckets": self.buckets is not None, "layout": self.layout != Layout.AUTO}
        for option, there in given.items():
            if there:
                raise ArgumentTypeError(
                    f"{option} needs rows of different lengths, but no mapped argument is a "
                    f"batchax.Ragged. Pass one, or remove {option}."
                )


class SizesNeeded(Exception):
    """Notes that a function of one example needs sizes that it computes, where it has none.

    It is traced again then, with symbols for them. It may have handled the exception by itself.
    """

    is_noted = False

    def noted(self) -> SizesNeeded:
        self.is_noted = True
        return self


FINDING: ContextVar[Any] = ContextVar("batchax_finding", default=None)
"""The `SizesNeeded`, or the `Finding` if it has symbols, of the function that is being traced."""

# What `jax.jit` has traced where sizes may be found has their symbols in it, which mean nothing
# elsewhere.
IN_SCOPE = jax.make_user_context(None)


def find_row_options(
    layout: str, buckets: int | GroupsOfRows | None, batch_size: int | str | None
) -> RowOptions:
    """What the options of `vmap` ask for where rows are concerned.

    Raises:
      ArgumentTypeError: one is of the wrong type, or they do not go together.
      OptionError: `layout` is another word, or `buckets` is less than one.
    """
    if buckets is None and type(layout) is str and layout == Layout.AUTO:
        return RowOptions()
    buckets = _checked_buckets(buckets)
    check_one_of("layout", layout, *map(str, Layout))
    if layout == Layout.PACKED and batch_size is not None:
        raise ArgumentTypeError(
            'layout="packed" does not go with batch_size: chunks hold padded rows. Remove one of '
            "them; buckets= helps where padding takes too much memory."
        )
    if layout == Layout.GROUPED and buckets is not None:
        raise ArgumentTypeError(
            'layout="grouped" runs rows of one length together, and buckets= rows of similar '
            "length. Pass one of them."
        )
    return RowOptions(Layout(layout), buckets)


def _checked_buckets(buckets: int | GroupsOfRows | None) -> int | GroupsOfRows | None:
    if buckets is None or isinstance(buckets, GroupsOfRows):
        return buckets
    check_count("buckets", buckets, 1, or_none=True, other="the result of batchax.bucket(...)")
    return int(buckets)
