"""The site: it is built without a warning, and has a reference of every public name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

import batchax as bx

from support.browser import browser

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


@pytest.fixture(scope="module")
def chromium():
    with browser() as session:
        session.set_script_timeout(20)
        yield session


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


def test_old_addresses_lead_to_pages(site):
    for old in (site / "datasets.html", site / "coming_from/netket_chunked_vmap.html"):
        (target,) = re.findall(r'url=([^"]*)', old.read_text())
        assert (old.parent / target).exists()


def test_signatures_have_types(site, chromium):
    chromium.get((site / "reference/batching.html").as_uri())
    read = "return document.getElementById('batchax.vmap').textContent"
    assert "axis_size: int | None = None" in chromium.execute_script(read)


@pytest.mark.parametrize(
    ("query", "first", "second"),
    [
        ("batch_size", "batchax.vmap.batch_size", "batchax.map.batch_size"),
        ("mesh", "batchax.vmap.mesh", "batchax.map.mesh"),
        ("vmap", "batchax.vmap", "1. A first vmap"),  # and not its parameters
    ],
)
def test_the_search_knows_parameters_and_puts_vmap_first(site, chromium, query, first, second):
    chromium.get(f"{(site / 'search.html').as_uri()}?q={query}")
    links = chromium.execute_async_script("""
        const done = arguments[0];
        const look = () => {
          const links = [...document.querySelectorAll("#search-results li a")];
          if (links.length < 2) return setTimeout(look, 20);
          done(links.slice(0, 2).map((link) => [link.textContent, link.getAttribute("href")]));
        };
        look();
    """)
    assert [name for name, _ in links] == [first, second]
    assert links[0][1] == "reference/batching.html#batchax.vmap"


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("out of memory", "guides/large_batches"),
        ("OOM", "guides/large_batches"),
        ("variable length", "guides/ragged"),
        ("padding", "guides/ragged"),
        ("DP-SGD", "guides/private_gradients"),
        ("NUTS", "guides/samplers_and_solvers"),
        ("S3", "guides/dataset_formats"),
        ("resume", "guides/datasets"),
        ("recompute", "tutorials/out_of_memory"),
        ("object storage", "guides/dataset_formats"),
        ("nested loop", "guides/divergence"),
        ("early exit", "guides/early_exit"),
        ("compile time", "guides/ragged"),
        ("divergent", "guides/divergence"),
        ("several hosts", "guides/several_hosts"),
        ("small matrices", "guides/small_matrices"),
        ("progress", "guides/progress"),
    ],
)
def test_the_search_finds_the_page_for_a_problem(site, chromium, query, page):
    chromium.get(f"{(site / 'search.html').as_uri()}?q={query.replace(' ', '+')}")
    links = chromium.execute_async_script("""
        const done = arguments[0];
        const look = () => {
          const links = [...document.querySelectorAll("#search-results li a")];
          const told = document.querySelector("#search-results p.search-summary")?.textContent;
          if (!told?.includes("found")) return setTimeout(look, 20);
          done(links.slice(0, 8).map((link) => link.getAttribute("href")));
        };
        look();
    """)
    assert f"{page}.html" in [link.partition("#")[0] for link in links]


def _copied(chromium, block):
    """What the button of the first such block copies."""
    return chromium.execute_async_script(
        """
        const [block, done] = arguments;
        const clipboard = { writeText: async (text) => done(text) };
        Object.defineProperty(navigator, "clipboard", { value: clipboard, configurable: true });
        document.querySelector(`${block} button.copy`).click();
        """,
        block,
    )


def test_code_is_copied_without_prompts_and_what_is_printed(site, chromium):
    chromium.get((site / "index.html").as_uri())
    lines = _copied(chromium, ".highlight-python").splitlines()
    assert lines[:5] == ["import jax", "import jax.numpy as jnp", "", "import batchax as bx", ""]
    assert not chromium.execute_script(
        "return document.querySelectorAll('.highlight-text button').length"
    )
    chromium.get((site / "guides/cluster.html").as_uri())
    text = _copied(chromium, ".highlight-console:has(.go)")
    assert text.startswith("batchax ")
    assert "$ " not in text
    assert "finished" not in text
    chromium.get((site / "reference/batching.html").as_uri())
    text = _copied(chromium, ".highlight-default:has(.go)")
    assert text.strip()
    assert ">>>" not in text
    compile(text, "copied", "exec")
