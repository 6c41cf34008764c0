"""Arrays of a size that lanes find, as large as the greatest that any lane has found.

A condition of 3,600 elements may hold anywhere, but a neighbor list has some hundred entries. So
what follows from sizes that are found is compiled for two bounds, and the least of them that serves
for all lanes runs. What comes before runs once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.extend import core

from batchax import _compat
from batchax.jaxprs.words import Aval, ClosedJaxpr, Eqn, Jaxpr, Value
from batchax.kernel.axis import Axis, Position, axis_to_front
from batchax.kernel.captured import closed_over
from batchax.kernel.inner import batch_function, returning_alike
from batchax.kernel.own_primitive import OF_OPERATIONS, own_primitive
from batchax.rows.padded import Row, run_padded
from batchax.rows.padded_rules.positions import pad_end
from batchax.rows.size_classes import class_switch
from batchax.rows.sizes import (
    Limited,
    Sizes,
    depends_on_sizes,
    finds_inside,
    finds_size,
    is_symbolic,
)
from batchax.rules.masking import find_collective

SHARES = 16, 1
"""What fits into such a part of the elements of a condition has a program of its own."""

_LEAST = 256  # elements of a condition: of fewer, all programs take as long


def run_found(program: ClosedJaxpr, rows: Sequence[Row]) -> tuple[Sizes, list[Row]]:
    """The results of a function of arrays that finds sizes, and these sizes."""
    jaxpr, sizes = program.jaxpr, Sizes({}, {})
    rest = _rest(program)
    if rest is None:
        return sizes, run_padded(sizes, jaxpr, program.consts, rows)
    finds = [eqn for eqn in rest if finds_size(eqn)]
    made = {v for eqn in rest for v in eqn.outvars}
    used = [v for eqn in rest for v in eqn.invars] + [*jaxpr.outvars]
    needed = list(
        dict.fromkeys(v for v in used if not isinstance(v, core.Literal) and v not in made)
    )
    before = run_padded(sizes, jaxpr.replace(outvars=needed), program.consts, rows)
    at = dict(zip(needed, before, strict=True))
    counts = []
    for eqn in finds:
        (condition,), params = eqn.invars, eqn.params
        count, limit = jnp.sum(at[condition].value, dtype=np.int32), params["limit"]
        limited = None if limit is None else Limited(params["called"], limit, count)
        sizes.find(str(params["size"]), condition.aval.shape[0], count, limited)
        counts.append(count)
    most = [sizes.bounds[str(eqn.params["size"])] for eqn in finds]
    bounds = [[-(-bound // share) for bound in most] for share in SHARES]
    moving = [v for v in needed if not isinstance(at[v].value, np.ndarray)]
    body = jaxpr.replace(invars=needed, constvars=[], eqns=rest)
    names = [str(eqn.params["size"]) for eqn in finds]

    def with_room(bound: Sequence[int]) -> ClosedJaxpr:
        def run(*values: Any) -> list[Any]:
            own = Sizes({}, {}, at_most=dict(zip(names, bound, strict=True)))
            given = {**at, **{v: Row(x, at[v].shape) for v, x in zip(moving, values, strict=True)}}
            outs = run_padded(own, body, [], [given[v] for v in needed])
            return [_whole(sizes, jnp.asarray(out.value), out.shape) for out in outs]

        return _compat.stage(run, [jax.typeof(at[v].value) for v in moving])

    programs = tuple(map(with_room, bounds))
    outs = found_switch_p.bind(
        jnp.stack(counts),
        *(at[v].value for v in moving),
        programs=programs,
        bounds=tuple(map(tuple, bounds)),
    )
    shapes = [getattr(v.aval, "shape", ()) for v in jaxpr.outvars]
    return sizes, [Row(x, shape) for x, shape in zip(outs, shapes, strict=True)]


def _rest(program: ClosedJaxpr) -> list[Eqn] | None:
    """The equations that read sizes that are found, or what has one; None if all run at once."""
    jaxpr: Jaxpr = program.jaxpr
    made: set[Any] = set()
    rest: list[Eqn] = []
    for eqn in jaxpr.eqns:
        reads = any(v in made for v in eqn.invars if not isinstance(v, core.Literal))
        if not (reads or depends_on_sizes(eqn)):
            continue
        if finds_size(eqn):
            if reads:
                return None
        elif finds_inside(eqn):
            return None
        rest.append(eqn)
        made.update(eqn.outvars)
    finds = [eqn for eqn in rest if finds_size(eqn)]
    most = [_most(eqn) for eqn in finds]
    if program.effects or find_collective(jaxpr) is not None or any(map(closed_over, jaxpr.eqns)):
        return None
    keys = any(
        jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
        for eqn in rest
        for v in (*eqn.invars, *eqn.outvars)
    )
    enough = finds and min(most) >= _LEAST and len(rest) > len(finds)
    return None if keys or not enough else rest


def _most(eqn: Eqn) -> int:
    size, limit = eqn.invars[0].aval.shape[0], eqn.params["limit"]
    return size if limit is None else min(size, limit)


def _whole(sizes: Sizes, x: Value, shape: Sequence[Any]) -> Any:
    for axis, dim in enumerate(shape):
        if is_symbolic(dim):
            x = pad_end(x, axis, sizes.bound(dim) - x.shape[axis])
    return x


def _operations(counts: Value, *xs: Value, programs: Any, bounds: Any) -> list[Any]:
    program = programs[-1]
    return eval_jaxpr(program.jaxpr, program.consts, *xs)


def _types(counts: Aval, *avals: Aval, programs: Any, bounds: Any) -> list[Any]:
    return list(programs[-1].out_avals)


def _batched(
    axis: Axis, args: Sequence[Value], axes: Sequence[Position], /, *, programs: Any, bounds: Any
) -> tuple[list[Any], Sequence[Position]]:
    if axes[0] is None or axis.mesh_axis is not None or axis.spmd_name is not None:
        run = lambda *xs: _operations(*xs, programs=programs, bounds=bounds)
        return batch_function(axis, run, args, axes)
    most = jnp.max(axis_to_front(axis, args[0], axes[0]), 0)
    room = np.asarray(bounds, np.int32)[:-1]
    number = jnp.sum(jnp.any(most > room, 1), dtype=np.int32)

    def of_bound(program: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Position]]:
        def run(*xs: Any) -> tuple[list[Any], list[Position]]:
            one = lambda *xs: eval_jaxpr(program.jaxpr, program.consts, *xs)
            parts = _parts(axis.size) if program is programs[-1] else 1
            lanes, at = replace(axis, size=axis.size // parts), []

            def of_part(fronted: Sequence[Any]) -> list[Any]:
                each = iter(fronted)
                given = [x if a is None else next(each) for x, a in zip(xs, axes[1:], strict=True)]
                places = [None if a is None else 0 for a in axes[1:]]
                outs, at[:] = batch_function(lanes, one, given, places)
                return [axis_to_front(lanes, x, a) for x, a in zip(outs, at, strict=True)]

            fronted = [
                axis_to_front(axis, x, a)
                for x, a in zip(xs, axes[1:], strict=True)
                if a is not None
            ]
            if parts == 1:
                return of_part(fronted), at
            outs = lax.map(of_part, [x.reshape(parts, -1, *x.shape[1:]) for x in fronted])
            return [lax.collapse(x, 0, 2) for x in outs], at

        return _compat.stage_described(run, list(map(jax.typeof, args[1:])))

    staged = list(map(of_bound, programs))
    alike = returning_alike([program for program, _ in staged])
    outs = class_switch(number, alike, args[1:])
    types = alike[0].out_avals
    shared = [all(a is None for a in each) for each in zip(*(at for _, at in staged), strict=True)]
    outs = [_compat.weakly(x) if t.weak_type else x for x, t in zip(outs, types, strict=True)]
    return [x[0] if s else x for x, s in zip(outs, shared, strict=True)], [
        None if s else 0 for s in shared
    ]


def _parts(lanes: int) -> int:
    """In how many parts lanes run whose arrays hold all elements: each needs little memory."""
    return max(parts for parts in range(1, SHARES[0] + 1) if lanes % parts == 0)


found_switch_p = own_primitive(
    "found_switch",
    called="what follows from sizes that are found",
    operations=_operations,
    types=_types,
    programs=(),
    facts="",
    rule=_batched,
    jvp=OF_OPERATIONS,
    transpose=OF_OPERATIONS,
)
