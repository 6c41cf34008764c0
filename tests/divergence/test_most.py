"""What is told of loops before any is batched is no less than what is asked of them later."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.analysis.thresholds import TABLE
from batchax.divergence import flat, policy, runner
from batchax.divergence.costs import WITH_DERIVATIVE, Price, Step, price_at_most
from batchax.divergence.nest import prices_of_step
from batchax.divergence.runner import Runner

SIZE = 6  # of the vectors that lanes carry
LANES = 1, 16, 100, 4_096


def drawn(rng, depth):
    """A function of a count and a vector: loops, branches and calls in each other, at random."""
    if depth == 0:
        return _leaf(rng)
    inner, more = drawn(rng, depth - 1), drawn(rng, int(rng.integers(depth)))
    leaf, most = _leaf(rng), int(rng.integers(2, 7))
    wide = int(rng.choice([1, 40]))

    def count_up(n, x):
        step = lambda c: (c[0] + 1, inner(n + c[0], leaf(n, c[1])))
        return lax.while_loop(lambda c: c[0] < n % most, step, (0, x))[1]

    def until_small(n, x):
        step = lambda c: (c[0] + 1, inner(n, c[1]), c[2].at[c[0] % 3].set(c[1].sum()))
        last = lax.while_loop(lambda c: jnp.abs(c[1]).sum() > 1, step, (0, x, jnp.zeros(3 * wide)))
        return last[1] + last[2][0]

    def same_steps(n, x):
        """Which all lanes take together."""
        step = lambda c: (c[0] + 1, inner(n, c[1]))
        return lax.while_loop(lambda c: c[0] < most, step, (0, more(n, x)))[1]

    def scan(n, x):
        step = lambda x, t: (inner(n, x) + t.sum(), (x, t))
        x, (ys, _) = lax.scan(step, x, jnp.ones((most, wide)), reverse=most % 2 == 0)
        return x + ys[0]

    # What would run in no step is not part of what is told.
    empty = lambda n, x: lax.scan(lambda x, _: (jnp.cos(x), None), x, None, length=0)[0]

    def bounded(n, x):
        step = lambda c: (c[0] + 1, inner(n, c[1]))
        return bx.bounded_while(lambda c: c[0] < n % most, step, (0, leaf(n, x)), most)[1]

    def ends_early(n, x):
        until = lambda x: jnp.abs(x).sum() < n
        return bx.scan(lambda x, t: (inner(n, x) + t, x), until=until)(x, jnp.arange(1.0 * most))[0]

    def branch(n, x):
        return lax.switch(n % 3, [lambda x: inner(n, x), lambda x: more(n, x), jnp.cos], x)

    def calls(n, x):
        return jax.checkpoint(jax.jit(inner))(n, x) + more(n, x)

    def together(n, x):
        """Lanes of an inner axis share what is around them."""
        return jax.vmap(inner, (None, 0))(n, jnp.stack([x, x + 1])).sum(0)

    kinds = [count_up, until_small, same_steps, scan, scan, empty, bounded, ends_early]
    return [*kinds, branch, calls, together][rng.integers(len(kinds) + 3)]


def _leaf(rng):
    size, kind = int(rng.choice([1, 8, 60])), int(rng.integers(4))
    table = np.ones((size, SIZE), np.float32)

    def leaf(n, x):
        if kind == 0:
            return jnp.sin(x) + n
        if kind == 1:
            return jnp.tanh(table @ x).sum() * x
        if kind == 2:
            return jnp.sort(x) + jnp.asarray(table)[n % size]
        return jnp.linalg.solve(jnp.eye(SIZE) * 2 + x, x)

    return leaf


class Asked:
    """What is asked of the loops of a program, and what was told of those around it."""

    def __init__(self, monkeypatch):
        self.around, self.pairs = [], []
        monkeypatch.setattr(runner, "price_at_most", self._told)
        monkeypatch.setattr(runner, "run_flat", self._flat)
        monkeypatch.setattr(flat, "prices_of_step", self._inside)
        monkeypatch.setattr(Step, "of", staticmethod(self._step(Step.of)))
        monkeypatch.setattr(policy, "_branch", self._branch)

    def _told(self, loop):
        self.around.append(price_at_most(loop))
        return Price.made(float("inf"), 0.0)  # so that all is looked at

    def _flat(self, axis, loop, least):
        """Lanes stay together, so that loops inside are looked at, too."""
        self.told = price_at_most(loop)
        return flat.run_flat(axis, loop, float("inf"))

    def _inside(self, *step):
        prices = prices_of_step(*step)
        self.pairs += [(prices.inside.of(lanes), 2 * self.told.of(lanes)) for lanes in LANES]
        return prices

    def _work(self, work):
        told = [max((told.of(n) for told in self.around), default=np.inf) for n in LANES]
        more = zip(LANES, told, strict=True)
        self.pairs += [(n * work, WITH_DERIVATIVE * most) for n, most in more]

    def _step(self, of):
        def step(*args):
            step = of(*args)
            self._work(step.work)
            return step

        return step

    def _branch(self, cost, thresholds, asked):
        self._work(cost.work)
        return policy.Masked("")


@pytest.mark.parametrize("seed", range(200))
@pytest.mark.each_commit(16, "156", "175", "193")
def test_no_less_is_told_than_is_asked(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    inner = drawn(rng, int(rng.integers(1, 4)))
    scan = lambda n, x: lax.scan(lambda x, t: (inner(n + t, x), None), x, jnp.arange(3))[0]

    def loop(n, x):
        step = lambda c: (c[0] + 1, inner(n, c[1]))
        return lax.while_loop(lambda c: c[0] < n, step, (0, x))[1]

    fun = scan if seed % 4 else loop
    asked = Asked(monkeypatch)
    args = jnp.zeros(8, int), jnp.zeros((8, SIZE))
    one_device = Runner(thresholds=TABLE["cpu-small"]._replace(max_devices=1_000, min_work=0.0))
    jax.eval_shape(bx.vmap(fun, divergence=one_device), *args)
    for price, told in asked.pairs:
        assert price <= told * (1 + 1e-6)
