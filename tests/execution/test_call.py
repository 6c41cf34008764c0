"""Calls as values: what a way to run an axis has to say, and what `execute` does for all."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax.core import eval_jaxpr

from batchax.errors import AxisError
from batchax.execution.call import AllAtOnce, Call, Way, apply_passes, execute
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import flatten_outputs
from batchax.kernel.axis import Axis
from batchax.memo import Memo

from support.oracle import example, same

ran = []
kept = Memo("for these tests", most=4)


@dataclass(frozen=True)
class OneByOne(Way):
    """Lanes along axis 0, one after another: all that a new way has to say."""

    def run(self, call):
        ran.append(call)
        staged, size = call.staged, call.axis.size
        lanes = [
            eval_jaxpr(
                staged.jaxpr,
                staged.consts,
                *(
                    x if a is None else x[i]
                    for x, a in zip(call.values, call.positions, strict=True)
                ),
            )
            for i in range(size)
        ]
        return [jnp.stack(outs) for outs in zip(*lanes, strict=True)], None


@dataclass(frozen=True)
class Kept(OneByOne):
    """The same, whose programs are kept."""

    @property
    def memo(self):
        return kept


def one_by_one(call, way=OneByOne):
    return call if call.axis.size > 4 else Call(call.axis, call.function, call.mapped, way())


def batched(fun, *passes, out_axes=0):
    """As `bx.vmap` of a function of a shared value and one of each lane, with these passes."""

    def of_all(w, xs):
        def function(*values):
            return flatten_outputs(fun(*values), out_axes, len(xs))

        mapped = [Mapped("w", w, None), Mapped("xs", xs, 0)]
        outs, outputs = execute(apply_passes(passes, Call(Axis(len(xs)), function, mapped)))
        return outputs.rebuild(outs)

    return of_all


def f(w, x):
    return jnp.tanh(w @ x) * OFFSET


OFFSET = example((3,), seed=3)
W, XS = example((3, 2), seed=1), example((4, 2), seed=2)
EXPECTED = jnp.stack([f(W, x) for x in XS])


@pytest.fixture(autouse=True)
def nothing_ran():
    ran.clear()
    kept.cache_clear()


@pytest.mark.compiles(40)
def test_a_way_that_only_says_how_lanes_run_serves_every_call():
    whole = batched(f, one_by_one)
    same(whole(W, XS), EXPECTED)
    same(jax.jit(whole)(W, XS), EXPECTED)
    gradient = jax.grad(lambda w: (whole(w, XS) ** 2).sum())(W)
    same(gradient, jax.grad(lambda w: sum((f(w, x) ** 2).sum() for x in XS))(W))
    same(jax.vmap(whole, (None, 0))(W, XS[None]), EXPECTED[None])
    with jax.debug_nans(True):
        same(whole(W, XS), EXPECTED)
    assert len(ran) == 5


def test_a_pass_leaves_calls_alone_that_are_not_for_it():
    more = example((5, 2), seed=4)
    same(batched(f, one_by_one)(W, more), jnp.stack([f(W, x) for x in more]))
    assert not ran


def test_a_program_is_kept_with_what_it_closes_over_as_arguments():
    whole = batched(f, functools.partial(one_by_one, way=Kept))
    same(whole(W, XS), EXPECTED)
    same(whole(2 * W, XS), jnp.stack([f(2 * W, x) for x in XS]))
    assert len(ran) == len(kept) == 1
    (only,) = kept.values()
    assert not only.program.consts


def test_a_refusal_comes_before_anything_is_computed():
    calls = []

    def told(w, x):
        jax.debug.callback(lambda: calls.append(1))
        return w @ x

    with pytest.raises(AxisError, match="depends on the batch"):
        batched(told, out_axes=None)(W, XS)
    jax.effects_barrier()
    assert not calls


def test_a_call_is_staged_once_and_only_if_somebody_asks():
    staged = []

    def function(x):
        staged.append(x)
        return flatten_outputs(2 * x, 0, 4)

    call = Call(Axis(4), function, [Mapped("xs", XS, 0)])
    assert call.values == [XS]
    assert call.way == AllAtOnce()
    assert not staged
    call = call.with_program()
    assert call.with_values([2 * XS]).staged is call.staged
    assert call.with_values([2 * XS]).mapped[0].given is XS
    assert len(staged) == 1
