"""The script that `batchax slurm` prints, and `batchax status --follow`."""

import itertools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import batchax as bx
from batchax.command import main
from batchax.datasets.inspect import follow, status, verify

from support.map_calls import stops_at

X = np.arange(60, dtype=np.float32).reshape(20, 3)
CALL = "slurm model.py:scaled --in @w.npy --in x.npy --out y.zarr --commit-rows 4 --batch-size 2"

# Of Slurm no more than that a task has a number, runs steps, and may be put into the queue again.
_SBATCH = """#!{python}
import os, re, subprocess, sys
script = open(sys.argv[1]).read()
first, last = map(int, re.search(r"--array=(\\d+)-(\\d+)", script).groups())
queue, times = list(range(first, last + 1)), 0
while queue:
    number = queue.pop(0)
    env = dict(os.environ, SLURM_ARRAY_TASK_ID=str(number), SLURM_ARRAY_JOB_ID="7")
    code = subprocess.run(["bash", sys.argv[1]], env=env).returncode
    if os.path.exists("requeued"):
        os.remove("requeued")
        queue.append(number)
        code = 0
    assert code == 0, (number, code)
"""


@pytest.fixture(autouse=True)
def here():
    np.save("x.npy", X)
    np.save("w.npy", np.ones((3, 2), np.float32))
    Path("model.py").write_text("def scaled(w, x):\n    return x @ w\n")


def printed(capsys, command):
    assert main(command.split()) == 0
    return capsys.readouterr().out


def test_the_script(capsys):
    script = printed(capsys, f"{CALL} --shards 3 --sbatch=--gres=gpu:1 --on-error quarantine")
    assert script.startswith(
        "#!/bin/bash\n#SBATCH --job-name=batchax-scaled\n#SBATCH --array=0-2\n"
    )
    assert "#SBATCH --requeue\n" in script
    assert "#SBATCH --gres=gpu:1\n" in script
    assert (
        "srun batchax map model.py:scaled --in @w.npy --in x.npy --out y.zarr --batch-size 2 "
        '--commit-rows 4 --on-error quarantine --no-progress --shard "$SLURM_ARRAY_TASK_ID/3"'
    ) in script
    assert not Path("y.zarr").exists()
    subprocess.run(["bash", "-n", "/dev/stdin"], input=script, text=True, check=True)


@pytest.mark.parametrize(("asked", "shards"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 5), (99, 5)])
def test_shards_fit_the_units(capsys, asked, shards):
    """There are five units: with four shards one has two, as with three."""
    script = printed(capsys, f"{CALL} --shards {asked}")
    assert re.search(r"--array=0-(\d+)\n", script)[1] == str(shards - 1)
    assert f"/{shards}" in script


def test_units_are_those_that_were_counted(capsys):
    """Where nobody says their size, the script does: tasks run on other machines."""
    script = printed(capsys, "slurm model.py:scaled --in @w.npy --in x.npy --out y.zarr")
    assert "--batch-size 20 --commit-rows 20" in script
    assert "#SBATCH --array=0-0\n" in script


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--shards 0", "no number of tasks"),
        ("--executor processes:2", "Remove --executor"),
        ("--out memory://a/y.zarr", "no other task sees"),
        ("--in none.npy", "no such file"),
        ("--out ftp://a/y.zarr", "ftp:// address"),
    ],
)
def test_what_cannot_be_is_refused(capsys, more, says):
    assert main(f"{CALL} {more}".split()) in (1, 2)
    assert says in capsys.readouterr().err


@pytest.mark.nightly
def test_the_script_does_the_map(capsys, monkeypatch):
    """Each task is a process of its own, and one is interrupted and put into the queue again."""
    Path("bin").mkdir()
    programs = {
        "sbatch": _SBATCH.format(python=sys.executable),
        "srun": '#!/bin/bash\nif [ ! -e once ]; then touch once; exit 130; fi\nexec "$@"\n',
        "scontrol": '#!/bin/bash\n[ "$1 $2" = "requeue 7_0" ] && touch requeued\n',
        "batchax": f'#!/bin/bash\nexec {sys.executable} -m batchax "$@"\n',
    }
    for name, text in programs.items():
        Path("bin", name).write_text(text)
        Path("bin", name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}{os.pathsep}{os.environ['PATH']}")
    Path("y.sh").write_text(printed(capsys, f"{CALL} --shards 2"))
    subprocess.run(["sbatch", "y.sh"], check=True)
    assert status("y.zarr").finished
    assert verify("y.zarr")
    got = bx.map(lambda y: y, "y.zarr", progress=False).outputs
    np.testing.assert_array_equal(got, X @ np.ones((3, 2), np.float32))


def test_status_follows_a_job_until_it_is_finished(capsys):
    lines, first, half = [], threading.Event(), threading.Event()

    def look():
        for line in follow("y.zarr", 0.01):
            lines.append(line)
            first.set()
            if "no process at work" in line:
                half.set()

    thread = threading.Thread(target=look)
    thread.start()
    assert first.wait(60)
    how = dict(out="y.zarr", batch_size=2, commit_rows=4)
    with pytest.raises(TimeoutError):
        bx.map(lambda x: x + 1, "x.npy", **how, progress=stops_at(8))
    assert half.wait(60)
    bx.map(lambda x: x + 1, "x.npy", **how, progress=False)
    thread.join(60)
    assert not thread.is_alive()
    assert lines[0].endswith("y.zarr: not begun")
    assert any("of 20 rows" in line for line in lines[1:-1])
    assert lines[-1].startswith("y.zarr: finished")
    said = [line[len("00:00:00  ") :] for line in lines[:-1]]
    assert all(one != other for one, other in itertools.pairwise(said))
    assert main(["status", "y.zarr", "--follow"]) == 0
    assert capsys.readouterr().out.startswith("y.zarr: finished")
    assert main(["status", "y.zarr", "--follow", "0"]) == 2
