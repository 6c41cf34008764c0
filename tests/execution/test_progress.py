"""`progress=` of vmap, scan and bounded_while: what loops tell while compiled programs run them."""

import builtins
import functools
import io
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import batchax as bx
from batchax import progress as bars
from batchax.execution import progress

from support.oracle import same

X = jnp.linspace(0.1, 0.9, 10)


def one(x):
    return jnp.sin(x) * x


def step(carry, x):
    return jnp.tanh(carry + x), carry * x


def scanned(x, **options):
    carry, ys = bx.scan(step, **options)(x[0], x)
    return carry + ys


def doubled(x, **options):
    return bx.bounded_while(lambda c: c.sum() < 40, lambda c: c * 2.0, x, 9, **options)


# A function of ten numbers, and how many steps it takes of how many.
LOOPS = {
    "chunks": (lambda x, **p: bx.vmap(one, batch_size=3, **p)(x), 4, 4),
    "chunks that keep": (lambda x, **p: bx.vmap(one, batch_size=2, residuals="keep", **p)(x), 5, 5),
    "chunks that fit": (lambda x, **p: bx.vmap(one, batch_size="auto", **p)(x), 1, 1),
    "one chunk": (lambda x, **p: bx.vmap(one, batch_size=20, **p)(x), 1, 1),
    "steps": (scanned, 10, 10),
    "steps from the last": (functools.partial(scanned, reverse=True), 10, 10),
    "steps until": (functools.partial(scanned, until=lambda c: c > 0.7), 4, 10),
    "steps of a while loop": (doubled, 3, 9),
}
WAYS = {
    "jit": (jax.jit, X),
    "jax.vmap": (jax.vmap, jnp.stack([X, X, X])),
    "vmap": (bx.vmap, jnp.stack([X, X, X])),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x,))[0], X),
}


def runs(told):
    """What was told, apart for each run of a loop."""
    found = []
    for done, total in told:
        if not found or done <= found[-1][-1][0]:
            found.append([])
        found[-1].append((done, total))
    return found


def every(done, total):
    return [(n, total) for n in range(1, done + 1)]


@pytest.mark.parametrize("name", LOOPS)
def test_each_step_is_told_once(name):
    fun, steps, total = LOOPS[name]
    told = []
    assert jnp.allclose(fun(X, progress=lambda *a: told.append(a)), fun(X), rtol=1e-6)
    assert told == every(steps, total)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["chunks", "chunks that keep", "steps", "steps of a while loop"])
def test_a_transformed_loop_is_one_loop(name, way):
    (fun, steps, total), (transform, x) = LOOPS[name], WAYS[way]
    told = []
    jax.block_until_ready(transform(functools.partial(fun, progress=lambda *a: told.append(a)))(x))
    first, *others = runs(told)
    assert first == every(steps, total)
    # In forward mode the derivative of chunks is another loop, and so is that of a while loop.
    assert all(run[-1][0] == run[-1][1] for run in others)
    assert len(others) <= (way == "jvp")


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.each_commit(4)
def test_going_back_over_a_loop_is_told_too(name):
    fun, steps, total = LOOPS[name]
    told = []
    loss = lambda x: fun(x, progress=lambda *a: told.append(a)).sum()
    jax.block_until_ready(jax.value_and_grad(loss)(X))
    ahead, *back = runs(told)
    assert ahead == every(steps, total)
    if total > 1:
        assert [run[-1] for run in back] == [(steps, steps)]
    del told[:]
    jax.block_until_ready(jax.jit(jax.grad(jax.checkpoint(loss)))(X))
    assert {run[-1] for run in runs(told)} <= {(steps, total), (steps, steps)}


@pytest.mark.parametrize("name", LOOPS)
def test_the_program_is_the_same_without(name):
    fun, *_ = LOOPS[name]
    off, none = (str(jax.make_jaxpr(f)(X)) for f in (functools.partial(fun, progress=False), fun))
    on = str(jax.make_jaxpr(functools.partial(fun, progress=print))(X))
    assert off == none != on


@pytest.mark.parametrize("length", [1000, 257, 101])
@pytest.mark.parametrize("unroll", [1, 3])
@pytest.mark.each_commit(3)
def test_a_long_loop_tells_about_fifty_times(length, unroll):
    told = []
    scan = bx.scan(step, unroll=unroll, progress=lambda *a: told.append(a))
    jax.block_until_ready(scan(0.0, jnp.ones(length)))
    assert len(told) <= 51
    assert told[-1] == (length, length)
    assert len(runs(told)) == 1
    assert len(told) > 15


MESHES = {"all": lambda m: "all", "a mesh": lambda m: m, "one axis of two": lambda m: (m, "b")}


