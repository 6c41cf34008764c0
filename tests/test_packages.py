"""The packages of the architecture page: imports go down, never up, and never in a circle."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "batchax"


def packages():
    """From the page: the name of each package, with how far down it is."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page[page.index("| package |") :].split("\n\n")[0].splitlines()[2:]
    return {
        name: depth
        for depth, row in enumerate(table)
        for name in re.findall(r"`([\w/.]+)`", row.split("|")[1])
    }


@functools.cache
def modules():
    """The modules of the package, by their names."""
    return {
        ".".join(["batchax", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): path
        for path in PACKAGE.rglob("*.py")
    }


@functools.cache
def imported(path):
    """The modules that a file imports, wherever in it."""
    return [*_imported(path)]


def _imported(path):
    known = modules()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def package_of(module):
    parts = module.split(".")[1:] or ["__init__"]
    return f"{parts[0]}/" if (PACKAGE / parts[0]).is_dir() else f"{parts[0]}.py"


def test_every_package_is_on_the_page_and_every_package_of_the_page_is_there():
    assert set(packages()) == set(map(package_of, modules()))


def test_imports_go_down():
    depths, wrong = packages(), []
    for module, path in modules().items():
        own = package_of(module)
        for other in imported(path):
            if other.split(".")[0] != "batchax" or package_of(other) == own:
                continue
            below = depths[package_of(other)] - depths[own]
            if below < 0 or (below == 0 and own.endswith("/")):
                wrong.append(f"{module} imports {other}")
    assert not wrong


def test_no_circles():
    known = modules()
    graph = {m: {o for o in imported(p) if o in known and o != m} for m, p in known.items()}
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for other in graph[module]:
            visit(other)
        path.pop()
        done.add(module)

    for module in sorted(graph):
        visit(module)


def names_of_private_modules(path):
    """Imports, attributes and texts that name private modules of JAX."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [f".{node.attr}"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        else:
            continue
        yield from (name for name in names if re.search(r"(jax|^)\._src\b", name))


def test_private_jax_is_in_one_package_only():
    private = {
        package_of(module)
        for module, path in modules().items()
        if any(True for _ in names_of_private_modules(path))
    }
    assert private == {"_compat/"}


def test_private_modules_are_found_however_they_are_named(tmp_path):
    ways = (
        "import jax._src.core",
        "from jax import _src",
        "from jax._src import core",
        "jax._src.core.Tracer",
        'importlib.import_module("jax._src.core")',
        '{"a": ("jax._src.lax", "add")}',
    )
    for way in ways:
        (tmp_path / "module.py").write_text(way)
        assert list(names_of_private_modules(tmp_path / "module.py")), way
