"""Lanes added up, from the factors of what each lane adds.

An output y that lanes add up becomes ``summed(y, *factors)``, which is y: so the program does what
it did, and is batched, differentiated and listed as any other. A sum over lanes asks for the
factors instead, and what made y is then part of no program, unless something else needs it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import Literal
from jax.extend.core.primitives import jit_p

from batchax import _compat
from batchax.frontend import reductions
from batchax.frontend.reductions import Reduction
from batchax.jaxprs.bodies import program_called
from batchax.jaxprs.evaluate import bind_equation, evaluate, plan, variables_in, variables_read
from batchax.jaxprs.inside import programs_inside
from batchax.jaxprs.neutral import accumulator
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Jaxpr, Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.captured import MappedProgram, closed_over
from batchax.kernel.debug_nans import checks_nans_here
from batchax.kernel.inner import stage_function
from batchax.kernel.interpreter import interpret
from batchax.kernel.named_axes import uses_axis
from batchax.kernel.own_primitive import OF_OPERATIONS, own_primitive
from batchax.programs.cost import is_fused
from batchax.sums.products import (
    OPERATIONS,
    Group,
    Operand,
    Product,
    Terms,
    aligned,
    arrays_of,
    groups_of,
    sum_of_squares,
    terms_of,
)

_SUMMED = ("float16", "bfloat16", "float32", "float64")


class Term(NamedTuple):
    """A product, of some of the factors of an output: what is known of it before there are values.

    Attributes:
      factors: the number of each factor, and the labels of its dimensions.
      labels: the dimensions of the product; None for one along which all elements are the same.
      sizes: their sizes.
      shape: the shape of the product in the output, where it is after a reshape, and
      starts: begins.
      negative: whether it is subtracted.
      precision: of a product of matrices that it is already; None if that is not said.
      exact: whether lanes are all that is summed over.
    """

    factors: tuple[tuple[int, tuple[int, ...]], ...]
    labels: tuple[int | None, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    negative: bool
    precision: Any
    exact: bool


def factored(
    axis: Axis, staged: ClosedJaxpr, positions: Sequence[Position], added: Sequence[bool]
) -> ClosedJaxpr:
    """`staged`, in which outputs that are `added` up over lanes tell of their factors.

    Args:
      axis: the axis of the lanes.
      staged: the program of one example.
      positions: where its inputs have the batch axis.
      added: which of its outputs are added up.
    """
    jaxpr = staged.jaxpr
    outputs = [k for k, v in enumerate(jaxpr.outvars) if added[k] and _may_be_summed(v)]
    if not outputs or not isinstance(axis.size, int) or checks_nans_here() or not _is_plain(jaxpr):
        return staged
    entered: set[int] = set()
    _mark(jaxpr, [jaxpr.outvars[k] for k in outputs], entered)
    held = _most_held(jaxpr, positions)
    apart: set[int] = set()
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
    """Whether it may be staged again."""
    sizes = (
        n for v in (*jaxpr.invars, *jaxpr.constvars) for n in getattr(v.aval, "shape", (None,))
    )
    return all(isinstance(n, int) for n in sizes) and not any(map(closed_over, jaxpr.eqns))


def _mark(jaxpr: Jaxpr, outvars: Sequence[Any], entered: set[int]) -> set[Any]:
    """Adds the calls through which products may reach `outvars`, by the ids of their equations.

    Returns:
      The variables that they may be made of.
    """
    marked = set(variables_in(outvars))
    for eqn in reversed(jaxpr.eqns):
        if marked.isdisjoint(eqn.outvars):
            continue
        if eqn.primitive.name in OPERATIONS:
            marked.update(variables_read(eqn))
        elif eqn.primitive is jit_p:
            entered.add(id(eqn))
            body = program_called(eqn).jaxpr
            results = zip(eqn.outvars, body.outvars, strict=True)
            inside = _mark(body, [v for out, v in results if out in marked], entered)
            given = zip(eqn.invars, body.invars, strict=True)
            marked.update(x for x, v in given if v in inside and not isinstance(x, Literal))
    return marked


def _most_held(jaxpr: Jaxpr, positions: Sequence[Position]) -> int:
    """The most elements of one example that are in memory at some time, in one array."""
    given = [v for v, a in zip(jaxpr.invars, positions, strict=True) if a is not None]
    return max([_elements(v) for v in given] + [_most_made(jaxpr)])


def _most_made(jaxpr: Jaxpr) -> int:
    """The most elements of what an operation makes that is no part of a loop with others."""
    most = 0
    for eqn in jaxpr.eqns:
        if facts_of(eqn.primitive).body:
            most = max([most, *map(_most_made, programs_inside(eqn)[:1])])
        elif not (is_fused(eqn.primitive) or facts_of(eqn.primitive).alias):
            most = max([most, *map(_elements, eqn.outvars)])
    return most


def _elements(v: Any) -> int:
    return math.prod(getattr(v.aval, "shape", ()))


class _Factoring:
    """A run through a program that follows products.

    axis, positions: as for `factored`.
    outputs, entered, held: of the program, as there.
    apart: products of matrices that are left whole, by the ids of their equations.
    """

    def __init__(
        self,
        axis: Axis,
        positions: Sequence[Position],
        outputs: Collection[int],
        entered: Collection[int],
        held: int,
        apart: Collection[int],
    ) -> None:
        self._axis, self._positions = axis, positions
        self._outputs, self._entered, self._held, self._apart = outputs, entered, held, apart
        self._summed: list[Sequence[Value]] = []
        self._matrices: dict[int, Value] = {}
        self._shared: dict[int, Value] = {}  # what does not depend on the batch, by its id

    @property
    def has_summed(self) -> bool:
        """Whether an output tells of factors."""
        return bool(self._summed)

    def run(self, staged: ClosedJaxpr, xs: Sequence[Value]) -> list[Any]:
        """What the program returns."""
        self._summed, self._matrices = [], {}
        given = zip(xs, self._positions, strict=True)
        self._shared = {id(x): x for x, a in given if a is None}
        outs = self._evaluated(staged, list(map(Operand, xs)))
        return [self._told(x) if k in self._outputs else x.value for k, x in enumerate(outs)]

    def made_anyway(self, jaxpr: Jaxpr) -> set[int]:
        """The products of matrices which `jaxpr`, staged so, needs besides for sums."""
        told = [eqn for eqn in jaxpr.eqns if eqn.primitive is outer_product_sum_p]
        sums = {id(eqn.outvars[0]) for eqn in told}
        others = [
            *(v for v in jaxpr.outvars if id(v) not in sums),
            *(v for eqn in told for v in eqn.invars[1:]),
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
        values = [x.value for x in operands]
        squares = _sum_of_squares(eqn, operands)
        if squares is not None:
            return [Operand(squares)]
        outs = bind_equation(eqn, values)
        if not uses_axis(self._axis, eqn) and all(map(self._is_shared, values)):
            self._shared |= {id(x): x for x in outs}
        if id(eqn) in self._apart:
            return list(map(Operand, outs))
        terms = terms_of(eqn, operands, outs)
        for x, own in zip(outs, terms, strict=True):
            if any(t.matrices is eqn for t in own or ()):
                self._matrices[id(eqn)] = x
        reshaped = operands[0] if eqn.primitive.name == "reshape" else None
        root = _root(eqn, operands)
        return [Operand(x, own, root, reshaped) for x, own in zip(outs, terms, strict=True)]

    def _told(self, x: Operand) -> Any:
        """An output, which tells of its factors if lanes are better added up so."""
        terms = x.products
        if not any(map(_is_outer, terms)):
            # Products of one array and numbers for each lane; a sum of such is one array.
            first = terms[0]
            alone = (
                len(terms) == 1
                and len(arrays_of(first)) == 1
                and not first.matrices
                and set(first.labels) == first.in_factors
            )
            terms = terms if alone else Operand(x.value).products
        if not all(_is_outer(t) or self._is_held(t) for t in terms):
            return x.value
        factors = [f.value for t in terms for f in t.factors]
        self._summed.append(factors)
        return outer_product_sum_p.bind(x.value, *factors, terms=_described(terms))

    def _is_shared(self, x: Value) -> bool:
        return not isinstance(x, Tracer) or id(x) in self._shared

    def _is_held(self, term: Product) -> bool:
        """Whether it is an array, which may be in memory for all lanes, times numbers."""
        if all(self._is_shared(f.value) for f in term.factors):
            return True
        whole = term.in_factors.issubset(term.labels)
        size = math.prod(n.size for n in term.in_factors)
        return len(arrays_of(term)) == 1 and whole and size <= self._held


def _is_outer(term: Product) -> bool:
    """Whether lanes are added up by one product of matrices, without an array for each."""
    return len(arrays_of(term)) == 2


def _sum_of_squares(eqn: Eqn, operands: Sequence[Operand]) -> Any:
    """What a sum of squares of all elements of a product is; None if the equation is no such."""
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
    squares = sum_of_squares(x)
    return squares if squares is not None and squares.dtype == out.dtype else None


def _root(eqn: Eqn, operands: Sequence[Operand]) -> Operand | None:
    """What the result of an equation is the square of, element by element."""
    match eqn.primitive.name:
        case "add" if any(x.is_zero for x in operands):
            # Of a real number, optax adds the square of the imaginary part.
            return operands[operands[0].is_zero].square_of
        case "square":
            return operands[0]
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


def _described(terms: Terms) -> tuple[Term, ...]:
    """The terms of an output, whose factors are numbered one after another."""
    described, count = [], 0
    for term in terms:
        each = dict.fromkeys(n for _, own in term.factors for n in own)
        names = {n: k for k, n in enumerate(each)}
        factors = tuple(
            (count + k, tuple(names[n] for n in f.labels)) for k, f in enumerate(term.factors)
        )
        count += len(factors)
        described.append(
            Term(
                factors,
                labels=tuple(map(names.get, term.labels)),
                sizes=tuple(n.size for n in term.labels),
                shape=term.shape,
                starts=term.starts,
                negative=term.negative,
                precision=term.precision,
                exact=term.matrices is None,
            )
        )
    return tuple(described)


def _batched(axis: Axis, args: Any, axes: Any, /, *, terms: Any) -> tuple[Any, Position]:
    return args[0], axes[0]


outer_product_sum_p = own_primitive(
    "summed",
    called="sum over lanes",
    operations=lambda x, *factors, terms: x,
    types=lambda x, *factors, terms: x,
    programs=(),
    facts="",
    rule=_batched,
    jvp=OF_OPERATIONS,
    transpose=OF_OPERATIONS,
    several=False,
)


_LANES = -1
"""The label of the axis of lanes."""


class DeferredContraction(NamedTuple):
    """What lanes add up to an output: its terms, and their factors for all lanes.

    Attributes:
      like: the type of the output of one example.
      lanes: how many there are.
      terms: the products.
      factors: arrays of all lanes.
      positions: where they have the batch axis.
    """

    like: Any
    lanes: int
    terms: tuple[Term, ...]
    factors: Sequence[Value]
    positions: Sequence[Position]

    def total(self, real: Any = None) -> Any:
        """The sum over lanes; floats of less than 32 bits are added up in float32.

        real: which lanes count; None: all.
        """
        pieces: dict[_Place, Any] = {}
        for term in sorted(self.terms, key=lambda term: term.starts):
            total = self._added(term, real)
            place = (term.starts, term.shape)
            pieces[place] = pieces[place] + total if place in pieces else total
        return _assembled(pieces, self.like.shape)

    def as_output(self, x: Value) -> Any:
        """An array in the dtype of an output."""
        return lax.convert_element_type(x, self.like.dtype)

    def of_all(self, reduction: Reduction) -> Any:
        """A reduction that adds lanes up, of all of them."""
        result = reductions.finished(reduction, self.state(reduction), self.lanes)
        return result if reduction.lane is None else self.as_output(result)

    def state(self, reduction: Reduction, real: Any = None) -> Any:
        """The state of a reduction that adds lanes up, of these; see `total`."""
        total = self.total(real)
        return self.as_output(total) if reduction.lane is None else total

    def _added(self, term: Term, real: Any) -> Any:
        arrays = [
            _Labelled.of(self.factors[k], labels, self.positions[k]) for k, labels in term.factors
        ]
        first, *others = [
            _of_group(arrays, group, real).converted(self.like.dtype)
            for group in groups_of(term.factors)
        ]
        numbers = others.pop() if others and not others[-1].own else None
        if not others:
            total = _weighted(first, numbers, self.lanes, real)
        else:
            (second,) = others
            if numbers is not None:
                small = min(first, second, key=lambda x: math.prod(np.shape(x.value)))
                pair = [x.times(numbers) if x is small else x for x in (first, second)]
                first, second = pair
            total = _contracted(first, second, term, self.lanes, real)
        total = lax.reshape(total.placed(term.labels, term.sizes), term.shape)
        return -total if term.negative else total


class _Labelled(NamedTuple):
    """An array with a label for each dimension, that of lanes among them if it has one."""

    value: Value
    labels: tuple[int, ...]

    @classmethod
    def of(cls, x: Value, labels: tuple[int, ...], position: Position) -> _Labelled:
        """A factor of all lanes."""
        if position is None:
            return cls(x, labels)
        return cls(x, (*labels[:position], _LANES, *labels[position:]))

    @property
    def own(self) -> tuple[int, ...]:
        """The labels except for that of lanes."""
        return tuple(n for n in self.labels if n != _LANES)

    @property
    def has_lanes(self) -> bool:
        """Whether it depends on the lane."""
        return _LANES in self.labels

    def times(self, other: _Labelled) -> _Labelled:
        """The product with what has none but its labels, and that of lanes."""
        labels = self.labels if self.has_lanes or not other.has_lanes else (_LANES, *self.labels)
        x, y = _compat.varying_alike([aligned(self, labels), aligned(other, labels)])
        return _Labelled(jnp.multiply(x, y), labels)

    def masked(self, real: Any) -> _Labelled:
        """Zero in lanes that do not count."""
        if real is None or not self.has_lanes:
            return self
        mask = lax.broadcast_in_dim(real, self.value.shape, (self.labels.index(_LANES),))
        return _Labelled(lax.select(mask, self.value, lax.full_like(self.value, 0)), self.labels)

    def converted(self, dtype: Any) -> _Labelled:
        """In another dtype."""
        return _Labelled(lax.convert_element_type(self.value, dtype), self.labels)

    def placed(self, labels: tuple[int | None, ...], shape: tuple[int, ...]) -> Any:
        """An array with dimensions of these labels, repeated along one of None."""
        order = [n for n in labels if n is not None]
        value = lax.transpose(self.value, [self.labels.index(n) for n in order])
        dims = [d for d, n in enumerate(labels) if n is not None]
        return lax.broadcast_in_dim(value, shape, dims)


_Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a piece of an array begins, and its shape."""


