"""The functions that are measured, with their ranks and what one would write by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.workload import normal
from benchmarks.workloads.networks import mlp, mlp_parameters


@dataclass(frozen=True)
class RankWorkload:
    """A function of known ranks, and a call of it with batch dimensions.

    Attributes:
      name: what reports call it.
      fun: the function of one example.
      ranks: the ranks of its arguments, an int or a tree of ints for each.
      signature: the same for `jnp.vectorize`; None if that cannot say it.
      by_hand: from the function to what one would write for this call without help.
      data: from a size to the arguments: what is large about them grows with it.
      size: the size in a full measurement.
      merged_by_hand: the same as `by_hand` with two batch dimensions made one.
    """

    name: str
    fun: Callable[..., Any]
    ranks: tuple[Any, ...]
    signature: str | None
    by_hand: Callable[[Callable[..., Any]], Callable[..., Any]]
    data: Callable[[int], tuple[Any, ...]]
    size: int
    merged_by_hand: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None


def scalar_vector_matrix(s: Any, v: Any, m: Any) -> Any:
    return v @ m @ v + s * v.size


def product(m: Any, v: Any) -> Any:
    return m @ v


def correlation(x: Any, y: Any) -> Any:
    x, y = x - x.mean(), y - y.mean()
    return x @ y / jnp.sqrt((x @ x) * (y @ y))


def kernel(x: Any, y: Any, lengths: Any, scale: Any) -> Any:
    return scale * jnp.exp(-jnp.sum(((x - y) / lengths) ** 2) / 2)


def affine(params: Any, x: Any) -> Any:
    return jnp.tanh(params["w"] @ x + params["b"])


def _each_pair(fun: Callable[..., Any]) -> Callable[..., Any]:
    mapped = jax.vmap(jax.vmap(fun, (None, 0)), (0, None))
    return lambda x, y: mapped(x[:, 0], y)


def _each_pair_of_points(fun: Callable[..., Any]) -> Callable[..., Any]:
    mapped = jax.vmap(jax.vmap(fun, (None, 0, None, None)), (0, None, None, None))
    return lambda x, y, lengths, scale: mapped(x[:, 0], y, lengths, scale)


def _each_of_an_ensemble(fun: Callable[..., Any]) -> Callable[..., Any]:
    mapped = jax.vmap(jax.vmap(fun, (None, 0)), (0, None))
    return lambda params, x: mapped(jax.tree.map(lambda leaf: leaf[:, 0], params), x)


def _merged(fun: Callable[..., Any]) -> Callable[..., Any]:
    mapped = jax.vmap(fun)

    def batched(*args: Any) -> Any:
        out = mapped(*(x.reshape(-1, *x.shape[2:]) for x in args))
        return out.reshape(*args[0].shape[:2], *out.shape[1:])

    return batched


def _six_dimensions(fun: Callable[..., Any]) -> Callable[..., Any]:
    mapped = fun
    for axes in ((0, None), (0, 0), (None, 0)) * 2:
        mapped = jax.vmap(mapped, axes)
    return lambda x, y: mapped(x[0, :, :, 0], y[:, :, 0, :, :, 0])


def _ensemble(n: int) -> Any:
    return jax.tree.map(lambda leaf: normal(n, 1, *leaf.shape), mlp_parameters(32, 64, 10))


WORKLOADS = {
    w.name: w
    for w in (
        RankWorkload(
            "five vectors and matrices, one scalar",
            scalar_vector_matrix,
            (0, 1, 2),
            "(),(n),(n,n)->()",
            lambda fun: jax.vmap(fun, (None, 0, 0)),
            lambda n: (jnp.float32(2.0), normal(5, n), normal(5, n, n)),
            3,
        ),
        RankWorkload(
            "scalars, vectors, matrices, all of two dimensions",
            scalar_vector_matrix,
            (0, 1, 2),
            "(),(n),(n,n)->()",
            lambda fun: jax.vmap(jax.vmap(fun)),
            lambda n: (normal(n, 16), normal(n, 16, 8), normal(n, 16, 8, 8)),
            32,
            merged_by_hand=_merged,
        ),
        RankWorkload(
            "one matrix, many vectors",
            product,
            (2, 1),
            "(n,m),(m)->(n)",
            lambda fun: jax.vmap(fun, (None, 0)),
            lambda n: (normal(32, 32), normal(n, 32)),
            1024,
        ),
        RankWorkload(
            "many matrices, many vectors",
            product,
            (2, 1),
            "(n,m),(m)->(n)",
            jax.vmap,
            lambda n: (normal(n, 16, 16), normal(n, 16)),
            512,
        ),
        RankWorkload(
            "each matrix with each vector",
            product,
            (2, 1),
            "(n,m),(m)->(n)",
            _each_pair,
            lambda n: (normal(n, 1, 16, 16), normal(48, 16)),
            64,
        ),
        RankWorkload(
            "correlation of each pair",
            correlation,
            (1, 1),
            "(n),(n)->()",
            _each_pair,
            lambda n: (normal(n, 1, 64), normal(48, 64)),
            64,
        ),
        RankWorkload(
            "kernel of each pair of points",
            kernel,
            (1, 1, 1, 0),
            "(n),(n),(n),()->()",
            _each_pair_of_points,
            lambda n: (normal(n, 1, 8), normal(48, 8), jnp.ones(8), jnp.float32(2.0)),
            64,
        ),
        RankWorkload(
            "six batch dimensions, four of each argument",
            correlation,
            (1, 1),
            "(n),(n)->()",
            _six_dimensions,
            lambda n: (normal(1, 2, n, 1, 2, 3, 8), normal(2, 2, 1, 3, 2, 1, 8)),
            4,
        ),
        RankWorkload(
            "layers in a dict, one for each vector",
            affine,
            ({"w": 2, "b": 1}, 1),
            None,
            jax.vmap,
            lambda n: ({"w": normal(n, 16, 16), "b": normal(n, 16)}, normal(n, 16)),
            256,
        ),
        RankWorkload(
            "network, one for all vectors",
            mlp,
            ([(2, 1)] * 2, 1),
            None,
            lambda fun: jax.vmap(fun, (None, 0)),
            lambda n: (mlp_parameters(32, 64, 10), normal(n, 32)),
            256,
        ),
        RankWorkload(
            "networks, each with each vector",
            mlp,
            ([(2, 1)] * 2, 1),
            None,
            _each_of_an_ensemble,
            lambda n: (_ensemble(n), normal(64, 32)),
            8,
        ),
    )
}
