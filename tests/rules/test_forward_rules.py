"""What rules make of operations is transposed and batched by JAX, in both precisions."""

import jax
import jax.numpy as jnp
import pytest

import batchax as bx
from explain.test_rule_names import CASES as SHOWN

from support.every_rule import NAME, RULES

CASES = [
    (module, name)
    for module, name in SHOWN
    if module not in ("rules.references", "rules.callbacks")  # JAX refuses them in such a rule
    if name not in ("dce_sink", "scan_steps")  # no result; of one precision
]
# Where JAX batches `lax.pbroadcast`, it indexes with a list.
FAULTS_OF_JAX = {"pbroadcast": (TypeError,)}


def ruled(fun):
    """`fun` with its own derivative as a rule of forward mode."""
    one = jax.custom_jvp(lambda *args: fun(*args))
    one.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
    return one


def of_gradient(vmap, fun, types, **options):
    """Traces the gradient of the batch with respect to all real arguments."""
    real = [i for i, t in enumerate(types) if jnp.issubdtype(t.dtype, jnp.floating)]

    def total(args):
        outs = jax.tree.leaves(vmap(fun, axis_name=NAME, **options)(*args))
        return sum(x.sum() for x in outs if jnp.issubdtype(x.dtype, jnp.floating))

    def gradient(*args):
        part = lambda some: total([some.get(i, x) for i, x in enumerate(args)])
        return jax.grad(part)({i: args[i] for i in real})

    return jax.eval_shape(gradient, *types)


def types_of(module, name, x64):
    """The function of a rule, and its arguments' types, in double precision if `x64`."""
    fun, *types = RULES[module][name]
    wide = lambda t: jnp.float64 if x64 and t.dtype == jnp.float32 else t.dtype
    return fun, [jax.ShapeDtypeStruct(t.shape, wide(t)) for t in types]


precisions = pytest.mark.parametrize("x64", [False, True], ids=["single", "double"])
cases = pytest.mark.parametrize(("module", "name"), CASES, ids=[name for _, name in CASES])


@precisions
@cases
@pytest.mark.each_commit(60, "conv_general_dilated-double", "dot_general-double", "sort-single")
def test_linear_parts_are_transposed(module, name, x64):
    with jax.enable_x64(x64):
        fun, types = types_of(module, name, x64)
        try:
            expected = of_gradient(jax.vmap, ruled(fun), types)
        except Exception:
            pytest.skip("JAX does not differentiate it")
        for options in ({}, {"batch_size": 2}):
            assert of_gradient(bx.vmap, ruled(fun), types, **options) == expected


@cases
@pytest.mark.each_commit(60, "conv_general_dilated", "dot_general", "sort")
def test_no_lanes(module, name):
    fun, *types = RULES[module][name]
    example = [jax.ShapeDtypeStruct(t.shape[1:], t.dtype) for t in types]
    none = [jax.ShapeDtypeStruct((0, *t.shape), t.dtype) for t in example]
    shapes = lambda vmap: jax.eval_shape(vmap(fun, axis_name=NAME), *none)
    try:
        jax.make_jaxpr(fun, axis_env=[(NAME, 0)])(*example)  # no array is scattered over no lanes
        expected = shapes(jax.vmap)
    except Exception:
        pytest.skip("JAX does not batch it")
    assert shapes(bx.vmap) == expected


@precisions
@cases
@pytest.mark.each_commit(60, "conv_general_dilated-double", "dot_general-double", "sort-single")
def test_a_batch_is_batched_by_jax(module, name, x64):
    with jax.enable_x64(x64):
        fun, types = types_of(module, name, x64)
        several = [jax.ShapeDtypeStruct((2, *t.shape), t.dtype) for t in types]
        shapes = lambda vmap: jax.eval_shape(jax.vmap(vmap(fun, axis_name=NAME)), *several)
        try:
            expected = shapes(jax.vmap)
        except (NotImplementedError, *FAULTS_OF_JAX.get(name, ())):
            pytest.skip("JAX does not batch it")
        assert shapes(bx.vmap) == expected
