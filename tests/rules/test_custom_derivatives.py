"""Functions with derivative rules of their own."""

import functools
import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import jaxpr_as_fun

import batchax as bx

from support.derivative_rules import tripled_jvp
from support.high_operations import OLD
from support.oracle import agree, at_once, check, example, loop_function, plainly, same

X = example((3, 2), seed=1)
W = example((2,), seed=3)
OLDEST = bool(OLD)
# The kinds of functions that JAX calls by `call_hi_primitive`, where its options ask for that.
NEXT = [k for k in ("jvp", "vjp") if getattr(jax.config, f"jax_custom_{k}3", False)]


def scaled_product():
    """x * y * w with a VJP rule that is three times the true one."""

    @jax.custom_vjp
    def f(x, y, w):
        return x * y * w, w.sum()

    def fwd(x, y, w):
        return f(x, y, w), (x, y, w)

    def bwd(residuals, cotangents):
        x, y, w = residuals
        c, s = cotangents
        return 3 * c * y * w, 3 * c * x * w, 3 * (c * x * y + s)

    f.defvjp(fwd, bwd)
    return f


@pytest.mark.parametrize(
    ("in_axes", "out_axes"), [((0, 1), 0), ((0, None), 1), ((None, 1), 0), ((1, 0), 1)]
)
def test_custom_jvp(in_axes, out_axes):
    x, y = [
        W if a is None else example((3, 2) if a == 0 else (2, 3), seed=i)
        for i, a in enumerate(in_axes)
    ]
    nested = in_axes == (0, 1)
    check(tripled_jvp(), x, y, in_axes=in_axes, out_axes=out_axes, second=True, nested=nested)


@pytest.mark.parametrize("in_axes", [(0, 0, None), (0, None, 0), (None, 0, None)])
def test_custom_vjp(in_axes):
    args = [X if a == 0 else W for a in in_axes]
    f, g = (bx.vmap(scaled_product(), in_axes), jax.vmap(scaled_product(), in_axes))
    loss = lambda h: lambda *a: (jnp.sin(h(*a)[0]) * X).sum()
    grad = lambda h, wrap=lambda h: h: jax.grad(wrap(loss(h)), (0, 1, 2))
    ways = f, g, grad(f), grad(f, jax.jit), grad(g)
    got, expected, *gradients, gradient = at_once(*ways)(*args)
    same(got, expected)
    for got in gradients:
        same(got, gradient)
    if in_axes == (0, 0, None):
        same(grad(f)(*args), gradient)  # each operation by itself


def test_symbolic_zeros_reach_a_jvp_rule():
    seen = []

    @jax.custom_jvp
    def f(x, y):
        return x * y, y

    def rule(primals, tangents):
        seen.append([type(t) is SymbolicZero for t in tangents])
        (x, y), (tx, ty) = primals, tangents
        tangent = 0.0 if type(tx) is SymbolicZero else tx * y
        if type(ty) is not SymbolicZero:
            tangent = tangent + x * ty
        return f(x, y), (tangent, ty)

    f.defjvp(rule, symbolic_zeros=True)
    g = bx.vmap(f)
    expected = plainly(jax.grad(lambda x: jax.vmap(f)(x, X)[0].sum()), X)
    seen.clear()
    same(jax.grad(lambda x: g(x, X)[0].sum())(X), expected)
    assert seen == [[False, True]]
    for wrap in (lambda h: h, jax.jit):
        same(
            wrap(lambda t: jax.jvp(lambda y: g(X, y), (X,), (t,)))(X),
            jax.jvp(lambda y: jax.vmap(f)(X, y), (X,), (X,)),
        )


