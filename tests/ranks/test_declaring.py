"""The ways to declare ranks, and what arguments may be."""
# ruff: noqa: F722, F821 - the shapes in annotations are no types

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int, Key, PyTree

import batchax as bx

from support.oracle import example, same


def foo(s, v, m):
    return v @ m @ v + s * v.size


WEIGHTS = jnp.arange(3.0)
S, V, M = 2.0, jnp.ones((5, 3)), jnp.ones((5, 3, 3))

DECLARED = {
    "by name": bx.auto_vmap(s=0, v=1, m=2),
    "by position": bx.auto_vmap(0, 1, 2),
    "both": bx.auto_vmap(0, m=2, v=1),
    "signature": bx.auto_vmap("(),(n),(n,n)->()"),
    "signature with spaces": bx.auto_vmap(" ( ) , (n), ( n , n ) -> () "),
    "signature with a size": bx.auto_vmap("(),(3),(n,n)->()"),
}


@pytest.mark.parametrize("how", DECLARED)
def test_the_example(how):
    f = DECLARED[how](foo)
    same(f(S, V, M), jnp.full(5, 15.0))
    same(f(s=S, m=M, v=V), jnp.full(5, 15.0))
    same(f(S, V[0], M[0]), jnp.asarray(15.0))
    assert f.__name__ == "foo"


@pytest.mark.parametrize(
    "ranks",
    [1, {"a": 1, "b": 1}, {"a": 1, "b": [1, 1]}],
    ids=["one for all", "prefix", "each leaf"],
)
def test_trees(ranks):
    @bx.auto_vmap(ranks)
    def f(tree):
        return {"out": tree["a"] @ tree["b"][0], "all": sum(x.sum() for x in jax.tree.leaves(tree))}

    a, b = example((4, 1, 3)), [example((5, 3), seed=1), example((3,), seed=2)]
    got = f({"a": a, "b": b})
    one = lambda a, b0: {"out": a @ b0, "all": a.sum() + b0.sum() + b[1].sum()}
    same(got, jax.vmap(jax.vmap(one, (None, 0)), (0, None))(a[:, 0], b[0]))


def test_defaults_are_left_to_the_function():
    @bx.auto_vmap(x=1, w=1)
    def f(x, w=WEIGHTS):
        return x @ w

    same(f(V), jnp.full(5, 3.0))
    same(f(V[0], jnp.ones((2, 3))), jnp.full(2, 3.0))

    @bx.auto_vmap(1, offset=0)
    @jax.jit
    def g(x, double=True, *, offset=0.5, mean=None):
        # Under jit a default is a value of Python, and what is passed is traced.
        total = x.sum() if mean is None else x.mean()
        return (2 * total if double is True else total) + offset

    same(g(V), jnp.full(5, 6.5))
    same(g(V, offset=jnp.zeros((2, 1))), jnp.full((2, 5), 6.0))
    same(bx.auto_vmap(1)(partial(jax.jit, static_argnums=1)(lambda x, n=2: x[:n]))(V), V[:, :2])


def test_keyword_only_positional_only_and_any_number():
    @bx.auto_vmap(1, y=0, k=1)
    def f(x, /, *, y, k=None):
        return x.sum() + y + (0 if k is None else k.sum())

    same(f(V, y=jnp.zeros((2, 1))), jnp.full((2, 5), 3.0))
    same(f(V, y=0.0, k=V), jnp.full(5, 6.0))

    @bx.auto_vmap(0, 1, None)
    def g(a, *rest, **named):
        assert rest[1] == "text"
        return a + rest[0].sum() + sum(named.values())

    same(g(jnp.zeros((2, 1)), V, "text", last=1.0), jnp.full((2, 5), 4.0))

    @bx.auto_vmap(xs=1, scale=0)
    def h(*xs, **named):
        return sum(x.sum() for x in xs) * named["scale"] + named["plain"]

    same(h(V, V[0], scale=jnp.ones((2, 1)), plain=1.0), jnp.full((2, 5), 7.0))

    @bx.auto_vmap(named=1)
    def every(**named):
        return sum(x.sum() for x in named.values())

    same(every(a=V, b=V[0]), jnp.full(5, 6.0))


def test_methods_and_other_callables():
    class Model(eqx.Module):
        scale: jax.Array

        @bx.auto_vmap(1)
        def by_position(self, x):
            return self.scale * x.sum()

        @bx.auto_vmap(x=1)
        def by_name(self, x):
            return self.scale * x.sum()

        @bx.auto_vmap
        def annotated(self, x: Float[Array, " n"]):
            return self.scale * x.sum()

        @bx.auto_vmap("(n)->()")
        def by_signature(self, x):
            return self.scale * x.sum()

    model = Model(jnp.asarray(2.0))
    for method in (model.by_position, model.by_name, model.annotated, model.by_signature):
        same(method(V), jnp.full(5, 6.0))
    same(bx.auto_vmap(2)(partial(foo, 2.0, V[0]))(M), jnp.full(5, 15.0))
    same(bx.auto_vmap(1)(jnp.linalg.norm)(2 * V), jnp.full(5, jnp.sqrt(12.0)))
    same(bx.auto_vmap(0, 0)(jnp.add)(jnp.ones((2, 1)), jnp.ones(3)), jnp.full((2, 3), 2.0))


