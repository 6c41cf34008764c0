"""Docstrings of what is public: each is a reference entry, with an example that runs."""

import contextlib
import doctest
import inspect
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.datasets.run import Report
from batchax.nonfinite.find import NonFinite

# The note that frames are hidden is a part of an error's message to doctest.
pytestmark = pytest.mark.usefixtures("own_registrations", "unfiltered_tracebacks")


def entries():
    """What a reference has an entry for: public names, what they return, and public methods."""
    public = {name: getattr(bx, name) for name in bx.__all__}
    for name, x in {**public, "Report": Report, "NonFinite": NonFinite}.items():
        yield name, x
        if inspect.isclass(x) and not issubclass(x, Exception):
            yield from methods(name, x)


def methods(name, cls):
    """The methods and properties of a class, except for those that are not for users."""
    for key in dir(cls):
        x = inspect.getattr_static(cls, key)
        x = getattr(x, "__func__", x)
        if not (inspect.isfunction(x) or isinstance(x, property)):
            continue
        hidden = key.startswith(("_", "tree_")) or ":meta private:" in (x.__doc__ or "")
        if not hidden or key == "__getitem__":
            yield f"{name}.{key}", x


ENTRIES = dict(entries())


@pytest.mark.parametrize("name", ENTRIES)
def test_is_a_reference_entry(name):
    """One line first, all that may be given, and an example."""
    x = ENTRIES[name]
    text = inspect.getdoc(x) or ""
    assert re.match(r"[^\n]+\.(\n\n|\Z)", text)
    assert isinstance(x, property) or re.search(r"\nExample:\n(.+\n\n)?  >>> ", text)
    if inspect.isfunction(x) or (inspect.isclass(x) and not issubclass(x, Exception)):
        for given in inspect.signature(x).parameters:
            described = re.search(rf"^  (\w+, )*\**{given}(, \w+)*:", text, re.MULTILINE)
            assert described or given.startswith("_") or given in ("self", "cls"), given


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.each_commit(50)
def test_examples_print_what_is_shown(name, tmp_path):
    known = {"bx": bx, "jax": jax, "jnp": jnp, "np": np}
    text = inspect.getdoc(ENTRIES[name])
    examples = doctest.DocTestParser().get_doctest(text, known, name, None, 0)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE  # x64 prints more digits
    wrong = io.StringIO()
    with contextlib.chdir(tmp_path):  # where examples leave their files
        doctest.DocTestRunner(optionflags=flags).run(examples, out=wrong.write)
    assert not wrong.getvalue()


def test_completion_and_star_have_the_public_names_only():
    assert dir(bx) == sorted(bx.__all__)
