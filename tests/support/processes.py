"""Python in processes of its own, which import batchax and these tests as this one does."""

import os
import subprocess
import sys
from pathlib import Path

import batchax as bx

PATHS = str(Path(bx.__file__).parents[1]), str(Path(__file__).parents[1])
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}


def python(*args, **environment):
    """A process that has ended, and what it printed."""
    command, env = [sys.executable, *map(str, args)], {**ENV, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
