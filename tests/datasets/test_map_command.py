"""The commands `map`, `status` and `verify`, as they are typed."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from batchax.command import main

from support.map_calls import values
from support.processes import ENV, python

FLOAT = jax.dtypes.canonicalize_dtype(float)
MODEL = """
import itertools
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp


def score(x, w):
    return {"y": jnp.tanh(x @ w["w"]) + w["b"], "norm": jnp.sqrt((x ** 2).sum())}


def double(x):
    return x * 2


def both(x, y):
    return x + y


def draw(key, x):
    return x + jax.random.uniform(key)


def fragile(x):
    def on_host(x):
        if x[0] > 100:
            raise ValueError("too large")
        return x

    return jax.pure_callback(on_host, x, x, vmap_method="sequential")


rows = itertools.count()


def patient(x):
    def wait(x):
        end = time.monotonic() + 300
        while next(rows) >= 12 and not os.path.exists("go-on") and time.monotonic() < end:
            time.sleep(0.01)
        return x * 2

    return jax.pure_callback(wait, x, x, vmap_method="sequential")
"""


@pytest.fixture
def x(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "model", raising=False)
    (tmp_path / "model.py").write_text(MODEL)
    x = np.random.default_rng(0).standard_normal((40, 3)).astype(FLOAT)
    np.save("x.npy", x)
    return x


def run(text):
    return main(text.split())


def test_a_dataset_and_what_all_rows_share(x, capsys):
    w, b = np.arange(6.0).reshape(3, 2).astype(FLOAT), np.ones(2, FLOAT)
    np.savez("w.npz", w=w, b=b)
    command = "map model:score --in x.npy --in @w.npz --out y.zarr --batch-size 8 --commit-rows 16"
    assert run(command) == 0
    out, err = capsys.readouterr()
    assert out.startswith("y.zarr: 40 rows, ")
    assert "40 rows done" in err
    np.testing.assert_allclose(values("y.zarr/y"), np.tanh(x @ w) + b, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values("y.zarr/norm"), np.linalg.norm(x, axis=1), rtol=1e-5)
    assert run(command + " --no-progress") == 0
    out, err = capsys.readouterr()
    assert out.startswith("y.zarr: 40 rows, 40 reused")
    assert err == ""


def test_axes_as_they_are_written(x):
    np.save("t.npy", x.T)
    assert run("map model:double --in t.npy --in-axes 1 --out-axes -1 --out y.npy") == 0
    np.testing.assert_array_equal(np.load("y.npy"), x.T * 2)
    np.save("w.npy", np.ones((3, 2), FLOAT))
    text = "map model.py:double --in x.npy --out z.npy --in-axes 0"
    assert run(text) == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model:score --in x.npy", r"model:score: TypeError: score\(\) missing 1 required"),
        ("model:double --in x.npy --in x.npy", r"double\(\) takes 1 positional argument but 2"),
        ("model:misfit --in x.npy", r"(?s)misfit is given one example.*model\.py:\d+\)$"),
        ("model:bad --in x.npy --on-nonfinite raise", r"with --on-nonfinite quarantine without"),
    ],
)
def test_what_a_function_raises_is_told_without_a_traceback(text, told, x, capsys):
    with open("model.py", "a") as file:
        file.write("\ndef misfit(x):\n    return x @ jnp.ones(7)\n")
        file.write("\ndef bad(x):\n    return jnp.log(x - x)\n")
    assert run(f"map {text} --out y.npy --no-progress") == 1
    err = capsys.readouterr().err.strip()
    assert re.search(told, err)
    assert "Traceback" not in err


def test_an_option_that_is_nearly_one(x, capsys):
    with pytest.raises(SystemExit):
        run("map model:double --in x.npy --out y.npy --batch_size 10")
    assert "(did you mean --batch-size?)" in capsys.readouterr().err


def test_rows_that_fail(x, capsys):
    x[7, 0] = 1000
    np.save("x.npy", x)
    command = "map model:fragile --in x.npy --out y.npy --batch-size 8 --version 1"
    assert run(command) == 1
    assert "row 7 of x (x.npy) fails: ValueError: too large" in capsys.readouterr().err
    assert run(command + " --on-error quarantine") == 3
    assert "1 quarantined" in capsys.readouterr().out
    assert run("status y.npy") == 0
    assert "quarantined  1" in capsys.readouterr().out


MISTAKES = {
    "map model:double --out y.npy": (2, "map needs a dataset"),
    "map model:nothing --in x.npy --out y.npy": (2, "model has no 'nothing'"),
    "map model:double --in x.npy --out y.npy --batch-size some": (2, "--batch-size"),
    "map model:double --in x.npy --out y.npy --store-options zstd": (2, "--store-options"),
    "map model:double --in none.npy --out y.npy": (1, "there is no such file"),
    "map model:double --in x.npy --out y.h5": (
        1,
        "results are written to .zarr, .npy and .parquet",
    ),
    "map model:fragile --in x.npy --out y.npy": (1, "--version"),
    "map model:both --in x.npy --out y.npy": (1, "Pass --in for each argument"),
    "map model:double --in x.npy --out y.tif": (1, "--out y.tif: results are written to"),
    "status y.npy": (1, "There is no job of y.npy: "),
    "verify y.npy": (1, "There is no job of y.npy"),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes(x, text, capsys):
    status, message = MISTAKES[text]
    assert run(text) == status
    err = capsys.readouterr().err
    assert err.startswith("batchax: ")
    assert message in err


def units_done():
    journal = Path("y.npy.job/journal/main.jsonl")
    return journal.exists() and journal.read_text().count('"unit"')


def test_interrupted(x):
    """It goes on only when it was told that it is to end, however long that takes."""
    command = "-m batchax map model:patient --in x.npy --out y.npy --version 1".split()
    command += "--batch-size 4 --commit-rows 4".split()
    begun = [sys.executable, *command]
    with subprocess.Popen(begun, stderr=subprocess.PIPE, text=True, env=ENV) as process:
        while process.poll() is None and not units_done():
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        told = [next(line for line in process.stderr if "Interrupted" in line)]
        Path("go-on").touch()
        err = "".join([*told, *process.stderr])
    assert process.returncode == 130, err
    assert "The same command goes on" in err
    again = python(*command)
    assert again.returncode == 0, again.stderr
    assert " reused" in again.stdout
    np.testing.assert_array_equal(np.load("y.npy"), x * 2)
