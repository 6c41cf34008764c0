"""`vmap(mesh=)` on several processes: each gives what one device gives in one process.

This file is also what those processes run: they compare with one device of their own, and say which
cases failed.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx
from batchax import _compat
from batchax.execution import eager, memory
from batchax.execution.devices import meetings

from support.oracle import example, same
from support.ports import reserved_port

TESTS = Path(__file__).parents[1]
SECONDS = 900  # after which processes are stopped, whatever they wait for
CLOSE = dict(rtol=1e-5, atol=1e-5)
CASES = {}
# Nothing of JAX is computed before processes have met.
W = np.sin(np.arange(10.0)).reshape(5, 2).astype(jax.dtypes.canonicalize_dtype(float))


def case(fun):
    CASES[fun.__name__] = fun
    return fun


def rows_of(*counts):
    """The rows of all processes, and those of this one."""
    x = np.asarray(example((sum(counts), 5)))
    first = sum(counts[: jax.process_index()])
    return x, x[first : first + counts[jax.process_index()]]


def uneven():
    """Numbers of rows of each process: one has many, one has none."""
    return (7, 2) if jax.process_count() == 2 else (3, 0, 4)


def layouts():
    return [(3, 3), (1, 6), (0, 5), (4, 0)] if jax.process_count() == 2 else [(2, 0, 5), (0, 0, 3)]


def agree(got, expected, tolerance=None):
    """The same values, to the bit if no tolerance is given."""
    got, expected = bx.gather(got), jax.device_get(expected)
    if tolerance is None:
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    else:
        same(jax.tree.map(jnp.asarray, got), jax.tree.map(jnp.asarray, expected), tolerance)


def elementwise(x):
    return jnp.where(x > 0, x * 3 + 1, x**2), jnp.abs(x).max()


def normalised(x):
    centred = x - lax.pmean(x, "i")
    return centred / jnp.sqrt(lax.pmean(centred**2, "i") + 1e-3)


TOGETHER = {
    "statistics": normalised,
    "index and size": lambda x: x * lax.axis_index("i") / lax.axis_size("i"),
    "all lanes": lambda x: lax.all_gather(x, "i")[:, 0] * x[0],
    "a neighbour": lambda x: lax.ppermute(x, "i", [(0, 2), (2, 0), (1, 1)]),
    "extremes": lambda x: lax.pmax(x, "i") - lax.pmin(x, "i"),
}


@case
def whole_batches_of_numpy():
    for lanes in (8, 7, 2):
        x = np.asarray(example((lanes, 5)))
        for batch_size in (None, 1):
            batched = bx.vmap(elementwise, mesh="all", batch_size=batch_size)
            agree(batched(x), bx.vmap(elementwise)(x))
            agree(jax.jit(batched)(x), bx.vmap(elementwise)(x))
            agree(batched(jnp.asarray(x)), bx.vmap(elementwise)(x))
    agree(bx.vmap(lambda x: x @ W, 1, 1, mesh="all")(x.T), (x @ W).T, CLOSE)


@case
def only_rows_of_the_process_are_read():
    class Watched(np.ndarray):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    read, each = [], len(jax.devices())
    x = np.asarray(example((each, 5)))
    agree(bx.vmap(elementwise, mesh="all")(x.view(Watched)), bx.vmap(elementwise)(x))
    rows = {i for index in read for i in range(each)[index[0]]}
    assert rows == {i for i, d in enumerate(jax.devices()) if d in jax.local_devices()}


@case
def lanes_of_results_are_where_they_were_computed():
    x = np.asarray(example((2 * len(jax.devices()), 5)))
    out, _ = bx.vmap(elementwise, mesh="all")(x)
    assert [s.data.shape for s in out.addressable_shards] == [(2, 5)] * 2
    again, _ = bx.vmap(elementwise, mesh="all")(out)  # an array of all processes, as it is
    agree(again, bx.vmap(elementwise)(bx.vmap(elementwise)(x)[0])[0])


@case
def what_lanes_share():
    x = np.asarray(example((7, 5)))
    everywhere = jax.device_put(W, NamedSharding(Mesh(np.array(jax.devices()), "d"), P()))
    for w in (W, jnp.asarray(W), everywhere):
        closed = bx.vmap(lambda x: jnp.tanh(x @ w), mesh="all")
        passed = bx.vmap(lambda w, x: jnp.tanh(x @ w), (None, 0), mesh="all")
        agree(closed(x), jnp.tanh(x @ W), CLOSE)
        agree(passed(w, x), jnp.tanh(x @ W), CLOSE)
        agree(jax.jit(passed)(w, x), jnp.tanh(x @ W), CLOSE)
        if w is not everywhere:
            agree(jax.jit(closed)(x), jnp.tanh(x @ W), CLOSE)
    y = jnp.asarray(x)
    agree(jax.jit(lambda w: bx.vmap(lambda x: x @ w, mesh="all")(y))(W), x @ W, CLOSE)


@case
def reductions():
    for kind in ("sum", "mean", "max", "min", "prod", "var", "argmax"):
        for rows in ((2,) * jax.process_count(), uneven()):
            x, own = rows_of(*rows)
            reduced = functools.partial(bx.vmap, lambda x: jnp.tanh(x @ W), 0, bx.Reduce(kind))
            agree(reduced(mesh="all")(x), reduced()(x), CLOSE)
            agree(reduced(mesh="all", batch_size=2)(bx.local(own)), reduced()(x), CLOSE)


@case
def local_rows():
    for rows in (uneven(), *layouts()):
        x, own = rows_of(*rows)
        batched = bx.vmap(elementwise, mesh="all")
        agree(batched(bx.local(own)), bx.vmap(elementwise)(x))
        agree(batched(bx.local(jnp.asarray(own))), bx.vmap(elementwise)(x))
        nested = bx.vmap(lambda t: t["a"] + t["b"][0], ({"a": 1, "b": (0,)},), mesh="all")
        agree(nested(bx.local({"a": own.T, "b": (own,)})), x + x)
        beside = lambda x, y, i: x * y + i
        given = x, jnp.arange(len(x))
        got = bx.vmap(beside, mesh="all")(bx.local(own), *given)
        agree(got, bx.vmap(beside)(x, *given))


@case
def lanes_that_meet():
    x, own = rows_of(*uneven())
    for fun in TOGETHER.values():
        expected = bx.vmap(fun, axis_name="i")(x)
        for batch_size in (None, 2):
            batched = bx.vmap(fun, axis_name="i", mesh="all", batch_size=batch_size)
            agree(jax.jit(batched)(x), expected, CLOSE)
            agree(batched(bx.local(own)), expected, CLOSE)


@case
def the_order_of_lanes_is_that_of_processes():
    x, own = rows_of(*uneven())
    devices = np.array(jax.devices())[::-1]
    index = lambda x: (x, lax.axis_index("i"))
    for mesh in (Mesh(devices, "d"), Mesh(np.roll(devices, 1), "d")):
        batched = bx.vmap(index, mesh=mesh, axis_name="i")
        agree(batched(bx.local(own)), (x, np.arange(len(x), dtype=np.int32)))


@case
def a_mesh_of_two_axes():
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("hosts", "model"))
    x, own = rows_of(*uneven())
    w = jax.device_put(W, NamedSharding(mesh, P(None, "model")))
    batched = bx.vmap(lambda w, x: jnp.tanh(x @ w), (None, 0), mesh=(mesh, "hosts"))
    agree(batched(w, x), jnp.tanh(x @ W), CLOSE)
    agree(batched(w, bx.local(own)), jnp.tanh(x @ W), CLOSE)
    with pytest.raises(bx.UnsupportedError, match=r"axes besides 'model' stay within a process"):
        bx.vmap(elementwise, mesh=(mesh, "model"))(bx.local(own))


@case
def random_streams():
    draw = lambda key, x: (jax.random.bits(key, (3,)), x * 2)
    key = jax.random.key(3)
    x, own = rows_of(*uneven())
    expected = bx.vmap(draw, (bx.split_key, 0))(key, x)
    for rows in (x, bx.local(own)):
        agree(bx.vmap(draw, (bx.split_key, 0), mesh="all")(key, rows), expected)
    keys = jax.random.split(key, len(x))
    first = sum(uneven()[: jax.process_index()])
    for rows, k in ((x, keys), (bx.local(own), bx.local(keys[first : first + len(own)]))):
        agree(bx.vmap(draw, mesh="all")(k, rows), bx.vmap(draw)(keys, x))
    folded = bx.vmap(lambda k: jax.random.fold_in(k, 1))
    got = bx.vmap(lambda k: jax.random.fold_in(k, 1), mesh="all")(keys)
    agree(jax.random.key_data(bx.gather(got)), jax.random.key_data(folded(keys)))


@case
def gradients():
    def one(w, x):
        return jnp.tanh(x @ w).sum() + lax.pmean(x.sum(), "i")

    x, own = rows_of(*uneven())
    mean = functools.partial(bx.vmap, one, (None, 0), bx.Reduce("mean"), "i")
    expected = jax.value_and_grad(mean())(W, x)
    for options in ({}, {"batch_size": 2}):
        on_all = jax.value_and_grad(mean(mesh="all", **options))
        agree(jax.jit(on_all)(W, x), expected, CLOSE)
        agree(on_all(jnp.asarray(W), x), expected, CLOSE)
        agree(on_all(jnp.asarray(W), bx.local(own)), expected, CLOSE)
    each = functools.partial(bx.vmap, jax.grad(one), (None, 0), bx.Reduce("mean"), "i")
    agree(each(mesh="all")(W, bx.local(own)), each()(W, x), CLOSE)


@case
def the_chunk_size_is_the_least_that_fits():
    # Processes 1 and 2 have room for fewer lanes than process 0.
    room = memory.free_memory
    memory.free_memory = lambda: 400_000 // (1 + jax.process_index())
    try:
        x = np.asarray(example((600, 5)))
        fun = lambda x: jnp.sort(jnp.outer(jnp.arange(50.0), x).ravel())[:5]
        with_auto = bx.vmap(fun, mesh="all", batch_size="auto")
        agree(with_auto(x), bx.vmap(fun)(x))
        agree(jax.jit(with_auto)(x), bx.vmap(fun)(x))
        chosen = [choice.batch_size for choice in bx.batch_size_choices()]
        limits = {choice.limit for choice in bx.batch_size_choices()}
        assert limits == {400_000 // jax.process_count()}
        assert chosen
        assert set(map(tuple, meetings.of_this_process().meet("", "", chosen))) == {tuple(chosen)}
    finally:
        memory.free_memory = room


@case
def where_memory_runs_out_chunks_are_not_halved():
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), "d"), P())
    x = jax.device_put(example((4, 5)), everywhere)

    def out_of_memory(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: not on this process")

    real, eager.jitted = eager.jitted, out_of_memory
    try:
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            bx.vmap(elementwise, batch_size=2)(x)
        assert "2 lanes at a time are not halved" in caught.value.__notes__[0]
    finally:
        eager.jitted = real


@case
def gathering():
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("a", "b"))
    x = np.asarray(example((12, 6, 5)))
    keys = jax.random.split(jax.random.key(0), 12)
    for spec in (P("a"), P("b"), P(("a", "b")), P(("b", "a")), P("a", "b"), P(None, "b"), P()):
        spread = jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), x.__getitem__)
        got = bx.gather({"x": spread, "n": 3, "own": jnp.ones(2)})
        assert isinstance(got["x"], np.ndarray)
        agree(got, {"x": x, "n": 3, "own": np.ones(2, np.float32)})
        low = spread.astype(jnp.bfloat16)
        agree(bx.gather(low), x.astype(jnp.bfloat16))
    where = NamedSharding(mesh, P("a"))
    spread = jax.make_array_from_callback(keys.shape, where, keys.__getitem__)
    agree(jax.random.key_data(bx.gather(spread)), jax.random.key_data(keys))
    ragged = bx.Ragged(jnp.arange(6.0), jnp.array([2, 4]))
    agree(bx.gather(ragged).data, np.arange(6.0, dtype=np.float32))
    last = jax.process_count() - 1
    found = bx.gather((spread, spread), to=last)
    assert (found is None) == (jax.process_index() != last)
    for wrong, error in ((last + 1, bx.OptionError), (-1, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="gather: to"):
            bx.gather(spread, to=wrong)


@case
def a_mesh_of_one_process_is_its_own():
    x, own = rows_of(*uneven())
    mesh = Mesh(np.array(jax.local_devices()), "d")
    if jax.process_index() == 0:  # nobody waits for anybody
        batched = bx.vmap(elementwise, mesh=mesh, batch_size="auto", memory_limit="1MB")
        agree(batched(x), bx.vmap(elementwise)(x))
        agree(batched(bx.local(own)), bx.vmap(elementwise)(own))


@case
def what_is_wrong_is_said_on_all_processes():
    x, own = rows_of(*uneven())
    batched = bx.vmap(lambda x, y: x + y, mesh="all")
    wrong = np.zeros((len(own) + (jax.process_index() == 0), 5), np.float32)
    with pytest.raises(bx.AxisError, match=r"on process 0 they have several.*(.*\n)*.*y: "):
        batched(bx.local(own), bx.local(wrong))
    wider = np.zeros((len(own), 5 + jax.process_index()), np.float32)
    with pytest.raises(
        bx.ProcessesError, match=r"same types(.*\n)*.*args\[1\]: float32\[rows, [567]\]"
    ):
        batched(bx.local(own), bx.local(wider))
    some = Mesh(
        np.array(jax.devices())[[2, 4]]
        if jax.process_count() == 3
        else np.array(jax.devices())[[2 - 2 * jax.process_index()]],
        "d",
    )
    with pytest.raises(bx.UnsupportedError, match="and this is process"):
        bx.vmap(elementwise, mesh=some)(x)
    with pytest.raises(bx.AxisError, match="mapped axes must have one size"):
        batched(bx.local(own), x[1:])
    spread, _ = bx.vmap(elementwise, mesh="all")(np.zeros((2 * len(jax.devices()), 5)))
    with pytest.raises(bx.UnsupportedError, match="of several processes already"):
        bx.local(spread)


@case
def a_call_that_not_all_processes_make():
    last = jax.process_count() - 1
    x = np.asarray(example((2 * len(jax.devices()), 5)))
    one, other = bx.vmap(jnp.sin, mesh="all"), bx.vmap(jnp.cos, mesh="all")
    with pytest.raises(bx.ProcessesError, match=r"vmap of \w+: all (.*\n)*.*vmap of (sin|cos)"):
        (one if jax.process_index() else other)(x)
    with pytest.raises(bx.ProcessesError, match=r"batch_size: \d\nand on process \d\n  batch_size"):
        bx.vmap(jnp.sin, mesh="all", batch_size=1 + jax.process_index())(x)
    with pytest.raises(bx.ProcessesError, match=r"args\[0\]: float\d\d\[2, 5\]"):
        one(x if jax.process_index() else x[:2])
    spread = one(x)
    with pytest.raises(bx.ProcessesError, match="gather: all"):
        bx.gather(spread, to=jax.process_index())
    patience, meetings.TIMEOUT = meetings.TIMEOUT, 2.0
    store = _compat.shared_store()
    try:
        if jax.process_index() == last:  # comes when the others have gone
            for other in range(last):
                store.blocking_key_value_get(f"gone/{other}", 1000 * SECONDS)
        with pytest.raises(bx.ProcessesError, match=rf"process {last}.* to was gather\."):
            one(x)
        store.key_value_set(f"gone/{jax.process_index()}", "")
    finally:
        meetings.TIMEOUT = patience
    agree(one(x), np.sin(x), CLOSE)


@case
def an_error_on_one_process():
    def fails_on_the_first(x):
        if jax.process_index() == 0:
            raise MemoryError("no room here")
        return x + 1

    x = np.asarray(example((2 * len(jax.devices()), 5)))
    with contextlib.suppress(MemoryError):
        bx.vmap(fails_on_the_first, mesh="all")(x)
    with pytest.raises(bx.ProcessesError, match=r"failed in the call before.*: no room here"):
        bx.vmap(elementwise, mesh="all")(x)
    for _ in range(2):  # alike on all: they may go on
        with pytest.raises(ZeroDivisionError):
            bx.vmap(lambda x: x * (1 / 0), mesh="all")(x)
    agree(bx.vmap(elementwise, mesh="all")(x), bx.vmap(elementwise)(x))


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.nightly)])
def outcomes(request):
    """What failed, by case and process."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=2")
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(paths)}
    env["JAX_PLATFORMS"] = "cpu"
    with reserved_port() as port:
        command = [sys.executable, __file__, str(port), str(request.param)]
        started = [
            subprocess.Popen([*command, str(i)], env=env, stdout=subprocess.PIPE, text=True)
            for i in range(request.param)
        ]
        try:
            until = time.monotonic() + SECONDS
            said = [p.communicate(timeout=max(1, until - time.monotonic()))[0] for p in started]
        finally:
            for process in started:
                process.kill()
                process.communicate()  # else it fails whichever test its remains are found in
    lines = [line for text in said for line in text.splitlines() if line.startswith("{")]
    assert len(lines) == request.param, said
    return [json.loads(line) for line in lines]