def _assembled(pieces: dict[_Place, Any], shape: tuple[int, ...]) -> Any:
    """The array of which these are all pieces, in order; they may have elements in common."""
    if len(pieces) == 1:
        return next(iter(pieces.values()))
    for d in range(len(shape)):
        ends = itertools.accumulate((own[d] for _, own in pieces), initial=0)
        starts = [tuple(end if k == d else 0 for k in range(len(shape))) for end in ends]
        if starts == [*(start for start, _ in pieces), starts[-1]] and starts[-1][d] == shape[d]:
            return lax.concatenate(_compat.varying_alike(list(pieces.values())), d)
    padded = [
        lax.pad(x, lax.full_like(x, 0, shape=()), edges)
        for x, edges in (
            (x, [(a, n - a - own, 0) for a, own, n in zip(*place, shape, strict=True)])
            for place, x in pieces.items()
        )
    ]
    return functools.reduce(jnp.add, padded)


def _of_group(arrays: Sequence[_Labelled], group: Group, real: Any) -> _Labelled:
    each = (arrays[k] for k in group.numbers)
    return functools.reduce(_Labelled.times, each).masked(real)


def _weighted(x: _Labelled, weights: _Labelled | None, lanes: int, real: Any) -> _Labelled:
    """The sum over lanes of one array, times a number for each."""
    dtype = x.value.dtype
    if weights is None or not weights.has_lanes:
        ones = jnp.ones((lanes,), dtype) if real is None else lax.convert_element_type(real, dtype)
        weights = _Labelled(ones if weights is None else ones * weights.value, (_LANES,))
    if not x.has_lanes:
        wide = accumulator(dtype)
        return _Labelled(x.value.astype(wide) * jnp.sum(weights.value, dtype=wide), x.labels)
    # Of a library of linear algebra: many times as fast as what XLA makes of a sum on a CPU.
    # Where it has a better way, on GPUs, it multiplies and adds up by itself.
    return _dot(weights, x, [_LANES], [], lax.Precision.HIGHEST)


