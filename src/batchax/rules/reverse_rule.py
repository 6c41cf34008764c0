"""The reverse rule of a ``custom_vjp`` function, staged for one example and run for all lanes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Literal
from jax.interpreters import ad

from batchax import _compat
from batchax.jaxprs.words import Aval, Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.captured import Captured
from batchax.kernel.inner import batched_aval, example_aval, stage_described
from batchax.kernel.named_axes import Varying, as_without_mesh
from batchax.rules.batched_transpose import batched_transpose, multiplies, reached
from batchax.rules.rule_outputs import Axes


@dataclass(frozen=True)
class Residuals:
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

    def computed(self, residuals: Iterable[Value]) -> list[Any]:
        """Those that are no numbers known before."""
        return [x for x, number in zip(residuals, self.known, strict=True) if number is None]


class ReverseRule:
    """The reverse rule of a ``custom_vjp`` function, for all lanes."""

    def __init__(
        self, axis: Axis, bwd: Any, captured: Captured, in_axes: Axes, types: Sequence[Aval]
    ) -> None:
        self.axis, self.bwd, self.captured, self.in_axes = axis, bwd, captured, in_axes
        self.types = types  # of the inputs
        # In no memo, as what the rule closes over may be of a trace: it goes with this call.
        self._staged: dict[Any, Any] = {}

    def __call__(self, kept: Residuals, residuals: Any, cotangents: Any, ct_axes: Axes) -> Any:
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

    def axes_needed(self, kept: Residuals, residuals: Any, outs: Any, out_axes: Axes) -> Axes:
        """0 for each unbatched output whose cotangent must be known lane by lane.

        One that reaches the cotangent of a batched input must be, and one that is
        multiplied with something that differs by lane.
        """
        types = [*map(_type, residuals), *(jax.typeof(x).to_tangent_aval() for x in outs)]
        staged, zeros, _, _ = self._stage(types, out_axes, kept)
        (rule,), consts = _compat.hoist_constants(staged)
        _, const_axes = self.captured.values(consts)
        positions = [*const_axes, *kept.computed(kept.axes), *out_axes]
        batched = [a is not None for a in positions]
        in_axes = [a for a, zero in zip(self.in_axes, zeros, strict=True) if zero is None]
        needed: list[Position] = []
        for k, out_axis in enumerate(out_axes):
            one = [i == len(positions) - len(out_axes) + k for i in range(len(positions))]
            hits = zip(reached(rule.jaxpr, one), in_axes, strict=False)  # logs follow
            by_lane = any(hit and a is not None for hit, a in hits)
            by_lane = by_lane or multiplies(self.axis, rule.jaxpr, one, batched)
            needed.append(0 if out_axis is None and by_lane else None)
        return needed

    def _stage(self, types: Iterable[Aval], ct_axes: Axes, kept: Residuals) -> Any:
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

        def example(aval: Aval, a: Position, over: Any) -> Any:
            aval = _compat.with_varying_axes(example_aval(self.axis, aval, a), over)
            return as_without_mesh([aval])[0]

        inputs = [
            SymbolicZero(example(t.aval, a, over)) if _is_zero(t) else example(t, a, over)
            for t, a, over in zip(types, [*kept.axes, *ct_axes], kept.varying, strict=True)
        ]
        numbers = [*kept.known, *[None] * len(ct_axes)]
        typed = [(type(x), x) for x in numbers]  # True is 1, and not the same
        key = (*((x.aval, True) if _is_zero(x) else (x, False) for x in inputs), *typed)
        if key not in self._staged:
            self._staged[key] = self._stage_for(inputs, numbers)
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


def known_number(x: Value) -> Any:
    """The number that a variable of a program is in truth, else None: arrays are no numbers.

    One with a dtype of its own is a scalar of NumPy. A program writes an array of one truth value
    as Python's True, whose `~` is -2, and which has no methods of arrays.
    """
    if not isinstance(x, Literal) or not isinstance(x.val, (bool, int, float, complex)):
        return None
    aval: Aval = x.aval
    return x.val if aval.weak_type else np.dtype(aval.dtype).type(x.val)


def _counted_once(cotangent: Any, aval: Aval) -> Any:
    """A cotangent for all devices, of an input that was cast to vary: from one of them only.

    The transpose of such a cast adds up what the devices give, so all others give zero.
    """
    over = _compat.varying_axes(aval) - _compat.varying_axes(jax.typeof(cotangent))
    if not over or cotangent.dtype == jax.dtypes.float0:
        return cotangent
    return jnp.where(lax.axis_index(tuple(over)) == 0, cotangent, jnp.zeros_like(cotangent))


def _type(x: Value) -> Any:
    return x if _is_zero(x) else jax.typeof(x)


def _is_zero(x: Value) -> bool:
    return isinstance(x, SymbolicZero)
