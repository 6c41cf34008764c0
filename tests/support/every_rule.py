"""A per-example program for each primitive that batchax has a rule for.

Programs are listed by the module that has the rule, and that is said here by hand: it is what
`explain` is to say. A primitive that a version of JAX does not have is left out there.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify, compute_on, io_callback
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import run_state
from jax.lax import linalg as ll
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx
from batchax._compat import find_primitive
from batchax.custom_rules.own_derivatives import linear_with_transpose
from batchax.execution.gathered_lanes import put
from batchax.execution.slices import follow_p
from batchax.kernel.impl_programs import impl_program_p
from batchax.rows.index import row_places_p
from batchax.rows.padded_rules.own_steps import Steps, run_own_steps
from batchax.rows.places_where import places_where_p
from batchax.rows.segments import reduced_rows_p
from batchax.rows.sizes import found_places_p
from batchax.rules.callbacks import lane_calls_p
from batchax.rules.calls import in_turn_p
from batchax.rules.contraction import thin_product_p
from batchax.rules.in_place import some_active_p
from batchax.rules.linalg import small_matrices_p
from batchax.rules.masking import safe_lanes
from batchax.rules.random import drawn_p
from batchax.rules.reductions import SHORT, short_reduction_p
from batchax.rules.sorting_by_image import sorted_floats_p
from batchax.rules.sorting_network import sorted_rows_p
from rules.test_collectives import COLLECTIVES
from rules.test_elementwise import COUNT, NARY, UNARY
from rules.test_families import PLAIN, START, WINDOW, pool
from rules.test_linalg import DIFFERENTIABLE, VALUES_ONLY
from rules.test_reduction import DTYPES, cumulative, reduction

from support.operations import bind

# Functions that are called through one primitive or another.


def body_of_evaluation(staged):
    """Its parameters, of which one was renamed."""
    return {"jaxpr": staged} if jax.__version_info__ < (0, 12) else {"call_jaxpr": staged}


def third(r, x):
    return x / r


def double(ref):
    ref[...] = ref[...] * 2


def on_host(body):
    place = getattr(compute_on, "compute_on2", compute_on.compute_on)
    return place(compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)(body)


def with_metadata(body):
    from jax.experimental.scheduling_groups import xla_metadata_call

    return xla_metadata_call(body, tag="a")


def in_program_order(body):
    from jax.experimental.overlap import program_order  # in newer JAX

    return program_order(enforce=True)(body)


@jax.custom_vjp
def own_backward(x):
    return jnp.sin(x)


own_backward.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda r, c: (c * r,), optimize_remat=True)


@jax.custom_batching.custom_vmap
def own_batching(x):
    return jnp.sin(x)


@own_batching.def_vmap
def own_batching_rule(axis_size, in_batched, x):
    return jnp.sin(x), in_batched[0]


@bx.custom_vmap
def batched_by_rule(x):
    return jnp.sin(x)


@batched_by_rule.def_vmap
def batched_by_rule_rule(axis_size, in_batched, x):
    return jnp.sin(x), in_batched[0]


@jax.custom_jvp
def own_jvp(x):
    return jnp.sin(x)


own_jvp.defjvps(lambda t, out, x: t * jnp.cos(x))


@jax.custom_vjp
def own_vjp(x):
    return jnp.sin(x)


own_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, c: (c * jnp.cos(x),))


LANES = 4
NAME = "i"


def several(*shape, dtype=jnp.float32):
    """The type of an array with a row of `shape` for each lane."""
    return jax.ShapeDtypeStruct((LANES, *shape), dtype)


BOOL = several(dtype=bool)
X, Y, S, M = several(3), several(4, 8), several(), several(3, 3)
_ROWS = [np.array(x, np.int32) for x in ([0, 2], [1, 1], [0, 0, 1])]  # where two rows are
N, NS = several(3, dtype=jnp.int32), several(dtype=jnp.int32)
KEYS = several(dtype=jax.random.key(0).dtype)
EXPLICIT = jax.make_mesh((1,), ("e",), axis_types=(AxisType.Explicit,))
MESH = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def _elementwise():
    programs = {}
    for name, (fun, dtypes, *_) in {**UNARY, **NARY}.items():
        count = 1 if name in UNARY else COUNT.get(name, 2)
        programs[name] = (fun, *[several(3, dtype=dtypes[0])] * count)
    cast = lambda x: lax.bitcast_convert_type(x, jnp.int32)
    return {**programs, "bitcast_convert_type": (cast, X)}


def _reduction(names):
    programs = {
        name: (reduction(name, (1,)), several(2, 4, dtype=DTYPES[name][0])) for name in names
    }
    for name in programs:
        if name.startswith("cum"):
            programs[name] = (cumulative(name, 1), several(2, 4))
    return programs


def _of_several(x, i):
    start = jnp.zeros((), x.dtype), jnp.int32(0)
    return lax.reduce((x, i), start, lambda a, b: (a[0] + b[0], a[1] * b[1]), (0,))


def _over_lanes(fun):
    return lambda *args: fun(*args, NAME)


def _over_devices(fun, shared=False):
    """`fun` over a mesh axis, where JAX checks what varies over it: there more primitives are."""
    to = P() if shared else P("a")

    def on_devices(x):
        return jax.shard_map(lambda x: fun(x, "a"), mesh=MESH, in_specs=P("a"), out_specs=to)(x)

    return on_devices, Y


def _collectives():
    unreduced = lambda x, a: lax.pcast(x, a, to="unreduced")
    return {
        **{n: (_over_lanes(COLLECTIVES[n]), Y) for n in "psum pmax pmin axis_index".split()},
        "psum_invariant": _over_devices(lax.psum, shared=True),
        "unreduced_psum": _over_devices(lambda x, a: lax.psum(unreduced(x, a), a), shared=True),
        "vary_unreduced_cast": _over_devices(
            lambda x, a: lax.psum(unreduced(x, a), a), shared=True
        ),
        "pvary": _over_devices(
            lambda x, a: x + lax.pcast(jnp.sin(lax.psum(x, a)), a, to="varying")
        ),
        "preduced": _over_devices(_reduced),
        "reduced_vary_cast": _over_devices(_reduced),
    }


def _reduced(x, a):
    return lax.pcast(lax.pcast(lax.psum(x, a), a, to="reduced"), a, to="varying")


def _exchanges():
    rows, parts = several(6, 2), several(LANES, dtype=jnp.int32)
    over_lanes = {
        "all_gather": "all_gather",
        "reduce_scatter": "psum_scatter",
        "all_to_all": "all_to_all 0 0",
        "ppermute": "ppermute",
    }
    gather = partial(lax.all_gather, tiled=True)
    scatter = partial(lax.psum_scatter, tiled=True)
    return {
        **{name: (_over_lanes(COLLECTIVES[which]), Y) for name, which in over_lanes.items()},
        "pbroadcast": (lambda x: lax.pbroadcast(x, NAME, 1), Y),
        "pbroadcast_dynamic": (lambda x, s: lax.pbroadcast(x, NAME, s), Y, NS),
        "ragged_all_to_all": (
            lambda *args: lax.ragged_all_to_all(*args, axis_name=NAME),
            *(rows, several(20, 2), parts, parts, parts, parts),
        ),
        "all_gather_invariant": _over_devices(partial(gather, to="invarying"), shared=True),
        "all_gather_reduced": _over_devices(
            lambda x, a: lax.pcast(gather(x, a, to="reduced"), a, to="varying")
        ),
        "unreduced_reduce_scatter": _over_devices(
            lambda x, a: scatter(lax.pcast(x, a, to="unreduced"), a)
        ),
    }


def _calls():
    body = lambda x: jnp.sin(x) * 2

    def call(name, params):
        def f(x):
            staged = jax.make_jaxpr(body)(jax.ShapeDtypeStruct(x.shape, x.dtype))
            primitive = find_primitive(name)
            return primitive.bind(x, **primitive.get_bind_params(params(staged)))[0]

        return f, X

    return {
        "call": call("call", lambda staged: {"call_jaxpr": staged.jaxpr}),
        "closed_call": call("closed_call", lambda staged: {"call_jaxpr": staged}),
        "core_call": call("core_call", lambda staged: {"call_jaxpr": staged}),
        "eval_jaxpr": call("eval_jaxpr", body_of_evaluation),
        "jit": (jax.jit(body), X),
        "remat2": (jax.checkpoint(body), X),
        "composite": (lax.composite(body, name="test.body"), X),
        "compute_on": (on_host(body), X),
        "xla_metadata_call": (with_metadata(body), X),
        "program_order": (lambda x: in_program_order(body)(x), X),
        "run_state": (lambda x: run_state(double)(x), X),
        "remat_opt": (jax.grad(lambda x: own_backward(x).sum()), X),
        "custom_vmap_call": (own_batching, X),
        "linear_call": (lambda x: jax.custom_derivatives.linear_call(third, third, 3.0, x), X),
        "call_hi_primitive": (lambda x, v: jnp.searchsorted(x, v), X, S),
    }


def _callbacks():
    sine = lambda x: jax.pure_callback(
        np.sin, jax.ShapeDtypeStruct((3,), x.dtype), x, vmap_method="expand_dims"
    )
    foreign = jax.ffi.ffi_call(
        "unknown", jax.ShapeDtypeStruct((3,), jnp.float32), vmap_method="expand_dims"
    )
    return {
        "pure_callback": (sine, X),
        "io_callback": (lambda x: io_callback(print, None, x, ordered=True), X),
        "debug_callback": (lambda x: jax.debug.callback(print, x), X),
        "inspect_sharding": (lambda x: jax.debug.inspect_array_sharding(x, callback=print), X),
        "debug_print": (lambda x: jax.debug.print("{}", x), X),
        "ffi_call": (foreign, X),
        "check": (lambda x: checkify.check(x > 0, "x is {}", x), S),
    }


def _diverging(x, w):
    def body(c):
        return c[0] + 1, jnp.tanh(w @ c[1])

    return lax.while_loop(lambda c: c[1].sum() > c[0], body, (0, x))[1]


def _references():
    def uses(x, i):
        ref = jax.new_ref(x)
        jax.ref.addupdate(ref, i, jnp.float32(2))
        old = jax.ref.swap(ref, i, ref[i])
        return old, jax.ref.freeze(ref)

    return {
        **dict.fromkeys("new_ref freeze get swap addupdate".split(), (uses, X, NS)),
        "broadcast_to": (_indexed_by_arrays, Y, several(2, 1, dtype=jnp.int32)),
    }


def _indexed_by_arrays(x, k):
    ref = jax.new_ref(x)
    return ref[k, jnp.zeros(2, int)]


def _shape():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    one = {
        "broadcast_in_dim": lambda x: lax.broadcast(x, (4,)),
        "reshape": lambda x: x.reshape(9),
        "transpose": lambda x: x.T,
        "squeeze": lambda x: lax.squeeze(x[:1], (0,)),
        "rev": lambda x: lax.rev(x, (0,)),
        "tile": lambda x: lax.tile(x, (2, 3)),
        "pad": lambda x: lax.pad(x, jnp.ones((), x.dtype), [(1, 0, 0), (0, 2, 1)]),
        "concatenate": lambda x: lax.concatenate([x, x], 0),
        "split": lambda x: lax.split(x, (1, 2), axis=1),
        "stack": lambda x: lax.stack_p.bind(x, x, axis=0),
        "unstack": lambda x: lax.unstack_p.bind(x, axis=0),
        "tie": lambda x: bind("tie")(x, x),
        "dce_sink": lambda x: bind("dce_sink")(x),
        "optimization_barrier": lambda x: lax.optimization_barrier(x),
        "device_put": lambda x: jax.device_put(x, NamedSharding(mesh, P())),
        "with_memory_space_constraint": bind(
            "with_memory_space_constraint", memory_space=jax.memory.Space.Device
        ),
        "xla_metadata_value": _tagged,
    }
    return {name: (fun, M) for name, fun in one.items()}


def _tagged(x):
    from jax.experimental.xla_metadata import set_xla_metadata

    return set_xla_metadata(x, tag="a")


def _linalg():
    matrix = {
        **{n: DIFFERENTIABLE[n] for n in ("cholesky", "lu", "qr", "eigh", "svd")},
        **{n: VALUES_ONLY[n] for n in "eig hessenberg householder_product".split()},
        **{n: VALUES_ONLY[n] for n in "schur tridiagonal symmetric_product".split()},
        "lu_pivots_to_permutation": VALUES_ONLY["pivots_to_permutation"],
        "geqrf": bind("geqrf"),
        "geqp3": lambda x: bind("geqp3", use_magma=None)(x, jnp.zeros(3, jnp.int32)),
        "triangular_solve": DIFFERENTIABLE["solve_triangular"],
    }
    return {
        **{name: (fun, M) for name, fun in matrix.items()},
        "cholesky_update": (bind("cholesky_update"), M, X),
        "ormqr": (lambda a, t, c: ll.ormqr(a, t, c, left=True), M, X, M),
        "tridiagonal_solve": (ll.tridiagonal_solve, X, X, X, several(3, 2)),
    }


def _random():
    key = {
        "random_bits": jax.random.bits,
        "random_clone": jax.random.clone,
        "random_split": jax.random.split,
        "random_unwrap": jax.random.key_data,
        "random_fold_in": lambda k: jax.random.fold_in(k, 7),
    }
    operands = {"threefry2x32": 4, "threefry4x32": 8, "philox2x32": 3, "philox4x32": 6}
    word = several(dtype=jnp.uint32)
    return {
        **{name: (fun, KEYS) for name, fun in key.items()},
        "random_wrap": (jax.random.wrap_key_data, several(2, dtype=jnp.uint32)),
        **{name: (bind(name), *[word] * count) for name, count in operands.items()},
        "random_seed": (jax.random.key, NS),
        "random_gamma": (jax.random.gamma, KEYS, S),
        "rng_bit_generator": (
            lambda k: lax.rng_bit_generator(k, (2,)),
            several(4, dtype=jnp.uint32),
        ),
        "rng_uniform": (lambda a: lax.rng_uniform(a, a + 1, (2,)), S),
    }


def _sharding():
    sharding = NamedSharding(MESH, P("a"))
    return {
        "sharding_constraint": (lambda x: lax.with_sharding_constraint(x, sharding), several(4)),
        "layout_constraint": (lambda x: with_layout_constraint(x, Layout((1, 0))), M),
        "reshard": (lambda x: jax.sharding.reshard(x, NamedSharding(EXPLICIT, P())), M),
    }


def _scatters():
    at = lambda method: lambda x, i: getattr(x.at[i], method)(2.0)
    methods = {"scatter": "set", "scatter-add": "add", "scatter-mul": "multiply"}
    methods |= {"scatter-max": "max", "scatter-min": "min", "scatter-sub": "subtract"}
    return {
        "gather": (lambda x, i: x[jnp.stack([i, i])], X, NS),
        **{name: (at(method), X, NS) for name, method in methods.items()},
    }


def _windows():
    image, pooled, number = several(4, 5), several(2, 4), jnp.zeros(())
    gather = bind("select_and_gather_add", select_prim=lax.ge_p, **WINDOW)
    scatter_add = bind("select_and_scatter_add", select_prim=lax.ge_p, **PLAIN)
    scatter = bind(
        "select_and_scatter",
        select_jaxpr=jax.make_jaxpr(lax.ge)(number, number).jaxpr,
        select_consts=(),
        scatter_jaxpr=jax.make_jaxpr(lax.add)(number, number).jaxpr,
        scatter_consts=(),
        **PLAIN,
    )
    return {
        **{name: (pool(name), image) for name in START},
        "select_and_gather_add": (gather, image, image),
        "select_and_scatter_add": (scatter_add, pooled, image),
        "select_and_scatter": (scatter, image, pooled, several()),
        "reduce_window": (
            lambda x: lax.reduce_window(x, jnp.ones((), x.dtype), lambda a, b: a * b, **PLAIN),
            several(4, 5),
        ),
    }


_on_devices = lambda x: jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("a"), out_specs=P("a"))(x)
_sum = lambda _, xs: [x.sum() for x in xs]
_spread = lambda _, cotangents: [jnp.broadcast_to(c, (3,)) for c in cotangents]


def _twice(_, values):
    (x,) = values
    return [lax.scan(lambda x, _: (jnp.sin(x), None), x, length=2)[0]]


def _until_two(_, values):
    (x,) = values
    step = lambda state: (state[0] + 1, jnp.sin(state[1]))
    return [lax.while_loop(lambda state: state[0] < 2, step, (0, x))[1]]


def _calls_of_lanes(active, x):
    program = jax.make_jaxpr(lambda x: jax.debug.callback(lambda x: None, x))(x)
    lane_calls_p.bind(active, x, program=program, shared=(True,), placed=False)


def _own():
    # A scan over columns as it is outside of a function that is mapped.
    columns = bx.scan(lambda c, x: (jnp.sin(c) * x, c), 1, 1)
    columns = jax.make_jaxpr(columns)(jnp.ones(3, jnp.float32), jnp.ones((3, 4), jnp.float32))
    last = lambda c, x: jax.core.eval_jaxpr(columns.jaxpr, columns.consts, c, x)[1]
    chunked = bx.vmap(jnp.sin, batch_size=2)
    loop = lambda x: bx.bounded_while(lambda c: c.sum() < 9, jnp.sin, x, 5)
    telling = bx.scan(lambda c, x: (jnp.sin(c) * x, None), progress=lambda done, total: None)
    told = lambda x: telling(x[0], x)[0]
    sine = jax.make_jaxpr(jnp.sin)(jnp.ones(3, jnp.float32))
    return {
        "divergence.loops": {
            "divergent_loop": (
                bx.vmap(_diverging, (0, None), divergence="compact"),
                several(512, 32),
                several(32, 32),
            )
        },
        "execution.bounded_batching": {
            "bounded_loop": (loop, X),
            "reverse_sweep": (jax.grad(lambda x: loop(x).sum()), X),
        },
        "execution.chunk_batching": {"chunk_loop": (chunked, X)},
        "execution.gathered_lanes": {
            "put": (lambda x, i: put(x, 2 * x, i, 0), X, several(3, dtype=np.int32))
        },
        "execution.steps": {"scan_steps": (last, X, several(3, 4))},
        "execution.slices": {"follow": (follow_p.bind, X, X)},
        "execution.progress": {"tell_progress": (told, X), "progress_back": (told, X)},
        "rows.sizes": {
            "found_places": (
                partial(found_places_p.bind, size=2, limit=None, called="batchax.compress"),
                several(3, dtype=bool),
            )
        },
        "rows.places_where": {
            "places_where": (partial(places_where_p.bind, size=2), several(3, dtype=bool))
        },
        "rows.index": {
            "row_places": (
                partial(row_places_p.bind, capacity=4, bound=3),
                several(3, dtype=np.int32),
            )
        },
        "rows.padded_rules.own_steps": {
            "own_steps": (lambda x: run_own_steps(_twice, _until_two, Steps(0, 2, [x]), [x], 2), X)
        },
        "rows.segments": {
            "reduced_rows": (
                lambda x: reduced_rows_p.bind(x, *_ROWS, kind="reduce_sum", in_full=False),
                X,
            )
        },
        "rules.calls": {"in_turn": (partial(in_turn_p.bind, count=1), X, X)},
        "rules.callbacks": {"lane_calls": (_calls_of_lanes, BOOL, X)},
        "rules.impl_programs": {
            "impl_program": (partial(impl_program_p.bind, program=sine, of=sine), X)
        },
        "rules.in_place": {"some_active": (some_active_p.bind, BOOL, BOOL)},
        "rules.linalg": {
            "small_matrices": (
                lambda x: small_matrices_p.bind(
                    jnp.stack([x] * 2, -1), of="cholesky", first=False, explicit=False
                ),
                M,
            )
        },
        "rules.reductions": {
            "short_reduction": (partial(short_reduction_p.bind, of="reduce_sum", over=(0,)), X)
        },
        "rules.contraction": {
            "thin_product": (partial(thin_product_p.bind, precision=None), X, several(3, 2))
        },
        "rules.sorting_by_image": {
            "sorted_floats": (partial(sorted_floats_p.bind, dimension=0), X)
        },
        "rules.sorting_network": {
            "sorted_rows": (
                partial(sorted_rows_p.bind, dimension=0, num_keys=1, is_stable=True),
                X,
                X,
            )
        },
        "rules.random": {"drawn": (partial(drawn_p.bind, of="random_split", shape=(2,)), KEYS)},
        "rules.masking": {"safe_lanes": (lambda active, x: safe_lanes(active, x, 0), BOOL, X)},
        "user_rules.batching": {"custom_batched_call": (batched_by_rule, X)},
        "user_rules.linear": {
            "linear_with_transpose": (lambda x: linear_with_transpose(_sum, _spread, [], [x])[0], X)
        },
    }


RULES = {}
"""Programs, with the types of their arguments, by module and primitive."""
for _module, _programs in (
    *_own().items(),
    ("rules.branches", {"cond": (lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x), BOOL, X)}),
    ("rules.callbacks", _callbacks()),
    ("rules.calls", _calls()),
    ("rules.collectives", _collectives()),
    ("rules.contraction", {"dot_general": (jnp.matmul, M, X)}),
    (
        "rules.convolution",
        {"conv_general_dilated": (lambda x, w: jnp.convolve(x, w), X, several(2))},
    ),
    (
        "rules.custom_derivatives",
        {"custom_jvp_call": (own_jvp, X), "custom_vjp_call": (own_vjp, X)},
    ),
    ("rules.elementwise", _elementwise()),
    ("rules.collectives", _exchanges()),
    ("rules.convolution", {"fft": (jnp.fft.fft, X)}),
    ("rules.gather_scatter", _scatters()),
    (
        "rules.shape",
        {
            "slice": (lambda x: x[1:], X),
            "dynamic_slice": (lambda x, i: lax.dynamic_slice(x, (i,), (2,)), X, NS),
            "dynamic_update_slice": (lambda x, i: lax.dynamic_update_slice(x, x[:2], (i,)), X, NS),
        },
    ),
    ("rules.linalg", _linalg()),
    (
        "rules.loops",
        {
            "scan": (lambda x: lax.scan(lambda c, e: (c + e, e), 0.0, x), X),
            "while": (lambda x: lax.while_loop(lambda c: c.sum() < 9, jnp.exp, x), X),
        },
    ),
    (
        "rules.contraction",
        {"ragged_dot_general": (lax.ragged_dot, M, several(2, 3, 5), several(2, dtype=jnp.int32))},
    ),
    ("rules.random", _random()),
    ("rules.elementwise", _reduction([name for name in DTYPES if name not in SHORT])),
    ("rules.elementwise", {"reduce": (_of_several, X, N)}),
    ("rules.reductions", _reduction([name for name in DTYPES if name in SHORT])),
    ("rules.references", _references()),
    ("rules.shape", _shape()),
    ("rules.sharding", {"shard_map": (_on_devices, several(4))}),
    ("rules.sharding", _sharding()),
    ("rules.linalg", {"custom_linear_solve": (jnp.linalg.solve, M, X)}),
    (
        "rules.sorting",
        {
            "sort": (lax.sort, X),
            "top_k": (lambda x: lax.top_k(x, 2), X),
            "approx_top_k": (lambda x: lax.approx_max_k(x, 2), X),
        },
    ),
    ("rules.convolution", _windows()),
):
    RULES.setdefault(_module, {}).update(_programs)
