"""Slow tests: which they are, and the sixth of them that runs with each commit, always the same."""

import collections
import os
import zlib
from pathlib import Path

LIST = Path(__file__).parents[1] / "slow.txt"
# Of the mean case of a test, in seconds of CPU time: three tenths of all tests take more, and
# they are nine tenths of the time.
SLOW = 0.15
ONE_IN = 6
# What holds of the project as a whole, and random programs: always run.
ALWAYS = (
    *("editor/", "test_compat.py", "test_docs.py", "test_names.py", "test_package.py"),
    *("test_primitives.py", "test_packages.py", "laws/test_random_programs.py"),
    # Nothing else sees that what is not finite is kept out of a mean or a variance.
    "execution/test_reductions.py::test_every_kind_of_every_dtype",
)


def spent():
    """Processor time of this process, and of those that it started and has waited for."""
    return sum(os.times()[:4])


def number(text):
    return zlib.crc32(text.encode())


def function_of(nodeid):
    """The name of a test in the list, which its cases share."""
    return nodeid.split("[")[0].removeprefix("tests/")


def listed():
    return set(LIST.read_text().splitlines())


def left_to_whole_runs(items):
    """The slow tests that do not run with each commit. Each file keeps at least one.

    A hash of its name decides for a test, so that a new test changes nothing for others.
    """
    slow, files = listed(), collections.defaultdict(list)
    for item in items:
        if function_of(item.nodeid) in slow:
            files[item.path].append(item)
    left = set()
    for tests in files.values():
        first = min(tests, key=lambda item: number(item.nodeid))
        left |= {item for item in tests if number(item.nodeid) % ONE_IN and item is not first}
    return left


class Measured:
    """A plugin that lists again, of the tests that run, those that are slow."""

    def __init__(self):
        self.seconds = collections.defaultdict(list)

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            name, seconds = function_of(report.nodeid), dict(report.user_properties)
            self.seconds[name].append(seconds.get("CPU time", 0))

    def pytest_sessionfinish(self):
        slow = {
            name
            for name, each in self.seconds.items()
            if sum(each) / len(each) > SLOW and not name.startswith(ALWAYS)
        }
        lines = sorted(listed() - set(self.seconds) | slow)
        LIST.write_text("".join(f"{line}\n" for line in lines))
