"""A plugin of pytest that replaces `jax.vmap`, and writes down the outcome of each test.

Pytest loads plugins named by `-p` before conftest files and other plugins. So each later
`from jax import vmap` gets the replacement. JAX and batchax themselves still get JAX's function.

`SUITE_VMAP` is "jax" or "batchax". `SUITE_OUTCOMES` is the file that gets a line for each test, and
`SUITE_SECONDS` the time that a test may take. `SUITE_EVERY` runs one test of so many.
"""

import functools
import json
import os
import signal
import sys
import zlib
from pathlib import Path

import jax
import pytest

import batchax as bx

REPLACEMENTS = {"jax": jax.vmap, "batchax": bx.vmap}
OUTCOMES = Path(os.environ["SUITE_OUTCOMES"])
SECONDS, EVERY = (int(os.environ[f"SUITE_{name}"]) for name in ("SECONDS", "EVERY"))
_jax_vmap, _replacement = jax.vmap, REPLACEMENTS[os.environ["SUITE_VMAP"]]
_calls = 0  # of `jax.vmap` by the library and its tests


@functools.wraps(_jax_vmap)
def _vmap(*args, **kwargs):
    global _calls
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if caller.partition(".")[0] in ("batchax", "jax"):
        return _jax_vmap(*args, **kwargs)
    _calls += 1
    return _replacement(*args, **kwargs)


jax.vmap = _vmap


class OutOfTime(BaseException):
    """A test took longer than it may."""


def _stop(*_):
    raise OutOfTime


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % EVERY == 0]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Stops a test that takes `SECONDS` of CPU time, or waits ten times as long."""
    signal.signal(signal.SIGPROF, _stop)
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(10 * SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)


def pytest_runtest_logstart(nodeid):
    _of_test.clear()
    _of_test.update(test=nodeid, outcome="passed", message="", calls=_calls)


def pytest_runtest_logreport(report):
    if hasattr(report, "wasxfail"):
        outcome = "xpassed" if report.passed else "xfailed"
    elif report.failed:
        outcome = "timeout" if "OutOfTime" in report.longreprtext else "failed"
    else:
        outcome = report.outcome
    if outcome != "passed" and _of_test["outcome"] == "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else report.longreprtext
        _of_test.update(outcome=outcome, message=message[:1000])


def pytest_runtest_logfinish():
    _of_test["calls"] = _calls - _of_test["calls"]
    with OUTCOMES.open("a") as lines:
        print(json.dumps(_of_test), file=lines)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Compiled programs of a whole suite do not fit in memory."""
    if nextitem is None or nextitem.path != item.path:
        jax.clear_caches()


_of_test = {}
