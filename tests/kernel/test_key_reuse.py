"""``jax.debug_key_reuse``: right programs pass, and reuse is seen, inside whatever batchax runs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax, random

import batchax as bx

KEYS = (6,)


def split_twice(key):
    key, other = random.split(key)
    return random.normal(other) + random.uniform(key)


def folded(key):
    return random.normal(random.fold_in(key, 0)) + random.normal(random.fold_in(key, 1))


def walk(key, loop=lax.while_loop):
    def step(state):
        key, other = random.split(state[0])
        return key, state[1] + 0.1 + random.uniform(other)

    return loop(lambda state: state[1] < 2, step, (key, 0.0))[1]


def folded_walk(key):
    step = lambda s: (s[0] + 1, s[1] + 0.1 + random.uniform(random.fold_in(key, s[0])))
    return lax.while_loop(lambda s: s[1] < 2, step, (0, 0.0))[1]


def twice(key):
    return random.normal(key) + random.uniform(key)


def stuck_walk(key, loop=lax.while_loop):
    step = lambda s: (s[0], s[1] + 0.1 + random.uniform(s[0]))
    return loop(lambda s: s[1] < 2, step, (key, 0.0))[1]


def bounded(*loop):
    return bx.bounded_while(*loop, 20)


RIGHT = {
    "split": split_twice,
    "fold_in": folded,
    "while": walk,
    "while that folds in": folded_walk,
    "bounded_while": lambda key: walk(key, bounded),
    "keys as results": lambda key: random.split(key),
    "a rule": bx.custom_vmap(split_twice),
}
WRONG = {
    "twice": twice,
    "while": stuck_walk,
    "bounded_while": lambda key: stuck_walk(key, bounded),
    "a rule": bx.custom_vmap(twice),
}
for rule in (RIGHT["a rule"], WRONG["a rule"]):
    rule.def_vmap(lambda axis_size, in_batched, key, f=rule: (jax.vmap(f.fun)(key), True))

WAYS = {
    "all at once": bx.vmap,
    "batch_size": lambda f: bx.vmap(f, batch_size=2),
    "a remainder": lambda f: bx.vmap(f, batch_size=4),
    "compact": lambda f: bx.vmap(f, divergence="compact"),
    "sequential_vmap": lambda f: bx.vmap(bx.sequential_vmap(f)),
    "jax.vmap outside": lambda f: lambda keys: jax.vmap(bx.vmap(f, batch_size=2))(keys[:, None]),
    "mesh": lambda f: bx.vmap(f, mesh=jax.make_mesh((1,), ("d",))),
    "mesh, lanes repeated": lambda f: bx.vmap(f, mesh=jax.make_mesh((4,), ("d",))),
}


def reuses(fun, *args):
    """Whether JAX sees that `fun` reuses a key, of new ones of these shapes and of arrays."""
    with jax.debug_key_reuse(True):
        args = [random.split(random.key(0), x) if isinstance(x, tuple) else x for x in args]
        try:
            jax.make_jaxpr(jax.jit(fun))(*args)
        except jax.errors.KeyReuseError:
            return True
    return False


@pytest.mark.parametrize("way", WAYS)
def test_right_programs_pass(way):
    for name, fun in RIGHT.items():
        assert not reuses(WAYS[way](fun), KEYS), name


@pytest.mark.parametrize("way", WAYS)
def test_reuse_is_seen(way):
    for name, fun in WRONG.items():
        assert reuses(WAYS[way](fun), KEYS), name


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}])
def test_keys_of_the_caller(options):
    batched = bx.vmap(split_twice, **options)
    assert reuses(lambda keys: batched(keys) + batched(keys), KEYS)
    assert reuses(lambda keys: batched(keys)[0] + random.normal(keys[0]), KEYS)
    fold = bx.vmap(folded, **options)
    assert not reuses(lambda keys: fold(keys) + fold(keys), KEYS)
    made = bx.vmap(lambda key: random.split(key, 1)[0], **options)
    assert not reuses(lambda keys: batched(made(keys)), KEYS)
    assert reuses(lambda keys: batched(made(keys)) + batched(keys), KEYS)
    noisy = bx.vmap(lambda key, x: random.normal(key) + x, in_axes=(bx.split_key, 0), **options)
    assert not reuses(lambda keys: noisy(keys[0], jnp.zeros(6)), (1,))


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}])
def test_derivatives_use_keys_again(options):
    dropped = lambda key, x: jnp.sin(x * random.bernoulli(key).astype(float))
    x = jnp.arange(6.0)
    for out_axes in (0, bx.Reduce("mean")):
        batched = bx.vmap(dropped, out_axes=out_axes, **options)
        assert not reuses(jax.grad(lambda x, keys: batched(keys, x).sum()), x, KEYS)

    def scaled(y, key):
        def step(state):
            key, other = random.split(state[0])
            return key, y * state[1] + 0.1 + random.uniform(other)

        return bx.bounded_while(lambda state: state[1] < 2, step, (key[0], 0.0), 20)[1]

    assert not reuses(jax.grad(scaled), 1.0, (1,))


@pytest.mark.compiles(60)
def test_outside_of_jit():
    with jax.debug_key_reuse(True):
        keys = random.split(random.key(0), 4)
        bx.vmap(split_twice, batch_size=2)(keys)
        with pytest.raises(jax.errors.KeyReuseError):
            bx.vmap(split_twice, batch_size=2)(keys)
        with pytest.raises(jax.errors.KeyReuseError):
            bx.vmap(twice, batch_size=2)(random.split(random.key(1), 4))
