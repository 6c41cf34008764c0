"""`python -m suites` finds the tests of a library whose outcome `bx.vmap` changes."""

import sys

from suites.__main__ import Suite, compare, run

TESTS = """
import jax, jax.numpy as jnp, pytest, warnings
from jax import vmap

def test_results():
    assert vmap(jnp.sin)(jnp.ones(3)).shape == (3,)

@pytest.mark.parametrize("function", [vmap, jax.vmap])
def test_what_it_is(function):
    assert "_batchax_made_of" not in vars(function(jnp.sin))

def test_that_fails():
    assert vmap(jnp.sum)(jnp.ones((2, 3))).shape == (3,)

def test_that_warns():
    warnings.warn("of the library")

@pytest.mark.skip
def test_nothing():
    pass

def test_without_end():
    while True:
        pass
"""


def test_differences(tmp_path, monkeypatch):
    monkeypatch.setattr("suites.__main__.SECONDS", 2)
    around = "[tool.pytest.ini_options]\nfilterwarnings = ['error']"  # settings of batchax
    (tmp_path / "pyproject.toml").write_text(around)
    folder = tmp_path / "library"
    (folder / "source" / "tests").mkdir(parents=True)
    (folder / "env").symlink_to(sys.prefix)
    (folder / "source" / "tests" / "test_library.py").write_text(TESTS)
    suite = Suite("1", ("tests",), ())
    plain, batched = (run(folder, suite, vmap, []) for vmap in ("jax", "batchax"))
    outcomes = [plain[test]["outcome"] for test in plain]
    assert outcomes == ["passed", "passed", "passed", "failed", "passed", "skipped", "timeout"]
    assert [test["calls"] for test in plain.values()] == [1, 1, 1, 1, 0, 0, 0]

    file = "tests/test_library.py::"
    ours = [test for test in plain if "what_it_is" in test]
    assert [test for test in plain if plain[test] != batched[test]] == ours
    lines, unexpected = compare(plain, batched, {})
    assert lines[0] == f"{ours[0]}: passed -> failed"
    assert "_batchax_made_of" in lines[1]
    assert unexpected == ours
    lines, unexpected = compare(plain, batched, {f"{file}test_what_it_is*": "It asks."})
    assert (lines[1], lines[3], unexpected) == ("    It asks.", "    It asks.", [])
    del batched[f"{file}test_results"]  # as if the process had ended
    assert compare(plain, batched, {})[1] == [f"{file}test_results", *ours]
