"""Which layout each step of a program runs in: packed where it can be and pays, or padded.

Packed, a step costs what its rows' elements cost; padded, what the longest row would cost for
every row. A value that one step leaves in one layout and another wants in the other has to be
moved between them. What is cheapest in sum is a minimum cut of a graph with an edge for each of
these costs. Without a solver, the cheaper of two assignments is taken: all that can be packed is,
or nothing. Then each part of steps that pass rows on in one layout moves to the other where that
costs less.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core
from jax.extend.core.primitives import custom_jvp_call_p

from batchax import _compat
from batchax.analysis.cost import LAUNCH, ROWS, Cost, cost_of_equation, reading_symbols
from batchax.frontend.rows import Layout
from batchax.jaxprs.bodies import program_called
from batchax.jaxprs.evaluate import plan
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Jaxpr, Value
from batchax.kernel.registry import is_replaced_in_jax, reduced_dims
from batchax.rows.index import WINDOW
from batchax.rows.packed_forms import (
    Names,
    can_hold,
    groups_in,
    has_several,
    merge,
    merged_size,
    names_of,
    packed_move,
    shorter,
)
from batchax.rows.padded_rules.calls import staged_jvp_rule
from batchax.rows.padded_rules.positions import WRITES
from batchax.rows.row_rules import size_of_rule
from batchax.rows.segments import REDUCTIONS
from batchax.rows.sizes import (
    Dim,
    Shape,
    Sizes,
    depends_on_sizes,
    has_symbols,
    is_symbolic,
    ragged_axes,
    ragged_axis,
)


@dataclass(frozen=True)
class Constant:
    """An operand that is written in the program."""

    value: Value
    shape: tuple[Dim, ...]


@dataclass(frozen=True, eq=False)
class RowStep:
    """One equation, between values that have numbers."""

    eqn: Eqn  # the equation
    inputs: tuple[int | Constant, ...]  # for each operand the number of its value, or a `Constant`
    outputs: tuple[int, ...]  # the numbers of its results
    callers: tuple[Any, ...] = ()  # the equations of the calls that it is in, innermost first

    @property
    def dead(self) -> tuple[int, ...]:
        return ()  # unknown, as regions share values

    @property
    def used(self) -> tuple[int, ...]:
        return tuple(i for i in self.inputs if not isinstance(i, Constant))


@dataclass(frozen=True)
class RowProgram:
    """A program: its arguments are the values 0, 1, ..."""

    steps: list[RowStep]  # in order
    shapes: dict[int, tuple[Any, ...]]  # the shape of each value, by number
    consts: dict[int, Any]  # values that the program holds, by number
    outputs: list[int | Constant]  # what it returns: numbers, or constants


Entries = tuple[Any, ...]
"""The entries of a vector, numbers or sizes; of a number, its one."""


def _known_entries(eqn: Eqn, inputs: Sequence[Entries | None]) -> Entries | None:
    """The entries of the result of an equation that makes an index; None if they are unknown."""
    name, shape = eqn.primitive.name, getattr(eqn.outvars[0].aval, "shape", None)
    if name == "dim_as_value":
        return (eqn.params["dim"],)
    if name not in _MAKES_INDEX or shape is None or len(shape) > 1 or None in inputs:
        return None
    if not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer):
        return None
    entries = tuple(entry for each in inputs if each is not None for entry in each)
    return entries if len(entries) == math.prod(shape) else None


_MAKES_INDEX = frozenset(
    "convert_element_type copy broadcast_in_dim reshape squeeze concatenate".split()
)


def _with_known_index(
    eqn: Eqn, entries: Entries, bounds: Mapping[str, int]
) -> tuple[Eqn, Constant] | None:
    """A read or write of a window, with its index as a constant, if rows that have one agree."""
    params, aval = eqn.params, eqn.invars[1].aval
    if len(aval.shape) != 1:
        return None
    window = params["slice_sizes"] if eqn.primitive.name == "gather" else eqn.invars[2].aval.shape
    starts = [_one_start(entry, window, bounds) for entry in entries]
    if None in starts:
        return None
    index = np.asarray(starts, aval.dtype)
    invars = list(eqn.invars)
    invars[1] = core.Literal(index, aval)
    return eqn.replace(invars=invars), Constant(index, aval.shape)


def _one_start(entry: Dim, window: Sequence[Any], bounds: Mapping[str, int]) -> int | None:
    """Where windows begin in all rows in which they have elements; None if it differs."""
    if not is_symbolic(entry):
        return int(entry)
    names = _compat.symbols(entry).union(*(_compat.symbols(d) for d in window if is_symbolic(d)))
    if len(names) != 1 or not names <= bounds.keys():
        return None
    (name,) = names
    at = {name: np.arange(bounds[name] + 1)}
    values = np.broadcast_to(_compat.evaluate_size(entry, at), at[name].shape)
    there = np.ones(len(values), bool)
    for dim in (d for d in window if is_symbolic(d)):
        there &= _compat.evaluate_size(dim, at) > 0
    starts = np.unique(values[there])
    return int(starts[0]) if len(starts) == 1 else None


def flatten(program: ClosedJaxpr, bounds: Mapping[str, int] | None = None) -> RowProgram:
    """The steps of `program`, with those of the programs it calls in place of calls.

    Where windows begin in rows is then a constant, if it is one in all rows of these `bounds`.
    """
    vectors: dict[Any, Entries] = {}
    shapes: dict[int, tuple[Any, ...]] = {}
    consts: dict[int, Any] = {}
    steps: list[RowStep] = []

    def number(shape: Shape) -> int:
        shapes[len(shapes)] = tuple(shape)
        return len(shapes) - 1

    def known_entries(i: int | Constant) -> Entries | None:
        x = i.value if isinstance(i, Constant) else consts.get(i)
        is_integer = lambda x: jnp.issubdtype(jax.typeof(x).dtype, np.integer)  # and no random key
        small = lambda x: np.ndim(x) < 2 and np.size(x) <= 4
        if x is not None and not isinstance(x, Tracer) and is_integer(x) and small(x):
            return tuple(np.asarray(x).reshape(-1).tolist())
        return None if isinstance(i, Constant) else vectors.get(i)

    def walk(
        body: ClosedJaxpr, arguments: Sequence[int | Constant], callers: tuple[Any, ...] = ()
    ) -> list[int | Constant]:
        env: dict[Any, int | Constant] = dict(zip(body.jaxpr.invars, arguments, strict=True))
        for v, x in zip(body.jaxpr.constvars, body.consts, strict=True):
            env[v] = number(v.aval.shape)
            consts[env[v]] = x  # pyright: ignore[reportArgumentType]

        def read(v: core.Var | core.Literal) -> int | Constant:
            return Constant(v.val, np.shape(v.val)) if isinstance(v, core.Literal) else env[v]

        for eqn, *_ in plan(body.jaxpr.eqns, body.jaxpr.outvars):
            inputs = tuple(map(read, eqn.invars))
            if facts_of(eqn.primitive).is_plain_call:
                inner = program_called(eqn)
                outs = walk(inner, inputs, (eqn, *callers))
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            if eqn.primitive.name in _WINDOWED and (of := known_entries(inputs[1])) is not None:
                constant = _with_known_index(eqn, of, bounds or {})
                if constant is not None:
                    eqn, index = constant
                    inputs = inputs[0], index, *inputs[2:]
            outputs = tuple(number(v.aval.shape) for v in eqn.outvars)
            made = _known_entries(eqn, list(map(known_entries, inputs)))
            if made is not None:
                vectors[outputs[0]] = made
            env.update(zip(eqn.outvars, outputs, strict=True))
            steps.append(RowStep(eqn, inputs, outputs, callers))
        return [read(v) for v in body.jaxpr.outvars]

    outputs = walk(program, [number(v.aval.shape) for v in program.jaxpr.invars])
    read = {i for step in steps for i in step.used}.union(
        i for i in outputs if not isinstance(i, Constant)
    )
    return RowProgram([_dropping(step, read) for step in steps], shapes, consts, outputs)


def _dropping(step: RowStep, read: set[int]) -> RowStep:
    """A step that tells which of its results nothing reads, also if a call returns them."""
    if read.issuperset(step.outputs):
        return step
    pairs = zip(step.eqn.outvars, step.outputs, strict=True)
    outvars = [v if i in read else core.DropVar(v.aval) for v, i in pairs]
    return replace(step, eqn=step.eqn.replace(outvars=outvars))


_WINDOWED = frozenset(("gather", *WRITES))


# How segments are reduced for each reduction over a row.
REDUCED = {
    **{name: name for name in REDUCTIONS},
    "reduce_and": "reduce_min",
    "reduce_or": "reduce_max",
}


def _apart(*names: str) -> Callable[[Any, int], bool]:
    """A check that axes in these parameters are not the ragged one."""

    def check(eqn: Eqn, at: int) -> bool:
        for name in names:
            axes = eqn.params[name]
            if at in (axes if isinstance(axes, (tuple, list)) else (axes,)):
                return False
        return True

    return check


def _not_reduced(eqn: Eqn, at: int) -> bool:
    dims = reduced_dims(eqn.primitive, eqn.params["axes"], len(eqn.invars[0].aval.shape))
    return at not in dims


def _always(eqn: Eqn, at: int) -> bool:
    return True


def _plain_reshape(eqn: Eqn, at: int) -> bool:
    """Whether a reshape leaves the ragged axis alone, and only changes the axes of its elements."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    to = ragged_axis(after)
    if to is None or before[at] != after[to] or eqn.params["dimensions"] is not None:
        return False
    elements = lambda shape, i: (math.prod(shape[:i]), math.prod(shape[i + 1 :]))
    return elements(before, at) == elements(after, to)


