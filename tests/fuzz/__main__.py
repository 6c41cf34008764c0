"""Runs random programs: ``python -m fuzz --count 1000 --seed 0 --kind dense --jobs 2``.

A hundred programs share a seed: `--seed 30` goes on where thirty hundred were run. What fails is
made small and printed as a program to paste, and the run goes on; the last lines count.

With ``--flags default`` each program is compiled as a whole, with the flags of XLA that users have,
and each seed has a process of its own: one that ends is a failure, and the run goes on behind it.
"""

import argparse
import collections
import os
import sys
from importlib.metadata import version
from pathlib import Path

from fuzz import KINDS

# In the processes that run programs, too: they begin by importing this module.
FAST = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    *(["--xla_cpu_use_fusion_emitters=false"] if version("jaxlib") < "0.11" else []),
]


def parsed():
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; one for 100 programs")
    parser.add_argument("--count", type=int, default=1000, help="how many programs")
    parser.add_argument("--kind", choices=KINDS, default="dense")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes share them")
    parser.add_argument("--show", help="print programs that say nothing for this reason")
    parser.add_argument(
        "--flags",
        choices=["fast", "default"],
        default="fast",
        help="flags of XLA: those that compile fast, or its own",
    )
    return parser.parse_args()


OPTIONS = parsed()
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=4",  # for lanes that are spread over devices
        *(FAST if OPTIONS.flags == "fast" else []),
    ]
)
# Operations with their shapes come again in other processes and runs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[2] / ".cache" / "compiled")
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def main(options):
    import jax  # with these settings

    from fuzz.blocks import blocks

    known: collections.Counter[str] = collections.Counter()
    discarded: collections.Counter[str] = collections.Counter()
    programs = smaller = seconds = 0
    for block, took, printed in blocks(options, known):
        programs, smaller = programs + block.programs, smaller + block.smaller
        known.update(block.known)
        discarded.update(block.discarded)
        seconds += took
        print(
            f"{printed}{options.kind}, seed {block.number}: {programs} programs of "
            f"{options.count}, {sum(known.values())} failed in {len(known)} ways",
            flush=True,
        )
    print(
        f"JAX {jax.__version__}, {options.flags} flags: {programs} programs in {seconds:.0f} s of "
        "CPU time "
        f"({smaller} more to make failing ones small), {seconds / max(programs, 1):.3f} s each; "
        f"{sum(discarded.values())} said nothing, {sum(known.values())} failed in "
        f"{len(known)} ways"
    )
    for reason, times in discarded.most_common(25):
        print(f"  {times:6} said nothing: {reason}")
    for signature, times in known.most_common():
        print(f"  {times:6} failed: {signature}")
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main(OPTIONS))
