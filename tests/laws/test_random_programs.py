"""Programs nobody wrote: what tables of rules miss shows up in their combinations.

A few of those that ``python -m fuzz`` draws by the thousand; see `fuzz.programs`.
"""

import argparse
import contextlib
import os

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchax.programs import expensive_branches

from fuzz.blocks import blocks
from fuzz.judge import Discarded, judge
from fuzz.rows import draw_rows, judge_rows
from fuzz.ways import draw_case
from support.forced import EVERY_BRANCH

pytestmark = pytest.mark.in_every_part  # on each version of JAX


@pytest.fixture(autouse=True, scope="module")
def every_branch_is_expensive():
    """Of loops that run flat, lanes wait before every branch, however little that costs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expensive_branches, "ROW", EVERY_BRANCH)
        yield


def _run(data, draw, judged):
    with jax.enable_x64(True):
        case = draw(lambda n: data.draw(st.integers(0, n - 1)) if n > 1 else 0)
        with contextlib.suppress(Discarded):
            judged(case)


@settings(max_examples=50)
@given(st.data())
@pytest.mark.compiles(400)
def test_programs_of_one_example(data):
    _run(data, draw_case, judge)


@settings(max_examples=25)
@given(st.data())
@pytest.mark.compiles(300)
def test_programs_of_one_row(data):
    _run(data, draw_rows, judge_rows)


def _ends_with_the_third(connection, at):
    """A process for blocks that ends with one program, as XLA's compiler may end it."""
    while (block := connection.recv()) is not None:
        for at.value in range(block.first, block.first + block.count):
            if at.value == 3:
                os.abort()
        block.programs = block.count
        connection.send(((block, 0.0, ""), False))


@pytest.mark.nightly
def test_a_process_that_ends_is_found_with_its_program():
    asked = dict(kind="dense", seed=7, count=6, jobs=1, show=None, flags="fast")
    ran = list(blocks(argparse.Namespace(**asked), {}, _ends_with_the_third))
    assert sum(block.programs for block, _, _ in ran) == 6
    ((ended, printed),) = [(block, text) for block, _, text in ran if block.known]
    assert ended.known == {"the process ended by SIGABRT": 1}
    assert "seed 7: program 3 of 0 to 99: the process ended by SIGABRT" in printed
    assert "def f(" in printed
