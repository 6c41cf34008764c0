"""What users of JAX asked of `custom_vmap` in its issues."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.oracle import agree, at_once, example, same

VMAPS = pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap])


@bx.custom_vmap
def vector_dot(u, v):
    assert u.ndim == v.ndim == 1
    return u @ v


@vector_dot.def_vmap
def vector_dot_vmap_rule(axis_size, in_batched, u, v):
    u_batched, v_batched = in_batched
    told = []
    if u_batched:
        assert u.shape == (axis_size, 3)
        told.append("lhs batched")
    if v_batched:
        assert v.shape == (axis_size, 3)
        told.append("rhs batched")
    print(", ".join(told))
    return [jnp.sum(u * v, axis=-1)], [u_batched or v_batched]


U, V = example((4, 3), seed=1), example((4, 3), seed=2)
SIDES = [
    ((0, None), (U, V[0]), "lhs batched"),
    ((1, None), (U.T, V[0]), "lhs batched"),
    ((None, 0), (U[0], V), "rhs batched"),
    ((0, 0), (U, V), "lhs batched, rhs batched"),
]


@VMAPS
@pytest.mark.parametrize(("in_axes", "args", "said"), SIDES)
@pytest.mark.each_commit(4)
def test_9073_reverse_mode_of_the_example(vmap, in_axes, args, said, capsys):
    f = lambda u, v: jnp.exp(vector_dot(u, v))
    plain = lambda u, v: jnp.exp(u @ v)
    total = lambda f, vmap: lambda u, v: jnp.sum(vmap(f, in_axes)(u, v) ** 2)
    gradient = lambda f, vmap: jax.grad(total(f, vmap), (0, 1))
    agree(gradient(f, vmap), gradient(plain, jax.vmap), *args)
    assert set(capsys.readouterr().out.splitlines()) == {said}
    inside = lambda f, vmap: vmap(jax.grad(f, (0, 1)), in_axes)
    agree(inside(f, vmap), inside(plain, jax.vmap), *args)
    assert capsys.readouterr().out
    agree(jax.grad(f, (0, 1)), jax.grad(plain, (0, 1)), U[0], V[0])
    agree(jax.hessian(f), jax.hessian(plain), U[0], V[0])
    assert capsys.readouterr().out == ""


@VMAPS
def test_13283_a_linear_call_that_is_batched_by_a_loop(vmap):
    """What the issue wanted: a transpose of one's own, a known value, and batches."""
    c = 4.0

    def product(a, b):
        times = lambda residuals, a: a * residuals[0] * np.float32(c)
        return jax.custom_derivatives.linear_call(times, times, (b,), a)

    own, plain = bx.sequential_vmap(product), lambda a, b: a * b * c
    for in_axes, args in [((0, None), (U, V[0])), ((0, 0), (U, V))]:
        run = lambda f, vmap, axes=in_axes: jax.grad(lambda a, b: jnp.sum(vmap(f, axes)(a, b) ** 2))
        inside = lambda f, vmap, axes=in_axes: vmap(
            jax.grad(lambda a, b: jnp.sum(f(a, b) ** 2)), axes
        )
        of_both = lambda use: (use(own, vmap), use(plain, jax.vmap))
        values = vmap(own, in_axes), jax.vmap(plain, in_axes)
        results = at_once(*values, *of_both(run), *of_both(inside))(*args)
        for got, expected in zip(results[::2], results[1::2], strict=True):
            same(got, expected)
        same(run(own, vmap)(*args), results[3])  # outside of jit


@VMAPS
def test_29996_a_loop_over_lanes_that_is_computed_while_compiling(vmap):
    known = []

    @jax.jit
    def f(x):
        with jax.ensure_compile_time_eval():
            y = vmap(bx.sequential_vmap(jnp.cos))(jnp.arange(10.0))
            known.append(np.asarray(y))  # has a value already
            slope = jax.grad(lambda x: vmap(bx.sequential_vmap(jnp.sin))(x).sum())(jnp.arange(3.0))
            known.append(np.asarray(slope))
        return x + y

    same(f(jnp.asarray(3.4)), 3.4 + jnp.cos(jnp.arange(10.0)))
    same(known[0], jnp.cos(jnp.arange(10.0)))
    same(known[1], jnp.cos(jnp.arange(3.0)))


@VMAPS
@pytest.mark.parametrize("in_axes", [0, None])
def test_7047_collectives_in_derivatives_of_ones_own(vmap, in_axes):
    """The argument may be the same for all lanes: nothing else says that there is an axis."""

    @bx.custom_vmap
    def summed(x):
        return lax.psum(x, "lanes")

    @summed.def_vmap
    def rule(axis_size, in_batched, x, *, axis_name):
        return x.sum(0), False

    tripled = lambda x: 3 * lax.psum(x, "lanes")
    summed.def_vjp(lambda x: (summed(x), None), lambda _, g: (tripled(g),))
    plain = jax.custom_vjp(lambda x: lax.psum(x, "lanes"))
    plain.defvjp(lambda x: (plain(x), None), lambda _, g: (tripled(g),))

    def run(f, vmap):
        each = lambda x: jax.value_and_grad(lambda x: jnp.sum(f(x) * jnp.arange(3.0)))(x)
        return vmap(each, in_axes, axis_name="lanes", axis_size=4)(U if in_axes == 0 else U[0])

    same(run(summed, vmap), run(plain, jax.vmap))
    values = vmap(summed, in_axes, axis_name="lanes", axis_size=4)(U if in_axes == 0 else U[0])
    total = U.sum(0) if in_axes == 0 else 4 * U[0]
    same(values, jnp.broadcast_to(total, (4, 3)))
