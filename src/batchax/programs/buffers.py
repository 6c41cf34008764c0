"""Where a compiler has put the values of a program in memory.

The numbers of fields are those of `xla/service/hlo.proto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from batchax.programs.wire import Fields, integer, integers, message, messages, read_message

Kind = Literal["argument", "output", "temporary", "constant"]


@dataclass(frozen=True, order=True)
class Place:
    """A piece of memory.

    Attributes:
      allocation: the number of the allocation that it is part of.
      offset: where in there it starts.
      bytes: its size.
      kind: what the allocation is for.
    """

    allocation: int
    offset: int
    bytes: int
    kind: Kind


# By the id of an instruction and the path to a value in what it returns.
Places = Mapping[tuple[int, tuple[int, ...]], Place]


def read_places(assignment: bytes) -> Places:
    """Reads a compiler's assignment of buffers: the place of each value that has one.

    A value without is another by another name, such as an element of a tuple.
    """
    fields = read_message(assignment)
    made = {integer(b[1]): message(b[3]) for b in messages(fields[1])}
    places = {}
    for allocation in messages(fields[3]):
        for assigned in messages(allocation[9]):
            place = Place(
                integer(allocation[1]),
                integer(assigned[2]),
                integer(assigned[3]),
                _kind(allocation),
            )
            location = made[integer(assigned[1])]
            places[integer(location[4]), integers(location[3])] = place
    return places


def _kind(allocation: Fields) -> Kind:
    if integer(allocation[5]):
        return "argument"
    if integer(allocation[12]):
        return "constant"
    return "output" if integer(allocation[7]) else "temporary"
