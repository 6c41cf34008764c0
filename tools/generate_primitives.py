"""Writes docs/reference/primitives.md: every primitive that JAX exports, and which rule serves it.

    python tools/generate_primitives.py [file to write]

Run in a process of its own: libraries that add primitives to JAX's tables must
not have been imported.
"""

import importlib
import sys
from pathlib import Path

import jax

from batchax import _compat
from batchax.jaxprs.own_primitives import is_own
from batchax.kernel.registry import find_rule, rule_origin

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "primitives.md"

# Without operands that could be batched there is nothing for a rule to do.
NEVER_BATCHED = {
    "after_all": "takes tokens only",
    "create_token": "no operands",
    "empty": "no operands",
    "empty2": "no operands",
    "iota": "no operands, unless a size is dynamic",
}


def of_jax():
    """JAX's primitives by name, without those that batchax adds."""
    found = sorted(_compat.primitives_by_name().items())
    return {name: primitive for name, primitive in found if not is_own(primitive)}


def served_by(primitive):
    """Who batches a primitive: ("batchax", module), ("JAX", ""), ("nobody", why)."""
    if find_rule(primitive) is not None:
        return "batchax", rule_origin(primitive)
    if primitive.name in NEVER_BATCHED:
        return "nobody", NEVER_BATCHED[primitive.name]
    if _compat.jax_has_rule(primitive):
        return "JAX", ""
    return "one lane after another", ""


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
        f"Every primitive that JAX {jax.__version__} exports, and which batching rule serves it",
        f"under `bx.vmap`: {counts['batchax']} have a rule of batchax's own, {counts['JAX']} go to "
        "JAX's. Made by `make docs`.",
        "",
        "## By family",
        "",
    ]
    for module, names in sorted(families().items()):
        about = (importlib.import_module(module).__doc__ or "").strip().splitlines()[0]
        lines += [f"- **{module.rpartition('.')[2]}** ({len(names)}). {about}"]
    lines += ["", "## By name", "", "| primitive | rule |", "|---|---|"]
    for name, (who, detail) in served.items():
        rule = {
            "batchax": f"`{detail}`",
            "JAX": "JAX's, for this equation alone",
            "nobody": f"none needed: {detail}",
        }.get(who, who)
        lines.append(f"| `{name}` | {rule} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page())
