"""Explanations of random programs: what holds of each."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

import batchax as bx
from batchax import _compat
from batchax.analysis.cost import cost_of_program
from batchax.explain.listing import shown_name, type_name
from batchax.jaxprs.evaluate import plan

from support.oracle import example, same
from support.programs import random_program

LANES = 3
AXES = (0, 0, 0, None)
SEEDS = range(7)
ACTIVE = "active"  # which lanes run what only some of them run
OPTIONS = {"all": {}, "chunks": {"batch_size": 2}, "compact": {"divergence": "compact"}}
COMBINE = ("scatter", "reduce")  # what these hold is how they combine two elements


def types(*lead):
    floats = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    integer = jax.ShapeDtypeStruct(lead, jnp.int32)
    return floats(*lead, 3), floats(*lead, 2, 3), integer, floats(3, 3)


def values():
    vector, matrix, _, weights = types(LANES)
    of = lambda t, seed: example(t.shape, t.dtype, seed)
    return of(vector, 1), of(matrix, 2), jnp.arange(LANES), of(weights, 3)


def gradient(program):
    def loss(vector, matrix, weights, integer):
        outs = program(vector, matrix, integer, weights)
        return sum((jnp.sum(y) for y in outs if y.dtype == jnp.float32), 0.0 * vector.sum())

    return lambda v, m, i, w: jax.grad(loss, (0, 1, 2))(v, m, w, i)


def drawn(seed):
    """A program and what becomes of it: names, functions, arguments, and options."""
    program = random_program(seed, steps=8)
    for name, options in OPTIONS.items():
        yield name, program, types(LANES), options
    yield "gradient", gradient(program), types(LANES), {}
    yield "nested", bx.vmap(program, AXES), types(LANES, 2), {}


def explained(fun, args, options):
    return bx.explain(fun, AXES, compile=False, **options)(*args)


def one_example(fun, args):
    first = lambda t, axis: t if axis is None else jax.ShapeDtypeStruct(t.shape[1:], t.dtype)
    return jax.make_jaxpr(fun)(*map(first, args, AXES))


# Every equation once.


def inside(eqn):
    """The programs in an equation, with their roles; those of a call have none."""
    name, params = eqn.primitive.name, eqn.params
    if name == "while":
        return {"condition": params["cond_jaxpr"].jaxpr, "body": params["body_jaxpr"].jaxpr}
    if name == "scan":
        return {"body": params["jaxpr"].jaxpr}
    if name == "cond":
        return {f"branch {i}": branch.jaxpr for i, branch in enumerate(params["branches"])}
    if name == "custom_linear_solve":
        return {"": params["jaxprs"].solve.jaxpr}
    program = None if name.startswith(COMBINE) else next(iter(jaxprs_in_params(params)), None)
    return {} if program is None else {"": getattr(program, "jaxpr", program)}


def check_listed(jaxpr, listed, in_order):
    """Takes from `listed` what the equations of a program are listed as."""
    for eqn, *_ in plan(jaxpr.eqns, jaxpr.outvars):
        programs, places = inside(eqn), [i for i, e in enumerate(listed) if is_of(e, eqn)]
        shared = any(listed[i].service == "once" for i in places[: 1 if in_order else None])
        if list(programs) == [""] and not shared:
            check_listed(programs[""], listed, in_order)
            continue
        assert places, eqn
        assert places[0] == 0 or not in_order, eqn
        entry = listed.pop(places[0])
        for role, program in programs.items() if entry.parts else ():
            parts = [part for part in entry.parts if part.role == role]
            check_listed(program, parts, in_order)
            # A loop that only some lanes run asks which these are.
            assert all(part.primitive == "predicate of a loop" for part in parts)


def is_of(entry, eqn):
    """Whether an entry of the listing may be an equation. A masked one has more operands."""
    outputs = [type_name(v.aval) for v in eqn.outvars]
    inputs = [type_name(v.aval) for v in eqn.invars]
    given = [v.example for v in entry.inputs]
    return (
        entry.primitive == shown_name(eqn)
        and [v.example for v in entry.outputs] == outputs
        and all(given.count(t) >= inputs.count(t) for t in inputs)
    )


# Values.


def check_flow(equations, known):
    """Everything that is taken was made before, and nothing is made twice."""
    known = set(known)
    for eqn in equations:
        assert {v.name for v in eqn.inputs if not v.literal} <= known | {ACTIVE}, eqn
        assert all(outside in known or _is_number(outside) for _, outside in eqn.enters)
        check_flow(eqn.parts, known | {carried for carried, _ in eqn.enters})
        made = [v.name for v in eqn.outputs]
        assert known.isdisjoint(made)
        known |= set(made)
    return known


def _is_number(name):
    return re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?|True|False|inf|-inf|nan|\.\.\.", name) is not None


def check_types(value):
    """The batch axis out of `batched` leaves the type of one example."""
    if value.axis is None:
        assert value.batched == value.example
        return
    kind, dims = re.fullmatch(r"(.*)\[(.*)\]", value.batched).groups()
    dims = dims.split(",")
    del dims[value.axis]
    assert f"{kind}[{','.join(dims)}]" == value.example


def check_numbers(equations, prefix=""):
    assert [e.number for e in equations] == [f"{prefix}{i + 1}" for i in range(len(equations))]
    for eqn in equations:
        check_numbers(eqn.parts, f"{eqn.number}.")


def check_work(explanation, batched, args):
    """All that the batched program does is some equation's, or outside of all of them."""
    program = jax.make_jaxpr(batched)(*args)
    most, least = cost_of_program(program), cost_of_program(_compat.without_dead(program))
    assert explanation.work.flops <= most.flops + most.transcendentals
    if not most.at_most:  # of branches the most expensive counts, of which there may be two
        assert explanation.work.flops >= least.flops + least.transcendentals


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.each_commit(2)
def test_random_program(seed):
    for name, fun, args, options in drawn(seed):
        explanation = explained(fun, args, options)
        listed = list(explanation.equations)
        # What does not depend on the batch is done before all chunks.
        check_listed(one_example(fun, args).jaxpr, listed, in_order=name != "chunks")
        assert not listed, name
        check_numbers(explanation.equations)
        known = check_flow(explanation.equations, {v.name for v in explanation.arguments})
        assert {v.name for v in explanation.outputs if not _is_number(v.name)} <= known
        for eqn in explanation.walk():
            for value in (*eqn.inputs, *eqn.outputs):
                check_types(value)
            shared = all(v.axis is None for v in eqn.inputs)
            assert (eqn.service == "once") == shared, (name, eqn)
            assert (eqn.rule == "") == shared
        check_work(explanation, bx.vmap(fun, AXES, **options), args)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.each_commit(3)
def test_explained_programs_run_as_before(seed, name):
    options = OPTIONS[name]
    explained_first, other = random_program(seed, steps=8), random_program(seed, steps=8)
    explained(explained_first, types(LANES), options)
    args = values()
    ours = jax.jit(bx.vmap(explained_first, AXES, **options)).lower(*args)
    theirs = jax.jit(bx.vmap(other, AXES, **options)).lower(*args)
    assert "batchax_equation" not in ours.as_text(debug_info=True)
    same(ours.compile()(*args), theirs.compile()(*args))
