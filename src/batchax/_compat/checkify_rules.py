"""Rules of ``checkify`` and ``jax.debug_key_reuse`` for primitives without one.

``checkify`` runs a jaxpr with an error next to its values. A primitive that runs jaxprs needs a
rule: without one it loses the errors of those jaxprs, and raises for a ``checkify.check`` in
them. JAX keeps its rules, and the function that adds errors to a jaxpr, in a private module.

``jax.debug_key_reuse`` knows by a signature which random keys a primitive consumes, and which of
its results are unused keys. Without one, all keys that it returns count as consumed. JAX keeps
signatures, and the function that finds that of a jaxpr, in a private module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax import lax
from jax._src.checkify import error_checks, jaxpr_to_checkify_jaxpr
from jax.core import eval_jaxpr
from jax.experimental import checkify
from jax.experimental.key_reuse._core import (
    KeyReuseSignature,
    Sink,
    dynamic_key_reuse_signature,
    jaxpr_type_signature,
    key_reuse_signatures,
)
from jax.extend.core.primitives import while_p

from batchax._compat.jaxprs import Aval, ClosedJaxpr, Effects, Params, Primitive, Value, checks
from batchax._compat.staging import as_one_call, stage


class Checking(NamedTuple):
    """Holds what ``checkify`` passes to a rule."""

    context: Sequence[Any]  # numbers the checks, since JAX 0.12
    error: checkify.Error  # the error so far, a pytree of arrays
    enabled: frozenset[type]  # the kinds of errors to report

    def needs(self, effects: Effects) -> bool:
        """Returns whether a program with these effects may have an error to report."""
        return not self.enabled <= checkify.user_checks or checks(effects)

    def with_errors(self, program: ClosedJaxpr) -> tuple[Callable[..., list[Any]], list[Any], Any]:
        """Turns `program` into a function that passes an error through.

        It maps the leaves of an error, and operands, to those of an error and results. Also returns
        the leaves of the error so far, and the structure of the result.
        """
        leaves, structure = jax.tree.flatten(self.error)
        types = [*map(jax.typeof, leaves), *program.in_avals]
        checked, out_structure, _ = jaxpr_to_checkify_jaxpr(
            *self.context, program, self.enabled, structure, *types
        )
        return lambda *xs: eval_jaxpr(checked.jaxpr, checked.consts, *xs), leaves, out_structure


Rule = Callable[[Checking, Sequence[Any], Any], tuple[Any, Sequence[Any]]]
"""From what ``checkify`` passes, operands and parameters, to the new error and the results."""


def set_error_rule(primitive: Primitive, rule: Rule) -> None:
    """Has ``checkify`` call `rule` for each equation of `primitive`."""

    def run(*args: Value, **params: Any) -> tuple[Any, Sequence[Any]]:
        at = next(i for i, x in enumerate(args) if isinstance(x, checkify.Error))
        return rule(Checking(args[:at], args[at], args[at + 1]), args[at + 2 :], params)

    error_checks[primitive] = run


_while_of_jax = error_checks[while_p]


def _while(
    checking: Checking, operands: Sequence[Any], params: Params
) -> tuple[Any, Sequence[Any]]:
    """Replaces JAX's rule, which raises for a ``while`` with a predicate for each lane."""
    if not params["cond_jaxpr"].out_avals[0].shape:
        context, error, enabled = checking
        return _while_of_jax(*context, error, enabled, *operands, **params)
    program = stage(lambda *xs: _with_one_predicate(xs, **params), list(map(jax.typeof, operands)))
    run, leaves, structure = checking.with_errors(program)
    return jax.tree.unflatten(structure, run(*leaves, *operands))