def _free_in_dot(eqn: Eqn, at: int) -> bool:
    """Whether the result of a product keeps the ragged axis, of one operand or paired of both.

    If the ragged axis is contracted, elements of a row are added up.
    """
    (left, right), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    places = [ragged_axis(v.aval.shape) for v in eqn.invars]
    if places[0] in left or places[1] in right:
        return False
    if None not in places:
        return places[0] in left_batch and places[1] in right_batch
    return True


def _looked_up(eqn: Eqn, at: int) -> bool:
    """Whether a gather takes, for each element, something from what all rows share."""
    table, indices = (v.aval.shape for v in eqn.invars)
    if has_symbols(table):
        dnums, where = eqn.params["dimension_numbers"], ragged_axis(table)
        touched = (*dnums.start_index_map, *dnums.collapsed_slice_dims)
        paired = dnums.operand_batching_dims, dnums.start_indices_batching_dims
        if has_symbols(indices):  # of each element by its own index
            return (where, ragged_axis(indices)) in zip(*paired, strict=True)
        return where not in (*touched, *dnums.operand_batching_dims)
    return ragged_axis(indices) != len(indices) - 1 and not has_symbols(eqn.params["slice_sizes"])


def _unpadded(eqn: Eqn, at: int) -> bool:
    return tuple(eqn.params["padding_config"][at]) == (0, 0, 0)


