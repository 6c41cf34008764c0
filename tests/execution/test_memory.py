"""`batch_size="auto"`, `memory_limit`, and what happens when memory runs out."""

import functools
import logging
import math

import jax
import jax.numpy as jnp
import pytest

import batchax as bx
from batchax.execution import eager, memory
from batchax.execution.memory import memory_of, parse_limit

from support.oracle import example, same

LANES = 240
X = example((LANES, 8), seed=1)
W = example((8, 300), seed=2)


def wide(w, x):
    """About 10 kB of temporaries for each lane, forward."""
    return jnp.sum(jnp.sort(jnp.sin(x[:, None] * w), axis=0)[::2])


def auto(limit, **options):
    return bx.vmap(wide, (None, 0), batch_size="auto", memory_limit=limit, **options)


def mean_square(limit, w, x):
    return jnp.mean(auto(limit)(w, x) ** 2)


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile()


def last_choice(program):
    return next(c for c in reversed(bx.batch_size_choices()) if c.program == program)


@pytest.mark.parametrize("limit", [300_000, "600kB", "1 MiB"])
@pytest.mark.each_commit(2)
def test_what_was_chosen_fits_and_more_would_not(limit):
    f = auto(limit)
    program = compiled(f, W, X)
    allowed = parse_limit(limit)
    assert memory_of(program).bytes <= allowed
    same(program(W, X), bx.vmap(wide, (None, 0))(W, X))
    choice = last_choice("wide")
    assert choice.limit == allowed
    assert choice.size == LANES
    assert 1 < choice.batch_size < LANES
    assert choice.tried[choice.batch_size] <= allowed
    more = bx.vmap(wide, (None, 0), batch_size=2 * choice.batch_size)
    assert memory_of(compiled(more, W, X)).bytes > allowed


@pytest.mark.compiles(60)
def test_a_derivative_chooses_for_itself():
    limit = 1_000_000
    loss = functools.partial(mean_square, limit)
    args = W, X
    expected = jax.grad(lambda w, x: jnp.mean(bx.vmap(wide, (None, 0))(w, x) ** 2), (0, 1))(*args)
    for gradient in (jax.grad(loss, (0, 1)), jax.grad(jax.jit(loss), (0, 1))):
        program = compiled(gradient, *args)
        same(program(*args), expected, dict(rtol=1e-3, atol=1e-5))
        backward, forward = last_choice("cotangents of wide"), last_choice("wide")
        assert backward.tried[backward.batch_size] <= limit
        assert backward.batch_size < forward.batch_size
    same(jax.grad(loss, (0, 1))(*args), expected, dict(rtol=1e-3, atol=1e-5))


def test_without_a_limit_what_the_device_has_free():
    few = X[:60]  # whose temporaries a cache holds, in double precision, too
    same(auto(None)(W, few), bx.vmap(wide, (None, 0))(W, few))
    assert last_choice("wide").batch_size == len(few)
    assert last_choice("wide").limit > 2**20


def test_a_limit_too_small_for_one_lane_says_how_much_one_needs():
    # Messages give sizes for people; what they say is what is asked for here.
    with pytest.raises(bx.MemoryLimitError, match=r"wide needs .* for one lane") as caught:
        auto("1kB")(W, X)
    with pytest.raises(bx.MemoryLimitError, match=r"wide needs .* for one lane"):
        jax.jit(auto("1kB"))(W, X)
    smallest = str(caught.value).split("wide needs ")[1].split(" for one lane")[0]
    number, unit = smallest.split()
    enough = f"{float(number) * 1.001}{unit}"
    same(auto(enough)(W, X), bx.vmap(wide, (None, 0))(W, X))


def test_choices_take_few_compilations_and_are_remembered(monkeypatch, caplog):
    seen = []
    real = memory.memory_of
    monkeypatch.setattr(memory, "memory_of", lambda c: seen.append(c) or real(c))
    limit = f"{555 * X.dtype.itemsize // 4}kB"
    with caplog.at_level(logging.INFO, logger="batchax"):
        auto(limit)(W, X)
        first = len(seen)
        auto(limit)(W, X + 1)
        jax.jit(auto(limit))(W, X)
    assert 2 <= first <= 3
    assert len(seen) == first
    *compiled, chosen = (r.getMessage() for r in caplog.records if r.name == "batchax")
    assert len(compiled) == first
    assert "compiling wide for 8 of 240 lanes at a time" in compiled[0]
    assert "<- chosen" in chosen


def test_a_choice_that_takes_long_says_so(monkeypatch, caplog):
    monkeypatch.setattr(memory, "_PATIENCE", 0.0)
    auto("556kB")(W, X)
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "compiling wide for 8 of 240 lanes at a time, to see what it needs" in messages[0]


