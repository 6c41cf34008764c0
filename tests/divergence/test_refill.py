"""Who takes which place of a window, and when lanes leave it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batchax.divergence import windows
from batchax.divergence.policy import Window
from batchax.divergence.ski_rental import SkiRental
from batchax.divergence.windows import InWindow, Queue, Together, refill


def first_come(queue, active, size, width):
    """What `refill` does, in Python: turns until nobody waits; who is done after each is drawn."""
    rng, index, on, first, turns = np.random.default_rng(3), size + np.arange(width), [], 0, []
    on = np.zeros(width, bool)
    while first < len(active):
        index = index.copy()
        for place in np.flatnonzero(~on):
            while first < len(active) and not active[first]:
                first += 1
            if first < len(active):
                index[place], on[place], first = queue[first], True, first + 1
        done = rng.random(width) < 0.5
        turns.append((index, on, done))
        on = on & ~done
    return turns


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("of_all", [True, False])
def test_who_waits_takes_the_places_of_those_who_are_done(device, of_all, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    rng, size, width = np.random.default_rng(0), 31, 5
    waiting = rng.random(size) < 0.7
    lanes = np.arange(size, dtype=np.int32) if of_all else rng.permutation(size).astype(np.int32)
    queue = Queue(None if of_all else jnp.asarray(lanes), jnp.asarray(waiting))
    take = jax.jit(lambda *state: refill(queue, InWindow(*state)))
    state = jax.tree.map(jnp.asarray, InWindow.empty(size, width))
    for index, on, done in first_come(lanes, waiting, size, width):
        assert bool(state.waiting)
        state = take(*state)
        np.testing.assert_array_equal(np.asarray(state.index)[on], index[on])
        np.testing.assert_array_equal(state.active, on)
        assert bool(state.any_active) == on.any()
        assert len({*np.asarray(state.index).tolist()}) == width  # to write to
        state = state._replace(active=state.active & ~done)
    assert not bool(take(*state).waiting)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_lanes_go_on_while_it_costs_less_than_to_move_them(device, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    cases, expected = [], []
    for width in (7, 64, 2053, 4096):
        active = np.random.default_rng(width).random(width) < 0.5
        count, left = int(active.sum()), width // 3
        plan = Window((width,), 2.0, left)
        for wasted in (0.0, width + 3.0, 3.0 * width):
            now = wasted + width - count
            for waiting in (True, False):
                cases.append((windows._GoesOn(plan, width, left), active, waiting, wasted))
                bears = count > 0 and now < 2 * width
                goes_on = bears or count == width if waiting else count > left
                expected.append((np.float32(now), goes_on))

    @jax.jit
    def judged():
        one = lambda goes_on, active, waiting, wasted: goes_on.judged(
            jnp.asarray(active), jnp.asarray(waiting), jnp.float32(wasted)
        )
        return [one(*case) for case in cases]

    assert [(float(w), bool(g)) for w, g in judged()] == expected


def last_step(counts, left, patience, pause):
    """After how many steps all lanes stop to run together, in Python."""
    taken, asked = 0, pause
    while count := int((counts > taken).sum()):
        if taken and taken >= asked:
            idle = 0.5 * taken * (len(counts) - count)
            if count <= left and (patience is None or idle >= patience * count):
                break
            asked += max(pause, taken // 4) if pause > 1 else 1
        taken += 1
    return taken, count > 0


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_all_lanes_run_until_those_that_are_counted_are_few(device, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    counts, cases = np.random.default_rng(1).pareto(1.0, 96), []
    counts = np.minimum(8 * counts, 90).astype(np.int32)
    for lanes in (counts, 0 * counts, 0 * counts + 8, 0 * counts + 20):
        for left, patience, pause in ((30, 1.0, 8), (30, 40.0, 8), (5, 1.0, 1), (60, None, 1)):
            cases.append((lanes, left, patience, pause))

    def taken(lanes, left, patience, pause):
        once = lambda state: (lanes > state[1] + 1, state[1] + 1)
        waiting = None if patience is None else SkiRental(patience)
        together, begins = Together(len(lanes), left, waiting, pause), jnp.asarray(lanes.any())
        (_, steps), some = together.run(begins, once, (jnp.asarray(lanes > 0), jnp.int32(0)))
        return steps, some

    results = jax.jit(lambda: [taken(*case) for case in cases])()
    assert [(int(n), bool(some)) for n, some in results] == [last_step(*case) for case in cases]
