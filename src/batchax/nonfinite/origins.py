"""Evaluates a program, and records for each value where non-finite numbers in it came from.

While a program is evaluated, one number is computed of each value, the greatest of its magnitudes,
and what it was made of is written down. When origins are requested, all values on the way are
looked at together: each points to the operand that is to blame, and pointers are followed by
doubling (Wyllie 1979), in as many rounds as the length of the way has bits. To mark each result
when it is made took 30 equations for one of the user, and as much longer to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.jaxprs.bodies import Body, bodies_of, control_flow, is_rebuilt
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import Aval, Eqn, Jaxpr, Tree, Value, Values

FINITE, INFINITE, NAN = 0, 1, 2
KIND, PLACE, TURNED, FIRST_LOOP = 0, 1, 2, 3
"""What the integers of an origin are: the kind of value; the place it came from; of an infinity
that became a NaN, where it did; and for each loop around the place, the iteration."""

_MOST_PARENTS = 4  # of a link: the table of them is as wide as the widest


@dataclass(eq=False)
class Link:
    """Holds a value on the way to a result."""

    # The bits of the greatest magnitude in it, NaN if there is one. None if its origin is known, or
    # if it stands for several operands, of which it is the worst.
    worst: Any
    parents: tuple[Link, ...] = ()  # the values that it was made of
    number: int = 0  # the place that made it
    iterations: tuple[Any, ...] = ()  # of the loops around that, outermost first
    origin: Any = None  # where it came from, once `find_origins` found that


@dataclass(frozen=True)
class Lanes:
    """Holds the lanes of a batched program, in which each value has a mark for each lane."""

    size: int
    # Where a result of an equation, or a value of a type, has the batch axis; None if it has none,
    # or if that is not known.
    axis_of: Callable[[Any, Any], int | None]


def link(
    x: Value,
    number: int,
    iterations: tuple[Any, ...] = (),
    parents: Sequence[Link] = (),
    axis: int | None = None,
    lanes: Lanes | None = None,
) -> Link:
    """Makes the link of a value that was made at a place, of others."""
    # Of many parents a tree of links without values, so that the table of parents stays narrow.
    while len(parents) > _MOST_PARENTS:
        groups = range(0, len(parents), _MOST_PARENTS)
        parents = [Link(None, tuple(parents[k : k + _MOST_PARENTS])) for k in groups]
    if axis is None:
        worst = _worst(x)
        worst = worst if lanes is None else jnp.broadcast_to(worst, (lanes.size,))
    else:
        worst = jax.vmap(_worst, axis)(x)
    return Link(worst, tuple(parents), number, iterations)


def _worst(x: Value) -> Value:
    """Returns the greatest magnitude in a value, as bits."""
    # Bits without the sign are in the order of magnitudes, infinity and NaN last. A maximum of
    # floats would lose them: that of XLA for CPUs (0.10.2, 0.12) passes over NaN in large arrays.
    if jnp.iscomplexobj(x):
        x = jnp.maximum(_magnitude(x.real), _magnitude(x.imag))
    else:
        x = _magnitude(x)
    if has_elements(x):
        return lax.reduce_max(x, tuple(range(x.ndim))) if x.ndim else x
    return jnp.max(x, initial=0)


def _magnitude(x: Value) -> Value:
    """Returns the bits of floats without the sign; those of small floats as of float32."""
    x = x.astype(np.float32) if x.dtype.itemsize < 4 else x
    return lax.bitcast_convert_type(x, _bits(x.dtype)) << 1


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"uint{8 * dtype.itemsize}")


def kind_of(x: Value) -> Value:
    """Says whether a value has a NaN, else an infinity, or all of it is finite."""
    return _kinds(_worst(x))


def has_elements(x: Value) -> bool:
    """Whether a value, or a type, has elements for certain: its sizes may be symbols."""
    return all(isinstance(n, int) and n > 0 for n in x.shape)


def nowhere(depth: int, lanes: Lanes | None = None) -> Value:
    """Returns the origin of what is finite, in a program with loops nested so deep."""
    shape = () if lanes is None else (lanes.size,)
    return jnp.zeros((*shape, FIRST_LOOP + depth), np.int32)


def find_origins(links: Iterable[Link], depth: int, lanes: Lanes | None = None) -> None:
    """Finds the origins of links, and stores them there; for each of the lanes if there are any."""
    links_left = [x for x in dict.fromkeys(links) if x.origin is None]
    if not links_left:
        return
    order = _on_the_way(links_left)
    roots = [x for x in order if x.origin is not None]
    by_type: dict[Any, list[Link]] = {}
    for x in order:
        if x.origin is None and x.worst is not None:
            by_type.setdefault(x.worst.dtype, []).append(x)
    joints = [x for x in order if x.origin is None and x.worst is None]
    made = [x for alike in by_type.values() for x in alike]
    at = {x: k for k, x in enumerate([*made, *roots, *joints])}
    every = made, roots, joints, links_left

    def find(worsts: list[list[Any]], origins: list[Any]) -> Value:
        return _found(every, at, depth, _lengths(order), worsts, origins)

    worsts = [[x.worst for x in alike] for alike in by_type.values()]
    rows = (find if lanes is None else jax.vmap(find))(worsts, [x.origin for x in roots])
    for k, x in enumerate(links_left):
        x.origin = rows[..., k, :]


def _found(
    every: tuple[Sequence[Link], ...],
    at: dict[Link, int],
    depth: int,
    lengths: dict[Link, int],
    worsts: list[list[Any]],
    origins: list[Any],
) -> Value:
    """Returns the origins of the requested links.

    It is in each step of a loop, so few operations are made, whatever the number of links.
    """
    made, roots, joints, links_left = every
    kinds = [_kinds(jnp.stack(alike)) for alike in worsts]
    if len(made) == len(at) and not any(x.parents for x in made):  # arguments
        kind = jnp.concatenate(kinds)[np.array([at[x] for x in links_left]), None]
        rows = jnp.where(
            np.arange(FIRST_LOOP + depth)[None] == KIND, kind, _rows(links_left, depth)
        )
        return jnp.where(kind > 0, rows, 0)
    kinds += [jnp.stack([origin[KIND] for origin in origins])] if origins else []
    kind = jnp.concatenate(kinds)
    for x in joints:  # in order: a joint of joints comes after these
        parents = np.array([at[p] for p in x.parents])
        kind = jnp.append(kind, _taken(kind, parents).max())
    state = _blamed([*made, *roots, *joints], at, kind)
    # Pointer jumping: each step doubles how far back a link points, so that logarithmically many
    # steps reach the first bad value.
    for _ in range(max(max(lengths.values()) - 2, 0).bit_length()):
        further = _taken(state, state[:, 0])
        state = jnp.where((np.arange(2)[None] > 0) & (state[:, 1:] > 0), state, further)
    others = [*origins, *[nowhere(depth)] * len(joints)]
    own = jnp.concatenate([_rows(made, depth), *(x[None] for x in others)])
    places = np.array([at[x] for x in links_left])
    state, kind = _taken(state, places), _taken(kind, places)[:, None]
    rows, turned = _taken(own, state[:, 0]), state[:, 1:]
    column = np.arange(FIRST_LOOP + depth)[None]
    rows = jnp.where((column == TURNED) & (turned > 0), turned, rows)
    rows = jnp.where(column == KIND, kind, rows)
    return jnp.where(kind > 0, rows, 0)


def _taken(x: Value, places: Value) -> Any:
    """Returns entries of `x`, of which it is known that there are such."""
    window = (1, *x.shape[1:])
    dims = lax.GatherDimensionNumbers(tuple(range(1, x.ndim)), (0,), (0,))
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, places[:, None], dims, window, mode=mode)


def _on_the_way(links: Iterable[Link]) -> list[Link]:
    """Lists the links that lead to some, parents first, up to those whose origin is known."""
    order: dict[Link, None] = {}
    stack = [(x, False) for x in links]
    while stack:  # not by recursion: programs are long
        x, after_parents = stack.pop()
        if x in order:
            continue
        if after_parents or x.origin is not None or not x.parents:
            order[x] = None
            continue
        stack.append((x, True))
        stack += [(p, False) for p in x.parents]
    return list(order)


def _lengths(order: Iterable[Link]) -> dict[Link, int]:
    """Returns the length of the longest way to each link."""
    lengths: dict[Link, int] = {}
    for x in order:
        before = () if x.origin is not None else x.parents
        lengths[x] = 1 + max((lengths[p] for p in before), default=0)
    return lengths


def _blamed(order: Sequence[Link], at: dict[Link, int], kind: Value) -> Value:
    """Returns for each link the first of its worst parents, or itself; and its number if that turns
    an infinity to a NaN, else 0.
    """
    parents = [() if x.origin is not None else x.parents for x in order]
    width, count = max(1, *map(len, parents)), len(order)
    nobody = np.arange(count)
    table = np.repeat(nobody[:, None], width, 1).astype(np.int32)
    is_parent = np.arange(width) < np.array([len(of) for of in parents])[:, None]
    for k, of in enumerate(parents):
        table[k, : len(of)] = [at[p] for p in of]
    # The worst, of these the first, and which it is, in one number.
    kinds = jnp.where(is_parent, _taken(kind, table.reshape(-1)).reshape(table.shape), FINITE)
    rank = (kinds * width + np.arange(width, dtype=np.int32)[None, ::-1]) * np.int32(count) + table
    best = rank.max(1)
    of_worst, chosen = lax.div(best, np.int32(count * width)), lax.rem(best, np.int32(count))
    has_parent = of_worst > FINITE
    numbers = np.array([x.number for x in order], np.int32)
    turned = jnp.where(has_parent & (kind == NAN) & (of_worst < NAN), numbers, 0)
    return jnp.stack([jnp.where(has_parent, chosen, nobody.astype(np.int32)), turned], 1)


def _kinds(worst: Value) -> Value:
    bits = worst.dtype
    infinity = np.array(np.inf, f"float{8 * bits.itemsize}").view(bits) << bits.type(1)
    kind = jnp.where(worst > infinity, NAN, jnp.where(worst == infinity, INFINITE, FINITE))
    return kind.astype(np.int32)


def _rows(links: Sequence[Link], depth: int) -> Value:
    """Returns the origins of what was made at the places of links. Kinds are entered later."""
    rows: Any = np.full((len(links), FIRST_LOOP + depth), -1, np.int32)
    rows[:, :FIRST_LOOP] = 0
    rows[:, PLACE] = [x.number for x in links]
    # Links of one step share the numbers of its iterations.
    loops = {tuple(map(id, x.iterations)): x.iterations for x in links}
    for key, iterations in loops.items():
        if iterations:
            own = np.array([tuple(map(id, x.iterations)) == key for x in links])
            numbers = jnp.stack([jnp.asarray(i, np.int32) for i in iterations])
            inside = np.arange(depth) < len(iterations)
            numbers = jnp.pad(numbers, (FIRST_LOOP, depth - len(iterations)))
            mask = own[:, None] & np.pad(inside, (FIRST_LOOP, 0))
            rows = jnp.where(mask, numbers, rows)
    return rows


_SHOWN = 16  # elements of an operand that are shown one by one


@dataclass(frozen=True)
class Place:
    """Holds an equation that may make what is not finite."""

    eqn: Eqn
    around: tuple[Any, ...]  # calls, loops and branches around it, outermost first

    @property
    def line(self) -> str:
        """Returns the line of the user that made it, or made what it is in:

        JAX may have made it.
        """
        lines = (_compat.user_line(eqn.source_info) for eqn in (self.eqn, *self.around[::-1]))
        return next(filter(None, lines), "")


@dataclass
class Places:
    """Numbers the equations of a program from 1 as they are met."""

    known: list[Place] = field(default_factory=list)
    # by the identity of the equation and of those around it
    numbers: dict[tuple[int, ...], int] = field(default_factory=dict)
    # numbers of those, and of inputs, whose values have an axis of lanes
    of_lanes: set[int] = field(default_factory=set)

    def number(self, eqn: Eqn, around: tuple[Any, ...]) -> int:
        key = tuple(map(id, (*around, eqn)))
        if key not in self.numbers:
            self.known.append(Place(eqn, around))
            self.numbers[key] = len(self.known)
        return self.numbers[key]

    def place(self, number: int) -> Place:
        return self.known[number - 1]


@dataclass(frozen=True)
class Marked:
    """Holds a value, and the link by which its origin is found; None if known to be finite."""

    value: Value
    link: Link | None = None


@dataclass(frozen=True)
class Watch:
    """Says what is to be seen of an equation: its operands, when it is met in these iterations."""

    place: int  # the number of the equation
    iterations: Any  # of the loops around it, outermost first
    lane: int | None = None  # of which operands are wanted; None for all of them
    axes: Sequence[int | None] = ()  # where operands have the axis of lanes

    def in_lane(self, operands: Values) -> list[Value]:
        axes = self.axes or [None] * len(operands)
        return [
            x if axis is None else jnp.take(x, self.lane or 0, axis)
            for x, axis in zip(operands, axes, strict=True)
        ]


def loop_depth(jaxpr: Jaxpr) -> int:
    """Returns how deep loops are nested in a program, at most."""
    return max((_depth_of(eqn) for eqn in jaxpr.eqns), default=0)


def _depth_of(eqn: Eqn) -> int:
    inside = [loop_depth(body.jaxpr) + body.is_repeated for body in bodies_of(eqn)]
    return max(inside, default=0)


class Evaluator:
    """Evaluates programs of one example; of a batched program with `lanes`."""

    def __init__(
        self,
        places: Places,
        depth: int,
        watches: Sequence[Watch] = (),
        seen: Sequence[Sequence[Any]] = (),
        around: tuple[Any, ...] = (),
        lanes: Lanes | None = None,
    ) -> None:
        # `depth` is how deep loops are nested at most, `around` what the program is inside of,
        # `seen` what was seen so far of the operands that each of `watches` wants.
        self._places, self._depth, self._watches = places, depth, watches
        self._around, self._lanes = around, lanes
        self.seen = list(seen)

    def run(
        self,
        program: Jaxpr,
        consts: Sequence[Marked],
        args: Sequence[Marked],
        iterations: tuple[Any, ...] = (),
    ) -> list[Marked]:
        """Returns the outputs of a program, inside loops that are in these iterations."""

        def run_equation(eqn: Eqn, operands: list[Marked]) -> Sequence[Marked]:
            return self._equation(eqn, operands, iterations)

        return evaluate(program, consts, args, run_equation, lambda v: Marked(v.val))

    def input(self, x: Value, number: int) -> Marked:
        """Marks an argument, or what the function closes over: its place is a number below zero."""
        return Marked(x, self._link(x, None, number) if self._marks(x) else None)

    def _link(self, x: Value, eqn: Eqn | None, number: int, *more: Any) -> Link:
        """Makes the link of a result of an equation, or of another value."""
        axis = None if self._lanes is None else self._lanes.axis_of(eqn, jax.typeof(x))
        if axis is not None and number:  # 0: of a part of a value, which has no place
            self._places.of_lanes.add(number)
        return link(x, number, *more, axis=axis, lanes=self._lanes)

    def whole(self, values: Sequence[Marked]) -> list[Value]:
        """Returns the origins of values; None for those that cannot be bad, or without marks."""
        find_origins([v.link for v in values if v.link is not None], self._depth, self._lanes)
        return [
            None if not self._marks(v.value) else v.link.origin if v.link else self.nowhere
            for v in values
        ]

    def _marks(self, x: Value) -> bool:
        """Whether `x` may be bad, and origins are wanted: while equations are watched they are
        not.
        """
        return not self._watches and may_be_bad(x)

    @property
    def nowhere(self) -> Value:
        """Returns the origin of what is finite."""
        return nowhere(self._depth, self._lanes)

    def _equation(
        self, eqn: Eqn, operands: list[Marked], iterations: tuple[Any, ...]
    ) -> Sequence[Marked]:
        name = eqn.primitive.name
        flow = control_flow(eqn.primitive)
        if is_rebuilt(eqn.primitive):
            run = self._cond if flow.branches else self._while if flow.test else self._counted_loop
            return run(eqn, operands, iterations)
        if facts_of(eqn.primitive).body or name in _WITH_RULES:
            (body,) = bodies_of(eqn)
            if body.operands:
                program = _compat.close(body.program)
                args = [operands[i] for i in body.operands]
                inner = self._inside(eqn, self.seen)
                outs = inner.run(program.jaxpr, _plain(program.consts), args, iterations)
                self.seen = inner.seen
                return outs
        values = [x.value for x in operands]
        outs = bind_equation(eqn, values)
        number = self._places.number(eqn, self._around)
        self._see(number, iterations, values)
        return [self._result(x, eqn, number, operands, iterations) for x in outs]

    def _inside(self, eqn: Eqn, seen: Sequence[Sequence[Any]]) -> Evaluator:
        around = (*self._around, eqn)
        return Evaluator(self._places, self._depth, self._watches, seen, around, self._lanes)

    def _result(
        self,
        x: Value,
        eqn: Eqn,
        number: int,
        operands: Sequence[Marked],
        iterations: Values,
    ) -> Marked:
        """Marks a result of an equation: what is bad in it comes from an operand, or from here."""
        if not self._marks(x):
            return Marked(x)
        if _is_as_bad(eqn):
            return Marked(x, operands[0].link)
        parents = [o.link for o in operands if o.link is not None]
        return Marked(x, self._link(x, eqn, number, iterations, parents))

    def _see(self, number: int, iterations: tuple[Any, ...], values: Values) -> None:
        for k, watch in enumerate(self._watches):
            if watch.place != number or (watch.axes and len(watch.axes) != len(values)):
                continue
            views = list(map(_view, watch.in_lane(values)))
            if [jax.typeof(x).shape for x in views] != [x.shape for x in self.seen[k]]:
                continue  # staged for something else, where equations have other numbers
            now = jnp.asarray(True)
            for i, index in enumerate(iterations):
                now &= watch.iterations[i] == index
            self.seen[k] = [
                jnp.where(now, x, old) for x, old in zip(views, self.seen[k], strict=True)
            ]

    def _counted_loop(
        self, eqn: Eqn, operands: list[Marked], iterations: tuple[Any, ...]
    ) -> Sequence[Marked]:
        (body,) = bodies_of(eqn)
        program, n = _compat.close(body.program), body.carried
        length, reverse = body.times, body.reverse
        carry = [operands[i] for i in body.carry_operands]
        sliced = [operands[i] for i in body.sliced_operands]
        self.whole(operands)  # once, for all that the loop is given
        of_sliced = self.whole(sliced)

        def step(state: Tree, parts: Tree) -> tuple[Any, Any]:
            count, values, origins, seen = state
            inner = self._inside(eqn, seen)
            # A reversed scan counts its steps from the last one.
            index = length - 1 - count if reverse else count
            args = [
                *(operands[i] for i in body.operands[: body.same]),
                *map(_whole, values, origins),
                *map(self._part, parts, of_sliced),
            ]
            outs = inner.run(program.jaxpr, _plain(program.consts), args, (*iterations, index))
            values, marks = [o.value for o in outs], inner.whole(outs)
            return (count + 1, values[:n], marks[:n], inner.seen), (values[n:], marks[n:])

        start = jnp.int32(0), [c.value for c in carry], self.whole(carry), self.seen
        if length is None:
            steps = body.counted_by(operands).value
            state = lax.fori_loop(0, steps, lambda _, state: step(state, [])[0], start)
            _, last, origins, self.seen = state
            return list(map(_whole, last, origins))
        state, (ys, marks) = lax.scan(
            step, start, [s.value for s in sliced], length=length, reverse=reverse
        )
        _, last, origins, self.seen = state
        # A stacked result comes from the first of its worst parts.
        firsts = [None if m is None or not length else _worst_of(m) for m in marks]
        return [*map(_whole, last, origins), *map(_whole, ys, firsts)]

    def _part(self, x: Value, origin: Value | None) -> Marked:
        """Marks what a step takes of a value, whose own parts may be finite."""
        if origin is None:
            return Marked(x)
        return Marked(x, self._link(x, None, 0, (), [Link(None, origin=origin)]))

    def _while(
        self, eqn: Eqn, operands: list[Marked], iterations: tuple[Any, ...]
    ) -> Sequence[Marked]:
        test, body = bodies_of(eqn)
        of_test, of_body = _compat.close(test.program), _compat.close(body.program)
        fixed = [operands[i].value for i in test.operands[: test.same]]
        same = [operands[i] for i in body.operands[: body.same]]
        carry = [operands[i] for i in body.carry_operands]
        self.whole(operands)

        def go_on(state: Tree) -> Value:
            return eval_jaxpr(of_test.jaxpr, of_test.consts, *fixed, *state[1])[0]

        def step(state: Tree) -> Tree:
            count, values, origins, seen = state
            inner = self._inside(eqn, seen)
            args = [*same, *map(_whole, values, origins)]
            outs = inner.run(of_body.jaxpr, _plain(of_body.consts), args, (*iterations, count))
            return count + 1, [o.value for o in outs], inner.whole(outs), inner.seen

        start = jnp.int32(0), [c.value for c in carry], self.whole(carry), self.seen
        _, last, origins, self.seen = lax.while_loop(go_on, step, start)
        return list(map(_whole, last, origins))

    def _cond(
        self, eqn: Eqn, operands: list[Marked], iterations: tuple[Any, ...]
    ) -> Sequence[Marked]:
        index, *others = operands
        origins = self.whole(others)

        def branch(body: Body) -> Callable[..., Tree]:
            program = _compat.close(body.program)

            def run(values: Values, origins: Values, seen: Values) -> Tree:
                inner = self._inside(eqn, seen)
                args = list(map(_whole, values, origins))
                outs = inner.run(program.jaxpr, _plain(program.consts), args, iterations)
                return [o.value for o in outs], inner.whole(outs), inner.seen

            return run

        branches = [branch(body) for body in bodies_of(eqn)]
        values = [o.value for o in others]
        which = jnp.asarray(index.value, np.int32)
        outs, marks, self.seen = lax.switch(which, branches, values, origins, self.seen)
        return list(map(_whole, outs, marks))


_ONLY_MOVE = ("transpose", "rev", "neg", "copy")
_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")  # calls, unless they are differentiated


def _plain(values: Values) -> list[Marked]:
    return [Marked(x) for x in values]


def _whole(x: Value, origin: Value | None) -> Marked:
    """Marks a value whose origin is known; None if it cannot be bad, or has no marks."""
    return Marked(x, None if origin is None else Link(None, origin=origin))


def _worst_of(origins: Value) -> Value:
    """Returns the first of the worst origins of the parts of a value."""
    kind = origins[..., KIND]
    count = kind.shape[0]
    last_first = np.arange(count, dtype=np.int32)[::-1].reshape(-1, *[1] * (kind.ndim - 1))
    worst = (kind * np.int32(count) + last_first).max(0)
    first = np.int32(count - 1) - lax.rem(worst, np.int32(count))
    is_first = first == np.arange(count, dtype=np.int32).reshape(last_first.shape)
    return jnp.where(is_first[..., None], origins, np.iinfo(np.int32).min).max(0)


def may_be_bad(x: Value) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def _is_as_bad(eqn: Eqn) -> bool:
    """Whether the result is as its operand, except in place and sign: then it needs no link."""
    if not eqn.invars:  # as of `iota`
        return False
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if eqn.primitive.name == "broadcast_in_dim":
        return has_elements(after)
    alike = facts_of(eqn.primitive).alias or eqn.primitive.name in _ONLY_MOVE
    return alike and before.dtype == after.dtype


def operand_types(eqn: Eqn, watch: Watch | None = None) -> list[Aval]:
    """Returns the types of the operands of an equation, in a lane if one is watched."""
    types = [v.aval for v in eqn.invars]
    if watch is None or not watch.axes:
        return types
    return [
        t if axis is None else t.update(shape=(*t.shape[:axis], *t.shape[axis + 1 :]))
        for t, axis in zip(types, watch.axes, strict=True)
    ]


def blank_view(eqn: Eqn, watch: Watch | None = None) -> list[Value]:
    """Returns what is seen of the operands of an equation before it is met."""
    view = lambda t: jax.eval_shape(lambda: _view(lax.empty((), t.dtype), t.shape))
    return [np.zeros(x.shape, x.dtype) for x in map(view, operand_types(eqn, watch))]


def _view(x: Value, shape: tuple[int, ...] | None = None) -> Value:
    """Returns a value of few elements; of others counts of NaN and infinity, and the range."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # a random key
        return jnp.zeros(0)
    shape = jnp.shape(x) if shape is None else shape
    if all(isinstance(n, int) for n in shape) and np.prod(shape) <= _SHOWN:
        return jnp.broadcast_to(x, shape)
    if not jnp.issubdtype(x.dtype, jnp.number):
        return jnp.zeros(4)
    finite = jnp.isfinite(x)
    return jnp.stack(
        [
            jnp.isnan(x).sum().astype(float),
            jnp.isinf(x).sum().astype(float),
            jnp.min(x.real, where=finite, initial=np.inf).astype(float),
            jnp.max(x.real, where=finite, initial=-np.inf).astype(float),
        ]
    )
