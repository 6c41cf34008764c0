"""The page of promises names tests that are there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "promises.md"


def named():
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())


def test_each_promise_names_tests_that_are_there():
    missing = []
    for file, name in named():
        tree = ast.parse((ROOT / file).read_text())
        there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        missing += [f"{file}::{name}"] * (name not in there)
    assert not missing
    assert len(named()) > 30


def test_each_row_of_a_table_names_one():
    rows = [x for x in PAGE.read_text().splitlines() if x.startswith("| ")]
    rows = [row for row in rows if "guarantee |" not in row]
    assert rows
    assert not [row for row in rows if not re.search(r"`tests/[\w/]+\.py::\w+`", row)]
