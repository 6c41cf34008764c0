"""Calls: equations that hold another jaxpr, and jaxprs that run one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.interpreters import ad

from batchax import _compat
from batchax.errors import AxisError
from batchax.jaxprs.bodies import Anywhere, bind_call
from batchax.jaxprs.evaluate import evaluate
from batchax.jaxprs.primitive_facts import body_parameter, enter, facts_of
from batchax.jaxprs.types import ClosedJaxpr, Tree, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Positions, RuleOutputs, move_axis
from batchax.kernel.inner import Captured, batch_function, batch_inner, program_behind
from batchax.kernel.interpreter import Place, interpret
from batchax.kernel.named_axes import varying_of, without_mesh
from batchax.kernel.own_primitive import own_primitive
from batchax.kernel.registry import register_looking, register_rule
from batchax.kernel.reverse_rules import by_reverse_rules
from batchax.linalg.table import chooses
from batchax.rules.custom_derivatives import batched_transpose
from batchax.rules.masking import is_inexact
from batchax.rules.sharding import batched_layout, batched_sharding

calls_library = Anywhere(lambda eqn: facts_of(eqn.primitive).library).in_program
"""Whether a program, or one inside it, has a library called on CPUs."""


def in_turn(first: Sequence[Any], second: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Orders the computation of `second` after `first`; the values stay the same.

    Reverse mode computes derivatives in reverse order. Only inexact values wait.
    """
    before = [i for i, x in enumerate(first) if isinstance(x, jax.Array) and is_inexact(x)]
    after = [i for i, x in enumerate(second) if isinstance(x, jax.Array) and is_inexact(x)]
    firsts, seconds = list(first), list(second)
    outs = _bind([first[i] for i in before], [second[i] for i in after])
    for xs, places, values in ((firsts, before, outs[0]), (seconds, after, outs[1])):
        for i, x in zip(places, values, strict=True):
            xs[i] = x
    return firsts, seconds


def zero_after(values: Values) -> Value:
    """Computes an int32 zero from the first entry of each of `values`."""
    # At most 32 bits of a 32-bit number are set, fewer than 2**6, so their count shifted by six
    # bits is zero. XLA does not know that, so it cannot remove the computation.
    zero = np.int32(0)
    for x in values:
        aval = jax.typeof(x)
        extended = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        if extended or 0 in aval.shape or not aval.sharding.mesh.empty:
            continue
        entry = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))
        entry = lax.real(entry) if jnp.issubdtype(x.dtype, jnp.complexfloating) else entry
        ones = lax.population_count(lax.convert_element_type(entry, np.int32))
        zero = lax.add(zero, lax.shift_right_logical(ones, np.int32(6)))
    return zero


