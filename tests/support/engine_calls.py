"""Calls of `map` for engines; `python -m support.engine_calls NAME EXECUTOR` makes one."""

import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np

import batchax as bx

ROWS, UNIT = 64, 4
SIZES = dict(batch_size=2, commit_rows=UNIT, version="1")


def on_host(act):
    """A function of a number of a row and the row, that does `act` with both on the host."""

    here = os.getcwd()

    def fun(i, x):
        def twice(i, x):
            os.chdir(here)  # where workers begin, is where others began them
            act(int(i), x)
            return x * 2

        return jax.pure_callback(twice, x, i, x, vmap_method="sequential")

    return fun


def is_alive(path):
    try:
        os.kill(int(path.name.split("-")[1]), 0)
    except ProcessLookupError:
        return False
    return True


def slowly(i, x):
    time.sleep(0.02)


def patiently(i, x):
    """All but the first rows wait until they may go on."""
    end = time.monotonic() + 300
    while i >= 24 and not Path("go-on").exists() and time.monotonic() < end:
        time.sleep(0.01)


def while_it_is_there(i, x):
    """A service that is away from row 5 on."""
    if i >= 5 and Path("away").exists():
        raise ConnectionError("away")


def fatally(i, x):
    """Rows that end their process."""
    if i in (9, 41):
        os.kill(os.getpid(), signal.SIGKILL)


def fatally_at_41(i, x):
    if i == 41:
        os.kill(os.getpid(), signal.SIGKILL)


def fatally_in_company(i, x):
    """A row that ends its process if anybody else computes something."""
    mine = Path(f"busy-{os.getpid()}")
    mine.touch()
    end = time.monotonic() + (0.5 if i == 21 else 0.02)
    while time.monotonic() < end:
        if i == 21 and any(map(is_alive, set(Path().glob("busy-*")) - {mine})):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.005)
    mine.unlink()


def spoilt(i, x):
    if i in (6, 50):
        raise ValueError("spoilt")


CALLS = [slowly, patiently, fatally, fatally_in_company, spoilt]


def write_inputs():
    x = np.random.default_rng(0).standard_normal((ROWS, 3)).astype(np.float32)
    np.save("x.npy", x)
    return x


def call(act, executor, **options):
    """The call, in the folder of its inputs."""
    i, sizes = np.arange(ROWS, dtype=np.int32), {**SIZES, "progress": False, **options}
    return bx.map(on_host(act), i, "x.npy", out="y.npy", executor=executor, **sizes)


if __name__ == "__main__":
    name, executor, *more = sys.argv[1:]
    (act,) = (f for f in CALLS if f.__name__ == name)
    report = call(act, executor or None, progress=True, on_error=(more or ["raise"])[0])
    print(report.reused, report.left, [b.row for b in report.bad])
