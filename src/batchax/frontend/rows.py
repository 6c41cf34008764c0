"""What `vmap` knows of rows: the options that are for them, and who runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from batchax.errors import ArgumentTypeError
from batchax.frontend.arguments import Mapped, MappedRows
from batchax.frontend.options import check_count, check_one_of
from batchax.frontend.outputs import Described


class Layout(StrEnum):
    """Names the ways to hold rows while they are computed."""

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


def find_row_options(
    layout: str, buckets: int | GroupsOfRows | None, batch_size: int | str | None
) -> RowOptions:
    """What the options of `vmap` ask for where rows are concerned.

    Raises:
      ArgumentTypeError: one is of the wrong type, or they do not go together.
      OptionError: `layout` is another word, or `buckets` is less than one.
    """
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


_found_by: list[Callable[[Described], Described]] = []


def finds_sizes(
    change: Callable[[Described], Described],
) -> Callable[[Described], Described]:
    """Registers what makes of a function of one example one that may find sizes."""
    _found_by[:] = [change]
    return change


def finding_sizes(function: Described) -> Described:
    """Returns `function`, of one example, where it may find sizes, as `batchax.compress` does."""
    (change,) = _found_by
    return change(function)


Pass = Callable[[Any], Any]
"""From a call to a call; `execution/`, above, has both."""

MakePass = Callable[[RowOptions, Any, Any], Pass]

_run_by: list[MakePass] = []


def runs_rows(make: MakePass) -> MakePass:
    """Registers what makes a pass of options for rows, the shards, and the chunks of lanes."""
    # Who runs rows lives above those who only need to know that there are rows.
    _run_by[:] = [make]
    return make


def pass_of_rows(options: RowOptions, mapped: Sequence[Mapped], shards: Any, chunking: Any) -> Pass:
    """Returns the pass for a call some of whose arguments are rows, which leaves any other as it
    is.
    """
    if any(isinstance(m, MappedRows) for m in mapped):
        (make,) = _run_by
        return make(options, shards, chunking)
    options.check_used()
    return lambda call: call
