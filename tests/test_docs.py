"""What the documentation says is what happens: its code runs, its output is real.

The ``python`` blocks of a page run in order in one namespace. A ``text`` block
directly after one is what it prints.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")

pytestmark = pytest.mark.usefixtures("own_registrations")


def blocks(page):
    """The fenced blocks of a page: language, text, line, and whether one follows directly."""
    text = page.read_text()
    end = None
    for match in FENCE.finditer(text):
        adjacent = end is not None and not text[end : match.start()].strip()
        end = match.end()
        yield match[2].strip(), match[3], text[: match.start()].count("\n") + 2, adjacent


def pages_with_code():
    return [
        page
        for page in PAGES
        if any(language.startswith("python") for language, *_ in blocks(page))
    ]


@pytest.mark.parametrize("page", pages_with_code(), ids=lambda page: page.name)
@pytest.mark.compiles(300)
@pytest.mark.each_commit(
    6, *["README.md", "first_vmap.md", "vmap.md", "ragged.md", "axes.md", "datasets.md0"]
)
def test_code_runs_and_prints_what_is_shown(page, tmp_path):
    if "by the compiler's count" not in page.read_text():
        with contextlib.chdir(tmp_path):  # where pages leave their files
            run(page)
        return
    # The compiler as users have it: what tests leave out of it (conftest.py) fuses loops otherwise.
    flags = os.environ["XLA_FLAGS"].replace("--xla_cpu_use_fusion_emitters=false", "")
    done = subprocess.run(
        [sys.executable, __file__, page],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def run(page):
    """Runs the code of `page`; an assertion says where it prints something else than is shown."""
    # For contributors rules are shown as they stand in batchax.
    of_batchax = page.name == "CONTRIBUTING.md"
    namespace = {"__name__": "batchax.rules.shown" if of_batchax else page.stem}
    printed = None
    for language, text, line, adjacent in blocks(page):
        where = f"{page.name}:{line}"
        if language.startswith("python"):
            assert language == "python", f"{where}: a block that would not be run"
            output = io.StringIO()
            with contextlib.redirect_stdout(output), jax.enable_x64(False):  # as is shown
                exec(compile("\n" * (line - 1) + text, page, "exec"), namespace)
            printed = output.getvalue()
        elif language == "text" and adjacent and printed is not None:
            assert printed.rstrip() == text.rstrip(), f"{where}: printed otherwise:\n{printed}"
            printed = None


def test_the_code_that_prints_shows_what():
    """Output that nobody compares could say anything."""
    for page in pages_with_code():
        found = list(blocks(page))
        following = [*found[1:], ("", "", 0, False)]
        for (language, text, line, _), (after, _, _, adjacent) in zip(
            found, following, strict=True
        ):
            if language == "python" and re.search(r"^print\(", text, re.MULTILINE):
                assert after == "text", f"{page.name}:{line}: the output is not shown"
                assert adjacent, f"{page.name}:{line}: the output is not shown"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


DECISIONS = [p for p in (ROOT / "docs" / "decisions").glob("*.md") if p.name != "index.md"]


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_decisions_are_short_and_listed(page):
    text = page.read_text()
    parts = ["Context", "Decision", "Alternatives", "Consequences"]
    assert re.findall("^## (.*)", text, re.MULTILINE) == parts
    assert len(text.split()) < 500
    listed = (page.parent / "index.md").read_text()
    assert f"[{text.splitlines()[0].removeprefix('# ')}]({page.name})" in listed
    assert f"\n{page.stem}\n" in listed


if __name__ == "__main__":
    run(Path(sys.argv[1]))
