"""The command ``batchax explain``."""

import argparse
import sys
from pathlib import Path

import pytest

from batchax import command
from batchax.command import main
from batchax.commands import demo

MODEL = """
import jax
import jax.numpy as jnp


def affine(M, v, b):
    return jnp.tanh(M @ v + b).sum()


def of_tree(p, x, flag):
    return x @ p["w"] if flag else x


def drawn(key, x):
    return x + jax.random.normal(key, x.shape)


class Net:
    @staticmethod
    def forward(x):
        return jnp.sin(x)


constant = 3
"""
AFFINE = ["model:affine", "--args", "f32[5,3]", "f32[8,3]", "f32[5]", "--in-axes", "None", "0"]
AFFINE += ["None"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("model", None)  # that of another test
    yield tmp_path
    sys.modules.pop("model", None)


def test_a_function_of_a_module_is_explained(here, capsys):
    assert main(["explain", *AFFINE, "--html", "out.html"]) == 0
    out = capsys.readouterr().out
    assert "affine, batched over 8 lanes" in out
    assert "model.py:7  return jnp.tanh(M @ v + b).sum()" in out
    assert "a = dot_general M v" in out
    page = (here / "out.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "dot_general" in page


def test_trees_flags_keys_files_and_attributes(here, capsys):
    tree = ["--args", '{"w": "f32[3]"}', "f32[4,3]", "True", "--in-axes", "None", "0", "None"]
    assert main(["explain", "model.py:of_tree", *tree]) == 0
    assert "p['w']: f32[3]" in capsys.readouterr().out
    assert main(["explain", "model:drawn", "--args", "key[4]", "f32[4,2]"]) == 0
    assert "x: f32[2] -> f32[4*,2]" in capsys.readouterr().out
    options = ["--args", "f32[2,6]", "--in-axes", "-1", "--out-axes", "1", "--batch-size", "2"]
    assert main(["explain", "model:Net.forward", *options]) == 0
    assert "batched over 6 lanes, batch_size=2" in capsys.readouterr().out
    assert main(["explain", "jax.numpy:tanh", "--args", "float32[3,2]"]) == 0  # NumPy's names
    assert "batched over 3 lanes" in capsys.readouterr().out


def test_measured(here, capsys):
    assert main(["explain", *AFFINE, "--measure"]) == 0
    out = capsys.readouterr().out
    assert "all lanes at once" in out
    assert "a loop over examples" in out
    assert "4 lanes at a time" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model"], "does not name a function"),
        (["nowhere:f"], "there is no module 'nowhere'"),
        (["nowhere.py:f"], "there is no file nowhere.py"),
        (["model:afine"], "model has no 'afine'. It has Net, affine, drawn, of_tree."),
        (["model:constant"], "is not a function, but a int"),
        (["model:affine", "--args", "f33[2]"], "'f33[2]' is not a type"),
        (["model:affine", "--args", '{"w": "x"}'], '\'x\' is not a type (in {"w": "x"})'),
        (["model:affine", "--args", "f32["], "is not understood"),
        (["model:affine", "--in-axes", "first"], "--in-axes: 'first' is not understood"),
        (["model:affine", "--batch-size", "few"], "--batch-size: 'few' is neither"),
        (["model:affine", "--batch-size", "0"], "Pass None to run all lanes"),
        (
            ["model:affine", "--args", "f32[5,3]", "f32[8,3]", "f32[5]", "--in-axes", "None", "0"],
            "--in-axes has 2 entries",
        ),
    ],
)
def test_mistakes_are_named(here, capsys, arguments, message):
    assert main(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("batchax: ")
    assert not captured.out


def test_every_option_of_every_command_is_described():
    def parsers(parser):
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    yield from parsers(inner)

    every = [action for parser in parsers(command._parser()) for action in parser._actions]
    assert len(every) > 60
    missing = [
        a.dest for a in every if not a.help and not isinstance(a, argparse._SubParsersAction)
    ]
    assert missing == []


def test_the_demo_runs_the_example_of_the_checkout(tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(
        demo.runpy, "run_path", lambda path: {"main": lambda to: runs.append((path, to))}
    )
    assert main(["demo", str(tmp_path)]) == 0
    ((path, folder),) = runs
    assert folder == str(tmp_path)
    assert path.endswith("examples/digits.py")
    assert "def main(folder" in Path(path).read_text()
    monkeypatch.setattr(demo, "_PLACES", ())
    assert main(["demo"]) == 2
