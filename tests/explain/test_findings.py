"""Each kind of finding: a program that has it, one that does not, and what following it does."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec as P

import batchax as bx
from batchax.explain import measure
from batchax.explain.account import Timing
from batchax.explain.explain import explain
from batchax.explain.findings.batch import chunk_sizes
from batchax.explain.findings.operations import FindingContext
from batchax.kernel.recording import Recorder

from support.forced import FORCED


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, np.int32)


def found(fun, *args, in_axes: Any = 0, out_axes: Any = 0, compile=False, **options):
    return explain(fun, in_axes, out_axes, compile=compile, **options)(*args).findings


def kinds(findings):
    return [finding.kind for finding in findings]


# --- programs ----------------------------------------------------------------------------------


def steps(x):
    for _ in range(20):
        x = jnp.tanh(x @ jnp.outer(x, x))
    return x


def expensive_branch(x, p):
    return lax.cond(p, steps, lambda x: x, x)


def cheap_branch(x, p):
    return lax.cond(p, jnp.sin, lambda x: x, x)


def loop(x, w):
    return lax.while_loop(lambda c: c.sum() < 10, lambda c: jnp.tanh(w @ c) + c, x)


def loop_on_a_mesh(x, w):
    mesh = jax.make_mesh((2,), ("d",), (jax.sharding.AxisType.Auto,))
    return jax.shard_map(loop, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))(x, w)


@bx.custom_vmap
def for_all_lanes(x):
    return jnp.tanh(jnp.outer(x, x)) @ x + x


@for_all_lanes.def_vmap
def _(axis_size, in_batched, x):
    assert axis_size in (B, 10)
    return jax.vmap(for_all_lanes.fun)(x), True


def loop_of_a_rule(x):
    return lax.while_loop(lambda c: c.sum() < 10, for_all_lanes, x)


def counted_loop(x, n):
    return lax.fori_loop(0, n, lambda _, x: jnp.sin(x), x)


def loop_in_one_left(x, n):
    """A loop whose lanes leave it, with one in a branch inside, which they do not leave."""
    settle = lambda x: lax.while_loop(lambda x: x.sum() > 1, lambda x: jnp.sin(x) * 0.9, x)
    step = lambda i, x: lax.cond(i % 3 == 0, settle, jnp.cos, x)
    return lax.fori_loop(0, n, step, x)


def bounded(x):
    return bx.bounded_while(lambda c: c.sum() < 3, lambda c: jnp.sin(c) + 1, x, max_steps=20)


def sequential(method):
    def fun(x):
        type = jax.ShapeDtypeStruct((), np.float32)
        return jax.pure_callback(np.sin, type, x, vmap_method=method)

    return fun


def branch_with_effect(x):
    def call(x):
        return io_callback(lambda v: v, jax.ShapeDtypeStruct((), np.float32), x)

    return lax.cond(x > 0, call, lambda x: x, x)


def primitive(name: str) -> Any:
    new = Primitive(name)
    new.def_abstract_eval(lambda x: x)
    mlir.register_lowering(new, mlir.lower_fun(lambda x: x + 1, multiple_results=False))
    return new


ruleless_p = primitive("ruleless")
jax_only_p = primitive("jax_only")
batching.defvectorized(jax_only_p)


def window(table, i):
    return lax.dynamic_slice(table, (i,), (4,))


def write(table, i, x):
    return lax.dynamic_update_slice(table, x, (i,))


in_carry = lambda x, y: lax.fori_loop(0, 5, lambda _, c: (jnp.tanh(c[0]), c[1] + c[0]), (x, y))[1]
wide = lambda x: jnp.sort(jnp.outer(x, x), axis=0).sum()
tiled = lambda x: jnp.outer(x, x)


B = 1000
bool_ = functools.partial(jax.ShapeDtypeStruct, dtype=np.bool_)

# kind: (programs that have the finding, programs that do not), each a call of `found`.
TABLE = {
    "branch runs for all lanes": (
        [lambda: found(expensive_branch, f32(B, 32), bool_((B,)))],
        [
            lambda: found(cheap_branch, f32(B, 32), bool_((B,))),
            lambda: found(expensive_branch, f32(B, 32), bool_(()), in_axes=(0, None)),
            lambda: found(expensive_branch, f32(B, 32), bool_((B,)), divergence="compact"),
        ],
    ),
    "loop waits for its slowest lane": (
        [
            lambda: found(loop, f32(B, 32), f32(32, 32), in_axes=(0, None)),
            lambda: found(counted_loop, f32(B, 32), i32(B)),
            lambda: found(bounded, f32(B, 32)),
            lambda: found(loop_on_a_mesh, f32(B, 64), f32(32, 32), in_axes=(0, None)),
            lambda: found(loop_of_a_rule, f32(B, 32)),
        ],
        [
            lambda: found(counted_loop, f32(B, 32), i32(), in_axes=(0, None)),
            lambda: found(counted_loop, f32(2, 3), i32(2)),
            lambda: found(bounded, f32(B, 32), divergence="compact"),
            lambda: found(loop_in_one_left, f32(B, 3), i32(B), divergence=FORCED),
        ],
    ),
    "sequentially": (
        [
            lambda: found(ruleless_p.bind, f32(8)),
            lambda: found(sequential("sequential"), f32(8)),
            lambda: found(branch_with_effect, f32(8)),
            lambda: found(bx.sequential_vmap(jnp.sin), f32(8)),
        ],
        [lambda: found(sequential("broadcast_all"), f32(8)), lambda: found(jnp.sin, f32(8))],
    ),
    "fallback to the rule of JAX": (
        [lambda: found(jax_only_p.bind, f32(8))],
        [lambda: found(jnp.sin, f32(8))],
    ),
    "gather at places of each lane": (
        [
            lambda: found(window, f32(50), i32(B), in_axes=(None, 0)),
            lambda: found(lambda t, i: t[i], f32(B, 9), i32(B, 5)),
        ],
        [
            lambda: found(window, f32(B, 50), i32(), in_axes=(0, None)),
            lambda: found(lambda t, i: t[i], f32(B, 9), i32(5), in_axes=(0, None)),
        ],
    ),
    "scatter at places of each lane": (
        [
            lambda: found(write, f32(B, 50), i32(B), f32(B, 4)),
            lambda: found(lambda t, i, x: t.at[i].add(x), f32(B, 9), i32(B, 5), f32(B, 5)),
        ],
        [lambda: found(write, f32(B, 50), i32(), f32(B, 4), in_axes=(0, None, 0))],
    ),
    "factorisation of small matrices": (
        [lambda: found(jnp.linalg.svd, f32(B, 3, 5), small_matrices="library")],
        [
            lambda: found(jnp.linalg.cholesky, f32(20, 40, 40)),
            lambda: found(jnp.linalg.cholesky, f32(10 * B, 4, 4)),
            lambda: found(
                lambda a, x: jnp.linalg.cholesky(a) @ x, f32(4, 4), f32(B, 4), in_axes=(None, 0)
            ),
        ],
    ),
    "copied for each lane": (
        [
            lambda: found(in_carry, f32(B, 40), f32(40), in_axes=(0, None), compile=True),
            lambda: found(lambda x, y: (x, y), f32(B, 4), f32(40), in_axes=(0, None), compile=True),
        ],
        [
            lambda: found(
                lambda x, y: (jnp.sin(x) * y, y),
                f32(B, 40),
                f32(40),
                in_axes=(0, None),
                out_axes=(0, None),
                compile=True,
            ),
        ],
    ),
    "transposed array": (
        [
            lambda: found(lambda x: jnp.tanh(x) @ x.T, f32(10, 20, B), in_axes=2, compile=True),
            lambda: found(lambda x: jnp.sort(x), f32(B, 10, 20), out_axes=2, compile=True),
        ],
        [
            lambda: found(lambda x: jnp.tanh(x) @ x.T, f32(B, 10, 20), compile=True),
            lambda: found(lambda x: 2 * x, f32(10, 20, B), in_axes=2, out_axes=2, compile=True),
        ],
    ),
    "chunk size far from the best": (
        [
            lambda: found(jnp.tanh, f32(B, 64), batch_size=2),
            lambda: found(wide, f32(4096, 64), batch_size=2048, compile=True),
        ],
        [
            lambda: found(jnp.tanh, f32(B, 64), batch_size=500),
            lambda: found(wide, f32(4096, 64), batch_size=128, compile=True),
        ],
    ),
    "temporaries fill the memory": (
        [lambda: found(wide, f32(1 << 27, 64), compile=True)],
        [
            lambda: found(wide, f32(8, 64), compile=True),
            lambda: found(wide, f32(1 << 27, 64), batch_size=64, compile=True),
        ],
    ),
    "outputs fill the memory": (
        [
            lambda: found(tiled, f32(1 << 25, 64), compile=True),
            lambda: found(
                lambda x: (tiled(x), x),
                f32(1 << 25, 64),
                batch_size=64,
                out_axes=(0, bx.Reduce("mean")),
                compile=True,
            ),
        ],
        [
            lambda: found(tiled, f32(8, 64), batch_size=2, compile=True),
            lambda: found(
                tiled, f32(1 << 25, 64), batch_size=64, out_axes=bx.Reduce("mean"), compile=True
            ),
        ],
    ),
}


def _cases(which):
    return [
        pytest.param(kind, program, id=f"{kind.replace(' ', '_')}-{i}")
        for kind, both in TABLE.items()
        for i, program in enumerate(both[which])
    ]


@pytest.mark.parametrize(("kind", "program"), _cases(0))
def test_is_found(kind, program):
    assert kind in kinds(program())


@pytest.mark.parametrize(("kind", "program"), _cases(1))
def test_is_not_found(kind, program):
    assert kind not in kinds(program())


def test_what_costs_little_beside_the_rest_is_left_out():
    def expensive(x, a):
        return lax.fori_loop(0, 10_000, lambda _, x: steps(x), x), jnp.linalg.cholesky(a)

    assert found(expensive, f32(B, 32), f32(B, 2, 2)) == ()


def test_what_is_said_in_the_same_words_is_said_once():
    def twice(a):
        return jnp.linalg.cholesky(a), jnp.linalg.cholesky(a + 1)

    (finding,) = found(twice, f32(B, 4, 4), small_matrices="library")
    (once,) = found(jnp.linalg.cholesky, f32(B, 4, 4), small_matrices="library")
    assert "The same holds for 1 equation more: " in finding.message
    assert finding.cost == 2 * once.cost


def test_following_a_remedy_makes_the_finding_vanish():
    (finding,) = found(loop, f32(B, 32), f32(32, 32), in_axes=(0, None))
    assert 'divergence="compact"' in finding.remedy
    options: dict[str, Any] = {"in_axes": (0, None), "divergence": "compact"}
    assert not found(loop, f32(B, 32), f32(32, 32), **options)

    (finding,) = found(expensive_branch, f32(B, 32), bool_((B,)))
    assert 'divergence="compact"' in finding.remedy
    options = {"divergence": "compact"}
    assert not found(expensive_branch, f32(B, 32), bool_((B,)), **options)

    (finding,) = found(jnp.tanh, f32(B, 64), batch_size=2)
    size = int(finding.remedy.split("batch_size=")[1].split(".")[0])
    assert not found(jnp.tanh, f32(B, 64), batch_size=size)

    (finding,) = found(wide, f32(4096, 64), batch_size=2048, compile=True)
    size = int(finding.remedy.split("batch_size=")[1].split(":")[0])
    assert not found(wide, f32(4096, 64), batch_size=size, compile=True)

    (finding,) = found(jnp.sort, f32(B, 10, 20), out_axes=2, compile=True)
    assert f"781.2 KiB are written again, as f32[10,20,{B}]" in finding.message
    assert "out_axes=0" in finding.remedy
    assert not found(jnp.sort, f32(B, 10, 20), out_axes=0, compile=True)

    (finding,) = found(lambda x: {"b": jnp.sort(x)}, f32(B, 10, 20), out_axes=2, compile=True)
    assert "of out['b'] at 2, and it is computed as f32" in finding.message


def test_no_advice_that_does_not_help():
    # Cheap for each lane: lanes would be moved for more than it takes to compute them.
    (finding,) = found(
        lambda x, p, w: lax.cond(p, lambda x: jnp.tanh(w @ x), lambda x: x, x),
        f32(4096, 64),
        bool_((4096,)),
        f32(64, 64),
        in_axes=(0, 0, None),
    )
    assert finding.kind == "branch runs for all lanes"
    assert "compact" not in finding.remedy

    # A collective inside: lanes must be together for it.
    def meets(x, p):
        return lax.cond(p, lambda x: steps(x) + lax.psum(x, "lanes"), lambda x: x, x)

    (finding,) = found(meets, f32(B, 32), bool_((B,)), axis_name="lanes")
    assert "Move the collective out" in finding.remedy


def found_in_double(fun, *shapes):
    with jax.enable_x64(True):
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float64) for shape in shapes]
        return found(fun, *arrays)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda: found(ruleless_p.bind, f32(8)), "register_rule(ruleless_p)"),
        (lambda: found(sequential("sequential"), f32(8)), "vmap_method"),
        (lambda: found(branch_with_effect, f32(8)), "Move the call out"),
        (lambda: found(bx.sequential_vmap(jnp.sin), f32(8)), "sequential_vmap"),
        (lambda: found_in_double(jnp.convolve, (8, 600), (8, 300)), "float32 run at once"),
    ],
)
def test_why_lanes_run_one_after_another(program, words):
    (finding,) = program()
    assert "8 lanes one after another" in finding.message
    assert words in finding.remedy


@pytest.mark.parametrize("lanes", [0, 1])
def test_few_lanes(lanes):
    explanation = explain(lambda x: jnp.sort(loop(x, jnp.eye(3, dtype=x.dtype))))(f32(lanes, 3))
    assert explanation.lanes == lanes
    assert "sort" in str(explanation)


def measured(*timings):
    """What is found where calls took these times: (lanes at a time, fastest, median, slowest)."""
    shown = [Timing(size, median, (low, high), 1 << 20) for size, low, median, high in timings]
    options = {"batch_size": shown[0].batch_size}
    draft = FindingContext([], {}, {}, Recorder(), options, 1000, 1000, timings=shown)
    return [(f.message, f.remedy) for f in chunk_sizes(draft)]


def test_what_was_measured_says_which_chunks_are_best():
    loop, all_at_once = ("loop", 1e-6, 1e-6, 1e-6), (None, 0.9e-3, 1e-3, 1.1e-3)
    slow, fast = (4, 3.8e-3, 4e-3, 4.2e-3), (64, 0.45e-3, 0.5e-3, 0.55e-3)
    (found,) = measured(slow, loop, all_at_once, fast)
    assert found == (
        "batch_size=4 took 4 ms, 64 lanes at a time 500 us, with 1 MiB of memory.",
        "Pass batch_size=64.",
    )
    (found,) = measured(slow, loop, all_at_once)
    assert found[1] == "Remove batch_size."
    (found,) = measured(all_at_once, loop, slow, fast)
    assert found[0].startswith("All lanes at once took 1 ms, 64 lanes at a time 500 us")
    assert not measured(fast, loop, all_at_once, slow)
    near = (16, 0.8e-3, 0.85e-3, 0.95e-3)
    assert not measured(all_at_once, loop, near, slow)
    assert not measured(all_at_once, loop)


def followed(monkeypatch, seconds, fun, in_axes, *args, **options):
    """What is explained where a call takes so long by its way: what was advised, or the size."""
    tried = []

    def times(begun, end):
        ways = [way for way, _ in begun]
        tried.extend(way.advice for way in ways if way.advice)
        keys = ["now", *(measure.show_options(w.advice) or w.batch_size for w in ways[1:])]
        known = [seconds.get(key, 1.0) for key in keys]
        return tuple(
            Timing(w.batch_size, s, (0.9 * s, 1.1 * s), w.peak, w.compiling, w.advice)
            for w, s in zip(ways, known, strict=True)
        )

    monkeypatch.setattr(measure, "_times", times)
    monkeypatch.setattr(measure, "_sizes", lambda lanes: [])
    return explain(fun, in_axes, measure=True, **options)(*args), tried


COMPACT = {"divergence": "compact"}


@pytest.mark.parametrize("pays", [True, False])
def test_advice_is_measured_and_given_where_it_pays(pays, monkeypatch):
    args = jnp.ones((4096, 64)), jnp.eye(64)
    seconds = {"now": 4.0, "divergence='compact'": 2.0 if pays else 3.6}
    explanation, tried = followed(monkeypatch, seconds, loop, (0, None), *args)
    assert tried == [COMPACT]
    (timing,) = [t for t in explanation.timings if t.advice]
    assert timing.compiling > 0
    found = [f for f in explanation.findings if f.kind == "loop waits for its slowest lane"]
    if pays:
        assert found[0].message.endswith(" It took 4 s, with divergence='compact' 2 s.")
        assert found[0].remedy.startswith('Pass divergence="compact"')
    else:
        assert not found
    for shown in (str(explanation), explanation._repr_html_()):
        assert ("divergence='compact'" if "<" not in shown else "divergence=") in shown
    assert "compiled in" in str(explanation)


def test_few_lanes_are_not_put_into_chunks_of_one():
    (advice,) = found(loop_of_a_rule, f32(10, 32))
    assert 'divergence="serial"' in advice.remedy
    assert "batch_size" not in advice.remedy


def test_who_turned_it_off_is_told_of_the_default_where_that_surely_pays():
    expensive = lambda n, x, w: lax.while_loop(
        lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.tanh(w @ c[1])), (0, x)
    )[1]
    args = i32(B), f32(B, 512), f32(512, 512)
    options = {"in_axes": (0, 0, None), "divergence": "predicate"}
    (finding,) = found(expensive, *args, **options)
    assert finding.remedy.startswith('Remove divergence="predicate"')
    assert finding.advice == {"divergence": "auto"}


@pytest.mark.parametrize("pays", [True, False])
def test_buckets_that_are_advised_are_measured(pays, monkeypatch):
    rows = bx.Ragged(np.ones((96, 64), np.float32), np.array([3, 1, 40, 2, 5, 2, 39, 4], np.int32))
    seconds = {"now": 4.0, "buckets=2": 1.0 if pays else 8.0}
    f = lambda row: jnp.cumsum(jnp.tanh(row), axis=0)
    explanation, tried = followed(monkeypatch, seconds, f, 0, rows)
    assert tried == [{"buckets": 2}]
    (found,) = [f for f in explanation.findings if f.kind == "ragged rows run padded"]
    assert found.message.endswith(f"with buckets=2 {1 if pays else 8} s.")
    assert ("buckets" in found.remedy) == pays


def test_advice_there_is_no_time_for_is_given_as_it_was():
    args = jnp.ones((4096, 64)), jnp.eye(64)
    explanation = explain(loop, (0, None), measure=True, time_limit=0)(*args)
    assert "divergence='compact'" in explanation.unmeasured
    assert "divergence='compact'" in str(explanation)
    (found,) = [f for f in explanation.findings if f.advice]
    assert found.advice == COMPACT
    assert "It took" not in found.message
