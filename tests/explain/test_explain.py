"""`explain`: what it says of each equation is what the engine did."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.analysis.thresholds import TABLE
from batchax.divergence.runner import Runner

from support.features import Box

M, V, B = (jnp.ones(shape, "float32") for shape in ((5, 3), (8, 3), (5,)))


def affine(M, v, b):
    y = M @ v
    return jnp.tanh(y + b).sum() + M.sum()


def by_primitive(explanation):
    return {eqn.primitive: eqn for eqn in explanation.walk()}


def test_each_equation_has_its_types_axes_line_and_rule():
    explanation = bx.explain(affine, (None, 0, None))(M, V, B)
    assert [(e.number, e.primitive, e.service, e.rule) for e in explanation.equations] == [
        ("1", "dot_general", "own", "rules.contraction"),
        ("2", "add", "own", "rules.elementwise"),
        ("3", "tanh", "own", "rules.elementwise"),
        ("4", "reduce_sum", "own", "rules.reductions"),
        ("5", "reduce_sum", "once", ""),
        ("6", "add", "own", "rules.elementwise"),
    ]
    product = explanation.equations[0]
    assert [v.name for v in product.inputs] == ["M", "v"]
    assert [(v.example, v.batched, v.axis) for v in product.inputs] == [
        ("f32[5,3]", "f32[5,3]", None),
        ("f32[3]", "f32[8,3]", 0),
    ]
    assert product.outputs[0].batched == "f32[5,8]"
    assert product.outputs[0].bytes == 8 * 5 * 4
    lines, first = inspect.getsourcelines(affine)
    assert product.source.line == first + 1
    assert product.source.text == lines[1].strip() == "y = M @ v"
    assert product.source.file == __file__


def test_nothing_is_run_and_types_are_enough():
    ran = []

    def f(x):
        jax.debug.callback(lambda x: ran.append(1), x)
        return x * 2

    given = bx.explain(f)(jnp.ones((4, 2), "float32"))
    asked = bx.explain(f)(jax.ShapeDtypeStruct((4, 2), jnp.float32))
    assert not ran
    assert str(given) == str(asked)


def test_work_is_per_lane_and_as_often_as_it_runs():
    def f(x, w):
        return lax.fori_loop(0, 10, lambda i, c: c @ w, x)

    explanation = bx.explain(f, (0, None))(jnp.ones((8, 3)), jnp.ones((3, 3)))
    (loop,) = explanation.equations
    product = by_primitive(explanation)["dot_general"]
    assert product.times == 10
    assert product.role == "body"
    assert product.work.flops == 10 * 8 * 2 * 9
    assert product.per_lane.flops == 10 * 2 * 9
    assert loop.work.flops >= product.work.flops

    chunked = bx.explain(f, (0, None), batch_size=4)(V, V[:3])
    product = by_primitive(chunked)["dot_general"]
    assert product.times == 20
    assert product.work.flops == 10 * 8 * 2 * 9
    assert product.outputs[0].batched == "f32[4,3]"
    assert chunked.options == {"batch_size": 4}


ONE_DEVICE = Runner(thresholds=TABLE["cpu-small"]._replace(max_devices=1_000))


def why_masked(fun, *args, in_axes=0, divergence=ONE_DEVICE, **options):
    """Why the one loop or set of branches in `fun` is masked, which the text says as well."""
    explanation = bx.explain(fun, in_axes, compile=False, divergence=divergence, **options)(*args)
    (eqn,) = [e for e in explanation.walk() if "divergence" in e.notes]
    assert eqn.notes["divergence"] == "masked"
    why = eqn.notes["why"]
    for each in [why] if isinstance(why, str) else why.values():
        assert each in str(explanation)
    return why


def test_branches_of_what_all_lanes_share_count_the_costliest():
    """As XLA counts them, and as branches do that all lanes take together"""
    branches = [lambda a: a @ a @ a, lambda a: a @ a, lambda a: a]
    f = lambda i, a, x: lax.switch(i, branches, a) @ x
    explanation = bx.explain(f, (None, None, 0))(1, jnp.ones((6, 6)), jnp.ones((4, 6)))
    assert by_primitive(explanation)["cond"].work.flops == 2 * 2 * 6**3
    assert by_primitive(explanation)["cond"].emitted.count("dot_general") == 3


def calling_host(x):
    jax.debug.callback(lambda x: None, x)
    return x * 2


def test_branches_that_stay_masked_say_why():
    p, x = jnp.arange(64) > 30, jnp.ones((64, 3))
    either = lambda run: lambda p, x: lax.cond(p, run, lambda x: x, x)

    why = why_masked(either(jnp.sin), p, x)
    assert why[0] == "computes nothing"
    assert re.fullmatch(r"costs 0\.\d+ of moving a lane, limit 3", why[1])
    why = why_masked(either(jnp.sin), p, x, divergence="compact")
    assert re.fullmatch(r"costs 0\.\d+ of moving a lane, limit 4", why[1])
    # DeferredBranch beside what is moved; but there is one lane.
    many = lambda x: lax.fori_loop(0, 90, lambda _, x: jnp.sort(x), x)
    assert re.fullmatch(
        r".* us for all lanes, limit 16 us", why_masked(either(many), p[:1], x[:1])[1]
    )
    assert re.fullmatch(
        r".* us for all lanes, limit 50 us",
        why_masked(either(many), p[:1], x[:1], divergence="compact")[1],
    )
    met = why_masked(either(lambda x: lax.psum(x, "i")), p, x, axis_name="i")
    assert met == "lanes meet in a collective"
    assert why_masked(either(calling_host), p, x).startswith("the host is called")
    asked = why_masked(either(jnp.sin), p, x, divergence="predicate")
    assert 'divergence="predicate"' in asked
    assert "several devices" in why_masked(either(jnp.sin), p, x, divergence="auto")


def test_bounded_loops_that_stay_masked_say_why():
    step = lambda x: x * 1.5 + lax.axis_index("i")
    run = lambda x: bx.bounded_while(lambda x: x.sum() < 9, step, x, max_steps=9)
    x = jnp.ones((64, 2))
    assert why_masked(run, x, axis_name="i") == "a step uses the name of an axis"
    assert "the name" in why_masked(run, x, axis_name="i", divergence=bx.Compact(width=4))


@pytest.mark.parametrize("measure", [False, True])
def test_outputs_are_those_that_the_program_computes(measure):
    """Not constants that are returned as they are; and the arrays that containers are made of."""

    def f(x):
        return 2.0, x * 2, Box(jnp.sin(x)), np.ones(2)

    explanation = bx.explain(f, 0, (None, 0, 1, None), measure=measure)(V)
    assert [(v.batched, v.axis) for v in explanation.outputs] == [("f32[8,3]", 0)] * 2
    joined = bx.explain(lambda x: x * 2, bx.tiles(4), bx.tiles())(V)
    assert [v.batched for v in joined.outputs] == ["f32[2,4,3]"]


def test_the_text_says_what_a_rule_did_besides():
    def f(p, x, y, z):
        joined = lax.concatenate([x, y, z], 0)
        return lax.cond(p, jnp.sin, jnp.cos, joined)

    p, (x, y, z) = jnp.arange(4) > 1, (jnp.ones(n, "float32") for n in ((3, 4), 2, (4, 1)))
    text = str(bx.explain(f, (0, 1, None, 0))(p, x, y, z))
    (joined,) = [line for line in text.splitlines() if "= concatenate " in line]
    assert "16 B transposed; 32 B copied for each lane" in joined
    (branch,) = [line for line in text.splitlines() if "= cond " in line]
    assert "lanes masked" in branch
    assert "branch 0, 1 time:" in text
    moved = bx.explain(lambda x: x.T, (0,))(jnp.ones((8, 3, 5)))
    assert moved.equations[0].moves == 0  # the transposition is the user's own


def test_measuring_runs_it_in_turns_with_a_loop_and_other_chunks():
    x, w = jnp.ones((20, 3)), jnp.ones((3, 3))
    explanation = bx.explain(lambda x, w: jnp.tanh(x @ w), (0, None), measure=True)(x, w)
    assert [t.batch_size for t in explanation.timings] == [None, "loop", 4, 16]
    for timing in explanation.timings:
        low, high = timing.spread
        assert 0 < low <= timing.seconds <= high
        assert (timing.peak is None) == (timing.batch_size == "loop")
    assert "a loop over examples" in str(explanation)

    def rank(x):
        return lax.axis_index("i") + x

    chunks = dict(batch_size=4, residuals="keep", progress=lambda *_: None)
    chunked = bx.explain(rank, axis_name="i", **chunks, measure=True)(jnp.arange(8.0))
    assert [t.batch_size for t in chunked.timings] == [4, None]

    with pytest.raises(bx.ArgumentTypeError, match=r"p\['w'\] has no values"):
        bx.explain(lambda p: p["w"], measure=True)({"w": jax.ShapeDtypeStruct((3,), jnp.float32)})


def test_rows_are_listed_as_the_function_of_one_row():
    def attend(tokens):
        scores = jax.nn.softmax(tokens @ tokens.T)
        return (jnp.tanh(scores @ tokens)).mean(0)

    rows = bx.Ragged.from_rows([jnp.ones((n, 4), "float32") for n in (3, 5, 2)])
    for options in ({}, {"layout": "padded"}, {"layout": "padded", "batch_size": 2}):
        explanation = bx.explain(attend, **options)(rows)
        eqns = by_primitive(explanation)
        lanes = options.get("batch_size", 3)
        product = explanation.equations[1]
        assert product.primitive == "dot_general"
        assert product.rule == "rows.padded"
        assert product.outputs[0].example == "f32[n,n]"
        assert product.outputs[0].batched == f"f32[{lanes},5,5]"
        assert product.outputs[0].axis == 0
        assert product.work.flops >= 3 * 2 * 5 * 5 * 4
        assert [v.name for v in product.inputs] == [
            "tokens.data",
            explanation.equations[0].outputs[0].name,
        ]
        assert product.source.text == "scores = jax.nn.softmax(tokens @ tokens.T)"
        assert "exp" in eqns
        assert "iota" not in eqns  # what padding takes is part of the operations it is for
        known = {value.name for value in explanation.arguments}
        for eqn in explanation.equations:
            assert {v.name for v in eqn.inputs if not v.literal} <= known
            known |= {v.name for v in eqn.outputs}

    packed = bx.explain(lambda tokens: jnp.tanh(tokens).mean(0), layout="packed")(rows)
    tanh = by_primitive(packed)["tanh"]
    assert (tanh.rule, tanh.outputs[0].batched) == ("rows.packed", "f32[10,4]")
    assert (tanh.inputs[0].name, tanh.inputs[0].example) == ("tokens.data", "f32[n,4]")
    assert (tanh.inputs[0].axis, tanh.work.flops) == (0, 10 * 4)
    assert {e.service for e in packed.walk()} == {"own"}


def test_loops_that_ask_all_lanes_are_said_to_wait():
    equinox = pytest.importorskip("equinox")

    def f(x, w):
        step = lambda x: jnp.tanh(w @ x)
        return equinox.internal.while_loop(lambda x: x.sum() < 9, step, x, kind="lax")

    explanation = bx.explain(f, (0, None))(jnp.ones((256, 32)), jnp.ones((32, 32)))
    (loop,) = [e for e in explanation.walk() if e.primitive == "while"]
    assert loop.notes == {"divergence": "asked of all"}
    (finding,) = [f for f in explanation.findings if "slowest" in f.kind]
    assert finding.equation == loop.number
    assert "goes on while any lane does" in explanation.details()


def test_what_is_measured_is_what_is_explained():
    def f(x, flags):
        return x * 2 if flags[0] else x  # known, as it is outside of jit

    explanation = bx.explain(f, (0, None), measure=True)(jnp.ones((3, 2)), np.array([True]))
    assert [e.primitive for e in explanation.equations] == ["mul"]
    assert [t.batch_size for t in explanation.timings] == [None, "loop"]
    assert explanation.timings[0].peak == explanation.memory.peak

    # An array that all lanes share is an argument of the program, and then of the loop's.
    table, row = np.arange(6.0).reshape(3, 2), jnp.array([2, 0])
    explanation = bx.explain(lambda t, i: t[i].sum(), (None, 0), measure=True)(table, row)
    assert [t.batch_size for t in explanation.timings] == [None, "loop"]
    branch = lambda t, i: t[i].sum() if t[0, 0] == 0 else t.sum()
    explanation = bx.explain(branch, (None, 0), measure=True)(jnp.asarray(table), row)
    assert [t.batch_size for t in explanation.timings] == [None, "loop"]

    rows = bx.Ragged.from_rows([jnp.ones((n, 2)) for n in (1, 4)])
    explanation = bx.explain(jnp.sum, buckets=2, measure=True)(rows)  # lengths must be known
    assert [t.batch_size for t in explanation.timings] == [None]


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"mesh": "all"}, {"axis_name": "i"}])
def test_what_vmap_made_is_explained_as_what_it_was_made_of(options):
    fun, args = lambda x, w: jnp.tanh(x @ w), (jnp.ones((4, 3)), jnp.ones((3, 2)))
    made = bx.explain(bx.vmap(fun, (0, None), **options), compile=False)(*args)
    given = bx.explain(fun, (0, None), compile=False, **options)(*args)
    assert str(made) == str(given)
    assert made.options == options
    nested = bx.explain(bx.vmap(fun, (0, None)), (0, None), compile=False)
    assert nested(jnp.ones((2, 4, 3)), args[1]).lanes == 2


def test_jit_around_what_vmap_made_is_looked_through():
    batched, args = bx.vmap(affine, (None, 0, None)), (M, V, B)
    plain = str(bx.explain(batched, compile=False)(*args))
    jitted = jax.jit(batched)
    jitted(*args)  # it remembers a program, of which there are no notes
    wrappers = [jitted, jax.jit(jitted), jax.checkpoint(batched)]
    equinox = pytest.importorskip("equinox")
    for wrapped in (*wrappers, equinox.filter_jit(batched)):
        explanation = bx.explain(wrapped, compile=False)(*args)
        assert len(explanation.equations) == 6
        assert str(explanation).splitlines()[0] == plain.splitlines()[0]
    timed = bx.explain(jitted, measure=True)(*args)
    assert [t.batch_size for t in timed.timings] == [None, "loop", 4]


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"mesh": "all"}], ids=str)
def test_a_gradient_of_what_vmap_made_counts_for_the_lines_it_is_of(options):
    batched = bx.vmap(affine, (None, 0, None), bx.Reduce("mean"), **options)
    forward = bx.explain(batched, compile=False)(M, V, B)
    for gradient in (jax.grad(batched), jax.jit(jax.value_and_grad(batched))):
        explanation = bx.explain(gradient, measure=not options)(M, V, B)
        assert explanation.options == options
        assert [v.name for v in explanation.arguments] == ["M", "v", "b"]
        product, alone = (by_primitive(e)["dot_general"] for e in (explanation, forward))
        assert product.work.flops >= 2 * alone.work.flops
        assert explanation.unmeasured == ()
        assert [t.batch_size for t in explanation.timings] == [None] * (not options)


@pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap])
def test_inside_of_another_vmap_it_is_listed_and_compiled_where_it_can_be(vmap):
    def f(x, meets):
        explained = bx.explain(lambda y: y * (lax.psum(x, "i") if meets else x))
        explanations.append(explained(jnp.ones((3, 2))))
        return x

    explanations = []
    for meets in (True, False):
        vmap(functools.partial(f, meets=meets), axis_name="i")(jnp.ones((4, 2)))
    assert [e.equations[-1].primitive for e in explanations] == ["mul", "mul"]
    assert [e.memory is None for e in explanations] == [True, False]

    def measured(x):
        bx.explain(lambda y: y * lax.psum(y, "i"), measure=True)(np.ones((3, 2), np.float32))
        return x

    with pytest.raises(bx.UnsupportedError, match="over the axis 'i' of a vmap or shard_map"):
        vmap(measured, axis_name="i")(jnp.ones((4, 2)))


def test_a_program_that_is_remembered_cannot_be_explained():
    batched = jax.jit(bx.vmap(affine, (None, 0, None), bx.Reduce("mean")))
    gradient = jax.grad(batched)
    gradient(M, V, B)
    batched(M, V, B)
    jax.grad(batched)(M, V, B)
    with pytest.raises(bx.ArgumentTypeError, match="Remove jit, or pass explain what vmap"):
        bx.explain(gradient)(M, V, B)
