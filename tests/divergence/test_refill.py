"""Who takes which place of a window, and when lanes leave it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from batchax.divergence import window
from batchax.divergence.refill import InWindow, Queue, refill


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
        plan = window.Plan((width,), None, left, patience=2.0, counts=False)
        for wasted in (0.0, width + 3.0, 3.0 * width):
            now = wasted + width - count
            for waiting in (None, True, False):
                cases.append((window._GoesOn(plan, width, left), active, waiting, wasted))
                bears = count > 0 and now < 2 * (count if waiting is None else width)
                goes_on = bears or count == width if waiting else count > left
                goes_on = goes_on or (waiting is None and bears)
                expected.append((count > 0, np.float32(now), goes_on))

    @jax.jit
    def judged():
        one = lambda goes_on, active, waiting, wasted: goes_on.judged(
            jnp.asarray(active),
            None if waiting is None else jnp.asarray(waiting),
            jnp.float32(wasted),
        )
        return [one(*case) for case in cases]

    assert [(bool(s), float(w), bool(g)) for s, w, g in judged()] == expected