def _contracted(x: _Labelled, y: _Labelled, term: Term, lanes: int, real: Any) -> _Labelled:
    """The sum over lanes of the products of two arrays, and over labels that are not wanted."""
    if x.has_lanes != y.has_lanes:  # what depends on the lane is added up first
        x, y = (_weighted(a, None, lanes, real) if a.has_lanes else a for a in (x, y))
    elif not x.has_lanes:
        count = jnp.asarray(lanes if real is None else jnp.sum(real), x.value.dtype)
        x = x.times(_Labelled(count, ()))
    both = [n for n in x.labels if n in y.labels]
    summed = [n for n in both if n not in term.labels]
    paired = [n for n in both if n in term.labels]
    return _dot(x, y, summed, paired, lax.Precision.HIGHEST if term.exact else term.precision)


def _dot(
    x: _Labelled, y: _Labelled, summed: list[int], paired: list[int], precision: Any
) -> _Labelled:
    dtype = jnp.promote_types(x.value.dtype, y.value.dtype)
    lhs, rhs = _compat.varying_alike([a.value.astype(dtype) for a in (x, y)])
    place = lambda a, names: tuple(a.labels.index(n) for n in names)
    value = lax.dot_general(
        lhs,
        rhs,
        ((place(x, summed), place(y, summed)), (place(x, paired), place(y, paired))),
        precision=precision,
        preferred_element_type=accumulator(dtype),
    )
    left = [n for a in (x, y) for n in a.labels if n not in (*summed, *paired)]
    return _Labelled(value, (*paired, *left))