def test_a_reverse_rule_branches_on_what_a_forward_rule_was_told():
    """As those of Equinox's loops do: flags among residuals are Python's, and known."""

    @jax.custom_vjp
    def f(x, y):
        return x * y

    def fwd(x, y):
        # The last two are arrays, and stay so: a program writes one as True, of which `~` is -2.
        known = x.perturbed, y.perturbed, 3, jnp.zeros(()), jnp.array(True)
        return x.value * y.value, (x.value, y.value, *known)

    def bwd(residuals, cotangent):
        x, y, wrt_x, wrt_y, times, zero, flag = residuals
        cotangent = jnp.where(~flag, 0, cotangent + zero.sum())
        return times * cotangent * y if wrt_x else None, 5 * cotangent * x if wrt_y else None

    f.defvjp(fwd, bwd, symbolic_zeros=True)

    def derivatives(vmap):
        total = lambda x, y: vmap(f)(x, y).sum()
        shared = lambda y: vmap(lambda x: f(x, y))(X).sum()
        inside = vmap(jax.grad(lambda x, y: f(x, y).sum(), 1))(X, X)
        nested = jax.grad(lambda x: vmap(vmap(f))(x, X).sum())(X)
        both, one = jax.grad(total, (0, 1))(X, X), jax.grad(total)(X, X)
        return both, one, jax.grad(shared)(W), inside, nested

    ways = [bx.vmap, functools.partial(bx.vmap, batch_size=2), jax.vmap]
    *got, expected = at_once(*[functools.partial(derivatives, way) for way in ways])()
    for result in (*got, derivatives(bx.vmap)):
        same(result, expected)


def test_an_integer_that_lanes_share_has_a_cotangent_of_no_number():
    @jax.custom_vjp
    def f(x, w):
        return x * w, w.sum(), w.astype(int)

    def bwd(residuals, cotangents):
        (x, w), (c, s, none) = residuals, cotangents
        assert none.dtype == jax.dtypes.float0
        return c * w, c * x + s

    f.defvjp(lambda x, w: (f(x, w), (x, w)), bwd)

    def total(x, w):
        out, shared, _ = bx.vmap(f, (0, None), (0, None, None))(x, w)
        return out.sum() + 2 * shared

    got = jax.grad(total, (0, 1))(X, W)
    same(got, (jnp.stack([W] * len(X)), X.sum(0) + 2))


def test_a_rule_that_makes_a_constant_depend_on_the_batch():
    @jax.custom_vjp
    def inject(x, w):
        return jnp.zeros(())

    inject.defvjp(lambda x, w: (inject(x, w), (x, w)), lambda r, c: (c * r[0], c * r[0] * r[1]))

    @jax.custom_jvp
    def inject_forward(x, w):
        return jnp.zeros(())

    inject_forward.defjvp(
        lambda p, t: (inject_forward(*p), (t[0] * p[0]).sum() + (t[1] * p[0] * p[1]).sum())
    )
    for f in (inject, inject_forward):
        scales = jnp.arange(1.0, 4.0)
        total = lambda x, w: (bx.vmap(f, (0, None))(x, w) * scales).sum()
        expected = lambda x, w: sum(f(row, w) * s for row, s in zip(x, scales, strict=True))
        ways = [jax.grad(g, (0, 1)) for g in (expected, total, jax.jit(total))]
        want, *results = at_once(*ways)(X, W)
        for got in results:
            same(got, want)


def counted(kind, mixing):
    """A function whose rules call it, of two outputs, and the log of when they ran.

    The second is the same for all lanes where `a` is; its derivative is not if `mixing`.
    """
    log = []
    if kind == "jvp":

        @jax.custom_jvp
        def f(a, b):
            return a * b, a

        @f.defjvp
        def rule(primals, tangents):
            log.append("jvp")
            (a, b), (da, db) = primals, tangents
            return f(a, b), (da * b + a * db, da + db if mixing else da)

        return f, log

    @jax.custom_vjp
    def f(a, b):
        return a * b, a

    def fwd(a, b):
        log.append("fwd")
        return f(a, b), (a, b)

    def bwd(saved, cotangents):
        log.append("bwd")
        (a, b), (c, d) = saved, cotangents
        return c * b + d, c * a + d if mixing else c * a

    f.defvjp(fwd, bwd)
    return f, log


