"""Pairs of things to do, ours and what it is compared with; each is timed whole."""

from __future__ import annotations

import functools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import batchax as bx
from benchmarks.workload import normal


@dataclass(frozen=True)
class Pair:
    """Two things to do, one after the other in turns.

    Attributes:
      name: what is done.
      family: what kind of thing that is.
      other: what it is compared with.
      make: from whether few turns are wanted to ours and the other one.
      clock: seconds.
      turns: how often each is done.
      goal: the ratio to reach.
    """

    name: str
    family: str
    other: str
    make: Callable[[bool], tuple[Callable[[], Any], Callable[[], Any]]]
    clock: Callable[[], float]
    turns: int
    goal: float


def _block(x: Any, p: Any) -> Any:
    queries, keys, values = (x @ p[i] for i in range(3))
    x = x + jax.nn.softmax(queries @ keys.T / 4) @ values
    h = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x + jax.nn.gelu(h @ p[3]) @ p[4]


def _transformer_gradient(layers: int, x: Any) -> Any:
    def loss(parameters: Any) -> Any:
        return (functools.reduce(_block, parameters, x) ** 2).sum()

    return jax.grad(loss)([[0.1 * normal(16, 16, seed=i) for i in range(5)]] * layers)


def _long(equations: int, x: Any) -> Any:
    for _ in range(equations // 2):
        x = jnp.sin(x) * 1.01
    return x


def _nested(vmap: Any, x: Any) -> Any:
    def kernel(a: Any, b: Any, c: Any, d: Any) -> Any:
        return jnp.tanh(a * b) + jnp.sin(a - c) * jnp.exp(-d * d) + jnp.log1p(b * b) * c

    for axes in [(None, None, None, 0), (None, None, 0, None), (None, 0, None, None)]:
        kernel = vmap(kernel, axes)
    return vmap(kernel, (0, None, None, None))(x, x, x, x)


def _tracing(name: str, batched: Callable[[Any, bool, Any], Any], x: Any) -> Pair:
    def make(quick: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
        def trace(vmap: Any) -> Any:
            return jax.make_jaxpr(lambda x: batched(vmap, quick, x))(x)

        return functools.partial(trace, bx.vmap), functools.partial(trace, jax.vmap)

    return Pair(name, "tracing", "jax.vmap", make, time.thread_time, 15, 1.1)


def _attention(x: Any) -> Any:
    return _block(x, [normal(16, 16, seed=i) / 4 for i in range(5)])


def _calls(name: str, fun: Callable[[Any], Any], other: str, goal: float, **options: Any) -> Pair:
    lengths = np.random.default_rng(0).integers(1, 21, 48)
    total = int(lengths.sum())

    def make(quick: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
        dense = normal(48, 20, 16)
        ragged = bx.Ragged(normal(total, 16), jnp.asarray(lengths, np.int32), 20)
        ours, theirs = {
            "jax.vmap": ((bx.vmap, dense), (jax.vmap, dense)),
            "all lanes at once": ((bx.vmap, dense), (bx.vmap, dense)),
            "a dense batch": ((bx.vmap, ragged), (bx.vmap, dense)),
        }[other]

        def call(vmap: Any, x: Any, **options: Any) -> Any:
            return jax.block_until_ready(jax.tree.leaves(vmap(fun, **options)(x)))

        return functools.partial(call, *ours, **options), functools.partial(call, *theirs)

    return Pair(name, "calls outside of jit", other, make, time.perf_counter, 31, goal)


def _chunks(progress: Any, quick: bool) -> Callable[[], Any]:
    x = normal(20 if quick else 500, 64, 32)
    fun = lambda x: jnp.sort(jnp.tanh(x @ x.T), axis=0).sum()
    batched = jax.jit(bx.vmap(fun, batch_size=10, progress=progress))
    return lambda: jax.block_until_ready(batched(x))


def _steps(size: int, length: int, progress: Any, quick: bool) -> Callable[[], Any]:
    x, w = normal(size, size), normal(size, size, seed=1) / size
    step = lambda c, _: (jnp.tanh(c @ w) if size > 1 else jnp.tanh(c + w), None)
    length = 20 if quick else length
    scan = jax.jit(bx.scan(step, in_axes=None, length=length, progress=progress))
    return lambda: jax.block_until_ready(scan(x, x))


def _telling(name: str, make: Callable[[Any, bool], Callable[[], Any]], goal: float) -> Pair:
    def both(quick: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
        return make(lambda done, total: None, quick), make(False, quick)

    family = "saying how far it is"
    return Pair(name, family, "without progress", both, time.perf_counter, 21, goal)


def _importing(quick: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    def run(module: str) -> Any:
        # Bytecode is there, as it is where a package was installed.
        command = [sys.executable, "-c", f"import {module}"]
        return subprocess.run(command, check=True, env=_with_bytecode())

    return functools.partial(run, "batchax"), functools.partial(run, "jax")


def _with_bytecode() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _elementwise(x: Any) -> Any:
    return jnp.tanh(x) * 2 + jnp.sum(x)


_PAIRS = [
    Pair("import batchax", "importing", "import jax", _importing, _children, 11, 1.4),
    _tracing(
        "gradient of a transformer of 48 layers",
        lambda vmap, quick, x: vmap(functools.partial(_transformer_gradient, 2 if quick else 48))(
            x
        ),
        normal(4, 8, 16),
    ),
    _tracing(
        "2,000 equations",
        lambda vmap, quick, x: vmap(functools.partial(_long, 20 if quick else 2000))(x),
        normal(4, 3),
    ),
    _tracing(
        "four vmaps, one inside the other", lambda vmap, quick, x: _nested(vmap, x), normal(3)
    ),
    _calls("a network", _elementwise, "jax.vmap", 1.2),
    _calls("attention", _attention, "jax.vmap", 1.2),
    _calls("a network, batch_size=12", _elementwise, "all lanes at once", 2.0, batch_size=12),
    _calls("attention, batch_size=12", _attention, "all lanes at once", 2.0, batch_size=12),
    _calls("a network, rows", _elementwise, "a dense batch", 2.5),
    _calls("a sum, rows", lambda x: jnp.sum(jnp.sin(x) ** 2), "a dense batch", 2.5),
    _calls("attention, rows", _attention, "a dense batch", 2.5),
    _telling("50 chunks", _chunks, 1.01),
    _telling("1,000 steps of 256 x 256", functools.partial(_steps, 256, 1000), 1.01),
    _telling("100,000 steps of one number", functools.partial(_steps, 1, 100_000), 3.0),
]

WORKLOADS = {f"{p.family}: {p.name}": p for p in _PAIRS}
