"""Functions with derivative rules of their own: the rules are batched with them.

Both kinds of call (``custom_jvp``, ``custom_vjp``) are made again with batched functions
and rules, by the same primitive. Which of them JAX runs, and when, depends on what
surrounds the call: the function where it is not differentiated; the rule at once where
it is; the function at once and the rule much later where the call is staged and
differentiated after that. Whichever runs first decides where the outputs have their
batch axis.

Where that is the function, an output that is the same for all lanes may have a derivative that
differs between them, and only the rule knows. So the rule is asked where its results have the batch
axis: once, staged as it will be run later, and only if there is such an output and what is batched
may be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal
from jax.interpreters import ad

from batchax import _compat
from batchax.errors import ArgumentTypeError, UnsupportedError
from batchax.jaxprs.primitive_facts import enter
from batchax.kernel.axis import Axis, AxisPosition
from batchax.kernel.captured import may_be_differentiated, program_behind, resolve
from batchax.kernel.inner import batched_aval, example_aval, stage_described
from batchax.kernel.interpreter import interpret
from batchax.kernel.registry import register_rule
from batchax.kernel.varying import Varying, as_without_mesh, types_varying, without_mesh
from batchax.rules.batched_transpose import batched_transpose, match_or_zeros, multiplies, reached

Axes = Sequence[AxisPosition]


class _Outputs:
    """Where the outputs of a call have their batch axis, once that is known."""

    def __init__(self, kind: str, axis: Axis, body: Any, in_axes: Axes) -> None:
        self.axis, self.types = axis, body.out_avals
        self.signature = kind, tuple(body.in_avals), tuple(in_axes), tuple(body.out_avals)
        self.axes: list[AxisPosition] = []
        self.known = False

    def settle(self, axes: Axes, also: Callable[[], Axes]) -> None:
        """Decides the axes: those of `axes`, and where it has None those of `also`.

        `also` says which outputs must have the axis although their values do not
        depend on the batch, because their derivatives do. It is asked only where
        there is a doubt, and may fail where a function cannot be differentiated.
        """
        if self.known:
            return
        inexact = (jnp.issubdtype(t.dtype, jnp.inexact) for t in self.types)
        if any(a is None and may for a, may in zip(axes, inexact, strict=True)):
            around = _around.get({})
            if self.signature in around:
                axes = _union(axes, around[self.signature].axes or axes)
            else:
                axes = _union(axes, also())
        self.axes, self.known = list(axes), True

    @contextmanager
    def in_rule(self) -> Iterator[None]:
        """While a rule runs: if it calls the function, that call has its outputs where these are.

        Such a call does not ask the rule, which would only call the function once more.
        """
        token = _around.set({**_around.get({}), self.signature: self})
        try:
            yield
        finally:
            _around.reset(token)

    def place(self, values: Sequence[Any], axes: Axes) -> list[Any]:
        """Values of outputs with their batch axes where `settle` decided.

        Raises:
          UnsupportedError: a value depends on the batch where that was not known.
        """
        for position, wanted in zip(axes, self.axes, strict=True):
            if wanted is None and position is not None:
                raise UnsupportedError(
                    "a derivative rule makes an output depend on the batch that does not "
                    "depend on it where the function is not differentiated. Let the function "
                    "return a value for each example there: add zero times a mapped argument."
                )
        return [
            match_or_zeros(self.axis, x, a, w)
            for x, a, w in zip(values, axes, self.axes, strict=True)
        ]


_around: ContextVar[dict[Any, _Outputs]] = ContextVar("batchax_rules_around")
"""The calls whose rules are running, by what tells a call of the same function from others."""


def _union(first: Axes, second: Axes) -> list[AxisPosition]:
    return [b if a is None else a for a, b in zip(first, second, strict=True)]


def _if_differentiable(find: Callable[[], Axes], n_out: int) -> Axes:
    try:
        return find()
    except Exception:
        # A rule that refuses to run must not fail a call that is not differentiated. If it is, the
        # rule runs again, and says so itself.
        return [None] * n_out


def _if_later(find: Callable[[], Axes], n_out: int) -> Axes:
    """What `find` finds, by a rule, for a function that runs now; None where no rule follows."""
    if not (_compat.tracing() and may_be_differentiated()):
        return [None] * n_out
    return _if_differentiable(find, n_out)


enter(": call_hi_primitive_linearized custom_jvp_call custom_lin custom_vjp_call")


@register_rule("custom_jvp_call")
def _custom_jvp(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[list[Any], Axes]:
    body, trace_rule = params["call_jaxpr"], params["jvp_jaxpr_fun"]
    bound = _custom_jvp_p.get_bind_params(params)
    fun, jvp = bound.pop("subfuns")
    skip, n_out = params["num_consts"], len(body.out_avals)
    types = [jax.typeof(x) for x in args[skip:]]  # rules that live on must not hold values
    outputs = _Outputs("jvp", axis, body, axes)
    program = program_behind(trace_rule)

    def differentiate(zeros: Sequence[bool], primals: Any, tangents: Any) -> Any:
        """The rule on primals and those tangents that are not symbolic zeros."""
        with _compat.named_scope(axis.name, axis.size), without_mesh():
            jaxpr, consts, out_zeros = trace_rule.call_wrapped(*zeros)
        consts, const_axes = resolve(program, consts)
        own_axes = axes[skip:]
        tangent_axes = [a for a, zero in zip(own_axes, zeros, strict=True) if not zero]
        with outputs.in_rule():
            outs, out_axes = interpret(
                axis,
                _compat.constants_as_inputs(jaxpr),
                (),
                [*consts, *primals, *tangents],
                [*const_axes, *own_axes, *tangent_axes],
            )
        given, given_axes = iter(outs[n_out:]), iter(out_axes[n_out:])
        tangents = [None if zero else next(given) for zero in out_zeros]
        tangent_axes = [None if zero else next(given_axes) for zero in out_zeros]
        return outs[:n_out], out_axes[:n_out], tangents, tangent_axes

    def axes_from_rule() -> Axes:
        def run(*xs: Any) -> tuple[list[Any], Axes]:
            n = len(types)
            _, out_axes, _, tangent_axes = differentiate([False] * n, xs[:n], xs[n:])
            return [], _union(out_axes, tangent_axes)

        tangents = [a.to_tangent_aval() for a in types]
        return _compat.stage_described(run, [*types, *tangents])[1]

    def call(*xs: Any) -> list[Any]:
        outs, out_axes = interpret(axis, body.jaxpr, body.consts, xs, axes)
        outputs.settle(out_axes, lambda: _if_later(axes_from_rule, n_out))
        return outputs.place(outs, out_axes)

    def rule(*xs: Any) -> list[Any]:
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
            else match_or_zeros(axis, t, a, wanted)
            for x, t, a, wanted in zip(outs, out_tangents, tangent_axes, outputs.axes, strict=True)
        ]
        return [*outs, *placed]

    subfuns = (_compat.rewrapped(call, fun), _compat.rewrapped(rule, jvp))
    outs = _custom_jvp_p.bind(*args, subfuns=subfuns, **bound)
    return outs, outputs.axes


@register_rule("custom_vjp_call")
def _custom_vjp(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[list[Any], Axes]:
    body, trace_forward = params["call_jaxpr"], params["fwd_jaxpr_thunk"]
    skip, out_trees = params["num_consts"], params["out_trees"]
    bound = _custom_vjp_p.get_bind_params(params)
    fun, fwd, bwd = bound.pop("subfuns")
    n_out = len(body.out_avals)
    types = [jax.typeof(x) for x in args]
    outputs = _Outputs("vjp", axis, body, axes)
    program = program_behind(trace_forward, params["bwd"])
    reverse = _Reverse(axis, bwd, program, axes, types)
    # What the latest forward run said of its residuals. JAX calls `forward` and, later, `backward`,
    # and hands on arrays alone from the one to the other: what describes them has to wait here.
    kept = _Residuals((), (), ())

    def run_forward(perturbed: Sequence[bool], primals: Any) -> tuple[list[Any], Axes, _Residuals]:
        with _compat.named_scope(axis.name, axis.size), without_mesh():
            jaxpr, consts = trace_forward.call_wrapped(*perturbed)
        consts, const_axes = resolve(program, consts)
        jaxpr = _compat.constants_as_inputs(jaxpr)
        given, given_axes = [*consts, *primals], [*const_axes, *axes[skip:]]
        with outputs.in_rule():
            outs, out_axes = interpret(axis, jaxpr, (), given, given_axes)
        computed = zip(out_axes, jaxpr.outvars, strict=True)
        inputs = list(zip(axes, body.jaxpr.invars, strict=True))
        residuals = [next(computed) if f is None else inputs[f] for f in out_trees()[2]]
        types = [*(v.aval for _, v in residuals), *body.out_avals]
        at = [a for a, _ in residuals]
        known = [_number(v) for _, v in residuals]
        return outs, out_axes, _Residuals(at, types_varying(types), known)

    def call(*xs: Any) -> list[Any]:
        outs, out_axes = interpret(axis, body.jaxpr, body.consts, xs, axes)
        outputs.settle(out_axes, lambda: _if_later(axes_from_rules, n_out))
        return outputs.place(outs, out_axes)

    def axes_from_rules() -> Axes:
        def run(*xs: Any) -> tuple[list[Any], Axes]:
            outs, out_axes, residuals = run_forward([True] * (len(xs) - skip), xs[skip:])
            needed = need(xs, outs, out_axes, residuals)
            return [], _union(out_axes[len(outs) - n_out :], needed)

        return _compat.stage_described(run, types)[1]

    def need(xs: Any, outs: Any, out_axes: Axes, residuals: _Residuals) -> Axes:
        """Which outputs the reverse rule needs for each lane, from what the forward one gave."""
        n = len(outs) - n_out
        computed = iter(outs[:n])
        values = [next(computed) if f is None else xs[f] for f in out_trees()[2]]
        return reverse.axes_needed(residuals, values, outs[n:], out_axes[n:])

    def forward(*xs: Any) -> list[Any]:
        nonlocal kept
        primals, perturbed = xs[::2], xs[1::2]
        if any(perturbed[:skip]):
            fwd.call_wrapped(*xs)  # says that what is closed over cannot be differentiated
        outs, out_axes, kept = run_forward(perturbed[skip:], primals[skip:])
        n = len(outs) - n_out
        needed = lambda: _if_differentiable(lambda: need(primals, outs, out_axes, kept), n_out)
        outputs.settle(out_axes[n:], needed)
        return [*outs[:n], *outputs.place(outs[n:], out_axes[n:])]

    def backward(*xs: Any) -> Any:
        n = len(kept.axes)
        return reverse(kept, xs[:n], xs[n:], outputs.axes)

    subfuns = tuple(map(_compat.rewrapped, (call, forward, backward), (fun, fwd, bwd)))
    outs = _custom_vjp_p.bind(*args, subfuns=subfuns, **bound)
    return outs, outputs.axes


@dataclass(frozen=True)
class _Residuals:
    """What a forward run says of the residuals that it returns.

    Attributes:
      axes: where each has the batch axis.
      varying: over which axes of a mesh they, and after them the outputs, were staged to vary.
      known: the number that each is whatever the arguments are, else None. A reverse rule may ask
        for it in Python: which arguments a forward rule was told to be differentiated, say.
    """

    axes: Axes
    varying: Varying
    known: Sequence[Any]

    def computed(self, residuals: Iterable[Any]) -> list[Any]:
        """Those that are no numbers known before."""
        return [x for x, known in zip(residuals, self.known, strict=True) if known is None]


class _Reverse:
    """The reverse rule of a ``custom_vjp`` function, for all lanes."""

    def __init__(
        self, axis: Axis, bwd: Any, program: Any, in_axes: Axes, types: Sequence[Any]
    ) -> None:
        self.axis, self.bwd, self.program, self.in_axes = axis, bwd, program, in_axes
        self.types = types  # of the inputs
        # In no memo, as what the rule closes over may be of a trace: it goes with this call.
        self._staged: dict[Any, Any] = {}

    def __call__(self, kept: _Residuals, residuals: Any, cotangents: Any, ct_axes: Axes) -> Any:
        axis = self.axis
        types = map(_type, [*residuals, *cotangents])
        staged, zeros, logs, has_logs = self._stage(types, ct_axes, kept)
        (rule,), consts = _compat.hoist_constants(staged)
        consts, const_axes = resolve(self.program, consts)
        residuals, residual_axes = kept.computed(residuals), kept.computed(kept.axes)
        given = [(c, a) for c, a in zip(cotangents, ct_axes, strict=True) if not _is_zero(c)]
        first = len(consts) + len(residuals)
        wanted = [a for a, zero in zip(self.in_axes, zeros, strict=True) if zero is None]
        wanted += [0] * logs.num_leaves
        outs = batched_transpose(
            axis,
            rule.jaxpr,
            [*consts, *residuals, *(c for c, _ in given)],
            [*const_axes, *residual_axes, *(a for _, a in given)],
            range(first, first + len(given)),
            wanted,
        )
        rest = iter(outs)
        results = [
            _counted_once(next(rest), t)
            if zero is None
            else ad.Zero(batched_aval(axis, zero.aval, a))
            for zero, a, t in zip(zeros, self.in_axes, self.types, strict=True)
        ]
        return (results, jax.tree.unflatten(logs, list(rest))) if has_logs else results

    def axes_needed(self, kept: _Residuals, residuals: Any, outs: Any, out_axes: Axes) -> Axes:
        """0 for each unbatched output whose cotangent must be known lane by lane.

        One that reaches the cotangent of a batched input must be, and one that is
        multiplied with something that differs by lane.
        """
        types = [*map(_type, residuals), *(jax.typeof(x).to_tangent_aval() for x in outs)]
        staged, zeros, _, _ = self._stage(types, out_axes, kept)
        (rule,), consts = _compat.hoist_constants(staged)
        _, const_axes = resolve(self.program, consts)
        positions = [*const_axes, *kept.computed(kept.axes), *out_axes]
        batched = [a is not None for a in positions]
        in_axes = [a for a, zero in zip(self.in_axes, zeros, strict=True) if zero is None]
        needed: list[AxisPosition] = []
        for k, out_axis in enumerate(out_axes):
            one = [i == len(positions) - len(out_axes) + k for i in range(len(positions))]
            hits = zip(reached(rule.jaxpr, one), in_axes, strict=False)  # logs follow
            by_lane = any(hit and a is not None for hit, a in hits)
            by_lane = by_lane or multiplies(self.axis, rule.jaxpr, one, batched)
            needed.append(0 if out_axis is None and by_lane else None)
        return needed

    def _stage(self, types: Iterable[Any], ct_axes: Axes, kept: _Residuals) -> Any:
        """The rule for one example, and which cotangents it returns are symbolic zeros.

        Args:
          types: of residuals and cotangents.
          ct_axes: where cotangents have the batch axis.
          kept: what is said of residuals.

        Returns:
          The staged rule, for those inputs and outputs that are no symbolic zeros; the
          zeros among its cotangents (None for others); the structure of its logs; and
          whether it returns any.
        """

        def example(aval: Any, a: AxisPosition, over: Any) -> Any:
            aval = _compat.with_varying_axes(example_aval(self.axis, aval, a), over)
            return as_without_mesh([aval])[0]

        inputs = [
            SymbolicZero(example(t.aval, a, over)) if _is_zero(t) else example(t, a, over)
            for t, a, over in zip(types, [*kept.axes, *ct_axes], kept.varying, strict=True)
        ]
        known = [*kept.known, *[None] * len(ct_axes)]
        numbers = [(type(x), x) for x in known]  # True is 1, and not the same
        key = (*((x.aval, True) if _is_zero(x) else (x, False) for x in inputs), *numbers)
        if key not in self._staged:
            self._staged[key] = self._stage_for(inputs, known)
        return self._staged[key]

    def _stage_for(self, inputs: Sequence[Any], known: Sequence[Any]) -> Any:
        # What is passed on as it is: symbolic zeros, and known numbers.
        as_it_is = [x if _is_zero(x) else v for x, v in zip(inputs, known, strict=True)]

        def one_example(*xs: Any) -> tuple[list[Any], Any]:
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


def _number(x: Any) -> Any:
    """The number that a variable of a program is in truth, else None: arrays are no numbers."""
    number = isinstance(x, Literal) and isinstance(x.val, (bool, int, float, complex))
    return x.val if number else None


def _counted_once(cotangent: Any, aval: Any) -> Any:
    """A cotangent for all devices, of an input that was cast to vary: from one of them only.

    The transpose of such a cast adds up what the devices give, so all others give zero.
    """
    over = _compat.varying_axes(aval) - _compat.varying_axes(jax.typeof(cotangent))
    if not over or cotangent.dtype == jax.dtypes.float0:
        return cotangent
    return jnp.where(lax.axis_index(tuple(over)) == 0, cotangent, jnp.zeros_like(cotangent))


def _type(x: Any) -> Any:
    return x if _is_zero(x) else jax.typeof(x)


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


@register_rule("custom_lin")
@register_rule("call_hi_primitive_linearized")
def _custom_lin(axis: Axis, args: Any, axes: Any, /, **params: Any) -> Any:
    raise ArgumentTypeError(
        "a function with a custom_vjp rule has no forward-mode derivative: its rule gives "
        "cotangents only. Use reverse mode (jax.grad, jax.vjp), or jax.custom_jvp for both."
    )


_custom_jvp_p: Any = _compat.find_primitive("custom_jvp_call")
_custom_vjp_p: Any = _compat.find_primitive("custom_vjp_call")
