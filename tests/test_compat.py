"""A canary: one instance of everything that `_compat` takes for granted of JAX.

What JAX does not export it may rename, and what is recognised by its name would then be missed
in silence. Each test here makes such a thing with the JAX that is installed, and fails by saying
what is no longer so.
"""

import ast
import importlib
from pathlib import Path

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import jaxprs_in_params
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from batchax import _compat
from batchax._compat import one_function
from batchax.analysis.one_function import fits_lowered_kernel, fits_single_kernel
from batchax.kernel.axis import Axis

from support.high_operations import cube
from support.shared_store import clients

SOURCES = sorted(Path(_compat.__file__).parent.glob("*.py"))
X = jnp.arange(1.0, 4.0)
AXES = [("i", 2)]


def equations(fun, *args):
    """The equations that `fun` stages to, and those of the programs inside them."""

    def walk(jaxpr):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            yield eqn
            for inner in jaxprs_in_params(eqn.params):
                yield from walk(inner)

    return list(walk(jax.make_jaxpr(fun, axis_env=AXES)(*args)))


def equation(name, fun, *args):
    """The equation of primitive `name` in what `fun` stages to."""
    found = equations(fun, *args)
    names = sorted({eqn.primitive.name for eqn in found})
    assert name in names, f"JAX stages no `{name}` here, but {names}"
    return next(eqn for eqn in found if eqn.primitive.name == name)


# --- names ------------------------------------------------------------------------------------


def private_names():
    """What `_compat` imports from JAX's private modules."""
    for node in (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax._src"):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize(("module", "name"), sorted(private_names()))
def test_private_names(module, name):
    assert hasattr(importlib.import_module(module), name)


# --- the classes of effects --------------------------------------------------------------------


def swapped(x):
    ref = jax.new_ref(x)
    ref[0] = 2.0
    return jax.freeze(ref)


EFFECTS = {
    "NamedAxisEffect": ("psum", lambda x: lax.psum(x, "i")),
    "InternalMutableArrayEffect": ("new_ref", swapped),
    "IOEffect": ("io_callback", lambda x: io_callback(np.sin, x, x)),
    "OrderedIOEffect": ("io_callback", lambda x: io_callback(np.sin, x, x, ordered=True)),
    "DebugEffect": ("debug_print", lambda x: jax.debug.print("{}", x)),
    "OrderedDebugEffect": ("debug_print", lambda x: jax.debug.print("{}", x, ordered=True)),
}


def effects(name):
    primitive, fun = EFFECTS[name]
    found = equation(primitive, fun, X).effects
    classes = [type(e).__name__ for e in found]
    assert classes == [name], f"the effect of `{primitive}` is now {classes}"
    return found


def test_effects():
    assert _compat.named_axes(effects("NamedAxisEffect")) == {"i"}
    assert not _compat.observed(effects("NamedAxisEffect"))
    assert _compat.makes_references(effects("InternalMutableArrayEffect"))
    for name in ("IOEffect", "OrderedIOEffect", "OrderedDebugEffect"):
        assert _compat.ordered_by_lane(effects(name)), name
    for name in ("IOEffect", "OrderedIOEffect", "DebugEffect", "OrderedDebugEffect"):
        assert _compat.calls_back(effects(name)), name
        assert _compat.observed(effects(name)), name
    assert not _compat.ordered_by_lane(effects("DebugEffect"))


def test_what_jax_logs_of_callbacks_that_fail(caplog):
    def fail(_):
        raise ValueError("as told")

    def call():
        with pytest.raises(Exception, match="as told"):
            jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(fail, X, x))(X))

    call()
    logged = len(caplog.records)
    with _compat.callbacks_fail_silently():
        call()
    assert 0 < logged == len(caplog.records)


def test_references():
    ref, read, added = jax.new_ref(X), jax.new_ref(X), jax.new_ref(X)
    assert _compat.is_reference(ref)
    assert not _compat.is_reference(X)

    def writes(read, written, added):
        written[0] = read[1]
        jax.ref.addupdate(added, 0, 1.0)

    jaxpr = jax.make_jaxpr(writes)(read, ref, added).jaxpr
    assert sorted(type(e).__name__ for e in jaxpr.effects) == [
        "AccumEffect",
        "ReadEffect",
        "WriteEffect",
    ]
    assert _compat.written_inputs(jaxpr) == {1, 2}
    program = _compat.without_references(jax.make_jaxpr(swapped)(X), None, None)
    assert not _compat.makes_references(program.effects)


