"""A unit in a process of its own, started by a worker, which does not end with it.

Workers of a cluster are started again slowly, and not always: a unit that may end its process is
not run in them a second time.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from typing import Any

from batchax.datasets.engines.attempts import Attempts, EndedError
from batchax.datasets.engines.worker import Done, portable, run_unit

_CHILD = "import sys; sys.path[:] = {!r}; from batchax.datasets.engines.apart import child; child()"


def run_apart(attempts: Attempts, number: int, attempt: int) -> Done | None:
    """As `run_unit`, in a process of its own.

    Raises:
      EndedError: that ended.
    """
    command = [sys.executable, "-c", _CHILD.format(sys.path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump((attempts, number, attempt), process.stdin)
            process.stdin.flush()
            done, error = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            code = process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            raise EndedError(how) from None
        finally:
            process.kill()  # what it was to do it has done
    if error is not None:
        raise error
    return done


def child() -> None:
    """In the process: does what is asked for on its input, and says what came of it."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the user's function prints is no answer
    args = pickle.load(asked)

    def end_with_parent() -> None:
        asked.read()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    answer: tuple[Any, Any] = None, None
    try:
        answer = run_unit(*args), None
    except Exception as error:
        answer = None, portable(error)
    pickle.dump(answer, answers)
    answers.flush()
