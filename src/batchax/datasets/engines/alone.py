"""A unit that may have ended its worker, run in a process that may end, too.

When a process ends, those who wait for it do not know which of its units it was, or whether it was
any: memory may have run out for another reason, or somebody stopped it. So each is run again, in a
process of its own. If that ends as well, its rows are parted in halves, and so on, until those are
found that end a process by themselves.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from batchax.datasets.engines.worker import Done, probe_rows, run_unit
from batchax.datasets.parts import Bad, Unit
from batchax.errors import JobError, RowError

_CHILD = "from batchax.datasets.engines.alone import child; child()"


class _Ended(Exception):
    """A process that ended, and did not say why."""


def run_alone(path: str, unit: Unit, attempt: int, quarantine: bool) -> Done:
    """As `run_unit`, in processes that may end.

    Args:
      path: of the file that says what is to be done.
      unit: what to run.
      attempt: how many times it was begun before.
      quarantine: whether rows that end a process are to be left out, rather than to be an error.

    Raises:
      RowError: a row ends the process that computes it, and is not to be left out.
      JobError: the unit does, and none of its rows by itself.
    """
    try:
        return _in_child(run_unit, path, unit.number, attempt)
    except _Ended as ended:
        most = unit.rows if quarantine else 1
        rows = _ending(path, unit, list(range(unit.start, unit.stop)), most)
        if not rows:
            raise JobError(
                f"rows {unit.start} to {unit.stop} end the process that computes them ({ended}), "
                "and no row does by itself: they may need more memory than there is. What was done "
                "is kept. Take a smaller batch_size, and another out=, since units change with it."
            ) from None
        if not quarantine:
            raise RowError(
                f"row {rows[0]} ends the process that computes it ({ended}). What was done is "
                "kept: mend the row and call again, or go on without such rows with "
                'on_error="quarantine".'
            ) from None
        known = [Bad(row, f"ends the process that computes it: {ended}") for row in rows]
        return _in_child(run_unit, path, unit.number, attempt, known)


def _ending(path: str, unit: Unit, rows: Sequence[int], most: int) -> list[int]:
    """Which of the rows that end a process together do so alone."""
    if len(rows) == 1:
        return list(rows)
    found: list[int] = []
    half = len(rows) // 2
    for part in (rows[:half], rows[half:]):
        try:
            _in_child(probe_rows, path, unit.number, part)
        except _Ended:
            found += _ending(path, unit, part, most - len(found))
        if len(found) >= most:
            break
    return found


def _in_child(function: Any, *args: Any) -> Any:
    """What a function returns, or raises, in a process of its own."""
    asked = pickle.dumps((function, args))
    child = subprocess.run([sys.executable, "-c", _CHILD], input=asked, stdout=subprocess.PIPE)
    try:
        returned, error = pickle.loads(child.stdout)
    except Exception:
        code = child.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        raise _Ended(how) from None
    if error is not None:
        raise error
    return returned


def child() -> None:
    """In the process: does what is asked for on its input, and says what came of it."""
    answers = sys.stdout.buffer
    sys.stdout = sys.stderr  # what the user's function prints is no answer
    function, args = pickle.load(sys.stdin.buffer)
    try:
        answer = function(*args), None
    except Exception as error:
        answer = None, error
    answers.write(pickle.dumps(answer))
    answers.flush()
