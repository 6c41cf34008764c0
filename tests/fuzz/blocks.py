"""Runs of random programs: a hundred at a time, in one process or several."""

import collections
import concurrent.futures
import contextlib
import gc
import io
import multiprocessing
import random
import resource
import time

import jax

from batchax.programs import dear_branches

from fuzz.judge import Discarded, Found, judge
from fuzz.rows import draw_rows, judge_rows
from fuzz.ways import draw_case

# Of loops that run flat, lanes wait before every branch, however little that costs.
dear_branches.LEAST = dear_branches.GAIN = dear_branches.BEGUN = 0.0

MOST_SMALLER = 150  # programs tried to make a failing one smaller
BLOCK = 100  # programs for one seed
MOST_MEMORY = 3_000_000  # KiB; compiled operations are kept until the process has taken as much
DRAWN = {"dense": (draw_case, judge), "ragged": (draw_rows, judge_rows)}


class Block:
    """The programs of one seed: counts, and what was found."""

    def __init__(self, kind, number, count, known, show=None):
        self.kind, self.number, self.count, self.show = kind, number, count, show
        self.programs, self.smaller = 0, 0
        self.discarded: collections.Counter[str] = collections.Counter()
        self.before = known
        self.known: collections.Counter[str] = collections.Counter()

    def run(self):
        """Runs all programs; one that fails in a new way is made as small as can be."""
        drawn, judged = DRAWN[self.kind]
        for k in range(self.count):
            choices = Choices(random.Random(f"{self.number} {k}"))
            self.programs += 1
            try:
                found = self.judged(judged, drawn(choices))
            except Exception as error:  # of the generator
                self.known[f"generator: {type(error).__name__}"] += 1
                self.tell(type(error).__name__, repr(error))
                continue
            if found is None:
                continue
            self.known[found.signature] += 1
            if self.known[found.signature] == 1 and found.signature not in self.before:
                found = self.smaller_than(found, choices.made, drawn, judged)
                self.tell(found.signature, str(found))

    def judged(self, judged, case):
        """What is found of a case; None if nothing is."""
        try:
            judged(case)
        except Discarded as reason:
            self.discard(case, reason)
        except Found as found:
            return found
        return None

    def smaller_than(self, found, made, drawn, judged):
        """The find of a smaller program that fails in the same way: of fewer, lower choices."""
        left = MOST_SMALLER

        def fails(made):
            nonlocal left, found
            left -= 1
            self.smaller += 1
            try:
                case = drawn(again := Choices(None, made))
                judged(case)
            except Found as other:
                if other.signature == found.signature:
                    found = other
                    return again.made
            except Exception:  # it says nothing, or cannot be drawn
                pass
            return None

        size = max(len(made) // 2, 1)
        while left > 0:
            at, went = 0, False
            while at < len(made) and left > 0:
                part = made[at : at + size]
                options = [made[:at] + made[at + size :]]
                if any(part):
                    options.append(made[:at] + [0] * len(part) + made[at + size :])
                for option in options:
                    if (
                        left > 0
                        and (less := fails(option))
                        and (len(less), less)
                        < (
                            len(made),
                            made,
                        )
                    ):
                        made, went = less, True
                        break
                else:
                    at += size
            if size == 1 and not went:
                break
            size = max(size // 2, 1)
        return found

    def discard(self, case, reason):
        self.discarded[str(reason)[:200]] += 1
        if self.show and self.show in str(reason):
            self.tell(str(reason), case.script())

    def tell(self, found, text):
        print(f"--- {self.kind}, seed {self.number}: {found}\n{text}\n", flush=True)


class Choices:
    """Numbers below others, at random or as they are given, and noted; 0 where none are left."""

    def __init__(self, rng, given=()):
        self.rng, self.given, self.made = rng, iter(given), []

    def __call__(self, n):
        if n <= 1:
            return 0
        number = self.rng.randrange(n) if self.rng else min(next(self.given, 0), n - 1)
        self.made.append(number)
        return number


_cleared = 1


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
            yield from (future.result() for future in done)