def _bind(first: Sequence[Any], second: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    if not first or not second:
        return list(first), list(second)
    outs = in_turn_p.bind(*_compat.varying_alike([*first, *second]), count=len(first))
    return outs[: len(first)], outs[len(first) :]


def _wait(*xs: Value, count: int) -> list[Any]:
    first, second = xs[:count], xs[count:]

    # On a CPU, a select on a value computed from `first` is a data dependency that XLA keeps.
    # Elsewhere no library has the problem.
    def on_processor(first: Values, second: Values) -> list[Any]:
        come = lax.eq(zero_after(first), np.int32(0))
        return [lax.select(come, x, lax.full_like(x, 0)) for x in second]

    return [
        *first,
        *lax.platform_dependent(
            list(first),
            list(second),
            cpu=on_processor,
            default=lambda first, second: second,
        ),
    ]


def _apart(xs: Values, count: int) -> tuple[list[Any], list[Any]]:
    """Splits values that are not symbolic zeros into both sides."""
    there = [type(x) is not ad.Zero for x in xs]
    return (
        [x for x, t in zip(xs[:count], there[:count], strict=True) if t],
        [x for x, t in zip(xs[count:], there[count:], strict=True) if t],
    )


def _jvp(primals: Values, tangents: Values, *, count: int) -> tuple[list[Value], list[Value]]:
    first, second = _bind(*_apart(tangents, count))
    computed = iter([*first, *second])
    dots = [t if type(t) is ad.Zero else next(computed) for t in tangents]
    return in_turn_p.bind(*primals, count=count), dots


def _transpose(cotangents: Values, *operands: Value, count: int) -> list[Any]:
    first, second = _apart(cotangents, count)
    # In reverse mode, `first` waits for `second`.
    second, first = _bind(second, first)
    computed = iter([*first, *second])
    cts = [ct if type(ct) is ad.Zero else next(computed) for ct in cotangents]
    # JAX 0.10 cannot transpose a scan that has a symbolic zero for a stacked result.
    return list(map(ad.instantiate_zeros, cts))


def _batched(axis: Axis, args: Values, axes: Positions, /, *, count: int) -> RuleOutputs:
    return in_turn_p.bind(*args, count=count), axes


in_turn_p = own_primitive(
    "in_turn",
    called="order of calls of a library",
    operations=_wait,
    compute=lambda *xs, count: list(xs),
    types=lambda *avals, count: list(avals),
    facts="linear",
    rule=_batched,
    jvp=_jvp,
    transpose=_transpose,
)


# Most of these primitives are not exported, or exist only once the module that owns them is
# imported.
CALLS = (
    *enter("linear moderate: call closed_call core_call", body=("call_jaxpr",)),
    *enter("linear moderate: eval_jaxpr", body=("call_jaxpr", "jaxpr")),
    *enter("linear moderate again: remat2", body=("jaxpr",)),
    *enter("linear moderate marked: compute_on xla_metadata_call", body=("jaxpr",)),
    *enter("linear moderate marked: program_order", body=("call_jaxpr",)),
)
enter("linear moderate: jit", body=("jaxpr",))
enter("linear moderate: composite")  # whose name means more than its program
enter("endless costly: custom_vmap_call")  # what the user's rule will do is unknown
enter(": call_hi_primitive linear_call remat_opt run_state")


def _call(name: str) -> None:
    @register_looking(name)
    def rule(
        axis: Axis, args: Values, axes: Positions, /, *, place: Place | None = None, **params: Any
    ) -> RuleOutputs:
        primitive = _compat.find_primitive(name)
        assert primitive is not None
        body = _compat.close(params[body_parameter(primitive, params)])
        inner, read = _inside(axis, body, place)
        body, out_axes = batch_inner(inner, body, axes, varying=varying_of(args), read=read)
        return bind_call(primitive, params, body, args), out_axes


for _name in CALLS:
    _call(_name)


def _inside(
    axis: Axis, body: ClosedJaxpr, place: Place | None
) -> tuple[Axis, tuple[bool, ...] | None]:
    """Returns the axis for the body of a call, and which results are read, if that matters."""
    if place is None or not chooses.in_program(body):
        return axis, None
    if axis.small_matrices == "auto" and _compat.name_within_jax(body.jaxpr) in _UNIQUE:
        axis = replace(axis, small_matrices="vectorized")
    run, eqn = place
    return axis, run.reads(eqn)


# Functions of JAX whose results are unique although the vectors they use are not. JAX
# differentiates them by rules that do not involve vectors.
_UNIQUE = frozenset({"_pinv"})


@register_looking("jit")
def _jit(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    jaxpr: ClosedJaxpr,
    place: Place | None = None,
    **params: Any,
) -> RuleOutputs:
    inner, read = _inside(axis, jaxpr, place)
    body, out_axes = batch_inner(inner, jaxpr, axes, varying=varying_of(args), read=read)
    for which, positions in (("in", axes), ("out", out_axes)):
        shardings, layouts = f"{which}_shardings", f"{which}_layouts"
        # Shardings and layouts have an entry for each dimension, so the batch axis needs one.
        params[shardings] = tuple(
            batched_sharding(axis, s, position)
            for s, position in zip(params[shardings], positions, strict=True)
        )
        params[layouts] = tuple(map(batched_layout, params[layouts], positions))
    return _jit_p.bind(*args, jaxpr=body, **params), out_axes


_jit_p: Any = _compat.find_primitive("jit")


@register_rule("composite")
def _composite(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> RuleOutputs:
    # A composite declares to a compiler that its body is the operation of that name, for
    # arrays of these ranks. With one more axis that is no longer so: what remains is
    # the body.
    body = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    return interpret(axis, body.jaxpr, body.consts, args, axes)


@register_rule("run_state")
def _run_state(
    axis: Axis, args: Values, axes: Positions, /, *, jaxpr: Any, **params: Any
) -> RuleOutputs:
    # References are made here: then it is found which of them need a part for each lane.
    def one_example(*xs: Value) -> list[Any]:
        refs = [x if _compat.is_reference(x) else jax.new_ref(x) for x in xs]
        eval_jaxpr(jaxpr, (), *refs)
        return [r if r is x else jax.freeze(r) for r, x in zip(refs, xs, strict=True)]

    return batch_function(axis, one_example, args, axes)


@register_rule("custom_vmap_call")
def _custom_vmap(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    call: ClosedJaxpr,
    rule: Callable[..., tuple[Tree, Tree]],
    in_tree: object,
    out_tree: object,
) -> RuleOutputs:
    in_batched = jax.tree.unflatten(in_tree, [a is not None for a in axes])
    if any(jax.tree.leaves(_closed_over(in_batched))):
        # The function closes over a batched value, of which its rule knows nothing.
        return interpret(axis, call.jaxpr, call.consts, args, axes)
    front = [x if a is None else move_axis(x, a, 0) for x, a in zip(args, axes, strict=True)]
    recording.note(service="user", rule=getattr(rule, "__qualname__", type(rule).__name__))
    out, out_batched = rule(axis.size, list(in_batched), *jax.tree.unflatten(in_tree, front))
    outs, tree = jax.tree.flatten(out)
    flags, flags_tree = jax.tree.flatten(out_batched)
    if tree != out_tree or flags_tree != out_tree:
        raise AxisError(
            "a rule given to custom_vmap must return `out, out_batched`, each of the structure "
            f"of what the function returns, {out_tree}; it returned {tree} and {flags_tree}."
        )
    return outs, [0 if batched else None for batched in flags]


def _closed_over(inputs: Tree) -> Tree:
    """Returns the part of `inputs` that is closed over, of the form (closed_over, arguments).

    A differentiated function has (primals, tangents) of that form.
    """
    first, second = inputs
    return first if isinstance(first, list) else [_closed_over(first), _closed_over(second)]


@register_rule("linear_call")
def _linear_call(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    callee: ClosedJaxpr,
    transpose_thunk: Callable[..., Any],
    num_callee_consts: int,
    num_res: int,
) -> RuleOutputs:
    first_linear = num_callee_consts + num_res
    linear_axes = axes[first_linear:]
    called = _compat.name_and_place(callee.jaxpr)
    captured = Captured(called, program_behind(transpose_thunk))
    batched, out_axes = batch_inner(axis, callee, axes, varying=varying_of(args))

    def forward(residuals: Values, linear: Values) -> list[Any]:
        return eval_jaxpr(batched.jaxpr, batched.consts, *residuals, *linear)

    def transpose(residuals: Values, cotangents: Values) -> list[Any]:
        # The transpose is traced later, where the axis name is out of scope.
        with _compat.named_scope(axis.name, axis.size):
            body, consts = transpose_thunk()
        consts, const_axes = captured.values(consts)
        residuals = residuals[num_callee_consts:]
        residual_axes = axes[num_callee_consts:first_linear]
        first = len(consts) + num_res
        return batched_transpose(
            axis,
            body.jaxpr,
            [*consts, *residuals, *cotangents],
            [*const_axes, *residual_axes, *out_axes],
            range(first, first + len(cotangents)),
            linear_axes,
        )

    outs = jax.custom_derivatives.linear_call(
        forward, transpose, list(args[:first_linear]), list(args[first_linear:])
    )
    return outs, out_axes


@register_rule("call_hi_primitive")
def _call_hi_primitive(axis: Axis, args: Values, axes: Positions, /, *, _prim: Any) -> RuleOutputs:
    by_default = _compat.as_made_by_default(_prim)
    if by_default is not None:  # The object's own method miscounts cotangents of shared outputs.
        with _compat.named_scope(axis.name, axis.size), without_mesh():
            staged = _compat.stage(by_default, _prim.in_avals_flat)
        return interpret(axis, staged.jaxpr, staged.consts, args, axes)
    if _compat.is_checkpoint(_prim):  # its program is batched by the rules of batchax
        body, out_axes = batch_inner(
            axis, _compat.close(_prim.jaxpr), axes, varying=varying_of(args)
        )
        again = type(_prim)(**{**_prim.params, "jaxpr": body})
        return again(*args), out_axes
    # An operation that its author describes by an object, which knows how it is batched, too.
    axes = jax.tree.unflatten(_prim.in_tree, axes)

    def batched(*xs: Value) -> RuleOutputs:
        data = _compat.axis_data(axis.name, axis.size, axis.spmd_name)
        out, out_axes = _prim.batch(data, jax.tree.unflatten(_prim.in_tree, xs), axes)
        return jax.tree.leaves(out), _prim.out_tree.flatten_up_to(out_axes)

    if _compat.by_reverse_rule(_prim) is None:
        return batched(*args)
    staged, out_axes = _compat.stage_described(batched, list(map(jax.typeof, args)))
    return evaluate(staged.jaxpr, staged.consts, args, by_reverse_rules), out_axes
