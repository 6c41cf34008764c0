"""Programs nobody wrote: what tables of rules miss shows up in their combinations.

A few of those that ``python -m fuzz`` draws by the thousand; see `fuzz.programs`.
"""

import contextlib

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchax.programs import dear_branches

from fuzz.judge import Discarded, judge
from fuzz.rows import draw_rows, judge_rows
from fuzz.ways import draw_case

pytestmark = pytest.mark.in_every_part  # on each version of JAX


@pytest.fixture(autouse=True, scope="module")
def every_branch_is_dear():
    """Of loops that run flat, lanes wait before every branch, however little that costs."""
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("LEAST", "GAIN", "BEGUN"):
            patch.setattr(dear_branches, limit, 0.0)
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