@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@pytest.mark.each_commit(2)
def test_rules_that_call_their_function_run_once(kind, mixing):
    a, b = jnp.asarray(1.5, float), jnp.arange(3.0)

    def total(v, wrap=lambda f: f):
        def sums(f):
            run = wrap(lambda a, b: v(f, (None, 0), (0, 0))(a, b))
            return lambda a, b: sum(map(jnp.sum, run(a, b)))

        return sums

    def runs_and_result(make):
        f, log = counted(kind, mixing)
        return make(f)(a, b), len(log)

    gradient = lambda sums: lambda f: jax.grad(sums(f), (0, 1))
    one_by_one = lambda f: lambda a, b: sum(sum(f(a, x)) for x in b)
    expected = jax.jit(jax.grad(one_by_one(counted(kind, mixing)[0]), (0, 1)))(a, b)
    # JAX 0.12 refuses outputs that all lanes share; what runs is the same if there are none.
    mapped = lambda f: jax.grad(lambda b: jax.vmap(f)(b, b)[0].sum())
    f, log = counted(kind, mixing)
    jax.make_jaxpr(mapped(f))(b)
    of_jax = len(log)
    for make in (
        gradient(total(bx.vmap)),
        gradient(total(bx.vmap, jax.jit)),
        lambda f: jax.jit(gradient(total(bx.vmap))(f)),
    ):
        got, runs = runs_and_result(make)
        same(got, expected)
        assert runs == of_jax
    shared = lambda v: lambda f: v(f, (None, 0), (0, None))
    got, runs = runs_and_result(shared(bx.vmap))
    same(got, runs_and_result(shared(jax.vmap))[0])
    assert runs == 0  # undifferentiated
    assert runs_and_result(lambda f: jax.jit(bx.vmap(f, (None, 0))))[1] <= of_jax
    if kind == "jvp":
        twice = lambda sums: jax.jit(jax.hessian(sums, (0, 1)))
        got, runs = runs_and_result(lambda f: twice(total(bx.vmap, jax.jit)(f)))
        same(got, twice(one_by_one(counted(kind, mixing)[0]))(a, b))
        assert runs <= 2


def endless(kind, calls):
    """A function whose rule calls another, whose rule calls a third: each has one more output.

    A constant is first, whose second derivative is not 0. Returns it, and the log of its rules.
    """
    log = []

    def f(order, x):
        outputs = lambda x: (jnp.ones(order + 1), x * 2)

        def following(x):
            log.append(order)
            return sum(f(order + 1 + i, x)[1] for i in range(calls))

        if kind == "jvp":
            g = jax.custom_jvp(outputs)

            @g.defjvp
            def rule(primals, tangents):
                (x,), (t,) = primals, tangents
                mixed = x.sum() * t.sum() if order == 1 else t.sum() * 0
                constant = f(order + 1, x)[0][:-1]
                return (constant, x * 2), (constant * mixed, following(x) * t)

            return g(x)
        g = jax.custom_vjp(outputs)

        def bwd(residuals, cotangents):
            x, y = residuals
            of_constant = x.sum() * cotangents[0].sum() if order == 1 else 0
            return (y * cotangents[1] + of_constant,)

        g.defvjp(lambda x: ((f(order + 1, x)[0][:-1], x * 2), (x, following(x))), bwd)
        return g(x)

    return functools.partial(f, 0), log


@pytest.mark.parametrize(("kind", "calls"), [("jvp", 1), ("jvp", 2), ("vjp", 1)])
def test_rules_that_call_others_without_end(kind, calls):
    def total(batched, times):
        f, log = endless(kind, calls)
        run = jax.jit(lambda x: sum(map(jnp.sum, batched(f)(x))))
        for _ in range(times):
            run = jax.grad(lambda x, run=run: run(x).sum())
        return run, log

    each = lambda f: lambda x: tuple(map(jnp.stack, zip(*map(f, x), strict=True)))
    for times in range(3):
        run, log = total(bx.vmap, times)
        same(run(X), total(each, times)[0](X))
        # Each rule calls `calls` others, and one for the constant, up to the third order.
        most = sum((calls + 1) ** order for order in range(3))
        assert len(log) == most if times == 0 else len(log) <= 3 * most


