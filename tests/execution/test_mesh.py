"""`vmap(mesh=)`: lanes spread over devices give what they give on one."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx

from support.chunks import computed
from support.oracle import agree, at_once, example, same
from support.processes import python

W = example((5, 2), seed=1)
CLOSE = dict(rtol=1e-5, atol=1e-5)


def mesh_of(*sizes, names="ab"):
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, tuple(names[: len(sizes)]))


@bx.custom_vmap
def with_rule(x):
    return jnp.sin(x) * x.sum()


@with_rule.def_vmap
def _(info, batched, x):
    return jnp.sin(x) * x.sum(1, keepdims=True), True


def grows(x):
    return lax.while_loop(lambda c: (c**2).sum() < 50, lambda c: c * 1.3 + 0.1, x)


def normalised(x):
    centred = x - lax.pmean(x, "i")
    return centred / jnp.sqrt(lax.pmean(centred**2, "i") + 1e-3)


def meets_in_a_loop(x):
    def step(c):
        k, x = c
        return k + 1, normalised(x)

    return lax.while_loop(lambda c: c[0] < 3, step, (0, x))[1]


FUNCTIONS = {
    "elementwise": (lambda x: (jnp.tanh(x @ W), x.sum()), {}),
    "what lanes share": (lambda x: (x, 2 * W), {"out_axes": (1, None)}),
    "where it falls": (lambda x: (x, 2 * W), {"out_axes": bx.AUTO}),
    "gradient": (jax.grad(lambda x: (jnp.tanh(x @ W) ** 2).sum()), {}),
    "a solve": (lambda x: jnp.linalg.solve(jnp.outer(x, x) + jnp.eye(5), x), {}),
    "a rule": (with_rule, {}),
    "a loop": (grows, {}),
    "a compact loop": (grows, {"divergence": "compact"}),
    "a compact branch": (
        lambda x: lax.cond(x.sum() > 0, lambda x: jnp.cumsum(jnp.sort(x)), jnp.cos, x),
        {"divergence": "compact"},
    ),
    "statistics of all lanes": (normalised, {"axis_name": "i"}),
    "statistics of all lanes, in a loop": (meets_in_a_loop, {"axis_name": "i"}),
    "index and size": (lambda x: x * lax.axis_index("i") / lax.axis_size("i"), {"axis_name": "i"}),
    "what all lanes have": (lambda x: lax.all_gather(x, "i").sum(0), {"axis_name": "i"}),
    "extremes": (lambda x: lax.pmax(x, "i") - lax.pmin(x, "i"), {"axis_name": "i"}),
    "a neighbour": (lambda x: lax.ppermute(x, "i", [(0, 1), (1, 0)]), {"axis_name": "i"}),
}


@pytest.mark.parametrize(("lanes", "outside_jit"), [(8, None), (7, 1), (2, None)])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.each_commit(10, "what all lanes have-8-None")
def test_lanes_on_devices_compute_what_they_do_on_one(name, lanes, outside_jit):
    fun, options = FUNCTIONS[name]
    x = example((lanes, 5))
    on_devices = {
        str(batch_size): bx.vmap(fun, mesh="all", batch_size=batch_size, **options)
        for batch_size in (None, 1)
    }
    got = agree(on_devices, bx.vmap(fun, **options), np.asarray(x), tolerance=CLOSE)
    same(on_devices[str(outside_jit)](x), got, CLOSE)


@pytest.mark.parametrize(
    ("shared", "mapped", "lanes"),
    [(None, 1, 8), (0, None, 7), (1, 0, 7), (1, 1, 8)],
)
@pytest.mark.compiles(100)
@pytest.mark.each_commit(2)
def test_derivatives_of_what_is_on_one_device_by_wish(shared, mapped, lanes):
    put = lambda x, device: x if device is None else jax.device_put(x, jax.devices()[device])

    def with_shared_argument(w, x, **options):
        return bx.vmap(lambda w, x: jnp.sin(x @ w), (None, 0), bx.Reduce("sum"), **options)(w, x)

    with_held_value = lambda w, x, **options: bx.vmap(lambda x: jnp.sin(x @ w), **options)(x)
    given = W, example((lanes, 5))
    args = put(given[0], shared), put(given[1], mapped)
    for fun in (with_shared_argument, with_held_value):
        on_all = functools.partial(fun, mesh="all")
        gradient = lambda f, which: jax.grad(lambda w, x: (f(w, x) ** 2).sum(), which)
        expected = jax.jit(gradient(fun, (0, 1)))(*given)
        for which in (0, 1):
            same(jax.device_get(gradient(on_all, which)(*args)), expected[which], CLOSE)
        got = gradient(on_all, (0, 1))(*args)
        same(jax.device_get(got), expected, CLOSE)
        for x, g in zip(args, got, strict=True):
            assert not x.committed or g.devices() == x.devices()
        for mode in (lambda f, a: jax.jvp(f, a, a), lambda f, a: jax.jacfwd(f, (0, 1))(*a)):
            alone = jax.jit(functools.partial(mode, fun))(given)
            same(jax.device_get(mode(on_all, args)), alone, CLOSE)


@pytest.mark.parametrize("jit", [False, True])
def test_results_stay_where_they_are(jit):
    def on(lanes):
        batched = bx.vmap(lambda x: (jnp.sin(x), x.sum()), mesh="all")
        out, _ = (jax.jit(batched) if jit else batched)(example((lanes, 5)))
        return out.sharding

    shards = on(8)
    assert len(shards.device_set) == 4
    assert shards.shard_shape((8, 5)) == (2, 5)
    # An array on four devices has as many rows on each: what does not come out even is on all.
    assert on(7).shard_shape((7, 5)) == (7, 5)


@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.each_commit(1)
def test_a_sum_exchanges_nothing_for_its_cotangent(batch_size):
    def loss(w, x, **options):
        # Reduced over the batch twice: for the result, and for other lanes to go on with.
        one = lambda x: jnp.tanh(x @ w).sum()
        total = lambda x: one(x) * lax.psum(one(x), "i")
        reduced = bx.vmap(lambda x: (one(x), total(x)), 0, bx.Reduce("sum"), "i", **options)
        return sum(jax.tree.leaves(reduced(x)))

    x, options = example((8, 5)), {"mesh": "all", "batch_size": batch_size}
    on_devices = functools.partial(loss, **options)
    for derivative in (jax.grad, jax.hessian, lambda f: jax.jacrev(jax.grad(f))):
        agree(derivative(on_devices), derivative(loss), W, x, tolerance=CLOSE)
    of_several = lambda f: jax.vmap(jax.grad(f), (0, None))
    several = jnp.stack([W, 2 * W])
    got = agree(of_several(on_devices), of_several(loss), several, x, tolerance=CLOSE)
    same(of_several(on_devices)(several, x), got, CLOSE)

    mean = bx.vmap(lambda w, x: jnp.tanh(x @ w).sum(), (None, 0), bx.Reduce("mean"), **options)
    text = jax.jit(jax.value_and_grad(mean)).lower(W, x).compile().as_text()
    numbers = re.findall(r"= \(?(.*?)\)? all-reduce\(", text)
    assert sum(len(re.findall(r"f\d\d\[\]", line)) for line in numbers) == 1  # the mean


@pytest.mark.compiles(60)
def test_results_are_typed_as_arguments_are_where_no_mesh_is_set():
    mesh = jax.make_mesh((4,), ("d",))
    typed = jax.device_put(example((8, 5)), NamedSharding(mesh, P("d")))
    plain = np.asarray(typed)
    for given in (mesh, mesh_of(4, names="d"), "all"):
        batched = bx.vmap(lambda x: jnp.tanh(x @ W), mesh=given)
        for out in (batched(typed), jax.jit(batched)(typed)):
            assert jax.typeof(out + typed[:, :2]) == jax.typeof(typed[:, :2])
            same(jax.device_get(out), jnp.tanh(plain @ W), CLOSE)
        # JAX takes no such part of an array that is sharded by its type.
        same(batched(plain)[1:3], jnp.tanh(plain[1:3] @ W), CLOSE)
        got = jax.grad(lambda x, batched=batched: batched(x).sum())(typed)
        assert jax.typeof(got) == jax.typeof(typed)
        same(jax.device_get(got), jax.grad(lambda x: jnp.tanh(x @ W).sum())(plain), CLOSE)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_what_lanes_share_inside_jit_may_have_a_type_that_tells_of_the_mesh(axis_type):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    auto = axis_type is AxisType.Auto
    w = jax.device_put(W, NamedSharding(mesh, P(None, "b" if auto else None)))
    lanes, rows = np.ones((4, 5)), bx.Ragged.from_rows([np.ones((n, 5)) for n in (3, 1)])
    given = bx.vmap(lambda x, w: jnp.tanh(x @ w), (0, None), mesh=(mesh, "a"))
    summed = bx.vmap(lambda row, w: (row @ w).sum(0), (0, None), mesh=(mesh, "a"))
    got = jax.jit(lambda x, rows, w: (given(x, w), summed(rows, w)))(lanes, rows, w)
    expected = jnp.tanh(lanes @ W), jnp.stack([3 * W.sum(0), W.sum(0)])
    same(jax.device_get(got), expected, CLOSE)
    options = {"mesh": (mesh, "a"), "batch_size": 1}
    halved = lambda row, w: lax.fori_loop(0, 2, lambda _, y: y / 2, (row @ w).sum(0))
    got = bx.vmap(halved, (0, None), **options)(rows, w)  # outside of jit, too
    same(jax.device_get(got), expected[1] / 4, CLOSE)
    if auto:
        got = jax.jit(bx.vmap(lambda row: halved(row, w), **options))(rows)
        same(jax.device_get(got), expected[1] / 4, CLOSE)

    def closed(x, w):
        return bx.vmap(lambda x: jnp.cumsum(x @ w, 0).sum(), mesh=(mesh, "a"))(x)

    for x in (lanes, rows):
        with (
            contextlib.nullcontext()
            if auto
            else pytest.raises(
                bx.UnsupportedError, match="Pass it as an argument, with None in in_axes"
            )
        ):
            jax.eval_shape(jax.jit(closed), x, w)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.compiles(60)
def test_the_mesh_that_is_set_says_what_types_tell(axis_type):
    is_set = jax.make_mesh((2, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    other = {AxisType.Explicit: AxisType.Auto, AxisType.Auto: AxisType.Explicit}[axis_type]
    given = jax.make_mesh((2, 2), ("a", "b"), axis_types=(other,) * 2)
    x = np.asarray(example((8, 5)))
    function = lambda x, w: jnp.tanh(x @ w)
    with jax.set_mesh(is_set):
        for mesh in ("all", given, (given, "b"), is_set):
            batched = bx.vmap(function, (0, None), mesh=mesh)
            explicit = axis_type is AxisType.Explicit
            lanes = None if not explicit else "b" if isinstance(mesh, tuple) else ("a", "b")
            for out in (batched(x, W), jax.jit(batched)(x, W)):
                assert jax.typeof(out).sharding.spec == P(lanes, None)
                same(jax.device_get(out), jnp.tanh(x @ W), CLOSE)
            total = jax.grad(lambda w, batched=batched: batched(x, w).sum())
            expected = jax.grad(lambda w: jnp.tanh(x @ w).sum())(np.asarray(W))
            same(jax.device_get(total(W)), expected, CLOSE)
        for mesh in (mesh_of(4), mesh_of(2)):
            with pytest.raises(
                bx.UnsupportedError, match=r"jax\.set_mesh has set one of the axes 'a'"
            ):
                bx.vmap(jnp.sin, mesh=mesh)(x)
    with (
        jax.set_mesh(mesh_of(2)),
        pytest.raises(bx.UnsupportedError, match="mesh has the axis 'devices' of size 4"),
    ):
        bx.vmap(jnp.sin, mesh="all")(x)


WITHOUT_NUMBERS = [1, np.nan, 3, 2, -0.0, 0, -np.inf, np.inf]
WITH_TIES = [-0.0, 0, -3, 5, 5, -3, 4, 1]
EXCHANGED = {
    **{
        dtype: jnp.asarray([WITHOUT_NUMBERS, WITH_TIES], dtype).T
        for dtype in ("bfloat16", "float32", "float8_e4m3fn")
    },
    **{
        dtype: jnp.asarray([jnp.iinfo(dtype).min, 1, 0, 1, 1, jnp.iinfo(dtype).max, 0, 2], dtype)
        for dtype in ("int4", "uint8", "int32")
    },
    # NaN among complex numbers is lost on one device, too.
    "complex64": jnp.asarray([1 + 2j, 1 + 3j, 1 - 2j, 1, 0, -1, 1, 1 - 3j]),
    "bool": jnp.arange(8) == 5,
}


def test_what_devices_exchange_is_exact_for_all_numbers():
    groups = [[0, 7], [1, 2], [5, 4], [3, 6]]
    kinds = ("max", "min", "sum", "prod")

    def together(x, **options):
        def one(x):
            of_all = lax.pmax(x, "i"), lax.pmin(x, "i"), lax.psum(x, "i")
            return of_all, lax.pmin(x, "i", axis_index_groups=groups)

        reduced = tuple(map(bx.Reduce, kinds))
        same_for_all = bx.vmap(lambda x: (computed(x),) * len(kinds), out_axes=reduced, **options)
        return bx.vmap(one, axis_name="i", **options)(x), same_for_all(x)

    all_together = lambda xs, **options: {dtype: together(x, **options) for dtype, x in xs.items()}
    told_apart = lambda tree: jax.tree.map(lambda x: np.asarray(x).astype(complex), tree)
    on_one = functools.partial(all_together, batch_size=3)
    expected, in_chunks = at_once(all_together, on_one)(EXCHANGED)
    most, least, *_ = expected["float32"][1]
    np.testing.assert_array_equal([most, least], [[np.nan, 5], [np.nan, -3]])
    # Beside what is spread over devices the compiler spreads all else, too.
    on_devices = jax.jit(functools.partial(all_together, mesh="all"))(EXCHANGED)
    for got in (in_chunks, on_devices):
        assert jax.tree.map(jnp.dtype, got) == jax.tree.map(jnp.dtype, expected)
        jax.tree.map(np.testing.assert_array_equal, told_apart(got), told_apart(expected))
    # A batch that is spread over devices already.
    four = NamedSharding(mesh_of(4), P("a"))
    x = jax.device_put(EXCHANGED["float32"], four)
    same(bx.vmap(computed, out_axes=bx.Reduce("max"), batch_size=1)(x), most)


@pytest.mark.parametrize("set_mesh", [False, True])
def test_on_a_device_a_function_meets_no_mesh(set_mesh):
    """As some solvers do: it compares types of arrays, and computes with what it knows already."""

    def types(xs):
        return [x.sharding for x in jax.tree.leaves(jax.eval_shape(lambda: xs))]

    def known():
        with jax.ensure_compile_time_eval():
            return float(jnp.where(jnp.array(True) | jnp.array(False), 2.0, jnp.inf))

    @jax.custom_vjp
    def f(x, y):
        return known() * jnp.sin(x) * y

    forward = lambda x, y: (f(x.value, y.value), (x.value, y.value, jnp.zeros(())))

    def backward(residuals, cotangent):
        assert set(types((residuals, cotangent))) == {None}
        x, y, _ = residuals
        return known() * jnp.cos(x) * y * cotangent, known() * jnp.sin(x) * cotangent

    f.defvjp(forward, backward, symbolic_zeros=True)
    looped = lambda x: lax.scan(lambda y, _: (jax.jit(f)(x[0], y), None), x[1], None, length=2)[0]
    mesh = mesh_of(4)
    spread = functools.partial(bx.vmap, mesh=mesh)
    xs = example((6, 2))
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        got = at_once(
            spread(jax.value_and_grad(looped)), jax.grad(lambda xs: spread(looped)(xs).sum())
        )(xs)
    want = jax.vmap(jax.value_and_grad(looped))(xs)
    same(got, [want, want[1]], CLOSE)


def test_what_is_refused_by_name():
    mesh = mesh_of(2, 2)
    with pytest.raises(bx.AxisError, match=r"the mesh has the axes 'a', 'b'; .* over 'c'"):
        bx.vmap(jnp.sin, mesh=(mesh, "c"))
    with pytest.raises(bx.AxisError, match=r"the mesh has the axis 'devices'; .* over 'c'"):
        bx.vmap(jnp.sin, mesh=(jax.sharding.Mesh(jax.devices()[:1], ("devices",)), "c"))
    with pytest.raises(bx.AxisError, match="spread over array"):
        bx.vmap(jnp.sin, mesh=(mesh, np.array(["a", "b"])))
    with pytest.raises(bx.AxisError, match="each once"):
        bx.vmap(jnp.sin, mesh=(mesh, ("a", "a")))
    with pytest.raises(bx.ArgumentTypeError, match="got 4 of type int"):
        bx.vmap(jnp.sin, mesh=4)
    with pytest.raises(bx.ArgumentTypeError, match="spmd_axis_name both"):
        bx.vmap(jnp.sin, mesh="all", spmd_axis_name="a")
    w = jax.device_put(W, NamedSharding(mesh, P(None, "a")))
    with pytest.raises(bx.AxisError, match=r"w.*: axis 2 is sharded over 'a'"):
        bx.vmap(lambda x, w: x @ w, mesh=(mesh, "a"))(
            example((4, 5)),
            jax.device_put(example((4, 5, 2)), NamedSharding(mesh, P(None, None, "a"))),
        )
    with pytest.raises(bx.AxisError, match="closes over: axis 1 is sharded over 'a'"):
        bx.vmap(lambda x: x @ w, mesh=(mesh, "a"))(example((4, 5)))
    four = Mesh(np.array(jax.devices()), ("a",))
    inner = bx.vmap(jnp.sin, mesh="all")
    with pytest.raises(bx.UnsupportedError, match=r"inside a jax\.shard_map over 'a'"):
        jax.shard_map(inner, mesh=four, in_specs=P("a"), out_specs=P("a"))(example((8, 5)))
    with pytest.raises(bx.UnsupportedError, match="or another vmap with mesh"):
        bx.vmap(inner, mesh="all")(example((4, 5)))


@pytest.mark.parametrize(
    ("calls", "rows"),
    [
        (lambda x: jax.pure_callback(np.sin, x, x, vmap_method="sequential"), False),
        (lambda x: jax.pure_callback(np.sin, x, x, vmap_method="sequential"), True),
        (lambda x: lax.fori_loop(0, 2, lambda i, x: [x, jax.debug.callback(str, x)][0], x), False),
        (lambda x: io_callback(np.sin, x, x), False),
    ],
    ids=["pure", "pure, rows", "debug, in a loop", "io"],
)
def test_callbacks_need_all_axes_of_the_mesh(calls, rows):
    x = example((4, 5))
    x = bx.Ragged(x, np.array([1, 2, 0, 1]), 2) if rows else x
    batched = lambda mesh: jax.jit(bx.vmap(lambda x: calls(x.sum()), mesh=mesh))(x)
    with pytest.raises(bx.UnsupportedError, match=r"test_mesh.py:\d+.*mesh axis 'a' to the comp"):
        batched((mesh_of(2, 2), "b"))
    assert batched(mesh_of(2, 2)).shape == (4,)


COMPLEX_CONSTANTS = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import batchax as bx

jax.config.update("jax_enable_compilation_cache", False)
xs = jnp.ones((4, 3), "complex64")
rows, zeros = bx.Ragged(xs, np.array([3, 1]), 3), jnp.zeros_like(xs)
pull = lambda f, x, zeros: jax.vjp(f, x)[1](zeros)
no = lambda x: (x.real.astype(int) & 0).astype(x.dtype)
{}
"""


@pytest.mark.parametrize(
    "call",
    [
        'pull(lambda w: bx.vmap(lambda x, w: w, (0, None), 0, mesh="all")(xs, w), xs[0], zeros)',
        'pull(lambda w: bx.vmap(lambda x: w, 0, 0, mesh="all")(xs), xs[0], zeros)',
        'pull(lambda w: bx.vmap(lambda x: w, 0, 0, mesh="all")(rows), xs[0], zeros[:2])',
        'bx.vmap(no, 0, bx.Reduce("sum"), mesh="all")(xs)',
        'pull(bx.vmap(lambda x: lax.all_gather(x, "i"), axis_name="i", mesh="all", batch_size=1), '
        "xs, jnp.zeros((4, 4, 3), xs.dtype))",
    ],
    ids=["shared argument", "closed over", "closed over, rows", "sum", "gathered"],
)
def test_sums_over_devices_of_complex_constants_compile(call):
    # XLA for CPUs ends the process where it compiles one, so each runs in a process of its own.
    program = COMPLEX_CONSTANTS.format(f"jax.jit(lambda xs: {call})(xs)")
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
