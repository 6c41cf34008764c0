"""The command `batchax`: ``batchax explain``, ``batchax map``, and others."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from batchax.commands import dataset, demo, explain, slurm
from batchax.commands.words import Mistake
from batchax.errors import BatchaxError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status.

    0: done. 1: a command failed. 2: something in the command line is not as it must be. 3: done,
    but for rows that are quarantined. 130: interrupted; the same command goes on.
    """
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except (Mistake, BatchaxError) as error:
        print(f"batchax: {error}", file=sys.stderr)
        return 2 if isinstance(error, Mistake) else options.failed
    except BrokenPipeError:  # who reads it, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


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
