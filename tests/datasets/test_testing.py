"""The tests that other packages run: the guide's package passes, and what is wrong is found."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.packages import FENCE, install_of_page

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "own_storage.md"

# What is wrong, and the test that must find it.
STORES = {
    "Forgets": (
        "def put(self, unit, results):\n        unit.number == 1 or super().put(unit, results)",
        "what_is_written_is_read_back",
    ),
    "Rounds": (
        "def put(self, unit, results):\n        super().put(unit, [results[0].astype('f4')])",
        "every_dtype",
    ),
    "Clobbers": (
        "def prepare(self):\n        shutil.rmtree(self.out, True)\n        super().prepare()",
        "what_is_there_is_never_written_over",
    ),
    "Careless": ("def check(self):\n        pass", "an_output_that_is_gone"),
    "Raises": ("def read(self, unit):\n        return [np.load(self._part(unit))]", "damage"),
    "Adds": (
        "def put(self, unit, results):\n        super().put(unit, results)\n"
        "        (self.out / str(time.time_ns())).touch()",
        "the_same_results_make_the_same_bytes_whatever_was_there",
    ),
    "Private": (
        "def describe(self):\n        return {**super().describe(), 'leaves': []}",
        "another_process_opens_it_by_what_it_says_of_itself",
    ),
    "Shares": (
        "def put(self, unit, results):\n        self.out.shared = results\n"
        "        time.sleep(0.01)\n        super().put(unit, self.out.shared)",
        "units_are_written_from_several_threads",
    ),
    "NotFound": ("", "its_suffix_finds_it"),
}
SOURCES = {
    "Late": ("def get(self, index):\n        return super().get(index)[1:]", "rows_along_any_axis"),
    "Kept": (
        "gives_fresh = True\n    def get(self, index):\n"
        "        self.all = getattr(self, 'all', super().get(()))\n        return self.all[index]",
        "what_was_read_is_the_readers",
    ),
    "Constant": ("def origin(self):\n        return {}", "another_content_is_another_source"),
    "Changing": (
        "def origin(self):\n        return {'time': time.time_ns()}",
        "an_identity_is_for_json_and_stays",
    ),
    "Rounds": ("def get(self, index):\n        return np.uint8(super().get(index))", "every_dtype"),
    "Lists": ("lengths = np.arange(4)", "it_says_what_it_is"),
}
HEAD = """
import itertools, shutil, time
from pathlib import PosixPath
import numpy as np, pytest
from batchax.datasets import Leaf, Unit
from batchax.testing import SourceTests, StoreTests
from tiny_format import TinySource, TinyStore
"""
STORE = """
class {name}Store(TinyStore):
    {body}

class Test{name}Store(StoreTests):
    store, suffix = {name}Store, "tiny"
    trees = ragged = False

    @pytest.fixture
    def out(self, tmp_path):
        return type("P", (PosixPath,), {{}})(tmp_path / "folder" / "x.tiny")
"""
SOURCE = """
class {name}Source(TinySource):
    {body}

class Test{name}Source(SourceTests):
    @pytest.fixture
    def source_of(self, tmp_path):
        count = itertools.count()
        def source_of(x):
            store = TinyStore(tmp_path / str(next(count)), [Leaf("", x.shape, x.dtype)], len(x))
            store.prepare()
            store.write(Unit(0, 0, len(x)), [x])
            return {name}Source(store.out, "", "x")
        return source_of
"""


def run(folder, *asked):
    """Runs the tests of the guide's package, and others; returns those that failed, and a count."""
    install_of_page(GUIDE, folder)
    blocks = [text for language, text in FENCE.findall(GUIDE.read_text()) if language == "python"]
    (tests,) = [text for text in blocks if "SourceTests" in text]
    (folder / "test_tiny_format.py").write_text(tests)
    options = ["-q", "-W", "error", "-p", "no:cacheprovider", "--tb=short", "--rootdir", folder]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_tiny_format.py", *asked],
        cwd=folder,
        env={"PYTHONPATH": ":".join([*sys.path, str(folder)]), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    failed = re.findall(r"^(?:FAILED|ERROR) ([^\s\[]*)", done.stdout, re.MULTILINE)
    return set(failed), int(re.search(r"(\d+) passed", done.stdout)[1])


def test_the_package_of_the_guide_passes_and_what_is_wrong_is_found(tmp_path):
    code, expected = HEAD, []
    for kind, table, shape in (("Store", STORES, STORE), ("Source", SOURCES, SOURCE)):
        for name, (body, test) in table.items():
            code += shape.format(name=name, body=body or "pass")
            expected.append(f"test_wrong.py::Test{name}{kind}::test_{test}")
    (tmp_path / "test_wrong.py").write_text(code)
    failed, passed = run(tmp_path, *expected, "-k", "not killed")
    assert failed == set(expected)
    assert passed >= 25


@pytest.mark.nightly
def test_the_package_of_the_guide_is_killed_at_any_step(tmp_path):
    assert run(tmp_path, "-k", "at_any_step") == (set(), 1)
