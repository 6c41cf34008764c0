"""Slow tests, a sixth of which runs with each commit: which they are, and whose turn it is."""

import collections
import os
import zlib
from pathlib import Path

LIST = Path(__file__).parents[1] / "slow.txt"
# Of the mean case of a test, in seconds of processor time: three tenths of all tests take more, and
# they are nine tenths of the time.
SLOW = 0.15
TURNS = 6
# What holds of the project as a whole, and random programs: always run.
ALWAYS = (
    *("editor/", "test_compat.py", "test_docs.py", "test_names.py", "test_package.py"),
    *("test_primitives.py", "test_rooms.py", "laws/test_random_programs.py"),
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


def not_in(turn, items):
    """The slow tests that another turn has. Each file has its share of each turn."""
    slow, files = listed(), collections.defaultdict(list)
    for item in sorted(items, key=lambda item: number(item.nodeid)):
        if function_of(item.nodeid) in slow:
            files[str(item.path.name)].append(item)
    return {
        item
        for file, tests in files.items()
        for place, item in enumerate(tests, number(file) + turn)
        if place % TURNS
    }


class Measured:
    """A plugin that lists anew, of the tests that run, those that are slow."""

    def __init__(self):
        self.seconds = collections.defaultdict(list)

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            name, seconds = function_of(report.nodeid), dict(report.user_properties)
            self.seconds[name].append(seconds.get("processor time", 0))

    def pytest_sessionfinish(self):
        slow = {
            name
            for name, each in self.seconds.items()
            if sum(each) / len(each) > SLOW and not name.startswith(ALWAYS)
        }
        lines = sorted(listed() - set(self.seconds) | slow)
        LIST.write_text("".join(f"{line}\n" for line in lines))
