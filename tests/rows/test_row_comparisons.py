"""What a function asks of its row's size is answered as for the row alone, or refused."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.errors import UnsupportedError

from support.known_lengths import with_known_lengths
from support.rows import check_rows, ragged

TABLE = {1: 5.0, 3: 7.0}
look_up = TABLE.get


def matched(x):
    match x.shape:
        case (1, _):
            return 2.0
        case (n, 3) if n > 3:
            return 3.0
    return 4.0


# Of rows of 3, 5, 1 and 4 elements of shape (3,), some answer one way and some the other.
QUESTIONS = {
    "==": lambda x: x.shape[0] == 1,
    "!=": lambda x: x.shape[0] != 1,
    "of a remainder": lambda x: x.shape[0] % 2 == 0,
    ">": lambda x: x.shape[0] - 1 > 0,
    "the greater": lambda x: max(x.shape[0] - 1, 1) * 1.0,
    "the truth": lambda x: not x.shape[0] - 1,
    "in a tuple": lambda x: x.shape[0] in (1, 2),
    "any": lambda x: any(d == 1 for d in x.shape),
    "a shape": lambda x: x.shape == (1, 3),
    "a match": matched,
    "NumPy": lambda x: np.array_equal(x.shape, (1, 3)),
    "in a set": lambda x: x.shape[0] in {1, 2},
    "a shape in a dict": lambda x: x.shape in {(1, 3): 1},
    "looked up": lambda x: TABLE.get(x.shape[0], 1.0),
    "looked up by a function": lambda x: look_up(x.shape[0], 1.0),
    "looked up by a map": lambda x: sum(map(look_up, (x.shape[0], 1), (1.0, 1.0))),
    "how many differ": lambda x: len({x.shape[0], 3}),
    "counted": lambda x: Counter(x.shape)[3],
    "kept": lambda x: dict.fromkeys(x.shape, 2.0).get(1, 1.0),
    "hashed": lambda x: hash(x.shape) == hash((1, 3)),
    "remembered": lambda x: doubled(x.shape[0]),
    "known to jit alone": lambda x: ones(x.shape[0])[0] + (x.shape[0] == 1),
}


@functools.cache
def doubled(size):
    return 2.0 if size == 1 else 3.0


ones = jax.jit(jnp.ones, static_argnums=0)


@functools.partial(jax.jit, static_argnums=1, static_argnames="more")
def scaled(x, size, *, more=1):
    return x.sum() * size * more


def hashable(size):
    """As libraries ask before they keep what they computed."""
    try:
        hash(size)
    except TypeError:
        return False
    return True


# All rows answer alike.
ANSWERED = {
    "known by the greatest": lambda x: x.shape[0] <= 7,
    "known by the greatest, never": lambda x: x.shape[0] == 99 or 2 * x.shape[0] > 14,
    "of itself": lambda x: x.shape == (2 * x).shape and x.shape[0] - 1 != x.shape[0],
    "of something else": lambda x: x.shape[0] == "n" or x.shape[0] is None or x.shape == (),
    "of an array": lambda x: jnp.where(x.shape[0] == jnp.asarray(3), 1.0, 2.0),
    "of an array, less": lambda x: jnp.where(x.shape[0] < jnp.arange(2, 5), 1.0, 2.0),
    "known to jit": lambda x: scaled(x, x.shape[0], more=x.shape[0]),
    "one-hot": lambda x: jax.nn.one_hot(0, x.shape[0]),
    "not hashable": lambda x: x.sum() * (hashable(x.shape[0]) in (True, False)),
}


def as_number(question):
    return lambda x: jnp.asarray(question(x)) * jnp.ones(())


@pytest.mark.usefixtures("longer_rows")
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_that_rows_answer_differently_is_refused_where_lengths_are_traced(name):
    question = QUESTIONS[name]
    where = f"{__file__}:"
    with pytest.raises(UnsupportedError, match="lengths are traced") as caught:
        jax.make_jaxpr(bx.vmap(as_number(question)))(ragged(3))
    assert str(caught.value).startswith(where)
    # Where they are known, rows of one length run together.
    x = ragged(3)
    program = jax.make_jaxpr(lambda data: bx.vmap(as_number(question))(x.with_data(data)))(x.data)
    assert program.out_avals[0].shape == (4,)


def test_where_lengths_are_known_each_row_has_its_own_answers():
    every = lambda x: jnp.stack([jnp.float32(question(x)) for question in QUESTIONS.values()])
    x = ragged(3)
    got = bx.vmap(every)(x)
    for i in range(4):
        np.testing.assert_array_equal(got[i], every(x[i]))


def test_a_question_that_all_rows_answer_alike_is_answered():
    every = lambda x: [as_number(question)(x) for question in ANSWERED.values()]
    check_rows(every, ragged(3), derivatives=False)
    check_rows(every, ragged(3), derivatives=False, traced=False)


@pytest.mark.usefixtures("longer_rows")
def test_an_empty_row_is_not_said_to_have_elements():
    fun = lambda x: x.sum() / x.shape[0] if x.shape[0] > 0 else jnp.asarray(7.0, float)
    x = ragged(lengths=(2, 0, 1))
    with pytest.raises(UnsupportedError, match="`n > 0`"):
        jax.jit(bx.vmap(fun))(x)
    check_rows(fun, x, traced=False)


@jax.custom_jvp
def scaled_tangent(x):
    return jnp.sin(x)


@scaled_tangent.defjvp
def _(primals, tangents):
    (x,), (dot,) = primals, tangents
    return jnp.sin(x), jnp.cos(x) * dot * (2.0 if x.shape[0] == 1 else 1.0)


@jax.custom_vjp
def scaled_cotangent(x):
    return jnp.sin(x)


scaled_cotangent.defvjp(
    lambda x: (jnp.sin(x), x),
    lambda x, cotangent: (cotangent * jnp.cos(x) * (2.0 if x.shape[0] == 1 else 1.0),),
)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_question_of_a_derivative_rule(layout):
    x = ragged()
    check_rows(scaled_tangent, x, traced=False, layout=layout)
    check_rows(scaled_cotangent, x, traced=False, layout="grouped", modes=("vjp",))

    def loss(data, fun, lengths):
        rows = bx.Ragged(data, lengths, x.max_length)
        return bx.vmap(lambda x: fun(x).sum(), layout=layout)(rows).sum()

    for fun in (scaled_tangent, scaled_cotangent):
        with pytest.raises(UnsupportedError, match=rf"^{re.escape(__file__)}:.*`n == 1`"):
            jax.make_jaxpr(jax.grad(loss), static_argnums=1)(x.data, fun, x.lengths)
    with pytest.raises(UnsupportedError, match='layout="grouped"'):
        jax.make_jaxpr(jax.grad(lambda data: loss(data, scaled_cotangent, x.lengths)))(x.data)


def test_two_sizes_are_compared_row_by_row():
    fun = lambda x, y: x.sum() + y.sum() if x.shape == y.shape else x.sum()
    x, y = ragged(), ragged(lengths=(3, 2, 1, 4), seed=1)
    check_rows(fun, x, y, traced=False)
    with pytest.raises(UnsupportedError, match="`n == m`"):
        jax.make_jaxpr(bx.vmap(fun))(x, y)
    named = bx.vmap(fun, in_axes=(bx.ragged("n"), bx.ragged("n")))
    jax.make_jaxpr(named)(x, x.with_data(2 * x.data))


SUMS = {
    "sum": (lambda n: lax.psum(n, "rows"), [13] * 4),
    "sum of a tree": (lambda n: lax.psum((n, 2 * n - 1, 2), "rows"), ([13] * 4, [22] * 4, [8] * 4)),
    "mean": (lambda n: lax.pmean(n, "rows"), [3.25] * 4),
    "greatest": (lambda n: lax.pmax(n, "rows"), [5] * 4),
    "number of rows": (lambda n: lax.psum(1, "rows"), [4] * 4),
}


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_sizes_are_summed_over_the_rows(layout):
    every = lambda x: [reduce(x.shape[0]) for reduce, _ in SUMS.values()]
    run = bx.vmap(every, axis_name="rows", layout=layout)
    for got in (jax.jit(run)(ragged()), with_known_lengths(run)(ragged())):
        jax.tree.map(np.testing.assert_allclose, got, [expected for _, expected in SUMS.values()])


@pytest.mark.parametrize("name", ["sum", "mean"])
def test_the_size_of_rows_in_groups_is_no_constant_to_be_summed(name):
    reduce, _ = SUMS[name]
    with pytest.raises(UnsupportedError, match="may be the length of the row"):
        bx.vmap(lambda x: reduce(x.shape[0]), axis_name="rows", layout="grouped")(ragged())


def next_token_loss(tokens, table):
    logits = jax.nn.log_softmax(table[tokens[:-1]])
    return -jnp.take_along_axis(logits, tokens[1:, None], 1).sum()


def test_what_jax_asks_of_a_sliced_row_has_one_program():
    """JAX asks whether there are any of ``n - 1`` elements, as it takes it of ``n``."""
    table = jnp.sin(jnp.arange(49.0)).reshape(7, 7)
    tokens = bx.Ragged((jnp.arange(10) * 3) % 7, np.array([3, 5, 2]))

    def losses(lengths):
        x = bx.Ragged(tokens.data, lengths, 40)
        # With a layout, a function that is specialized by length raises.
        return bx.vmap(next_token_loss, in_axes=(0, None), layout="padded")(x, table)

    alone = [next_token_loss(row, table) for row in tokens.rows()]
    np.testing.assert_allclose(jax.jit(losses)(tokens.lengths), alone, rtol=1e-5)
