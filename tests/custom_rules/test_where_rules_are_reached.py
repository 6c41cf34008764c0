"""A rule is run exactly where its function is batched, and is all there is to the batch."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import batchax as bx

from support.oracle import agree, example, plainly, same
from support.user_rules import Telling

BOTH, FIRST, SECOND = (True, True), (True, False), (False, True)
XS, WS = example((3, 2), seed=1), example((3, 2), seed=2)
X, W = XS[0], WS[0]
VMAPS = pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap])


def plain(x, w):
    return jnp.sin(x) * w


def ten(x, w):
    return 10 * plain(x, w)


def total(f):
    return lambda *args: jnp.sum(f(*args) ** 2)


def looped(f):
    return lambda x, w: lax.scan(lambda c, _: (f(c, w), c), x, length=2)


def counted(f):
    start = lambda x: (0, x)
    return lambda x, w: lax.while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1], w)), start(x)
    )


chosen = lambda f: lambda x, w: lax.cond(x[0] > -1e9, f, lambda x, w: x, x, w)
pushed = lambda f: lambda x, w: jax.jvp(f, (x, w), (2 * x, 3 * w))
pulled = lambda f: lambda x, w: jax.vjp(f, x, w)[1](x)
linearized = lambda f: lambda x, w: jax.linearize(f, x, w)[1](w, x)
gradient = lambda f: jax.grad(total(f), (0, 1))


INSIDE = {
    "value": lambda f: f,
    "jvp": pushed,
    "linearize": linearized,
    "vjp": pulled,
    "grad": gradient,
    "value_and_grad": lambda f: jax.value_and_grad(total(f)),
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "hessian": lambda f: jax.hessian(total(f), (0, 1)),
    "grad of hvp": lambda f: jax.grad(
        lambda x, w: jnp.sum(jax.jvp(jax.grad(total(f)), (x, w), (w, x))[1])
    ),
    "jit": jax.jit,
    "grad of jit": lambda f: gradient(jax.jit(f)),
    "grad of checkpoint": lambda f: gradient(jax.checkpoint(f)),
    "checkpoint of grad": lambda f: jax.checkpoint(gradient(f)),
    "scan": looped,
    "grad of scan": lambda f: gradient(lambda x, w: looped(f)(x, w)[0]),
    "while": counted,
    "jvp of while": lambda f: pushed(lambda x, w: counted(f)(x, w)[1]),
    "cond": chosen,
    "grad of cond": lambda f: gradient(chosen(f)),
}


# Which of them are tried around a batch, too; and what is tried there alone.
AROUND = "jvp linearize vjp grad value_and_grad jacfwd jacrev hessian scan".split()
OUTSIDE = {name: INSIDE[name] for name in [*AROUND, "grad of checkpoint"]} | {
    "jit of grad": lambda f: jax.jit(gradient(f)),
    "directions": lambda f: (
        lambda x, w: jax.vmap(lambda t: jax.jvp(f, (x, w), (t, t))[1])(jnp.stack([x, w, x]))
    ),
}
ORDERS = [
    *(("inside", name, derived) for name, derived in INSIDE.items()),
    *(("outside", name, derived) for name, derived in OUTSIDE.items()),
]


@VMAPS
@pytest.mark.parametrize(
    ("where", "name", "derived"), ORDERS, ids=lambda x: x if type(x) is str else ""
)
@pytest.mark.each_commit(20)
def test_a_batch_is_by_the_rule_however_it_is_differentiated(vmap, where, name, derived):
    f = Telling(plain, ten)
    order = (lambda f, v: v(derived(f))) if where == "inside" else lambda f, v: derived(v(f))
    ours, by_hand = order(f.function, vmap), order(ten, jax.vmap)
    agree(ours, by_hand, XS, WS)
    assert f.seen == {(3, BOTH)}
    if name in ("value", "grad", "jvp"):
        same(ours(XS, WS), plainly(by_hand, XS, WS))  # outside of jit


@VMAPS
@pytest.mark.parametrize(
    ("axes", "flags"),
    [((0, None), FIRST), ((None, 0), SECOND), ((-1, 0), BOTH), ((1, None), FIRST)],
)
def test_what_a_rule_is_told_of_a_batch(vmap, axes, flags):
    xs = {None: X, 0: XS, 1: XS.T, -1: XS.T}[axes[0]]
    ws = {None: W, 0: WS}[axes[1]]
    for transform in (lambda f: f, gradient, pushed):
        f = Telling(plain, ten)
        ours, by_hand = (
            transform(v(g, axes, -1)) for v, g in ((vmap, f.function), (jax.vmap, ten))
        )
        agree(ours, by_hand, xs, ws)
        assert f.seen == {(3, flags)}


@VMAPS
def test_what_is_the_same_for_all_lanes_is_batched_where_its_cotangents_are(vmap):
    for argnums, flags in ((0, FIRST), (1, BOTH), ((0, 1), BOTH)):
        f = Telling(plain, ten)
        run = lambda f, vmap, n=argnums: vmap(jax.grad(total(f), n), (0, None))
        agree(run(f.function, vmap), run(ten, jax.vmap), XS, W)
        assert {(3, flags)} <= f.seen <= {(3, FIRST), (3, BOTH)}


@pytest.mark.parametrize("inside", [lambda f: f, gradient], ids=["value", "grad"])
def test_in_chunks_a_rule_has_a_chunk(inside):
    f = Telling(plain, ten)
    got = bx.vmap(inside(f.function), batch_size=2)(XS, WS)
    same(got, plainly(jax.vmap(inside(ten)), XS, WS))
    assert {(2, BOTH)} <= f.seen <= {(2, BOTH), (1, BOTH)}


ONE_EXAMPLE = INSIDE | {
    "jit of hessian": lambda f: jax.jit(jax.hessian(total(f))),
    "jit of jacrev": lambda f: jax.jit(jax.jacrev(f)),
    "one example after another": lambda f: (
        lambda x, w: lax.map(lambda a: gradient(f)(*a), (jnp.stack([x, w]), jnp.stack([w, x])))
    ),
    "tangents of bx.vmap": lambda f: (
        lambda x, w: bx.vmap(lambda t: jax.jvp(f, (x, w), (t, 2 * t)))(jnp.stack([x, w]))
    ),
    "tangents of jax.vmap": lambda f: (
        lambda x, w: jax.vmap(jax.linearize(lambda x: f(x, w), x)[1])(jnp.stack([x, w]))
    ),
    "cotangents of bx.vmap": lambda f: lambda x, w: bx.vmap(jax.vjp(f, x, w)[1])(jnp.stack([x, w])),
    "cotangents of jax.vmap": lambda f: (
        lambda x, w: jax.vmap(jax.vjp(f, x, w)[1])(jnp.stack([x, w]))
    ),
    "a vmap of something else": lambda f: lambda x, w: bx.vmap(lambda s: s * f(x, w))(x),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("which", ONE_EXAMPLE)
@pytest.mark.each_commit(14)
def test_one_example_is_by_the_function(which, compiled):
    f = Telling(plain, ten)
    run = ONE_EXAMPLE[which](f.function)
    by_hand = ONE_EXAMPLE[which](plain)
    if compiled:
        agree(run, by_hand, X, W)
    else:
        same(run(X, W), plainly(by_hand, X, W))
    assert f.seen == set()


TWICE = {
    "both axes of both": ((0, 0), (0, 0), BOTH),
    "one argument each": ((None, 0), (0, None), SECOND),
    "inner axis of both": ((0, 0), (None, 0), BOTH),
}


@pytest.mark.parametrize("derivative", [lambda f: f, gradient, pushed], ids=["", "grad", "jvp"])
@pytest.mark.parametrize("which", TWICE)
@pytest.mark.parametrize("outer", [bx.vmap, jax.vmap])
@pytest.mark.parametrize("inner", [bx.vmap, jax.vmap])
@pytest.mark.each_commit(9)
def test_of_two_axes_the_rule_has_the_inner_one(outer, inner, which, derivative):
    inner_axes, outer_axes, flags = TWICE[which]
    args = [
        example(((4,) if o == 0 else ()) + ((3,) if i == 0 else ()) + (2,), seed=k)
        for k, (i, o) in enumerate(zip(inner_axes, outer_axes, strict=True))
    ]
    f = Telling(plain, ten)
    run = lambda f, outer, inner: derivative(outer(inner(f, inner_axes), outer_axes))
    agree(run(f.function, outer, inner), run(ten, jax.vmap, jax.vmap), *args)
    assert f.seen == {(3, flags)}


@VMAPS
@pytest.mark.parametrize("derivative", [lambda f: f, gradient], ids=["value", "grad"])
def test_a_rule_that_calls_a_function_with_a_rule_reaches_that(vmap, derivative):
    second = Telling(ten, lambda x, w: 7 * ten(x, w))
    first = Telling(plain, second.function)
    xss, wss = example((4, 3, 2), seed=5), example((4, 3, 2), seed=6)
    agree(derivative(vmap(first.function)), derivative(ten), XS, WS)
    assert (first.seen, second.seen) == ({(3, BOTH)}, set())
    seven = lambda x, w: 7 * ten(x, w)
    agree(derivative(vmap(vmap(first.function))), derivative(seven), xss, wss)
    assert (first.seen, second.seen) == ({(3, BOTH)}, {(4, BOTH)})
    inside = vmap(vmap(derivative(first.function)))
    agree(inside, jax.vmap(jax.vmap(derivative(seven))), xss, wss)
    assert (first.seen, second.seen) == ({(3, BOTH)}, {(4, BOTH)})


@VMAPS
def test_a_rule_may_be_applied_again_to_the_next_axis(vmap):
    f = Telling(plain, lambda x, w: 10 * f.function(x, w))
    xss, wss = example((4, 3, 2), seed=5), example((4, 3, 2), seed=6)
    same(vmap(vmap(f.function))(xss, wss), 100 * plain(xss, wss))
    assert f.seen == {(3, BOTH), (4, BOTH)}


def closing(w):
    """A function that closes over `w`, as its rule does; the rule computes ten times it."""
    return Telling(lambda x: plain(x, w), lambda x: ten(x, w))


@VMAPS
@pytest.mark.parametrize("derivative", [lambda f: f, gradient], ids=["value", "grad"])
def test_of_a_batch_of_what_it_closes_over_a_rule_is_not_told(vmap, derivative):
    seen = []

    def one(x, w):
        f = closing(w)
        seen.append(f.seen)
        return f.function(x)

    agree(derivative(vmap(one)), derivative(plain), XS, WS)
    agree(vmap(derivative(one)), jax.vmap(derivative(plain)), XS, WS)
    assert len(seen) >= 2
    assert not any(seen)
