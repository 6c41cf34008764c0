"""What a traceback shows: the frames of the user, and not those of batchax or of JAX."""

import inspect
import traceback

import jax
import jax.numpy as jnp
import pytest

import batchax as bx

X = jnp.arange(3.0)


def bad(x):
    raise RuntimeError("as told")


def bad_step(carry, x):
    return bad(x)


@bx.custom_vmap
def with_rule(x):
    return x


@with_rule.def_vmap
def bad_rule(axis_size, in_batched, x):
    bad(x)


# What a user calls, with a function of the user that raises.
RAISES = {
    "vmap": lambda: bx.vmap(bad)(X),
    "vmap in chunks": lambda: bx.vmap(bad, batch_size=2)(X),
    "vmap of rows": lambda: bx.vmap(bad)(bx.Ragged.from_rows([X, X[:1]])),
    "vmap in jit": lambda: jax.jit(bx.vmap(bad))(X),
    "jit in vmap": lambda: bx.vmap(jax.jit(bad))(X),
    "vmap in grad": lambda: jax.grad(lambda x: bx.vmap(bad)(x).sum())(X),
    "vmap in vmap": lambda: bx.vmap(bx.vmap(bad))(X[None]),
    "vmap in jax.vmap": lambda: jax.vmap(bx.vmap(bad))(X[None]),
    "scan": lambda: bx.scan(bad_step)(0.0, X),
    "auto_vmap": lambda: bx.auto_vmap(x=0)(bad)(X),
    "custom_vmap": lambda: bx.custom_vmap(bad)(X),
    "rule of custom_vmap": lambda: bx.vmap(with_rule)(X),
    "sequential_vmap": lambda: bx.vmap(bx.sequential_vmap(bad))(X),
    "bounded_while": lambda: bx.bounded_while(bad, bad, 0.0, 3),
    "map": lambda: bx.map(bad, X, progress=False),
    "explain": lambda: bx.explain(bad)(X),
    "check": lambda: bx.check(bad)(X),
    "check_rule": lambda: bx.check_rule(bx.custom_vmap(bad), X),
    "find_nonfinite": lambda: bx.find_nonfinite(bad)(X),
    "same_program": lambda: bx.same_program(bad, bad, X),
}

# Mistakes that batchax finds by itself.
REFUSED = {
    "vmap": lambda: bx.vmap(jnp.add)(X, X[:2]),
    "vmap of a function that is none": lambda: bx.vmap(3),
    "option of vmap": lambda: bx.vmap(bad, batch_size=0),
    "scan": lambda: bx.scan(lambda c, x: c)(0.0, X),
    "auto_vmap": lambda: bx.auto_vmap(y=1)(lambda x: x),
    "call of auto_vmap": lambda: bx.auto_vmap(x=2)(lambda x: x)(X),
    "custom_vmap": lambda: bx.custom_vmap(3),
    "call of custom_vmap": lambda: bx.custom_vmap(lambda x: x)(),
    "bounded_while": lambda: bx.bounded_while(bad, bad, 0.0, -1),
    "Reduce": lambda: bx.Reduce("avg"),
    "Compact": lambda: bx.Compact(width=0),
    "Ragged": lambda: bx.Ragged(X, [5]),
    "from_rows": lambda: bx.Ragged.from_rows([X, X[None]]),
    "a row of a Ragged": lambda: bx.Ragged.from_rows([X])["a"],
    "stack": lambda: bx.stack([]),
    "unstack": lambda: bx.unstack({}),
    "check": lambda: bx.check(bx.vmap(3)),
    "map": lambda: bx.map(lambda x: x, "missing.npy"),
    "register_rule": lambda: bx.register_rule(3),
}


def shown(traceback_of):
    """Of a traceback: the functions of this file, and the files of others, from the call on."""
    found = traceback.extract_tb(traceback_of)
    names = [frame.name if frame.filename == __file__ else frame.filename for frame in found]
    return names[names.index("<lambda>") :]


def raised_by(call):
    with pytest.raises(Exception) as raised:
        call()
    return raised.value


@pytest.mark.parametrize("kind", RAISES)
def test_frames_of_the_user_alone(kind):
    error = raised_by(RAISES[kind])
    found = shown(error.__traceback__)
    assert set(found) <= {"<lambda>", "bad", "bad_step", "bad_rule"}
    assert found[-1] == "bad"
    assert error.__context__ is None


@pytest.mark.parametrize("kind", REFUSED)
def test_the_last_frame_is_the_call(kind):
    assert shown(raised_by(REFUSED[kind]).__traceback__) == ["<lambda>"]


@pytest.mark.usefixtures("unfiltered_tracebacks")
def test_all_frames_where_the_user_wants_them():
    assert len(shown(raised_by(RAISES["vmap"]).__traceback__)) > 10
    assert len(shown(raised_by(REFUSED["vmap"]).__traceback__)) > 2


@pytest.mark.usefixtures("longer_rows")
def test_a_cause_is_kept_and_shows_frames_of_the_user_alone():
    def if_long(x):
        return x.sum() if x.shape[0] > 2 else x.sum() * 2

    rows = bx.Ragged.from_rows([X, X[:1]])
    cause = raised_by(lambda: jax.jit(bx.vmap(if_long))(rows)).__cause__
    assert [f.name for f in traceback.extract_tb(cause.__traceback__)] == ["if_long"]


def test_functions_stay_what_they_were():
    def f(x, *, scale=2.0):
        return x * scale

    for made in (bx.vmap(f), bx.auto_vmap(x=0)(f), bx.check(f), bx.find_nonfinite(f)):
        assert made.__wrapped__ is f
        assert made.__name__ == "f"
        assert inspect.signature(made) == inspect.signature(f)
