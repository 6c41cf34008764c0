"""Programs nobody wrote: what tables of rules miss shows up in their combinations.

A few of those that ``python -m fuzz`` draws by the thousand; see `fuzz.programs`.
"""

import argparse
import contextlib
import os
import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.blocks import blocks
from fuzz.evaluate import Tied, evaluate, only_finite
from fuzz.judge import Discarded, Problem, adds_up_infinities, judge, of_nan, told_otherwise
from fuzz.rows import draw_rows, judge_rows
from fuzz.ways import draw_case

pytestmark = pytest.mark.in_every_part  # on each version of JAX


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


@pytest.mark.parametrize("mode", ["values", "jvp", "vjp"])
def test_a_program_of_one_row_under_debug_nans(mode):
    with jax.enable_x64(True):
        smallest = draw_rows(lambda n: 0)
        judge_rows(replace(smallest, mode=mode, engine="staged", spare=2, watched=True))


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


ONE = types.SimpleNamespace(mode="values", loose=0, nested=False)


def call(lane, value, order=None, place="c1"):
    return place, order, np.array(float(lane)), np.array(float(value))


def test_calls_happen_as_often_as_in_some_loop():
    once, twice = [call(0, 1), call(1, 1)], [call(0, 1), call(0, 1), call(1, 1)]
    assert told_otherwise(once, [once], ONE) is None
    assert "once more" in told_otherwise(twice, [once], ONE)
    assert "missing" in told_otherwise(once[1:], [once], ONE)
    assert "no example makes" in told_otherwise([*once, call(0, 2)], [once], ONE)
    assert told_otherwise(twice, [once, [*twice, call(1, 1)]], ONE) is None


def test_calls_without_an_order_are_repeated_by_derivatives():
    reverse = types.SimpleNamespace(mode="vjp", loose=0, nested=False)
    once = [call(0, 1), call(1, 1)]
    assert told_otherwise([*once, call(0, 1)], [once], reverse) is None
    assert told_otherwise([], [once], reverse) is None
    assert "no example makes" in told_otherwise([call(0, 2)], [once], reverse)
    ordered = [call(0, 1, "io"), call(1, 1, "io")]
    assert "missing" in told_otherwise(ordered[1:], [ordered], reverse)
    assert "once more" in told_otherwise([*ordered, ordered[0]], [ordered], reverse)


def test_ordered_calls_happen_in_the_order_of_some_loop():
    by_step = [call(0, 1, "io"), call(0, 2, "io"), call(0, 1, "io"), call(0, 2, "io")]
    by_lane = [by_step[0], by_step[2], by_step[1], by_step[3]]
    assert "order in a lane" in told_otherwise(by_lane, [by_step], ONE)
    assert told_otherwise(by_lane, [by_step, by_lane], ONE) is None


@pytest.mark.parametrize(
    ("keys", "stable", "tied"),
    [
        ([1.0, 1.0, 2.0], True, False),
        ([1.0, 1.0, 2.0], False, True),
        ([1.0, 1.0 + 1e-7, 2.0], True, True),
        ([0.1, 0.1, 2.0], True, True),
        ([np.nan, 1.0, 2.0], False, False),
    ],
)
def test_a_tie_that_rounding_decides_is_one(keys, stable, tied):
    order = jax.make_jaxpr(lambda x: jnp.argsort(x, stable=stable))(np.ones(3, np.float32))
    token = only_finite.set(True)
    try:
        with pytest.raises(Tied) if tied else contextlib.nullcontext():
            evaluate(order, [[np.array(keys, np.float32)]])
    finally:
        only_finite.reset(token)


def problem(got, expected, what="cotangents"):
    sides = np.array(got), np.array(expected)
    return Problem("values", what, "", wrong=np.ones(len(got), bool), sides=sides)


def test_cotangents_that_are_infinite_on_both_sides():
    assert adds_up_infinities(problem([np.nan, np.inf], [np.inf, np.nan]))
    assert not adds_up_infinities(problem([np.nan, 1.0], [np.inf, np.nan]))
    assert not adds_up_infinities(problem([np.nan], [np.inf], "results"))
    assert of_nan(problem([np.nan, 1.0], [2.0, np.nan]))
    assert not of_nan(problem([np.nan, 1.0], [2.0, 3.0]))
