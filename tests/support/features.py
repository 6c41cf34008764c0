"""A small call of each feature, written again at each call: nothing is staged or known before."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import sparse

import batchax as bx

from support.new_primitive import new_primitive

X = jnp.linspace(0.1, 2.0, 7)
V = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
W = jnp.linspace(0.5, 1.5, 3)


def rows():
    """Rows of lengths that are known."""
    return bx.Ragged(jnp.linspace(0.1, 1.0, 9), np.array([3, 1, 5], np.int32), 6)


def newton(x):
    """A loop that takes another number of steps in each lane."""
    return lax.while_loop(lambda y: y * y > 1.01 * x, lambda y: y - 0.5 * (y - x / y), x + 1.0)


def damped(x):
    """A loop of so many steps that there are derivatives of all kinds."""
    return lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) + i, x)


def expensive(x):
    """A branch that is worth running for those lanes only that take it."""
    matmul = lambda x: lax.fori_loop(0, 4, lambda i, m: jnp.sin(m @ m), jnp.full((6, 6), x)).sum()
    return lax.cond(x > 1.0, matmul, jnp.sin, x)


def with_jvp():
    """A function whose derivative rule divides by the norm of its operand."""

    @jax.custom_jvp
    def unit(x):
        return x / jnp.sqrt(x @ x)

    @unit.defjvp
    def rule(primals, tangents):
        (x,), (t,) = primals, tangents
        y = unit(x)
        return y, (t - y * (y @ t)) / jnp.sqrt(x @ x)

    return unit


def with_vjp():
    """A function with a reverse rule of its own."""

    @jax.custom_vjp
    def half(x):
        return jnp.tanh(x) / 2

    half.defvjp(lambda x: (half(x), x), lambda x, ct: (ct * (1 - jnp.tanh(x) ** 2) / 2,))
    return half


def by_rule():
    """A function with a batching rule."""

    @bx.custom_vmap
    def weighted(x, w):
        return jnp.sin(x @ w)

    @weighted.def_vmap
    def rule(axis_size, in_batched, x, w):
        if in_batched[1]:
            return jnp.sin(jnp.einsum("bi,bi->b", jnp.broadcast_to(x, w.shape), w)), True
        return jnp.sin(x @ w), True

    return weighted


def doubled_by_rule():
    f = bx.custom_vmap(lambda x: 2 * x)
    f.def_vmap(lambda axis_size, in_batched, x: (2 * x, in_batched[0]))
    return f


def of_new_primitive():
    """A function of a primitive with a rule registered for it."""
    p = new_primitive("doubled", lambda x: x * 2)
    bx.register_rule(p)(lambda axis, args, axes: (p.bind(args[0]), axes[0]))
    return p.bind


def in_chunks(**options):
    """Derivatives of both modes, and a second derivative, three lanes at a time."""

    def run():
        of_one = lambda x, w: jnp.tanh(x * w).sum() * damped(x)
        f = bx.vmap(of_one, (0, None), batch_size=3, **options)
        loss = lambda x, w: f(x, w).sum()
        value, pull = jax.vjp(f, X, W)
        rest = () if options else (jax.jvp(f, (X, W), (X, W)), jax.hessian(loss, 1)(X, W))
        return value, pull(value), rest

    return run


def on_rows(fun, **options):
    """A function of rows, and its gradient."""

    def run():
        f = bx.vmap(fun, **options)
        total = lambda data, lengths: jnp.sum(f(bx.Ragged(data, lengths, 6)))
        whole = rows()
        return f(whole), jax.value_and_grad(total)(whole.data, jnp.asarray(whole.lengths))

    return run


class Box:
    """A batch of arrays that is no pytree."""

    def __init__(self, data):
        self.data = data


bx.register_container(
    Box,
    to_arrays=lambda box, axis: ([box.data], [axis]),
    to_example=lambda box, axis, arrays: Box(*arrays),
    from_example=lambda box, axis: [box.data],
    to_batch=lambda box, axis, arrays: Box(*arrays),
)


def in_boxes():
    return bx.vmap(lambda box: Box(jnp.sin(box.data)))(Box(V)).data


def bounded():
    step = lambda c: (c[0] + 1, c[1] * 1.2)
    f = lambda x: bx.bounded_while(lambda c: c[1] < 3.0, step, (0, x), 16)[1]
    return bx.vmap(f)(X), jax.grad(lambda x: bx.vmap(f, batch_size=3)(x).sum())(X)


def collectives():
    lane = lambda x: lax.axis_index("i").astype(x.dtype)
    f = lambda x: x / lax.psum(x, "i") + lax.pmax(jnp.sin(x), "i") * lane(x)
    whole = bx.vmap(f, axis_name="i")
    chunks = bx.vmap(f, axis_name="i", batch_size=3)
    return whole(X), chunks(X), jax.grad(lambda x: (whole(x) ** 2).sum())(X)


def shards():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(V, jax.NamedSharding(mesh, jax.P("a")))
    f = bx.vmap(lambda v: jnp.tanh(v).sum() / lax.psum(v, "i").sum(), axis_name="i", batch_size=1)
    return f(x), jax.grad(lambda x: f(x).sum())(x)


def explained():
    f = lambda x, w: (newton(x), expensive(x), jnp.tanh(x * w))
    plain = bx.explain(f, (0, None))(X, W)
    chunks = bx.explain(f, (0, None), compile=False, batch_size=3)(X, W)
    ragged = bx.explain(lambda r: jnp.cumsum(r) / r.sum(), compile=False)(rows())
    return [np.array([len(e.equations), len(str(e))]) for e in (plain, chunks, ragged)]


def own_derivative():
    @bx.custom_vmap
    def cube(x):
        return x**3

    cube.def_vmap(lambda axis_size, in_batched, x: (x**3, in_batched[0]))
    cube.def_vjp(lambda x: (x**3, x), lambda x, ct: (3 * ct * x**2,))
    return jax.grad(lambda x: bx.vmap(cube)(x).sum())(X), jax.vmap(jax.grad(cube))(X)


def staged_program():
    program = jax.make_jaxpr(lambda x, w: jnp.sin(x) * w)(1.0, W)
    batched, _ = bx.batch_jaxpr(program, 7, (0, None))
    return jax.core.eval_jaxpr(batched.jaxpr, batched.consts, X, W)


def ranks():
    f = bx.auto_vmap("(n),(n)->()")(lambda x, w: jnp.sin(x @ w))
    return f(V, W), f(V[:, None], V), jax.grad(lambda w: f(V, w).sum())(W)


def many_calls():
    inner = jax.jit(lambda x: jnp.where(x > 1, jnp.sin(x), x))
    f = lambda x: jax.checkpoint(inner)(inner(x)) + lax.scan(lambda c, k: (c * k, c), x, W)[0]
    g = bx.vmap(f)
    return g(X), jax.grad(lambda x: g(x).sum())(X), bx.vmap(jax.vmap(f))(V), jax.vmap(bx.vmap(f))(V)


FEATURES = {
    "calls": many_calls,
    "loops and branches": lambda: bx.vmap(lambda x: (newton(x), expensive(x)))(X),
    "derivative rules": lambda: (
        bx.vmap(jax.grad(lambda v: with_jvp()(v).sum() * with_vjp()(v).sum()))(V),
        jax.grad(lambda v: bx.vmap(with_jvp())(v).sum() + bx.vmap(with_vjp())(v).sum())(V),
    ),
    "linear algebra": lambda: bx.vmap(jax.grad(lambda x: jnp.linalg.cholesky(
        jnp.eye(3, dtype=x.dtype) + x * jnp.ones((3, 3), x.dtype)).sum()))(X),
    "keys": lambda: bx.vmap(jax.random.normal)(jax.random.split(jax.random.key(0), 5)),
    "chunks": in_chunks(),
    "chunks, residuals kept": in_chunks(residuals="keep"),
    "chunks, as many as fit": lambda: bx.vmap(newton, batch_size="auto", memory_limit="1GiB")(X),
    "chunks, reduced": lambda: [
        jax.value_and_grad(bx.vmap(damped, batch_size=3, out_axes=bx.Reduce(kind)))(X)
        for kind in ("mean", "max")
    ],
    "collectives": collectives,
    "shards": shards,
    "compact loop": lambda: bx.vmap(newton, divergence=bx.Compact(width=2))(X),
    "compact branch": lambda: jax.value_and_grad(
        lambda x: bx.vmap(expensive, divergence=bx.Compact(width=2))(x).sum())(X),
    "rows, packed": on_rows(lambda r: jnp.sin(r).sum() * r.max()),
    "rows, padded": on_rows(lambda r: jnp.cumsum(r)[-1] * jnp.sort(r).std(), layout="padded"),
    "rows, derivative rule": on_rows(lambda r: (with_jvp()(r) * jnp.cos(r)).sum()),
    "rows, in buckets": lambda: bx.vmap(lambda r: jnp.tanh(r).sum(), buckets=2)(rows()),
    "rows out": lambda: bx.vmap(lambda r: r / r.sum())(rows()).data[:9],
    "custom_vmap": lambda: (
        bx.vmap(by_rule(), (0, None))(V, W),
        jax.grad(lambda v, w: bx.vmap(by_rule(), (0, None), batch_size=3)(v, w).sum(), 1)(V, W),
    ),
    "custom_vmap with a derivative": own_derivative,
    "sequential_vmap": lambda: jax.grad(lambda v: bx.vmap(
        bx.sequential_vmap(lambda x: jnp.sin(x).sum()))(v).sum())(V),
    "host_function": lambda: bx.vmap(bx.host_function(
        np.sum, jax.ShapeDtypeStruct((), jnp.float32)))(V),
    "register_rule": lambda: bx.vmap(of_new_primitive())(X),
    "bounded_while": bounded,
    "scan": lambda: jax.grad(lambda v: bx.scan(
        lambda c, x: (c * x, c + x), in_axes=1, out_axes=1)(v[:, 0] * 0 + 1, v)[1].sum())(V[:2]),
    "tiles": lambda: [
        bx.vmap(lambda b: b - b.mean(), spec, bx.tiles())(X)
        for spec in (bx.tiles(count=7), bx.tiles(3, last="short"))
    ],
    "keys and sizes": lambda: bx.vmap(
        lambda key, n, x: jax.random.normal(key, (n,), x.dtype).sum() * x,
        (bx.split_key, bx.size("n", 4), 0),
    )(jax.random.key(0), np.arange(7) % 5, X),
    "sparse matrices": lambda: bx.vmap(lambda m: m * 2.0)(
        sparse.BCOO.fromdense(V[None], n_batch=1, nse=12)).data,
    "containers": in_boxes,
    "auto_vmap": ranks,
    "batch_jaxpr": staged_program,
    "explain": explained,
    "same_program": lambda: np.array(bool(bx.same_program(
        lambda x: jax.vmap(jnp.sin)(x), lambda x: jnp.sin(x), X))),
    "check_rule": lambda: bx.check_rule(doubled_by_rule(), X[0]) or 0,
}  # fmt: skip
"""By name: a function of no arguments that returns arrays."""
