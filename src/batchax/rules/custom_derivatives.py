"""Functions with custom derivative rules: the rules are batched with them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal, Var
from jax.interpreters import ad

from batchax import _compat
from batchax.cache import Cache, cached_on
from batchax.errors import ArgumentTypeError, UnsupportedError
from batchax.jaxprs.bodies import Anywhere
from batchax.jaxprs.primitive_facts import enter, facts_of
from batchax.jaxprs.types import Aval, ClosedJaxpr, Jaxpr, Value, Values
from batchax.kernel.axis import Axis, Position, Positions, RuleOutputs, lanes_vary_over, match_axis
from batchax.kernel.inner import (
    Captured,
    batched_aval,
    closes_over_tracers,
    emitted,
    example_aval,
    may_be_differentiated,
    program_behind,
    remembered,
    stage_described,
)
from batchax.kernel.interpreter import interpret
from batchax.kernel.named_axes import (
    Varying,
    as_without_mesh,
    gives_index,
    types_varying,
    without_mesh,
)
from batchax.kernel.registry import register_rule


class CallOutputs:
    """Settles where the outputs of a call have their batch axes."""

    def __init__(self, kind: str, axis: Axis, body: ClosedJaxpr, in_axes: Positions) -> None:
        self.axis, self.types = axis, body.out_avals
        self.signature = kind, tuple(body.in_avals), tuple(in_axes), tuple(body.out_avals)
        self.axes: list[Position] = []
        self.known = False
        self.around = _around.get({})

    def settle(self, axes: Positions, also: Callable[[], Positions]) -> None:
        """Decides the axes: those of `axes`, and where it has None those of `also`.

        `also` gives axes to outputs whose derivatives depend on the batch although their values do
        not.
        """
        if self.known:
            return
        inexact = (jnp.issubdtype(t.dtype, jnp.inexact) for t in self.types)
        # `also` is only evaluated in doubt, as it may fail for a function that is not
        # differentiable.
        if any(a is None and may for a, may in zip(axes, inexact, strict=True)):
            around = _around.get({})
            # A call of the function inside its own rule uses the axes of the outer call.
            if self.signature in around:
                axes = union(axes, around[self.signature].axes or axes)
            else:
                axes = union(axes, also())
        self.axes, self.known = list(axes), True

    @contextmanager
    def in_rule(self) -> Iterator[None]:
        """Marks a running rule: calls of the same function in it use the axes decided here."""
        # Such a call does not run the rule, which would call the function again without end. A call
        # inside a rule runs its own rule later, for a derivative of higher order, and must find the
        # axes that it found inside.
        token = _around.set({**self.around, **_around.get({}), self.signature: self})
        try:
            yield
        finally:
            _around.reset(token)

    def place(self, values: Values, axes: Positions) -> list[Any]:
        """Moves batch axes of outputs to where `settle` decided.

        Raises UnsupportedError for a value that depends on the batch where that was not known.
        """
        for position, to in zip(axes, self.axes, strict=True):
            if to is None and position is not None:
                raise UnsupportedError(
                    "a derivative rule makes an output depend on the batch that does not "
                    "depend on it where the function is not differentiated. Let the function "
                    "return a value for each example there: add zero times a mapped argument."
                )
        return [
            match_or_zeros(self.axis, x, a, w)
            for x, a, w in zip(values, axes, self.axes, strict=True)
        ]


# Rules inside rules find axes of derivatives of higher order. They run up to this order: a rule may
# call another function without end. Spherical harmonics of e3nn return more outputs in each.
_ORDERS = 3

_around: ContextVar[dict[Any, CallOutputs]] = ContextVar("batchax_rules_around")
"""The calls whose rules are running, by what tells a call of the same function from others."""


def inside_rule() -> bool:
    """Returns whether a rule runs, which may decide where calls have their outputs."""
    return bool(_around.get(None))


def union(first: Positions, second: Positions) -> list[Position]:
    """Merges positions: those of `first`, and where it has None those of `second`."""
    return [b if a is None else a for a, b in zip(first, second, strict=True)]


def if_differentiable(find: Callable[[], Positions], n_out: int) -> Positions:
    """Returns what `find` returns by running a rule, or None for each output if the rule fails."""
    try:
        return find()
    except Exception:
        # A rule that raises must not fail a call that is not differentiated. If it is, the
        # rule runs again, and says so itself.
        return [None] * n_out


def if_later(find: Callable[[], Positions], types: Sequence[Aval]) -> Positions:
    """Returns what `find` returns if the call may be differentiated later, else None for each.

    Beyond `_ORDERS` each output whose type has derivatives gets a batch axis.
    """
    if not (_compat.tracing() and may_be_differentiated()):
        return [None] * len(types)
    if len(_around.get({})) >= _ORDERS:
        return [0 if jnp.issubdtype(t.dtype, jnp.inexact) else None for t in types]
    return if_differentiable(find, len(types))


def batched_transpose(
    axis: Axis, jaxpr: Jaxpr, args: Values, axes: Positions, cotangents: range, in_axes: Positions
) -> list[Any]:
    """Runs a per-example reverse rule for all lanes.

    `cotangents` is the range of cotangents in `args`; the others are residuals. `in_axes` are the
    batch axes of the primal inputs, None for one that lanes share.
    """
    shared = [axes[i] is None and i in cotangents for i in range(len(args))]
    from_shared = reached(jaxpr, shared)
    from_lanes = reached(jaxpr, [a is not None for a in axes])
    summed = [a is None for a in in_axes]
    # If a sum over lanes has a term from a shared cotangent, only the first lane gets that
    # cotangent and the others get zero, so it counts once.
    if any(map(all, zip(from_shared, from_lanes, summed, strict=True))):
        args = [_in_first_lane(axis, x) if s else x for x, s in zip(args, shared, strict=True)]
        axes = [0 if s else a for a, s in zip(axes, shared, strict=True)]
    outs, out_axes = interpret(axis, jaxpr, (), args, axes)
    return [_sum_or_match(axis, x, a, to) for x, a, to in zip(outs, out_axes, in_axes, strict=True)]


def reached(jaxpr: Jaxpr, marked: Sequence[bool]) -> list[bool]:
    """Returns which outputs of `jaxpr` depend on the `marked` inputs."""
    marks = {v for v, m in zip(jaxpr.invars, marked, strict=True) if m}
    for eqn in jaxpr.eqns:
        if any(_is_in(marks, v) for v in eqn.invars):
            marks.update(eqn.outvars)
    return [_is_in(marks, v) for v in jaxpr.outvars]


def multiplies(
    axis: Axis, jaxpr: Jaxpr, cotangents: Sequence[bool], batched: Sequence[bool]
) -> bool:
    """Returns whether a reverse rule computes values by lane from shared cotangents."""
    # It does if a value that is linear in `cotangents` meets one that varies by lane, from
    # `batched` inputs or the lane index, in an operation other than an addition.
    linear = {v for v, m in zip(jaxpr.invars, cotangents, strict=True) if m}
    varying = {v for v, m in zip(jaxpr.invars, batched, strict=True) if m}
    for eqn in jaxpr.eqns:
        by = [i for i, v in enumerate(eqn.invars) if _is_in(linear, v)]
        over = [i for i, v in enumerate(eqn.invars) if _is_in(varying, v)]
        additive = facts_of(eqn.primitive).additive
        if not additive and any(i != j for i in by for j in over):
            return True
        if by:
            linear.update(eqn.outvars)
        if over or gives_index(eqn, axis.name):
            varying.update(eqn.outvars)
    return False


def match_or_zeros(axis: Axis, x: Value, source: Position, destination: Position) -> jax.Array:
    """Moves the batch axis of `x` to `destination`, also for the type float0."""
    if source == destination:
        return x
    assert destination is not None
    if jax.typeof(x).dtype != jax.dtypes.float0:
        return match_axis(axis, x, source, destination)
    # float0 is the type of cotangents of integers. JAX has few operations on it, but makes zeros,
    # also where the number of lanes is a size of rows, which NumPy can't.
    shape = [n for d, n in enumerate(np.shape(x)) if d != source]
    shape.insert(destination, axis.size)
    return lax.full(shape, 0, jax.dtypes.float0)


def _sum_or_match(axis: Axis, x: Value, source: Position, destination: Position) -> jax.Array:
    # An input that lanes share gets the sum of its cotangents over the lanes.
    if destination is None and source is not None:
        x, over = jnp.sum(x, axis=source), lanes_vary_over(axis)
        return lax.psum(x, tuple(over)) if over else x
    return match_or_zeros(axis, x, source, destination)


def _in_first_lane(axis: Axis, x: Value) -> jax.Array:
    """Makes a batch, at axis 0, of `x` in the first lane and zeros in the others."""
    if jax.typeof(x).dtype == jax.dtypes.float0:
        return match_or_zeros(axis, x, None, 0)
    others = (0, axis.size - 1, 0)
    zero = jnp.zeros((), x.dtype)
    return lax.pad(lax.expand_dims(x, (0,)), zero, [others] + [(0, 0, 0)] * x.ndim)


def _is_in(marks: set[Any], v: Var | Literal) -> bool:
    return not isinstance(v, Literal) and v in marks


@dataclass(frozen=True)
class Residuals:
    """Describes the residuals that a forward run returned."""

    axes: Positions  # where each has the batch axis
    # Mesh axes that they, and after them the outputs, were traced to vary over.
    varying: Varying
    # The constant that each is for any arguments, else None. A reverse rule may use it in Python:
    # for example, which arguments are differentiated.
    known: Sequence[Any]
    perturbed: Sequence[bool]  # the inputs that were differentiated

    def computed(self, residuals: Iterable[Value]) -> list[Any]:
        """Selects the residuals that are not known constants."""
        return [x for x, number in zip(residuals, self.known, strict=True) if number is None]


class ReverseRule:
    """Runs the reverse rule of a ``custom_vjp`` function for all lanes."""

    def __init__(
        self,
        axis: Axis,
        bwd: Any,
        captured: Captured,
        in_axes: Positions,
        types: Sequence[Aval],
        owner: object,
    ) -> None:
        self.axis, self.bwd, self.captured, self.in_axes = axis, bwd, captured, in_axes
        self.types = types  # of the inputs
        # The rule for one example is traced once for its `owner`, as a loop batches what is in it
        # several times. None: the rule closes over values of a trace. Then it is kept here, as long
        # as this call.
        self.owner = owner
        self._staged: dict[Any, Any] = {}

    def __call__(
        self, kept: Residuals, residuals: Values, cotangents: Values, ct_axes: Positions
    ) -> Any:
        axis = self.axis
        types = map(_type, [*residuals, *cotangents])
        staged, zeros, logs, has_logs = self._stage(types, ct_axes, kept)
        (rule,), consts = _compat.hoist_constants(staged)
        consts, const_axes = self.captured.values(consts)
        residuals, residual_axes = kept.computed(residuals), kept.computed(kept.axes)
        given = [(c, a) for c, a in zip(cotangents, ct_axes, strict=True) if not _is_zero(c)]
        first = len(consts) + len(residuals)
        out_axes = [a for a, zero in zip(self.in_axes, zeros, strict=True) if zero is None]
        out_axes += [0] * logs.num_leaves
        outs = batched_transpose(
            axis,
            rule.jaxpr,
            [*consts, *residuals, *(c for c, _ in given)],
            [*const_axes, *residual_axes, *(a for _, a in given)],
            range(first, first + len(given)),
            out_axes,
        )
        rest = iter(outs)
        results = [
            _counted_once(next(rest), t)
            if zero is None
            else ad.Zero(batched_aval(axis, zero.aval, a))
            for zero, a, t in zip(zeros, self.in_axes, self.types, strict=True)
        ]
        return (results, jax.tree.unflatten(logs, list(rest))) if has_logs else results

    def axes_needed(
        self, kept: Residuals, residuals: Values, outs: Values, out_axes: Positions
    ) -> Positions:
        """Returns axis 0 for each unbatched output whose cotangent is needed by lane."""
        types = [*map(_type, residuals), *(jax.typeof(x).to_tangent_aval() for x in outs)]
        staged, zeros, _, _ = self._stage(types, out_axes, kept)
        (rule,), consts = _compat.hoist_constants(staged)
        _, const_axes = self.captured.values(consts)
        positions = [*const_axes, *kept.computed(kept.axes), *out_axes]
        batched = [a is not None for a in positions]
        in_axes = [a for a, zero in zip(self.in_axes, zeros, strict=True) if zero is None]
        # Needed by lane are cotangents that reach that of a batched input, and those that are
        # multiplied by something that differs between lanes.
        needed: list[Position] = []
        for k, out_axis in enumerate(out_axes):
            one = [i == len(positions) - len(out_axes) + k for i in range(len(positions))]
            hits = zip(reached(rule.jaxpr, one), in_axes, strict=False)  # logs follow
            by_lane = any(hit and a is not None for hit, a in hits)
            by_lane = by_lane or multiplies(self.axis, rule.jaxpr, one, batched)
            needed.append(0 if out_axis is None and by_lane else None)
        return needed

    def _stage(self, types: Iterable[Aval], ct_axes: Positions, kept: Residuals) -> Any:
        """Traces the rule for one example.

        Returns it, for inputs and outputs that are not symbolic zeros, the zeros among its
        cotangents, the structure of its logs, and whether it has any.
        """
        axis = self.axis

        def example(aval: Aval, a: Position, over: frozenset[Hashable]) -> Aval:
            # Residuals and cotangents must have the mesh types that the forward run was traced for.
            aval = _compat.with_varying_axes(example_aval(axis, aval, a), over)
            return as_without_mesh([aval])[0]

        inputs = [
            SymbolicZero(example(t.aval, a, over)) if _is_zero(t) else example(t, a, over)
            for t, a, over in zip(types, [*kept.axes, *ct_axes], kept.varying, strict=True)
        ]
        numbers = [*kept.known, *[None] * len(ct_axes)]
        # True is 1, and not the same, and 0.0 is -0.0.
        typed = [(type(x), None if x is None else np.asarray(x).tobytes()) for x in numbers]
        key = (*((x.aval, True) if _is_zero(x) else (x, False) for x in inputs), *typed)
        build = lambda: self._stage_for(inputs, numbers)
        if self.owner is not None and not inside_rule():
            place = axis.name, axis.size, axis.mesh_axis, tuple(kept.perturbed)
            return remembered(self.owner, ("reverse rule", *place, *key), build)
        if key not in self._staged:
            self._staged[key] = build()
        return self._staged[key]

    def _stage_for(self, inputs: Sequence[Any], numbers: Sequence[Any]) -> Any:
        try:
            return self._stage_with(inputs, numbers)
        except Exception:
            # A program does not say whether a truth value was Python's. Some rules take no others:
            # those of Equinox, and so of diffrax, which say what is differentiated.
            if not any(isinstance(v, np.bool_) for v in numbers):
                raise
            pythons = [bool(v) if isinstance(v, np.bool_) else v for v in numbers]
            with suppress(Exception):
                return self._stage_with(inputs, pythons)
            raise

    def _stage_with(self, inputs: Sequence[Any], numbers: Sequence[Any]) -> Any:
        # What is passed on as it is: symbolic zeros, and known numbers.
        as_it_is = [x if _is_zero(x) else v for x, v in zip(inputs, numbers, strict=True)]

        def one_example(*xs: Value) -> tuple[list[Any], Any]:
            given = iter(xs)
            result = self.bwd.call_wrapped(*(next(given) if x is None else x for x in as_it_is))
            cotangents, logs = _compat.cotangents_and_logs(result)
            zeros = [c if isinstance(c, (ad.Zero, SymbolicZero)) else None for c in cotangents]
            leaves, structure = jax.tree.flatten(logs)
            outs = [c for c, z in zip(cotangents, zeros, strict=True) if z is None] + leaves
            return outs, (zeros, structure, isinstance(result, tuple))

        given = [x for x, v in zip(inputs, as_it_is, strict=True) if v is None]
        program, description = stage_described(self.axis, one_example, given)
        return program, *description


def known_number(x: Value) -> complex | np.generic | None:
    """Returns the number that a variable is constant at, else None."""
    if not isinstance(x, Literal) or not isinstance(x.val, (bool, int, float, complex)):
        return None
    aval: Aval = x.aval
    # A strong type is a NumPy scalar. A jaxpr stores an array of one boolean as Python's True,
    # whose `~` is -2, and which has no array methods.
    return x.val if aval.weak_type else np.dtype(aval.dtype).type(x.val)


def _counted_once(cotangent: Value, aval: Aval) -> jax.Array:
    """Zeroes a cotangent on all devices but one, for an input that was cast to vary."""
    over = _compat.varying_axes(aval) - _compat.varying_axes(jax.typeof(cotangent))
    if not over or cotangent.dtype == jax.dtypes.float0:
        return cotangent
    # The transpose of the cast sums over the devices.
    return jnp.where(lax.axis_index(tuple(over)) == 0, cotangent, jnp.zeros_like(cotangent))


def _type(x: Value) -> Aval:
    return x if _is_zero(x) else jax.typeof(x)


def _is_zero(x: Value) -> bool:
    return isinstance(x, SymbolicZero)


enter(": call_hi_primitive_linearized custom_jvp_call custom_lin custom_vjp_call")


@register_rule("custom_jvp_call")
def _custom_jvp(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> RuleOutputs:
    body, trace_rule = params["call_jaxpr"], params["jvp_jaxpr_fun"]
    bound = _custom_jvp_p.get_bind_params(params)
    fun, jvp = bound.pop("subfuns")
    skip, n_out = params["num_consts"], len(body.out_avals)
    # JAX keeps the rules in its caches.
    types = [jax.typeof(x) for x in args[skip:]]  # rules that live on must not hold values
    outputs = CallOutputs("jvp", axis, body, axes)
    program = program_behind(trace_rule) if _closes_over_values(body, trace_rule) else None
    captured = Captured(_compat.name_and_place(body.jaxpr), program)

    def differentiate(zeros: Sequence[bool], primals: Values, tangents: Values) -> Any:
        """Runs the rule on primals and those tangents that are not symbolic zeros."""
        with _compat.named_scope(axis.name, axis.size), without_mesh():
            jaxpr, consts, out_zeros = trace_rule.call_wrapped(*zeros)
        consts, const_axes = captured.values(consts)
        own_axes = axes[skip:]
        tangent_axes = [a for a, zero in zip(own_axes, zeros, strict=True) if not zero]
        # JAX also needs the results without tangents. A divergent branch or loop of both is one
        # equation, which computes all or nothing, so lanes run in lockstep.
        together = replace(axis, divergence=None)
        with outputs.in_rule():
            outs, out_axes = interpret(
                together,
                _compat.constants_as_inputs(jaxpr),
                (),
                [*consts, *primals, *tangents],
                [*const_axes, *own_axes, *tangent_axes],
            )
        given, given_axes = iter(outs[n_out:]), iter(out_axes[n_out:])
        tangents = [None if zero else next(given) for zero in out_zeros]
        tangent_axes = [None if zero else next(given_axes) for zero in out_zeros]
        return outs[:n_out], out_axes[:n_out], tangents, tangent_axes

    def axes_from_rule() -> Positions:
        def run(*xs: Value) -> tuple[list[Any], Positions]:
            n = len(types)
            _, out_axes, _, tangent_axes = differentiate([False] * n, xs[:n], xs[n:])
            return [], union(out_axes, tangent_axes)

        tangents = [a.to_tangent_aval() for a in types]
        return _compat.stage_described(run, [*types, *tangents])[1]

    def call(*xs: Value) -> list[Any]:
        outs, out_axes = interpret(axis, body.jaxpr, body.consts, xs, axes)
        outputs.settle(out_axes, lambda: if_later(axes_from_rule, body.out_avals))
        return outputs.place(outs, out_axes)

    def rule(*xs: Value) -> list[Any]:
        n = len(xs) // 2
        primals, tangents = xs[skip:n], xs[n + skip :]
        zeros = [isinstance(t, SymbolicZero) for t in tangents]
        given = [t for t, zero in zip(tangents, zeros, strict=True) if not zero]
        outs, out_axes, out_tangents, tangent_axes = differentiate(zeros, primals, given)
        outputs.settle(out_axes, lambda: tangent_axes)
        outs = outputs.place(outs, out_axes)
        placed = [
            SymbolicZero(jax.typeof(x).to_tangent_aval())
            if t is None
            else match_or_zeros(axis, t, a, to)
            for x, t, a, to in zip(outs, out_tangents, tangent_axes, outputs.axes, strict=True)
        ]
        return [*outs, *placed]

    def emit(*xs: Value) -> tuple[list[Any], Positions]:
        subfuns = (_compat.rewrapped(call, fun), _compat.rewrapped(rule, jvp))
        return _custom_jvp_p.bind(*xs, subfuns=subfuns, **bound), outputs.axes

    depends = program is not None or inside_rule()
    return emit(*args) if depends else emitted(axis, body, args, axes, emit)


@cached_on("whether derivative rules close over values of a program that is being staged")
def _closes_over_values(body: ClosedJaxpr, *rules: Callable[..., Any]) -> bool:
    return any(map(closes_over_tracers, rules))


@register_rule("custom_vjp_call")
def _custom_vjp(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> RuleOutputs:
    body, trace_forward = params["call_jaxpr"], params["fwd_jaxpr_thunk"]
    skip, out_trees = params["num_consts"], params["out_trees"]
    bound = _custom_vjp_p.get_bind_params(params)
    fun, fwd, bwd = bound.pop("subfuns")
    n_out = len(body.out_avals)
    types = [jax.typeof(x) for x in args]
    outputs = CallOutputs("vjp", axis, body, axes)
    rules = trace_forward, params["bwd"]
    bound_to_trace = closes_over_tracers(rules)
    program = program_behind(*rules) if bound_to_trace else None
    captured = Captured(_compat.name_and_place(body.jaxpr), program)
    owner = None if bound_to_trace else out_trees  # JAX has one for each pair of rules
    reverse = ReverseRule(axis, bwd, captured, axes, types, owner)
    # What the latest forward run said of its residuals. JAX calls `forward` and, later, `backward`,
    # and hands on arrays alone from the one to the other: what describes them has to wait here.
    kept = Residuals((), (), (), ())
    description = _compat.ResidualsDescription(out_trees)

    def run_forward(
        perturbed: Sequence[bool], primals: Values
    ) -> tuple[list[Any], Positions, Residuals]:
        with _compat.named_scope(axis.name, axis.size), without_mesh():
            jaxpr, consts = trace_forward.call_wrapped(*perturbed)
        # JAX may have traced the rule before, and for other arguments since.
        description.set(_descriptions.get(tuple(perturbed), description.get, owner=out_trees))
        consts, const_axes = captured.values(consts)
        jaxpr = _compat.constants_as_inputs(jaxpr)
        given, given_axes = [*consts, *primals], [*const_axes, *axes[skip:]]
        with outputs.in_rule():
            outs, out_axes = interpret(axis, jaxpr, (), given, given_axes)
        computed = zip(out_axes, jaxpr.outvars, strict=True)
        inputs = list(zip(axes, body.jaxpr.invars, strict=True))
        residuals = [next(computed) if f is None else inputs[f] for f in out_trees()[2]]
        types = [*(v.aval for _, v in residuals), *body.out_avals]
        at = [a for a, _ in residuals]
        numbers = [known_number(v) for _, v in residuals]
        return outs, out_axes, Residuals(at, types_varying(types), numbers, perturbed)

    def call(*xs: Value) -> list[Any]:
        outs, out_axes = interpret(axis, body.jaxpr, body.consts, xs, axes)
        outputs.settle(out_axes, lambda: if_later(axes_from_rules, body.out_avals))
        return outputs.place(outs, out_axes)

    def axes_from_rules() -> Positions:
        def run(*xs: Value) -> tuple[list[Any], Positions]:
            outs, out_axes, residuals = run_forward(inexact[skip:], xs[skip:])
            needed = need(xs, outs, out_axes, residuals)
            return [], union(out_axes[len(outs) - n_out :], needed)

        inexact = [jnp.issubdtype(t.dtype, jnp.inexact) for t in types]
        before = description.get()
        try:
            return _compat.stage_described(run, types)[1]
        finally:
            if before is not None:  # traces that JAX remembers have that one
                description.set(before)

    def need(xs: Values, outs: Values, out_axes: Positions, residuals: Residuals) -> Positions:
        """Returns which outputs the reverse rule needs by lane, after a forward run."""
        n = len(outs) - n_out
        computed = iter(outs[:n])
        values = [next(computed) if f is None else xs[f] for f in out_trees()[2]]
        return reverse.axes_needed(residuals, values, outs[n:], out_axes[n:])

    def forward(*xs: Value) -> list[Any]:
        # `backward` runs after `forward`, and gets its arrays only.
        nonlocal kept
        primals, perturbed = xs[::2], xs[1::2]
        if any(perturbed[:skip]):
            fwd.call_wrapped(*xs)  # says that what is closed over cannot be differentiated
        # Resolve now what the reverse rule closes over.
        captured.find(params["bwd"])
        outs, out_axes, kept = run_forward(perturbed[skip:], primals[skip:])
        n = len(outs) - n_out
        needed = lambda: if_differentiable(lambda: need(primals, outs, out_axes, kept), n_out)
        outputs.settle(out_axes[n:], needed)
        return [*outs[:n], *outputs.place(outs[n:], out_axes[n:])]

    def backward(*xs: Value) -> Sequence[Any]:
        n = len(kept.axes)
        return reverse(kept, xs[:n], xs[n:], outputs.axes)

    subfuns = tuple(map(_compat.rewrapped, (call, forward, backward), (fun, fwd, bwd)))
    outs = _custom_vjp_p.bind(*args, subfuns=subfuns, **bound)
    return outs, outputs.axes


# Of the residuals of forward rules, by which arguments are differentiated.
_descriptions = Cache("descriptions of the residuals of custom_vjp functions", most=1024)

_IN_REVERSE = "custom_lin", "call_hi_primitive_linearized"

in_reverse_alone = Anywhere(lambda eqn: eqn.primitive.name in _IN_REVERSE)
"""Whether a program has tangents of a function whose rule gives cotangents only."""


@register_rule(_IN_REVERSE[0])
@register_rule(_IN_REVERSE[1])
def _custom_lin(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> NoReturn:
    raise ArgumentTypeError(
        "can't apply forward-mode autodiff (jvp) to a custom_vjp function: its rule gives "
        "cotangents only. Use reverse mode (jax.grad, jax.vjp), or jax.custom_jvp for both."
    )


_custom_jvp_p: Any = _compat.find_primitive("custom_jvp_call")
_custom_vjp_p: Any = _compat.find_primitive("custom_vjp_call")
