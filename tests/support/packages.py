"""Packages as if they were installed: a module, and what its pyproject.toml says."""

import re
import tomllib

FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def install(folder, name, code, groups, version="1.0"):
    """Puts a package into a folder that Python looks for modules in.

    Args:
      folder: the folder.
      name: of the package; its module has the same with underscores.
      code: of the module.
      groups: its entry points: for each group, their names and what they mean.
      version: of the package.
    """
    module = name.replace("-", "_")
    said = folder / f"{module}-{version}.dist-info"
    said.mkdir(parents=True)
    (folder / f"{module}.py").write_text(code)
    (said / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (said / "entry_points.txt").write_text("\n".join(lines))


def install_of_page(page, folder):
    """Installs what a page's first block of Python is, and its block of TOML says."""
    blocks = FENCE.findall(page.read_text())
    code = next(text for language, text in blocks if language == "python")
    project = next(tomllib.loads(text) for language, text in blocks if language == "toml")[
        "project"
    ]
    install(folder, project["name"], code, project["entry-points"], project["version"])
