"""`find_nonfinite`: the lanes are those of the loop, and the blame lies where it was put."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import batchax as bx
from batchax.nonfinite.origins import Evaluator, Places

from support.compiled import compilations

FLOAT = jax.dtypes.canonicalize_dtype(float)


def one(found):
    (fault,) = found.faults
    return fault


def lines_of(fault):
    return fault.primitive, fault.iterations, fault.argument


def test_a_gradient_where_both_branches_of_where_are_computed():
    def f(x):
        return jnp.where(x > 0, jnp.sqrt(x), 0.0)

    found = bx.find_nonfinite(jax.grad(f))(jnp.array([4.0, 0.0, -1.0, 9.0]))
    assert found.lanes.tolist() == [1, 2]
    zero, negative = found.faults
    assert (zero.primitive, zero.kind) == ("div", "nan")
    assert zero.operands[1].endswith(" 0.")
    assert zero.turned.startswith("`mul` test_find_nonfinite.py")  # by a zero
    assert negative.primitive == "sqrt"
    assert "-1" in negative.operands[0]
    text = str(found)
    assert text.startswith("2 of 4 lanes have results that are not finite.")
    assert "test_find_nonfinite.py" in text
    assert not bx.find_nonfinite(jax.grad(f))(jnp.array([4.0, 9.0]))


def test_an_infinity_of_a_mask_is_no_fault():
    def attend(x, mask):
        return jax.nn.softmax(jnp.where(mask, x, -jnp.inf))

    x = jnp.ones((3, 4))
    mask = jnp.ones((3, 4), bool).at[1, 2].set(False).at[2].set(False)
    found = bx.find_nonfinite(attend)(x, mask)
    assert found.lanes.tolist() == [2]
    assert "(test_an_infinity_of_a_mask_is_no_fault.<locals>.attend)" in one(found).line
    assert one(found).turned.startswith("`sub` test_find_nonfinite.py")  # inf - inf


def test_what_came_in_with_an_argument():
    tree = {"w": jnp.ones((3, 2)).at[1, 0].set(jnp.nan), "b": jnp.ones(3)}
    found = bx.find_nonfinite(lambda t, s: (t["w"] * t["b"]).sum() + s, (0, None))(tree, 1.0)
    assert one(found).lane == 1
    assert one(found).argument == "t['w']"
    assert "it came in with t['w']" in str(found)
    shared = jnp.array([1.0, jnp.inf])
    found = bx.find_nonfinite(lambda x, s: x * s, (0, None))(jnp.ones(2), shared)
    assert {f.argument for f in found.faults} == {"s"}
    found = bx.find_nonfinite(lambda x: x * shared)(jnp.ones(2))
    assert {f.argument for f in found.faults} == {"a value that the function closes over"}


def growing(x, n):
    return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] / (3.0 - c[0])), (0, x))[1]


def stepping(xs):
    return lax.scan(lambda c, x: (c + x, jnp.log(x)), xs[0], xs)[1]


def backwards(xs):
    return lax.scan(lambda c, x: (c * x, 1 / c), jnp.ones((), FLOAT), xs, reverse=True)[1]


def nested(x, n):
    def outer(i, c):
        return lax.fori_loop(0, 3, lambda j, c: c / jnp.where((i == 1) & (j == n), 0.0, 1.0), c)

    return lax.fori_loop(0, 2, outer, x)


def branching(x):
    return lax.cond(x > 0, lambda x: jnp.log(x - 1), lambda x: x, x)


@jax.custom_jvp
def with_rule(x):
    return jnp.exp(x)


with_rule.defjvp(lambda primals, tangents: (with_rule(*primals), tangents[0] / primals[0]))

CASES = {
    "while": (growing, ([2.0, 2.0, 3.0], [2, 5, 4]), [1, 2], ("div", (3,), "")),
    "scan": (stepping, ([[1.0, 2, 3], [1, 0, 0], [1, 1, -1]],), [1, 2], ("log", (1,), "")),
    "scan, reverse": (backwards, ([[1.0, 0, 3], [1, 2, 3]],), [0], ("div", (0,), "")),
    "nested loops": (nested, ([1.0, 1.0], [2, 7]), [0], ("div", (1, 2), "")),
    "branch": (branching, ([3.0, 0.5, -2.0],), [1], ("log", (), "")),
    "custom_jvp": (with_rule, ([1.0, 1e9],), [1], ("exp", (), "")),
    "derivative rule": (jax.grad(with_rule), ([1.0, 0.0],), [1], ("div", (), "")),
    "checkpoint": (
        jax.grad(jax.checkpoint(lambda x: jnp.sqrt(x))),
        ([1.0, 0.0],),
        [1],
        ("div", (), ""),
    ),
    "jit": (jax.jit(lambda x: jax.jit(jnp.log)(x) * 2), ([1.0, 0.0],), [1], ("log", (), "")),
    "vmap inside": (
        lambda x: bx.vmap(lambda x: jnp.log(x))(x).sum(),
        ([[1.0, 2], [3, 0], [1, -1]],),
        [1, 2],
        ("log", (), ""),
    ),
    "forward mode": (
        lambda x: jax.jvp(jnp.sqrt, (x,), (jnp.ones_like(x),))[1],
        ([4.0, 0.0],),
        [1],
        ("div", (), ""),
    ),
}
WAYS = {
    "all at once": {},
    "chunks": {"batch_size": 2},
    "compact": {"divergence": "compact"},
    "devices": {"mesh": "all"},
}


def arrays(values):
    return [jnp.asarray(x, int if isinstance(x[0], int) else FLOAT) for x in values]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.each_commit(6)
def test_the_equation_and_the_iteration(name, way):
    fun, values, lanes, first = CASES[name]
    found = bx.find_nonfinite(fun, **WAYS[way])(*arrays(values))
    assert found.lanes.tolist() == lanes
    assert lines_of(found.faults[0]) == first
    assert all(fault.operands for fault in found.faults)
    assert "test_find_nonfinite.py" in found.faults[0].line


def test_under_jit_the_values_are_not_there():
    with pytest.raises(bx.ArgumentTypeError, match="an argument is traced"):
        jax.jit(lambda x: bx.find_nonfinite(jnp.log)(x).lanes)(jnp.ones(2))


def test_lengths_are_known_as_they_are_to_vmap():
    rows = [np.arange(float(n), dtype=FLOAT) for n in (3, 1, 2)]
    x, y = bx.Ragged.from_rows(rows), bx.Ragged.from_rows(rows[:])
    assert bx.find_nonfinite(lambda a, b: a / b)(x, y).lanes.tolist() == [0, 1, 2]  # one size
    fun = lambda a: 1 / (a * int(a.shape[0] > 1)).sum()  # asks for a number
    assert bx.find_nonfinite(fun)(x).lanes.tolist() == [1]
    by_length = lambda a: jnp.abs(jnp.fft.fft(a)).sum() / (a.sum() - 1)
    assert bx.find_nonfinite(by_length)(x).lanes.tolist() == [2]


def test_functions_without_floats_and_other_objects():
    assert not bx.find_nonfinite(lambda x: x + 1)(jnp.arange(3))
    found = bx.find_nonfinite(lambda x, how: getattr(jnp, how)(x), (0, None))(jnp.zeros(2), "log")
    assert found.lanes.tolist() == [0, 1]
    flag = np.array(True)
    fun = lambda x, flag: jnp.log(x) if flag else x
    assert bx.find_nonfinite(fun, (0, None))(jnp.zeros(2), flag).lanes.tolist() == [0, 1]
    with pytest.raises(bx.ArgumentTypeError, match="find_nonfinite expects a function"):
        bx.find_nonfinite(3)
    with pytest.raises(bx.AxisError, match="in_axes"):
        bx.find_nonfinite(jnp.log, (0, 0))(jnp.ones(2))


def test_many_lanes_are_counted_and_few_are_shown():
    x = jnp.linspace(-1, 1, 1000).at[3].set(jnp.nan)
    found = bx.find_nonfinite(jnp.log, batch_size=64)(x)
    np.testing.assert_array_equal(found.lanes, np.flatnonzero(~(np.asarray(x) > 0)))
    assert sum(f.operands is not None for f in found.faults) == 5
    assert len(str(found)) < 2000
    blocks = [line for line in str(found).splitlines() if line.startswith("lane")]
    assert blocks == [
        "lanes 0, 1, 2, 4, 5, 6, 7, 8 and 491 more: out is nan, made by `log`",
        "lane 3: out is nan: it came in with x",
    ]


def test_a_block_for_each_cause_has_operands_of_one_lane():
    def f(x, n):
        return lax.fori_loop(0, 4, lambda i, c: c / jnp.where(i == n, 0.0, 1.0), x) + jnp.log(x)

    found = bx.find_nonfinite(f)(jnp.array([1.0] * 6 + [-1.0]), jnp.array([0, 1, 1, 1, 2, 3, 9]))
    lines = str(found).splitlines()
    assert lines[1] == "lanes 0, 1, 2, 3, 4, 5: out is inf, made by `div`"
    assert lines[2] == "  in iteration 0 of lane 0"  # in others in another
    assert lines[4].startswith("  operand 0 of lane 0: float")
    assert lines[6] == "lane 6: out is nan, made by `log`"
    assert found.faults[6].operands is not None  # the first of its cause, although not of the first
    assert sum(f.operands is not None for f in found.faults) == 5
    many = bx.find_nonfinite(
        lambda x: {f"y{i}": x + jnp.where(x == i, jnp.inf, 0.0) for i in range(9)}
    )
    assert str(many(jnp.arange(8.0))).endswith("\n3 lanes for 3 other causes: see .faults")


def test_wherever_it_is_and_whatever_it_was_made_of():
    def f(x, k):
        parts = [jnp.where(k == i, 1 / x, 1.0) for i in range(11)]  # more than one looks at at once
        joined = jnp.concatenate([*parts, x[:0]])[::-1]
        z = (joined + 1j * x.sum()).astype(jnp.complex64) * 2
        far = jnp.exp(joined.astype(jnp.float16) * 0 + joined.astype(jnp.float16))
        return {"complex": z, "low": far.reshape(11, -1).T, "none": joined[:0], "safe": k * 1.0}

    x = np.ones((5, 7), np.float32)
    x[1, 6], x[2, 0], x[3, 3], x[4] = np.nan, np.inf, 0.0, 0.05
    found = bx.find_nonfinite(f)(x, np.array([3, 10, 0, 10, 4]))
    causes = [(f.lane, f.output, f.kind, f.primitive, f.argument) for f in found.faults]
    assert causes == [
        (1, "out['complex']", "nan", "", "x"),
        (2, "out['complex']", "nan", "", "x"),  # inf * 1j
        (3, "out['complex']", "nan", "div", ""),
        (4, "out['low']", "inf", "exp", ""),
    ]
    assert found.faults[3].operands[0].startswith("float16[77] 0 NaN, 0 infinite, others from 1 ")


def test_a_long_program_is_looked_at_as_a_whole():
    def steps(x):
        for _ in range(50):
            x = x * 2 - x * x
        return x

    program = jax.make_jaxpr(steps)(1.0).jaxpr

    def origins(x):
        evaluator = Evaluator(Places(), 0)
        return evaluator.whole(evaluator.run(program, [], [evaluator.input(x, -1)]))

    staged = jax.make_jaxpr(origins)(jnp.ones(()))
    assert len(staged.jaxpr.eqns) < 4 * len(program.eqns) + 100
    found = bx.find_nonfinite(steps)(jnp.array([1.0, 3.0, -1.0]))
    assert [(f.kind, f.primitive) for f in found.faults] == [("inf", "mul"), ("inf", "mul")]


STEPS = {"log": "log", "sqrt": "sqrt", "square": "square", "negative": "neg", "exp": "exp"}


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=5), st.data())
@settings(max_examples=12, deadline=None)
@pytest.mark.compiles(100)
def test_random_programs(names, data):
    values = data.draw(
        st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 1e30, np.nan]), min_size=1, max_size=6)
    )

    def steps(x, of):
        steps = [x]
        for name in names:
            steps.append(getattr(of, name)(steps[-1]))
        return steps

    x = np.array(values, np.float32)
    found = bx.find_nonfinite(lambda x: steps(x, jnp)[-1])(x)
    with np.errstate(all="ignore"):
        finite = np.isfinite(steps(x, np))
    assert found.lanes.tolist() == np.flatnonzero(~finite[-1]).tolist()
    for fault in found.faults:
        mine = finite[:, fault.lane]
        if fault.argument:
            assert not mine[0]
            continue
        k = next(k for k in range(len(mine)) if not mine[k:].any())
        assert fault.primitive == STEPS[names[k - 1]]


norm = jax.grad(lambda x: 0.1 * jnp.linalg.norm(x))
INFINITE_SLOPE = ("out", "nan", "div", "`mul`")


def with_one_row_of_zeros(size, width=3):
    x = np.random.default_rng(0).normal(size=(size, width)).astype(FLOAT)
    x[size // 2] = 0
    return x


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "complex64"])
def test_many_lanes_of_any_type(dtype):
    x = jnp.ones((1000, 40), dtype).at[7, 3].set(jnp.nan)
    (fault,) = bx.find_nonfinite(lambda x: -x)(x).faults
    assert (fault.lane, fault.kind, fault.argument) == (7, "nan", "x")


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["as it is", "jit"])
def test_a_function_that_is_batched_already(around):
    x = with_one_row_of_zeros(40)
    fun = lambda w, x: norm(w * x)
    for options in ({}, {"batch_size": 16}, {"out_axes": 1}):
        batched = around(bx.vmap(fun, (None, 0), **options))
        found = bx.find_nonfinite(batched)(2.0, x)
        assert str(found) == str(bx.find_nonfinite(fun, (None, 0))(2.0, x))
    rows = bx.Ragged.from_rows([np.ones(n, FLOAT) for n in (1, 3, 2)])
    found = bx.find_nonfinite(around(bx.vmap(lambda t: jnp.log(t.sum() - 3))))(rows)
    assert [(f.lane, f.kind) for f in found.faults] == [(0, "nan"), (1, "inf"), (2, "nan")]


def test_results_that_are_not_finite_where_marks_see_nothing():
    calls = []

    def host(x):  # finite while each operation is looked at
        calls.append(x)
        return np.where(len(calls) == 1, np.inf, x).astype(x.dtype)

    fun = lambda x: jax.pure_callback(host, x, x, vmap_method="expand_dims")
    found = bx.find_nonfinite(fun)(jnp.ones(3, FLOAT))
    assert [(f.kind, f.primitive, f.argument) for f in found.faults] == [("inf", "", "")] * 3
    assert "out is inf, and finite where each operation is looked at" in str(found)


def scaled_norm(w, x):
    return 0.1 * w * jnp.linalg.norm(x)


def mean_norm(w, xs):
    return bx.vmap(scaled_norm, (None, 0))(w, xs).mean()


GRADIENTS = {
    "by the batch": jax.grad(mean_norm, 1),
    "compiled": jax.jit(jax.grad(mean_norm, 1)),
    "of a reduction": jax.grad(bx.vmap(scaled_norm, (None, 0), bx.Reduce("mean")), 1),
}


@pytest.mark.parametrize("size", [1, 64, 4096])
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.each_commit(4)
def test_a_gradient_of_a_mean_over_lanes(name, size):
    x = with_one_row_of_zeros(size)
    gradient = GRADIENTS[name]
    found = bx.find_nonfinite(gradient)(FLOAT.type(2), x)
    (fault,) = found.faults
    assert found.lanes.tolist() == [fault.lane] == [size // 2]
    assert (fault.output, fault.kind, fault.primitive, fault.turned[:5]) == INFINITE_SLOPE
    assert fault.operands[1].endswith("[] 0.")  # of the lane
    assert "(scaled_norm)" in fault.line
    assert np.isnan(np.asarray(gradient(FLOAT.type(2), x))[fault.lane]).all()
    assert not bx.find_nonfinite(gradient)(FLOAT.type(2), x + 10)


def test_a_gradient_by_what_lanes_share_has_an_origin_in_each_lane():
    def f(w, x):
        return jnp.where(x > 0, jnp.sqrt(w * x), 0.0) + lax.fori_loop(0, 3, lambda i, y: y / x, w)

    def loss(w, xs):
        return {"loss": bx.vmap(f, (None, 0))(w, xs).sum(), "safe": w}

    x = jnp.array([1.0, 0.0, 2.0, -1.0, 3.0], FLOAT)
    (fault,) = bx.find_nonfinite(loss)(FLOAT.type(2), x).faults
    assert (fault.lane, fault.output, fault.primitive) == (1, "out['loss']", "div")
    assert fault.iterations == (0,)
    gradient = jax.grad(lambda w, xs: loss(w, xs)["loss"])
    found = bx.find_nonfinite(gradient)(FLOAT.type(2), x)
    alone = bx.find_nonfinite(jax.grad(f), (None, 0))(FLOAT.type(2), x)
    assert found.lanes.tolist() == alone.lanes.tolist() == [1, 3]
    assert found.faults[1].primitive == alone.faults[1].primitive == "sqrt"


def test_a_value_of_another_lane_that_reaches_no_result_is_not_blamed():
    def f(x):
        hidden = jnp.where(x < 0, 0.0, jnp.sqrt(x))  # NaN is masked in lane 0
        return hidden + jnp.log(x + 2)

    found = bx.find_nonfinite(lambda xs, n: bx.vmap(f)(xs).sum() / n)(jnp.array([-1.0, -2.0]), 2.0)
    assert found.lanes.tolist() == [1]
    assert one(found).primitive == "log"
    assert str(found).startswith("1 of 2 lanes make results that are not finite.\nlane 1: out is ")


def test_what_lanes_make_together_and_what_comes_in():
    def f(w, xs):
        return bx.vmap(lambda x: w * x)(xs).sum() / (w - 2)

    found = bx.find_nonfinite(f)(FLOAT.type(2), jnp.ones(3, FLOAT))
    assert (one(found).lane, one(found).primitive, found.lanes.tolist()) == (None, "div", [])
    assert "all lanes together: out is inf, made by `div`" in str(found)
    found = bx.find_nonfinite(f)(FLOAT.type(1), jnp.array([1, 2, np.nan], FLOAT))
    assert (one(found).lane, one(found).argument) == (2, "xs")
    found = bx.find_nonfinite(f)(jnp.asarray(np.nan, FLOAT), jnp.ones(3, FLOAT))
    assert (one(found).lane, one(found).argument) == (None, "w")
    assert str(bx.find_nonfinite(f)(FLOAT.type(1), jnp.ones(3, FLOAT))).endswith("are finite.")


def test_loops_nests_and_rows_around_and_inside():
    def train(w, xs):
        loss = lambda w: bx.vmap(lambda x: jnp.sqrt(w * x - 1))(xs).mean()
        return lax.scan(lambda w, _: (w - jax.grad(loss)(w), w), w, None, length=3)

    w, xs = FLOAT.type(1), jnp.array([2.0, 0.5, 3.0, 4.0], FLOAT)
    found = bx.find_nonfinite(train)(w, xs)
    assert found.lanes.tolist() == [1]
    assert lines_of(one(found)) == ("sqrt", (0,), "")

    def nested(w, xs):
        return bx.vmap(lambda x: bx.vmap(lambda y: jnp.log(w * y))(x).sum())(xs).sum()

    found = bx.find_nonfinite(nested)(w, jnp.ones((4, 2), FLOAT).at[2, 1].set(0))
    assert (one(found).lane, one(found).primitive) == (2, "log")
    rows = bx.Ragged.from_rows([np.ones(n, FLOAT) for n in (1, 3, 2)])
    of_rows = lambda w, rows: bx.vmap(lambda t: jnp.log(w * t.sum() - 2.5))(rows).sum()
    for fun in (of_rows, jax.jit(of_rows)):
        found = bx.find_nonfinite(fun)(w, rows)
        assert found.lanes.tolist() == [0, 2]
        assert found.faults[0].primitive == "log"


def root_mean(xs):
    """Of a whole batch, and of one row of it: the vmap inside then has its elements as lanes."""
    return bx.vmap(lambda x: jnp.sqrt(x).sum())(xs).mean()


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_a_function_of_the_whole_batch_that_takes_a_row_as_well(jit):
    xs = jnp.ones((5, 3), FLOAT).at[3, 1].set(0).at[3, 2].set(0)
    gradient = jit(jax.grad(root_mean))
    whole = bx.find_nonfinite(gradient, in_axes=None)(xs)
    assert (whole.lanes.tolist(), whole.size, whole.whole) == ([3], 5, True)
    assert not whole.ambiguous
    # Without it, each row is an example: its element of the batch of one row is the lane.
    rows = bx.find_nonfinite(gradient)(xs)
    assert rows.ambiguous
    assert str(rows).endswith("If it takes the whole batch, pass in_axes=None.")
    assert bx.find_nonfinite(gradient)(jnp.ones((5, 3), FLOAT)).ambiguous
    assert bx.explain(gradient, in_axes=None, compile=False)(xs).lanes == 5


def test_no_vmap_inside_is_not_ambiguous():
    xs = jnp.zeros((5, 3), FLOAT)
    assert not bx.find_nonfinite(jax.grad(lambda x: jnp.sqrt(x).sum()))(xs).ambiguous
    heads = lambda x: bx.vmap(lambda row: row @ jnp.ones(3, FLOAT))(jnp.reshape(x, (1, 3)))
    assert not bx.find_nonfinite(heads)(xs).ambiguous
    with pytest.raises(bx.ArgumentTypeError, match="find_nonfinite found no vmap"):
        bx.find_nonfinite(jnp.sqrt, in_axes=None)(xs)
    assert bx.find_nonfinite(bx.vmap(jnp.log), in_axes=None)(jnp.zeros(2)).lanes.tolist() == [0, 1]


def test_explain_of_a_function_that_calls_a_vmap():
    loss = lambda w, xs: bx.vmap(lambda x: w * jnp.sin(x))(xs).mean()
    explanation = bx.explain(jax.grad(loss), in_axes=None, compile=False)(2.0, jnp.ones(7))
    assert explanation.lanes == 7
    assert "sin" in [eqn.primitive for eqn in explanation.walk()]
    with pytest.raises(bx.ArgumentTypeError, match="explain found no vmap"):
        bx.explain(jnp.sin, in_axes=None)(jnp.ones(7))


def test_what_is_made_of_nothing():
    # `iota` of floats has no operand.
    found = bx.find_nonfinite(lambda x: x + jnp.log(jnp.arange(3.0) - 1).sum())(jnp.ones(2))
    assert found.lanes.tolist() == [0, 1]
    assert found.faults[0].primitive == "log"


def test_lanes_that_a_scan_takes_its_entries_of():
    def total(x):
        return lax.scan(lambda c, t: (c + jnp.log(t), None), 0.0 * x[0], x)[0]

    xs = jnp.ones((5, 3), FLOAT).at[3, 1].set(-1)
    mean = lambda xs: bx.vmap(total)(xs).mean()
    found = bx.find_nonfinite(jax.value_and_grad(mean), in_axes=None)(xs)
    assert found.lanes.tolist() == [3]
    assert one(found).primitive == "log"


def test_what_is_finite_takes_one_program_and_what_is_not_three():
    rows, ones = with_one_row_of_zeros(6), jnp.ones((6, 3))
    found = bx.find_nonfinite(lambda x: (jnp.log(x).sum(), 1 / x.sum()))
    compiled = lambda xs: [x["fun_name"] for x in compilations(lambda: found(xs))]
    assert compiled(ones) == ["jit(of_arrays)"]
    assert compiled(rows).count("jit(of_arrays)") == 3


def test_an_operand_that_is_a_key():
    @bx.custom_vmap
    def draw(key, x):
        return jnp.log(x * jax.random.normal(key))

    draw.def_vmap(lambda size, batched, keys, xs: (jax.vmap(draw.fun)(keys, xs), True))
    found = bx.find_nonfinite(draw)(jax.random.split(jax.random.key(0), 4), -jnp.ones(4))
    assert found.lanes.size
    assert found.faults[0].operands[0] == "key<fry>[]"
