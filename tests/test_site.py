"""The site: it is built without a warning, and has a reference of every public name."""

import subprocess
import sys
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

import batchax as bx

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.nightly  # `make site` builds it with each change, as CI does


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site. A link that leads nowhere is a warning, and an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", ROOT / "docs", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_public_name_is_in_the_reference(site):
    with open(site / "objects.inv", "rb") as opened:
        inventory = InventoryFile.load(opened, "", lambda base, path: path)
    known = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    missing = {name for name in bx.__all__ if f"batchax.{name}" not in known}
    assert not missing


def test_every_page_is_in_the_site_and_found(site):
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert not [page for page in pages if not (site / page.with_suffix(".html")).exists()]
    found = (site / "searchindex.js").read_text()
    assert not [page for page in pages if f'"{page.with_suffix("")}"' not in found]
