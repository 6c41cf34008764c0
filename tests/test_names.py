"""Names say what a value is: which `found`, `known` or `wanted` thing it holds."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "batchax"
VAGUE = {"found", "known", "wanted"}


def locals_of(function):
    """The names that a function binds, those of functions inside it aside."""
    inside = [function.args, *function.body]
    while inside:
        node = inside.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        inside.extend(ast.iter_child_nodes(node))


def test_no_locals_are_only_found_known_or_wanted():
    vague = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not VAGUE.isdisjoint(locals_of(node))
    ]
    assert not vague, "\n".join(["Say what was found, known or wanted in:", *vague])
