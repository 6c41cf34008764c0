"""Processes that are killed at a chosen step of writing.

They are forked from a process that has not imported JAX, which takes a second to start and does not
like to be forked: `batchax` is a package without content there.
"""

import subprocess
import sys
from pathlib import Path

import batchax

_BEGIN = """
import os, signal, sys, types
batchax = sys.modules["batchax"] = types.ModuleType("batchax")
batchax.__path__ = [{package!r}]
sys.path.insert(0, {tests!r})
from support import steps

def killed_at(count, work):
    '''Runs `work` in a child that is killed at the step with this number.

    Returns its exit code, and how many steps it reached.
    '''
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        left = [count]

        def at_step(step):
            os.write(writing, b".")
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        steps.watch(at_step)
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    passed = 0
    while data := os.read(reading, 4096):
        passed += len(data)
    os.close(reading)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), passed
"""


def command(script: str, *args: object) -> list[str]:
    """A command that runs a script, which knows `killed_at`."""
    package, tests = Path(batchax.__file__).parent, Path(__file__).parents[1]
    begin = _BEGIN.format(package=str(package), tests=str(tests))
    return [sys.executable, "-c", begin + script, *map(str, args)]


def run(script: str, *args: object) -> str:
    """Runs a script, and returns what it printed."""
    done = subprocess.run(command(script, *args), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
