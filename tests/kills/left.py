"""What calls leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchax.datasets.plan import is_whole, unsealed
from kills.jobs import ROWS, UNIT


def left_by(out: Path) -> dict[str, Any]:
    """The files of an output, and those of its job that say what became of rows."""
    left: dict[str, Any] = {}
    for path in filter(Path.is_file, out.rglob("*")):
        name = str(path.relative_to(out))
        assert not name.endswith((".unfinished", "__lock")), f"{path} was left behind"
        if path.name == "quarantine.jsonl":  # tracebacks begin wherever the call was made
            entries = map(json.loads, path.read_text().splitlines())
            left[name] = [(entry["row"], entry["error"]) for entry in entries]
        elif ".job/" not in name or path.name == "ok.npy":
            left[name] = path.read_bytes()
    return left


def units_done(out: Path) -> list[int]:
    """The units in the journal, each as often as it was computed."""
    files = (p.read_bytes() for p in out.glob("*.job/journal/*"))
    lines = [line for content in files for line in content.split(b"\n")[:-1]]
    return [entry["unit"] for entry in unsealed(filter(is_whole, lines))]


def rows_of(units: list[int]) -> int:
    return sum(min(UNIT, ROWS - unit * UNIT) for unit in units)
