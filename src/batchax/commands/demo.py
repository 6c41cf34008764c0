"""``batchax demo``: gradients of examples on real data, with a picture."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

from batchax.commands.words import Commands, Mistake

# A wheel has the example next to this file; a checkout has it in `examples/`.
_PLACES = (
    Path(__file__).with_name("digits.py"),
    Path(__file__).parents[3] / "examples" / "digits.py",
)


def add_to(commands: Commands) -> None:
    command = commands.add_parser(
        "demo",
        help="run an example on real data, and draw its result",
        description="Finds which handwritten digits a classifier finds hard, by the gradient of "
        "each, and draws them. It needs matplotlib and scikit-learn: pip install 'batchax[demo]', "
        "or '.[demo]' in a checkout.",
    )
    command.add_argument(
        "folder", nargs="?", default="out", help="where the picture goes (default: out)"
    )
    command.set_defaults(run=_demo, failed=1)


def _demo(options: argparse.Namespace) -> int:
    place = next((place for place in _PLACES if place.is_file()), None)
    if place is None:
        raise Mistake("demo: the example is not there. Install batchax again, with its extra demo.")
    runpy.run_path(str(place))["main"](options.folder)
    return 0
