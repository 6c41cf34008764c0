"""Calls of `map` in processes of their own, killed at every kind of moment."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import batchax as bx

TESTS, PACKAGE = Path(__file__).parents[1], Path(bx.__file__).parents[1]


@pytest.mark.only_in_whole_runs
def test_a_map_that_is_killed_leaves_what_one_leaves_that_is_not():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(TESTS)])}
    command = [sys.executable, "-m", "kills", "--count", "36", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    kills, outputs, reused = map(
        int, re.findall(r"(\d+) (?:kills|outputs|units reused)", done.stdout)
    )
    print(done.stdout)
    assert kills >= 36
    assert outputs >= 6
    assert reused > kills
    assert not re.search(r"^ +0 ", done.stdout, re.MULTILINE), "at some moment nothing was killed"
