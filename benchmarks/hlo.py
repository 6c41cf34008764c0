"""Text of compiled programs, in a form that is compared."""

from __future__ import annotations

import re
from collections import Counter


def normalised_hlo(text: str) -> str:
    """Normalizes optimized HLO by removing names and source lines."""
    text = re.sub(r"/\*.*?\*/", "", text)
    text = re.sub(r',? ?metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}', "", text)
    # Before the first computation: the module's name, and tables of source lines.
    lines = text.splitlines()
    first = next((i for i, x in enumerate(lines) if x.startswith(("%", "ENTRY"))), 0)
    lines = [re.sub(r"[\w.\-]+: ", "", x) if x.endswith("{") else x for x in lines[first:]]
    names: dict[str, str] = {}
    return re.sub(
        r"%[\w.\-]+", lambda m: names.setdefault(m[0], f"%{len(names)}"), "\n".join(lines)
    )


def operations(hlo: str) -> Counter[str]:
    return Counter(re.findall(r"= (?:\([^=]*?\)|\S+) ([a-z][\w\-]*)\(", hlo))
