"""Kills, and what came of them."""

from __future__ import annotations

import collections


class Tally(collections.Counter[str]):
    """How many `outputs` there are, units `reused` by the calls that ended, and kills by moment."""

    @property
    def kills(self) -> int:
        return sum(self[moment] for moment in self._moments)

    @property
    def _moments(self) -> list[str]:
        return [name for name in self if name not in ("outputs", "reused")]

    def __str__(self) -> str:
        told = [
            f"{self.kills:,} kills, {self['outputs']:,} outputs, {self['reused']:,} units reused. "
            "Killed"
        ]
        return "\n".join(told + [f"{self[moment]:6,} {moment}" for moment in self._moments])
