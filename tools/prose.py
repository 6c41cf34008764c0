"""Finds words and patterns that make batchax's prose hard to read. `make prose` runs it.

It reads the README, the pages, and the changelog, and in the code the docstrings, the comments, and
the text of messages. `tests/prose.txt` holds how many findings each folder may have. It only
falls: `make prose` writes lower ones there, and fails on higher ones.
`make prose ONLY=docs/guides/axes.md` lists the findings of a file or a folder.
"""

from __future__ import annotations

import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ALLOWED = ROOT / "tests" / "prose.txt"

# What not to write, and what to write in its place.
BANNED = {
    r"dear(er|est)?": "expensive, costly",
    r"(part|parts|parted|parting) ways|taken apart|part lanes": "diverge; run separately",
    r"surely( pays)?": "is never slower, is profitable",
    r"of use": "useful; utilization",
    r"(loops of|loops in) loops|nests?(?! depth)": "nested loops",
    r"of (its|their) own(?! kernel)": "independently; its own",
    r"neighbours?": "adjacent lanes; neighbors",
    r"one lane after another|in turns?": "sequentially; interleaved",
    r"(computed|made|computes|compute) again": "recompute",
    r"puts? off": "defer",
    r"one function of the compiler": "a single XLA kernel",
    r"what all lanes share|the same for all lanes": "unbatched (shared) arguments",
    r"size class(es)?": "size bucket",
    r"parted by": "specialized by",
    r"refuses?|refused": "raise, reject, not supported",
    r"compiler's account": "XLA's memory analysis",
    r"calls the host": "host callback",
    r"dealt( out)?|deals? out": "distributed, sharded",
    r"com(e|es) out even": "divide evenly",
    r"stores? of objects": "object storage",
    r"put on (a )?conditions?": "conditional put",
    r"(goes|gone|go|going) on with": "resume, continue",
    r"mend(s|ed|ing)?": "fix",
    r"anew": "again",
    r"forth": "forward",
    r"for ever": "forever",
    r"thrifty|thriftier": "economical",
    r"reckon(s|ed)?": "estimate",
    r"foresee(s|n)?|foresaw": "predict",
    r"but for": "except for",
    r"beside": "besides, next to",
    r"theirs|ours|peers|rivals": "jax.vmap, batchax; other libraries",
    r"rooms?|front doors?": "modules, entry point",
    r"promise(s|d)?": "guarantees",
    r"memos?": "cache",
    r"processors?": "CPU",
    r"nobody|somebody|whoever": "name the actor",
    r"(is|are|was|were) no (?!longer|more|less|fewer)": "is not a",
    r"of (yours|(the user|JAX|batchax|XLA)'s(?=[.,;:)]|$))": "your, JAX's",
    r"(is|are|was|were) (told|asked|said)": "receives, is passed",
    r"it is (looked|asked|said) (whether|if|that)": "name the actor",
    r"(0?\.|1/)\d+ of (the time|`?jax|the|by hand)": "5x faster; 1.4x the time",
    r"give(?= [`\w])": "pass",
    r"(was|were) given, (and|but|which)": "name the actor",
    r"go(es)? on from": "resume",
    r"leave \S+ out(?= of the|[.,;:]| if)": "remove",
    r"look who": "check who",
    r"make room": "free space",
    r"of what kind (this|it) is": "the format, the type",
    r"to begin again": "start over",
    r"what comes of": "the result of",
    r"to be had": "available",
    r"(as|so) many .{1,30} as there are": "one for each",
}
_PATTERN = re.compile(
    "|".join(rf"(?P<w{k}>(?<![\w./_-])(?:{p})(?![\w(=/_-]|\.\w))" for k, p in enumerate(BANNED)),
    re.IGNORECASE,
)
_CODE = re.compile(r"^( *)```.*?^\1```|``.+?``|`[^`\n]*`|\]\([^)\s]*\)|<!--.*?-->", re.M | re.S)


class Finding(NamedTuple):
    path: Path
    line: int
    text: str
    better: str


def findings(path: Path) -> Iterator[Finding]:
    """Yields the banned words and patterns of a page or a module."""
    text = path.read_text()
    for first, part in [(1, text)] if path.suffix == ".md" else _prose_of_module(text):
        # Code keeps its length in lines, so that lines can be counted.
        plain = _CODE.sub(lambda match: " `" + "\n" * match[0].count("\n") + "` ", part)
        for match in _PATTERN.finditer(plain):
            assert match.lastgroup is not None
            better = list(BANNED.values())[int(match.lastgroup[1:])]
            yield Finding(path, first + plain.count("\n", 0, match.start()), match[0], better)


def _prose_of_module(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings, texts of messages, and comments, each with its line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def files(only: str = "") -> list[Path]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "changes").glob("*.md")]
    found = [*pages, *(ROOT / "src").rglob("*.py")]
    return sorted(path for path in found if str(path.relative_to(ROOT)).startswith(only))


def folder_of(path: Path) -> str:
    return str(path.parent.relative_to(ROOT))


def counted() -> dict[str, int]:
    """The number of findings of each folder."""
    counts = collections.Counter({folder_of(path): 0 for path in files()})
    counts.update(folder_of(found.path) for path in files() for found in findings(path))
    return dict(counts)


def allowed() -> dict[str, int]:
    if not ALLOWED.exists():
        return {}
    pairs = (line.rsplit(" ", 1) for line in ALLOWED.read_text().splitlines())
    return {folder: int(count) for folder, count in pairs}


def main(only: str) -> int:
    if only:
        for path in files(only):
            for found in findings(path):
                where = f"{found.path.relative_to(ROOT)}:{found.line}"
                sys.stdout.write(f"{where}: {found.text}: {found.better}\n")
        return 0
    before, now = allowed(), counted()
    for folder, count in sorted(now.items(), key=lambda item: -item[1]):
        if count > before.get(folder, 0):
            sys.stdout.write(f"{folder}: {count}, at most {before.get(folder, 0)} allowed\n")
    if all(count <= before.get(folder, 0) for folder, count in now.items()):
        ALLOWED.write_text("".join(f"{folder} {n}\n" for folder, n in sorted(now.items()) if n))
        sys.stdout.write(f"{sum(now.values())} words to replace, none of them new.\n")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:] or [""]))
