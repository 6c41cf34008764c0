"""The encoding of protocol buffers, in which compilers hand out what they know of a program.

A message is a sequence of fields, each with a number and a value: an integer, or bytes, which
may be a text, a message, or integers one after another. Which of these they are, the message
does not say; whoever reads it knows from the numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

Fields = defaultdict[int, list[Any]]


def read_message(data: bytes) -> Fields:
    """The values of each field, in order: none of a field that is at its default.

    Raises:
      ValueError: it is not a message.
    """
    fields: Fields = defaultdict(list)
    at = 0
    while at < len(data):
        key, at = _integer(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _integer(data, at)
        else:
            if kind == 2:
                size, at = _integer(data, at)
            elif kind in (1, 5):  # numbers of 8 and of 4 bytes
                size = 8 if kind == 1 else 4
            else:
                raise ValueError(f"no field of a message starts with {key}")
            value, at = data[at : at + size], at + size
        fields[key >> 3].append(value)
    if at > len(data):
        raise ValueError("a message ends within a field")
    return fields


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """The integer that starts there, and where it ends: seven bits to a byte, lowest first."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("a message ends within an integer")


def message(values: Sequence[bytes]) -> Fields:
    """The value of a field that holds a message."""
    return read_message(values[-1] if values else b"")


def messages(values: Sequence[bytes]) -> Iterator[Fields]:
    """The values of a field that holds messages."""
    return map(read_message, values)


def integers(values: Sequence[int | bytes]) -> tuple[int, ...]:
    """The values of a field that holds any number of integers, by themselves or packed."""
    numbers: list[int] = []
    for value in values:
        if isinstance(value, int):
            numbers.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _integer(value, at)
            numbers.append(one)
    return tuple(numbers)


def integer(values: Sequence[int]) -> int:
    """The value of a field that holds an integer."""
    return values[-1] if values else 0


def text(values: Sequence[bytes]) -> str:
    """The value of a field that holds a text."""
    return values[-1].decode() if values else ""
