"""Line charts of what was measured, as SVG: a number over the batch size, both on log axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchax.explain.account import Account, Timing
from batchax.explain.page.markup import Html, size, tag
from batchax.explain.wording import show_seconds

_WIDTH, _HEIGHT = 440, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 422, 16, 236


@dataclass(frozen=True)
class Point:
    """A point of a line, and what it says."""

    lanes: int
    label: str
    height: float
    low: float
    high: float


@dataclass(frozen=True)
class LogAxis:
    """A log axis: `low` is at pixel `first`, `high` at `last`."""

    low: float
    high: float
    first: float
    last: float

    def at(self, number: float) -> float:
        """Where a number is, in pixels."""
        if self.high == self.low:
            return (self.first + self.last) / 2
        share = math.log(number / self.low) / math.log(self.high / self.low)
        return round(self.first + share * (self.last - self.first), 2)


def charts(explanation: Account) -> list[Html]:
    """Time and peak memory over the batch size; the loop is a line of reference."""
    sized = [t for t in explanation.timings if t.batch_size != "loop" and not t.advice]
    sized.sort(key=lambda t: _lanes(t, explanation.lanes))
    loop = next((t.seconds for t in explanation.timings if t.batch_size == "loop"), None)
    time = [
        Point(_lanes(t, explanation.lanes), _label(t), t.seconds, *t.spread)
        for t in sized
        if t.seconds > 0
    ]
    memory = [
        Point(_lanes(t, explanation.lanes), _label(t), t.peak, t.peak, t.peak)
        for t in sized
        if t.peak
    ]
    drawn = []
    if time:
        drawn.append(_chart("Time of one call", time, show_seconds, loop, 10))
    if memory:
        drawn.append(_chart("Peak memory", memory, size, None, 2))
    return drawn


def _lanes(timing: Timing, lanes: int) -> int:
    return timing.batch_size if isinstance(timing.batch_size, int) else lanes


def _label(timing: Timing) -> str:
    return "all" if timing.batch_size is None else f"{timing.batch_size:,}"


def _chart(
    title: str,
    points: Sequence[Point],
    show: Callable[[float], str],
    loop: float | None,
    base: int,
) -> Html:
    heights = [p.low for p in points if p.low > 0] + [p.high for p in points] + [loop or 0]
    heights = [h for h in heights if h > 0]
    ticks = _ticks(min(heights), max(heights), base)
    x = LogAxis(points[0].lanes, points[-1].lanes, _LEFT + 14, _RIGHT - 14)
    y = LogAxis(min(ticks[0], *heights), max(ticks[-1], *heights), _BOTTOM, _TOP)
    best = min(points, key=lambda p: p.height)
    said = f"{title} over batch size: least, {show(best.height)}, at {best.label}."
    shown: list[Html | None] = [tag("title", said)]
    for tick in ticks:
        shown.append(_line(_LEFT, y.at(tick), _RIGHT, y.at(tick), "grid"))
        shown.append(_text(_LEFT - 8, y.at(tick) + 4, show(tick), "end"))
    if loop:
        shown.append(_line(_LEFT, y.at(loop), _RIGHT, y.at(loop), "loop"))
        shown.append(_text(_LEFT + 4, y.at(loop) - 5, f"Python loop: {show(loop)}", "start"))
    path = " ".join(f"{x.at(p.lanes)},{y.at(p.height)}" for p in points)
    shown.append(tag("polyline", points=path, class_="curve"))
    free = -math.inf
    for p in points:
        across = x.at(p.lanes)
        shown += [_spread(across, p, y)]
        shown.append(
            tag(
                "circle",
                tag("title", f"{p.label} lanes at a time: {show(p.height)}"),
                cx=across,
                cy=y.at(p.height),
                r=4,
                class_="point",
            )
        )
        if across - free >= 34:  # labels that would overlap are left out; the table has all
            shown.append(_line(across, _BOTTOM, across, _BOTTOM + 5, "tick"))
            shown.append(_text(across, _BOTTOM + 19, p.label, "middle"))
            free = across
    shown.append(_text((_LEFT + _RIGHT) / 2, _HEIGHT - 6, "lanes at a time", "middle"))
    picture = tag("svg", shown, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=said)
    return tag("figure", tag("figcaption", title), picture)


def _spread(across: float, p: Point, y: LogAxis) -> Html | None:
    if p.high <= p.low or p.low <= 0:
        return None
    low, high = y.at(p.low), y.at(p.high)
    ends = [_line(across - 4, end, across + 4, end, "spread") for end in (low, high)]
    return tag("g", _line(across, low, across, high, "spread"), ends)


def _ticks(low: float, high: float, base: int) -> list[float]:
    """Powers of `base` around the data, at most six; tenths have 1, 2 and 5 if they are few."""
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    if base == 10 and last - first <= 2:
        steps = [m * 10.0**k for k in range(first, last + 1) for m in (1, 2, 5)]
        inside = [s for s in steps if low / 2.5 <= s <= high * 2.5]
        below = max((s for s in inside if s <= low), default=inside[0])
        above = min((s for s in inside if s >= high), default=inside[-1])
        return [s for s in inside if below <= s <= above]
    step = -(-(last - first) // 5) or 1
    last = first + step * -(-(last - first) // step)
    return [float(base) ** k for k in range(first, last + 1, step)]


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Html:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def _text(x: float, y: float, text: str, anchor: str) -> Html:
    return tag("text", text, x=x, y=y, text_anchor=anchor)