class _Look(NamedTuple):
    """Whether an equation runs packed is looked up."""

    bounds: Mapping[str, int]  # the greatest of each size
    # The derivative rules, as text, that are being looked into. One that turns up inside itself
    # needs no second look.
    rules: tuple[str, ...] = ()


# The rule of `jnp.sinc` calls a function with a rule that calls another, and so on forever. Each
# rule may be longer than the one around it, and all of them are traced.
_MOST_RULES = 4


def _acts_inside(body: Jaxpr | ClosedJaxpr, look: _Look) -> bool:
    return all(_acts_on_elements(eqn, look) for eqn in _compat.close(body).jaxpr.eqns)


def _acts_on_elements(eqn: Eqn, look: _Look) -> bool:
    if not depends_on_sizes(eqn):
        return True
    name, params = eqn.primitive.name, eqn.params
    facts = facts_of(eqn.primitive)
    if facts.is_plain_call or facts.again:
        return _acts_inside(program_called(eqn), look)
    if name == "dim_as_value":
        return False
    if name == "iota":
        return not is_symbolic(params["shape"][params["dimension"]])
    places = [ragged_axis(v.aval.shape) for v in eqn.invars]
    if name in REDUCED and places[0] in params["axes"]:
        return False
    return _can_pack(eqn, [False] * len(eqn.invars), look)


def _custom_jvp(eqn: Eqn, look: _Look) -> bool:
    # The rule may do what the function does not: divide by the norm of the row, for instance. And
    # it may call the function again, whose rule then reads as this one does.
    try:
        rule = staged_jvp_rule(eqn)
    except Exception:  # of the user's rule: it is raised where the derivative is taken
        return False
    text = str(rule)
    if text in look.rules:
        return True
    if len(look.rules) == _MOST_RULES:
        return False
    look = look._replace(rules=(*look.rules, text))
    return _acts_inside(eqn.params["call_jaxpr"], look) and _acts_inside(rule, look)


