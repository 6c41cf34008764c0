"""Packed and padded rows: the same results, and the cheaper layout where there is a choice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.rows.layouts import Costs, choose_packed, flatten
from batchax.rows.regions import find_regions
from batchax.rows.sizes import Sizes

from support.oracle import same, shares
from support.rows import attend, check_rows, check_rows_of_all, ragged, ways

BOTH = ways("packed", "padded")
WEIGHTS = jnp.asarray(np.random.default_rng(3).normal(size=(3, 3)), float)


@jax.custom_jvp
def norm_in_derivative(x):
    return 2 * x


@norm_in_derivative.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return norm_in_derivative(x), 2 * dx / (1 + jnp.sum(x**2))  # of the whole row


def several(x):
    y = jnp.tanh(x @ WEIGHTS)
    return (
        y.max(0),
        y.min(),
        (y > 0).any(),
        (y > 0).all(0),
        y.sum(),
        y * jnp.arange(x.shape[0])[:, None],
    )


FUNCTIONS = {
    "a network, pooled": lambda x: jax.nn.gelu(x @ WEIGHTS).mean(0),
    "a rule that looks at the row": lambda x: norm_in_derivative(x).sum(0),
    "a rule in a rule, without end": lambda x: jnp.sinc(x - x[:1]),
    "reductions of all kinds": several,
    "lookups": lambda x: WEIGHTS[(x[:, 0] > 0).astype(int)] * x,
    "attention between networks": lambda x: jnp.tanh(attend(jnp.tanh(x @ WEIGHTS)) @ WEIGHTS).sum(
        0
    ),
    "a checkpoint": lambda x: jax.checkpoint(lambda x: jnp.sin(x @ WEIGHTS))(x).sum(),
}


@pytest.mark.parametrize("names", shares(FUNCTIONS, 2), ids=" ".join)
def test_packed_rows_give_what_each_row_alone_gives(names):
    functions = {name: FUNCTIONS[name] for name in names}
    check_rows_of_all(functions, ragged(3), layout="packed", rules=True)


@pytest.mark.parametrize("layout", ["auto", "packed"])
def test_lengths_that_are_known_fill_the_data_and_need_no_mask(layout):
    x = ragged(3, poison=False)
    check_rows(
        FUNCTIONS["a network, pooled"], x, layout=layout, traced=False, eager=layout == "auto"
    )
    program = jax.make_jaxpr(bx.vmap(FUNCTIONS["a network, pooled"], layout=layout))(x)
    assert "select_n" in str(program)  # there, lengths are traced
    fixed = jax.make_jaxpr(lambda d: bx.vmap(lambda x: x.sum(0), layout=layout)(x.with_data(d)))
    assert "select_n" not in str(fixed(x.data)).replace("jit[name=_where", "")


def test_rows_without_elements():
    x = ragged(3, lengths=(3, 0, 2, 0))
    check_rows(lambda x: jnp.tanh(x @ WEIGHTS).sum(0), x, ways=BOTH)
    check_rows(lambda x: attend(jnp.log(jnp.abs(x))), x, ways=BOTH)


def chosen(fun, *, rows=64, bound=100, total=1000):
    """The layouts of the regions that a function of a row of shape (n, 3) runs in."""
    (n,) = jax.export.symbolic_shape("n")
    staged = jax.make_jaxpr(fun)(jax.ShapeDtypeStruct((n, 3), jnp.float32))
    program = flatten(staged)
    costs = Costs(Sizes({"n": total}, {}), Sizes({"n": bound}, {}), rows)
    packed = choose_packed(program, [True], costs)
    regions = find_regions(program.steps, packed)
    return ["packed" if region.packed else "padded" for region in regions]


def test_each_part_of_a_function_has_the_layout_that_costs_less():
    network = lambda x: jnp.tanh(jnp.tanh(x @ WEIGHTS) @ WEIGHTS)
    assert chosen(network) == ["packed"]
    assert chosen(lambda x: network(x).sum(0)) == ["packed"]
    assert chosen(attend) == ["padded"]
    wide = lambda x: jnp.tanh(x @ jnp.ones((3, 300))) @ jnp.ones((300, 3))
    assert chosen(lambda x: wide(attend(wide(x)))) == ["packed", "padded", "packed"]

    def deep(x):  # where each part by itself saves little of the whole
        for _ in range(40):
            x = attend(wide(x))
        return x

    assert chosen(deep) == ["packed", "padded"] * 40


def test_rows_that_are_known_to_be_as_long_as_the_bound_are_an_array():
    norm = lambda x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1)
    x = bx.Ragged(ragged(3, lengths=(4, 4, 4), poison=False).data, [4, 4, 4])
    staged = str(jax.make_jaxpr(lambda d: bx.vmap(norm)(x.with_data(d)).data)(x.data))
    assert "gather" not in staged
    assert "reduced_rows" not in staged
    check_rows(norm, x, traced=False)


def test_softmax_along_one_axis_of_images_does_not_move_them():
    # exp alone could run packed, with a gather before and one behind.
    n, m = jax.export.symbolic_shape("n, m")
    for axis in (0, 1):
        staged = jax.make_jaxpr(lambda x, axis=axis: jax.nn.softmax(x, axis))(
            jax.ShapeDtypeStruct((n, m), jnp.float32)
        )
        program = flatten(staged)
        long = Sizes({"n": 60 * 125, "m": 60 * 132}, {})
        costs = Costs(long, Sizes({"n": 125, "m": 132}, {}), 60, {("n", "m"): 61_000})
        assert True not in choose_packed(program, [True], costs)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_many_elements_are_computed_in_an_even_number(shape, traced):
    # XLA for CPUs does not vectorize a long chain of operations on an odd number.
    lengths = np.arange(3, 373)
    lengths[0] += 1 - lengths.sum() % 2
    x = ragged(*shape, lengths=lengths, poison=False)
    total = int(lengths.sum())
    own = jax.tree.map(jnp.asarray, x.lengths) if traced else x.lengths

    def run(fun, data):
        return bx.vmap(fun)(bx.Ragged(data, own, x.max_length)).data

    chain = lambda x: jax.nn.sigmoid(3 * jnp.tanh(x))
    text = str(jax.make_jaxpr(functools.partial(run, chain))(x.data))
    computed = [line for line in text.splitlines() if " tanh " in line or " logistic " in line]
    assert {f"[{total}" in line for line in computed} == {False}
    short = str(jax.make_jaxpr(functools.partial(run, lambda x: 2 * x))(x.data))
    assert "dynamic_update_slice" not in short
    same(jax.jit(functools.partial(run, chain))(x.data), chain(x.data))
    slope = lambda fun: jax.jit(jax.grad(lambda d: (fun(d) ** 2).sum()))(x.data)
    same(slope(functools.partial(run, chain)), slope(chain))


@pytest.mark.parametrize("layout", ["packed", "padded", "auto"])
def test_a_derivative_rule_that_raises_does_so_where_the_derivative_is_taken(layout):
    @jax.custom_jvp
    def largest(x):
        return jnp.argmax(x), x * 2

    @largest.defjvp
    def rule(primals, tangents):
        raise ArithmeticError("no derivative")

    x = ragged(lengths=(2, 3))
    f = bx.vmap(largest, layout=layout)
    same(jax.jit(f)(x)[0], jnp.stack([jnp.argmax(row) for row in x.rows()]))
    with pytest.raises(ArithmeticError, match="no derivative"):
        jax.grad(lambda data: f(x.with_data(data))[1].data.sum())(x.data)


def test_a_function_called_again_with_other_lengths():
    # JAX may return the jaxpr of `rot90` that it traced in the first call, of other sizes.
    def turned(x):
        step = lambda c, t: (c + jnp.mean(x), jnp.rot90(x) * t)
        return bx.scan(step)(0.0, jnp.ones(2))[1]

    for lengths in ([4], [2, 4, 2]):
        x = ragged(3, lengths=lengths)
        for got, row in zip(bx.vmap(turned)(x).rows(), x.rows(), strict=True):
            same(got, turned(row))


def test_rules_in_rules_are_looked_into_to_the_fourth_alone():
    log = []

    def endless(order, x):
        f = jax.custom_jvp(lambda x: (x * 2, jnp.ones(order)))

        @f.defjvp
        def rule(primals, tangents):
            log.append(order)
            (x,), (t,) = primals, tangents
            following = endless(order + 1, x)[0] + endless(order + 2, x)[0]
            return (x * 2, jnp.ones(order)), (following * t, jnp.zeros(order))

        return f(x)

    rows = ragged(lengths=(3, 2, 5))
    total = lambda x: endless(1, x)[0].sum()
    same(jax.jit(bx.vmap(total))(rows), jnp.stack([total(x) for x in rows.rows()]))
    assert max(log) <= 5


def test_operations_share_the_masks_of_rows():
    def jaxpr(f):
        batched = bx.vmap(f, layout="padded")
        return str(jax.make_jaxpr(batched)(ragged(lengths=(3, 2, 5))))

    count = lambda f: jaxpr(f).count(" lt ")
    several = lambda x: [f(x).sum() for f in (jnp.exp, jnp.cos, jnp.sin)]
    assert count(lambda x: jnp.exp(x).sum()) == count(several) > 0