def test_a_reverse_rule_in_a_loop_is_traced_once():
    # Where the loop finds which of its carry is batched, its body is batched several times.
    f, log = counted("vjp", mixing=True)

    def loop(a, b):
        step = lambda carry, _: ((f(a, carry[1])[0], carry[0] + b), None)
        return lax.scan(step, (0.0, 0.0), None, 3)[0]

    a, b = jnp.asarray(1.5, float), jnp.arange(3.0)
    jax.make_jaxpr(bx.vmap(loop, (None, 0)))(a, b)
    # JAX's next one is an object, of which each trace makes another.
    assert log == ["fwd", "bwd"] * (1 + ("vjp" in NEXT))
    total = lambda vmap: lambda a: vmap(loop, (None, 0))(a, b)[0].sum()
    one_by_one = lambda a: sum(loop(a, each)[0] for each in b)
    same(*at_once(jax.grad(total(bx.vmap)), jax.grad(one_by_one))(a))


def test_an_error_of_a_rule_is_told_when_it_is_needed():
    @jax.custom_vjp
    def f(x, w):
        return x * w, w

    def bwd(saved, cotangents):
        raise ZeroDivisionError("told")

    f.defvjp(lambda x, w: (f(x, w), None), bwd)
    for wrap in (lambda g: g, jax.jit):
        run = wrap(bx.vmap(f, (0, None), (0, None)))
        same(run(X, W), (X * W, W))
        with pytest.raises(ZeroDivisionError, match="told"):
            jax.grad(lambda x, run=run: run(x, W)[0].sum())(X)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@pytest.mark.parametrize("where", ["rule only", "both"])
def test_rules_that_close_over_values_of_the_example(kind, where):
    def per_example(x, p):
        y = jnp.sin(p) + 1

        if kind == "jvp":

            @jax.custom_jvp
            def g(z):
                return z * y if where == "both" else z * 2

            g.defjvp(lambda primals, tangents: (g(*primals), tangents[0] * y * 3))
        else:

            @jax.custom_vjp
            def g(z):
                return z * y if where == "both" else z * 2

            g.defvjp(lambda z: (g(z), z * y), lambda r, c: (c * (r + y),))
        return g(x).sum()

    if kind in NEXT and where == "both" and OLDEST:
        for vmap in (jax.vmap, bx.vmap):
            with pytest.raises(jax.errors.UnexpectedTracerError, match="closed over"):
                vmap(per_example)(X, X)
        return
    gradient, v = jax.grad(per_example), bx.vmap(per_example)
    of_nested = lambda outer: lambda x, p: outer(v)(x[None], p[None])
    functions = [v]
    # jax.vmap itself refuses a reverse rule that closes over values of its example.
    functions += map(of_nested, (bx.vmap, jax.vmap)[: 2 if kind == "jvp" else 1])
    ways = [lambda x, p, f=f: jax.grad(lambda x: f(x, p).sum())(x) for f in functions]
    ways += [bx.vmap(gradient), loop_function(gradient, (0, 0), 0)]
    *results, expected = at_once(*ways)(X, X + 1)
    for got in results:
        same(got, expected)
    if kind == "jvp":
        same(ways[0](X, X + 1), expected)
    shared = bx.vmap(per_example, (0, None))
    of_shared = lambda x, p: jax.grad(lambda x: shared(x, p).sum())(x)
    agree(of_shared, loop_function(gradient, (0, None), 0), X, W)


def test_optimize_remat():
    @jax.custom_vjp
    def f(x, w):
        return jnp.sin(x) * w

    f.defvjp(
        lambda x, w: (f(x, w), (jnp.cos(x), x, w)),
        lambda r, c: (3 * c * r[0] * r[2], c * jnp.sin(r[1])),
        optimize_remat=True,
    )
    in_axes = (0, None)
    agree(bx.vmap(f, in_axes), jax.vmap(f, in_axes), X, W)
    total = lambda v, wrap: lambda x, w: wrap(v(f, in_axes))(x, w).sum()
    for wrap in (lambda h: h, jax.jit, jax.checkpoint):
        ours, jaxs = (total(bx.vmap, wrap), total(jax.vmap, lambda h: h))
        agree(jax.grad(ours, (0, 1)), jax.grad(jaxs, (0, 1)), X, W)
    per_example = jax.grad(lambda x, w: jax.checkpoint(f)(x, w).sum(), (0, 1))
    agree(bx.vmap(per_example, in_axes), jax.vmap(per_example, in_axes), X, W)