_ACTS_ON_ELEMENTS: dict[str, Callable[[Any, int], bool]] = {
    **dict.fromkeys(("broadcast_in_dim", "transpose", "squeeze", "iota"), _always),
    **dict.fromkeys((*REDUCED, "reduce_xor", "argmax", "argmin"), _apart("axes")),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "split"), _apart("axis")
    ),
    "concatenate": _apart("dimension"),
    "dot_general": _free_in_dot,
    "gather": _looked_up,
    "pad": _unpadded,
    "reshape": _plain_reshape,
    "rev": _apart("dimensions"),
    "sort": _apart("dimension"),
}


def _how_it_acts(primitive: _compat.Primitive) -> tuple[Callable[[Any, int], bool] | None, bool]:
    """How to check that a primitive acts on each element, or None if it does not.

    Also whether operands that have no ragged axis may differ between rows.
    """
    facts = facts_of(primitive)
    if is_replaced_in_jax(primitive):  # by a rule for arrays, which padded rows are
        return None, False
    if facts.elementwise:
        return _always, True
    if facts.reduces:
        return _not_reduced, False
    if _compat.is_namesake(primitive):
        return None, False
    return _ACTS_ON_ELEMENTS.get(primitive.name), primitive.name == "broadcast_in_dim"


def can_pack(eqn: Eqn, batched: Sequence[bool], bounds: Mapping[str, int]) -> bool:
    """Whether `run_packed` computes an equation of rows whose sizes have these bounds.

    `batched` says which operands without a ragged size differ between rows.
    """
    return _can_pack(eqn, batched, _Look(bounds))


def _can_pack(eqn: Eqn, batched: Sequence[bool], look: _Look) -> bool:
    if not depends_on_sizes(eqn):
        return True
    name = eqn.primitive.name
    if name == "dim_as_value":
        return True
    if size_of_rule(eqn) is not None:
        return not eqn.params["steps"] and not _closes_over_rows(eqn, batched)
    if has_several(eqn):
        if facts_of(eqn.primitive).again:
            return _can_pack_inside(eqn, batched, look)
        merged = merge(eqn)
        return merged is not None and _can_pack(merged[1], batched, look)
    shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    ragged = {shorter(d, look.bounds) for shape in shapes for d in shape if is_symbolic(d)}
    if None in ragged:
        return False
    if not any(batched) and packed_move(eqn, look.bounds) is not None:
        return True
    if len(ragged) != 1:
        return False
    if eqn.primitive is custom_jvp_call_p:
        return not any(batched) and _custom_jvp(eqn, look)
    if facts_of(eqn.primitive).again:
        return _can_pack_inside(eqn, batched, look)
    check, may_differ = _how_it_acts(eqn.primitive)
    if check is None or (any(batched) and not may_differ):
        return False
    places = [at for v in eqn.invars if (at := ragged_axis(v.aval.shape)) is not None]
    if not places:  # a part of what all rows share: each row has its own copy of it
        return name in ("broadcast_in_dim", "iota")
    if name in REDUCED and places[0] in eqn.params["axes"]:
        return eqn.invars[0].aval.dtype == jnp.bool_ or name in REDUCTIONS
    return all(check(eqn, at) for at in places)


def _closes_over_rows(eqn: Eqn, batched: Sequence[bool]) -> bool:
    closed = len(eqn.params["rule"].closed)
    return any(batched[:closed]) or any(has_symbols(v.aval.shape) for v in eqn.invars[:closed])


def _can_pack_inside(eqn: Eqn, batched: Sequence[bool], look: _Look) -> bool:
    """Whether `run_packed` computes each equation of the program that a call holds."""
    program = flatten(program_called(eqn))
    differs = differing_values(program, batched)
    return all(
        _can_pack(step.eqn, _dense_operands(program, step, differs), look) for step in program.steps
    )


def _dense_operands(program: RowProgram, step: RowStep, differs: Sequence[bool]) -> list[bool]:
    """For each operand of a step whether it differs between rows without a ragged size."""
    return [
        not isinstance(i, Constant) and not has_symbols(program.shapes[i]) and differs[i]
        for i in step.inputs
    ]


