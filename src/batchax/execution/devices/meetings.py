"""Meetings: what the processes of one program tell each other before they go on together.

A collective waits for all processes, forever. So before what all of them have to do each says, in
a store of keys and values that they share, what it came to do. If some do not come, or come for
something else, or one failed since the last meeting, it is an error on all.

Meetings are numbered. Under the number of one are

- ``said/process``: what a process came for, and numbers that all are to know;
- ``came``: how many came;
- ``end``: how it ended, which is decided once, by the last to come or the first to fail;
- ``text/process``: what it came for in full, if they differ;
- ``failed/process``: what went wrong on a process since.

Old meetings are deleted, some at a time. A process asks the store three times for a meeting, the
last to come five times, however many there are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from batchax import _compat
from batchax.errors import ProcessesError, UnsupportedError

# Seconds that processes wait for each other. Between two calls one may read data or compile for
# minutes while others are done. Who is dead JAX finds out sooner, by heartbeats.
TIMEOUT = float(os.environ.get("BATCHAX_MEETING_TIMEOUT", "600"))

_KEPT = 16  # meetings that are kept together, until all came to the next
_LOOK = 1.0  # seconds after which waiting processes check whether another failed
_LINES = 8  # of what differs, and each of so many characters
_CHARACTERS = 200


class Meetings:
    """Holds the synchronizations of one process with all others.

    `store` is the client of JAX's key-value store. On devices, too, all processes must act in one
    order, so one thread at a time, which holds the lock, does what needs them.
    """

    def __init__(self, store: Any, process: int, count: int) -> None:
        self.store, self.process, self.count = store, process, count
        self.lock = threading.RLock()
        self._number = 0
        self._last = ""  # what all processes came for last
        self._failed = ""  # the error since then

    @contextlib.contextmanager
    def call(
        self, what: str, text: str = "", numbers: Sequence[int] = ()
    ) -> Iterator[list[list[int]]]:
        """Synchronizes for the code within. If it fails, other processes see that next time."""
        with self.lock:
            of_all = self.meet(what, text, numbers)
            try:
                yield of_all
            except BaseException as error:
                self._failed = f"{type(error).__name__}: {error}"[: 2 * _CHARACTERS]
                key = f"{_place(self._number - 1)}/failed/{self.process}"
                with contextlib.suppress(jax.errors.JaxRuntimeError):  # it may be gone
                    self.store.key_value_set(key, self._failed, allow_overwrite=True)
                raise

    def meet(self, what: str, text: str = "", numbers: Sequence[int] = ()) -> list[list[int]]:
        """Waits for all processes and returns the numbers of each.

        `what` names the purpose in messages, and the lines of `text` must agree on all processes.
        Raises ProcessesError if processes differ, are missing, or failed.
        """
        with self.lock:
            at, before, number = _place(self._number), _place(self._number - 1), self._number
            self._number += 1
            text = f"{what}\n{text}"
            digest = hashlib.sha256(text.encode()).hexdigest()
            said = json.dumps([what, digest, self._failed, list(map(int, numbers))])
            self.store.key_value_set(f"{at}/said/{self.process}", said)
            # The last process to arrive compares the texts and decides for all.
            if self.store.key_value_increment(f"{at}/came", 1) == self.count:
                everything = {p: json.loads(said) for p, said in self._under(f"{at}/said").items()}
                self._decide(at, *_outcome(everything))
                if number and number % _KEPT == 0:
                    # All have left earlier groups of meetings, so those keys are no longer read.
                    self.store.key_value_delete(os.path.dirname(before))
            how, outcome = self._end(at, before)
            last, self._last, self._failed = self._last, what, ""
            if how == "together":
                return outcome
            reasons = {"late": self._late, "failed": self._failure, "differ": self._difference}
            why = f"{what}: {reasons[how](outcome, at, text)}"
            raise ProcessesError(f"{why}The last that all came to was {last}." if last else why)

    def _end(self, at: str, before: str) -> Any:
        """Waits until a meeting ends, and ends it if it cannot succeed."""
        until = time.monotonic() + TIMEOUT
        while True:
            wait = max(min(_LOOK, until - time.monotonic()), 1e-3)
            try:
                return json.loads(self.store.blocking_key_value_get(f"{at}/end", int(1e3 * wait)))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            # Where all fail alike, they may go on: then this one did too.
            failed = {} if self._failed else self._under(f"{before}/failed")
            if failed:
                self._decide(at, "failed", min(failed.items()))
            elif time.monotonic() >= until:
                missing = set(range(self.count)) - self._under(f"{at}/said").keys()
                if missing:
                    self._decide(at, "late", sorted(missing))

    def _decide(self, at: str, how: str, outcome: Any) -> None:
        try:
            # `key_value_set` fails if the key exists: the first decision stands.
            self.store.key_value_set(f"{at}/end", json.dumps([how, outcome]))
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def _under(self, key: str) -> dict[int, str]:
        return {
            int(key.rsplit("/", 1)[1]): value for key, value in self.store.key_value_dir_get(key)
        }

    def _late(self, missing: list[int], at: str, text: str) -> str:
        if self.process in missing:
            return (
                f"other processes had waited for this one, process {self.process}, for "
                f"{TIMEOUT:g} seconds, and given up. "
            )
        return (
            f"{_processes(missing)} did not come to it within {TIMEOUT:g} seconds "
            "(BATCHAX_MEETING_TIMEOUT says how many). All processes must make the same calls, in "
            "the same order. "
        )

    def _failure(self, failure: tuple[int, str], at: str, text: str) -> str:
        process, why = failure
        who = "this process" if process == self.process else f"process {process}"
        return f"{who} failed in the call before, and others did not: {why}. "

    def _difference(self, came_for: list[tuple[str, str]], at: str, text: str) -> str:
        """Describes what another process came for that this one did not."""
        self.store.key_value_set(f"{at}/text/{self.process}", text)
        own = came_for[self.process]
        other = next(p for p, said in enumerate(came_for) if said != own)
        theirs = self.store.blocking_key_value_get(f"{at}/text/{other}", int(1e3 * TIMEOUT))
        here, there = text.splitlines(), theirs.splitlines()
        return (
            "all processes must make the same calls, in the same order, with arguments of the same "
            "types (except for numbers of rows that are batchax.local), and they do not. Here, on "
            f"process {self.process}, there is{_only(here, there)}\nand on process {other}"
            f"{_only(there, here)}\n"
        )


def _place(number: int) -> str:
    return f"batchax/{number // _KEPT}/{number}"


def _outcome(said: dict[int, Any]) -> tuple[str, Any]:
    """Decides a meeting that all processes reached."""
    failed = {p: why for p, (_, _, why, _) in said.items() if why}
    if 0 < len(failed) < len(said):
        return "failed", min(failed.items())
    in_order = [said[p] for p in sorted(said)]
    if len({digest for _, digest, _, _ in in_order}) > 1:
        return "differ", [(what, digest) for what, digest, _, _ in in_order]
    return "together", [numbers for _, _, _, numbers in in_order]


def _only(these: list[str], others: list[str]) -> str:
    lines = [line[:_CHARACTERS] for line in these if line not in others]
    more = [f"and {len(lines) - _LINES} lines more"] if len(lines) > _LINES else []
    return "".join(f"\n  {line}" for line in [*lines[:_LINES], *more]) or " nothing else"


def _processes(which: list[int]) -> str:
    return f"process{'es' if len(which) > 1 else ''} {', '.join(map(str, which))}"


_lock = threading.Lock()
_current: Meetings | None = None


def of_this_process() -> Meetings:
    """Returns the meetings of this process.

    Raises UnsupportedError if JAX has no store for them.
    """
    global _current
    store = _compat.shared_store()
    if store is None:
        raise UnsupportedError(
            f"JAX sees devices of {jax.process_count()} processes, which cannot communicate "
            "yet. Call jax.distributed.initialize() first, on all of them."
        )
    with _lock:
        if _current is None or _current.store is not store:
            _current = Meetings(store, jax.process_index(), jax.process_count())
        return _current
