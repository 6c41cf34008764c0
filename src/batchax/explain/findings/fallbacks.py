"""Equations that no rule of batchax's serves, or that run for one lane after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from batchax import _compat
from batchax.explain.account import Equation, Finding
from batchax.explain.findings.draft import Draft
from batchax.explain.wording import count
from batchax.kernel.recording import Record
from batchax.programs.weights import CALLBACK, STEP

_CALLBACKS = frozenset("io_callback debug_callback debug_print pure_callback ffi_call".split())


def rules_of_jax(draft: Draft) -> Iterator[Finding]:
    """Primitives that only JAX has a rule for. There is no price: it may serve as well."""
    served = [eqn for eqn, _ in draft.walk() if eqn.service == "jax"]
    names = dict.fromkeys(f"`{eqn.primitive}`" for eqn in served)
    if len(names) == 1:
        what = f"{', '.join(names)} has no rule of batchax's: that of JAX serves it"
        which = f"it moves or repeats more than it has to, give it a rule with {_rule(served[0])}"
    else:
        what = f"{', '.join(names)} have no rules of batchax's: those of JAX serve them"
        which = "one moves or repeats more than it has to, give it a rule: @batchax.register_rule"
    for eqn in served:
        yield Finding(
            "fallback to the rule of JAX",
            f"{what}, as in jax.vmap.",
            f"Nothing needs to be done. If {which}.",
            eqn.number,
            0.0,
        )


def _rule(eqn: Equation) -> str:
    return f"@batchax.register_rule({_expression(eqn)})"


def one_lane_after_another(draft: Draft) -> Iterator[Finding]:
    """What runs in a loop over lanes: a step for each, and perhaps a call of Python."""
    for eqn, record in draft.walk():
        if eqn.service != "lanes":
            continue
        why, remedy = _why(eqn, record)
        each = CALLBACK if eqn.primitive in _CALLBACKS else STEP
        asked = eqn.rule == "sequential_vmap"
        what = "A function" if asked else f"`{eqn.primitive}`"
        yield Finding(
            "one lane after another",
            f"{what} runs for the {count(draft.lanes, 'lane')} one after another: {why}",
            remedy,
            eqn.number,
            each * max(draft.lanes, eqn.times or 1),
        )


def _why(eqn: Equation, record: Record) -> tuple[str, str]:
    why, remedy = next(told for holds, *told in _REASONS if holds(eqn, record))
    return why, remedy.format(primitive=_expression(eqn))


def _expression(eqn: Equation) -> str:
    return f"{eqn.primitive.split()[0].replace('-', '_')}_p"


_REASONS: tuple[tuple[Callable[[Equation, Record], bool], str, str], ...] = (
    (
        lambda eqn, _: eqn.rule == "sequential_vmap",
        "batchax.sequential_vmap asks for that.",
        "Nothing, if it is for memory or for the order of effects. Otherwise leave "
        "sequential_vmap out.",
    ),
    (
        lambda eqn, _: eqn.primitive in ("pure_callback", "ffi_call"),
        "its vmap_method says so, and Python is called for each.",
        'If the function takes arrays with a leading batch axis, give vmap_method="broadcast_all" '
        'or "expand_dims": it is called once then.',
    ),
    (
        lambda eqn, _: eqn.primitive in _CALLBACKS,
        "each lane has its effect, in order of the lanes.",
        "Call it outside of the batched function, on the whole batch, if one call will do.",
    ),
    (
        lambda _, record: _compat.ordered_by_lane(record.eqn.effects),
        "lanes part ways in it, and it calls Python, which is seen outside.",
        "Move the call out of it, or use jax.debug.callback, which need not be in order: lanes run "
        "together then.",
    ),
    (
        lambda eqn, _: eqn.primitive == "conv_general_dilated",
        "lanes share neither images nor kernels, and for numbers of 64 bits a compiler for CPUs "
        "would multiply the images of all with the kernels of all, most of them times zero.",
        "Nothing: that takes longer. Convolutions of float32 run at once.",
    ),
    (
        lambda *_: True,
        "neither batchax nor JAX has a batching rule for it.",
        "Give it a rule with @batchax.register_rule({primitive}), which computes all lanes at "
        "once.",
    ),
)
"""Whether a reason holds, the reason, and what to do about it; the first that holds is told."""
