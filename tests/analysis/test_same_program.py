"""`same_program`: the same programs are found the same, others are not, and it says where."""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import batchax as bx

B = 8


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def affine(M, v, b):
    return jnp.tanh(M @ v + b).sum()


def by_einsum(M, v, b):
    return jnp.tanh(jnp.einsum("ij,bj->bi", M, v) + b).sum(1)


WEIGHTS_AND_EXAMPLES = (shaped(3, 5), shaped(B, 5), shaped(3))
HANDWRITTEN = {
    "einsum": by_einsum,
    "einsum, transposed": lambda M, v, b: jnp.tanh(jnp.einsum("ij,bj->ib", M, v).T + b).sum(1),
    "matmul": lambda M, v, b: jnp.tanh(v @ M.T + b).sum(-1),
    "matmul of columns": lambda M, v, b: jnp.tanh(M @ v.T + b[:, None]).sum(0),
    "tensordot": lambda M, v, b: jnp.sum(jnp.tanh(b + jnp.tensordot(v, M, (1, 1))), axis=1),
    "jax.vmap": jax.vmap(affine, (None, 0, None)),
    "jit": jax.jit(by_einsum),
    "checkpoint": jax.checkpoint(by_einsum),
}


@pytest.mark.parametrize("spelling", HANDWRITTEN)
def test_the_example_is_what_one_would_have_written(spelling):
    vmapped = bx.vmap(affine, (None, 0, None))
    found = bx.same_program(vmapped, HANDWRITTEN[spelling], *WEIGHTS_AND_EXAMPLES)
    assert found, found
    assert str(found) == "the same program: dot_general, add, tanh, reduce_sum"


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / jnp.sqrt(4.0)) @ v


def mlp(x, w, b, v):
    return jax.nn.relu(w @ x + b) @ v


def convolved(x, w):
    return lax.conv_general_dilated(x[None], w, (1, 1), "SAME")[0]


def rnn(xs, w):
    return lax.scan(lambda h, x: (jnp.tanh(w @ h + x),) * 2, jnp.zeros(3), xs)


def loop(x):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))


