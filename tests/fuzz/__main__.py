"""Runs random programs: ``python -m fuzz --count 1000 --seed 0 --kind dense``."""

import argparse
import collections
import gc
import json
import os
import resource
import sys
import time

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_force_host_platform_device_count=2",  # for lanes that are spread over devices
    ]
)

import jax
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz.judge import Discarded, Found, judge
from fuzz.rows import draw_rows, judge_rows
from fuzz.ways import draw_case

MOST_SMALLER = 150  # programs tried to make a failing one smaller
BLOCK = 100  # programs for one seed
MOST_MEMORY = 4_000_000  # KiB; compiled operations are kept until the process has taken as much
DRAWN = {"dense": (draw_case, judge), "ragged": (draw_rows, judge_rows)}


class Enough(BaseException):
    """Ends the search for a smaller program."""


class Run:
    """Counts, and what was found."""

    def __init__(self, kind, log, show):
        self.kind, self.log, self.show = kind, log, show
        self.programs, self.smaller, self.discarded = 0, 0, collections.Counter()
        self.known = collections.Counter()
        self.cleared = 1
        self.began = time.process_time()

    def block(self, number, count):
        """The programs of one seed; a failing one is made as small as can be."""
        last = []
        drawn, judged = DRAWN[self.kind]

        @seed(number)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )
        @given(st.data())
        def programs(data):
            case = drawn(lambda n: data.draw(_below(n)) if n > 1 else 0)
            last[:] = [case]
            if not failing:
                self.programs += 1
            elif self.smaller < most:
                self.smaller += 1
            else:
                raise Enough
            try:
                judged(case)
            except Discarded as reason:
                self.discard(number, case, reason)
            except Found as found:
                if found.signature in self.known:
                    self.known[found.signature] += 1
                    return
                failing[case.script()] = found
                raise

        failing: dict[str, Found] = {}
        most = self.smaller + MOST_SMALLER
        try:
            programs()
        except (Found, Enough):
            found = failing[min(failing, key=len)]
            self.known[found.signature] += 1
            self.write(seed=number, found=found.signature, text=str(found))
        except Exception as error:  # of the generator
            case = last[0].script() if last else ""
            self.write(seed=number, found=type(error).__name__, text=f"{error!r}\n{case}")

    def discard(self, number, case, reason):
        self.discarded[str(reason)[:200]] += 1
        if self.show and self.show in str(reason):
            print(f"--- seed {number}: {reason}\n{case.script()}\n", flush=True)

    def write(self, **entry):
        if self.log:
            with open(self.log, "a") as file:
                file.write(json.dumps(entry) + "\n")
        if "text" in entry:
            print(f"--- seed {entry['seed']}: {entry['found']}\n{entry['text']}\n", flush=True)

    def summary(self):
        seconds = time.process_time() - self.began
        return (
            f"{self.programs} programs in {seconds:.0f} s of processor time "
            f"({self.smaller} more to make failing ones small) "
            f"({seconds / max(self.programs, 1):.3f} s each), {sum(self.discarded.values())} of "
            f"them said nothing, {sum(self.known.values())} failed in {len(self.known)} ways"
        )


_strategies = {}


def _below(n):
    if n not in _strategies:
        _strategies[n] = st.integers(0, n - 1)
    return _strategies[n]


def main():
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; one for 100 programs")
    parser.add_argument("--count", type=int, default=1000, help="how many programs")
    parser.add_argument("--kind", choices=sorted(DRAWN), default="dense")
    parser.add_argument("--log", help="a file for one line of JSON for each block and each find")
    parser.add_argument("--show", help="print programs that say nothing for this reason")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    # Staging makes many objects, and few that refer to each other in circles.
    gc.set_threshold(100_000, 50, 100)
    run = Run(options.kind, options.log, options.show)
    number = options.seed
    while run.programs < options.count:
        run.block(number, min(BLOCK, options.count - run.programs))
        seconds = round(time.process_time() - run.began, 1)
        nothing = dict(run.discarded.most_common(40)) if number % 10 == 9 else {}
        run.write(seed=number, programs=run.programs, seconds=seconds, nothing=nothing)
        number += 1
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MOST_MEMORY * run.cleared:
            jax.clear_caches()
            run.cleared += 1
    print(run.summary())
    for reason, times in run.discarded.most_common(25):
        print(f"  {times:6} {reason}")
    return 1 if run.known else 0


if __name__ == "__main__":
    sys.exit(main())
