"""How many lanes run at a time: those that fit into memory, and those that are fast."""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import jax

from batchax.cache import Cache
from batchax.errors import ArgumentTypeError, MemoryLimitError, OptionError
from batchax.execution.devices import meetings
from batchax.jaxprs.error_format import brief

logger = logging.getLogger("batchax")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{prefix}i": 2 ** (10 * (i + 1)) for i, prefix in enumerate("kmgt")}
_FORMAT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class CompilersAccount:
    """Holds XLA's memory analysis of a program, in bytes."""

    arguments: int
    outputs: int
    temporaries: int  # the peak of intermediate values
    aliased: int  # outputs that reuse the memory of an argument
    code: int  # machine code, and constants embedded in it

    @property
    def bytes(self) -> int:
        """Returns what the device must hold, with aliased outputs counted once."""
        return self.arguments + self.outputs + self.temporaries - self.aliased


def memory_of(compiled: jax.stages.Compiled) -> CompilersAccount:
    stats = compiled.memory_analysis()
    assert stats is not None
    return CompilersAccount(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.generated_code_size_in_bytes,
    )


@dataclass(frozen=True)
class Auto:
    """Stands for a chunk size to choose: the fastest that fits into `limit` bytes.

    None: what the device has free at that time. `program` names the choice in messages; `together`
    makes several processes choose it jointly.
    """

    limit: int | None
    program: str
    together: bool = False


