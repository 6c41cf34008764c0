"""All kinds of findings, dearest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from batchax.explain.explanation import Finding
from batchax.explain.findings.draft import Draft

_KINDS: tuple[Callable[[Draft], Iterator[Finding]], ...] = ()


def find_findings(draft: Draft) -> tuple[Finding, ...]:
    """What costs more than it would have to, or that one would not expect, dearest first."""
    found = [finding for kind in _KINDS for finding in kind(draft)]
    return tuple(sorted(found, key=lambda finding: -finding.cost))
