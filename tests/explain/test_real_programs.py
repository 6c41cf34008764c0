"""Programs of libraries, as people bring them: what is told first, and how much is told."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import batchax as bx
from batchax.analysis.differences import is_installed
from batchax.explain.page import as_page


def told(explanation, fun, lines, page):
    """The text of an explanation, which must be short, begin with findings and name `fun`'s lines.

    Args:
      explanation: of a program.
      fun: a function of this file that is in it.
      lines: no text may have more.
      page: bytes that the page may have.
    """
    assert len(str(explanation).splitlines()) <= 60
    assert str(explanation).splitlines()[2].startswith("Findings")
    text = explanation.details()
    assert len(text.splitlines()) <= lines
    assert len(as_page(explanation)) <= page
    assert text.splitlines()[2].startswith("Findings")
    first = inspect.getsourcelines(fun)[1]
    own = range(first, first + len(inspect.getsource(fun).splitlines()))
    led = [eqn.source.called_from for eqn in explanation.walk() if is_installed(eqn.source.file)]
    assert led
    assert {(line.file, line.line in own) for line in led} == {(__file__, True)}
    return text


def network(layers):
    """The loss of a network of layers with attention, and its parameters."""
    eqx = pytest.importorskip("equinox")
    keys = iter(jax.random.split(jax.random.key(0), 2 * layers))
    size = 8
    blocks = [
        (
            eqx.nn.LayerNorm(size),
            eqx.nn.MultiheadAttention(2, size, key=next(keys)),
            eqx.nn.MLP(size, size, 16, 1, key=next(keys)),
        )
        for _ in range(layers)
    ]
    params, static = eqx.partition(blocks, eqx.is_array)

    def loss(params, x):
        for norm, attention, mlp in eqx.combine(params, static):
            y = jax.vmap(norm)(x)
            x = x + attention(y, y, y)
            x = x + jax.vmap(mlp)(x)
        return (x**2).mean()

    return loss, params


def test_a_step_of_a_transformer():
    optax = pytest.importorskip("optax")
    loss, params = network(5)
    optimiser = optax.adam(1e-3)

    def step(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = optimiser.update(grads, state, params)
        return value, optax.apply_updates(params, updates), state

    args = params, optimiser.init(params), jnp.ones((3, 4, 8))
    explanation = bx.explain(step, (None, None, 0), compile=False)(*args)
    assert sum(1 for _ in explanation.walk()) > 1500
    brief = str(explanation).splitlines()
    assert len(brief) <= 60
    assert sum("optimiser.update(" in line for line in brief) > 1
    text = explanation.details()
    assert len(text.splitlines()) < 600  # and 2,100 without folds
    assert "4 more times what " in text  # the other layers
    assert "(5 of these)" in text
    costliest = text[text.index("  lines ") :].splitlines()[:5]
    assert any("optimiser.update(grads, state, params)" in line for line in costliest)
    assert len(as_page(explanation)) < 2_000_000


def test_an_ensemble_of_an_adaptive_solver():
    diffrax = pytest.importorskip("diffrax")

    def solve(y, a):
        return diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, a: -a * y),
            diffrax.Tsit5(),
            0.0,
            1.0,
            0.1,
            y,
            args=a,
            stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-4),
        ).ys

    explanation = bx.explain(solve, compile=False)(jnp.ones((512, 3)), jnp.ones(512))
    text = told(explanation, solve, 600, 1_500_000)
    first, *_, last = explanation.findings
    assert first.kind == "loop waits for its slowest lane"
    assert 'Pass divergence="compact"' in first.remedy
    start = text.index("1. `while` runs until the last of 512 lanes")
    assert "return diffrax.diffeqsolve(" in text[start : text.index("2. ")]
    # One finding for all that the rules of JAX serve.
    assert last.kind == "fallback to the rule of JAX"
    assert [f.kind for f in explanation.findings].count(last.kind) == 1
