"""What a rule does is done once; rules in control flow, and with closures."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import batchax as bx

from support.operations import equations
from support.oracle import agree, example, same
from support.user_rules import with_identity_rule

VMAPS = pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap], ids=["bx", "jax"])
SHARED = (None, 0)
XS, W = example((4, 3), seed=1), example((3, 3), seed=2) / 3 + 2 * jnp.eye(3)


def loop(w, x):
    return lax.scan(lambda h, _: (jnp.tanh(w @ h) + x, None), x, length=5)[0]


def total(f):
    return lambda w, x: jnp.sum(f(w, x) ** 2)


def two_pullbacks(f):
    def run(w, x):
        y, pull = jax.vjp(f, w, x)
        return y, pull(y), pull(2 * y)

    return run


DERIVATIVES = {
    "value and gradient": lambda f: jax.value_and_grad(total(f), 1),
    "by what is shared": lambda f: jax.value_and_grad(total(f), 0),
    "by both": lambda f: jax.value_and_grad(total(f), (0, 1)),
    "tangents": lambda f: lambda w, x: jax.jvp(lambda x: f(w, x), (x,), (2 * x,)),
    "tangents by both": lambda f: lambda w, x: jax.jvp(f, (w, x), (2 * w, x)),
    "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
    "jacrev": lambda f: jax.jacrev(f, (0, 1)),
    "two pullbacks": two_pullbacks,
    "two directions": lambda f: lambda w, x: (f(w, x), jax.jacrev(f, 1)(w, x)),
    "pullback of pullback": lambda f: (
        lambda w, x: jax.grad(lambda x: jnp.sum(jax.grad(total(f))(w, x) ** 2))(x)
    ),
    "hessian": lambda f: jax.hessian(total(f), (0, 1)),
}


@VMAPS
@pytest.mark.parametrize("which", DERIVATIVES)
@pytest.mark.each_commit(7)
def test_a_loop_and_its_derivative(vmap, which):
    derivative = DERIVATIVES[which]
    ours, plain = (vmap(derivative(f), SHARED) for f in (with_identity_rule(loop), loop))
    # NumPy and XLA round each step in its own way.
    wide = dict.fromkeys(("rtol", "atol"), 1000 * jnp.finfo(W.dtype).eps)
    agree(ours, plain, W, XS, tolerance=wide if which == "hessian" else None)


def solved(w, x):
    return jnp.linalg.solve(w, x)


class Solver:
    """A linear solve whose rule factors a shared matrix once, and tells what it was given."""

    def __init__(self, smallest=1):
        self.seen = []
        self.function = bx.custom_vmap(solved)

        @self.function.def_vmap
        def rule(axis_size, in_batched, w, x):
            if axis_size < smallest:
                raise ValueError("too few lanes")
            self.seen.append((axis_size, tuple(in_batched)))
            if not in_batched[0]:
                return jnp.linalg.solve(w, x.T).T, True
            return jax.vmap(solved, [0 if b else None for b in in_batched])(w, x), True


LARGE, SIDES = example((24, 24), seed=3) + 9 * jnp.eye(24), example((40, 24), seed=4)
BY_SHARED = {
    "gradient": lambda f: jax.grad(total(f)),
    "by both": lambda f: jax.value_and_grad(total(f), (0, 1)),
    "tangents": lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (jnp.outer(x, x),)),
    "jit of gradient": lambda f: jax.jit(jax.grad(total(f))),
}


def factored(run, *args):
    """The shapes of what is factored."""
    lus = (eqn for eqn in equations(run, *args) if eqn.primitive.name == "lu")
    return [shape for eqn in lus if len(shape := eqn.invars[0].aval.shape) > 2]


@VMAPS
@pytest.mark.parametrize("which", BY_SHARED)
@pytest.mark.each_commit(4)
def test_a_shared_matrix_is_factored_once(vmap, which):
    solver = Solver()
    ours, plain = (vmap(BY_SHARED[which](f), SHARED) for f in (solver.function, solved))
    agree(ours, plain, LARGE, SIDES, tolerance={"rtol": 1e-3, "atol": 1e-3})
    assert not any(batched for _, (batched, _) in solver.seen)
    assert factored(ours, LARGE, SIDES) == []


@VMAPS
def test_a_rule_that_cannot_run_for_one_lane_runs_for_all(vmap):
    solver = Solver(smallest=2)
    ours, plain = (vmap(jax.grad(total(f)), SHARED) for f in (solver.function, solved))
    agree(ours, plain, LARGE, SIDES, tolerance={"rtol": 1e-3, "atol": 1e-3})
    assert (40, (True, True)) in solver.seen


def test_a_rule_runs_for_the_value_and_for_the_derivative(capfd):
    f = bx.custom_vmap(lambda w, x: w * x)

    @f.def_vmap
    def rule(axis_size, in_batched, w, x):
        jax.debug.print("{} lanes", axis_size)
        return w * x, True

    for derivative in (jax.value_and_grad(f, 1), lambda w, x: jax.jvp(f, (w, x), (w, x))):
        jax.block_until_ready(jax.jit(bx.vmap(derivative, SHARED))(2.0, jnp.arange(3.0)))
        jax.effects_barrier()
        assert capfd.readouterr().out == 2 * "3 lanes\n"


@VMAPS
def test_a_rule_that_closes_over_what_is_differentiated(vmap):
    def run(custom, vmap):
        def of_closed(m, w, xs):
            function = solved_from(m)
            if custom:
                function = bx.custom_vmap(function)

                @function.def_vmap
                def rule(axis_size, in_batched, w, x):
                    flags.append(in_batched)
                    return solved_from(m)(w, x.T).T if not in_batched[0] else None, True

            each = vmap(jax.grad(total(function)), SHARED)
            return jnp.sum(jnp.sin(each(w, xs)))

        return jax.grad(of_closed)

    flags = []
    ours, plain = run(True, vmap), run(False, jax.vmap)
    agree(ours, plain, LARGE, LARGE, SIDES, tolerance={"rtol": 1e-3, "atol": 1e-3})
    assert flags


def solved_from(m):
    return lambda w, x: jnp.linalg.solve(w, m @ x)


def test_a_rule_left_over_from_a_trace_that_is_over_breaks_nothing_but_batches():
    @bx.custom_vmap
    def f(x):
        return jnp.sin(x)

    @jax.jit
    def leave_a_rule(w):
        f.def_vmap(lambda n, b, x: (jnp.sin(x) * w, True))
        return w

    leave_a_rule(1.0)
    for transform in (jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))):
        same(transform(f)(0.5), transform(jnp.sin)(0.5))
    with pytest.raises(bx.UnsupportedError, match="of a transformation that is over"):
        bx.vmap(f)(jnp.ones(3))
    with pytest.raises(bx.UnsupportedError, match="of a transformation that is over"):
        jax.jit(jax.vmap(f))(jnp.ones(3))


@bx.custom_vmap
def double_up(x):
    return 2.0 ** jnp.ceil(jnp.log2(100 / x)) * x


@double_up.def_vmap
def _(axis_size, in_batched, x):  # never ends for a lane that is not positive
    return lax.while_loop(
        lambda x: (x < 100).any(), lambda x: jnp.where(x < 100, 2 * x, x), x
    ), True


@bx.custom_vmap
def log(x):
    return jnp.log(x)


@log.def_vmap
def _(axis_size, in_batched, x):
    return jnp.log(x), True


def where_positive(fun):
    return lambda x: lax.cond(x > 0, fun, lambda x: x, x)


def test_a_rule_that_does_not_end_for_lanes_that_do_not_call_it():
    f = where_positive(double_up)
    same(bx.vmap(f)(jnp.array([3.0, 7.0, -1.0])), jnp.array([192.0, 112.0, -1.0]))
    same(bx.vmap(f)(-jnp.ones(3)), -jnp.ones(3))
    same(bx.vmap(bx.vmap(f))(jnp.array([[3.0, -1.0]])), jnp.array([[192.0, -1.0]]))


def test_nothing_leaks_from_lanes_that_do_not_call_it():
    xs = jnp.array([3.0, 0.0, -1.0])
    want = jnp.array([1 / 3, 1.0, 1.0])
    f = where_positive(log)
    same(bx.vmap(f)(xs), jnp.array([jnp.log(3.0), 0.0, -1.0]))
    same(bx.vmap(jax.grad(f))(xs), want)
    same(jax.grad(lambda x: bx.vmap(f)(x).sum())(xs), want)
