"""What outlives a call: its bounds, its keys, its threads, and that JAX empties it."""

import ast
import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.cache import Cache, cached, caches
from batchax.kernel.recording import Recorder

from support.oracle import same

PACKAGE = Path(bx.__file__).parent


# --- one cache ----------------------------------------------------------------------------------


class Owner:
    pass


def test_what_was_not_asked_for_longest_is_forgotten_first():
    cache = Cache("for this test", most=2)
    built = []

    def get(key, owner=None):
        return cache.get(key, lambda: built.append(key) or key, owner)

    assert [get("a"), get("b"), get("a"), get("c"), get("a"), get("b")] == list("abacab")
    assert built == ["a", "b", "c", "b"]
    assert cache.values() == ["a", "b"]
    assert cache.find("c") is None
    first, second = Owner(), Owner()
    get("x", first), get("x", second), get("x", first)
    assert built[4:] == ["x", "x"]
    assert get("y", first) == cache.find("y", first) == "y"  # in place of the second's
    assert cache.find("x", second) is None


def test_what_has_an_owner_is_forgotten_with_it():
    cache = Cache("for this test", most=100)
    owner, value = Owner(), Owner()
    alive = weakref.ref(value)
    cache.get(1, lambda value=value: value, owner)
    cache.get(2, lambda: 2, owner)
    cache.get(1, lambda: 3)  # of nobody
    del value
    assert alive() is not None
    del owner
    assert (alive(), cache.values()) == (None, [3])


class OnlyOnce:
    """A key that nothing is to be compared with any more."""

    def __init__(self):
        self.ended = False

    def __hash__(self):
        assert not self.ended
        return 1

    def __eq__(self, other):
        assert not self.ended
        return self is other


def test_an_owner_may_go_when_python_ends(monkeypatch):
    """Then names of modules are None, and keys are not to be compared."""
    from batchax import cache as module

    cache, keys = Cache("for this test", most=100), [OnlyOnce(), OnlyOnce()]
    owner, unraisable = Owner(), []
    for key in keys:
        cache.get(key, int, owner)
    assert len(cache) == 2
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    for name in [name for name in vars(module) if not name.startswith("__")]:
        monkeypatch.setattr(module, name, None)
    for key in keys:
        key.ended = True
    del owner
    monkeypatch.undo()
    assert not unraisable
    assert (len(cache), cache.values()) == (0, [])


def test_nothing_is_held_while_something_is_built():
    """Another thread looks up, clears, and builds the same, and all get one result."""
    cache, other = Cache("for this test", most=4), Cache("for this test, too", most=4)

    def build():
        with ThreadPoolExecutor(1) as pool:  # would wait forever
            found = pool.submit(lambda: cache.get("k", lambda: object()))
            pool.submit(lambda: other.get("k", int)).result(60)
            pool.submit(other.cache_clear).result(60)
            firsts.append(found.result(60))
        return object()

    firsts = []
    assert cache.get("k", build) is firsts[0]
    assert cache.get("k", build) is firsts[0]


def test_keys_whose_comparison_comes_here_again():
    cache = Cache("for this test", most=16)

    class Key:
        def __hash__(self):
            return 0

        def __eq__(self, other):
            cache.get("inside", lambda: 1)
            return self is other

    keys = [Key() for _ in range(6)]
    for _ in range(2):
        assert [cache.get(key, lambda i=i: i) for i, key in enumerate(keys)] == list(range(6))


def test_many_threads_and_owners_that_go():
    cache, before = Cache("for this test", most=50), sys.getswitchinterval()

    def work(seed):
        random, kept = np.random.default_rng(seed), []
        for i in range(600):
            key, owner = int(random.integers(40)), random.choice([None, *kept[-3:]])
            assert cache.get(key, lambda key=key, o=owner: (key, id(o)), owner) == (key, id(owner))
            kept.append(Owner())
            del kept[:-3]
            if i % 200 == 199:
                cache.cache_clear()
            assert len(cache) <= 50 + 8  # one more for each thread, for a moment

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(before)
    assert {owner for owner, _ in cache._known} - {id(None)} == set(cache._owners)


def test_results_of_functions_depend_on_options_of_jax():
    made = []

    @cached("for this test", most=8)
    def zero(dtype):
        made.append(dtype)
        return jnp.zeros(1, dtype).dtype

    with jax.enable_x64(False):
        assert [zero(float), zero(float)] == [np.float32] * 2
    with jax.enable_x64(True):
        assert zero(float) == np.float64
    assert len(made) == 2


# --- all of them -------------------------------------------------------------------------------

X, LENGTHS = np.arange(6, dtype=np.float32), np.array([2, 1, 3], np.int32)
WAYS = {
    "at once": lambda f, **how: bx.vmap(f, **how)(X),
    "chunks": lambda f, **how: bx.vmap(f, batch_size=4, **how)(X),
    "compact chunks": lambda f, **how: bx.vmap(f, batch_size=4, divergence="compact", **how)(X),
    "rows": lambda f, **how: bx.vmap(f, **how)(bx.Ragged(X, LENGTHS)),
    "devices": lambda f, **how: bx.vmap(f, mesh="all", **how)(X),
}


