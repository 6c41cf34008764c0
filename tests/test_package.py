"""What is published: the wheel, the source distribution, and what they say of themselves."""

import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import batchax as bx

ROOT = Path(__file__).parents[1]
SAID = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "batchax").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == sources | {"batchax/commands/digits.py"}  # of the examples: `batchax demo`
    assert "batchax/py.typed" in names


def test_the_wheel_says_what_it_is(wheel):
    (metadata,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    said = email.message_from_bytes(wheel.read(metadata))
    assert said["Name"] == "batchax"
    assert said["Version"] == bx.__version__
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Description-Content-Type"] == "text/markdown"
    urls = dict(line.split(", ") for line in said.get_all("Project-URL"))
    assert urls == SAID["urls"]
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())
    needed = [line for line in said.get_all("Requires-Dist") if "extra ==" not in line]
    assert [re.match(r"\w+", line)[0] for line in needed] == ["jax"]
    (scripts,) = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
    assert b"batchax = batchax.command:main" in wheel.read(scripts)


def test_the_text_leads_somewhere_from_outside(wheel):
    """Every link and picture has an address, of this version, of a file that there is."""
    (metadata,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    text = email.message_from_bytes(wheel.read(metadata)).get_payload(decode=True).decode()
    targets = re.findall(r"\]\(([^)]+)\)", text)
    home = SAID["urls"]["Source"]
    assert len(targets) > 20
    for target in targets:
        at = rf"{re.escape(home)}/(?:raw|blob)/v{re.escape(bx.__version__)}/([^#]+)"
        found = re.match(at, target)
        assert found, target
        assert (ROOT / found[1]).exists(), target
    assert f"{home}/raw/v{bx.__version__}/docs/pictures/digits.png" in targets


def test_the_source_distribution_is_enough_to_build_and_test(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = ["pyproject.toml", "Makefile", "LICENSE", "CITATION.cff", "README.md", "CHANGELOG.md"]
    wanted += ["src/batchax/py.typed", "tests/conftest.py", "docs/conf.py", "examples/digits.py"]
    assert not set(wanted) - names
    assert not [name for name in names if name.startswith((".venv", ".cache", "out/"))]


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {bx.__version__}\n" in citation
    assert SAID["urls"]["Source"] in citation


IMPORTED = """
import pickle, sys

import batchax as bx
import jax

bx.vmap(lambda x: jax.numpy.sin(x))(jax.numpy.ones(3))  # nor does a plain call
later = {"explain", "datasets", "rows", "nonfinite", "ranks"}
loaded = [name for name in sys.modules if name.split(".")[0] in ("rich", "multiprocessing")]
parts = (name.split(".") for name in sys.modules)
loaded += [ns for ns in parts if ns[0] == "batchax" and later & {*ns[1:2]}]
assert not loaded, loaded

# Modules of the names of functions, and imports while something is traced.
import batchax.commands.explain, batchax.check, batchax.map
jax.jit(lambda x: [getattr(bx, name) for name in bx.__all__] and x)(1.0)
held = [n for n, m in [*sys.modules.items()] if n.startswith("batchax")
        for x in vars(m).values() if isinstance(x, jax.core.Tracer)]
assert not held, held
assert all(callable(f) for f in (bx.explain, bx.check, bx.map))
assert pickle.loads(pickle.dumps(bx.map)) is bx.map
import cloudpickle
assert pickle.loads(cloudpickle.dumps(lambda: bx))() is bx  # as executors send a user's function
from batchax import *
assert nonzero is bx.nonzero
assert not hasattr(bx, "no_such_name")
"""


def test_what_is_used_later_is_imported_later():
    subprocess.run([sys.executable, "-c", IMPORTED], check=True)
