"""Writes docs/reference/primitives.md: every primitive that JAX exports, and which rule serves it.

    python tools/generate_primitives.py [file to write]

Run in a process of its own: libraries that add primitives to JAX's tables must
not have been imported.
"""

import importlib
import sys
import textwrap
from pathlib import Path

import jax

from batchax import _compat
from batchax.jaxprs.primitive_facts import is_own
from batchax.kernel.registry import find_rule, rule_origin

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "primitives.md"

# These have no operands that could be batched: tokens only, none, or sizes.
NEVER_BATCHED = {"after_all", "create_token", "empty", "empty2", "iota"}


def of_jax():
    """JAX's primitives by name, without those that batchax adds."""
    found = sorted(_compat.primitives_by_name().items())
    return {name: primitive for name, primitive in found if not is_own(primitive)}


def served_by(primitive):
    """How a primitive is batched: "batchax" with its module, "JAX", "nothing", "sequentially"."""
    if find_rule(primitive) is not None:
        return "batchax", rule_origin(primitive)
    if primitive.name in NEVER_BATCHED:
        return "nothing", ""
    if _compat.jax_has_rule(primitive):
        return "JAX", ""
    return "sequentially", ""


def families():
    """Names of the primitives that batchax has rules for, by module."""
    found = {}
    for name, primitive in of_jax().items():
        who, module = served_by(primitive)
        if who == "batchax":
            found.setdefault(module, []).append(name)
    return found


def page():
    served = {name: served_by(primitive) for name, primitive in of_jax().items()}
    counts = {who: sum(w == who for w, _ in served.values()) for who in ("batchax", "JAX")}
    lines = [
        "# Primitives",
        "",
        f"The batching rule of each primitive that JAX {jax.__version__} exports, under `bx.vmap`:",
        f"{counts['batchax']} have a rule of batchax, {counts['JAX']} use JAX's.",
        "`make docs` writes this page.",
    ]
    for module, names in sorted(families().items()):
        about = (importlib.import_module(module).__doc__ or "").strip().splitlines()[0]
        lines += ["", f"## `{module}`", "", about, "", *_listed(names)]
    for title, who in [
        ("JAX's rule", "JAX"),
        ("Sequentially", "sequentially"),
        ("No rule needed", "nothing"),
    ]:
        if names := [name for name, (other, _) in served.items() if other == who]:
            lines += ["", f"## {title}", "", *_listed(names)]
    return "\n".join(lines) + "\n"


def _listed(names):
    """The names in lines of a page."""
    return textwrap.wrap(", ".join(f"`{name}`" for name in names), 120, break_on_hyphens=False)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page())
