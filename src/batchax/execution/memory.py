"""How many lanes at a time fit into memory, by the compiler's own account."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from batchax.errors import ArgumentTypeError, MemoryLimitError

logger = logging.getLogger("batchax")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{prefix}i": 2 ** (10 * (i + 1)) for i, prefix in enumerate("kmgt")}
_FORMAT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Auto:
    """A chunk size still to be chosen: the largest that fits `limit` bytes.

    None stands for what the device has free when the choice is made.
    """

    limit: int | None


@dataclass(frozen=True)
class Choice:
    """How a chunk size was chosen.

    Attributes:
      chunk: lanes at a time.
      size: number of lanes.
      limit: bytes that were allowed.
      tried: the bytes that the compiled program needs for each chunk size tried.
    """

    chunk: int
    size: int
    limit: int
    tried: dict[int, int] = field(hash=False)

    def __str__(self) -> str:
        lines = [
            f"{self.chunk} of {self.size} lanes at a time: {show_bytes(self.tried[self.chunk])} "
            f"of the {show_bytes(self.limit)} allowed. The compiler's account (temporaries, "
            "arguments and outputs) of the sizes tried:"
        ]
        for chunk, needed in sorted(self.tried.items()):
            verdict = "fits" if needed <= self.limit else "too large"
            mark = "  <- chosen" if chunk == self.chunk else ""
            lines.append(f"  {chunk:>8} lanes: {show_bytes(needed):>10}  {verdict}{mark}")
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


_chosen: dict[Any, Choice] = {}


def fitting_chunk(
    auto: Auto,
    size: int,
    program: str,
    avals: Sequence[Any],
    compile_for: Callable[[int], Any],
) -> int:
    """The largest chunk whose program fits, to within about a twentieth.

    What a program needs grows about linearly with the chunk, so that few sizes have to
    be compiled: all lanes, one, and those where a line through what is known meets the
    limit. Choices are remembered.

    Args:
      auto: the limit.
      size: number of lanes.
      program: text of the program for one lane, to know it again.
      avals: types of its operands.
      compile_for: compiles the program for a chunk size.

    Raises:
      MemoryLimitError: one lane at a time needs more.
    """
    limit = free_memory() if auto.limit is None else auto.limit
    key = (program, tuple(map(str, avals)), size, auto, jax.default_backend())
    if key not in _chosen:
        _chosen[key] = _search(limit, size, lambda chunk: needed_bytes(compile_for(chunk)))
        logger.info("batch_size='auto': %s", _chosen[key])
    return _chosen[key].chunk


def _search(limit: int, size: int, needed: Callable[[int], int]) -> Choice:
    tried = {size: needed(size)}
    if tried[size] <= limit:
        return Choice(size, size, limit, tried)
    low, high = 1, size
    tried[low] = needed(low)
    if tried[low] > limit:
        raise MemoryLimitError(
            f"memory_limit is {show_bytes(limit)}, but one lane at a time needs "
            f"{show_bytes(tried[low])} by the compiler's account of temporaries, arguments and "
            f"outputs. Allow at least that, or make the arguments smaller."
        )
    while high - low > max(1, low // 20) and len(tried) < 10:
        slope = (tried[high] - tried[low]) / (high - low)
        guess = low + int((limit - tried[low]) / slope) if slope > 0 else (low + high) // 2
        # A guess at the edge of what is left would shrink it by one lane only.
        margin = max(1, (high - low) // 16)
        guess = min(max(guess, low + margin), high - margin)
        tried[guess] = needed(guess)
        if tried[guess] <= limit:
            low = guess
        else:
            high = guess
    return Choice(low, size, limit, tried)


def needed_bytes(compiled: Any) -> int:
    """Temporaries, arguments and outputs of a compiled program."""
    stats = compiled.memory_analysis()
    return (
        stats.temp_size_in_bytes
        + stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
    )


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