def run_adding(program: MappedProgram, added: Sequence[bool]) -> tuple[list[Any], list[Position]]:
    """As ``program.run()``, but outputs that are `added` up and tell of factors are
    `DeferredContraction`.

    One that does not depend on the batch is an array all the same.
    """
    if not any(added):
        return program.run()
    jaxpr = program.staged.jaxpr
    made_by = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive is outer_product_sum_p}
    told: list[Eqn | None] = [
        made_by.get(v) if add and not isinstance(v, Literal) else None
        for v, add in zip(jaxpr.outvars, added, strict=True)
    ]
    if not any(told) or any(map(_is_sharded, program.args)):
        return program.run()
    inside = [
        [v] if e is None else list(e.invars[1:]) for v, e in zip(jaxpr.outvars, told, strict=True)
    ]
    changed = jaxpr.replace(outvars=[v for vs in inside for v in vs])
    outs, positions = interpret(
        program.axis, changed, program.staged.consts, program.args, program.axes
    )
    each = iter(zip(outs, positions, strict=True))
    parts = [[next(each) for _ in vs] for vs in inside]
    results = [
        part[0] if eqn is None else _result(eqn, program.axis.size, part)
        for eqn, part in zip(told, parts, strict=True)
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
    """Whether its type says how it is sharded: then two such axes may not be contracted."""
    return any(entry is not None for entry in getattr(jax.typeof(x).sharding, "spec", ()))
