"""Every primitive of JAX has a rule here, except for a few that are named and why."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
GENERATOR = ROOT / "tools" / "generate_primitives.py"
PAGE = ROOT / "docs" / "reference" / "primitives.md"

# Batched by JAX's own rule.
JAX_ONLY = {
    # Of the checks of random keys, which ask for them one example at a time.
    "assert_consumed_value",
    "consume",
    # Of narrow floats with scales: the rule of JAX gives what each example does.
    "scaled_dot",
    # Calls of cuDNN, which come with a layout that their own rules know.
    "dot_product_attention_bwd_wrapper",
    "dot_product_attention_fp8_bwd_wrapper",
    "dot_product_attention_fp8_fwd_wrapper",
    "dot_product_attention_fwd_wrapper",
    "scaled_matmul",
    "scaled_matmul_wrapper",
    # Rarely used, and JAX's rule does what each example does.
    "approx_top_k",
    "reduce",
    "reduce_window",
    "reduce_window_max",
    "reduce_window_min",
    "reduce_window_sum",
    "remat_opt",
    "select_and_gather_add",
    "select_and_scatter_add",
    "tridiagonal_solve",
    # JAX refuses to batch these as well.
    "reduced_vary_cast_p",
    "vary_unreduced_cast_p",
}


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The page made again, in a process where no other library has added primitives."""
    target = tmp_path_factory.mktemp("docs") / "primitives.md"
    subprocess.run([sys.executable, str(GENERATOR), str(target)], check=True)
    return target.read_text()


def rows(page):
    """The rule of each primitive, by the heading that it is listed under."""
    rules = {}
    for section in page.split("\n## ")[1:]:
        rule, _, listed = section.partition("\n")
        names = re.findall(r"^`.*`,?$", listed, re.MULTILINE)
        rules |= {name: rule for line in names for name in re.findall(r"`([^`]+)`", line)}
    return rules


def test_few_primitives_are_left_to_jax(generated):
    table = rows(generated)
    assert len(table) > 200
    left = {name for name, rule in table.items() if rule == "JAX's rule"}
    assert left <= JAX_ONLY
    # No public function of JAX uses this one, and JAX has no rule for it.
    alone = [name for name, rule in table.items() if rule == "Sequentially"]
    assert alone == ["select_and_scatter"]


def test_rules_are_of_the_family_that_asked_for_them(generated):
    table = rows(generated)
    assert table["sin"] == table["add"] == "`batchax.rules.elementwise`"
    assert table["reduce_max"] == "`batchax.rules.reductions`"


def test_page_is_up_to_date(generated):
    if f"JAX {jax.__version__} " not in PAGE.read_text():
        pytest.skip("the page is of another version of JAX")
    assert PAGE.read_text() == generated, "run `make docs`"
