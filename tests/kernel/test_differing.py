"""What is said to differ between lanes."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import lax

from batchax.kernel.differing import differing


def count(start, most):
    """A loop that lanes leave one by one if they begin at steps of their own."""
    return lax.while_loop(lambda i: i < most, lambda i: i + 1, start)


def of(fun):
    """Which results of `fun` differ if its argument does, and whether lanes part in it."""
    return differing(jax.make_jaxpr(fun)(1.0).jaxpr, [True])


def test_all_lanes_share_what_is_asked_of_all():
    begun = lambda x: jnp.where(eqxi.unvmap_any(x > 0), 1, 0)
    assert of(begun) == ((False,), False)
    assert of(lambda x: jnp.where(x > 0, 1, 0)) == ((True,), False)
    assert of(lambda x: count(begun(x), 5)) == ((False,), False)


def test_a_loop_that_asks_whether_any_lane_goes_on_is_left_by_each():
    goes_on = lambda c: eqxi.unvmap_any(c[1] < 5)
    step = lambda c: (c[0] + 1, c[1] + 1)
    assert of(lambda x: lax.while_loop(goes_on, step, (0, x))) == ((True, True), True)


def test_lanes_that_are_checked_to_stay_together_do_not_part():
    goes_on = lambda c: eqxi.unvmap_any(c[1] < 5)

    def step(carry):
        i, x = carry
        return eqxi.nonbatchable(i) + 1, x + count(jnp.int32(x), 3)

    assert of(lambda x: lax.while_loop(goes_on, step, (0, x))) == ((False, True), False)
