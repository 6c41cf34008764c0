"""Threads that stage and run batches at once get what one thread alone gets."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.features import FEATURES
from support.oracle import plain, same

THREADS = 4


@pytest.fixture
def _switching_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def results(name):
    """Of a feature that is called again: every second one as one program, which takes less time."""
    feature = lambda: FEATURES[name]()
    if NAMES.index(name) % 2:
        feature = jax.jit(feature)
    return [plain(jnp.asarray(x)) for x in jax.tree.leaves(feature())]


# It compiles one program for each subset of arguments, all much alike.
NAMES = [name for name in FEATURES if name != "check_rule"]


@pytest.mark.usefixtures("_switching_often")
@pytest.mark.compiles(800)
@pytest.mark.nightly
def test_all_kinds_of_batches_at_once():
    expected = {name: results(name) for name in NAMES}

    def work(k):
        # Two at a time do the same, and two others something else.
        half = len(NAMES) // 2
        return [(name, results(name)) for name in (NAMES[half:] if k // 2 else NAMES[:half])]

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(work, range(THREADS)))
    for name, got in (pair for pairs in found for pair in pairs):
        for x, y in zip(got, expected[name], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=name)


def test_one_derivative_rule_looked_into_by_two_threads():
    """That a rule is being looked into is known to the thread that does so, and to no other."""
    looking, other_is_done = threading.Event(), threading.Event()
    first = threading.current_thread()
    rows = bx.Ragged(jnp.arange(1.0, 6.0), np.array([3, 2], np.int32))

    @jax.custom_jvp
    def scaled(x):
        return 2 * x

    @scaled.defjvp
    def _(primals, tangents):
        if threading.current_thread() is not first and not looking.is_set():
            looking.set()
            assert other_is_done.wait(60)
        return 2 * primals[0], 2 * tangents[0]

    @jax.custom_jvp
    def centred(x):
        return x

    @centred.defjvp
    def _(primals, tangents):  # mixes the row, where the function does not
        t = scaled(tangents[0])
        return primals[0], t - t.mean()

    def derivative():
        f = lambda data: bx.vmap(lambda r: centred(r) * 1.0)(bx.Ragged(data, rows.lengths)).data
        return jax.jvp(f, (rows.data,), (rows.data**2,))[1]

    expected = np.concatenate([2 * (r**2 - (r**2).mean()) for r in map(np.asarray, rows.rows())])
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(derivative)
        assert looking.wait(60)
        try:
            got = derivative()
        finally:
            other_is_done.set()
        same(got, jnp.asarray(expected))
        same(other.result(), jnp.asarray(expected))
