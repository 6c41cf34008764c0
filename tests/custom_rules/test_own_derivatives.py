"""Derivative rules on the same object as the batching rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.high_operations import normalized
from support.oracle import agree, example, same

VMAPS = pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap], ids=["bx", "jax"])


def plain(x, y):
    return jnp.sin(x) * y


def make(jvp=False, vjp=False):
    """sin(x) * y, batched by a rule, with derivatives that are 3 (jvp), 5 (vjp) times the true."""
    calls = []
    f = bx.custom_vmap(plain)

    @f.def_vmap
    def rule(axis_size, in_batched, x, y):
        calls.append("vmap")
        return plain(x, y), True

    if jvp:

        @f.def_jvp
        def of_tangents(primals, tangents):
            calls.append("jvp")
            (x, y), (tx, ty) = primals, tangents
            return f(x, y), 3 * (jnp.cos(x) * tx * y + jnp.sin(x) * ty)

    if vjp:
        f.def_vjp(
            lambda x, y: (f(x, y), (x, y, "a name")),
            lambda kept, ct: (5 * ct * jnp.cos(kept[0]) * kept[1], 5 * ct * jnp.sin(kept[0])),
        )
    return f, calls


def reference(scale):
    """sin(x) * y with derivatives that are `scale` times the true ones."""

    @jax.custom_jvp
    def g(x, y):
        return plain(x, y)

    @g.defjvp
    def rule(primals, tangents):
        (x, y), (tx, ty) = primals, tangents
        return g(x, y), scale * (jnp.cos(x) * tx * y + jnp.sin(x) * ty)

    return g


# By which of the rules' factors derivatives of each kind are, for a function with these rules.
REVERSE, FORWARD = dict(jvp=3, vjp=5, both=5), dict(jvp=3, both=3)
FORWARD_OVER_REVERSE = dict(jvp=3, both=5)  # the outer one is that of what the inner rule computes
# transformations of f, given a vmap
ORDERS = {
    "vmap": (REVERSE, lambda vmap, f: lambda x, y: vmap(f)(x, y)),
    "grad of vmap": (REVERSE, lambda vmap, f: jax.grad(lambda x, y: vmap(f)(x, y).sum(), (0, 1))),
    "vmap of grad": (REVERSE, lambda vmap, f: vmap(jax.grad(f, (0, 1)))),
    "jit of vmap of grad": (REVERSE, lambda vmap, f: jax.jit(vmap(jax.grad(f)))),
    "vmap of jit of grad": (REVERSE, lambda vmap, f: vmap(jax.jit(jax.grad(f, 1)))),
    "jacrev of vmap": (REVERSE, lambda vmap, f: jax.jacrev(vmap(f))),
    "vmap of checkpoint": (REVERSE, lambda vmap, f: vmap(jax.grad(jax.checkpoint(f)))),
    "vmap of vmap of grad": (
        REVERSE,
        lambda vmap, f: lambda x, y: vmap(vmap(jax.grad(f)))(jnp.stack([x, y]), jnp.stack([y, x])),
    ),
    "grad of chunks": (
        REVERSE,
        lambda vmap, f: jax.grad(lambda x, y: bx.vmap(f, batch_size=2)(x, y).sum(), (0, 1)),
    ),
    "grad in a scan": (
        REVERSE,
        lambda vmap, f: vmap(
            jax.grad(lambda x, y: jax.lax.scan(lambda c, _: (f(c, y), None), x, length=2)[0])
        ),
    ),
    "jvp of vmap": (FORWARD, lambda vmap, f: lambda x, y: jax.jvp(vmap(f), (x, y), (y, x))),
    "vmap of jvp": (FORWARD, lambda vmap, f: vmap(lambda x, y: jax.jvp(f, (x, y), (y, x)))),
    "jacfwd of vmap": (FORWARD, lambda vmap, f: jax.jacfwd(vmap(f))),
    "jacfwd in vmap": (FORWARD, lambda vmap, f: vmap(jax.jacfwd(f, 1))),
    "jacfwd of jacfwd": (FORWARD, lambda vmap, f: vmap(jax.jacfwd(jax.jacfwd(f)))),
    "jacfwd of grad": (FORWARD_OVER_REVERSE, lambda vmap, f: vmap(jax.jacfwd(jax.grad(f)))),
    "jacfwd of grad of vmap": (
        FORWARD_OVER_REVERSE,
        lambda vmap, f: jax.jacfwd(lambda x, y: jax.grad(lambda x: vmap(f)(x, y).sum())(x)),
    ),
    "grad of grad": (FORWARD_OVER_REVERSE, lambda vmap, f: vmap(jax.grad(jax.grad(f)))),
}


@VMAPS
@pytest.mark.parametrize(
    ("order", "which", "scale"),
    [(order, which, n) for order, (scales, _) in ORDERS.items() for which, n in scales.items()],
)
@pytest.mark.each_commit(14)
def test_derivatives_are_those_of_the_rules(vmap, order, which, scale):
    f, calls = make(jvp=which in ("jvp", "both"), vjp=which in ("vjp", "both"))
    x, y = example((3,)), example((3,), seed=1)
    _, made = ORDERS[order]
    ours, expected = made(vmap, f), made(jax.vmap, reference(scale))
    agree(ours, expected, x, y)
    if which == "both":  # outside of jit
        same(ours(x, y), jax.jit(expected)(x, y))
    if order == "grad of vmap":
        assert "vmap" in calls  # where a derivative rule calls the function


@VMAPS
def test_integers_keys_constants_and_trees(vmap):
    seen = []

    @bx.custom_vmap
    def f(params, key, n, mode):
        return {"y": params["w"] * n + jax.random.uniform(key), "n": n}

    @f.def_vmap
    def rule(axis_size, in_batched, params, key, n, mode):
        axes = jax.tree.map(lambda b: 0 if b else None, in_batched)
        return bx.vmap(f.fun, in_axes=tuple(axes))(params, key, n, mode), True

    @f.def_jvp
    def of_tangents(primals, tangents):
        seen.append(tangents)
        _params, _key, n, mode = primals
        assert mode == "mode"
        assert tangents[3] is None
        return f(*primals), {
            "y": 3 * tangents[0]["w"] * n,
            "n": np.zeros(np.shape(n), jax.dtypes.float0),
        }

    keys, n = jax.random.split(jax.random.key(0), 3), jnp.arange(3)
    total = lambda w: vmap(lambda w, key, n: f({"w": w}, key, n, "mode"))(w, keys, n)["y"].sum()
    same(jax.grad(total)(jnp.ones(3)), 3.0 * n)
    assert seen
    f.def_vjp(
        lambda params, key, n, mode: (f(params, key, n, mode), (n, mode)),
        lambda kept, ct: ({"w": 5 * ct["y"] * kept[0]}, None, None, None),
    )
    same(jax.grad(total)(jnp.ones(3)), 5.0 * n)
    same(jax.jvp(total, (jnp.ones(3),), (jnp.ones(3),))[1], 9.0)


@pytest.mark.parametrize(
    ("set_rule", "message"),
    [
        (lambda f: f.def_jvp(lambda p, t: t[0]), r"f\.def_jvp must return a pair"),
        (lambda f: f.def_vjp(lambda x: x, lambda kept, ct: (ct,)), r"fwd given to f\.def_vjp"),
        (
            lambda f: f.def_vjp(lambda x: (x, x), lambda kept, ct: ct),
            r"bwd given to f\.def_vjp must return a tuple with a cotangent for each of the 1",
        ),
        (
            lambda f: f.def_vjp(lambda x: (x, x), lambda kept, ct: (ct, ct)),
            "it returned a tuple of length 2",
        ),
    ],
)
def test_wrong_rules(set_rule, message):
    @bx.custom_vmap
    def f(x):
        return x

    set_rule(f)
    with pytest.raises(bx.ArgumentTypeError, match=message):
        jax.grad(f)(1.0)


def test_without_a_batching_rule():
    f = bx.custom_vmap(plain)
    f.def_jvp(lambda p, t: (plain(*p), 3 * t[0]))
    same(jax.grad(f)(1.0, 2.0), jnp.asarray(3.0))
    with pytest.raises(bx.UnsupportedError, match="without a batching rule"):
        bx.vmap(f)(jnp.ones(3), jnp.ones(3))


RULED = {
    "own": lambda x: jnp.tanh(x) * x,
    "jvp": jax.custom_jvp(lambda x: jnp.sin(x) * x),
    "vjp": jax.custom_vjp(lambda x: jnp.sin(x) * x),
}
# What a rule returns besides the tangents has derivatives of its own, which are not the rule's.
RULED["jvp"].defjvp(lambda p, t: (jnp.sin(p[0]) * p[0], 2 * t[0] * jnp.cos(p[0])))
RULED["vjp"].defvjp(lambda x: (jnp.sin(x) * x, x), lambda x, ct: (3 * ct * jnp.exp(jnp.sin(x)),))

SECOND = {
    "jvp of vjp": lambda f: lambda x: jax.jvp(jax.grad(lambda y: jnp.sum(f(y))), (x,), (x,))[1],
    "vjp of vjp": lambda f: jax.grad(
        lambda x: jnp.sum(jnp.cos(jax.grad(lambda y: jnp.sum(f(y)))(x)))
    ),
    "jvp of jvp": lambda f: (
        lambda x: jax.jvp(lambda y: jax.jvp(f, (y,), (jnp.cos(x),))[1], (x,), (x,))[1]
    ),
    "many of vjp": lambda f: (
        lambda x: jax.vmap(lambda t: jax.jvp(jax.grad(lambda y: jnp.sum(f(y))), (x,), (t,))[1])(
            jnp.stack([x, x + 1])
        )
    ),
}


@pytest.mark.parametrize("batched", ["alone", "inside", "outside"])
@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("ruled", RULED)
def test_second_derivatives_of_a_function_with_rules_of_derivatives(ruled, second, batched):
    """As of the function without a batching rule, however it is batched."""
    if (ruled, second) == ("vjp", "jvp of jvp"):
        return  # JAX has no forward mode of it
    function = RULED[ruled]
    with_rule = bx.custom_vmap(function)
    with_rule.def_vmap(lambda size, batched, x: (jax.vmap(function)(x), True))
    wraps = {
        "alone": lambda derived, f: derived(lambda x: jnp.cosh(f(x)) + f(x)),
        "inside": lambda derived, f: derived(lambda x: jnp.cosh(jax.vmap(f)(x))),
        "outside": lambda derived, f: jax.vmap(derived(lambda x: jnp.cosh(f(x)) + f(x))),
    }
    run = lambda f: wraps[batched](SECOND[second], f)
    agree(run(with_rule), run(function), jnp.linspace(-1.0, 1.0, 5))


@pytest.mark.parametrize("batched", ["alone", "jax.vmap", "bx.vmap", "in chunks"])
def test_a_function_without_a_forward_mode(batched):
    fun = lambda x: normalized(x)[0]
    f = bx.custom_vmap(fun)
    f.def_vmap(lambda size, batched, x: (fun(x), True))
    maps = {
        "alone": lambda f: lambda x: jnp.stack([f(row) for row in x]),
        "jax.vmap": jax.vmap,
        "bx.vmap": bx.vmap,
        "in chunks": lambda f: bx.vmap(f, batch_size=2),
    }
    gradient = lambda f: jax.grad(lambda x: jnp.sum(jnp.cos(f(x))))
    x = jnp.linspace(-1.0, 2.0, 15).reshape(5, 3)
    same(gradient(maps[batched](f))(x), gradient(maps["alone"](fun))(x))


@VMAPS
def test_a_rule_without_a_forward_mode_in_a_bounded_loop(vmap):
    """The sweep back over the steps transposes tangents of what the rule does."""
    fun = lambda x: normalized(x)[0]
    f = bx.custom_vmap(fun)
    f.def_vmap(lambda size, batched, x: (fun(x), True))

    def gradient(f):
        step = lambda c: (c[0] + 1, f(c[1] + 1))
        walk = lambda x: bx.bounded_while(lambda c: c[0] < 2, step, (0, x), max_steps=3)[1]
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.cos(walk(x)))))

    x = jnp.linspace(-1.0, 2.0, 15).reshape(5, 3)
    same(vmap(gradient(f))(x), jnp.stack(list(map(gradient(fun), x))))


def test_a_transpose_by_another_operand_than_the_tangents():
    """The tangents of a product are linear in the other factor, too."""
    f = bx.custom_vmap(lambda y, x: y * jnp.sin(x))
    f.def_vmap(lambda size, batched, y, x: (y * jnp.sin(x), True))
    x, t = jnp.arange(3.0), jnp.arange(1.0, 4.0)

    def one(x, t, ct):
        tangent = lambda y: jax.jvp(lambda x: f(y, x), (x,), (t,))[1]
        return jax.linear_transpose(tangent, x)(ct)[0]

    same(jax.vmap(one)(x, t, x + 5), jnp.cos(x) * t * (x + 5))
