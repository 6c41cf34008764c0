"""The ways to run a workload, each as its users would write it.

A way is a pair of functions: ``forward(workload)`` returns the function of all lanes, and
``gradient(workload, value)`` a function ``(cotangents, *args)`` that returns the cotangents
of the arguments ``workload.wrt``, after the outputs if `value`. Either returns None where
the library cannot do it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax.microbatching as optax
from jax import lax

import batchax as bx
from benchmarks.chunks.workload import ChunkedWorkload, ScanWorkload

Forward = Callable[[Any], Callable[..., Any] | None]
Gradient = Callable[[Any, bool], Callable[..., Any] | None]


@dataclass(frozen=True)
class Way:
    """How one library runs a workload; `gradient_only`: it differs in derivatives alone."""

    name: str
    forward: Forward
    gradient: Gradient
    gradient_only: bool = False


def by_vjp(forward: Forward) -> Gradient:
    """The gradient through ``jax.vjp`` of the function."""

    def gradient(w: Any, value: bool) -> Callable[..., Any] | None:
        run = forward(w)
        if run is None:
            return None

        def pull_back(cotangents: Any, *args: Any) -> Any:
            outs, pull = jax.vjp(
                lambda *xs: run(*w.merged(w.wrt, xs, args)), *(args[i] for i in w.wrt)
            )
            return (outs, pull(cotangents)) if value else pull(cotangents)

        return pull_back

    return gradient


def _ours(w: ChunkedWorkload, **options: Any) -> Callable[..., Any]:
    out_axes = bx.Reduce("mean") if w.mean else w.out_axes
    return bx.vmap(w.fun, w.in_axes, out_axes, batch_size=w.chunk, **options)


def _lax_map(w: ChunkedWorkload, wrap: Callable[[Any], Any] = lambda f: f) -> Callable[..., Any]:
    """``lax.map``, which maps over leading axes: others are moved there and back."""

    def batched(*args: Any) -> Any:
        def one_example(xs: Any) -> Any:
            return w.fun(*w.merged(w.mapped, xs, args))

        leading = [jnp.moveaxis(args[i], w.in_axes[i], 0) for i in w.mapped]
        outs = lax.map(wrap(one_example), leading, batch_size=w.chunk)
        return _back(w, outs)

    return w.then_mean(batched)


def _back(w: ChunkedWorkload, outs: Any) -> Any:
    """Outputs whose leading axis is the batch, where they are wanted."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, w.out_axes), outs)


def _micro_vmap(w: ChunkedWorkload) -> Callable[..., Any] | None:
    if w.out_axes != 0 or w.lanes % w.chunk:
        return None
    kind = optax.AccumulationType.MEAN if w.mean else optax.AccumulationType.CONCAT
    return optax.micro_vmap(w.fun, w.in_axes, microbatch_size=w.chunk, accumulator=kind)


def _microbatched_gradient(w: ChunkedWorkload, value: bool) -> Callable[..., Any] | None:
    """``optax.microbatching.microbatch`` of the gradient of one chunk."""
    if w.out_axes != 0 or w.lanes % w.chunk or any(w.in_axes[i] for i in w.mapped):
        return None
    add, join = optax.AccumulationType.SUM, optax.AccumulationType.CONCAT
    of_chunk = by_vjp(ChunkedWorkload.plain)(w, value)
    assert of_chunk is not None

    def pull_back(cotangents: Any, *args: Any) -> Any:
        accumulators: Any = tuple(add if w.in_axes[i] is None else join for i in w.wrt)
        scale = w.chunk / w.lanes if w.mean else 1

        def scaled(ct: Any, *args: Any) -> Any:
            if not w.mean:
                return of_chunk(ct, *args)
            found = of_chunk(jax.tree.map(lambda x: x * scale, ct), *args)
            if not value:
                return found
            outs, gradients = found
            return jax.tree.map(lambda x: x * scale, outs), gradients

        if value:
            accumulators = (add if w.mean else join, accumulators)
        argnums = [i + 1 for i in w.mapped] if w.mean else [0, *(i + 1 for i in w.mapped)]
        run = optax.microbatch(scaled, argnums, w.chunk, accumulators)
        return run(cotangents, *args)

    return pull_back


def _netket() -> Any:
    """``netket.jax`` if it is installed; it is no requirement of batchax."""
    # Importing NetKet would switch the whole process to double precision.
    os.environ.setdefault("NETKET_ENABLE_X64", "0")
    os.environ.setdefault("NETKET_SHARDING", "0")
    try:
        import netket.jax as found  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return found


def _leading(w: ChunkedWorkload, args: Any) -> list[Any]:
    """The arguments as NetKet takes them, which knows leading batch axes only."""
    moved = [jnp.moveaxis(args[i], w.in_axes[i], 0) for i in w.mapped]
    return w.merged(w.mapped, moved, args)


def _vmap_chunked(w: ChunkedWorkload) -> Callable[..., Any]:
    axes = tuple(None if a is None else 0 for a in w.in_axes)
    run = _netket().vmap_chunked(w.fun, axes, chunk_size=w.chunk, axis_0_is_sharded=False)
    return w.then_mean(lambda *args: _back(w, run(*_leading(w, args))))


def _vjp_chunked(w: ChunkedWorkload, value: bool) -> Callable[..., Any]:
    """NetKet's own gradient, which knows leading batch axes and no reductions."""
    axes = tuple(None if a is None else 0 for a in w.in_axes)

    def per_lane(ct: Any) -> Any:
        if w.mean:
            return jnp.broadcast_to(ct / w.lanes, (w.lanes, *ct.shape))
        return jnp.moveaxis(ct, w.out_axes, 0)

    def pull_back(cotangents: Any, *args: Any) -> Any:
        pull = _netket().vjp_chunked(
            jax.vmap(w.fun, axes),
            *_leading(w, args),
            chunk_argnums=w.mapped,
            chunk_size=w.chunk,
            nondiff_argnums=tuple(i for i in range(len(args)) if i not in w.wrt),
            return_forward=value,
        )
        found = pull(jax.tree.map(per_lane, cotangents))
        outs, gradients = found if value else (None, found)
        gradients = tuple(
            g if w.in_axes[i] is None else jnp.moveaxis(g, 0, w.in_axes[i])
            for i, g in zip(w.wrt, gradients, strict=True)
        )
        return (w.then_mean(_back)(w, outs), gradients) if value else gradients

    return pull_back


def _way(name: str, forward: Forward, gradient_only: bool = False) -> Way:
    return Way(name, forward, by_vjp(forward), gradient_only)


OURS, KEEPING, LAX_MAP = "bx.vmap", 'bx.vmap, residuals="keep"', "lax.map"

OF_CHUNKS = [
    _way(OURS, _ours),
    _way(KEEPING, functools.partial(_ours, residuals="keep"), gradient_only=True),
    _way(LAX_MAP, _lax_map),
    _way("lax.map, checkpoint", functools.partial(_lax_map, wrap=jax.checkpoint), True),
    Way("optax", _micro_vmap, _microbatched_gradient),
    *([Way("NetKet", _vmap_chunked, _vjp_chunked)] if _netket() is not None else []),
    _way("jax.vmap", ChunkedWorkload.plain),
]
"""Ways to run a batch; ours is first."""

OF_STEPS = [
    _way("bx.scan", lambda w: bx.scan(w.fun, w.in_axes, w.out_axes)),
    _way("lax.scan", ScanWorkload.plain),
]
"""Ways to run steps; ours is first."""