@pytest.mark.parametrize("residuals", ["recompute", "keep"])
@pytest.mark.parametrize("which", MESHES)
@pytest.mark.each_commit(3)
def test_lanes_on_a_mesh_are_those_of_one_device(which, residuals):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    x, devices = jnp.arange(24.0), {"all": jax.device_count(), "a mesh": 4}.get(which, 2)
    chunks = -(-24 // devices // 2)
    told = []
    options = dict(mesh=MESHES[which](mesh), residuals=residuals, batch_size=2)
    spread = bx.vmap(one, progress=lambda *a: told.append(a), **options)
    jax.block_until_ready(jax.jit(spread)(x))
    assert told[-1] == (chunks, chunks)
    assert len(runs(told)) == 1
    del told[:]
    # Both results are waited for: the loop of the first one may run beside that of the other.
    jax.block_until_ready(jax.value_and_grad(lambda x: spread(x).sum())(x))
    assert told.count((chunks, chunks)) == 2


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("options", [{}, {"until": lambda c: c.sum() > 100}])
def test_inside_shard_map(options, checked):
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    told = []
    scan = bx.scan(step, progress=lambda *a: told.append(a), **options)
    alone = lambda x: jnp.cumsum(scan(x[0], x)[1], 0)
    both = jax.shard_map(
        alone, mesh=mesh, in_specs=P(None, "a"), out_specs=P(None, "a"), check_vma=checked
    )
    slope = lambda f: jax.jit(jax.value_and_grad(lambda x: jnp.sin(f(x)).sum()))
    x = jnp.linspace(0.0, 1.0, 20).reshape(5, 4)
    got = jax.block_until_ready(slope(both)(x))
    assert sorted(told) == sorted(every(5, 5) * 2)
    same(got, slope(alone)(x))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_a_function_that_fails_is_not_called_again(transform):
    calls = []

    def fails(done, total):
        calls.append(done)
        raise KeyError("no such window")

    fun = transform(bx.vmap(one, batch_size=3, progress=fails))
    with pytest.warns(RuntimeWarning, match=r"fails.* raised KeyError.*test_progress.py:\d+"):
        out = jax.block_until_ready(fun(X))
    assert calls == [1]
    assert jnp.allclose(out, one(X), rtol=1e-6)


def test_a_program_that_fails_does_not_disturb_the_next():
    told, broken = [], [True]

    def on_host(x):
        if broken[0] and x > 0.5:
            raise ValueError("broken")
        return x

    host = bx.host_function(on_host, jax.ShapeDtypeStruct((), X.dtype))
    fun = bx.vmap(host, batch_size=1, progress=lambda *a: told.append(a))
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(fun(X))
    assert 0 < len(told) < 10
    assert progress._running
    del told[:]
    broken.clear()
    broken.append(False)
    jax.block_until_ready(fun(X))
    assert told == every(10, 10)
    assert not progress._running


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_runs_of_a_loop_share_a_bar_and_what_failed_is_not_left_there(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    monkeypatch.setattr(bars, "_REDRAWN", -1.0)
    loop, other = (progress.LoopProgress(True, name, "steps") for name in ("loop", "other"))
    for done in (0, 1, 2, 1, 3, 2):  # of two runs
        loop.tell(done, 4, False)
    assert "3/4" in stream.getvalue().rpartition("loop")[2]
    monkeypatch.setattr(progress._Shown, "seems_left", lambda shown: True)
    other.tell(0, 2, False)
    assert list(progress._running) == [(other, 2)]
    other.tell(1, 2, True)
    assert bars._shown is None
    assert not progress._running


def shown(monkeypatch, stream):
    """What a chunked call writes to a standard error."""
    monkeypatch.setattr(sys, "stderr", stream)
    jax.block_until_ready(jax.jit(bx.vmap(one, batch_size=3, progress=True))(X))
    jax.effects_barrier()
    assert bars._shown is None
    return stream.getvalue()


def test_a_bar_in_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(bars, "_REDRAWN", 0.0)
    text = shown(monkeypatch, Terminal())
    assert all(part in text for part in ("one", "0/4", "4/4", "chunks/s", "left"))
    first = text.index("0/4")
    assert text.rindex("\x1b[?25h", 0, first) > text.rindex("\x1b[?25l", 0, first)  # the cursor


class Gone(Terminal):
    def write(self, text):
        raise OSError("the terminal is gone")


class Plain:
    """What some editors have: it cannot be asked whether it is a terminal."""

    write = flush = lambda *_: None


CLOSED = Terminal()
CLOSED.close()


@pytest.mark.parametrize(
    "stream", [Gone(), CLOSED, Plain(), None], ids=["gone", "closed", "plain", "none"]
)
def test_the_program_goes_on_where_nothing_can_be_written(stream, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream)
    out = jax.jit(bx.vmap(one, batch_size=3, progress=True))(X)
    assert jnp.allclose(out, one(X), rtol=1e-6)
    assert bars._shown is None
    bx.map(one, np.asarray(X), progress=True)


def test_lines_without_rich_and_in_a_notebook_without_widgets(monkeypatch):
    monkeypatch.setattr(bars, "_EVERY", 0.0)
    find = bars.importlib.util.find_spec
    lacks = lambda *names: lambda name: None if name in names else find(name)
    monkeypatch.setattr(bars.importlib.util, "find_spec", lacks("rich"))
    text = shown(monkeypatch, Terminal())
    assert "one: 1 of 4 chunks (25%)" in text
    assert "one: 4 of 4 chunks (100%)" in text
    monkeypatch.setattr(bars.importlib.util, "find_spec", lacks("ipywidgets"))
    shell = types.SimpleNamespace(kernel=None)
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    assert "one: 4 of 4 chunks (100%)" in shown(monkeypatch, io.StringIO())


@pytest.mark.parametrize("bad", [None, 3, "bar"])
def test_what_progress_may_be(bad):
    for make, unit in (
        (lambda: bx.vmap(one, batch_size=2, progress=bad), "chunks"),
        (lambda: bx.scan(step, progress=bad), "steps"),
        (lambda: doubled(X, progress=bad), "steps"),
    ):
        with pytest.raises(bx.ArgumentTypeError, match=f"progress must be .* the {unit} done"):
            make()


def test_all_lanes_at_once_have_no_chunks_to_count():
    with pytest.raises(bx.ArgumentTypeError, match="progress is True, but batch_size is None"):
        bx.vmap(one, progress=True)


def test_a_number_of_steps_that_is_not_known():
    (n,) = jax.export.symbolic_shape("n")
    export = jax.export.export(jax.jit(functools.partial(scanned, progress=True)))
    with pytest.raises(
        bx.UnsupportedError, match="progress does not support a symbolic size: the number of steps"
    ):
        export(jax.ShapeDtypeStruct((n,), X.dtype))
