"""Chunks so small that they cost more than what they compute, and batches without chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from batchax.execution.memory import free_memory, show_bytes
from batchax.explain.account import Finding
from batchax.explain.findings.draft import Draft, pays
from batchax.explain.wording import count, show_seconds
from batchax.programs.weights import FINDINGS, LAUNCH

_MOST_OVERHEAD = 0.05  # of a chunk's time, where its size is well chosen
_TOO_MUCH = 0.25  # of it, where it is not
_CACHE = 4 << 20  # bytes of temporaries that are hardly worth making chunks for


def chunk_sizes(draft: Draft) -> Iterator[Finding]:
    """A `batch_size` far from the best: the smallest that hides what each chunk costs.

    Where it was measured, the fastest of those that were tried.
    """
    if draft.timings:
        yield from _measured(draft)
        return
    size = draft.options.get("batch_size")
    if not isinstance(size, int) or draft.each <= 1:
        return
    if any(eqn.times is None for eqn, _ in draft.walk()):
        return  # what a chunk computes is not known
    chunks = math.ceil(draft.each / size)
    work = draft.price / draft.lanes  # of a lane
    each = LAUNCH * _operations(draft)
    best = _power_of_two(each / (_MOST_OVERHEAD * max(work, 1e-3)), draft.each)
    share = each / max(each + size * work, 1e-3)
    if chunks > 1 and share > _TOO_MUCH and best >= 2 * size:
        yield Finding(
            "chunk size far from the best",
            f"{count(chunks, 'chunk')} of {count(size, 'lane')}: to begin the operations of each "
            f"takes about {share:.0%} of its time.",
            _remedy_of_small(draft, best),
            "",
            each * (chunks - math.ceil(draft.each / best)),
            advice={"batch_size": best if best < draft.each else None},
        )
    elif draft.temporaries and draft.temporaries > _CACHE and size >= 4 * best:
        each_lane = draft.temporaries / min(size, draft.each)
        best = max(best, 1 << max(0, math.floor(math.log2(_CACHE / each_lane))))
        if size < 4 * best:
            return
        yield Finding(
            "chunk size far from the best",
            f"{'All' if chunks == 1 else 'Chunks of'} {count(min(size, draft.each), 'lane')} at a "
            f"time need {show_bytes(draft.temporaries)} of temporaries, and are hardly faster than "
            "smaller ones.",
            f"Give batch_size={best}: {show_bytes(round(best * each_lane))} of them are enough.",
            "",
            FINDINGS.byte * draft.temporaries,
            advice={"batch_size": best},
        )


def _measured(draft: Draft) -> Iterator[Finding]:
    now, *others = draft.timings
    tried = [t for t in others if t.batch_size != "loop" and not t.advice]
    best = min(tried, key=lambda t: t.seconds, default=now)
    if not pays(now, best):
        return
    size = best.batch_size
    lanes = "all lanes at once" if size is None else f"{count(int(size), 'lane')} at a time"
    what = "All lanes at once" if now.batch_size is None else f"batch_size={now.batch_size!r}"
    peaks = "" if best.peak is None else f", with {show_bytes(best.peak)} of memory"
    yield Finding(
        "chunk size far from the best",
        f"{what} took {show_seconds(now.seconds)}, {lanes} {show_seconds(best.seconds)}{peaks}.",
        "Leave batch_size out." if size is None else f"Give batch_size={size}.",
        "",
        (now.seconds - best.seconds) * 1e9,
    )


def _operations(draft: Draft) -> int:
    """How many operations a chunk begins, those of branches that may not run left out."""
    shown = (draft.tallies.get(record) for _, record in draft.walk())
    return sum(len(t.emitted) for t in shown if t is not None and not t.skipped)


def _remedy_of_small(draft: Draft, best: int) -> str:
    if best < draft.each:
        return f"Give batch_size={best}."
    return "Leave batch_size out: all lanes together do little."


def _power_of_two(least: float, most: int) -> int:
    """The smallest power of two that is no less than `least`, or `most`."""
    return min(most, 1 << max(0, math.ceil(math.log2(max(least, 1.0)))))


def memory(draft: Draft) -> Iterator[Finding]:
    """All lanes at once, where temporaries take much of what the device has free."""
    if draft.options.get("batch_size") is not None or not draft.temporaries:
        return
    free = free_memory()
    if draft.each <= 1 or draft.temporaries < free / 2:
        return
    yield Finding(
        "temporaries fill the memory",
        f"All {count(draft.each, 'lane')} at once need {show_bytes(draft.temporaries)} of "
        f"temporaries, of {show_bytes(free)} that the device has free.",
        'Give batch_size="auto": as many lanes run at a time as fit.',
        "",
        FINDINGS.byte * draft.temporaries,
    )