# --- tracers and traces ------------------------------------------------------------------------


def test_traces():
    seen = []

    def fun(x):
        seen.append(x)
        assert _compat.tracing()
        assert _compat.staging(), "what stages a program is of another class now"
        assert _compat.is_live(x)
        assert _compat.compiled_later()
        jax.grad(lambda y: (seen.append(_compat.compiled_later()), y)[1])(1.0)
        assert seen.pop()
        assert _compat.staged_variable(x) is not None, f"a staged value is now a {type(x)}"
        assert jax.vmap(lambda y: _compat.is_live(x) or y)(x) is not None
        return x * 2

    assert not _compat.tracing()
    assert not _compat.staging()
    jax.grad(lambda y: (seen.append(_compat.compiled_later()), y)[1])(1.0)
    assert not seen.pop()
    jax.vmap(lambda x: (seen.append(_compat.staging()), x)[1])(X)
    assert seen.pop() is False  # JAX batches what is computed at once
    jax.make_jaxpr(fun)(X)
    assert not _compat.is_live(seen[0])
    kept = _compat.keeping_calls(lambda x: seen.append(_compat.is_live(x)) or x)
    jax.make_jaxpr(kept)(X)
    assert seen.pop()
    assert _compat.staged_variable(X) is None


def test_tracers_of_traces_that_are_over():
    seen = []
    jax.linearize(lambda x: (seen.append(x), x)[1], X)
    valid = seen[0]._trace.is_valid()
    with _compat.usable(seen):
        assert seen[0]._trace.is_valid()
        jax.make_jaxpr(lambda x: x * seen[0])(X)
    assert seen[0]._trace.is_valid() == valid


def test_the_store_that_processes_share():
    assert _compat.shared_store() is None
    with clients(1) as (store,):
        store.key_value_set("a/1", "x")
        with pytest.raises(jax.errors.JaxRuntimeError, match="ALREADY_EXISTS"):
            store.key_value_set("a/1", "y")
        store.key_value_set("a/1", "z", allow_overwrite=True)
        assert store.blocking_key_value_get("a/1", 100) == "z"
        with pytest.raises(jax.errors.JaxRuntimeError, match="DEADLINE_EXCEEDED"):
            store.blocking_key_value_get("a/2", 1)
        assert [store.key_value_increment("a/n", 1) for _ in range(2)] == [1, 2]
        assert store.key_value_dir_get("a") == [("a/1", "z"), ("a/n", "2")]
        store.key_value_set("ab", "not under a")
        store.key_value_delete("a")
        assert store.key_value_dir_get("a") == []
        assert store.blocking_key_value_get("ab", 100) == "not under a"


def test_what_tracers_stand_for():
    seen = []
    jax.grad(lambda x: (seen.append(_compat.value_of(x)), x.sum())[1])(X)
    jax.jvp(lambda x: (seen.append(_compat.value_of(x)), x)[1], (X,), (X,))
    jax.jit(lambda x: (seen.append(_compat.value_of(x)), x)[1])(X)
    assert [x is X for x in seen] == [True, True, False]
    assert seen[2] is None


def test_tracers_of_vmap():
    seen = []
    jax.vmap(lambda x: seen.append((_compat.batched_by_jax(x), _compat.batched_by_jax(X))), 1)(
        jnp.ones((2, 3))
    )
    (((value, at), (same, nowhere)),) = seen
    assert value.shape == (2, 3)
    assert (at, same is X, nowhere) == (1, True, None)


STATES = {
    "DynamicJaxprTrace": "interpreters.partial_eval",
    "Store": "linear_util",
    "EqualStore": "linear_util",
    "InitialResultPaths": "linear_util",
}


@pytest.mark.parametrize("name", STATES)
def test_what_jax_keeps_of_a_trace(name):
    state = getattr(importlib.import_module(f"jax._src.{STATES[name]}"), name)
    assert _compat.is_tracing_state(object.__new__(state))


# --- parameters that rules read ----------------------------------------------------------------

