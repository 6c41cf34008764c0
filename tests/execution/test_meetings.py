"""Meetings of processes: here each is a thread, with a client of one store."""

import itertools
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import batchax as bx
from batchax.execution.devices import meetings
from batchax.execution.devices.meetings import Meetings

from support.shared_store import clients, on_all


@pytest.fixture(params=[2, 3])
def processes(request):
    with clients(request.param) as stores:
        yield [Meetings(store, i, len(stores)) for i, store in enumerate(stores)]


def meet(processes, *args):
    return on_all([lambda m=m: m.meet(*args) for m in processes])


def call(m, what, error=None):
    with m.call(what):
        if error is not None:
            raise error
    return what


def fails(found, *matches):
    """All raised `ProcessesError`, and each said what is to be expected of it."""
    for error, match in zip(found, matches, strict=True):
        with pytest.raises(bx.ProcessesError, match=match):
            raise error


def test_each_learns_the_numbers_of_all(processes):
    found = on_all([lambda m=m: m.meet("loss", "", [m.process, -(2**62)]) for m in processes])
    assert found == [[[i, -(2**62)] for i in range(len(processes))]] * len(processes)


def test_the_store_does_not_grow(processes):
    for _ in range(3 * meetings._KEPT):
        meet(processes, "loss", "text")
        held = processes[0].store.key_value_dir_get("batchax")
        assert len(held) <= (meetings._KEPT + 1) * (len(processes) + 2)


def test_different_calls(processes):
    meet(processes, "the first")
    texts = [f"same\nx: float32[{m.process}]" for m in processes]
    found = on_all([lambda m=m: m.meet("loss", texts[m.process]) for m in processes])
    fails(
        found,
        r"loss: .*same types.*\n  x: float32\[0\]\nand on process 1\n  x: float32\[1\]\n"
        r".* came to was the first\.",
        *[r"process [12], there is\n  x: .*\nand on process 0\n  x: float32\[0\]"]
        * (len(processes) - 1),
    )
    found = on_all([lambda m=m: m.meet(f"loss {m.process}") for m in processes])
    fails(found, *[r"there is\n  loss \d\nand on process \d\n  loss \d"] * len(processes))
    assert meet(processes, "the next") == [[[]] * len(processes)] * len(processes)


def test_many_lines_differ(processes):
    found = on_all(
        [
            lambda m=m: m.meet("loss", "\n".join(f"{i}: {m.process}" for i in range(20)))
            for m in processes
        ]
    )
    fails(found, *[r"\n  7: \d\n  and 12 lines more"] * len(processes))


def test_a_process_does_not_come(processes, monkeypatch):
    meet(processes, "the first")
    *others, last = processes
    now, passing = itertools.count(0, meetings.TIMEOUT), threading.Event()
    clock = SimpleNamespace(monotonic=lambda: next(now) if passing.is_set() else 0)
    monkeypatch.setattr(meetings, "time", clock)
    monkeypatch.setattr(meetings, "_LOOK", 0.1)

    def time_passes():  # once all others are there
        while len(last.store.key_value_dir_get("batchax/0/1/said")) < len(others):
            time.sleep(0.01)
        passing.set()

    *found, _ = on_all([*(lambda m=m: m.meet("loss") for m in others), time_passes])
    expected = f"process {last.process} did not come to it within 600 .* to was the first"
    fails(found, *[expected] * len(others))
    # It comes too late: for this meeting the others have given up, and so must it.
    fails(meet([last], "loss"), f"waited for this one, process {last.process}, .* to was the first")
    passing.clear()
    assert meet(processes, "the next") == [[[]] * len(processes)] * len(processes)


def test_those_who_wait_are_told_of_a_failure_at_once(processes, monkeypatch):
    monkeypatch.setattr(meetings, "_LOOK", 0.1)
    first, *others = processes

    def fails_alone():
        with pytest.raises(ValueError, match="no room"):
            call(first, "loss", ValueError("no room"))

    def goes_on(m):
        call(m, "loss")
        m.meet("the next")

    _, *found = on_all([fails_alone, *(lambda m=m: goes_on(m) for m in others)])
    told = r"the next: process 0 failed in the call before, .* ValueError: no room\. .* to was loss"
    fails(found, *[told] * len(others))
    # Should it go on it is told that the others do not.
    fails(meet([first], "the next"), "this process failed in the call before, and others did not")
    assert meet(processes, "the last") == [[[]] * len(processes)] * len(processes)


def test_calls_of_threads_are_made_one_at_a_time(processes):
    running = []

    def one_call(m):
        with m.call("loss"):
            running.append(m.process)
            assert running.count(m.process) == 1
            time.sleep(0.01)
            running.remove(m.process)
        return True

    assert all(on_all([lambda m=m: one_call(m) for m in processes for _ in range(4)]))


def test_processes_that_cannot_meet(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(bx.UnsupportedError, match=r"Call jax\.distributed\.initialize\(\) first"):
        meetings.of_this_process()
    assert bx.gather(jnp.ones(2)).shape == (2,)  # what is here already
