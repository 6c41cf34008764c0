"""A scan in which no lanes can diverge is batched once, for lanes in lockstep."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import batchax as bx
from batchax.divergence import runner
from batchax.divergence.costs import may_part
from batchax.jaxprs.bodies import Anywhere
from batchax.kernel import inner


def step(c: Any, x: Any) -> Any:
    return jnp.sin(c) + x, c


def step_with_a_loop(c: Any, x: Any) -> Any:
    return lax.while_loop(lambda c: c < x, lambda c: c + 1, c), c


def step_with_a_branch(c: Any, x: Any) -> Any:
    return lax.cond(x > 0, jnp.sin, jnp.cos, c), c


@pytest.mark.parametrize(
    ("fun", "parts"), [(step, False), (step_with_a_loop, True), (step_with_a_branch, True)]
)
def test_lanes_diverge_in_loops_and_branches(fun: Callable[[Any, Any], Any], parts: bool) -> None:
    jaxpr = jax.make_jaxpr(lambda x: lax.scan(fun, x, jnp.arange(3.0)))(1.0)
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive is lax.scan_p)
    assert may_part.in_program(scan.params["jaxpr"]) == parts


def test_a_scan_in_which_no_lanes_diverge_is_batched_for_lanes_in_lockstep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lockstep: list[bool] = []
    build = inner._batch_inner

    def noted(axis: Any, *rest: Any) -> Any:
        lockstep.append(axis.divergence is None)
        return build(axis, *rest)

    def trace() -> Any:
        jax.clear_caches()
        lockstep.clear()
        batched = bx.vmap(lambda x: lax.scan(step, x, jnp.arange(3.0)))
        return jax.make_jaxpr(batched)(jnp.ones(1 << 20))

    monkeypatch.setattr(inner, "_batch_inner", noted)
    # Tests have several devices, on which lanes stay in lockstep.
    monkeypatch.setattr(runner, "may_be_spread", lambda values, most: False)
    jaxpr = trace()
    assert all(lockstep)
    # If something in it might diverge, it would be batched for that as well, to the same program.
    monkeypatch.setattr(runner, "may_part", Anywhere(lambda eqn: True))
    assert str(trace()) == str(jaxpr)
    assert not all(lockstep)
