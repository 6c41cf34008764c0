"""Sources and stores that other packages add."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import batchax as bx
from batchax.datasets import addresses
from batchax.datasets.sources import SOURCES, as_source
from batchax.datasets.store import STORES

from support.packages import install, install_of_page

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "own_storage.md"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder that Python looks for packages in; what is imported of it is gone afterwards."""
    folder, before = tmp_path / "packages", set(sys.modules)
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]
    importlib.invalidate_caches()


def test_a_job_goes_on_and_is_verified_in_a_store_of_another_package(packages, tmp_path):
    install_of_page(GUIDE, packages)
    out = tmp_path / "y.tiny"

    def halfway(done, total):
        if done >= 4:
            raise TimeoutError

    how = dict(out=out, batch_size=2, commit_rows=2)
    rows = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    with pytest.raises(TimeoutError):
        bx.map(lambda x: 2 * x, rows, **how, progress=halfway)
    report = bx.map(lambda x: 2 * x, rows, **how, progress=False)
    assert report.reused >= 4
    np.testing.assert_array_equal(as_source(out, "x").whole(), 2 * rows)
    from batchax.datasets.inspect import verify

    next(out.glob("*.npy")).write_bytes(b"")
    assert len(verify(out).damaged) == 1


def test_they_are_loaded_when_they_are_used(packages, tmp_path):
    groups = {"batchax.sources": {"lazy": "lazy:Source"}, "batchax.stores": {"lazy": "lazy:Store"}}
    install(packages, "lazy", "raise RuntimeError('loaded')", groups)
    bx.map(np.sum, np.ones((4, 2), np.float32), progress=False)
    assert "lazy" not in sys.modules
    (tmp_path / "x.lazy").touch()
    said = r"lazy: the entry point lazy = lazy:S\w+ of batchax.s\w+ cannot .*RuntimeError: loaded"
    with pytest.raises(ImportError, match=said):
        as_source(tmp_path / "x.lazy", "x")
    with pytest.raises(ImportError, match=said):
        bx.map(lambda x: x, np.ones(4), out=tmp_path / "y.lazy", progress=False)
    assert not (tmp_path / "y.lazy").exists()


@pytest.mark.parametrize("table", [SOURCES, STORES])
def test_what_is_no_source_or_store(table, packages):
    group, base = table._group, table._base.__name__
    install(packages, "wrong", "x = 3", {group: {"three": "wrong:x", "none": "wrong:y"}})
    with pytest.raises(ImportError, match=rf"wrong: .* subclass of batchax.datasets.{base}.* is 3"):
        table.load("three")
    with pytest.raises(ImportError, match=r"wrong: .*cannot be loaded: AttributeError"):
        table.load("none")


def test_what_is_installed_is_not_looked_at_for_what_is_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(addresses, "entry_points", None)
    rows = np.ones((4, 2), np.float32)
    np.save("x.npy", rows)
    for out in ("y.zarr", "y.npy", "y", "z/"):
        report = bx.map(lambda x: 2 * x, "x.npy", out=out, progress=False)
        np.testing.assert_array_equal(as_source(report.outputs, "y").whole(), 2 * rows)


def test_two_packages_with_one_suffix(packages):
    for name in ("one", "two"):
        install(packages, name, "", {"batchax.sources": {"same": f"{name}:Source"}})
    with pytest.raises(ImportError, match="packages one and two each add"):
        SOURCES.load("same")


def test_our_own_suffixes_stay_ours(packages):
    install(packages, "thief", "", {"batchax.sources": {"npy": "thief:Source"}})
    assert SOURCES.load("npy").__module__ == "batchax.datasets.files"


def test_a_package_that_is_gone(tmp_path):
    assert "tiny" not in STORES
    with pytest.raises(ImportError, match=r"Store 'tiny': no package .*batchax\.stores"):
        STORES.load("tiny")


def test_suffixes_that_others_add_are_told(packages, tmp_path):
    install(packages, "more", "", {"batchax.sources": {"more": "more:Source"}})
    (tmp_path / "x.csv").touch()
    with pytest.raises(bx.ArgumentTypeError, match=r"\.parquet and \.more\."):
        as_source(tmp_path / "x.csv", "x")