def test_a_rule_alone_uses_the_name_of_the_axis():
    """Nothing in the program shows it, and the operand is the same in all lanes."""

    @jax.custom_jvp
    def forward(x):
        return x * lax.axis_size("i")

    @forward.defjvp
    def _(primals, tangents):
        tangent = tangents[0] * (lax.psum(2.0, "i") + lax.axis_index("i"))
        return forward(*primals), tangent * lax.axis_size("j")

    @jax.custom_vjp
    def reverse(x):
        return x * lax.axis_size("i")

    reverse.defvjp(
        lambda x: (reverse(x), lax.psum(x, "i")),
        lambda r, c: ((lax.axis_index("i") + lax.axis_index("j")) * r * c,),
    )
    wraps = [
        lambda f: f,
        lambda f: lambda x: eval_jaxpr(jax.make_jaxpr(f)(x).jaxpr, [], x)[0],
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: lax.cond(x > 0, f, jnp.sin, x),
        lambda f: lambda x: lax.scan(lambda c, _: (f(c) / 4, None), x, None, length=1)[0],
    ]
    scale = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.25])
    of_lanes = np.arange(1.0, 5.0)

    def total(x, f, **options):
        inner = bx.vmap(lambda _, x: f(x), (0, None), axis_name="j")
        outer = bx.vmap(lambda w, x: w * inner(jnp.ones(3), x), (0, None), axis_name="i", **options)
        return outer(jnp.asarray(of_lanes), x).sum()

    def gradients(x):
        return [
            [jax.grad(total)(x, wrap(f), **options) for wrap in wraps]
            for f in (forward, reverse)
            for options in ({}, {"batch_size": 4})
        ]

    of_forward = sum(w * 3 * (8 + i) * 3 for i, w in enumerate(of_lanes))
    of_reverse = sum(w * (i + j) * 4 * 2.0 for i, w in enumerate(of_lanes) for j in range(3))
    expected = [of_forward * scale] * 2 + [of_reverse * scale] * 2
    for got, known in zip(jax.jit(gradients)(2.0), expected, strict=True):
        np.testing.assert_allclose(got, known, rtol=1e-5)


def test_rules_that_wait_hold_no_values():
    f, g = tripled_jvp(), scaled_product()
    traced = []

    def total(x, w):
        traced.extend((weakref.ref(x), weakref.ref(w)))
        return (bx.vmap(f, (0, None))(x, w) + bx.vmap(g, (0, None, None))(x, w, w)[0]).sum()

    jaxpr = jax.make_jaxpr(total)(X, W)  # holds the rules, which have not run
    gc.collect()
    assert [ref() for ref in traced] == [None, None]
    agree(jax.grad(lambda *a: jaxpr_as_fun(jaxpr)(*a)[0]), jax.grad(total), X, W)


