"""Simulations, searches and decoders, whose steps take each lane another number of inner steps."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.divergence.branches import SIZE, layers
from benchmarks.divergence.loops import EPISODE, environment
from benchmarks.nests.workload import Nest
from benchmarks.workload import integers, keys, normal, uniform

WINDOW = 0.5


def windows(orbits: Any, ends: Any) -> Any:
    """Eccentric orbits by diffrax: close to the center steps are small, and far from it long."""
    import diffrax

    def slope(t: Any, y: Any, args: Any) -> Any:
        place, speed = y[:2], y[2:]
        return jnp.concatenate([speed, -place / jnp.sum(place**2) ** 1.5])

    def solve(y: Any, end: Any) -> Any:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(slope),
            diffrax.Tsit5(),
            end - WINDOW,
            end,
            0.01,
            y,
            stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-6),
            max_steps=4096,
            saveat=diffrax.SaveAt(t1=True),
        )
        y = solution.ys[0]
        return y, (y, solution.stats["num_steps"])

    return lax.scan(solve, orbits, ends)[1]


def _orbits(lanes: int, steps: int) -> tuple[Any, ...]:
    """Each starts at its farthest, with a period of its own."""
    farthest = uniform(lanes, low=1.0, high=2.0)
    speed = jnp.sqrt(uniform(lanes, low=0.02, high=0.3, seed=1) / farthest)
    start = jnp.stack([farthest, 0 * speed, 0 * speed, speed], 1)
    return start, _ends(steps)


def _ends(steps: int) -> Any:
    return WINDOW * (1 + jnp.arange(steps, dtype=jnp.float32))


ATTEMPTS = 400


def stiff(mu: Any, y: Any, ends: Any, detailed: bool = False) -> Any:
    """Implicit steps: a scan of windows, in it steps as long as is possible, in them Newton's.

    Counts are of Newton's steps in each window; if `detailed`, in each implicit step.
    """

    def residual(new: Any, old: Any, dt: Any) -> Any:
        slope = jnp.stack([new[1], mu * (1 - new[0] ** 2) * new[1] - new[0]])
        return new - old - dt * slope

    def newton(old: Any, dt: Any) -> Any:
        def step(carry: Any) -> Any:
            i, new, _ = carry
            jacobian = jax.jacfwd(residual)(new, old, dt)
            (a, b), (c, d) = jacobian
            r, s = residual(new, old, dt)
            change = jnp.stack([d * r - b * s, a * s - c * r]) / (a * d - b * c)
            return i + 1, new - change, jnp.max(jnp.abs(change))

        going_on = lambda carry: (carry[2] > 1e-5) & (carry[0] < 10)
        return lax.while_loop(going_on, step, (jnp.int32(0), old, jnp.float32(1)))

    def window(carry: Any, end: Any) -> Any:
        def step(carry: Any) -> Any:
            i, t, dt, y, counts = carry
            taken = jnp.minimum(dt, end - t)
            count, new, change = newton(y, taken)
            fits = (change <= 1e-5) & (jnp.max(jnp.abs(new - y)) < 0.05)
            easy = jnp.max(jnp.abs(new - y)) < 0.02
            dt = jnp.where(fits, jnp.where(easy, dt * 1.5, dt), dt / 2)
            counts = counts.at[i].add(count) if detailed else counts + count
            t, y = jnp.where(fits, t + taken, t), jnp.where(fits, new, y)
            return i + 1, t, jnp.clip(dt, 1e-4, WINDOW), y, counts

        def left(carry: Any) -> Any:
            return (carry[1] < end - 1e-5) & (carry[0] < ATTEMPTS)

        dt, y = carry
        zero = jnp.zeros(ATTEMPTS if detailed else (), jnp.int32)
        start = jnp.int32(0), end - WINDOW, dt, y, zero
        _, _, dt, y, counts = lax.while_loop(left, step, start)
        return (dt, y), (y, counts)

    return lax.scan(window, (jnp.float32(0.01), y), ends)[1]


def _in_detail(args: Any, _: Any) -> Any:
    return jax.jit(jax.vmap(functools.partial(stiff, detailed=True), (0, 0, None)))(*args)[1]


def _oscillators(lanes: int, steps: int) -> tuple[Any, ...]:
    mu = jnp.exp(uniform(lanes, low=1.5, high=2.5))
    return (
        mu,
        uniform(lanes, 2, low=-2.0, high=2.0),
        WINDOW * (1 + jnp.arange(steps, dtype=jnp.float32)),
    )


BEAMS, VOCABULARY, WIDTH, LONGEST = 4, 64, 64, 80


def beam_search(lengths: Any, states: Any, recurrent: Any, embedding: Any) -> Any:
    """Decodes one sentence after another; each ends when all of its beams have."""
    end = 0

    def sentence(_: Any, start: Any) -> Any:
        length, state = start

        def step(carry: Any) -> Any:
            i, state, last, score, tokens = carry
            state = jnp.tanh(state @ recurrent + embedding[last])
            logits = state @ embedding.T
            logits = logits.at[:, end].set(4 * (i - length))  # the longer, the likelier
            ended = (last == end) & (i > 0)
            stay = jnp.where(jnp.arange(VOCABULARY) == end, 0.0, -jnp.inf)
            added = jnp.where(ended[:, None], stay, jax.nn.log_softmax(logits))
            score, best = lax.top_k((score[:, None] + added).ravel(), BEAMS)
            beam, last = best // VOCABULARY, best % VOCABULARY
            return i + 1, state[beam], last, score, tokens[beam].at[:, i].set(last)

        def going_on(carry: Any) -> Any:
            i, _, last, _, _ = carry
            return (i < LONGEST) & ((i == 0) | jnp.any(last != end))

        score = jnp.where(jnp.arange(BEAMS) == 0, 0.0, -jnp.inf)
        start = (
            jnp.int32(0),
            jnp.broadcast_to(state, (BEAMS, WIDTH)),
            jnp.full(BEAMS, end),
            score,
            jnp.full((BEAMS, LONGEST), end),
        )
        i, _, _, score, tokens = lax.while_loop(going_on, step, start)
        return None, ((tokens[0], score[0]), i)

    return lax.scan(sentence, None, (lengths, states))[1]


def _sentences(lanes: int, steps: int) -> tuple[Any, ...]:
    lengths = 3 + 6 * np.random.default_rng(1).exponential(size=(lanes, steps))
    weights = 2 * normal(WIDTH, WIDTH, seed=2) / WIDTH**0.5, normal(VOCABULARY, WIDTH, seed=3)
    return jnp.asarray(lengths, jnp.float32), normal(lanes, steps, WIDTH), *weights


def _environments(lanes: int, steps: int) -> tuple[Any, ...]:
    actions = integers(lanes, steps, 2, below=3, seed=1) - 1
    return keys(lanes), jnp.arange(lanes, dtype=jnp.int32) % EPISODE, actions


def _resets(args: Any, _: Any) -> np.ndarray:
    _, ages, actions = args
    steps = np.arange(1, actions.shape[1] + 1)
    return (np.asarray(ages)[:, None] + steps) % EPISODE == 0


def seldom_dear(x: Any, taken: Any, weights: Any) -> Any:
    """Twenty products in few of the steps. Counts are of steps with them."""

    def step(x: Any, taken: Any) -> Any:
        x = lax.cond(taken, layers(0), lambda x, _: 0.99 * x, x, weights)
        return x, (x[0], taken.astype(jnp.int32))

    return lax.scan(step, x, taken)[1]


def _seldom(share: float, lanes: int, steps: int) -> tuple[Any, ...]:
    taken = np.random.default_rng(1).uniform(size=(lanes, steps)) < share
    return normal(lanes, SIZE), jnp.asarray(taken), normal(1, SIZE, SIZE, seed=2) / 8


@functools.cache
def _game() -> Any:
    """The game, which holds arrays: made outside of programs."""
    from jumanji.environments import Snake
    from jumanji.wrappers import AutoResetWrapper

    return AutoResetWrapper(Snake())


def snake(draws: Any) -> Any:
    """Snake by jumanji with random moves: where a game ends another begins."""
    game = _game()

    def step(state: Any, key: Any) -> Any:
        state, timestep = game.step(state, jax.random.randint(key, (), 0, 4))
        return state, ((timestep.reward, state.length), timestep.last().astype(jnp.int32))

    return lax.scan(step, game.reset(draws[0])[0], draws)[1]


def _moves(lanes: int, steps: int) -> tuple[Any, ...]:
    _game()
    return (jax.vmap(lambda key: jax.random.split(key, steps))(keys(lanes)),)


SIMULATIONS, ACTIONS = 64, 8


def search(key: Any, state: Any, *weights: Any) -> Any:
    """A search of mctx with a small network as the model: down the tree, and back up."""
    import mctx

    into, policy, value = weights

    def outputs(state: Any) -> Any:
        return state @ policy, jnp.tanh(state @ value)

    def model(_: Any, key: Any, action: Any, state: Any) -> Any:
        state = jnp.tanh(jnp.einsum("bi,bij->bj", state, into[action]))
        logits, worth = outputs(state)
        output = mctx.RecurrentFnOutput(
            reward=jnp.zeros_like(worth),
            discount=jnp.full_like(worth, 0.99),
            prior_logits=logits,
            value=worth,
        )
        return output, state

    logits, worth = outputs(state[None])
    root = mctx.RootFnOutput(prior_logits=logits, value=worth, embedding=state[None])
    found = mctx.muzero_policy((), key, root, model, SIMULATIONS)
    return (found.action[0], found.action_weights[0]), found.search_tree.parents[0]


def _positions(lanes: int, _: int) -> tuple[Any, ...]:
    own = jnp.exp(uniform(lanes, 1, low=-1, high=2, seed=4)) * normal(lanes, 32)
    into = 1.5 * normal(ACTIONS, 32, 32, seed=1) / 32**0.5
    return keys(lanes), own, into, normal(32, ACTIONS, seed=2) / 2, normal(32, seed=3) / 4


def _depths(_: Any, out: Any) -> np.ndarray:
    """How far down each simulation went: the depth of the node that it added."""
    parents = np.asarray(out[1])
    depths = np.zeros_like(parents)
    for node in range(1, parents.shape[1]):
        depths[:, node] = np.take_along_axis(depths, parents[:, node, None], 1)[:, 0] + 1
    return depths[:, 1:]


WORKLOADS = [
    Nest(
        "diffrax, a solution for each window",
        windows,
        _orbits,
        512,
        40,
        in_axes=(0, None),
        needs=("diffrax",),
        family="Simulations",
    ),
    Nest(
        "implicit steps, three levels",
        stiff,
        _oscillators,
        512,
        40,
        counts=_in_detail,
        in_axes=(0, 0, None),
        family="Simulations",
    ),
    Nest(
        "environments, 5% reset",
        environment,
        _environments,
        256,
        40,
        counts=_resets,
        family="Simulations",
    ),
    *(
        Nest(
            f"an expensive branch in {share:.0%} of the steps, {lanes} lanes",
            seldom_dear,
            functools.partial(_seldom, share),
            lanes,
            200,
            in_axes=(0, 0, None),
            family="Simulations",
        )
        for lanes in (64, 256)
        for share in (0.01, 0.05)
    ),
    Nest(
        "its gradient, 5% of the steps, 64 lanes",
        seldom_dear,
        functools.partial(_seldom, 0.05),
        64,
        50,
        in_axes=(0, 0, None),
        turns=3,
        family="Simulations",
        gradient=True,
    ),
    Nest(
        "jumanji's Snake",
        snake,
        _moves,
        32,
        500,
        needs=("jumanji",),
        family="Simulations",
    ),
    Nest(
        "tree search (mctx)",
        search,
        _positions,
        128,
        SIMULATIONS,
        counts=_depths,
        in_axes=(0, 0, None, None, None),
        needs=("mctx",),
        family="Searches",
    ),
    Nest(
        "beam search",
        beam_search,
        _sentences,
        256,
        10,
        in_axes=(0, 0, None, None),
        family="Searches",
    ),
]