MESH = jax.make_mesh((1,), ("m",), axis_types=(AxisType.Auto,))


def test_parameters_that_differ_by_version():
    counted = lambda x: lax.scan(lambda c, y: (c + y[0] * x, c), jnp.zeros(3), (x, x))
    scan = equation("scan", counted, X).params
    assert _compat.scan_counts(scan) == (1, 1)
    # What `_compat` calls JAX 0.12 is one version, not a bit of each.
    assert ("ft_in" in scan) == issubclass(jex_core.ClosedJaxpr, jex_core.Jaxpr)
    sharded = jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("m"), out_specs=P("m"))
    for name, fun in (("remat2", jax.checkpoint(jnp.sin)), ("shard_map", sharded)):
        body = equation(name, fun, X).params["jaxpr"]
        assert isinstance(_compat.close(body), _compat.ClosedJaxpr)
    half = lambda _, b: b / 2
    solve = lambda x: lax.custom_linear_solve(lambda v: 2 * v, x, half, symmetric=True)
    jaxprs = equation("custom_linear_solve", solve, X).params["jaxprs"]
    assert jaxprs._fields == ("matvec", "vecmat", "solve", "transpose_solve")
    called = lambda x: jax.pure_callback(np.sin, x, x, vmap_method="sequential")
    assert equation("pure_callback", called, X).params["callback"].callback_func is np.sin


@pytest.mark.parametrize("option", ["custom_vjp3", "custom_jvp3", "remat3"])
def test_calls_as_jax_will_make_them(option):
    name = f"jax_{option}"
    if not hasattr(jax.config, name):
        assert option == "custom_jvp3"
        assert jax.__version_info__ < (0, 12)
        return
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:  # JAX 0.10 reads the options where a function is made
        function = {"custom_vjp3": jax.custom_vjp, "custom_jvp3": jax.custom_jvp}.get(
            option, jax.checkpoint
        )(jnp.sin)
        if option == "custom_vjp3":
            function.defvjp(lambda x: (x, None), lambda _, c: (c,))
        elif option == "custom_jvp3":
            function.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
        operation = equation("call_hi_primitive", function, X).params["_prim"]
        by_default = _compat.as_made_by_default(operation)
        assert _compat.is_checkpoint(operation) == (option == "remat3")
        assert (by_default is None) == (option == "remat3")
        if by_default is not None:
            equation(f"{option[:-1]}_call", by_default, X)
    finally:
        jax.config.update(name, before)


# --- the rest ----------------------------------------------------------------------------------


def test_what_jax_tells_a_batching_rule():
    primitive, seen = jex_core.Primitive("canary"), []
    primitive.def_abstract_eval(lambda x: x)

    def rule(data, args, dims):
        seen.append(_compat.axis_from(data, Axis))
        return args[0], dims[0]

    batching.fancy_primitive_batchers[primitive] = rule
    assert _compat.jax_has_rule(primitive)
    for name in ("lanes", None):
        jax.make_jaxpr(jax.vmap(primitive.bind, axis_name=name))(X)
    assert [(axis.size, axis.name) for axis in seen] == [(3, "lanes"), (3, None)]
    data = _compat.axis_data("lanes", 3, None)
    assert (data.name, data.size, data.spmd_name) == ("lanes", 3, None)


def test_types_inside_shard_map():
    def fun(x):
        assert _compat.varying_axes(jax.typeof(x)) == {"m"}
        assert _compat.checked_axes() == {"m"}
        alike = _compat.with_varying_axes(jax.typeof(x), frozenset())
        assert _compat.varying_axes(alike) == frozenset()
        select = lambda y: list(lax.cond(y[0] > 0, lambda: (True,), lambda: (False,)))
        staged = _compat.stage(select, [jax.typeof(x)], selecting=True)
        assert _compat.varying_axes(staged.out_avals[0]) == {"m"}
        one = jnp.zeros(())
        assert _compat.varying_axes(jax.typeof(one)) == frozenset()
        assert _compat.varying_axes(jax.typeof(_compat.varying_as(one, jax.typeof(x)))) == {"m"}
        scalar = _compat.scalar_like(jax.typeof(x), jnp.int32)
        assert (scalar.shape, scalar.dtype, _compat.varying_axes(scalar)) == ((), jnp.int32, {"m"})
        return x

    def unchecked(x):
        assert _compat.checked_axes() == frozenset()
        return x

    specs = dict(mesh=MESH, in_specs=P("m"), out_specs=P("m"))
    jax.make_jaxpr(jax.shard_map(fun, **specs))(X)
    jax.make_jaxpr(jax.shard_map(unchecked, check_vma=False, **specs))(X)


