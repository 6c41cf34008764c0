"""The command `batchax`: ``batchax explain``, ``batchax map``, and others."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from batchax.commands import dataset, demo, explain, slurm
from batchax.commands.words import Mistake, in_words_of_options, of_function
from batchax.errors import BatchaxError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status.

    0: done. 1: a command failed. 2: something in the command line is not as it must be. 3: done,
    except for rows that are quarantined. 130: interrupted; the same command goes on.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}{_meant(rest, options)}")
    try:
        return options.run(options)
    except (Mistake, BatchaxError) as error:
        print(f"batchax: {in_words_of_options(str(error), vars(options))}", file=sys.stderr)
        return 2 if isinstance(error, Mistake) else options.failed
    except (TypeError, ValueError) as error:  # the function does not fit its arguments, mostly
        if "function" not in options or sys.flags.dev_mode:
            raise
        option = "--in" if "inputs" in options else "a type in --args"
        print(f"batchax: {of_function(error, options.function, option)}", file=sys.stderr)
        return options.failed
    except BrokenPipeError:  # who reads it, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _meant(rest: Sequence[str], options: argparse.Namespace) -> str:
    """The option that is nearest to one that there is not."""
    names = ["--" + name.replace("_", "-") for name in vars(options)]
    near = [difflib.get_close_matches(r.replace("_", "-"), names, 1) for r in rest if r[:2] == "--"]
    return "".join(f" (did you mean {close[0]}?)" for close in near if close)


def _version() -> str:
    try:
        return version("batchax")
    except PackageNotFoundError:  # run from its sources
        return "from sources"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="batchax", description="The batching system for JAX.")
    parser.add_argument("--version", action="version", version=f"batchax {_version()}")
    commands = parser.add_subparsers(title="commands", required=True)
    explain.add_to(commands)
    dataset.add_to(commands)
    slurm.add_to(commands)
    demo.add_to(commands)
    return parser