LOOPS = {
    "scan": lambda f: bx.scan(lambda c, x: (c + f(x), x), 0)(jnp.float32(0), X),
    "bounded while": lambda f: bx.bounded_while(
        lambda c: c < 3, lambda c: c + 1 + 0 * f(c), jnp.float32(0), 5
    ),
}


def closure(array):
    """A function that holds an array in a way that programs hold it, too."""

    @bx.custom_vmap
    def scaled(x):
        return x * array[0]

    @scaled.def_vmap
    def _(size, batched, x):
        return x * array[0], batched[0]

    return jax.jit(lambda x: scaled(x) + array[1])


@pytest.mark.parametrize("way", [*WAYS, *LOOPS])
@pytest.mark.each_commit(4)
def test_calls_of_new_functions_keep_memory_flat(way, monkeypatch):
    """What they close over lives as long as one of the few programs that are kept."""
    for cache in caches():
        cache.cache_clear()
        monkeypatch.setattr(cache, "most", 2)
    arrays = []
    for i in range(6):
        array = jnp.full(1000, float(i))
        arrays.append(weakref.ref(array))
        {**WAYS, **LOOPS}[way](closure(array))
        del array
    gc.collect()
    assert [i for i, array in enumerate(arrays) if array() is not None] in ([], [5], [4, 5])
    assert all(len(cache) <= 2 for cache in caches())


def test_jax_empties_all_of_them():
    array = jnp.ones(1000)
    alive = weakref.ref(array)
    f = closure(array)
    expected = [jax.tree.leaves(call(f)) for call in WAYS.values()]
    jax.jit(bx.vmap(f, out_axes=bx.Reduce("sum"), batch_size="auto"))(X)
    assert sum(map(len, caches())) > len(WAYS)
    assert bx.batch_size_choices()
    jax.clear_caches()
    assert {cache.of: len(cache) for cache in caches() if len(cache)} == {}
    assert not bx.batch_size_choices()
    for call, outs in zip(WAYS.values(), expected, strict=True):  # and are filled again
        same(jax.tree.leaves(call(f)), outs)
    del array, f, call
    jax.clear_caches()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("way", WAYS)
def test_options_of_jax_between_two_calls(way):
    """The second call is as `jax.vmap` is under the same options, not as the first."""
    call = WAYS[way]
    total = lambda x: jnp.sum(jnp.floor(x).astype(jnp.int16).astype(int))
    reduced = lambda: call(total, out_axes=bx.Reduce("sum"))
    for wide, dtype in ((False, np.int32), (True, np.int64), (False, np.int32)):
        with jax.enable_x64(wide):
            same(reduced(), jnp.asarray(15, dtype))
    random = lambda x: jax.random.uniform(jax.random.key(3)) + 0 * x.sum()
    draw = lambda: np.asarray(call(random))[0]
    firsts = draw()
    with jax.default_prng_impl("rbg"):
        assert draw() == np.asarray(jax.random.uniform(jax.random.key(3)))
    assert draw() == firsts

    logarithm = lambda x: jnp.log(0 * x.sum() - 1)
    call(logarithm)
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        call(logarithm)


def test_the_default_device_between_two_calls():
    """As `jax.jit` does, chunks follow it with what was put nowhere in particular."""
    x = jnp.asarray(X)
    first, second = jax.devices()[:2]
    f = bx.vmap(jnp.sin, batch_size=4)
    for device in (first, second, first):
        with jax.default_device(device):
            assert f(x).devices() == jax.jit(jnp.sin)(x).devices() == {device}
    assert f(jax.device_put(x, first)).devices() == {first}


# --- there is nothing else ---------------------------------------------------------------------


# Functions that remember results elsewhere: those of one call, or the same in every call.
REMEMBERED = {
    "datasets/job.py": {"functools.cache"},
    "datasets/objects.py": {"_opened"},
    "execution/names.py": {"_lane_variable"},
    "explain/page.py": {"_template", "_policy"},
    "rows/layouts.py": {"functools.cache"},
    "rows/padded_rules/linalg.py": {"_diagonal_added"},
    "rows/padded_rules/operations.py": {"_sums"},
    "rules/masking.py": {"_values"},
    "linalg/eigh.py": {"_tables"},
    "linalg/elements.py": {"rounds"},
}


def remembering(path):
    """The names of functions of a module that remember results."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            decorators = list(map(ast.unparse, node.decorator_list))
            # JAX keeps what a static argument holds.
            if any(d.endswith("cache") or "static_arg" in d for d in decorators):
                yield node.name
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("functools.cache"):
            yield "functools.cache"


def test_no_function_remembers_results_elsewhere():
    found = {
        path.relative_to(PACKAGE).as_posix(): set(remembering(path))
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(PACKAGE / "_compat")
    }
    assert {path: names for path, names in found.items() if names} == REMEMBERED


def test_caches_say_what_they_are():
    # Whoever takes notes has one of their own, which lives until cycles are looked for.
    of_one_call = {Recorder().built.of, "for this test"}
    kept = [cache for cache in caches() if cache.of not in of_one_call]
    assert len({cache.of for cache in kept}) == len(kept) > 12
    assert all(cache.of and 0 < cache.most <= 8192 for cache in kept)
