"""A unit that may have ended its worker, run in a process that may end, too.

When a process ends, those who wait for it do not know which of its units it was, or whether it was
any: memory may have run out for another reason, or somebody stopped it. So each is run again, in a
process of its own. If that ends as well, and would with nothing else beside it, the rows are parted
in halves, and so on, until those are found that end a process by themselves.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from batchax.datasets.engines.attempts import Attempts, EndedError
from batchax.datasets.engines.worker import Done, portable, probe_rows, run_unit
from batchax.datasets.halving import fail_alone
from batchax.datasets.parts import Bad, Unit
from batchax.errors import JobError, RowError

_STARTS = 5  # times that a process may end while it starts
_PAUSE = 0.1  # seconds before it is started again, and twice as long after that
_CHILD = "import sys; sys.path[:] = {!r}; from batchax.datasets.engines.alone import child; child()"


def run_apart(attempts: Attempts, unit: Unit, attempt: int) -> Done | None:
    """As `run_unit`, in a process of its own.

    Raises:
      EndedError: that ended.
    """
    with _Child() as child:
        return child.does(run_unit, attempts, unit.number, attempt)


def run_alone(attempts: Attempts, unit: Unit, attempt: int, quarantine: bool) -> Done | None:
    """The same while nothing else runs; and if the process ends, finds out for which rows.

    Args:
      attempts: at the units of the call.
      unit: what to run.
      attempt: which attempt at it this is.
      quarantine: whether rows that end a process are to be left out, rather than to be an error.

    Raises:
      RowError: a row ends the process that computes it, and is not to be left out.
      JobError: the unit does, and none of its rows by itself.
    """
    with _Child() as child:

        def run(left_out: Sequence[Bad] = ()) -> Done | None:
            attempts.forget(unit.number, attempt)  # it may have been begun, by a process that ended
            return child.does(run_unit, attempts, unit.number, attempt, left_out)

        try:
            return run()
        except EndedError as error:
            ended, how = error, str(error)

        def tried(rows: Sequence[int]) -> EndedError | None:
            try:
                child.does(probe_rows, attempts, unit.number, list(rows))
            except EndedError as error:
                return error
            return None

        if tried([]) is not None:
            raise JobError(
                f"the process that is to compute rows {unit.start} to {unit.stop} ends ({how}) "
                "before it computes any. What was done is kept."
            )
        most = unit.rows if quarantine else 1
        rows = list(fail_alone(range(unit.start, unit.stop), ended, tried, most))
        if not rows:
            raise JobError(
                f"rows {unit.start} to {unit.stop} end the process that computes them ({how}), "
                "and no row does by itself: they may need more memory than there is. What was done "
                "is kept. Take a smaller batch_size, and another out=, since units change with it."
            )
        if not quarantine:
            raise RowError(
                f"row {rows[0]} ends the process that computes it ({how}). What was done is "
                "kept: mend the row and call again, or go on without such rows with "
                'on_error="quarantine".'
            )
        return run([Bad(row, f"ends the process that computes it: {how}") for row in rows])


class _Child:
    """A process that may end, and is started when there is something to do and it does not run."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def does(self, function: Any, *args: Any) -> Any:
        """What a function returns, or raises, there.

        Raises:
          EndedError: the process ended.
          JobError: it ends while it starts, again and again, which no row is to blame for.
        """
        if self._process is None:
            self._start()
        returned, error = self._answer(function, args)
        if error is not None:
            raise error
        return returned

    def _start(self) -> None:
        for pause in (*(_PAUSE * 2**i for i in range(_STARTS - 1)), None):
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _CHILD.format(sys.path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is not for it
                )
                self._answer(os.getpid, ())
                return
            except (EndedError, OSError) as error:  # or it cannot be started
                if pause is None:
                    raise JobError(
                        "a process that is to run a unit by itself ends while it starts "
                        f"({error}), {_STARTS} times. What was done is kept. If the system ends "
                        "it, memory may be short: take fewer workers."
                    ) from error
                time.sleep(pause)

    def _answer(self, function: Any, args: Any) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((function, args), process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            code = process.wait()
            self.__exit__()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            raise EndedError(how) from None

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.kill()  # what it was to do it has done
        with contextlib.suppress(OSError):  # there is something left to be flushed
            self._process.communicate()
        self._process = None


def child() -> None:
    """In the process: does what is asked for on its input, and says what came of it."""
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the user's function prints is no answer
    questions: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                questions.put(pickle.load(asked))
        except EOFError:  # the parent has ended
            os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        function, args = questions.get()
        try:
            answer = function(*args), None
        except Exception as error:
            answer = None, portable(error)
        pickle.dump(answer, answers)
        answers.flush()
