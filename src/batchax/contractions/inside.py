"""Factors that come out of a loop, or of a call that recomputes, in place of their products.

The steps of a loop back over a sequence add up the gradient of a matrix, an outer product in each
step. The sum is one product of matrices, of the factors of all steps. So the steps carry no matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core.primitives import remat_p, scan_p

from batchax import _compat
from batchax.contractions.deferred import DeferredContraction, described, is_deferred
from batchax.contractions.products import Factor, Label, Operand, Product, Terms
from batchax.jaxprs.bodies import Body, bind_with, bodies_of
from batchax.jaxprs.evaluate import bind_equation, variables_in, variables_read
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Value, Values

ENTERED = (scan_p, remat_p)
"""The primitives from which factors come out."""

Evaluate = Callable[[ClosedJaxpr, list[Operand]], list[Operand]]


class _Made(NamedTuple):
    """Describes what a jaxpr computes besides its results."""

    terms: Mapping[int, Terms]  # the products of some results, by number
    places: Mapping[int, int]  # the output number of each factor, by the id of its value
    given: Mapping[int, int]  # the number of each input that is a factor


def run_inside(
    eqn: Eqn, operands: Sequence[Operand], evaluated: Evaluate
) -> tuple[list[Value], list[Terms | None]]:
    """Runs an equation of `ENTERED`, and returns the products of each result.

    `evaluated` runs a jaxpr.
    """
    (body,) = bodies_of(eqn)
    program, values = _compat.close(body.program), [x.value for x in operands]
    types, read = [v.aval for v in program.jaxpr.invars], set[int]()
    # A carry that some step reads must stay an array: repeat with those excluded.
    while True:
        staged, made = _compat.stage_described(
            lambda *xs, read=read: _run(body, program, evaluated, xs, read), types
        )
        staged = _compat.without_dead(staged)
        # What is carried must be a sum, and nothing else: no step may read it.
        inputs = [v for e in staged.jaxpr.eqns for v in variables_read(e)]
        sums = {k: staged.jaxpr.invars[body.same + k] for k in made.terms if k < body.carried}
        returned = [v for k, v in enumerate(staged.jaxpr.outvars) if k not in sums]
        others = {*inputs, *variables_in(returned)}
        if not (more := {k for k, v in sums.items() if v in others}):
            break
        read = read | more
    if not made.terms:
        return list(bind_equation(eqn, values)), [None] * len(eqn.outvars)
    outs = bind_with(eqn, values, [staged], [])
    terms: list[Terms | None] = [None] * len(eqn.outvars)
    for k, own in made.terms.items():
        own = _of_all_steps(eqn.outvars[k], k, own, body, made, values, outs)
        outs[k] = _total(eqn.outvars[k].aval, own)
        if k < body.carried and not (start := operands[body.carry_operands[k]]).is_zero:
            outs[k] = lax.add(start.value, outs[k])
            own = (*start.products, *own)
        terms[k] = own
    return outs[: len(eqn.outvars)], terms


def _run(
    body: Body, program: ClosedJaxpr, evaluated: Evaluate, xs: Values, read: Collection[int]
) -> tuple[list[Value], _Made]:
    """Runs a jaxpr; returns results and the factors of products that it need not return."""
    given = list(map(Operand, xs))
    outs = evaluated(program, given)
    results = [x.value for x in outs]
    first = body.same + body.carried
    inputs = {id(x): i for i, x in enumerate(xs) if not body.same <= i < first}
    terms: dict[int, Terms] = {}
    come: dict[int, Value] = {}
    for k, x in enumerate(outs):
        own: Terms | None = x.products
        if k < body.carried:
            own = None if k in read else _without(own, given[body.same + k].products[0])
        if not own or body.times is None or not all(map(is_deferred, own)):
            continue
        values = [f.value for t in own for f in t.factors]
        new = {id(v): v for v in values if isinstance(v, Tracer) and id(v) not in inputs}
        # As many numbers as the result has, at most, so that memory does not grow.
        elements = sum(math.prod(np.shape(v)) for v in new.values())
        if elements * (body.times if k < body.carried else 1) > math.prod(np.shape(x.value)):
            continue
        terms[k] = own
        come |= new
        # The carry passes through unchanged, and stacked results are replaced by a number.
        results[k] = xs[body.same + k] if k < body.carried else np.zeros((), np.int8)
    places = {key: len(results) + n for n, key in enumerate(come)}
    return [*results, *come.values()], _Made(terms, places, inputs)


def _without(terms: Terms, carried: Product) -> Terms | None:
    """Returns the terms added to the carry; None if the carry is not a term."""
    others = tuple(t for t in terms if t.factors is not carried.factors)
    alone = [t for t in terms if t.factors is carried.factors]
    same = len(alone) == 1 and (alone[0].dims, alone[0].negative) == (carried.dims, False)
    return others if same else None


def _of_all_steps(
    out: Any, k: int, terms: Terms, body: Body, made: _Made, values: Values, outs: Values
) -> Terms:
    """Rewrites terms of a step to factors outside of the loop."""
    # Factors that differ between steps get the steps as a dimension, over which terms are summed.
    step = Label(body.times) if body.is_repeated and body.times > 1 else None

    def outside(factor: Factor) -> Factor:
        key, in_steps = id(factor.value), True
        if key in made.places:
            value = outs[made.places[key]]
        elif key in made.given:
            number = made.given[key]
            value, in_steps = values[body.operands[number]], number >= body.same
        else:
            return factor
        if not (body.is_repeated and in_steps):
            return factor._replace(value=value)
        if step is None:
            return factor._replace(value=lax.squeeze(value, [0]))
        return factor._replace(value=value, labels=(step, *factor.labels))

    each = []
    for t in terms:
        factors, dims, starts = tuple(map(outside, t.factors)), t.dims, t.starts
        if k >= body.carried and body.is_repeated:
            dims, starts = (() if step is None else (step,), *dims), (0, *starts)
        elif step and not any(step in f.labels for f in factors):
            # A term without that dimension is the same in each step.
            factors = (*factors, Factor(jnp.asarray(body.times, out.aval.dtype), ()))
        new = replace(t, factors=factors, dims=dims, starts=starts)
        is_sum = t.matrices or new.in_factors.difference(new.labels)
        each.append(replace(new, matrices=out if is_sum else None))
    return tuple(each)


def _total(like: Aval, terms: Terms) -> jax.Array:
    """Computes an array of this type from all products."""
    factors = [f.value for t in terms for f in t.factors]
    contraction = DeferredContraction(like, 1, described(terms), factors, [None] * len(factors))
    return contraction.as_output(contraction.total())
