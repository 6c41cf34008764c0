"""The examples run, agree with their loops, and draw something."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def load(name, folder=EXAMPLES):
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.compiles(100)
def test_digits(tmp_path, capsys):
    digits = load("digits")
    digits.STEPS = 50
    digits.main(tmp_path)
    account = capsys.readouterr().out
    assert "1,797 handwritten digits" in account
    theirs, ours = map(float, re.findall(r"([0-9.]+)MB", account))
    assert ours < theirs / 10
    assert "and those of 36 digits one by one" in account
    assert (tmp_path / "digits.png").stat().st_size > 50_000


def test_packed_attention(capsys):
    attention = load("packed_attention")
    attention.SENTENCES = 4
    assert attention.main() < 1e-4
    assert "Gradients differ by" in capsys.readouterr().out


def test_explained(tmp_path, capsys):
    explained = load("explained")
    explained.PENALTIES, explained.WEAKEST = 64, 0.1
    explained.main(tmp_path)
    account = capsys.readouterr().out
    assert "`while` runs until the last of 64 lanes is done" in account
    assert "64 fits took" in account
    assert "agreed" in account
    page = (tmp_path / "explained_predicate.html").read_text()
    assert "measurements @ weights" in page


@pytest.mark.nightly
def test_embeddings(tmp_path, capfd, monkeypatch):
    embeddings = load("embeddings")
    embeddings.ROWS, embeddings.COMMIT, embeddings.STEPS = 3000, 100, 100
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent / "src"))
    embeddings.main(tmp_path)
    account = capfd.readouterr().out
    assert "ended by signal 9" in account
    assert "3,000 rows, " in account
    assert " reused, " in account
    assert "agreed" in account
    assert (tmp_path / "embeddings.png").stat().st_size > 10_000


def test_data_parallel(capsys):
    example = load("data_parallel")
    example.ROWS, example.FEATURES, example.STEPS = 601, 128, 5
    example.main()
    account = capsys.readouterr().out
    assert "601 rows on 4 devices; 601 of them in process 0 of 1" in account
    assert "64 at a time:" in account
    assert "agreed" in account


@pytest.mark.nightly
def test_data_parallel_on_two_processes():
    sizes = {"ROWS": "601", "FEATURES": "128", "STEPS": "5"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / "data_parallel.py", "--processes", "2"],
        env={**os.environ, **sizes, "PYTHONPATH": str(EXAMPLES.parent / "src")},
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    assert "601 rows on 4 devices; 322 of them in process 0 of 2" in done.stdout
    assert done.stdout.count("agreed") == 1


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("mandelbrot", dict(HEIGHT=40, WIDTH=50, LIMIT=60), ["2,000 points", "LaneSteps(run="]),
        ("ode_ensemble", dict(LANES=8, STIFFEST=5.0, END=2.0), ["8 osc", "agreed"]),
        (
            "chains",
            dict(CHAINS=12, DRAWS=6, SIZE=3, DOUBLINGS=6),
            ["12 chains of 6 draws", "agreed"],
        ),
        ("environments", dict(AGENTS=8, STEPS=5, SIZE=9, FLOOR=12), ["8 agents", "agreed"]),
        ("roots", dict(EQUATIONS=16, COMPONENTS=3, LEVELS=9), ["16 equations", "agreed"]),
        pytest.param(
            "molecules",
            dict(MOLECULES=10, STEPS=100),
            ["10 molecules of 3 to 62", "agreed"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "silhouettes",
            dict(PICTURES=24, STEPS=3, SIZES=(4, 12)),
            ["24 pictures of", "agreed", "other pictures it tells"],
            marks=pytest.mark.nightly,
        ),
        ("nbody", dict(LANES=8, CHUNK=3, FRAMES=30), ["8 encounters of 600", "agreed"]),
        ("private_sgd", dict(STEPS=3, NOISE=(1.0,)), ["3 runs at once", "agreed", "not private"]),
        (
            "gaussian_process",
            dict(PATIENTS=30, FOLDS=3, STARTS=2, STEPS=5, CHUNK=3),
            ["6 fits to 20 patients", "agreed", "least squares"],
        ),
    ],
)
@pytest.mark.compiles(600)
@pytest.mark.each_commit(1, "nbody-sizes7-expected7")
def test_agrees_with_the_loop_and_draws(name, sizes, expected, tmp_path, capsys):
    example = load(name)
    for size, value in sizes.items():
        assert hasattr(example, size)
        setattr(example, size, value)
    example.main(tmp_path)
    account = capsys.readouterr().out
    assert all(words in account for words in expected)
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_said_in_one_sentence(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "batchax", None)
    with pytest.raises(
        SystemExit, match=r"^This needs batchax; in a checkout of batchax: pip inst"
    ):
        load(name)


def test_all_are_on_their_page():
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    assert not [name for name in NAMES if f"](../examples/{name}.py)" not in page]


@pytest.mark.nightly
def test_notebooks(tmp_path):
    notebooks = load("notebooks", EXAMPLES.parent / "tools")
    notebooks.main(tmp_path)
    written = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.ipynb")}
    assert sorted(written) == NAMES
    for name, notebook in written.items():
        story, first, *rest = (cell["source"] for cell in notebook["cells"])
        source = (EXAMPLES / f"{name}.py").read_text()
        assert story.startswith("# ")
        if first.startswith("%%writefile"):
            assert first.partition("\n")[2] == source
        else:
            program = ast.parse(source).body[1:-1]  # except for the docstring, and what runs it
            parts = ast.parse("\n".join([first, *rest])).body[: len(program)]
            assert [*map(ast.dump, parts)] == [*map(ast.dump, program)]
