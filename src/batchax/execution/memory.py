"""How many lanes at a time fit into memory, by what the compiler says that programs need."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import jax

from batchax.errors import ArgumentTypeError, MemoryLimitError
from batchax.programs.peak import memory_of

logger = logging.getLogger("batchax")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{prefix}i": 2 ** (10 * (i + 1)) for i, prefix in enumerate("kmgt")}
_FORMAT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Auto:
    """A chunk size still to be chosen: the largest that fits `limit` bytes.

    A `limit` of None stands for what the device has free when the choice is made.
    `program` says for people what the choice is for.
    """

    limit: int | None
    program: str


@dataclass(frozen=True)
class BatchSizeChoice:
    """What ``batch_size="auto"`` chose, and why.

    Attributes:
      program: what it was chosen for, such as "loss" or "cotangents of loss".
      batch_size: lanes at a time.
      size: number of lanes.
      limit: bytes that were allowed.
      tried: for each batch size that was tried the bytes that the compiled program
        needs for temporaries, arguments and outputs.
    """

    program: str
    batch_size: int
    size: int
    limit: int
    tried: dict[int, int] = field(hash=False)

    def __str__(self) -> str:
        lines = [
            f"{self.program}: {self.batch_size} of {self.size} lanes at a time, which need "
            f"{show_bytes(self.tried[self.batch_size])} of the {show_bytes(self.limit)} allowed"
        ]
        for tried, needed in sorted(self.tried.items()):
            verdict = "fits" if needed <= self.limit else "too large"
            mark = " <- chosen" if tried == self.batch_size else ""
            lines.append(f"  {tried:>8} lanes: {show_bytes(needed):>10}  {verdict}{mark}")
        return "\n".join(lines)


def parse_limit(limit: Any) -> int | None:
    """Bytes from an int or a string such as "2GiB" or "500 MB".

    Raises:
      ArgumentTypeError: it is neither.
    """
    if limit is None:
        return None
    if isinstance(limit, str):
        match = _FORMAT.fullmatch(limit)
        number = float(match[1]) * _UNITS[match[2].lower()] if match else 0
    else:
        number = limit if isinstance(limit, (int, float)) and not isinstance(limit, bool) else 0
    if number < 1:
        raise ArgumentTypeError(
            'memory_limit must be a number of bytes or a string such as "2GiB" or "500MB", '
            f"got {limit!r}."
        )
    return int(number)


def show_bytes(count: int) -> str:
    """A number of bytes for people: "1.5 GiB"."""
    value, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{count} B" if unit == "B" else f"{value:.4g} {unit}"


_chosen: dict[Any, BatchSizeChoice] = {}


def batch_size_choices() -> list[BatchSizeChoice]:
    """What ``batch_size="auto"`` has chosen so far, and why; the newest choice last.

    A choice is made when a program is compiled: one for a function that runs forward,
    another for its derivative. The same are logged, at level INFO, by the logger
    "batchax". `str` of a choice is a table for people.
    """
    return list(_chosen.values())


def fitting_chunk(
    auto: Auto,
    size: int,
    key: Hashable,
    compile_for: Callable[[int], Any],
) -> int:
    """The largest chunk whose program fits, to within about a tenth.

    What a program needs grows about linearly with the chunk, so that few sizes have to
    be compiled: all lanes, one, and those where a line through what is known meets the
    limit. Choices are remembered.

    Args:
      auto: the limit.
      size: number of lanes.
      key: the same for programs that do the same, to know them again.
      compile_for: compiles the program for a chunk size.

    Raises:
      MemoryLimitError: one lane at a time needs more.
    """
    key = (key, auto, jax.default_backend())
    if key not in _chosen:
        limit = free_memory() if auto.limit is None else auto.limit

        def needed(chunk: int) -> int:
            return needed_bytes(compile_for(chunk))

        found = _chosen.setdefault(key, _search(auto.program, limit, size, needed))
        logger.info("batch_size='auto': %s", found)
    return _chosen[key].batch_size


_MOST_COMPILATIONS = 8


def _search(program: str, limit: int, size: int, needed: Callable[[int], int]) -> BatchSizeChoice:
    tried = {size: needed(size)}
    low, high = 1, size
    if tried[size] <= limit:
        return BatchSizeChoice(program, size, size, limit, tried)
    tried[low] = needed(low)
    if tried[low] > limit:
        raise MemoryLimitError(
            f"memory_limit is {show_bytes(limit)}, but {program} needs "
            f"{show_bytes(tried[low])} for one lane at a time, by the compiler's account of "
            "temporaries, arguments and outputs. Allow at least that, or make the arguments "
            "smaller."
        )
    bisect = False
    while high - low > max(1, low // 10) and len(tried) < _MOST_COMPILATIONS:
        gap, slope = high - low, (tried[high] - tried[low]) / (high - low)
        if bisect or slope <= 0:  # not linear after all
            guess = math.isqrt(low * high)
        else:
            guess = low + int((limit - tried[low]) / slope)
        guess = _without_rest(size, low, min(max(guess, low + 1), high - 1))
        tried[guess] = needed(guess)
        low, high = (guess, high) if tried[guess] <= limit else (low, guess)
        bisect = high - low > gap // 2
    return BatchSizeChoice(program, low, size, limit, tried)


def _without_rest(size: int, low: int, guess: int) -> int:
    """The largest chunk up to `guess`, and near it, of which a whole number makes `size`.

    A last chunk of another width would be a second program, with memory of its own.
    """
    fewest = max(low + 1, guess * 3 // 4)
    return next((c for c in range(guess, fewest - 1, -1) if size % c == 0), guess)


def needed_bytes(compiled: Any) -> int:
    """Temporaries, arguments and outputs of a compiled program."""
    return memory_of(compiled).bytes


def free_memory() -> int:
    """Bytes that the default device has free; for a CPU, those of the machine."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    try:
        with open("/proc/meminfo") as lines:
            found = dict(line.split(":", 1) for line in lines)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
