"""Runs of random programs: a hundred at a time, in processes of their own.

A process that ends by itself, as XLA's compiler may end one, or that does not go on, is found with
the program that it ran, and the run goes on behind that.
"""

import collections
import contextlib
import gc
import io
import multiprocessing
import multiprocessing.connection
import random
import resource
import signal
import time
from dataclasses import replace

import jax

from fuzz.judge import Discarded, Found, judge
from fuzz.rows import draw_rows, judge_rows
from fuzz.ways import draw_case

MOST_SMALLER = 150  # programs tried to make a failing one smaller
BLOCK = 100  # programs for one seed
MOST_MEMORY = 3_000_000  # KiB; a process that has taken as much is followed by another one
MOST_SECONDS = 1_800  # without a sign of a process: one program, and those tried to make it smaller
DRAWN = {"dense": (draw_case, judge), "ragged": (draw_rows, judge_rows)}


class Block:
    """The programs of one seed: counts, and what was found."""

    def __init__(self, kind, number, first, count, known, show=None, compiled=False):
        self.kind, self.number, self.first, self.count = kind, number, first, count
        self.show, self.compiled = show, compiled
        self.programs, self.smaller = 0, 0
        self.discarded: collections.Counter[str] = collections.Counter()
        self.before = known
        self.known: collections.Counter[str] = collections.Counter()

    def run(self, begins=lambda k: None):
        """Runs all programs; one that fails in a new way is made as small as can be.

        begins: is called with the number of each program before it runs.
        """
        for k in range(self.first, self.first + self.count):
            choices = Choices(random.Random(f"{self.number} {k}"))
            self.programs += 1
            begins(k)
            try:
                found = self.judged(self.drawn(choices))
            except Exception as error:  # of the generator
                self.known[f"generator: {type(error).__name__}"] += 1
                self.tell(type(error).__name__, repr(error))
                continue
            if found is None:
                continue
            self.known[found.signature] += 1
            if self.known[found.signature] == 1 and found.signature not in self.before:
                found = self.smaller_than(found, choices.made)
                self.tell(found.signature, str(found))

    def ended(self, k, how):
        """Of a process that ended with program `k`, instead of `run`."""
        self.programs = 1
        self.known[how] += 1
        case = self.drawn(Choices(random.Random(f"{self.number} {k}")))
        self.tell(f"program {k} of 0 to {BLOCK - 1}: {how}", case.script())

    def drawn(self, choices):
        """The case that these choices make; compiled as a whole, if all are to be."""
        case = DRAWN[self.kind][0](choices)
        return replace(case, engine="jit") if self.compiled and case.engine == "staged" else case

    def judged(self, case):
        """What is found of a case; None if nothing is."""
        try:
            DRAWN[self.kind][1](case)
        except Discarded as reason:
            self.discard(case, reason)
        except Found as found:
            return found
        return None

    def smaller_than(self, found, made):
        """The find of a smaller program that fails in the same way: of fewer, lower choices."""
        left = MOST_SMALLER

        def fails(made):
            nonlocal left, found
            left -= 1
            self.smaller += 1
            try:
                case = self.drawn(again := Choices(None, made))
                DRAWN[self.kind][1](case)
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
                        and (len(less), less) < (len(made), made)
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


def run_block(block, begins=lambda k: None):
    """What a block finds: the block, its CPU time, and what it printed."""
    began, printed = time.process_time(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        block.run(begins)
    return block, time.process_time() - began, printed.getvalue()


def prepare():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", True)
    # Staging makes many objects, and few that refer to each other in circles.
    gc.set_threshold(100_000, 50, 100)


def work(connection, at):
    """Runs blocks that come by a connection, in a process of their own.

    at: the number of the program that runs.
    """
    prepare()

    def begins(k):
        at.value = k

    while (block := connection.recv()) is not None:
        done = run_block(block, begins)
        full = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MOST_MEMORY
        connection.send((done, full))


class Worker:
    """A process for blocks, and the one that it runs; `at` is the number of the program."""

    def __init__(self, work):
        spawned = multiprocessing.get_context("spawn")
        self.connection, theirs = spawned.Pipe()
        self.at = spawned.Value("q", -1)
        self.process = spawned.Process(target=work, args=(theirs, self.at), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, block):
        self.block, self.at.value = block, block.first
        self.connection.send(block)
        self.seen = self.at.value, time.monotonic()

    def stuck(self):
        """Whether it has given no sign for long."""
        if self.seen[0] != self.at.value:
            self.seen = self.at.value, time.monotonic()
        return time.monotonic() - self.seen[1] > MOST_SECONDS

    def end(self):
        """Why the process ended, which does now if it has not."""
        if self.process.is_alive() and not multiprocessing.connection.wait(
            [self.process.sentinel], 5
        ):
            self.process.kill()
            self.process.join()
            return "the process went on forever"
        self.process.join()
        code = self.process.exitcode
        return f"the process ended by {signal.Signals(-code).name if code < 0 else f'exit {code}'}"


def blocks(options, known, work=work):
    """Runs the blocks of a run, several at a time, and yields each when it is done.

    known: the ways to fail that were seen; what fails in one of them again is only counted.
    work: what a process does.
    """
    compiled = options.flags == "default"
    make = lambda number, first, count: Block(
        options.kind, number, first, count, set(known), options.show, compiled
    )
    todo = collections.deque(
        (options.seed + k // BLOCK, 0, min(BLOCK, options.count - k))
        for k in range(0, options.count, BLOCK)
    )
    idle, busy = [], {}
    while todo or busy:
        while todo and len(busy) < options.jobs:
            worker = idle.pop() if idle else Worker(work)
            worker.begin(make(*todo.popleft()))
            busy[worker.connection] = worker
        ready = multiprocessing.connection.wait(list(busy), 10)
        for connection in [*ready, *(c for c, w in busy.items() if c not in ready and w.stuck())]:
            worker = busy.pop(connection)
            block = worker.block
            try:
                if connection not in ready:
                    raise EOFError
                done, full = connection.recv()
            except (EOFError, ConnectionResetError):
                k, how = worker.at.value, worker.end()
                # What it found before is lost, and found again.
                before, behind = k - block.first, block.first + block.count - k - 1
                todo.extendleft(
                    (block.number, at, n) for at, n in ((k + 1, behind), (block.first, before)) if n
                )
                ended, printed = make(block.number, k, 1), io.StringIO()
                with contextlib.redirect_stdout(printed):
                    ended.ended(k, how)
                yield ended, 0.0, printed.getvalue()
                continue
            yield done
            if full or compiled:  # what XLA does in a process may depend on all that it did before
                worker.connection.send(None)
            else:
                idle.append(worker)
    for worker in idle:
        worker.connection.send(None)
