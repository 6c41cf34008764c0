"""Every rule of the engine is shown, and by its right name."""

import jax
import pytest

import batchax as bx
from batchax.jaxprs.primitive_facts import shown
from batchax.kernel import registry
from batchax.kernel.own_primitive import declared

from support.every_rule import NAME, RULES

OLD = jax.__version_info__ < (0, 12)

# Calls are listed as what they call: one thing that each calls here, and the rule of that.
CALLS = {
    **dict.fromkeys("call closed_call eval_jaxpr jit remat2 composite".split(), "sin"),
    **dict.fromkeys("compute_on xla_metadata_call program_order".split(), "sin"),
    **dict.fromkeys("custom_jvp_call custom_vjp_call shard_map".split(), "sin"),
    "run_state": "swap",
    "remat_opt": "cos",
    "linear_call": "div",
    "call_hi_primitive": "scan",
    "linear_with_transpose": "reduce_sum",
    "impl_program": "sin",
    "custom_linear_solve": "triangular_solve",
}

# Rules that go through the lanes one after another, and rules that ask the user's.
SERVICES = {
    **dict.fromkeys("io_callback debug_callback debug_print lane_calls".split(), "lanes"),
    **dict.fromkeys("rng_bit_generator rng_uniform select_and_scatter".split(), "lanes"),
    **dict.fromkeys("custom_vmap_call custom_batched_call".split(), "user"),
}
USERS = {"custom_vmap_call": "own_batching_rule", "custom_batched_call": "batched_by_rule_rule"}

NEVER_SHOWN = {
    "core_call": "what a call was named in other versions of JAX",
    "stage": "tracing takes it out",
    "call_later": "a rule of the user is shown, which it calls",
    "found_switch": "the programs that it chooses from are shown",
    "summed": "it names what lanes add up, and is no operation of theirs",
    "custom_lin": "its rule says that forward mode through reverse-only rules cannot be",
    "call_hi_primitive_linearized": "its rule says the same",
    "psend": "its rule refuses values that depend on the batch",
    "precv": "its rule refuses values that depend on the batch",
    "to_edtype": "no type of JAX's own is converted to by it",
    "from_edtype": "no type of JAX's own is converted from by it",
    "unreduced_pmax": "no operation makes values that are unreduced in that way",
    "unreduced_pmin": "no operation makes values that are unreduced in that way",
}
ABSENT = "call closed_call"
"""Of these the names are known, but not in this version of JAX, or not yet."""

if OLD:
    ABSENT = "pbroadcast_dynamic program_order with_memory_space_constraint"
    uncast = "unreduced_psum preduced all_gather_reduced unreduced_reduce_scatter".split()
    NEVER_SHOWN |= dict.fromkeys(uncast, "JAX cannot batch, in this version, the casts around it")
else:
    del CALLS["call_hi_primitive"]  # what it calls is not batched one by one

REGISTERED = {str(p) for p, entry in registry._rules.items() if not entry.is_users}
CASES = [
    (module, name)
    for module, programs in RULES.items()
    for name in programs
    if name in REGISTERED - set(ABSENT.split()) - set(NEVER_SHOWN)
]


def test_every_rule_is_in_the_table():
    names = [name for programs in RULES.values() for name in programs]
    assert len(names) == len(set(names))
    assert set(CALLS) | set(SERVICES) <= set(names)
    left_out = REGISTERED - {name for _, name in CASES}
    assert left_out == REGISTERED & {*NEVER_SHOWN, *ABSENT.split()}


@pytest.mark.parametrize(("module", "name"), CASES, ids=[name for _, name in CASES])
def test_rule_is_named(module, name):
    fun, *types = RULES[module][name]
    explanation = bx.explain(fun, axis_name=NAME, compile=False)(*types)
    own = {shown(p) for p in declared()}
    names = [
        (e, e.primitive if e.primitive in own else e.primitive.split()[0])
        for e in explanation.walk()
    ]
    found = {(called, e.service, e.rule) for e, called in names}
    primitives = {primitive for primitive, _, _ in found}
    called = {p.name: shown(p) for p in declared()}.get(name, name)
    if name in CALLS:
        assert called not in primitives
        called = CALLS[name]
        (of_it,) = [m for m, programs in RULES.items() if called in programs]
        assert (called, "own", of_it) in found
    elif name in USERS:
        assert (called, "user", USERS[name]) in found
    else:
        assert (called, SERVICES.get(name, "own"), module) in found
