"""Which lines an explained function spends its work on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from batchax.explain.account import Account, Equation, Source, Work
from batchax.explain.findings.draft import price


@dataclass(frozen=True)
class Line:
    """A line, the equations that it made, and what these cost: each by itself."""

    source: Source
    equations: tuple[Equation, ...]
    work: Work


def lines_of(
    explanation: Account, by: Callable[[Source], Source] = lambda source: source
) -> list[Line]:
    """The lines that made equations, in the order of the program.

    Args:
      explanation: of which function.
      by: what line an equation is counted for, from the one that made it.
    """
    made: dict[Source, list[Equation]] = {}
    for eqn in explanation.walk():
        made.setdefault(by(eqn.source), []).append(eqn)
    return [
        Line(source, tuple(eqns), sum(map(_alone, eqns), Work())) for source, eqns in made.items()
    ]


def _alone(eqn: Equation) -> Work:
    """The work of an equation without that of its parts, which have lines of their own."""
    inside = sum((part.work for part in eqn.parts), Work())
    return Work(
        max(eqn.work.flops - inside.flops, 0.0),
        max(eqn.work.bytes - inside.bytes, 0.0),
    )


def own_line(source: Source) -> Source:
    """The user's own line: of a library's, the one that led there."""
    return source.called_from or source


def costliest_lines(explanation: Account) -> list[tuple[Line, float]]:
    """The user's lines that cost most, by the price of findings, each with its share of the whole.

    Where all is in one line, the lines of libraries that it led to. What costs less than a
    twentieth is left out, and so is everything where there is but one line.
    """
    lines = lines_of(explanation, own_line)
    if len(lines) == 1:
        lines = lines_of(explanation)
    whole = sum(price(line.work) for line in lines)
    if whole == 0 or len(lines) < 2:
        return []
    shares = [(line, price(line.work) / whole) for line in lines]
    shares.sort(key=lambda pair: -pair[1])
    return [(line, share) for line, share in shares[:_MOST] if share >= _LEAST_SHARE]


_MOST = 5  # lines that are named
_LEAST_SHARE = 0.05  # of the whole price, for a line to be named
