"""What editors know of batchax: type checkers say of the examples what is written there."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import batchax as bx
from batchax.vmap import MoreOptions, Options

EXAMPLES = Path(__file__).with_name("examples.py")
ROOT = EXAMPLES.parents[2]


# The rules of mypy, by what pyright calls them.
RULES = {
    "call-arg": "reportCallIssue",
    "call-overload": "reportCallIssue",
    "arg-type": "reportArgumentType",
    "attr-defined": "reportAttributeAccessIssue",
}


def written(checker):
    """What a checker, the first or the second, is to say, by the number of the line."""
    said = {}
    for i, line in enumerate(EXAMPLES.read_text().splitlines(), 1):
        if "  # " in line:
            each = line.split("  # ")[1].split(" | ")
            said[i] = each[checker if len(each) > 1 else 0]
    return said


def test_pyright_says_what_is_written():
    pytest.importorskip("pyright")
    checker = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    run = subprocess.run([*checker, EXAMPLES], cwd=ROOT, capture_output=True, text=True)
    said = {}
    for message in json.loads(run.stdout)["generalDiagnostics"]:
        revealed = re.search(r' is "(.*)"$', message["message"])
        told = message.get("rule") or (revealed and _short(revealed[1])) or message["message"]
        said[message["range"]["start"]["line"] + 1] = told
    assert said == written(0)


def test_mypy_says_what_is_written():
    pytest.importorskip("mypy")
    checker = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--output=json"]
    run = subprocess.run(
        [*checker, "--cache-dir", ROOT / ".cache" / "mypy", EXAMPLES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": ""},
    )
    said = {}
    for line in run.stdout.splitlines():
        message = json.loads(line)
        revealed = re.search(r'^Revealed type is "(.*)"$', message["message"])
        if revealed or message["severity"] == "error":
            told = _short(revealed[1]) if revealed else RULES.get(message["code"])
            said[message["line"]] = told
    assert said == written(1)


def _short(shown):
    """A type as the examples have it, whichever checker shows it."""
    named = re.fullmatch(r"tuple\[.*, fallback=\w+\.(\w+)\]", shown)
    return (
        named[1] if named else re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", shown).replace("Unknown", "Any")
    )


def test_options_that_are_passed_on_are_those_of_vmap():
    parameters = inspect.signature(bx.vmap).parameters.values()
    types = {p.name: p.annotation for p in parameters if p.name not in ("fun", "in_axes")}
    assert {k: t.__forward_arg__ for k, t in Options.__annotations__.items()} == types
    assert MoreOptions.__annotations__ == {
        k: t for k, t in Options.__annotations__.items() if k != "out_axes"
    }
