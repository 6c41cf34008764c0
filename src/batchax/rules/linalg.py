"""Linear algebra: decompositions, small matrices of many lanes on a CPU, and implicit solves."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad
from jax.lax import linalg

from batchax import _compat
from batchax.cache import Cache
from batchax.jaxprs.bodies import with_inside
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Positions, RuleOutputs, match_axis, move_axis
from batchax.kernel.inner import ANYWHERE, batch_function, batch_inner, batched_aval, example_aval
from batchax.kernel.interpreter import Place, hide_from_debug_nans
from batchax.kernel.named_axes import vary_over, varying_of
from batchax.kernel.own_primitive import Flat, declare, own_primitive, tangents_of, transposed
from batchax.kernel.registry import leading_rule, register_looking, register_rule
from batchax.linalg import table
from batchax.linalg.pays import LOOP_STEPS
from batchax.linalg.table import DECOMPOSITIONS, Decomposition, lanes_last_pays
from batchax.rules import sorting_network


def least_lanes(size: int, programs: Sequence[ClosedJaxpr]) -> int:
    """Returns the fewest lanes that run all operations of programs in a loop as `size` lanes do."""
    eqns = [e for p in programs for e in with_inside(p.jaxpr.eqns) if _is_for_many(e, size)]
    alike = lambda lanes: all(_is_for_many(eqn, lanes) for eqn in eqns)
    # Sizes above a threshold use the same strategy, so a binary search finds it.
    return 1 + bisect.bisect_left(range(1, size + 1), True, key=alike) if eqns else 1


def _is_for_many(eqn: Eqn, lanes: int) -> bool:
    """Returns whether so many lanes in a loop run an equation by a strategy for many lanes."""
    examples = [v.aval for v in eqn.invars]
    if eqn.primitive is lax.sort_p and len(examples) > 1:
        types = [jax.ShapeDtypeStruct((lanes, *x.shape), x.dtype) for x in examples]
        dimension, num_keys = eqn.params["dimension"], eqn.params["num_keys"]
        return sorting_network.pays(types, dimension + 1, num_keys, in_loop=LOOP_STEPS)
    if not all(isinstance(n, int) and n for x in examples for n in getattr(x, "shape", ())):
        return False
    return together(eqn.primitive.name, examples, lanes, eqn.params, in_loop=LOOP_STEPS)


small_matrices_p = declare("small_matrices")


def with_lanes_last(
    primitive: _compat.Primitive,
    axis: Axis,
    args: Values,
    axes: Positions,
    params: dict[str, Any],
    place: Place | None = None,
) -> tuple[Any, Any] | None:
    """Returns the outputs of a rule of `primitive`, with lanes last.

    None if that is slower, or would change more than the rounding of the results that are read.
    """
    decomposition = DECOMPOSITIONS.get(primitive.name)
    if decomposition is None:
        return None
    if decomposition.ranks is not None:
        recording.note(small_matrices="library")
    if not _may(axis, args):
        return None
    examples = [example_aval(axis, jax.typeof(x), a) for x, a in zip(args, axes, strict=True)]
    ranks = decomposition.ranks or tuple(x.ndim for x in examples)
    if not together(primitive.name, examples, axis.size, params, axis.in_loop):
        return None
    if _reads_choice(axis, decomposition, params, place):
        recording.note(small_matrices="choice")
        return None
    # One example may be a batch of matrices, as ``jax.vmap`` makes it.
    # Its results are seldom operands of others, so lanes in front stay there.
    batch = examples[0].shape[: examples[0].ndim - ranks[0]]
    first = decomposition.alone and not batch and all(a == 0 for a in axes)
    operands = [
        x if first else _to_last(match_axis(axis, x, a, -1), len(batch))
        for x, a in zip(args, axes, strict=True)
    ]
    recording.note(small_matrices="together")
    explicit = axis.small_matrices == "vectorized"
    outs = _bind(operands, of=primitive.name, first=first, explicit=explicit, **params)
    placed = outs if first else [_from_last(x, (*batch, axis.size)) for x in outs]
    at = [_at(x, first) for x in placed]
    return (placed, at) if primitive.multiple_results else (placed[0], at[0])


def _reads_choice(
    axis: Axis, decomposition: Decomposition, params: dict[str, Any], place: Place | None
) -> bool:
    """Returns whether results are read that are not unique, such as the signs of vectors."""
    # A lane gets those of the library at any batch size, unless the user asked for the faster way.
    if axis.small_matrices == "vectorized" or not params.get("compute_uv", True):
        return False
    if place is None:
        return bool(decomposition.choices)
    run, eqn = place
    read = run.reads(eqn)
    return any(read[i] for i in decomposition.choices)


def together(
    primitive: str, examples: Sequence[Aval], lanes: int, params: dict[str, Any], in_loop: int
) -> bool:
    """Returns whether it is faster to run a primitive with lanes last, by the operand types."""
    decomposition = DECOMPOSITIONS.get(primitive)
    if decomposition is None:
        return False
    ranks = decomposition.ranks or tuple(x.ndim for x in examples)
    lane = [
        jax.ShapeDtypeStruct(x.shape[x.ndim - r :], x.dtype)
        for x, r in zip(examples, ranks, strict=True)
    ]
    batch = examples[0].shape[: examples[0].ndim - ranks[0]]
    return lanes_last_pays(primitive, lane, lanes * math.prod(batch), params, in_loop)


def _may(axis: Axis, args: Values) -> bool:
    """Returns whether lanes may be merged with other dimensions, and all sizes are known."""
    if axis.small_matrices == "library" or axis.mesh_axis is not None or axis.spmd_name is not None:
        return False
    types = list(map(jax.typeof, args))
    sizes = [axis.size, *(d for x in types for d in x.shape)]
    sharded = any(entry is not None for x in types for entry in x.sharding.spec)
    return not sharded and all(isinstance(d, int) for d in sizes) and 0 not in sizes


def _to_last(x: Value, batch: int) -> jax.Array:
    """Moves ``[*batch, *matrix, lanes]`` to ``[*matrix, all lanes]``."""
    if not batch:
        return x
    matrix = range(batch, x.ndim - 1)
    shape = [*(x.shape[d] for d in matrix), math.prod(x.shape[:batch]) * x.shape[-1]]
    return lax.reshape(x, shape, dimensions=[*matrix, *range(batch), x.ndim - 1])


def _from_last(x: Value, lanes: Sequence[int]) -> jax.Array:
    """Moves ``[*matrix, all lanes]`` to ``[*batch, *matrix, lanes]``."""
    if len(lanes) == 1:
        return x
    matrix = x.ndim - 1
    x = lax.reshape(x, (*x.shape[:-1], *lanes))
    return lax.transpose(x, [*range(matrix, x.ndim - 1), *range(matrix), x.ndim - 1])


def _bind(operands: Values, **params: Any) -> list[Any]:
    varying = varying_of(operands)
    over = frozenset().union(*varying)
    return small_matrices_p.bind(*vary_over(operands, tuple(over - v for v in varying)), **params)


def _of_jax(of: str, params: dict[str, Any]) -> Callable[..., Any]:
    primitive: Any = _compat.find_primitive(of)

    def run(*operands: Value) -> list[Any]:
        out = primitive.bind(*operands, **params)
        return list(out) if primitive.multiple_results else [out]

    return run


def _at(x: Aval | Value, first: bool) -> int:
    return 0 if first else x.ndim - 1


def _operations(*operands: Value, of: str, first: bool, explicit: bool, **params: Any) -> list[Any]:
    at = 0 if first else -1  # a product has no axis of lanes: it is batched
    return jax.vmap(_of_jax(of, params), at, at)(*operands)


def _on_cpu(*operands: Value, of: str, first: bool, explicit: bool, **params: Any) -> list[Any]:
    types = _types(*map(jax.typeof, operands), of=of, first=first, explicit=explicit, **params)
    library = functools.partial(_operations, of=of, first=first, explicit=explicit, **params)
    return table.with_lanes_last(of, operands, types, params, first, library)


def _compute(*operands: Value, **params: Any) -> list[Any]:
    compiled = lambda: jax.jit(functools.partial(small_matrices_p.bind, **params))
    run = _programs.get(tuple(sorted(params.items())), compiled)
    with jax.disable_jit(False):  # which is for the user's programs
        # After a NaN, JAX would run it operation by operation, which is to compile it again.
        return hide_from_debug_nans(run, operands, params["of"])


_programs = Cache("decompositions of small matrices, outside of jit", most=256)


def _lanes(x: Aval | Value, first: bool, explicit: bool) -> Axis:
    option = "vectorized" if explicit else "auto"
    return Axis(x.shape[_at(x, first)], small_matrices=option)


def _types(*avals: Aval, of: str, first: bool, explicit: bool, **params: Any) -> list[Any]:
    axis = _lanes(avals[0], first, explicit)
    primitive: Any = _compat.find_primitive(of)
    one = [example_aval(axis, x, _at(x, first)) for x in avals]
    out, _ = primitive.abstract_eval(*one, **params)
    outs = list(out) if primitive.multiple_results else [out]
    return [batched_aval(axis, x, 0 if first else x.ndim) for x in outs]


def _all_lanes(function: Flat, operands: Values, first: bool, explicit: bool) -> list[Any]:
    """Applies a function of one matrix of each operand to those of all lanes."""
    axis = _lanes(operands[0], first, explicit)
    outs, axes = batch_function(axis, function, operands, [_at(x, first) for x in operands])
    return [
        match_axis(axis, x, a, 0 if first else x.ndim - (a is not None))
        for x, a in zip(outs, axes, strict=True)
    ]


def _jvp(
    primals: Values, tangents: Values, *, of: str, first: bool, explicit: bool, **params: Any
) -> tuple[list[Value], list[Value]]:
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    types = _types(*map(jax.typeof, primals), of=of, first=first, explicit=explicit, **params)
    smooth = [k for k, t in enumerate(types) if jnp.issubdtype(t.dtype, jnp.inexact)]

    def one(*xs: Value) -> list[Any]:
        outs, dots = tangents_of(
            _of_jax(of, params), xs[: len(primals)], moving, xs[len(primals) :], smooth
        )
        return [*outs, *dots]

    # The derivative rule of JAX for one matrix, batched by the rules of batchax.
    both = _all_lanes(one, [*primals, *(tangents[i] for i in moving)], first, explicit)
    outs, dots = both[: len(types)], iter(both[len(types) :])
    return outs, [
        next(dots) if k in smooth else ad.Zero(t.to_tangent_aval()) for k, t in enumerate(types)
    ]


def _transpose(
    cotangents: Values, *operands: Value, of: str, first: bool, explicit: bool, **params: Any
) -> list[Any]:
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    given = [k for k, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    results: list[Any] = [None] * len(operands)
    for i in linear:
        results[i] = ad.Zero(operands[i].aval)
    if not given:
        return results
    others = [x for x in operands if not ad.is_undefined_primal(x)]
    axis = _lanes(cotangents[given[0]], first, explicit)
    types = [example_aval(axis, x, _at(x, first)) for x in (operands[i].aval for i in linear)]

    def one(*xs: Value) -> list[Any]:
        back = transposed(_of_jax(of, params), xs[: len(others)], linear, types, given)
        return back(xs[len(others) :])

    outs = _all_lanes(one, [*others, *(cotangents[k] for k in given)], first, explicit)
    for i, x in zip(linear, outs, strict=True):
        results[i] = x
    return results


def _rule(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    of: str,
    first: bool,
    explicit: bool,
    **params: Any,
) -> RuleOutputs:
    """Merges the lanes of both axes."""
    if not _may(axis, args):
        plain = replace(axis, small_matrices="library")
        run = functools.partial(_operations, of=of, first=first, explicit=explicit, **params)
        return batch_function(plain, run, args, axes)
    merged = []
    for x, a in zip(args, axes, strict=True):
        at = 0 if first else x.ndim - 1 - (a is not None)
        x = match_axis(axis, x, a, at)
        merged.append(
            lax.reshape(x, (*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :]))
        )
    recording.note(small_matrices="together")
    outs = _bind(merged, of=of, first=first, explicit=explicit, **params)
    at = [_at(x, first) for x in outs]
    apart = [
        lax.reshape(x, (*x.shape[:i], axis.size, x.shape[i] // axis.size, *x.shape[i + 1 :]))
        for x, i in zip(outs, at, strict=True)
    ]
    return apart, at


own_primitive(
    small_matrices_p,
    called="a decomposition of small matrices",
    operations=_operations,
    on_cpu=_on_cpu,
    compute=_compute,
    checked=_operations,
    types=_types,
    facts="library",
    rule=_rule,
    jvp=_jvp,
    transpose=_transpose,
)


enter(
    """
    : lu_pivots_to_permutation
    library: cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu ormqr
      qr schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve
    """
)

RANKS = {
    "cholesky": (2,),
    "eig": (2,),
    "eigh": (2,),
    "geqp3": (2, 1),
    "geqrf": (2,),
    "hessenberg": (2,),
    "householder_product": (2, 1),
    "lu": (2,),
    "lu_pivots_to_permutation": (1,),
    "ormqr": (2, 1, 2),
    "qr": (2,),
    "schur": (2,),
    "svd": (2,),
    "symmetric_product": (2, 2),
    "tridiagonal": (2,),
}


def _decomposition(primitive: _compat.Primitive, ranks: Sequence[int]) -> None:
    @register_looking(primitive)
    def rule(
        axis: Axis, args: Values, axes: Positions, /, *, place: Place | None = None, **params: Any
    ) -> RuleOutputs:
        return _each_its_own(primitive, ranks, axis, args, axes, params, place)


def _each_its_own(
    primitive: _compat.Primitive,
    ranks: Sequence[int],
    axis: Axis,
    args: Values,
    axes: Positions,
    params: dict[str, Any],
    place: Place | None = None,
) -> tuple[Any, Any]:
    small = with_lanes_last(primitive, axis, args, axes, params, place)
    return leading_rule(primitive, ranks, axis, args, axes, **params) if small is None else small


for _name, _ranks in RANKS.items():
    _primitive = _compat.find_primitive(_name)
    if _primitive is not None:
        _decomposition(_primitive, _ranks)


@register_rule(linalg.triangular_solve_p)
def _triangular_solve(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> RuleOutputs:
    if axes[0] is not None:
        return _each_its_own(linalg.triangular_solve_p, (2, 2), axis, args, axes, params)
    solve = partial(linalg.triangular_solve_p.bind, args[0], **params)
    assert axes[1] is not None
    return _merged(solve, args[1], axes[1], -1 if params["left_side"] else -2)


def _merged(solve: Callable[[Any], Any], b: Value, position: int, dim: int) -> tuple[Any, int]:
    """Solves with the lanes as additional right-hand sides, along `dim` from the end."""
    start = b.ndim + dim - 1
    if position not in (start, start + 1):  # next to `dim`, so that a reshape merges the two
        b, position = move_axis(b, position, start), start
    shape = b.shape
    merged = lax.reshape(b, (*shape[:start], shape[start] * shape[start + 1], *shape[start + 2 :]))
    return lax.reshape(solve(merged), shape), position


@register_rule(linalg.cholesky_update_p)
def _cholesky_update(axis: Axis, args: Values, axes: Positions, /) -> RuleOutputs:
    # The primitive takes no batch dimensions at all.
    (out,), (position,) = batch_function(axis, _rank_one_update, args, axes)
    return out, position


def _rank_one_update(r: Value, w: Value) -> list[Any]:
    """Computes the upper triangular factor of ``r.T @ r + outer(w, w)``, by Givens rotations."""

    def rotate(w: Value, row_and_index: tuple[Value, Value]) -> tuple[Any, Any]:
        row, k = row_and_index
        x, y = row[k], w[k]
        none = y == 0
        scale = jnp.where(none, 1, jnp.maximum(abs(x), abs(y)))
        # Scaled, so that squares neither overflow nor underflow.
        x, y = x / scale, y / scale
        length = jnp.where(none, 1, jnp.sqrt(x * x + y * y))
        c, s = jnp.where(none, 1, x / length), y / length
        return c * w - s * row, c * row + s * w

    return [lax.scan(rotate, w, (r, jnp.arange(w.shape[0])))[1]]


enter(": custom_linear_solve")

_Programs = Any
"""The programs of a solve, as JAX's private named tuple."""


