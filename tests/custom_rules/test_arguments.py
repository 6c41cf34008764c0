"""What arguments of a function with a batching rule may be, and how its rules get them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

import batchax as bx

from support.oracle import example, plainly, same

VMAPS = pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap], ids=["bx", "jax"])


def seen_by(fun):
    """`fun` with a rule that notes what it is given, and what it noted."""
    noted = []
    wrapped = bx.custom_vmap(fun)

    @wrapped.def_vmap
    def rule(axis_size, in_batched, *args, **kwargs):
        noted.append((in_batched, args, kwargs))
        axes = jax.tree.map(lambda b: 0 if b else None, in_batched)

        def one(values):
            return fun(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

        return bx.vmap(one, in_axes=(axes,))([*args, *kwargs.values()]), True

    return wrapped, noted


@VMAPS
def test_defaults_come_by_position_and_keyword_only_arguments_by_name(vmap):
    f = lambda x, y=2.0, *, scale, mode="plain": x * y * scale if mode == "plain" else x
    g, noted = seen_by(f)
    xs = example((3,))
    same(vmap(lambda x, s: g(x, scale=s))(xs, xs), xs * 2.0 * xs)
    in_batched, args, kwargs = noted.pop()
    assert in_batched == [True, False, True]
    assert len(args) == 2
    assert args[1] == 2.0
    assert list(kwargs) == ["scale"]  # a rule need not know what is not given
    same(vmap(lambda x, s: g(x, mode="other", scale=s))(xs, xs), xs)
    in_batched, args, kwargs = noted.pop()
    assert in_batched == [True, False, True, False]
    assert list(kwargs) == ["scale", "mode"]
    assert kwargs["mode"] == "other"


@VMAPS
def test_trees_are_flagged_leaf_by_leaf(vmap):
    f = lambda params, x: {"y": params["w"] @ x["a"] + params["b"][0], "z": (x["n"] + 1,)}
    g, noted = seen_by(f)
    params = {"w": example((2, 3)), "b": [example(())]}
    xs = {"a": example((4, 3)), "n": jnp.arange(4)}
    got = vmap(lambda b, x: g({"w": params["w"], "b": [b]}, x), in_axes=(None, 0))(1.0, xs)
    want = jax.vmap(lambda x: f({"w": params["w"], "b": [1.0]}, x))(xs)
    same(got, want)
    assert noted[0][0] == [{"w": False, "b": [False]}, {"a": True, "n": True}]
    same(
        jax.grad(lambda w: vmap(lambda x: g({"w": w, "b": [1.0]}, x)["y"].sum())(xs).sum())(
            params["w"]
        ),
        plainly(
            jax.grad(lambda w: jax.vmap(lambda x: f({"w": w, "b": [1.0]}, x)["y"].sum())(xs).sum()),
            params["w"],
        ),
    )


@VMAPS
def test_methods(vmap):
    @dataclass(frozen=True)
    class Model:
        scale: float

        @bx.custom_vmap
        def predict(self, x):
            return self.scale * x

        @predict.def_vmap
        def _(axis_size, in_batched, self, x):
            return 10 * self.scale * x, True

    xs = example((3,))
    same(vmap(Model(2.0).predict)(xs), 20 * xs)
    same(Model(2.0).predict(xs[0]), 2 * xs[0])
    same(vmap(lambda x: Model.predict(Model(3.0), x))(xs), 30 * xs)


@pytest.mark.parametrize(
    "call",
    [lambda f, x: f(x), lambda f, x: f(x, x, x), lambda f, x: f(x, z=x)],
    ids=["too few", "too many", "unknown"],
)
def test_arguments_that_do_not_fit(call):
    g, _ = seen_by(lambda x, y: x)
    with pytest.raises(bx.ArgumentTypeError, match="argument"):
        bx.vmap(lambda x: call(g, x))(jnp.ones(3))
