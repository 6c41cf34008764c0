"""The examples run, agree with their loops, and draw something."""

import importlib.util
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_digits(tmp_path, capsys):
    digits = load("digits")
    digits.STEPS = 100
    digits.main(tmp_path)
    account = capsys.readouterr().out
    assert "1,797 handwritten digits" in account
    assert "agreed" in account
    assert (tmp_path / "digits.png").stat().st_size > 50_000