FUNCTIONS = {
    "attention": (attention, 0, [(B, 6, 4), (B, 7, 4), (B, 7, 3)]),
    "mlp": (mlp, (0, None, None, None), [(B, 3), (5, 3), (5,), (5, 2)]),
    "gradient of mlp": (
        jax.grad(lambda *a: mlp(*a).sum(), argnums=(1, 2)),
        (0, None, None, None),
        [(B, 3), (5, 3), (5,), (5, 2)],
    ),
    "convolution": (convolved, (0, None), [(B, 3, 8, 8), (4, 3, 3, 3)]),
    "rnn": (rnn, (0, None), [(B, 6, 3), (3, 3)]),
    "while": (loop, 0, [(B, 3)]),
    "sort": (lambda x: (jnp.sort(x), jnp.argsort(x)), 1, [(5, B)]),
    "cumsum": (jnp.cumsum, 1, [(5, B)]),
    "first": (lambda x: x[jnp.argmax(x)], 0, [(B, 3)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_vmap_is_the_program_of_jax(name):
    fun, in_axes, shapes = FUNCTIONS[name]
    args = [shaped(*s) for s in shapes]
    found = bx.same_program(bx.vmap(fun, in_axes), jax.vmap(fun, in_axes), *args)
    assert found, found


x, square = shaped(2, 3), shaped(3, 3)
table = jnp.arange(3.0)
SAME = {
    "constants by value": (
        lambda x: x * table,
        lambda x: np.arange(3.0, dtype=table.dtype) * x,
        [x],
    ),
    "comparisons turned": (lambda x: x > 1, lambda x: jnp.less(1, x), [x]),
    "axes of size one": (lambda x: x[None, :, None, :].sum(1), lambda x: x.sum(0)[None, None], [x]),
    "a carry that nothing needs": (
        lambda x: lax.fori_loop(0, 3, lambda i, c: (c[0] * 2, jnp.sin(c[1])), (x, x))[0],
        lambda x: lax.fori_loop(0, 3, lambda i, c: 2 * c, x),
        [x],
    ),
    "what a loop takes, in any order": (
        lambda x, y: lax.scan(lambda c, _: ((c + x) * y, None), x, length=3)[0],
        lambda x, y: lax.scan(lambda c, _: (y * (x + c), None), x, length=3)[0],
        [x, x],
    ),
    "keys by value": (
        partial(jax.random.fold_in, jax.random.key(1)),
        partial(jax.random.fold_in, jax.random.key(1)),
        [shaped(dtype=jnp.int32)],
    ),
    "custom derivatives": (jax.nn.relu, lambda x: jnp.maximum(x, 0), [x]),
}


@pytest.mark.parametrize("name", SAME)
def test_what_does_not_matter(name):
    f, g, args = SAME[name]
    found = bx.same_program(f, g, *args)
    assert found, found


def printing(*words):
    def fun(x):
        for word in words:
            jax.debug.print(word)
        return x

    return fun


def written(*values):
    def fun(x):
        ref = jax.new_ref(x)
        for value in values:
            ref[...] = ref[...] * value + 1
        return ref[...]

    return fun


dot = partial(lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
DIFFERENT = {
    "another dtype of sums": (
        lambda x: x.sum(0, dtype=jnp.float32).astype(jnp.float16),
        lambda x: x.sum(0, dtype=jnp.float16),
        [shaped(2, 3, dtype=jnp.float16)],
    ),
    "precision": (dot, partial(dot, precision="highest"), [square, square]),
    "type of products": (
        lambda x, y: dot(x, y, preferred_element_type=jnp.float32),
        lambda x, y: dot(x, y).astype(jnp.float32),
        [shaped(3, 3, dtype=jnp.float16)] * 2,
    ),
    "transposed output": (lambda x: x @ x, lambda x: (x @ x).T, [square]),
    "sign of zero": (lambda x: x + 0.0, lambda x: x + -0.0, [x]),
    "mode of a gather": (
        lambda x: x.at[jnp.array([5])].get(mode="clip"),
        lambda x: x.at[jnp.array([5])].get(mode="fill"),
        [x],
    ),
    "key": (
        lambda x: x + jax.random.normal(jax.random.key(0), (3,)),
        lambda x: x + jax.random.normal(jax.random.key(1), (3,)),
        [x],
    ),
    "key that is given": (
        partial(jax.random.fold_in, jax.random.key(1)),
        partial(jax.random.fold_in, jax.random.key(2)),
        [shaped(dtype=jnp.int32)],
    ),
    "order of effects": (printing("a", "b"), printing("b", "a"), [x]),
    "one effect less": (printing("a", "a"), printing("a"), [x]),
    "order of writes": (written(2.0, 3.0), written(3.0, 2.0), [x]),
    "two draws": (
        lambda x: lax.rng_uniform(x, x + 1, (3,)) + lax.rng_uniform(x, x + 1, (3,)),
        lambda x: (lambda y: y + y)(lax.rng_uniform(x, x + 1, (3,))),
        [shaped()],
    ),
    "direction of a scan": (
        lambda x: lax.scan(lambda c, e: (c + e, c), 0.0, x),
        lambda x: lax.scan(lambda c, e: (c + e, c), 0.0, x, reverse=True),
        [shaped(3)],
    ),
    "once, or for each copy": (
        lambda x: jnp.broadcast_to(jnp.sin(x), (B, 3)),
        lambda x: jnp.sin(jnp.broadcast_to(x, (B, 3))),
        [shaped(3)],
    ),
    "merged another way": (lambda x: x.reshape(9), lambda x: x.T.reshape(9), [square]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_matters(name):
    f, g, args = DIFFERENT[name]
    assert bx.same_program(f, f, *args)
    assert bx.same_program(g, g, *args)
    found = bx.same_program(f, g, *args)
    assert not found
    assert found.difference is not None


def test_the_first_difference_is_shown_with_both_lines():
    def wrong(M, v, b):
        shifted = M @ v - b
        return jnp.tanh(shifted).sum()

    vmapped = [bx.vmap(f, (None, 0, None)) for f in (affine, wrong)]
    found = bx.same_program(*vmapped, *WEIGHTS_AND_EXAMPLES)
    assert not found.same
    first, second = found.difference.first, found.difference.second
    assert (first.primitive, second.primitive) == ("add", "sub")
    assert first.file == second.file == __file__
    assert first.source == "return jnp.tanh(M @ v + b).sum()"
    assert second.source == "shifted = M @ v - b"
    assert second.shapes == ((3, B), (3, 1))  # short vectors are columns
    assert second.out_shapes == ((3, B),)
    text = str(found)
    assert text.startswith("not the same program: They first differ at `add` and `sub`.\n")
    for side in (first, second):
        assert f"{os.path.basename(__file__)}:{side.line}" in text
        assert side.source in text


def test_a_difference_in_a_body_is_shown_there():
    def stepped(step):
        return lambda x: lax.scan(lambda c, e: (step(c) + e, c), 0.0, x)

    found = bx.same_program(stepped(jnp.sin), stepped(jnp.cos), shaped(3))
    assert found.difference.first.primitive == "sin"
    assert found.difference.second.primitive == "cos"


def test_parameters_and_outputs_that_differ_are_named():
    found = bx.same_program(lambda x: x.sum(0), lambda x: x.sum(1), square)
    assert "`reduce_sum`" in str(found)
    assert "axes=(1,)" in found.difference.second.text
    found = bx.same_program(lambda x: (x, {"w": x}), lambda x: (x, {"w": x.T}), square)
    assert found.difference.what == "They first differ in what out[1]['w'] is."


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda x: (x, {"w": x[0]}), "`out[1]['w']` is float32[2,3], and float32[3]"),
        (lambda x: (x, {"w": x > 0}), "`out[1]['w']` is float32[2,3], and bool[2,3]"),
        (lambda x: (x, {"v": x}), "only the first function returns `out[1]['w']`"),
        (lambda x: (x, {"v": x, "w": x}), "only the second function returns `out[1]['v']`"),
        (lambda x: [x, {"w": x}], "they return PyTreeDef"),
    ],
)
def test_outputs_of_other_types_are_a_difference(other, message):
    found = bx.same_program(lambda x: (x, {"w": x}), other, x)
    assert not found
    assert message in str(found)


def test_what_it_returns():
    found = bx.same_program(jnp.sin, jnp.sin, np.ones(3))
    assert isinstance(found, bx.Comparison)
    assert (found.same, found.operations, found.difference) == (True, (("sin",), ("sin",)), None)
    assert repr(found) == "Comparison(same=True)"
    assert (
        str(bx.same_program(lambda x: x, lambda x: x.T.T, x)) == "the same program: no operations"
    )


def test_what_cannot_be_staged():
    with pytest.raises(bx.ArgumentTypeError, match="`g` is 3, which cannot be called"):
        bx.same_program(jnp.sin, 3, x)

    def refuses(x):
        raise LookupError("not today")

    with pytest.raises(LookupError, match="not today"):
        bx.same_program(jnp.sin, refuses, x)


def test_large_constants():
    one = np.arange(40_000.0, dtype=np.float32).reshape(200, 200)
    other = np.where(one == 123, -1, one)
    row = np.ones(200, np.float32)
    assert bx.same_program(lambda x: x @ one, lambda x: x @ one.copy(), row)
    found = bx.same_program(lambda x: x @ one, lambda x: x @ other, row)
    assert "a constant in it has another value" in str(found)


def of_devices(count=4, name="devices"):
    return jax.sharding.Mesh(np.array(jax.devices()[:count]), (name,))


def on_devices(fun, mesh, out, **options):
    """`fun` of weights and examples with `shard_map`, by hand."""
    name, P = mesh.axis_names[0], jax.P
    specs = (P(), P(name), P())
    return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P(*out), **options)


@pytest.mark.parametrize("typed", [True, False])  # whether types say what varies over the mesh
def test_lanes_on_devices_are_shard_map_by_hand(typed):
    mesh, given = of_devices(), WEIGHTS_AND_EXAMPLES
    for ours in (bx.vmap(affine, (None, 0, None), mesh="all"),
                 bx.vmap(affine, (None, 0, None), mesh=mesh, batch_size=2)):  # fmt: skip
        by_hand = on_devices(by_einsum, mesh, ["devices"], check_vma=typed)
        found = bx.same_program(ours, by_hand, *given)
        assert found, found
        assert found.operations[0][-1] == "shard_map"

    def mean(M, v, b):
        return lax.psum(by_einsum(M, v, b).sum(0), "devices") / B

    ours = bx.vmap(affine, (None, 0, None), bx.Reduce("mean"), mesh="all")
    found = bx.same_program(ours, on_devices(mean, mesh, [], check_vma=typed), *given)
    assert found, found


def test_other_meshes_and_other_sums_over_devices_differ():
    given = WEIGHTS_AND_EXAMPLES
    ours = bx.vmap(affine, (None, 0, None), mesh=of_devices())
    for mesh in (of_devices(2), of_devices(name="hosts")):
        found = bx.same_program(ours, on_devices(by_einsum, mesh, mesh.axis_names), *given)
        assert not found
    everywhere = on_devices(by_einsum, of_devices(), [], check_vma=False)
    assert not bx.same_program(ours, everywhere, *given)

    def total(M, v, b, sum_of):
        return sum_of(by_einsum(M, v, b).sum(0), "devices")

    sums = [on_devices(partial(total, sum_of=s), of_devices(), []) for s in (lax.psum, lax.pmax)]
    assert not bx.same_program(*sums, *given)


def test_parameters_that_are_objects():
    """They are known by what they hold, and bare marks by which of them are the same."""

    class Holder:
        def __init__(self, held):
            self.held, self.itself = held, self

    primitive = Primitive("of_objects")
    primitive.def_abstract_eval(lambda x, **_: x)
    bind = lambda **params: lambda x: primitive.bind(x, **params)
    mark, again, other = object(), object(), object()
    for first, second, same in (
        (bind(of=Holder(jnp.ones(2))), bind(of=Holder(jnp.ones(2))), True),
        (bind(of=Holder(jnp.ones(2))), bind(of=Holder(jnp.zeros(2))), False),
        (bind(a=mark, b=mark), bind(a=again, b=again), True),
        (bind(a=mark, b=mark), bind(a=again, b=other), False),
    ):
        assert bool(bx.same_program(first, second, 1.0)) == same


def test_an_open_program_with_constants_among_parameters():
    primitive = Primitive("of_program")
    primitive.def_abstract_eval(lambda x, **_: x)

    def of(fun):
        program = jax.make_jaxpr(fun)(1.0)
        jaxpr = program.jaxpr
        if not hasattr(jaxpr, "consts"):  # JAX 0.12 has no open programs
            jaxpr = jaxpr.replace(constvars=jaxpr.invars, invars=[])
        return lambda x: primitive.bind(x, program=jaxpr)

    assert bx.same_program(of(jnp.sin), of(jnp.sin), 1.0)
    assert not bx.same_program(of(jnp.sin), of(jnp.cos), 1.0)


def test_a_program_of_a_trace_that_is_over_among_parameters():
    """As libraries keep a function that closes over a value, which they pass as an operand."""
    primitive = Primitive("of_closure")
    primitive.def_abstract_eval(lambda x, y, **_: x)

    def of(fun):
        def call(x):
            closed = jax.make_jaxpr(lambda y: fun(y) * x)(1.0)
            return primitive.bind(x, *closed.consts, program=closed.jaxpr)

        return jax.jit(call)

    assert bx.same_program(of(jnp.sin), of(jnp.sin), 1.0)
    assert not bx.same_program(of(jnp.sin), of(jnp.cos), 1.0)
