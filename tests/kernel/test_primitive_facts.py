"""What is said of primitives: of all of them, once, and it is true."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core.primitives import scan_p

from batchax._compat import find_primitive
from batchax.jaxprs.primitive_facts import UNKNOWN, Facts, enter, facts_of, has_entry
from test_primitives import JAX_ONLY

from support.every_rule import RULES

# In a process of its own: other tests and libraries add primitives to JAX's tables.
LISTED = """
import json
import batchax
from batchax import _compat
from batchax.jaxprs.primitive_facts import is_own
from batchax.jaxprs.primitive_facts import facts_of, has_entry
from batchax.analysis.cost import FLOPS, MOVES, TRANSCENDENTAL, _SEVERAL
found = _compat.primitives_by_name()
priced = {*FLOPS, *MOVES, *TRANSCENDENTAL, *_SEVERAL}
has_price = lambda n, p: facts_of(p).elementwise or facts_of(p).body or is_own(p) or n in priced
print(json.dumps({
    "without entry": [n for n, p in found.items() if not has_entry(p)],
    "without price": [n for n, p in found.items() if not has_price(n, p)],
}))
"""

# What these cost depends on more than their operands: on programs inside, or on who takes part.
# What batchax's own cost, the operations say that they stand for.
PRICED_OTHERWISE = set(
    """
    call_hi_primitive call_hi_primitive_linearized cond
    custom_jvp_call custom_lin custom_linear_solve custom_vjp_call
    custom_vmap_call remat_opt scan shard_map while
    check debug_callback debug_print ffi_call inspect_sharding io_callback pure_callback
    pmax pmin psum psum_invariant reduce_scatter unreduced_pmax unreduced_pmin unreduced_psum
    unreduced_reduce_scatter
    scaled_dot
    """.split()
)


@pytest.fixture(scope="module")
def listed():
    """Primitives of the installed JAX of which something has not been said."""
    out = subprocess.run([sys.executable, "-c", LISTED], check=True, capture_output=True).stdout
    return json.loads(out)


def test_every_primitive_has_an_entry(listed):
    assert set(listed["without entry"]) <= JAX_ONLY


def test_every_primitive_has_a_price(listed):
    assert set(listed["without price"]) <= JAX_ONLY | PRICED_OTHERWISE


PROGRAMS = {name: program for programs in RULES.values() for name, program in programs.items()}
SAID = {name: facts_of(find_primitive(name)) for name in PROGRAMS if find_primitive(name)}
LINEAR = [
    name
    for name, said in SAID.items()
    if said.linear
    and not (said.body or said.costly or said.names)
    and name not in ("cond", "layout_constraint", "sharding_constraint", "device_put", "name")
    and any(jnp.issubdtype(t.dtype, jnp.inexact) for t in PROGRAMS[name][1:])
]


def one_example(name, value):
    """The program of a primitive for one example, and operands of which `value` makes numbers."""
    fun, *types = PROGRAMS[name]
    types = [jax.ShapeDtypeStruct(t.shape[1:], t.dtype) for t in types]
    operands = [
        value(i, t) if jnp.issubdtype(t.dtype, jnp.inexact) else jnp.zeros(t.shape, t.dtype)
        for i, t in enumerate(types)
    ]
    return fun, operands


@jax.enable_x64(False)  # the programs are of 32 bits
def test_of_what_is_linear_a_zero_cotangent_stays_zero():
    assert len(LINEAR) > 25

    def pulled_back(name):
        fun, xs = one_example(name, lambda i, t: jnp.full(t.shape, jnp.nan, t.dtype))
        floats = [i for i, x in enumerate(xs) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def of_floats(*given):
            full = dict(enumerate(xs)) | dict(zip(floats, given, strict=True))
            outs = jax.tree.leaves(fun(*full.values()))
            return [y for y in outs if jnp.issubdtype(y.dtype, jnp.inexact)]

        outs, pull = jax.vjp(of_floats, *(xs[i] for i in floats))
        return pull(jax.tree.map(jnp.zeros_like, outs))

    zeros = jax.jit(lambda: {name: pulled_back(name) for name in LINEAR})()
    for name, cotangents in zeros.items():
        for ct in jax.tree.leaves(cotangents):
            assert not np.any(np.asarray(ct)), name


def test_what_is_elementwise_acts_on_each_element():
    for name, said in SAID.items():
        if not said.elementwise or name not in PROGRAMS:
            continue
        fun, *types = PROGRAMS[name]
        shapes = {t.shape[1:] for t in types}
        out = jax.eval_shape(fun, *(jax.ShapeDtypeStruct(t.shape[1:], t.dtype) for t in types))
        assert shapes == {out.shape}, name


def test_tables():
    names = enter("linear moderate: t1 t2\n t3\n : t4", names="axes")
    assert names == ("t1", "t2", "t3", "t4")
    p, q = (jax.extend.core.Primitive(n) for n in ("t3", "t4"))
    assert facts_of(p) == Facts(linear=True, moderate=True, names="axes")
    assert has_entry(q)
    assert facts_of(q) == Facts(names="axes")
    assert facts_of(jax.extend.core.Primitive("t5")) is UNKNOWN
    assert facts_of(jax.extend.core.Primitive("scan")) is UNKNOWN  # not that one
    assert facts_of(scan_p).costly
    with pytest.raises(TypeError, match="linaer"):
        enter("linaer: t6")


# --- a program that is recomputed in reverse: one kind of call among others ------------------
