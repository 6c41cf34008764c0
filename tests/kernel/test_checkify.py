"""``checkify`` sees what goes wrong inside whatever batchax runs as one primitive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

import batchax as bx

from support.oracle import same

TABLE = np.linspace(1.0, 2.0, 8, dtype=np.float32)
RIGHT = jnp.array([1.0, 2.0, 3.0, 4.0, 6.0])
WRONG = {
    "right": RIGHT,
    "check": RIGHT.at[2].set(5.0),
    "nan": RIGHT.at[2].set(-1.0),
    "index": RIGHT.at[2].set(9.0),
    "division": RIGHT.at[2].set(7.0),
}


def f(x):
    """A function that goes wrong in a different way for some numbers."""
    checkify.check(x != 5, "x is {}", x)
    return jnp.log(x) + jnp.asarray(TABLE)[x.astype(int)] + 0.01 / (x - 7)


def stepped(loop):
    """`f` as the step of a loop that takes `x` steps more than one, at most seven."""
    return lambda x: loop(
        lambda s: s[0] < jnp.clip(x, 1, 7), lambda s: (s[0] + 1, f(x) + 0 * s[1]), (0.0, 0 * x)
    )[1]


with_rule = bx.custom_vmap(f)
with_rule.def_vmap(lambda axis_size, in_batched, x: (f(x), False))

# Each takes what is batched; one JAX function says what is right to report.
WAYS = {
    "batch_size": bx.vmap(f, batch_size=2),
    "Reduce": bx.vmap(f, batch_size=2, out_axes=bx.Reduce("sum")),
    "scan": lambda x: bx.scan(lambda c, x: (c, f(x[0])), in_axes=1)(0.0, x[None])[1],
    "until": lambda x: bx.scan(lambda c, x: (c + 1, f(x)), until=lambda c: c > 3)(0, x)[1],
    "bounded_while": lambda x: stepped(lambda *loop: bx.bounded_while(*loop, 9))(x[2]),
    "bounded_while of lanes": bx.vmap(stepped(lambda *loop: bx.bounded_while(*loop, 9))),
    "while, masked": bx.vmap(stepped(lax.while_loop), divergence="predicate"),
    "while, compact": bx.vmap(stepped(lax.while_loop), divergence="compact", batch_size=4),
    "sequential_vmap": bx.vmap(bx.sequential_vmap(f)),
    "custom_vmap, not batched": lambda x: with_rule(x[2]),
    "jax.vmap outside": lambda x: jax.vmap(bx.vmap(f, batch_size=2))(x[:, None]),
}


PLAIN = jax.jit(checkify.checkify(lambda x: lax.map(f, x), errors=checkify.all_checks))


@pytest.mark.compiles(80)
@pytest.mark.parametrize("way", WAYS)
def test_errors_are_reported_as_by_jaxs_loops(way):
    ours = jax.jit(checkify.checkify(WAYS[way], errors=checkify.all_checks))
    for what, x in WRONG.items():
        message = PLAIN(x)[0].get()
        assert (message is None) == (what == "right")
        assert ours(x)[0].get() == message, what


@pytest.mark.compiles(80)
@pytest.mark.parametrize("batch_size", [None, 1])
def test_each_device_of_a_mesh_reports_its_errors(batch_size):
    batched = bx.vmap(f, mesh=jax.make_mesh((4,), ("d",)), batch_size=batch_size)
    ours = jax.jit(checkify.checkify(batched, errors=checkify.all_checks))
    for x in WRONG.values():
        message = PLAIN(x)[0].get()  # of the third example, which the second device has
        assert ours(x)[0].get() == (message and f"at mapped index 1: {message}")


def test_a_program_without_checks_stays_as_it_is():
    batched = bx.vmap(jnp.sin, batch_size=2)
    eqns = jax.make_jaxpr(checkify.checkify(batched))(RIGHT).jaxpr.eqns
    assert "chunk_loop" in [eqn.primitive.name for eqn in eqns]


def test_a_while_with_a_predicate_for_each_lane():
    halve = lambda x: lax.while_loop(lambda x: x > 1, lambda x: jnp.log(x) * 2, x)
    batched = bx.vmap(halve, divergence="predicate")
    check = jax.jit(checkify.checkify(batched, errors=checkify.nan_checks))
    error, out = check(jnp.array([3.0, -1.0, 5.0]))
    # The lane that is done from the start has a number of which `log` is NaN: it takes no step.
    assert error.get() is None
    same(out, jnp.stack([halve(x) for x in (3.0, -1.0, 5.0)]))


MOVING = {
    "reversed": (lambda x: x[::-1], {}),
    "pairs": (lambda x: x[:, None] * x, {}),
    "its gradient": (jax.grad(lambda x: (x[:, None] * x).sum()), {"buckets": 2}),
}


@pytest.mark.compiles(80)
@pytest.mark.parametrize(("what", "jit"), [("reversed", False), *((what, True) for what in MOVING)])
def test_moving_elements_of_rows_is_no_error(what, jit):
    fun, options = MOVING[what]
    batch = bx.Ragged.from_rows([np.arange(1.0, n + 1) for n in (3, 1, 5, 2)])
    batched = bx.vmap(fun, **options)
    checked = lambda fun: checkify.checkify(fun, errors=checkify.index_checks)
    error, _ = jax.jit(checked(batched))(batch) if jit else checked(lambda: batched(batch))()
    assert error.get() is None


LOOP = lambda x: bx.bounded_while(lambda s: s < 10, lambda s: jnp.log(s) + s + 1, x, 9)


@pytest.mark.compiles(80)
@pytest.mark.parametrize(
    "fun",
    [lambda x: bx.vmap(jnp.log, batch_size=2)(x), lambda x: bx.vmap(LOOP)(x)],
    ids=["batch_size", "bounded_while"],
)
def test_derivatives(fun):
    loss = lambda x: jnp.sum(fun(x) ** 2)

    def checked_loss(x):
        error, out = checkify.checkify(loss, errors=checkify.all_checks)(x)
        return out, error

    want = jax.grad(loss)(RIGHT)
    for x, message in ((RIGHT, None), (WRONG["nan"], "nan generated by primitive: log.")):
        error, inside = jax.jit(checkify.checkify(jax.grad(loss), errors=checkify.all_checks))(x)
        outside, other = jax.jit(jax.grad(checked_loss, has_aux=True))(x)
        assert error.get() == other.get() == message
        if message is None:
            np.testing.assert_allclose(inside, want, rtol=1e-5)
            np.testing.assert_allclose(outside, want, rtol=1e-5)


def test_the_derivative_of_a_loop_with_checks():
    def step(x):
        checkify.check(x > 0, "x is {}", x)
        return lax.cond(x > 5, lambda x: x + 0 * f(x), lambda x: x, 2 * x + 1)

    def checked(x):
        error, out = checkify.checkify(lambda x: bx.bounded_while(lambda x: x < 9, step, x, 7))(x)
        return out, error

    for loss in (checked, jax.jit(checked)):
        slope, error = jax.grad(loss, has_aux=True)(2.0)
        assert error.get() is None
        assert slope == 4
        assert "x is -20.0" in jax.grad(loss, has_aux=True)(-20.0)[1].get()


@pytest.mark.compiles(80)
@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"divergence": "compact"}])
def test_an_error_for_each_lane(options):
    checked = checkify.checkify(f, errors=checkify.all_checks)
    x = jnp.array([1.0, 5.0, -1.0, 9.0, 7.0])
    error, _ = jax.jit(bx.vmap(checked, **options))(x)
    assert error.get() == jax.vmap(checked)(x)[0].get()


def test_an_error_for_each_lane_of_a_bounded_loop():
    checked = checkify.checkify(LOOP, errors=checkify.all_checks)
    error, _ = jax.jit(bx.vmap(checked))(WRONG["nan"])
    assert error.get() == "at mapped index 2: nan generated by primitive: log."


MANY = jnp.ones((10_000, 4, 4)).at[7, 0, :2].set(jnp.array([jnp.inf, -jnp.inf]))


@pytest.mark.parametrize("fun", [lambda x: jnp.sum(x[0]), lambda x: x @ jnp.abs(x)])
def test_sums_and_products_that_are_written_for_many_lanes(fun):
    checked = lambda vmap: jax.jit(checkify.checkify(vmap(fun), errors=checkify.nan_checks))
    own = [eqn.primitive.name for eqn in jax.make_jaxpr(bx.vmap(fun))(MANY).jaxpr.eqns]
    assert {"short_reduction", "small_matrices"} & {*own}
    message = checked(jax.vmap)(MANY)[0].get()
    assert "nan generated by primitive" in message
    assert checked(bx.vmap)(MANY)[0].get() == message
