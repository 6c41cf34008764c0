"""What pages quote of the benchmarks is what their tables say."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location(
    "quoted_figures", ROOT / "tools" / "quoted_figures.py"
)
TOOL = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TOOL)


def test_figures_are_those_of_the_tables():
    wrong, count = [], 0
    for page in TOOL.PAGES:
        text = page.read_text()
        for place, source, now in TOOL.quotes(text):
            count += 1
            line = text[: place.start].count("\n") + 1
            if now != text[place]:
                wrong.append(
                    f"{page.relative_to(ROOT)}:{line}: {text[place]} is {now} now ({source})"
                )
    assert not wrong, "run `make docs`:\n" + "\n".join(wrong)
    assert count > 40


NESTS = """
- `auto` takes 0.079x the time of `jax.vmap` at the median of 18.

| program | jax.vmap | auto | peers | by hand, ms |
| --- | ---: | ---: | --- | ---: |
| NUTS, 100 chains | 2.31 s | 0.152 (0.1-0.2) | FSM-MCMC 0.6 (0.5-0.7); NumPyro 1.04 (1-2) | 1,612 |
"""


@pytest.mark.parametrize(
    ("quoted", "now"),
    [
        ("0.14<!-- nests; NUTS, 100 chains; auto -->", "0.15"),
        ("0.14x<!-- nests; NUTS, 100 chains; auto -->", "0.15x"),
        ("2.5 s<!-- nests; NUTS, 100 chains; jax.vmap -->", "2.3 s"),
        ("1/7<!-- nests; NUTS, 100 chains; auto -->", "1/7"),
        ("1/10<!-- nests; `auto` takes *x the time -->", "1/10"),
        ("1/20<!-- nests; `auto` takes *x the time -->", "1/13"),
        ("0.98<!-- nests; NUTS, 100 chains; peers; NumPyro -->", "1.04"),
        ("1.5 s<!-- nests; NUTS, 100 chains; by hand, ms -->", "1.6 s"),
    ],
)
def test_a_figure_keeps_its_form(quoted, now, tmp_path, monkeypatch):
    page = tmp_path / "docs" / "benchmarks" / "nests.md"
    page.parent.mkdir(parents=True)
    page.write_text(NESTS)
    monkeypatch.setattr(TOOL, "ROOT", tmp_path)
    assert TOOL.updated(f"it takes {quoted}.") == f"it takes {now}{quoted[quoted.index('<') :]}."
    with pytest.raises(LookupError, match=r"nests\.md has no number at HMC; auto"):
        TOOL.updated("0.14<!-- nests; HMC; auto -->")