def test_the_function_says_how_outputs_of_shard_map_are_sharded():
    mesh, outputs = Mesh(np.array(jax.devices()[:1]), "d"), _compat.Outputs()

    def fun(x):
        return outputs.with_sharding([x, lax.psum(x, "d")], [P("d"), P()])

    def run(x):
        specs = dict(in_specs=P("d"), out_specs=outputs)
        return jax.shard_map(fun, mesh=mesh, check_vma=False, **specs)(x).arrays

    (eqn,) = jax.make_jaxpr(run)(jnp.ones(2)).eqns
    assert eqn.params["out_specs"] == (P("d"), P())


def test_functions_that_others_stand_in_for():
    at = lambda: [getattr(s.module, s.name) for s in _compat.PATCHES]
    original = at()
    assert {f"{s.module.__name__}.{s.name}" for s in _compat.PATCHES} >= {
        *_compat.PRIVATE_PLACES.values()
    }
    with _compat.patched():
        for now, before in zip(at(), original, strict=True):
            assert now.__wrapped__ is before
    assert at() == original


def test_sizes_of_a_class_of_their_own():
    class Size(_compat.RowDimension):
        pass

    n, m = _compat.row_symbols(Size, ["n", "m"], None)
    assert (str(n + m), n + m == m + n, n == 1, n == m) == ("n + m", True, False, False)
    made = [n + 1, n * m, n // 2, n % 3, n.max(m), jax.core.max_dim(n, 2), -n, divmod(n, 2)[1]]
    assert {type(size) for size in made} == {Size}, "JAX makes sizes elsewhere, too"
    x = jax.make_jaxpr(lambda: (jnp.asarray(n), jnp.int8(1) * n, lax.select(True, n, m)))()
    types = [(str(aval.dtype), aval.weak_type) for aval in x.out_avals]
    assert types == [(str(jnp.asarray(1).dtype), True), ("int8", False), types[0]]
    (of_jax,) = jax.export.symbolic_shape("n")
    assert type(of_jax + 1) is _compat.SIZE


def test_frames_that_jax_hides():
    @_compat.api_boundary
    def call(fun):
        return _compat.name_stack_extended("x")(fun)()  # a frame of contextlib

    with pytest.raises(ZeroDivisionError) as raised:
        call(lambda: 1 / 0)
    files = [Path(frame.path).name for frame in raised.traceback]
    assert "contextlib.py" not in files, "JAX shows frames of files that are registered with it"
    assert "traceback_util.py" not in files, "JAX filters no traceback at `api_boundary`"


def test_programs_that_are_lowered_early():
    program = jax.make_jaxpr(cube)(1.0)
    held_p = jex_core.Primitive("held")
    held_p.def_abstract_eval(lambda x, held: x)
    run = lambda x, held: jax.core.eval_jaxpr(held[0].jaxpr, held[0].consts, x)[0]
    _compat.lower_early(
        held_p, lambda params: params["held"], run, lambda x, held: run(x, held) + 1
    )
    held = lambda x: held_p.bind(x, held=(program,))
    message = "JAX does not ask for what takes the place of a primitive that holds a high operation"
    assert jax.jit(held)(2.0) == 8, message
    assert held(2.0) == 9, message


@pytest.fixture
def _single_kernels(monkeypatch):
    """Single kernels, whatever version of jaxlib this is."""
    monkeypatch.setattr(one_function, "_RUN_ON", {*one_function._RUN_ON, jaxlib.__version__})


def test_this_version_may_have_single_kernels(monkeypatch):
    assert _compat.single_kernels(), (
        f"jaxlib {jaxlib.__version__} is not in `_RUN_ON` of `_compat/one_function.py`, so no loop "
        "is a single kernel. If the other tests here and `make fuzz FLAGS=default` pass, add it."
    )
    monkeypatch.setattr(jaxlib.version, "__version__", "0.13.0")
    assert not _compat.single_kernels()
    run = lambda x: [jnp.sin(x)]
    text = jax.jit(lambda x: _compat.single_kernel(run, [jax.typeof(x)], [x])).lower(X).as_text()
    assert "xla_cpu_small_call" not in text


def _chain(x):
    for _ in range(3):
        x = lax.optimization_barrier(jnp.sin(x) * x[0] + jnp.cos(x))
    return [x]


def _loop(x):
    step = lambda s: jnp.where(s < 9, s * 1.5 + 1, s)
    return [lax.while_loop(lambda s: jnp.any(s < 9), step, x)]


def _places(x):
    step = lambda i, x: lax.dynamic_update_index_in_dim(x, x[i] + x[(i + 1) % 64], i, 0)
    return [lax.fori_loop(0, 64, step, x)]


def _branches(x):
    step = lambda i, x: lax.cond(x[i] > 2, jnp.sin, lambda x: x + 1, x)
    return [lax.fori_loop(0, 5, step, x)]


def _draws(x):
    key = jax.random.key(0)
    draw = lambda i: jax.random.uniform(jax.random.fold_in(key, i), x.shape)
    return [lax.fori_loop(0, 3, lambda i, x: x + draw(i), x)]


@pytest.mark.usefixtures("_single_kernels")
@pytest.mark.parametrize("run", [_chain, _loop, _places, _branches, _draws])
def test_programs_that_are_one_function(run):
    x = jnp.linspace(0.5, 4.0, 10_000, dtype="float32")
    one = lambda x: _compat.single_kernel(run, jax.eval_shape(run, x), [x])
    single, plain = (jax.jit(f).lower(x).compile() for f in (one, run))
    fusions = [program.as_text().count(" fusion(") for program in (single, plain)]
    entry = single.as_text().split("ENTRY")[1]
    begun = {kind: entry.count(f" {kind}(") for kind in ("call", "fusion", "while", "conditional")}
    assert begun == {"call": 1, "fusion": 0, "while": 0, "conditional": 0}, (
        f"XLA of jaxlib {jaxlib.__version__} makes several functions of `{run.__name__}`, though "
        "it is told to make one"
    )
    # Those of the program, and two of the branch that is never taken.
    assert fusions[0] == fusions[1] + 2, "XLA fuses otherwise what it makes one function of"
    np.testing.assert_allclose(single(x)[0], plain(x)[0], rtol=1e-5)


@pytest.mark.usefixtures("_single_kernels")
def test_what_threads_would_compute_parts_of_is_one_function():
    one = lambda x: _compat.single_kernel(_chain, jax.eval_shape(_chain, x), [x])
    large = jax.ShapeDtypeStruct((100, 100_000), X.dtype)
    entry = jax.jit(one).lower(large).compile().as_text().split("ENTRY")[1]
    assert " call(" in entry


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_small_floats_are_in_no_single_kernel(dtype):
    # bfloat16 to int32 in the predicate ended the process on jaxlib 0.12.
    def counted(x):
        goes_on = lambda s: s[0].astype(dtype).astype(jnp.int32) < 100
        return lax.while_loop(goes_on, lambda s: (s[0] * 1.5 + 1, s[1] + 1), (x, 0))[1]

    for program in (
        jax.make_jaxpr(counted)(1.0),
        jax.make_jaxpr(lambda x: lax.fori_loop(0, 3, lambda i, y: i, 0))(jnp.ones((), dtype)),
        jax.make_jaxpr(lambda x: x * 2)(jnp.ones((), dtype)),
    ):
        assert not fits_single_kernel(program.jaxpr)
        assert not fits_lowered_kernel(program.jaxpr)
    assert fits_lowered_kernel(
        jax.make_jaxpr(lambda x: x.astype(jnp.int8) > 2)(jnp.float32(1)).jaxpr
    )


@pytest.mark.usefixtures("_single_kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_operands_that_nothing_reads_may_be_in_one_function(dtype):
    # XLA finds out that no result depends on what the inner loop carries besides, and ends the
    # process if nothing else reads that.
    def run(x, other, last):
        def step(state):
            i, x, last = state
            return i + 1, jnp.sin(x), jnp.where(i % 2 == 0, last, other)

        return [lax.while_loop(lambda state: state[0] < 10, step, (0, x, last))[1]]

    def step(_, state):
        x, other = state
        (x,) = _compat.single_kernel(run, [jax.typeof(x)], [x, other, last])
        return x, ~other if dtype == "bool" else other + np.ones((), dtype)

    x, last = jnp.ones(64), jnp.ones(64, dtype)
    got = jax.jit(lambda x, other: lax.fori_loop(0, 5, step, (x, other)))(x, last)[0]
    expected = 1.0
    for _ in range(50):
        expected = np.sin(expected)
    np.testing.assert_allclose(got, np.full(64, expected), rtol=1e-5)


@pytest.mark.usefixtures("_single_kernels")
@pytest.mark.parametrize("typed", [True, False])
def test_operands_that_a_compiler_knows_may_be_in_one_function(typed):
    # XLA computed a key that is made of a number inside the function, which left the operand to
    # nobody, and ended the process.
    bits = lambda key, i: jax.random.bits(jax.random.fold_in(key, i), (), "uint32")

    def one(x):
        key = jax.random.key(7) if typed else jax.random.PRNGKey(7)
        places = lax.iota(np.uint32, 64)

        def run(x, key, places):
            return [lax.fori_loop(0, 3, lambda i, x: x + bits(key, i) * places, x)]

        return _compat.single_kernel(run, [jax.typeof(x)], [x, key, places])[0]

    x, key = jnp.arange(64, dtype=jnp.uint32), jax.random.key(7)
    drawn = sum(int(bits(key, i)) for i in range(3))
    expected = [i * (1 + drawn) % 2**32 for i in range(64)]
    np.testing.assert_array_equal(jax.jit(one)(x), expected)


def test_whether_a_compiler_divides_a_program():
    seen = []
    primitive = jex_core.Primitive("seen")
    primitive.def_abstract_eval(lambda x: x)

    def lower(ctx, x):
        seen.append(_compat.is_divided(ctx))
        return [x]

    mlir.register_lowering(primitive, lower)
    mesh = Mesh(np.asarray(jax.devices()[:2]), "d")
    sharded = jax.ShapeDtypeStruct((4,), "float32", sharding=NamedSharding(mesh, P("d")))
    jax.jit(primitive.bind).lower(X)
    jax.jit(primitive.bind).lower(sharded)
    jax.jit(jax.shard_map(primitive.bind, mesh=mesh, in_specs=P("d"), out_specs=P("d"))).lower(
        sharded
    )
    assert seen == [False, True, False]


def test_what_a_staged_program_depends_on():
    here = _compat.trace_context()
    assert here == _compat.trace_context()
    assert hash(here) == hash(_compat.trace_context())
    wide = jax.config.jax_enable_x64
    for other in (
        jax.enable_x64(not wide),
        jax.default_matmul_precision("highest"),
        jax.default_device(jax.devices()[1]),
    ):
        with other:
            assert _compat.trace_context() != here


def test_calls_that_would_be_inlined_can_be_kept():
    # A bool; since 0.12, by which True is inlined later, one of several words.
    called = jax.jit(jnp.sin, inline=getattr(getattr(jax, "Inline", None), "JAX_EARLY", True))
    inlined = lambda x: called(x)
    names = lambda fun: [eqn.primitive.name for eqn in jax.make_jaxpr(fun)(1.0).eqns]
    assert names(inlined) == ["sin"]
    assert names(_compat.keeping_calls(inlined)) == ["jit"]
    assert names(_compat.keeping_calls(jax.grad(inlined))) != names(jax.grad(inlined))


def test_what_is_differentiated_around_a_program_is_computed_at_once():
    """`process_primitive` and its like get operands last, and leave the staged program alone."""

    def run(w, stays):
        f = _compat.known_at_once(lambda x: [jax.nn.relu(w) * 2 + x], lambda *_: stays)
        programs.append(_compat.stage(f, [jax.typeof(w)]))
        return w

    programs = []
    jax.grad(run)(1.0, False)
    assert [eqn.primitive.name for eqn in programs[0].eqns] == ["add"]
    jax.grad(run)(1.0, True)
    assert "mul" in [eqn.primitive.name for eqn in programs[1].eqns]