def test_numbers_lists_and_numpy_arrays():
    @bx.auto_vmap(s=0, v=1)
    def f(s, v):
        return s * v.sum()

    same(f(2, [1.0, 2.0]), jnp.asarray(6.0))
    same(f([1.0, 2.0], [[1.0, 2.0], [3.0, 4.0]]), jnp.array([3.0, 14.0]))
    same(f(np.float32(2), np.ones((4, 2), np.float32)), np.full(4, 4.0, np.float32))
    same(f([np.int32(1), True], np.ones(2)), jnp.array([2.0, 2.0]))

    @bx.auto_vmap({"a": 1, "b": [0, 0]})
    def g(tree):
        return tree["a"].sum() + tree["b"][0] * tree["b"][1]

    same(g({"a": [[1.0, 2.0], [3.0, 4.0]], "b": [2.0, [1.0, 2.0]]}), jnp.array([5.0, 11.0]))


class Affine(NamedTuple):
    w: Any
    b: Any = None


def test_named_tuples_of_ranks():
    f = lambda p, x: p.w @ x + (0 if p.b is None else p.b)
    w, x = example((4, 1, 2, 3)), example((5, 3), seed=1)
    want = jnp.einsum("bcij,cj->bci", jnp.broadcast_to(w, (4, 5, 2, 3)), x)
    for ranks in (Affine(2, 1), Affine(2, None)):
        same(bx.auto_vmap(ranks, 1)(f)(Affine(w, jnp.ones(2)), x), want + 1)
    same(bx.auto_vmap(Affine(2), 1)(f)(Affine(w), x), want)
    same(
        bx.auto_vmap(Affine(2, 1), 1)(f)(Affine([[1.0, 2.0, 3.0]], [1.0]), x[0]),
        f(Affine(jnp.array([[1.0, 2.0, 3.0]]), jnp.ones(1)), x[0]),
    )
    with pytest.raises(bx.AxisError, match=r"gives a Affine .*a tuple of length 2"):
        bx.auto_vmap(Affine(2, 1), 1)(f)((w, jnp.ones(2)), x)


def test_annotations():
    @bx.auto_vmap
    def f(
        v: Float[Array, "n"],
        m: Float[Array, "n m"],
        *,
        s: Float[Array, ""] | None = None,
        tree: PyTree[Float[Array, "3"]] = None,
        key: Key[Array, ""] | None = None,
        index: Int[Array, "#n n+1 _ 2=2"] | None = None,
        name: str = "text",
        plain=4,
    ) -> Float[Array, "m"]:
        assert name == "text"
        out = v @ m
        return out if s is None else out * s

    v, m = example((4, 1, 2)), example((5, 2, 3), seed=1)
    want = jnp.einsum("bn,cnm->bcm", v[:, 0], m)
    same(f(v, m), want)
    same(f(v, m, s=jnp.asarray(2.0)), 2 * want)
    same(f(v[0, 0], m[0], s=jnp.ones(7)), jnp.broadcast_to(v[0, 0] @ m[0], (7, 3)))
    assert f(v, m, tree={"a": jnp.ones((6, 1, 1, 3))}).shape == (6, 4, 5, 3)
    assert f(v, m, index=jnp.ones((8, 1, 1, 2, 3, 7, 2), int)).shape == (8, 4, 5, 3)
    assert f(v, m, index=jnp.ones((8, 1, 1, 1, 3, 7, 2), int)).shape == (8, 4, 5, 3)


class Counter:
    def add(self, x):
        return x


WRONG = {
    "unknown name": (lambda: bx.auto_vmap(q=1)(foo), "got ranks for q, but foo has.*s, v, m"),
    "too many": (lambda: bx.auto_vmap(0, 1, 2, 3)(foo), "4 ranks by position, but foo has 3"),
    "self": (
        lambda: bx.auto_vmap(None, 1)(Counter.add),
        r"2 ranks by position, but add has 1 positional parameters: x \(self is not counted\)",
    ),
    "twice": (lambda: bx.auto_vmap(0, s=1)(foo), "two ranks for s"),
    "negative": (lambda: bx.auto_vmap(-1)(foo), "the rank given for s must be"),
    "huge": (lambda: bx.auto_vmap(10**12)(foo), "the rank given for s must be.*got 10"),
    "builtin": (lambda: bx.auto_vmap(int), "the annotations of int cannot be read"),
    "float": (lambda: bx.auto_vmap(v=1.0)(foo), r"the rank given for v must be.*got 1\.0"),
    "in a tree": (lambda: bx.auto_vmap(v={"a": [True]})(foo), r"for v\['a'\]\[0\] must be"),
    "signature": (lambda: bx.auto_vmap("(n->()")(foo), "not a signature of core dimensions"),
    "signature name": (lambda: bx.auto_vmap("(2n)->()")(foo), "'2n' is neither a name nor"),
    "no function": (lambda: bx.auto_vmap(1)(3), "decorates a function, got 3"),
    "no annotations": (lambda: bx.auto_vmap(foo), "no parameter of foo is annotated"),
    "any rank": (
        lambda: bx.auto_vmap(annotated(Float[Array, "... n"])),
        r"annotation of f\(x\) has any number of dimensions \(\.\.\.\)",
    ),
    "several ranks": (
        lambda: bx.auto_vmap(annotated(Float[Array, "n"] | Float[Array, "n m"])),
        r"allows arrays of several ranks: \(n\), \(n, m\)",
    ),
    "unreadable": (
        lambda: bx.auto_vmap(annotated("Float[Missing, 'n']")),
        "annotations of f cannot be read",
    ),
    "option": (lambda: bx.auto_vmap(1, batch_size=0)(foo), "batch_size is 0"),
    "option type": (lambda: bx.auto_vmap(1, memory_limit=3)(foo), "goes with batch_size"),
}


def annotated(annotation):
    def f(x):
        return x

    f.__annotations__["x"] = annotation
    return f


@pytest.mark.parametrize("case", WRONG)
def test_wrong_declarations(case):
    declare, message = WRONG[case]
    with pytest.raises(bx.BatchaxError, match=message):
        declare()