@dataclass(frozen=True)
class Costs:
    """What steps cost in either layout."""

    packed: Sizes  # the sizes of one long row
    padded: Sizes  # the bounds of each row
    rows: int  # how many there are
    # How many elements packed rows hold that are ragged along several axes, by their sizes.
    room: Mapping[Names, int] = field(default_factory=dict)
    # Whether each row is known to be as long as its bounds: then packed arrays need no gather.
    full: bool = False

    def of_block(self, step: RowStep, differs: Sequence[bool]) -> float:
        """Nanoseconds, roughly, that padded rows take besides, however many run together."""
        own = [not isinstance(i, Constant) and differs[i] for i in step.inputs]
        with reading_symbols(self.padded.bound):
            cost, each = (cost_of_equation(step.eqn, differs=marks) for marks in (None, own))
        return LAUNCH * cost.launches + ROWS.time(cost) - ROWS.time(each)

    def of(self, step: RowStep, packed: bool, differs: Sequence[bool]) -> float:
        """Nanoseconds, roughly, for all rows; `differs` says of values whether rows do."""
        eqn = step.eqn
        own = [not isinstance(i, Constant) and differs[i] for i in step.inputs]
        sizes, times = (self.packed, 1) if packed else (self.padded, self.rows)
        merged = merge(eqn) if packed and has_several(eqn) else None
        if merged is not None:
            names, eqn = merged
            sizes = Sizes({str(merged_size(names)): self.room[names]}, {})
        elif packed and size_of_rule(eqn) is not None:  # which tells rows apart
            each = {n: -(-size // self.rows) for n, size in self.packed.bounds.items()}
            sizes, times = Sizes(each, {}), self.rows
        with reading_symbols(sizes.bound):
            cost = times * cost_of_equation(eqn, differs=own)
        if eqn.primitive.name in REDUCED and has_symbols(shape := eqn.invars[0].aval.shape):
            numbers = times * math.prod(sizes.bounds_of(shape))
            wide = packed and math.prod(d for d in shape if not is_symbolic(d)) > WINDOW
            # Padded, each number is masked. Packed, a loop over rows adds up what fits a window;
            # XLA adds others to their rows one by one.
            cost += Cost(places=2 * max(sizes.bounds.values())) if wide else Cost(bytes=8 * numbers)
        if packed and has_symbols(shape := eqn.outvars[0].aval.shape):
            each = zip(eqn.invars, own, strict=True)
            if any(differs and not has_symbols(v.aval.shape) for v, differs in each):
                # Each element finds what its row has, as most elements after the one before.
                cost += Cost(places=max(sizes.bounds.values()) // 2)
        return ROWS.time(cost)

    def places(self, bounds: Mapping[str, int]) -> int:
        """The places of a padded row of these bounds, along the axes that arguments have."""
        several = [math.prod(bounds[name] for name in names) for names in self.room]
        return max([*bounds.values(), *several])

    @property
    def held(self) -> int:
        """How many elements packed rows hold, of the argument that holds most."""
        return max([*(self.packed.bounds[name] for name in self.alone), *self.room.values()])

    @property
    def alone(self) -> set[str]:
        return set(self.packed.bounds).difference(*self.room)

    def move(self, shape: Shape, packed: bool) -> float:
        """Nanoseconds, roughly, to move a value, of numbers of 32 bits, to that layout."""
        if self.full:
            return 0.0
        at = ragged_axes(shape)
        pieces = self.rows * math.prod(self.padded.bound(shape[k]) for k in at[:-1])
        # What moves is not fused with what makes or reads it, padded. The loops that move 300
        # elements take 35 microseconds.
        cost = Cost(places=4 * pieces * (len(at) > 1), calls=300)
        cost += Cost(bytes=8 * self.rows * math.prod(self.padded.bounds_of(shape)))
        if packed:
            each = math.prod(d for d in shape if not is_symbolic(d))
            one = max(self.packed.bounds_of(shape)) if len(at) == 1 else 0
            elements = self.room.get(names_of(shape) or (), one)
            cost += Cost(places=elements, bytes=8 * each * elements)
        return ROWS.time(cost)


def differing_values(program: RowProgram, batched: Sequence[bool]) -> list[bool]:
    """For each value whether it differs between rows; `batched` says it of the arguments."""
    differs = dict.fromkeys(program.shapes, False)
    differs.update(enumerate(batched))
    for step in program.steps:
        own = any(differs[i] for i in step.used) or depends_on_sizes(step.eqn)
        differs.update(dict.fromkeys(step.outputs, own))
    return [differs[i] for i in range(len(differs))]


def choose_packed(
    program: RowProgram, batched: Sequence[bool], costs: Costs, layout: Layout = Layout.AUTO
) -> list[bool | None]:
    """Whether each step runs packed, or else padded; None for those without a ragged value.

    `batched` says which arguments differ between rows. `layout` is the user's option.
    """
    differs = differing_values(program, batched)
    ragged = {i for i, shape in program.shapes.items() if has_symbols(shape)}
    possible: list[bool | None] = []
    for step in program.steps:
        if not depends_on_sizes(step.eqn):
            possible.append(None)
            continue
        dense = _dense_operands(program, step, differs)
        held = all(names in costs.room for names in groups_in(step.eqn))
        possible.append(held and can_pack(step.eqn, dense, costs.padded.bounds))
    packed = [p is True and layout != Layout.PADDED for p in possible]
    if layout == Layout.AUTO and costs.full:
        packed = [False] * len(possible)
    elif layout == Layout.AUTO and True in possible:
        packed = _cheaper(program, possible, ragged, differs, costs)
    return [None if p is None else own for p, own in zip(possible, packed, strict=True)]


def _cheaper(
    program: RowProgram,
    possible: Sequence[bool | None],
    ragged: set[int],
    differs: Sequence[bool],
    costs: Costs,
) -> list[bool]:
    """For each step whether it runs packed: all that can or none, except for cheaper parts."""
    ways = [p is True for p in possible], [False] * len(possible)
    price = functools.cache(functools.partial(costs.of, differs=differs))
    cost = lambda each: _cost(program, each, possible, ragged, price, costs)
    best = min(ways, key=cost)
    least = cost(best)
    for part in _parts(program, best, possible, ragged):
        other = [p != (k in part) for k, p in enumerate(best)]
        taken = cost(other)
        if taken < least - _NO_DIFFERENCE:
            best, least = other, taken
    return list(best)


# Nanoseconds that the model cannot tell apart. Of many parts, each may save little of the whole.
# Programs: next-token loss.
_NO_DIFFERENCE = 5000


def _parts(
    program: RowProgram, packed: Sequence[bool], possible: Sequence[bool | None], ragged: set[int]
) -> list[set[int]]:
    """Steps that may run in the other layout: those that pass rows on to one another in one."""
    part_of: dict[int, set[int]] = {}
    maker = {v: k for k, step in enumerate(program.steps) for v in step.outputs}
    for k, step in enumerate(program.steps):
        if not possible[k]:
            continue
        part = {k}
        for v in step.used:
            before = part_of.get(maker.get(v, -1))
            if v in ragged and before is not None and packed[maker[v]] == packed[k]:
                part |= before
        part_of.update(dict.fromkeys(part, part))
    return list({id(part): part for part in part_of.values()}.values())


def _cost(
    program: RowProgram,
    packed: Sequence[bool],
    possible: Sequence[bool | None],
    ragged: set[int],
    price: Callable[[RowStep, bool], float],
    costs: Costs,
) -> float:
    """Nanoseconds, roughly, of all steps, and of moving what is wanted in another layout."""
    padded: set[int] = set()  # values that padded steps made: others are packed, as arguments are
    moved: set[tuple[int, bool]] = set()  # and whether to packed rows
    total = 0.0
    for step, is_packed, may_be in zip(program.steps, packed, possible, strict=True):
        if may_be is None:
            continue
        total += price(step, is_packed) if may_be else 0.0  # without a choice it is the same
        wanted = (v for v in step.used if v in ragged and (v in padded) == is_packed)
        moved.update((v, is_packed) for v in wanted)
        padded.update(() if is_packed else step.outputs)
    for v in program.outputs:  # what is returned is packed
        if isinstance(v, int) and v in ragged and can_hold(costs.room, program.shapes[v]):
            moved.update((v, True) for v in {v} & padded)
    return total + sum(costs.move(program.shapes[v], packed) for v, packed in moved)
