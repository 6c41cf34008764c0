"""The bounded loop: a loop that ends on a value, but after a known number of steps at most.

``lax.while_loop`` has no derivative in reverse: nobody knows how much it would have to keep.
Where the number of steps has a bound, room for about the square root of that many carries is
enough (`checkpoints.py`): a loop that is differentiated records them on its way.

The loop is one primitive, because of its derivatives, which can be differentiated and batched in
turn and cost what the steps cost that were taken. In forward mode that is a bounded loop again;
in reverse a sweep back over the steps (`reverse_sweep.py`). Their steps are known by number, not
by a value: such a loop takes `count` steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import mapped_aval, unmapped_aval

from batchax import _compat
from batchax.execution.bounded_forms import Form, Results
from batchax.execution.checkpoints import Round, blank_checkpoints, n_checkpoints
from batchax.execution.entries import entry_of, put_entry
from batchax.execution.watched import Steps
from batchax.jaxprs.words import Aval, ClosedJaxpr, Value
from batchax.kernel.inner import written_into
from batchax.kernel.own_primitive import declare

Values = Sequence[Any]
LoopStep = Callable[[Values, Values, Values], tuple[Values, Values]]
"""A function of constants, the carry and entries of the xs, to the carry and the ys."""


bounded_loop_p = declare("bounded_loop")


def bounded_loop(
    body: LoopStep,
    consts: Values,
    carry: Values,
    xs: Values = (),
    *,
    test: Callable[[Values, Values], Any] | None = None,
    test_consts: Values = (),
    guarded: LoopStep | None = None,
    count: Any,
    steps: Steps,
    x_axes: Sequence[int] = (),
    y_axes: Sequence[int] = (),
    kept: Sequence[int] | None = None,
    again: bool = False,
) -> Results:
    """Runs a bounded loop; it may be differentiated and batched.

    Args:
      body: what one step does.
      consts: what is the same at each step.
      carry: the first carry.
      xs: arrays with an entry for each step.
      test: the predicate, a function of `test_consts` and the carry; None: always true.
      test_consts: its constants.
      guarded: a function that computes what `body` does and is differentiated in its place. A
        batched loop has one in which the operands of masked lanes are replaced: derivatives may
        need that where values do not.
      count: how many steps to take, or fewer if `test` says so.
      steps: how many that may be at most.
      x_axes: where each of the `xs` has the axis of the steps.
      y_axes: where each of the ys gets it.
      kept: the values of the carry to record checkpoints of; None: no checkpoints.
      again: whether derivatives compute all carries again.
    """
    (staged, safe), tested, carry, xs = settle(
        body, guarded, consts, carry, xs, x_axes, count, test, test_consts
    )
    (staged, safe), held = _compat.hoist_constants(staged, safe)
    test_held: list[Any] = []
    if tested is not None:
        (tested,), test_held = _compat.hoist_constants(tested)
    test_consts, consts = [*test_held, *test_consts], [*held, *consts]
    sizes = len(test_consts), len(consts), len(carry), steps
    kept = None if kept is None else tuple(kept)
    form = Form(*sizes, tuple(x_axes), tuple(y_axes), kept, again)
    operands = [count, *test_consts, *consts, *carry, *xs]
    outs = bounded_loop_p.bind(*operands, test=tested, body=staged, guarded=safe, form=form)
    return form.results(outs)


def settle(
    body: LoopStep,
    guarded: LoopStep | None,
    consts: Values,
    carry: Values,
    xs: Values,
    x_axes: Sequence[int],
    count: Any,
    test: Callable[[Values, Values], Any] | None = None,
    test_consts: Values = (),
    first_entries: Sequence[Any] = (),
) -> tuple[tuple[Any, Any], Any, list[Any], list[Any]]:
    """The programs of a step, of a guarded one and of the predicate; first carry and xs.

    Entries of these types come before those of the xs.

    Inside ``shard_map`` the type of a carry must be the same before and after a step. So the
    first carry is cast to vary over the axes of the mesh that a step makes it vary over. It, the
    xs and the ys also vary over those that the number of steps varies over.
    """
    const_types = list(map(jax.typeof, consts))
    test_const_types = list(map(jax.typeof, test_consts))
    n, n_test = len(const_types), len(test_const_types)
    carry, xs = list(carry), list(xs)
    deciding = [jax.typeof(count)]
    while True:
        types = list(map(jax.typeof, carry))
        tested = None
        if test is not None:
            predicate = lambda *xs: [test(xs[:n_test], xs[n_test:])]
            tested = _compat.stage(predicate, [*test_const_types, *types])
            deciding = [jax.typeof(count), tested.out_avals[0]]
        xs = [varied(x, deciding) for x in xs]
        whole = zip(map(jax.typeof, xs), x_axes, strict=True)
        entries = [*first_entries, *(mapped_aval(aval.shape[a], a, aval) for aval, a in whole)]

        def staged(step: LoopStep, types: Sequence[Aval] = types) -> ClosedJaxpr:
            def run(*xs: Any) -> list[Any]:
                rest = xs[n + len(types) :]
                new, ys = step(xs[:n], xs[n : n + len(types)], rest)
                new = [varied(x, [t]) for x, t in zip(new, types, strict=True)]
                return [*new, *(varied(y, deciding) for y in ys)]

            return _compat.stage(run, [*const_types, *types, *entries])

        plain = staged(body)
        kept = plain if guarded is None else staged(guarded)
        cast = [
            varied(x, [a, b, *deciding])
            for x, a, b in zip(carry, plain.out_avals, kept.out_avals, strict=False)
        ]
        if all(new is old for new, old in zip(cast, carry, strict=True)):
            return (plain, kept), tested, carry, xs
        carry = cast


def varied(x: Value, like: Sequence[Any]) -> Any:
    """`x`, cast to vary over the axes of the mesh that values of these types vary over."""
    return functools.reduce(_compat.varying_as, like, x)


def run(*operands: Any, test: Any, body: Any, guarded: Any, form: Form) -> list[Any]:
    """The bounded loop as ordinary operations of JAX."""
    count, test_consts, consts, carry, _, _, xs = form.split(operands)
    avals = result_types(test, body, form, jax.typeof(count))
    *blank, n = map(zeros, avals[form.n_carry :])
    ys, kept = blank[: len(form.y_axes)], blank[len(form.y_axes) :]
    most = form.steps.most
    if most == 0:
        form.steps.end(n, results=carry)
        kept = blank_checkpoints(kept) if kept else []
        return list(map(_typed, [*carry, *ys, *kept, n], avals))
    total = None if test is not None else count
    count, places = lax.min(count, np.int32(most)), n_checkpoints(most)

    def going_on(state: Any) -> Any:
        n, carry, *_ = state
        if test is None:
            return n < count
        return (n < count) & written_into(test, [*test_consts, *carry])[0]

    def step(state: Any) -> Any:
        n, carry, ys, now, kept = state
        form.steps.begin(n, total)
        x = [entry_of(x, n, a) for x, a in zip(xs, form.x_axes, strict=True)]
        outs = written_into(body, [*consts, *carry, *x])
        new, entries = outs[: form.n_carry], outs[form.n_carry :]
        ys = [put_entry(y, e, n, a) for y, e, a in zip(ys, entries, form.y_axes, strict=True)]
        n = n + np.int32(1)
        if form.kept is not None:
            now = now.at(n, places)
            pairs = zip(kept, (_compat.unconsumed(new[i]) for i in form.kept), strict=True)
            kept = [put_entry(all_, x, now.place_of(n), 0) for all_, x in pairs]
        return n, new, ys, now, kept

    # Checkpoints that nobody uses, as in forward mode, the compiler leaves out.
    first = None if form.kept is None else Round(jnp.stack([n, n]))
    n, carry, ys, last, arrays = lax.while_loop(going_on, step, (n, carry, ys, first, kept[1:]))
    form.steps.end(n, total, carry)
    kept = [] if last is None else [last.numbers(n, places), *arrays]
    return list(map(_typed, [*carry, *ys, *kept, n], avals))


def zeros(aval: Aval) -> Any:
    """Zeros of this type, sharded and varying over the axes of a mesh as it says."""
    return varied(_compat.filled(aval, 0), [aval])


def _typed(x: Value, aval: Aval) -> Any:
    """`x`, weakly typed if `aval` is."""
    return _compat.weakly(x) if aval.weak_type and not jax.typeof(x).weak_type else x


def result_types(test: Any, body: Any, form: Form, count: Any) -> list[Any]:
    """The types of what `run` returns: last carry, ys, checkpoints if recorded, steps."""
    outs = body.out_avals
    ys = [
        unmapped_aval(form.steps.most, a, aval)
        for a, aval in zip(form.y_axes, outs[form.n_carry :], strict=True)
    ]
    carry = body.in_avals[form.n_consts : form.n_consts + form.n_carry]
    decided = count if test is None else test.out_avals[0]
    steps = _compat.scalar_like(decided, np.dtype(np.int32))
    return [*outs[: form.n_carry], *ys, *checkpoint_types(steps, carry, form), steps]


def no_checkpoints(body: Any, form: Any) -> list[Any]:
    """Checkpoints of one example, with nothing kept: a sweep makes its own then."""
    carry = body.in_avals[form.n_consts : form.n_consts + form.n_carry]
    types = checkpoint_types(jax.typeof(np.int32(0)), carry, form)
    return blank_checkpoints(list(map(zeros, types)))


def checkpoint_types(steps: Any, carry: Sequence[Value], form: Any) -> list[Any]:
    """The types of the checkpoints of a loop, from that of a number of steps and of its carry."""
    if form.kept is None:
        return []
    size, kept = n_checkpoints(form.steps.most), (carry[i] for i in form.kept)
    return [unmapped_aval(size, 0, aval.strip_weak_type()) for aval in (steps, *kept)]