def _with_one_predicate(
    operands: Sequence[Any],
    cond_nconsts: int,
    cond_jaxpr: ClosedJaxpr,
    body_nconsts: int,
    body_jaxpr: ClosedJaxpr,
) -> list[Any]:
    """Runs a ``while`` until the last lane is done; lanes that are done keep their carry."""
    consts = operands[:cond_nconsts], operands[cond_nconsts : cond_nconsts + body_nconsts]
    depth = len(cond_jaxpr.out_avals[0].shape)

    def goes_on(carry: Sequence[Any]) -> Value:
        return eval_jaxpr(cond_jaxpr.jaxpr, cond_jaxpr.consts, *consts[0], *carry)[0]

    def step(carry: Sequence[Any]) -> list[Any]:
        active = goes_on(carry)
        donor = jnp.argmax(active)

        def select(new: Value, old: Value) -> Value:
            return lax.select(lax.broadcast_in_dim(active, old.shape, range(depth)), new, old)

        # Lanes that are done must report no error, so they take a step from the carry of an active
        # one.
        def given(x: Value) -> Value:
            lanes = lax.collapse(x, 0, depth)
            return select(
                x, jnp.broadcast_to(lax.dynamic_index_in_dim(lanes, donor, 0, False), x.shape)
            )

        new = eval_jaxpr(body_jaxpr.jaxpr, body_jaxpr.consts, *consts[1], *map(given, carry))
        return list(map(select, new, carry))

    carry = list(operands[cond_nconsts + body_nconsts :])
    return lax.while_loop(lambda carry: jnp.any(goes_on(carry)), step, carry)


set_error_rule(while_p, _while)

(_shard_map_p,) = (p for p in error_checks if p.name == "shard_map")
_shard_map_of_jax = error_checks[_shard_map_p]


def _shard_map(
    checking: Checking, operands: Sequence[Any], params: Params
) -> tuple[Any, Sequence[Any]]:
    """Works around JAX's rule, which loses constants such as a table that is indexed."""
    # It raises "foreach() argument 2 is shorter" (JAX 0.10.2 to 0.12.0). A call keeps its
    # constants.
    context, error, enabled = checking
    params = {**params, "jaxpr": as_one_call(params["jaxpr"])}
    return _shard_map_of_jax(*context, error, enabled, *operands, **params)


set_error_rule(_shard_map_p, _shard_map)


def set_key_use(
    primitive: Primitive,
    operations: Callable[[Any], ClosedJaxpr | None],
    steps: Callable[[Any], Sequence[ClosedJaxpr]],
) -> None:
    """Has ``jax.debug_key_reuse`` derive from programs which keys `primitive` consumes.

    `operations` returns the program of an equation. `steps` returns programs that run for parts of
    the operands: their last inputs are parts of the last operands, which they consume.
    """

    def signature(eqn: jex_core.JaxprEqn) -> KeyReuseSignature:
        program = operations(eqn)
        assert program is not None
        of_operations = jaxpr_type_signature(program.jaxpr)
        count = len(eqn.invars)  # constants come after them
        parts = [part for part in _parts(of_operations) if getattr(part, "idx", 0) < count]
        parts += [
            Sink(i)
            for program in steps(eqn.params)
            for sink in jaxpr_type_signature(program.jaxpr).sinks
            if 0 <= (i := sink.idx + count - len(program.in_avals)) < count
            if is_key(eqn.invars[i].aval) and sink.idx < len(program.in_avals)
        ]
        # A key that is consumed as a whole need not be listed in part.
        sunk = {part.idx for part in parts if isinstance(part, Sink) and part.mask is True}
        return KeyReuseSignature(
            *(p for p in parts if not isinstance(p, Sink) or p.mask is True or p.idx not in sunk)
        )

    key_reuse_signatures[primitive] = dynamic_key_reuse_signature(signature)


def _parts(signature: KeyReuseSignature) -> list[Any]:
    return [*signature.sinks, *signature.sources, *signature.forwards]


def is_key(aval: Aval) -> bool:
    return hasattr(aval, "dtype") and jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def unconsumed(x: Value) -> Value:
    """Marks keys in `x` as unconsumed, where they are used again on purpose."""
    config: Any = jax.config
    return jax.random.clone(x) if config.jax_debug_key_reuse and is_key(jax.typeof(x)) else x
