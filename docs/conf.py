"""The site: `make site` builds it, without a network, into out/site/."""

import inspect
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.domains import Domain, ObjType

import batchax as bx

ROOT = Path(__file__).parents[1]
SAID = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = SAID["name"]
author = SAID["authors"][0]["name"]
project_copyright = author
release = version = bx.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = []
# Generated benchmark pages are linked from their summary, and not in the navigation.
suppress_warnings = ["toc.not_included"]

# Titles can be linked to, as they can on the pages of the repository.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Docstrings are read in terminals more often than here: `name` is code in them.
default_role = "code"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80  # else a parameter a line
autodoc_member_order = "bysource"
napoleon_use_ivar = True  # attributes as one list
napoleon_use_rtype = False
# Names as users write them: `jax.Array`, not `jaxlib._jax.Array`.
python_use_unqualified_type_names = True
smartquotes = False  # what is in quotes is code more often than speech

html_theme = "furo"
html_title = f"batchax {release}"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_js_files = [("copy.js", {"defer": "defer"})]
html_search_scorer = str(ROOT / "docs" / "search_scorer.js")
# No links to the repository or to edit a page: there is no public address yet that answers.


class Parameters(Domain):
    """The parameters of public functions, for the search: `batch_size` leads to `vmap`."""

    name = "parameter"
    label = "parameter"
    object_types = {"of": ObjType("of a function")}  # noqa: RUF012

    def get_objects(self):
        for name, entry in self.env.domains.python_domain.objects.items():
            if entry.objtype != "function" or name.count(".") != 1:
                continue
            function = getattr(bx, name.partition(".")[2])
            # What `vmap` has is explained there; the others refer to it.
            priority = 0 if function is bx.vmap else 1
            for parameter in inspect.signature(function).parameters:
                path = f"{name}.{parameter}"
                yield path, path, "of", entry.docname, entry.node_id, priority


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


# Old addresses of pages, and where they are now.
MOVED = {
    "coming_from/netket_chunked_vmap": "coming_from/jax_vmap_and_lax_map",
    "coming_from/jax_autovmap": "coming_from/jnp_vectorize",
    "decisions/a_staged_program": "decisions/traced_jaxprs",
    "decisions/lanes_apart_by_cost": "decisions/divergence",
    "decisions/no_barrier_at_every_draw": "decisions/divergence",
    "decisions/windows": "decisions/divergence",
    "decisions/one_function": "decisions/single_kernels",
    "decisions/public_jax": "architecture",
    "decisions/rows_padded_and_packed": "decisions/variable_length_rows",
    "decisions/storage_by_entry_points": "decisions/storage",
    "decisions/the_journal": "decisions/crash_recovery",
    "decisions/units": "decisions/crash_recovery",
    "benchmarks": "benchmarks/index",
    "primitives": "reference/primitives",
    **{
        name: f"guides/{name}"
        for name in (
            "auto_vmap axes cluster custom_rules custom_rules_library datasets devices divergence "
            "explain extending large_batches nonfinite ragged"
        ).split()
    },
    **{
        f"benchmarks_{name}": f"benchmarks/{name}"
        for name in (
            "around bounded chunks cluster datasets devices divergence ranks rows rules".split()
        )
    },
}


def write_redirects(app, failed):
    """Old addresses lead to the new pages."""
    if failed or app.builder.format != "html":
        return
    for old, new in MOVED.items():
        page = Path(app.outdir) / f"{old}.html"
        target = "../" * old.count("/") + f"{new}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(
            f'<!doctype html><meta charset="utf-8"><title>Moved</title>'
            f'<meta http-equiv="refresh" content="0; url={target}">'
            f'<link rel="canonical" href="{target}"><a href="{target}">This page has moved.</a>'
        )


def setup(app):
    app.connect("build-finished", write_redirects)
    app.add_directive("command-help", CommandHelp)
    app.add_domain(Parameters)