@pytest.mark.parametrize(
    ("ways", "refuses"),
    [
        ([jax.vmap, bx.vmap], True),
        ([bx.vmap, jax.vmap, bx.vmap], True),
        ([bx.vmap, bx.vmap], False),
    ],
    ids=["after jax.vmap", "before jax.vmap", "by other arguments"],  # at which jax.vmap fails
)
def test_a_jitted_function_is_traced_again(ways, refuses):
    # JAX remembers traces of a forward rule, and describes residuals of the latest one alone.
    @jax.custom_vjp
    def scaled(x, y):
        return jnp.sin(x) * y, y**2

    def forward(x, y):
        if refuses and y.perturbed:
            raise ValueError("y is a constant")
        residuals = (x.value, y.value) if y.perturbed else (jnp.cos(x.value) * y.value,)
        return (jnp.sin(x.value) * y.value, y.value**2), residuals

    def reverse(residuals, cotangents):
        ct, of_square = cotangents
        if len(residuals) == 1:
            return ct * residuals[0], None
        x, y = residuals
        return ct * jnp.cos(x) * y, ct * jnp.sin(x) + of_square * 2 * y

    scaled.defvjp(forward, reverse, symbolic_zeros=True)
    jitted = jax.jit(scaled)

    def gradient(vmap, argnums, size):
        loss = lambda x, y: sum(jnp.sum(out) for out in vmap(jitted, in_axes=(0, None))(x, y))
        x = jnp.linspace(0.1, 1, size)
        got = jax.jit(jax.grad(loss, argnums))(x, 2.0)
        want = jnp.cos(x) * 2, jnp.sin(x).sum() + size * 4.0
        np.testing.assert_allclose(got, want[argnums], rtol=1e-5)

    for vmap, size in itertools.product(ways, (3, 2)):
        for argnums in [0] if refuses else [0, 1, 0]:
            gradient(vmap, argnums, size)


def test_a_shared_output_with_the_next_derivatives(next_derivatives):
    # The cotangent of an output that all lanes share is counted once, however rules are given.
    product_and_square = lambda: jax.custom_vjp(lambda x, y: (x * y, y**2))
    cotangents = lambda r, c: (3 * c[0] * r[1], c[0] * r[0] + c[1] * 2 * r[1])

    def accumulate(r, c, *accumulators):
        for accumulator, cotangent in zip(accumulators, cotangents(r, c), strict=True):
            accumulator.accum(cotangent)

    forward = lambda x, y: ((x * y, y**2), (x, y))
    plain = product_and_square()
    plain.defvjp(forward, cotangents)
    functions = {"plain": plain}
    if not OLDEST:
        logs, accumulators, again, generic = (product_and_square() for _ in range(4))
        logs.defvjp_with_logs(forward, lambda r, c: (cotangents(r, c), {"x": r[0]}))
        accumulators.defvjp_with_accums(forward, accumulate)
        again.defremat(forward, lambda r, x, y: forward(x, y), cotangents)
        generic.defvjp(forward, cotangents, generic_batching=True)
        functions |= {
            "logs": logs,
            "accumulators": accumulators,
            "again": again,
            "generic": generic,
        }

    def gradients(f):
        def loss(x, y, **options):
            product, square = bx.vmap(f, (0, None), (0, None), **options)(x, y)
            return product.sum() + square

        x, of_both = jnp.arange(3.0), functools.partial(jax.grad, argnums=(0, 1))
        of_one = lambda x, y: of_both(lambda *args: sum(f(*args)))(x, y)
        chunks = functools.partial(loss, batch_size=2)
        return of_both(loss)(x, 2.0), of_both(chunks)(x, 2.0), bx.vmap(of_one, (0, None))(x, 2.0)

    x = jnp.arange(3.0)
    whole = jnp.full_like(x, 6), x.sum() + 4
    expected = whole, whole, (jnp.full_like(x, 6), x + 4)
    results = jax.jit(lambda: {name: gradients(f) for name, f in functions.items()})()
    for name, got in results.items():
        same(got, expected, where=name)


def test_a_closed_over_value_with_the_next_derivatives(next_derivatives):
    def per_example(x, y):
        scale = jnp.sin(y)
        f = jax.custom_vjp(lambda x: x * scale)
        f.defvjp(lambda x: (f(x), None), lambda _, c: (5 * c,))
        return f(x)

    x = jnp.arange(3.0)
    if OLDEST:
        with pytest.raises(jax.errors.UnexpectedTracerError, match="closed over"):
            jax.vmap(per_example)(x, x)
        return
    total = lambda x, y: bx.vmap(per_example)(x, y).sum()
    same(jax.grad(total)(x, x), jnp.full_like(x, 5))
    for run in (total, jax.jit(total)):
        with pytest.raises(Exception, match="closed-over value"):
            jax.grad(run, 1)(x, x)
