"""Turns the examples into notebooks: each function a cell, and `main()` at the end.

    python tools/notebooks.py [folder]        the default is out/notebooks

An example that starts itself as another process has to be a file: its notebook writes that,
and runs it.
"""

import ast
import itertools
import json
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def cells(source, name):
    """The cells of a notebook: their kinds and texts."""
    tree = ast.parse(source)
    docstring = ast.get_docstring(tree) or ""
    title, _, story = docstring.partition("\n\n")
    story = "\n".join(line for line in story.splitlines() if "python examples/" not in line)
    yield "markdown", f"# {title}\n\n{story}".strip()
    if "__file__" in source:
        yield "code", f"%%writefile {name}.py\n{source}"
        yield "code", f"import sys\n\n!{{sys.executable}} {name}.py"
    else:
        for statements in functions_apart(source, tree.body[1:]):
            yield "code", statements
        yield "code", "main()"
    if f'"{name}.png"' in source:
        yield "code", f'from IPython.display import Image\n\nImage("out/{name}.png")'


def functions_apart(source, statements):
    """The text of a program, cut before each function; comments stay with what they precede."""
    lines = source.splitlines()
    start = statements[0].lineno - 1
    for before, statement in itertools.pairwise(statements):
        last = isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
        if last or isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield "\n".join(lines[start : before.end_lineno]).strip("\n")
            start = before.end_lineno
        if last:
            return


def notebook(source, name):
    """A notebook of format 4.5, as its file holds it."""
    parts = [
        {"id": f"cell-{i}", "cell_type": kind, "metadata": {}, "source": text}
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for i, (kind, text) in enumerate(cells(source, name))
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": parts, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def main(folder="out/notebooks"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(EXAMPLES.glob("*.py")):
        written = folder / f"{path.stem}.ipynb"
        written.write_text(json.dumps(notebook(path.read_text(), path.stem), indent=1) + "\n")
        print(written)


if __name__ == "__main__":
    main(*sys.argv[1:])
