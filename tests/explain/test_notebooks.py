"""In a notebook a line is one of a cell, as it is in the notebook's own messages."""

import sys
import types

import jax
import jax.numpy as jnp
import pytest

import batchax as bx


class Compiler:
    """Of IPython's shell, what says of a file which cell it stands for."""

    def format_code_name(self, name):
        return ("Cell", "In[3]") if name.endswith("cell_of_a_test.py") else None


@pytest.fixture
def cell(monkeypatch):
    """A function that was written in cell 3."""
    shell = types.SimpleNamespace(compile=Compiler())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    names = {"jnp": jnp, "jax": jax}
    code = "def f(x):\n    return jnp.log(x)\n"
    exec(compile(code, "/tmp/ipykernel_7/cell_of_a_test.py", "exec"), names)
    return names["f"]


def test_lines_are_those_of_cells(cell):
    found = bx.find_nonfinite(cell)(jnp.array([1.0, -1.0]))
    assert "\n  cell 3, line 2 (f)\n" in str(found)
    explanation = bx.explain(cell)(jnp.ones(3))
    assert "\n  cell 3, line 2" in str(explanation)
    assert "cell 3, line 2" in explanation._repr_html_()
    other = bx.same_program(cell, jnp.exp, jnp.ones(3))
    assert "cell 3, line 2" in str(other)