@dataclass(frozen=True)
class BatchSizeChoice:
    """Describes a choice of ``batch_size="auto"``. Its text is a table.

    Attributes:
      program: The name of the program, such as "loss" or "cotangents of loss".
      batch_size: The chosen number of lanes.
      size: The number of lanes of the batch.
      limit: The memory limit in bytes.
      tried: For each batch size that was tried, the bytes of temporaries, arguments, and outputs of
        the compiled program.

    Example:
      >>> def f(x):
      ...     return jnp.sort(jnp.outer(x, x), axis=None)[0]
      >>> smallest = bx.vmap(f, batch_size="auto", memory_limit="1MiB")(jnp.ones((1000, 32)))
      >>> print(bx.batch_size_choices()[-1])
      f: ... of 1000 lanes at a time, which need ... of the 1 MiB allowed
      ...
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


def parse_limit(limit: object) -> int | None:
    """Parses bytes from an int or a string such as "2GiB" or "500 MB". Raises ArgumentTypeError."""
    if limit is None:
        return None
    if isinstance(limit, str):
        match = _FORMAT.fullmatch(limit)
        number = float(match[1]) * _UNITS[match[2].lower()] if match else 0
    else:
        number = limit if isinstance(limit, (int, float)) and not isinstance(limit, bool) else 0
    if not 1 <= number < math.inf:
        is_typed = isinstance(limit, (str, int, float)) and not isinstance(limit, bool)
        error = OptionError if is_typed else ArgumentTypeError
        raise error(
            'memory_limit must be a number of bytes or a string such as "2GiB" or "500MB", '
            f"got {brief(limit)}."
        )
    return int(number)


def show_bytes(count: int) -> str:
    value, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{count} B" if unit == "B" else f"{value:.4g} {unit}"


_chosen = Cache("choices of chunk sizes", most=1024)


def batch_size_choices() -> list[BatchSizeChoice]:
    """Lists the choices of ``batch_size="auto"``, the last one last.

    A choice is made when a program is compiled: one for the forward program, another for its
    derivative. The logger "batchax" logs each at level INFO. The last 1024 choices are kept, until
    ``jax.clear_caches()``.

    Returns:
      A new list of `BatchSizeChoice`.

    Example:
      >>> total = bx.vmap(jnp.sum, batch_size="auto", memory_limit="1MiB")(jnp.ones((100, 3)))
      >>> choice = bx.batch_size_choices()[-1]
      >>> choice.size, choice.tried[choice.batch_size] <= choice.limit
      (100, True)
    """
    return _chosen.values()


def fitting_chunk(
    auto: Auto,
    size: int,
    key: Hashable,
    compile_for: Callable[[int], Any],
    all_at_first: bool = False,
    least: float | None = None,
) -> int:
    """Chooses the fastest chunk size whose program fits, within about a quarter.

    `compile_for` compiles the program for a size, and `key` caches the choice. `least` is the
    number of lanes from which the start of a chunk is cheap: so many suffice if a cache holds the
    temporaries of no more; None: more lanes are always faster. Raises MemoryLimitError if one lane
    does not fit.
    """
    key = (key, auto, jax.default_backend())

    # Memory grows about linearly with the chunk. A small chunk is compiled first, and its analysis
    # predicts where the limit is met; then a chunk of about that size, and others only if that was
    # far off.
    def choose() -> BatchSizeChoice:
        # Processes that choose differently would deadlock, so they decide by the process with the
        # least memory.
        most = functools.partial(_most_of_all, auto.program) if auto.together else list
        (over,) = most([-(free_memory() if auto.limit is None else auto.limit)])
        limit = -over
        start = time.monotonic()

        def account(chunk: int) -> CompilersAccount:
            waited = time.monotonic() - start
            # The user waits for this, and does not see what is logged below.
            log = logger.warning if waited > _PATIENCE else logger.info
            log(
                "batch_size='auto': compiling %s for %d of %d lanes at a time, to see what it "
                "needs (after %.0f s)", auto.program, chunk, size, waited,
            )  # fmt: skip
            return CompilersAccount(*most(astuple(memory_of(compile_for(chunk)))))

        first = size if all_at_first else _SMALL
        choice = _search(auto.program, limit, size, account, first, least)
        logger.info("batch_size='auto': %s", choice)
        return choice

    return _chosen.get(key, choose).batch_size


def _most_of_all(program: str, numbers: Sequence[int]) -> list[int]:
    of_all = meetings.of_this_process().meet(f"the choice of batch_size for {program}", "", numbers)
    return list(map(max, *of_all))


_PATIENCE = 5.0  # seconds that a choice may take before batchax logs what it does
_SMALL = 8  # lanes whose memory analysis predicts that of more
# Bytes of the temporaries of a chunk that a cache holds: of more, each operation reads from memory
# what another has written. CPU time for 8,192 lanes on two cores, over that of the best of
# six chunk sizes, by megabytes of temporaries; the last of each is all lanes at once:
#   softmax(q @ q.T) @ q of 32 x 16    2: 1.00     8: 1.26    33: 1.71
#   sorts of 48 x 48                   3.5: 1.01   14: 1.00   57: 1.20   227: 1.46
#   Fourier transforms of 32 x 32      2.6: 1.00   10: 1.04   42: 1.37   168: 2.32
# Chains of elementwise functions have none: 1.00 to 1.06 in chunks of any size. Chunks of 8 lanes,
# beginning which is much of their work, take 1.40 for products of own 16 x 16 matrices and 1.35 for
# shared ones of 256 x 128; chunks of 128 lanes 1.05 and 1.00.
_CACHE = 4_000_000
_FLAT = 2  # within such a factor of the best chunk time changes little: no loop and no compilation
_MOST_COMPILATIONS = 6  # to choose a chunk size: each takes as long as that of the call
_WORTH_IT = 1.25  # so much larger must a chunk be to be compiled, too


def _search(
    program: str,
    limit: int,
    size: int,
    account: Callable[[int], CompilersAccount],
    first: int = _SMALL,
    least: float | None = None,
) -> BatchSizeChoice:
    tried: dict[int, int] = {}
    held: dict[int, int] = {}

    def fits(chunk: int) -> bool:
        needs = account(chunk)
        tried[chunk], held[chunk] = needs.bytes, needs.temporaries
        if len(tried) == 1:  # what does not grow with the chunk, as far as one account tells
            tried[0] = needs.bytes - needs.temporaries
        return needs.bytes <= limit

    def enough() -> float:
        """Estimates from how many lanes on a larger chunk is slower."""
        if least is None:
            return size
        *below, last = sorted(held)
        # Temporaries grow by `grows` bytes a lane.
        grows = (
            held[last] / last if not below else (held[last] - held[below[-1]]) / (last - below[-1])
        )
        lanes = max(least, _CACHE / grows) if grows > 0 else size
        if not below:  # part of it may not grow
            lanes = max(lanes, _SMALL * last)
        return size if size <= _FLAT * lanes else lanes

    low, high = 0, size + 1  # the largest that fits, the smallest that does not
    guess = min(first, size)
    while len(tried) - 1 < _MOST_COMPILATIONS:
        low, high = (guess, high) if fits(guess) else (low, guess)
        if high == 1:
            raise MemoryLimitError(
                f"memory_limit is {show_bytes(limit)}, but {program} needs {show_bytes(tried[1])} "
                "for one lane at a time, by XLA's memory analysis of temporaries, arguments and "
                "outputs. Allow at least that, or make the arguments smaller."
            )
        if not low:
            guess = _SMALL if high > _SMALL else 1
            continue
        chunks = sorted(tried)
        # Interpolate between the neighboring measurements around the limit, or extrapolate.
        below = max(chunks.index(low) - 1, 0) if high > size else chunks.index(low)
        first, second = chunks[below], chunks[below + 1]
        slope = (tried[second] - tried[first]) / (second - first)
        meets = first + (limit - tried[first]) / slope if slope > 0 else size
        most = min(meets, high - 1)
        worth = _WORTH_IT if most <= enough() else _FLAT
        guess = _without_rest(size, low, int(min(most, enough())))
        if guess <= low or guess < min(worth * low, size):
            break
    del tried[0]
    if least is not None:
        fitting = [chunk for chunk, needs in tried.items() if needs <= limit]
        low = max((c for c in fitting if c <= _FLAT * enough()), default=min(fitting))
    return BatchSizeChoice(program, low, size, limit, tried)


def _without_rest(size: int, low: int, guess: int) -> int:
    """Returns the largest chunk near `guess`, and not above it, that divides `size`."""
    # A last chunk of another width would be a second program, with its own memory.
    fewest = max(low + 1, guess * 3 // 4)
    return next((c for c in range(guess, fewest - 1, -1) if size % c == 0), guess)


def free_memory() -> int:
    """Returns the free bytes of the default device; of the machine for a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