@pytest.mark.parametrize(
    ("fixed", "per_lane", "least", "lanes"),
    [
        (0, 10_000, 1, 400),  # what a cache holds
        (3_000_000, 10_000, 1, 400),  # beside what does not grow
        (0, 10_000, 1000, 1000),  # few lanes do little beside beginning a chunk
        (0, 1_000_000, 1, 8),  # the first that is tried
        (0, 0, 1, 8192),
        (0, 600, 1, 8192),  # all at once is about as fast, and no loop
        (0, 10_000, None, 8192),  # on a GPU
    ],
)
def test_few_accounts_find_about_the_fastest(fixed, per_lane, least, lanes):
    tried = []

    def account(chunk):
        tried.append(chunk)
        return memory.CompilersAccount(1000, 1000, fixed + chunk * per_lane, 0, 0)

    choice = memory._search("f", 10**9, 8192, account, least=least)
    assert 0.5 * lanes <= choice.batch_size <= 1.3 * lanes
    assert len(tried) <= 4
    if lanes > 100:  # and what fits is less
        choice = memory._search("f", fixed + 100 * per_lane + 2000, 8192, account, least=least)
        assert choice.batch_size <= 100 or not per_lane


def test_what_does_not_grow_as_foreseen():
    """Accounts that jump, fall or stay the same end the search with what fits."""
    for needs in (lambda c: 500 if c < 40 else 10**6, lambda c: 1000 - c, lambda c: 700):
        asked = []

        def account(chunk, needs=needs, asked=asked):
            asked.append(chunk)
            return memory.CompilersAccount(0, 0, needs(chunk), 0, 0)

        choice = memory._search("f", 995, 512, account)
        assert needs(choice.batch_size) <= 995
        assert len(asked) <= memory._MOST_COMPILATIONS
    with pytest.raises(bx.MemoryLimitError, match="for one lane at a time"):
        memory._search("f", 10, 512, lambda c: memory.CompilersAccount(0, 0, 11, 0, 0))


def test_under_an_outer_vmap_the_choice_counts_all_its_lanes():
    xs = jnp.stack([X, -X, 2 * X])
    alone = compiled(auto("1MiB"), W, X)
    assert memory_of(alone).bytes <= 2**20
    one = last_choice("wide").batch_size
    program = compiled(jax.vmap(auto("1MiB"), (None, 0)), W, xs)
    assert memory_of(program).bytes <= 2**20
    assert last_choice("wide").batch_size < one
    same(program(W, xs), bx.vmap(bx.vmap(wide, (None, 0)), (None, 0))(W, xs))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GiB", 2 * 2**30),
        ("1.5 kB", 1500),
        ("3MB", 3_000_000),
        ("7", 7),
        (12, 12),
        ("1tib", 2**40),
        ("10 B", 10),
    ],
)
def test_limits_are_bytes_or_text(text, count):
    assert parse_limit(text) == count


@pytest.mark.parametrize(
    "limit", ["much", "2 XB", "", 0, -5, True, [1], "-1GB", math.inf, math.nan]
)
def test_other_limits_are_refused_when_vmap_is_called(limit):
    error = bx.ArgumentTypeError if limit in (True, [1]) else bx.OptionError
    with pytest.raises(error, match=r'memory_limit .* "2GiB"'):
        auto(limit)


# --- running out of memory ---------------------------------------------------------------------


@pytest.fixture
def scarce(monkeypatch):
    """Memory for at most 15 lanes, which is noticed when a program runs."""
    real = eager.jitted
    ran = []

    def limited(key, program):
        chunk = program.args[0].chunk

        def run(*operands):
            ran.append(chunk)
            if chunk > 15:
                raise jax.errors.JaxRuntimeError(
                    "RESOURCE_EXHAUSTED: Out of memory allocating 2147483648 bytes."
                )
            return real(key, program)(*operands)

        return run

    monkeypatch.setattr(eager, "jitted", limited)
    return ran


def test_out_of_memory_outside_jit_goes_on_with_half_the_lanes(scarce):
    with pytest.warns(bx.SmallerChunksWarning) as caught:
        got = bx.vmap(jnp.sin, batch_size=63)(X)
    same(got, jnp.sin(X))
    assert scarce == [63, 31, 15]
    assert "63 lanes at a time" in str(caught[0].message)
    assert "batch_size=31" in str(caught[0].message)
    assert "batch_size=15" in str(caught[-1].message)
    assert caught[0].filename == __file__


def test_out_of_memory_in_a_derivative(scarce):
    with pytest.warns(bx.SmallerChunksWarning):
        got = jax.grad(lambda x: jnp.sum(bx.vmap(jnp.sin, batch_size=20)(x)))(X)
    same(got, jnp.cos(X))
    assert scarce == [20, 10, 20, 10]  # forward, and in reverse


def test_effects_are_not_done_twice(scarce):
    seen = []

    def f(x):
        jax.debug.callback(lambda x: seen.append(x), x)
        return x

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        bx.vmap(f, batch_size=20)(X)
    assert not seen


def test_other_errors_are_passed_on(monkeypatch):
    def broken(key, program):
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    monkeypatch.setattr(eager, "jitted", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        bx.vmap(jnp.sin, batch_size=20)(X)