@pytest.mark.only_in_whole_runs  # one of them takes as long as all
@pytest.mark.parametrize("name", CASES)
def test_several_processes(name, outcomes):
    for process, failures in enumerate(outcomes):
        if name not in failures:
            pytest.skip(f"process {process} did not come to it")
        assert not failures[name], f"process {process}:\n{failures[name]}"


def test_one_process_is_all_of_them():
    x = example((7, 5))
    batched = bx.vmap(elementwise, mesh="all")
    same(batched(bx.local(x)), bx.vmap(elementwise)(x))
    empty = bx.vmap(jnp.sin, mesh="all")(bx.local(x[:0]))
    assert empty.shape == (0, 5)
    got = bx.gather((batched(x), jax.random.key(0)), to=0)
    assert isinstance(got[0][0], np.ndarray)
    ragged = bx.gather(bx.Ragged.from_rows([jnp.ones(2), jnp.ones(3)]))
    assert isinstance(ragged.data, np.ndarray)


def test_where_local_rows_do_not_belong():
    x = bx.local(example((3, 5)))
    with pytest.raises(bx.ArgumentTypeError, match=r"for x there is no mesh"):
        bx.vmap(jnp.sin)(x)
    with pytest.raises(bx.ArgumentTypeError, match="it was used as an array"):
        bx.vmap(lambda w, x: x @ w, (None, 0), mesh="all")(x, np.ones((4, 3)))
    with pytest.raises(bx.UnsupportedError, match=r"x is batchax.local\(x\), .* of jit"):
        jax.jit(lambda: bx.vmap(jnp.sin, mesh="all")(x))()
    with pytest.raises(bx.UnsupportedError, match=r"local: x\['a'\] is traced"):
        jax.jit(lambda x: bx.local({"a": x}))(jnp.ones(3))
    with pytest.raises(bx.ArgumentTypeError, match=r"local: x\[0\] is of type int"):
        bx.local([3])
    with pytest.raises(bx.ArgumentTypeError, match=r"of type Ragged\..* without local"):
        bx.local(bx.Ragged.from_rows([jnp.ones(2)]))
    with pytest.raises(bx.UnsupportedError, match="gather: an array is traced"):
        jax.jit(bx.gather)(jnp.ones(3))


def run_cases(port, count, index):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    failures = {}
    for name, fun in CASES.items():
        start = time.monotonic()
        try:
            fun()
            failures[name] = ""
        except Exception:
            failures[name] = traceback.format_exc()
            break  # the processes may not be at the same place any more
        finally:
            print(name, round(time.monotonic() - start, 1), file=sys.stderr)
    print(json.dumps(failures), flush=True)


if __name__ == "__main__":
    run_cases(*sys.argv[1:])
