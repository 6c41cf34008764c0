"""Kills calls of `map` in every way, each until it ends in spite of it; compares what they leave.

`python -m kills --count 1000 --seed 0` kills so many, in the shares of `KINDS`; with `--only disk`
of one kind alone. Each kind is a process of its own, for some fork theirs.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

from kills import tally


class Kind(NamedTuple):
    """Something that kills calls.

    Attributes:
      share: of all kills.
      where: module and function, of how many kills, a seed and a folder; returns a `tally.Tally`.
      what: for people.
    """

    share: float
    where: str
    what: str


KINDS = {
    "disk": Kind(0.38, "kills.disk:run", "calls to a disk, at a step of writing"),
    "again": Kind(
        0.07, "kills.disk:run_again", "the same, where rows are added, or all start over"
    ),
    "losing": Kind(0.05, "kills.disk:run_losing", "the same, where files of results are deleted"),
    "s3": Kind(0.20, "kills.objects:run", "calls to S3, at a step of writing"),
    "google": Kind(0.06, "kills.objects:run_google", "calls to gs:// if that is installed"),
    "azure": Kind(0.04, "kills.objects:run_azure", "calls to az:// if that is installed"),
    "network": Kind(0.12, "kills.network:run", "networks to S3, cut in the middle of a call"),
    "processes": Kind(0.04, "kills.engines:run", "callers and workers, and shards"),
    "dask": Kind(0.02, "kills.dask:run_clients", "clients of Dask"),
    "scheduler": Kind(0.02, "kills.dask:run_schedulers", "schedulers of Dask"),
}


def one(kind: str, count: int, seed: int) -> None:
    """Kills so many of a kind, and a few more."""
    module, _, function = KINDS[kind].where.partition(":")
    warnings.filterwarnings("error", ".* is damaged")  # a line torn by a kill is not
    logging.getLogger("jax").setLevel(logging.CRITICAL)  # rows that fail are meant to
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        told: tally.Tally = getattr(importlib.import_module(module), function)(
            count, seed, Path(root)
        )
    print(f"{told}\n{time.perf_counter() - begin:.0f} s: what is left is what calls leave that end")


def main() -> None:
    parser = argparse.ArgumentParser(prog="kills", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, help="one kind, in this process")
    options = parser.parse_args()
    if options.only:
        return one(options.only, options.count, options.seed)
    failed = []
    for name, kind in KINDS.items():
        count = max(1, round(options.count * kind.share))
        print(f"{name}: {kind.what}", flush=True)
        more = ["--count", str(count), "--seed", str(options.seed), "--only", name]
        if subprocess.run([sys.executable, "-m", "kills", *more]).returncode:
            failed.append(name)
    sys.exit(f"lost: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
