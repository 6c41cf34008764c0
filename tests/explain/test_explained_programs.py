"""Explanations of random programs: what holds of each."""

import contextlib
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
from support.programs import function_of, random_program

LANES = 3
SEEDS = (1, 3, 9, 20, 21, 39, 40, 42, 58, 82)
ACTIVE = "active"  # which lanes run what only some of them run
OPTIONS = {"all": {}, "chunks": {"batch_size": 2}, "compact": {"divergence": "compact"}}
COMBINE = ("scatter", "reduce")  # what these hold is how they combine two elements


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def axes(program):
    """Lanes share the last argument."""
    return (*[0] * (len(program.arguments) - 1), None)


def types(program, *lead):
    one = [t.struct for t in program.arguments]
    return *(jax.ShapeDtypeStruct((*lead, *t.shape), t.dtype) for t in one[:-1]), one[-1]


def gradient(program):
    """Of all that are floats, with respect to the first argument, which is."""

    def loss(x, *others):
        outs = function_of(program)(x, *others)
        return sum((jnp.sum(y) for y in outs if jnp.issubdtype(y.dtype, jnp.floating)), 0 * x.sum())

    return jax.grad(loss)


def drawn(program):
    """What becomes of a program: names, functions, arguments, and options."""
    for name, options in OPTIONS.items():
        yield name, function_of(program), types(program, LANES), options
    if "bounded_while" in program.source:  # batched it asks whether it has a step to take
        return
    nested = bx.vmap(function_of(program), axes(program))
    yield "nested", nested, types(program, LANES, 2), {}
    with contextlib.suppress(Exception):  # JAX has no derivative of some
        jax.make_jaxpr(gradient(program))(*types(program))
        yield "gradient", gradient(program), types(program, LANES), {}


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
    if name == "bounded_loop":
        return {"condition": params["test"].jaxpr, "body": params["body"].jaxpr}
    if name == "custom_linear_solve":
        return {"": params["jaxprs"].solve.jaxpr}
    program = None if name.startswith(COMBINE) else next(iter(jaxprs_in_params(params)), None)
    return {} if program is None else {"": getattr(program, "jaxpr", program)}


def check_listed(jaxpr, listed, in_order):
    """Takes from `listed` what the equations of a program are listed as."""
    for eqn, *_ in plan(jaxpr.eqns, jaxpr.outvars):
        programs, places = inside(eqn), [i for i, e in enumerate(listed) if is_of(e, eqn)]
        shared = any(listed[i].service == "once" for i in places[: 1 if in_order else None])
        if list(programs) == [""] and programs[""].eqns and not shared:
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
    # Of branches the most expensive counts, of which there may be two; and of what is done once in
    # one equation all do.
    if not any(e.service == "once" and "cond" in e.emitted for e in explanation.walk()):
        assert explanation.work.flops <= most.flops + most.transcendentals
    if not most.at_most and not any(e.parts for e in explanation.equations):  # or dead in loops
        assert explanation.work.flops >= least.flops + least.transcendentals


def check(fun, args, in_axes, options, in_order):
    explanation = bx.explain(fun, in_axes, compile=False, **options)(*args)
    listed = list(explanation.equations)
    first = [
        t if axis is None else jax.ShapeDtypeStruct(t.shape[1:], t.dtype)
        for t, axis in zip(args, in_axes, strict=True)
    ]
    check_listed(jax.make_jaxpr(fun)(*first).jaxpr, listed, in_order)
    assert not listed
    check_numbers(explanation.equations)
    known = check_flow(explanation.equations, {v.name for v in explanation.arguments})
    assert {v.name for v in explanation.outputs if not _is_number(v.name)} <= known
    for eqn in explanation.walk():
        for value in (*eqn.inputs, *eqn.outputs):
            check_types(value)
        shared = all(v.axis is None for v in eqn.inputs)
        assert (eqn.service == "once") == shared, eqn
        assert (eqn.rule == "") == shared
    check_work(explanation, bx.vmap(fun, in_axes, **options), args)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.each_commit(2)
def test_random_program(seed):
    program = random_program(seed)
    assert not {"ruled", "one_by_one", "new_ref"} & {*re.findall(r"\w+", program.source)}
    for name, fun, args, options in drawn(program):
        # What does not depend on the batch is done before all chunks.
        check(fun, args, axes(program), options, in_order=name != "chunks")


@pytest.mark.parametrize("seed", [3, 40])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.each_commit(3)
def test_explained_programs_run_as_before(seed, name):
    program, options = random_program(seed), OPTIONS[name]
    explained, other = (function_of(program) for _ in range(2))
    args = [example(t.shape, t.dtype, seed=k) for k, t in enumerate(types(program, LANES))]
    bx.explain(explained, axes(program), compile=False, **options)(*args)
    ours, theirs = (
        jax.jit(bx.vmap(f, axes(program), **options)).lower(*args) for f in (explained, other)
    )
    assert "batchax_equation" not in ours.as_text(debug_info=True)
    same(ours.compile()(*args), theirs.compile()(*args))