@register_rule(lax.linear_solve_p)
def _custom_linear_solve(
    axis: Axis, args: Values, axes: Positions, /, *, const_lengths: Sequence[int], jaxprs: _Programs
) -> RuleOutputs:
    # The operands are the constants of each program (matvec, vecmat, solve,
    # transpose_solve), one program after the other, and then `b`.
    ends = [sum(const_lengths[: i + 1]) for i in range(len(const_lengths))]
    const_axes = [axes[end - n : end] for end, n in zip(ends, const_lengths, strict=True)]
    start = ends[-1]
    b_axes, aux_axes = _solution_axes(
        axis, jaxprs, const_axes, axes[start:], len(jaxprs.solve.out_avals)
    )

    def for_all_lanes(program: ClosedJaxpr, its_axes: Positions) -> ClosedJaxpr | None:
        if program is None:
            return None
        # Where no batch axis is wanted, none turns up. Two of the four have no auxiliary data.
        places = [ANYWHERE if a is None else a for a in (*b_axes, *aux_axes)]
        places = places[: len(program.out_avals)]
        return batch_inner(axis, program, [*its_axes, *b_axes], places)[0]

    b = [
        x if to is None else match_axis(axis, x, a, to)
        for x, a, to in zip(args[start:], axes[start:], b_axes, strict=True)
    ]
    outs = lax.linear_solve_p.bind(
        *args[:start],
        *b,
        const_lengths=const_lengths,
        jaxprs=type(jaxprs)(*map(for_all_lanes, jaxprs, const_axes)),
    )
    return outs, [*b_axes, *aux_axes]


def _solution_axes(
    axis: Axis, programs: _Programs, const_axes: Sequence[Positions], given: Positions, n_out: int
) -> tuple[list[int | None], list[int | None]]:
    """Returns which leaves of the solution, and of the auxiliary data, have the batch axis.

    It is in front.
    """
    # Arguments and results of all programs, derivatives included, have the type of `b`. So leaf by
    # leaf all of them have the axis or none does: add what any program makes batched, up to a fixed
    # point.
    n = len(given)
    axes: list[int | None] = [None if a is None else 0 for a in given] + [None] * (n_out - n)
    while None in axes:
        grown = list(axes)
        for program, its_axes in zip(programs, const_axes, strict=True):
            if program is None:
                continue
            _, out_axes = batch_inner(axis, program, [*its_axes, *axes[:n]])
            for i, a in enumerate(out_axes):
                grown[i] = grown[i] if a is None else 0
        if grown == axes:
            break
        axes = grown
    return axes[:n], axes[n:]
