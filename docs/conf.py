"""The site: `make site` builds it, without a network, into out/site/."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).parents[1]
SAID = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = SAID["name"]
author = SAID["authors"][0]["name"]
project_copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = []

# Titles can be linked to, as they can on the pages of the repository.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Docstrings are read in terminals more often than here: `name` is code in them.
default_role = "code"
autodoc_typehints = "none"  # they say types and shapes themselves
autodoc_member_order = "bysource"
napoleon_use_ivar = True  # attributes as one list
napoleon_use_rtype = False
# Names as users write them: `jax.Array`, not `jaxlib._jax.Array`.
python_use_unqualified_type_names = True
smartquotes = False  # what is in quotes is code more often than speech

html_theme = "furo"
html_title = "batchax"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"source_repository": SAID["urls"]["Source"] + "/"}


class CommandHelp(Directive):
    """What ``batchax NAME --help`` prints."""

    required_arguments = 1

    def run(self):
        done = subprocess.run(
            [sys.executable, "-m", "batchax", *self.arguments, "--help"],
            env={**os.environ, "COLUMNS": "90"},
            capture_output=True,
            text=True,
            check=True,
        )
        return [nodes.literal_block(done.stdout, done.stdout, language="text")]


def setup(app):
    app.add_directive("command-help", CommandHelp)
