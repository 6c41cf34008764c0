"""Runs of random programs: a hundred at a time, in one process or several."""

import collections
import concurrent.futures
import contextlib
import gc
import io
import multiprocessing
import resource
import time

import jax
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz.judge import Discarded, Found, judge
from fuzz.rows import draw_rows, judge_rows
from fuzz.ways import draw_case

MOST_SMALLER = 150  # programs tried to make a failing one smaller
BLOCK = 100  # programs for one seed
MOST_MEMORY = 3_000_000  # KiB; compiled operations are kept until the process has taken as much
DRAWN = {"dense": (draw_case, judge), "ragged": (draw_rows, judge_rows)}


class Enough(BaseException):
    """Ends the search for a smaller program."""


class Block:
    """The programs of one seed: counts, and what was found."""

    def __init__(self, kind, number, count, known, show=None):
        self.kind, self.number, self.count, self.show = kind, number, count, show
        self.programs, self.smaller = 0, 0
        self.discarded: collections.Counter[str] = collections.Counter()
        self.known = collections.Counter(dict.fromkeys(known, 0))

    def run(self):
        """Runs all programs; the first that fails in a new way is made as small as can be."""
        last = []
        drawn, judged = DRAWN[self.kind]

        @seed(self.number)
        @settings(
            max_examples=self.count,
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
            elif self.smaller < MOST_SMALLER:
                self.smaller += 1
            else:
                raise Enough
            try:
                judged(case)
            except Discarded as reason:
                self.discard(case, reason)
            except Found as found:
                if found.signature in self.known:
                    self.known[found.signature] += 1
                    return
                failing[case.script()] = found
                raise

        failing: dict[str, Found] = {}
        try:
            programs()
        except (Found, Enough):
            found = failing[min(failing, key=len)]
            self.known[found.signature] += 1
            self.tell(found.signature, str(found))
        except Exception as error:  # of the generator
            case = last[0].script() if last else ""
            self.known[f"generator: {type(error).__name__}"] += 1
            self.tell(type(error).__name__, f"{error!r}\n{case}")

    def discard(self, case, reason):
        self.discarded[str(reason)[:200]] += 1
        if self.show and self.show in str(reason):
            self.tell(str(reason), case.script())

    def tell(self, found, text):
        print(f"--- {self.kind}, seed {self.number}: {found}\n{text}\n", flush=True)


_strategies = {}
_cleared = 1


def _below(n):
    if n not in _strategies:
        _strategies[n] = st.integers(0, n - 1)
    return _strategies[n]


def run_block(*args):
    """What one seed finds: the block, its processor time, and what it printed."""
    global _cleared
    began, printed = time.process_time(), io.StringIO()
    block = Block(*args)
    with contextlib.redirect_stdout(printed):
        block.run()
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MOST_MEMORY * _cleared:
        jax.clear_caches()
        _cleared += 1
    return block, time.process_time() - began, printed.getvalue()


def prepare():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    # Staging makes many objects, and few that refer to each other in circles.
    gc.set_threshold(100_000, 50, 100)


def blocks(options, known):
    """Runs the blocks of a run, several at a time, and yields each when it is done.

    known: the ways to fail that were seen; what fails in one of them again is only counted.
    """
    left, number = options.count, options.seed  # programs that no block has yet
    more = lambda: (options.kind, number, min(BLOCK, left), set(known), options.show)
    if options.jobs == 1:
        prepare()
        while left > 0:
            yield (done := run_block(*more()))
            left, number = left - done[0].programs, number + 1
        return
    spawned, running = multiprocessing.get_context("spawn"), set()
    with concurrent.futures.ProcessPoolExecutor(options.jobs, spawned, prepare) as pool:
        while left > 0 or running:
            while left > 0 and len(running) < options.jobs:
                running.add(pool.submit(run_block, *more()))
                left, number = left - min(BLOCK, left), number + 1
            done, running = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for block, *rest in (future.result() for future in done):
                left += block.count - block.programs  # a block ends where it finds something
                yield block, *rest
