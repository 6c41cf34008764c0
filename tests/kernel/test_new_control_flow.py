"""A loop of a third party, `repeat`: what its rules and its entry of control flow must say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

import batchax as bx
from batchax.jaxprs.bodies import Body, ControlFlow, register_control_flow
from batchax.jaxprs.primitive_facts import describe
from batchax.kernel.interpreter import interpret
from batchax.kernel.named_axes import varying_of
from batchax.rows.padded import padded_rule
from batchax.rows.padded_rules.calls import arrays, run_inside, typed_rows
from batchax.rules.loops import match_carry, settle

from support.oracle import check, example, same
from support.rows import check_rows, ragged

# --- the primitive ---------------------------------------------------------------------------

repeat_p = Primitive("test_repeat")
repeat_p.multiple_results = True


def run_repeat(*carry, jaxpr, times):
    step = lambda _, carry: eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *carry)
    return lax.fori_loop(0, times, step, list(carry))


def repeat_jvp(primals, tangents, **params):
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(lambda *carry: run_repeat(*carry, **params), tuple(primals), tangents)


repeat_p.def_impl(run_repeat)
repeat_p.def_effectful_abstract_eval(
    lambda *carry, jaxpr, times: (list(jaxpr.out_avals), jaxpr.effects)
)
mlir.register_lowering(repeat_p, mlir.lower_fun(run_repeat, multiple_results=True))
ad.primitive_jvps[repeat_p] = repeat_jvp


def repeat(step, times, *carry):
    """`carry` after `times` steps. A step returns as many arrays, and closes over none."""
    types = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in carry]
    jaxpr = jax.make_jaxpr(step)(*types)
    return repeat_p.bind(*carry, jaxpr=jaxpr, times=times)


# --- its entry, which masks, chunks, costs, `explain` and the search for NaNs read -------------


def repeat_bodies(eqn):
    program, n = eqn.params["jaxpr"], len(eqn.invars)
    places = tuple(range(n))
    return (Body("body", program, places, places, same=0, carried=n, times=eqn.params["times"]),)


def repeat_with(eqn, bodies, operands, programs, more):
    """Binds another program, whose inputs `more` come first and are carried as they are."""
    (program,) = programs
    step = lambda *xs: [
        *xs[: len(more)],
        *eval_jaxpr(program.jaxpr, program.consts, *xs)[: len(operands)],
    ]
    closed = jax.make_jaxpr(step)(*more, *operands)
    outs = repeat_p.bind(*more, *operands, jaxpr=closed, times=eqn.params["times"])
    return outs[len(more) :]


register_control_flow(
    repeat_p, ControlFlow(step="jaxpr", bodies=repeat_bodies, rebuild=repeat_with)
)
describe(
    [repeat_p], linear=True, costly=True, control=True
)  # facts of its body are read separately


# --- its rules ---------------------------------------------------------------------------------


@bx.register_rule(repeat_p)
def repeat_rule(axis, args, axes, /, *, jaxpr, times):
    body, settled, _ = settle(axis, jaxpr, (), axes, (), varying_of(args))
    carry = match_carry(axis, args, axes, settled, body.in_avals)
    return repeat_p.bind(*carry, jaxpr=body, times=times), settled


@padded_rule("test_repeat")
def repeat_rows(op, *rows, jaxpr, times):
    """All rows take as many steps, each of a padded row."""
    if not op.sizes.is_exact(times):
        raise op.reject("it takes as many steps as the row is long.")

    def step(_, carry):
        outs = run_inside(op.sizes, jaxpr, typed_rows(carry, jaxpr.in_avals))
        return arrays(outs, jaxpr.out_avals)

    return lax.fori_loop(0, times, step, arrays(rows, jaxpr.out_avals))


# --- the tests ---------------------------------------------------------------------------------


def wave(x):
    return repeat(lambda c: [jnp.sin(c) * 2], 3, x)[0]


def carried(x, shared):
    """The second of the carry is batched after a step, the fourth after two, the third never."""

    def step(x, total, count, late):
        return jnp.cos(x), total + x, count + 1, late + total

    zeros = jnp.zeros(shared.shape)
    return repeat(step, 3, x, zeros, jnp.arange(2), shared)


def loops_inside(x):
    def step(c):
        return [lax.while_loop(lambda c: c < 20, lambda c: c * 1.5, jnp.abs(c) + 1) / 3]

    return repeat(step, 3, x)[0]


def masked(x):
    """Lanes leave a loop around it one by one, and one takes a branch with it alone."""
    grow = lambda c: repeat(lambda c: [c * jnp.sqrt(c)], 2, c)[0] + 1
    x = lax.while_loop(lambda c: c < 20, grow, jnp.abs(x) + 1)
    return lax.cond(x > 50, lambda c: repeat(lambda c: [jnp.log(c)], 2, c)[0], lambda c: -c, x)


def test_values_and_derivatives():
    x = example((5, 3))
    check(wave, x, nested=True, second=True)
    check(wave, x.T, in_axes=1, out_axes=1)
    check(carried, x, example((3,), seed=1), in_axes=(0, None))
    check(lambda x: repeat(lambda c: [repeat(lambda c: [c * c], 2, c)[0] - 0.5], 2, x)[0], x)


def test_a_carry_is_batched_only_if_it_has_to_be():
    call = bx.vmap(carried, (0, None), out_axes=bx.AUTO)
    x, shared = example((5, 3)), example((3,), seed=1)
    outs = call(x, shared)
    assert [y.shape for y in outs] == [(5, 3), (5, 3), (2,), (5, 3)]
    (eqn,) = [e for e in jax.make_jaxpr(call)(x, shared).eqns if e.primitive is repeat_p]
    assert [v.aval.shape for v in eqn.outvars] == [y.shape for y in outs]


def test_lanes_that_diverge_inside_and_around_it():
    x = example((6,))
    check(loops_inside, x, derivatives=False)
    check(masked, x, derivatives=False)


@pytest.mark.parametrize("batch_size", [2, 5])
def test_chunks(batch_size):
    x, shared = example((5, 3)), example((3,), seed=1)
    for f, args, axes in ((wave, (x,), 0), (carried, (x, shared), (0, None))):
        same(bx.vmap(f, axes, batch_size=batch_size)(*args), bx.vmap(f, axes)(*args))
    loss = lambda x, batch_size=None: bx.vmap(wave, batch_size=batch_size)(x).sum()
    same(jax.grad(loss)(x, batch_size), jax.grad(loss)(x))


def test_a_collective_and_the_index_of_a_lane_inside():
    def f(x):
        step = lambda c: [c + lax.axis_index("lanes") + lax.pmean(c, "lanes")]
        return repeat(step, 2, x)[0]

    x = example((4,))
    expected = x
    for _ in range(2):
        expected = expected + np.arange(4) + expected.mean()
    for size in (None, 2):
        same(bx.vmap(f, axis_name="lanes", batch_size=size)(x), expected, dict(rtol=1e-5))


def mixed(row, w):
    """Elements of a row meet in each step, and a carry is a number."""

    def step(c, total, w):
        return c / (1 + jnp.abs(c).sum()) + w, total + jnp.exp(c).mean(), w

    return repeat(step, 3, row, jnp.zeros((), row.dtype), w)[:2]


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_rows_of_different_lengths(layout):
    rows = ragged()
    check_rows(mixed, rows, example((4,)), layout=layout)
    check_rows(wave, rows, layout=layout)


def test_explain_shows_its_body():
    found = bx.explain(wave, compile=False)(example((4,)))
    (whole,) = [e for e in found.walk() if e.primitive == "test_repeat"]
    assert [(e.primitive, e.role, e.times) for e in whole.parts] == [
        ("sin", "body", 3),
        ("mul", "body", 3),
    ]
    assert "body, 3 times" in str(found)
    assert whole.work.flops == sum(e.work.flops for e in whole.parts)


def test_the_search_for_nonfinite_looks_into_its_body():
    f = lambda x: repeat(lambda c: [jnp.log(c)], 3, x)[0]
    found = bx.find_nonfinite(f)(jnp.array([1.0, 30.0, 2.0]))
    assert found.lanes.tolist() == [0, 2]
    first, second = found.faults
    assert (first.primitive, first.iterations) == ("log", (1,))  # an infinity, and then a NaN
    assert first.turned.startswith("`log` test_new_control_flow.py")
    assert (second.primitive, second.kind, second.iterations) == ("log", "nan", (2,))


# --- the same, with the number of steps as an operand, which lanes may have of their own ----------

repeat_n_p = Primitive("test_repeat_n")
repeat_n_p.multiple_results = True


def run_repeat_n(n, *carry, jaxpr):
    return run_repeat(*carry, jaxpr=jaxpr, times=n)


repeat_n_p.def_impl(run_repeat_n)
repeat_n_p.def_effectful_abstract_eval(
    lambda n, *carry, jaxpr: (list(jaxpr.out_avals), jaxpr.effects)
)
mlir.register_lowering(repeat_n_p, mlir.lower_fun(run_repeat_n, multiple_results=True))


def repeat_n_bodies(eqn):
    k = len(eqn.invars) - 1
    operands, results = tuple(range(1, k + 1)), tuple(range(k))
    return (Body("body", eqn.params["jaxpr"], operands, results, 0, k, times=None, count=0),)


def repeat_n_with(eqn, bodies, operands, programs, more):
    (program,), (n, *carry) = programs, operands
    step = lambda *xs: [*xs[: len(more)], *eval_jaxpr(program.jaxpr, program.consts, *xs)]
    closed = jax.make_jaxpr(lambda *xs: step(*xs)[: len(more) + len(carry)])(*more, *carry)
    return repeat_n_p.bind(n, *more, *carry, jaxpr=closed)[len(more) :]


register_control_flow(
    repeat_n_p, ControlFlow(step="jaxpr", bodies=repeat_n_bodies, rebuild=repeat_n_with)
)
describe([repeat_n_p], linear=True, costly=True, control=True, endless=True)


@bx.register_rule(repeat_n_p)
def repeat_n_rule(axis, args, axes, /, *, jaxpr):
    if axes[0] is not None:  # lanes take different numbers of steps
        types = [jax.typeof(args[0]).update(shape=()), *jaxpr.in_avals]
        as_while = jax.make_jaxpr(lambda *xs: run_repeat_n(*xs, jaxpr=jaxpr))(*types)
        return interpret(axis, as_while.jaxpr, as_while.consts, args, axes)
    n, *carry = args
    body, settled, _ = settle(axis, jaxpr, (), axes[1:], (), varying_of(carry))
    return repeat_n_p.bind(
        n, *match_carry(axis, carry, axes[1:], settled, body.in_avals), jaxpr=body
    ), settled


def wave_n(n, x):
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    return repeat_n_p.bind(n, x, jaxpr=jax.make_jaxpr(lambda c: [jnp.log(c) * 2])(*types))[0]


@pytest.mark.parametrize("options", [{}, {"divergence": "compact"}, {"batch_size": 2}], ids=str)
def test_as_many_steps_as_a_lane_has(options):
    x, counts = 30 + example((5, 3)), jnp.array([0, 1, 3, 2, 2], np.int32)
    for n, axes in ((counts, 0), (counts[2], (None, 0))):
        per_lane = [wave_n(m, row) for m, row in zip(jnp.broadcast_to(n, 5), x, strict=True)]
        same(bx.vmap(wave_n, axes, **options)(n, x), jnp.stack(per_lane), dict(rtol=1e-5))
    shared = bx.vmap(wave_n, (0, None), **options)(counts, x[0])
    same(shared, jnp.stack([wave_n(m, x[0]) for m in counts]), dict(rtol=1e-5))


@pytest.mark.compiles(60)
def test_reports_run_a_loop_whose_steps_an_operand_counts():
    x = jnp.array([1.0, 30.0, 1.5])
    for n, axes, lanes in ((np.int32(3), (None, 0), [0, 2]), (jnp.array([1, 3, 3]), 0, [2])):
        assert bx.find_nonfinite(wave_n, axes)(n, x).lanes.tolist() == lanes
        found = bx.explain(wave_n, axes, measure=True, time_limit=60.0)(n, 30 + x)
        assert any(e.primitive == "log" for e in found.walk())
