"""Environments, search and simulation, as gymnax, mctx and others have them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.libraries.program import program
from benchmarks.workload import keys, normal, uniform


def _pole(state: Any, push: Any) -> Any:
    """A step of the cart and its pole."""
    x, dx, angle, turn = state
    force = jnp.where(push, 10.0, -10.0)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    pulled = (force + 0.05 * turn**2 * sine) / 1.1
    bend = (9.8 * sine - cosine * pulled) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    return jnp.stack(
        [
            x + 0.02 * dx,
            dx + 0.02 * (pulled - 0.05 * bend * cosine / 1.1),
            angle + 0.02 * turn,
            turn + 0.02 * bend,
        ]
    )


def _policies(n: int) -> tuple[Any, ...]:
    return keys(n), normal(n, 4, 16), normal(n, 16, seed=1)


@program("JAX", "CartPole, an episode of 512 policies", _policies, 512)
def cart_pole(key, first, second):
    def step(carry):
        state, count = carry
        push = jnp.tanh(state @ first) @ second > 0
        return _pole(state, push), count + 1

    def going_on(carry):
        (x, _, angle, _), count = carry
        return (jnp.abs(x) < 2.4) & (jnp.abs(angle) < 0.21) & (count < 500)

    start = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
    return lax.while_loop(going_on, step, (start, 0))[1]


@program("JAX", "CartPole with resets, 256 for 200 steps", _policies, 256, uneven=False)
def resets(key, first, second):
    def step(carry, _):
        state, key = carry
        state = _pole(state, jnp.tanh(state @ first) @ second > 0)
        done = (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 0.21)
        key, fresh = jax.random.split(key)
        start = jax.random.uniform(fresh, (4,), minval=-0.05, maxval=0.05)
        return (jnp.where(done, start, state), key), done

    start = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
    return lax.scan(step, (start, key), length=200)[1].sum()


@program("JAX", "tree search, 64 roots, 100 simulations", lambda n: (keys(n),), 64)
def tree_search(key):
    """Walk down by upper confidence bounds, add a leaf, and walk up again."""
    actions, most = 4, 101
    values = jax.random.normal(key, (most,))

    def simulate(tree, count):
        children, visits, totals, parents = tree

        def choose(node):
            child = children[node]
            seen = visits[child]
            score = totals[child] / (seen + 1) + jnp.sqrt(jnp.log(visits[node] + 1.0) / (seen + 1))
            return jnp.argmax(jnp.where(child > 0, score, jnp.inf))

        def down(carry):
            node, action = carry
            node = children[node, action]
            return node, choose(node)

        going_on = lambda carry: children[carry[0], carry[1]] > 0
        node, action = lax.while_loop(going_on, down, (0, choose(0)))
        children = children.at[node, action].set(count)
        parents = parents.at[count].set(node)

        def up(carry):
            node, visits, totals = carry
            totals = totals.at[node].add(values[count])
            return parents[node], visits.at[node].add(1), totals

        going_on = lambda carry: carry[0] >= 0
        _, visits, totals = lax.while_loop(going_on, up, (count, visits, totals))
        return (children, visits, totals, parents), None

    tree = (
        jnp.zeros((most, actions), jnp.int32),
        jnp.zeros(most),
        jnp.zeros(most),
        jnp.full(most, -1, jnp.int32),
    )
    return lax.scan(simulate, tree, jnp.arange(1, most))[0][1]


@program(
    "JAX",
    "Gillespie's algorithm, 1,000 cells",
    lambda n: (keys(n), 10 ** uniform(n, low=0, high=1.5)),
    1000,
)
def gillespie(key, rate):
    def step(carry):
        key, t, counts = carry
        key, when, which = jax.random.split(key, 3)
        rates = jnp.array([rate, 0.5 * counts[0], 0.2 * counts[0], 0.1 * counts[1]])
        event = jax.random.categorical(which, jnp.log(rates))
        change = jnp.array([[1, 0], [-1, 0], [0, 1], [0, -1]], jnp.float32)[event]
        return key, t + jax.random.exponential(when) / rates.sum(), counts + change

    return lax.while_loop(lambda c: c[1] < 4, step, (key, jnp.float32(0), jnp.zeros(2)))[2]


@program(
    "JAX",
    "rays into a field of distances, 16,384",
    lambda n: (normal(n, 2) * 0.4,),
    16384,
)
def rays(pixel):
    direction = jnp.append(pixel, 1.0)
    direction = direction / jnp.sqrt(jnp.sum(direction**2))

    def distance(p):
        ball = jnp.sqrt(jnp.sum((p - jnp.array([0.0, 0.0, 3.0])) ** 2)) - 1
        return jnp.minimum(ball, p[1] + 1)

    def step(carry):
        t, _, count = carry
        far = distance(t * direction)
        return t + far, far, count + 1

    going_on = lambda c: (c[1] > 1e-3) & (c[0] < 20) & (c[2] < 200)
    return lax.while_loop(going_on, step, (jnp.float32(0), jnp.float32(1), 0))[0]


@program("JAX", "walks until they leave, 2,000", lambda n: (keys(n), 5 * uniform(n)), 2000)
def walks(key, edge):
    def step(carry):
        key, place = carry
        key, now = jax.random.split(key)
        return key, place + 0.5 * jax.random.normal(now, (2,))

    going_on = lambda c: jnp.sum(c[1] ** 2) < (1 + edge) ** 2
    return lax.while_loop(going_on, step, (key, jnp.zeros(2)))[1]


# --- gymnax: an episode, until it ends


def _episode(environment: Any, parameters: Any, key: Any, policy: Any, most: int) -> Any:
    """The return and the length of an episode of at most so many steps."""
    first, key = jax.random.split(key)
    seen, state = environment.reset(first, parameters)

    def step(carry):
        key, seen, state, total, count, _ = carry
        key, act, now = jax.random.split(key, 3)
        seen, state, reward, ended, cut, _ = environment.step(
            now, state, policy(act, seen), parameters
        )
        return key, seen, state, total + reward, count + 1, ended | cut

    going_on = lambda carry: ~carry[5] & (carry[4] < most)
    start = key, seen, state, jnp.float32(0), 0, jnp.array(False)
    return lax.while_loop(going_on, step, start)[3:5]


def _drivers(n: int) -> tuple[Any, ...]:
    """Most push along with the speed, to some degree; some never arrive."""
    return keys(n), normal(n, 2) * jnp.array([1.0, 10.0]) + jnp.array([0.0, 40.0])


@program("gymnax", "MountainCar to the flag, 256 policies", _drivers, 256, uneven=False)
def mountain_car(key, weights):
    import gymnax

    environment, parameters = gymnax.make("MountainCar-v0")

    def policy(key, seen):
        push = weights @ seen
        return jax.random.categorical(key, 4 * jnp.stack([-push, -jnp.abs(push), push]))

    return _episode(environment, parameters, key, policy, 200)


@program("gymnax", "Breakout, a game of 128 random players", lambda n: (keys(n),), 128)
def breakout(key):
    import gymnax

    environment, parameters = gymnax.make("Breakout-MinAtar")
    policy = lambda key, _: environment.action_space(parameters).sample(key)
    return _episode(environment, parameters, key, policy, 1000)


# --- jax-md: particles until they rest


def _packings(n: int) -> tuple[Any, ...]:
    """From loose to dense: of 40 particles in a square box."""
    return uniform(n, 40, 2), jnp.sqrt(40 / uniform(n, low=0.5, high=1.6, seed=1))


@program("jax-md", "soft spheres until they rest, 64 boxes", _packings, 64, needs=("jax_md",))
def packed(places, side):
    from jax_md import energy, minimize, space

    displacement, shift = space.periodic(side)
    start, step = minimize.fire_descent(energy.soft_sphere_pair(displacement), shift)

    def going_on(carry):
        state, count = carry
        return (jnp.max(jnp.abs(state.force)) > 1e-3) & (count < 1000)

    carry = start(side * places), 0
    state, count = lax.while_loop(going_on, lambda c: (step(c[0]), c[1] + 1), carry)
    return energy.soft_sphere_pair(displacement)(state.position), count


# --- distrax: draws that are kept if they are inside


def _regions(n: int) -> tuple[Any, ...]:
    return keys(n), 3 * normal(n, 4, 2), uniform(n, low=1, high=5, seed=1)


@program("distrax", "rejection sampling of a mixture, 512 regions", _regions, 512)
def rejected(key, means, width):
    import distrax

    mixture = distrax.MixtureSameFamily(
        distrax.Categorical(logits=jnp.zeros(4)),
        distrax.MultivariateNormalDiag(means, jnp.ones((4, 2))),
    )

    def step(carry):
        key, kept, found, count = carry
        key, now = jax.random.split(key)
        draw = mixture.sample(seed=now)
        inside = jnp.all(jnp.abs(draw) < width)
        kept = kept.at[found].set(jnp.where(inside, draw, kept[found]))
        return key, kept, found + inside, count + 1

    going_on = lambda carry: (carry[2] < 20) & (carry[3] < 1000)
    return lax.while_loop(going_on, step, (key, jnp.zeros((20, 2)), 0, 0))[1:3]
