"""Lanes added up, from the factors of what each lane adds.

An output y that lanes add up becomes ``summed(y, *factors)``, which is y: so the program does what
it did, and is batched, differentiated and listed as any other. A sum over lanes asks for the
factors instead, and what made y is then part of no program, unless something else needs it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import Literal, Var
from jax.extend.core.primitives import jit_p

from batchax import _compat
from batchax.analysis.cost import is_fused
from batchax.cache import Cache
from batchax.contractions.deferred import (
    Convolution,
    DeferredContraction,
    Term,
    described,
    is_deferred,
)
from batchax.contractions.inside import ENTERED, run_inside
from batchax.contractions.operations import OF_ARRAYS, OPERATIONS, is_wider, terms_of
from batchax.contractions.products import Operand, Product, Terms, arrays_of
from batchax.contractions.squares import sum_of_squares
from batchax.jaxprs.bodies import bodies_of, program_called, programs_inside
from batchax.jaxprs.evaluate import bind_equation, evaluate, plan, variables_in, variables_read
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Jaxpr, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position, Positions
from batchax.kernel.inner import MappedProgram, closed_over, stage_function
from batchax.kernel.interpreter import checks_nans_here
from batchax.kernel.named_axes import uses_axis
from batchax.kernel.own_primitive import own_primitive
from batchax.kernel.registry import call_key

_SUMMED = ("float16", "bfloat16", "float32", "float64")


_rewritten = Cache("programs outside of jit whose outputs carry their factors", most=64)


def factored(
    axis: Axis, staged: ClosedJaxpr, positions: Positions, added: Sequence[bool], traced: bool
) -> ClosedJaxpr:
    """Rewrites `staged` so that outputs `added` over lanes carry their factors.

    `positions` are the batch axes of its inputs, and `traced` says whether their values are.
    """
    jaxpr = staged.jaxpr
    outputs = tuple(k for k, v in enumerate(jaxpr.outvars) if added[k] and _may_be_summed(v))
    if not outputs or not isinstance(axis.size, int) or checks_nans_here() or not _is_plain(jaxpr):
        return staged
    if traced or recording.is_on() or any(isinstance(x, Tracer) for x in staged.consts):
        return _factored(axis, staged, positions, outputs)
    # A call outside of `jit` traces its function each time. The rewritten program is cached, with
    # constants as inputs, so that the cache holds no arrays.
    (program,), consts = _compat.hoist_constants(staged)
    positions = (*[None] * len(consts), *positions)
    key = call_key(axis, program, positions, outputs)
    rewritten = _rewritten.get(key, lambda: _factored(axis, program, positions, outputs))
    return _compat.inputs_as_constants(rewritten, consts)


def _factored(
    axis: Axis, staged: ClosedJaxpr, positions: Positions, outputs: Sequence[int]
) -> ClosedJaxpr:
    jaxpr = staged.jaxpr
    entered: set[int] = set()
    _mark(jaxpr, [jaxpr.outvars[k] for k in outputs], entered)
    held = _most_held(jaxpr, positions)
    apart: set[int] = set()
    # A matrix product that the program needs anyway is not factored: repeat without it, up to a
    # fixed point.
    while True:
        factoring = _Factoring(axis, positions, outputs, entered, held, apart)
        program = stage_function(
            axis, lambda *xs, to=factoring: to.run(staged, xs), [v.aval for v in jaxpr.invars]
        )
        if not factoring.has_summed:
            return staged
        made = factoring.made_anyway(program.jaxpr)
        if not made - apart:
            return program
        apart |= made


def _may_be_summed(v: Any) -> bool:
    return (
        not isinstance(v, Literal) and v.aval.dtype.name in _SUMMED and math.prod(v.aval.shape) > 1
    )


def _is_plain(jaxpr: Jaxpr) -> bool:
    """Returns whether it can be traced again."""
    sizes = (
        n for v in (*jaxpr.invars, *jaxpr.constvars) for n in getattr(v.aval, "shape", (None,))
    )
    return all(isinstance(n, int) for n in sizes) and not any(map(closed_over, jaxpr.eqns))


def _mark(jaxpr: Jaxpr, outvars: Sequence[Any], entered: set[int]) -> set[Any]:
    """Collects the calls through which products may reach `outvars`, by equation ids.

    Returns the variables that they may be made of.
    """
    marked = set(variables_in(outvars))
    # In reverse, so that a variable is marked before the equation that makes it.
    for eqn in reversed(jaxpr.eqns):
        if marked.isdisjoint(eqn.outvars):
            continue
        if eqn.primitive.name in OPERATIONS:
            # The factors of a product of matrices are arrays, unless it is a norm.
            if eqn.primitive.name not in OF_ARRAYS or not eqn.outvars[0].aval.shape:
                marked.update(variables_read(eqn))
        elif eqn.primitive is jit_p or eqn.primitive in ENTERED:
            entered.add(id(eqn))
            body = bodies_of(eqn)[0].jaxpr
            results = zip(eqn.outvars, body.outvars, strict=True)
            inside = _mark(body, [v for out, v in results if out in marked], entered)
            given = zip(eqn.invars, body.invars, strict=True)
            marked.update(x for x, v in given if v in inside and not isinstance(x, Literal))
    return marked


def _most_held(jaxpr: Jaxpr, positions: Positions) -> int:
    """Returns the most elements of one example that one array in memory has."""
    given = [v for v, a in zip(jaxpr.invars, positions, strict=True) if a is not None]
    return max([_elements(v) for v in given] + [_most_made(jaxpr)])


def _most_made(jaxpr: Jaxpr) -> int:
    """Returns the most elements that an operation makes without fusion."""
    most = 0
    for eqn in jaxpr.eqns:
        if facts_of(eqn.primitive).body:
            most = max([most, *map(_most_made, programs_inside(eqn)[:1])])
        elif not (is_fused(eqn.primitive) or facts_of(eqn.primitive).alias):
            most = max([most, *map(_elements, eqn.outvars)])
    return most


def _elements(v: Var | Literal) -> int:
    return math.prod(getattr(v.aval, "shape", ()))


class _Factoring:
    """Runs through a program and follows products.

    `apart` are products of matrices and scattered rows left whole, by the ids of variables.
    """

    def __init__(
        self,
        axis: Axis,
        positions: Positions,
        outputs: Collection[int],
        entered: Collection[int],
        held: int,
        apart: Collection[int],
    ) -> None:
        self._axis, self._positions = axis, positions
        self._outputs, self._entered, self._held, self._apart = outputs, entered, held, apart
        self._summed: list[Values] = []
        self._matrices: dict[int, Value] = {}
        self._convolutions: dict[int, tuple[Eqn, Values]] = {}  # by the ids of results
        self._shared: dict[int, Value] = {}  # what does not depend on the batch, by its id

    @property
    def has_summed(self) -> bool:
        return bool(self._summed)

    def run(self, staged: ClosedJaxpr, xs: Values) -> list[Any]:
        """Evaluates the program, and attaches factors to outputs."""
        self._summed, self._matrices, self._convolutions = [], {}, {}
        given = zip(xs, self._positions, strict=True)
        self._shared = {id(x): x for x, a in given if a is None}
        outs = self._evaluated(staged, list(map(Operand, xs)))
        return [self._factored(x) if k in self._outputs else x.value for k, x in enumerate(outs)]

    def made_anyway(self, jaxpr: Jaxpr) -> set[int]:
        """Returns the products of matrices that `jaxpr` computes for other purposes than sums."""
        products = [eqn for eqn in jaxpr.eqns if eqn.primitive is outer_product_sum_p]
        sums = {id(eqn.outvars[0]) for eqn in products}
        others = [
            *(v for v in jaxpr.outvars if id(v) not in sums),
            *(v for eqn in products for v in eqn.invars[1:]),
        ]
        made = {v for step in plan(jaxpr.eqns, others) for v in step.eqn.outvars}
        return {k for k, x in self._matrices.items() if _compat.staged_variable(x) in made}

    def _evaluated(self, staged: ClosedJaxpr, operands: list[Operand]) -> list[Operand]:
        consts = list(map(Operand, staged.consts))
        self._shared |= {id(x): x for x in staged.consts}
        number = lambda literal: Operand(literal.val)
        return evaluate(staged.jaxpr, consts, operands, self._run_equation, number)

    def _run_equation(self, eqn: Eqn, operands: list[Operand]) -> Sequence[Operand]:
        if eqn.primitive is jit_p and (
            id(eqn) in self._entered or any(x.has_arrays for x in operands)
        ):
            return self._evaluated(program_called(eqn), operands)
        if id(eqn) in self._entered:
            matrices, self._matrices = self._matrices, {}
            outs, terms = run_inside(eqn, operands, self._evaluated)
            self._matrices = matrices
            return self._known(eqn, outs, terms)
        values = [x.value for x in operands]
        squares = _sum_of_squares(eqn, operands)
        if squares is not None:
            return [Operand(squares)]
        outs = bind_equation(eqn, values)
        if not uses_axis(self._axis, eqn) and all(map(self._is_shared, values)):
            self._shared |= {id(x): x for x in outs}
        if _is_convolution(eqn) and id(eqn.outvars[0]) not in self._apart:
            self._matrices[id(eqn.outvars[0])] = outs[0]
            self._convolutions[id(outs[0])] = eqn, values
        reshaped = operands[0] if eqn.primitive.name == "reshape" else None
        root = _root(eqn, operands)
        return self._known(eqn, outs, terms_of(eqn, operands, outs), root, reshaped)

    def _known(
        self, eqn: Eqn, outs: Values, terms: Sequence[Terms | None], *more: Operand | None
    ) -> list[Operand]:
        """Wraps results with the products that they are made of, unless they are left whole."""
        each = []
        for v, x, own in zip(eqn.outvars, outs, terms, strict=True):
            if any(t.matrices is v for t in own or ()):
                self._matrices[id(v)] = x
            each.append(Operand(x, None if id(v) in self._apart else own, *more))
        return each

    def _factored(self, x: Operand) -> Value:
        """Returns an output, with its factors if sums over lanes are better by those."""
        terms = x.products
        if not any(map(is_deferred, terms)):
            # Products of one array and numbers for each lane; a sum of such is one array.
            first = terms[0]
            alone = (
                len(terms) == 1
                and len(arrays_of(first)) == 1
                and not first.matrices
                and set(first.labels) == first.in_factors
            )
            terms = terms if alone else Operand(x.value).products
        if x.terms is None and id(x.value) in self._convolutions:
            eqn, factors = self._convolutions[id(x.value)]
            self._summed.append(factors)
            convolution = Convolution(tuple(sorted(eqn.params.items())))
            return outer_product_sum_p.bind(x.value, *factors, terms=convolution)
        if not all(is_deferred(t) or self._is_held(t) for t in terms):
            return x.value
        # The primitive returns `x`, so that without a sum over lanes nothing changes.
        factors = [f.value for t in terms for f in t.factors]
        self._summed.append(factors)
        return outer_product_sum_p.bind(x.value, *factors, terms=described(terms))

    def _is_shared(self, x: Value) -> bool:
        return not isinstance(x, Tracer) or id(x) in self._shared

    def _is_held(self, term: Product) -> bool:
        """Returns whether a term is numbers times one array that may be in memory for all lanes."""
        if all(self._is_shared(f.value) for f in term.factors):
            return True
        whole = term.in_factors.issubset(term.labels)
        size = math.prod(n.size for n in term.in_factors)
        return len(arrays_of(term)) == 1 and whole and size <= self._held


def _is_convolution(eqn: Eqn) -> bool:
    """Returns whether it is a convolution without groups, of which lanes may be features."""
    if eqn.primitive is not lax.conv_general_dilated_p:
        return False
    params, avals = eqn.params, [v.aval for v in (*eqn.invars, *eqn.outvars)]
    grouped = params["feature_group_count"] * params["batch_group_count"] != 1
    # XLA for CPUs has a kernel for these numbers alone.
    plain = all(aval.dtype == np.float32 for aval in avals) and params["out_sharding"] is None
    return plain and not grouped and 0 not in (n for aval in avals for n in aval.shape)


def _sum_of_squares(eqn: Eqn, operands: Sequence[Operand]) -> jax.Array | None:
    """Computes a sum of squares of all elements of a product; None if `eqn` is not one."""
    name = eqn.primitive.name
    if name == "reduce_sum" and len(eqn.params["axes"]) == np.ndim(operands[0].value):
        x = _unshaped(operands[0]).square_of
    elif name == "dot_general" and not eqn.outvars[0].aval.shape:
        x = _same(*map(_unshaped, operands))
    else:
        return None
    out = eqn.outvars[0].aval
    if x is None or out.dtype.name not in ("float32", "float64"):
        return None
    return sum_of_squares(x, out.dtype)


def _root(eqn: Eqn, operands: Sequence[Operand]) -> Operand | None:
    """Returns the operand that the result of an equation is the elementwise square of."""
    match eqn.primitive.name:
        case "add" if any(x.is_zero for x in operands):
            # Of a real number, optax adds the square of the imaginary part.
            return operands[operands[0].is_zero].square_of
        case "square":
            return operands[0]
        case "convert_element_type" if is_wider(eqn):
            return operands[0].square_of
        case "integer_pow" if eqn.params["y"] == 2:
            return operands[0]
        case "mul":
            return _same(*operands)
    return None


def _same(x: Operand, y: Operand) -> Operand | None:
    return x if x.value is y.value else None


def _unshaped(x: Operand) -> Operand:
    while x.reshaped is not None:
        x = x.reshaped
    return x


def _batched(
    axis: Axis, args: Values, axes: Positions, /, *, terms: tuple[Term, ...] | Convolution
) -> tuple[Any, Position]:
    return args[0], axes[0]


outer_product_sum_p = own_primitive(
    "summed",
    called="sum over lanes",
    operations=lambda x, *factors, terms: x,
    types=lambda x, *factors, terms: x,
    rule=_batched,
    several=False,
)


def run_adding(program: MappedProgram, added: Sequence[bool]) -> tuple[list[Any], list[Position]]:
    """Runs as ``program.run()``, with `added` outputs that have factors as `DeferredContraction`.

    An output that does not depend on the batch stays an array.
    """
    if not any(added):
        return program.run()
    jaxpr = program.staged.jaxpr
    made_by = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive is outer_product_sum_p}
    products: list[Eqn | None] = [
        made_by.get(v) if add and not isinstance(v, Literal) else None
        for v, add in zip(jaxpr.outvars, added, strict=True)
    ]
    if not any(products) or any(map(_is_sharded, program.args)):
        return program.run()
    inside = [
        [v] if e is None else list(e.invars[1:])
        for v, e in zip(jaxpr.outvars, products, strict=True)
    ]
    # Factors are returned in place of the outputs, which are then dead code.
    changed = jaxpr.replace(outvars=[v for vs in inside for v in vs])
    outs, positions = program.run_as(changed)
    each = iter(zip(outs, positions, strict=True))
    parts = [[next(each) for _ in vs] for vs in inside]
    results = [
        part[0] if eqn is None else _result(eqn, program.axis.size, part)
        for eqn, part in zip(products, parts, strict=True)
    ]
    return [x for x, _ in results], [a for _, a in results]


def _result(eqn: Eqn, lanes: int, parts: Sequence[tuple[Value, Position]]) -> tuple[Any, Position]:
    factors, positions = [x for x, _ in parts], [a for _, a in parts]
    contraction = DeferredContraction(
        eqn.outvars[0].aval, lanes, eqn.params["terms"], factors, positions
    )
    if positions.count(None) < len(positions):
        return contraction, 0
    value = contraction.as_output(contraction._replace(lanes=1).total())
    return _compat.weakly(value) if contraction.like.weak_type else value, None


def _is_sharded(x: Value) -> bool:
    """Returns whether its type is sharded: two such axes cannot be contracted."""
    return any(entry is not None for entry in getattr(jax.typeof(x).sharding, "spec", ()))
