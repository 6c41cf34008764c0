"""What does not diverge: layers, Jacobians, sorts, small matrices, convolutions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
from jax import lax

from benchmarks.search.drafted import GRADIENT, VALUES, draft
from benchmarks.search.loops import _matrix
from benchmarks.workload import integers, keys, normal, uniform
from benchmarks.workloads.networks import (
    attention_parameters,
    convolve,
    mlp,
    mlp_parameters,
    normalised,
    self_attention,
)

BOTH = VALUES, GRADIENT
SHARED = (None, 0)

# Layers.

_chain = lambda x: jnp.tanh(x) * jnp.exp(-x * x) + jnp.log1p(jnp.abs(x))
draft("dense", "elementwise", _chain, lambda n: (normal(n, 64),), 256, 16384, uses=BOTH)
draft("dense", "softmax", jax.nn.softmax, lambda n: (normal(n, 256),), 1024, uses=BOTH)
draft("dense", "norm of a layer", normalised, lambda n: (normal(n, 256),), 1024, uses=BOTH)
draft("dense", "cumulative sum", jnp.cumsum, lambda n: (normal(n, 256),), 256)
draft("dense", "FFT", lambda x: jnp.abs(jnp.fft.rfft(x)), lambda n: (normal(n, 256),), 256)
draft(
    "dense",
    "random normals",
    lambda key: jax.random.normal(key, (64,)),
    lambda n: (keys(n),),
    1024,
)
draft(
    "dense",
    "lookup",
    lambda table, i: table[i],
    lambda n: (normal(500, 64), integers(n, 16, below=500)),
    512,
    in_axes=SHARED,
)
draft(
    "dense",
    "lookup in its own table",
    lambda table, i: table[i],
    lambda n: (normal(n, 100, 8), integers(n, 16, below=100)),
    256,
    uses=BOTH,
)
draft(
    "dense",
    "product with a shared matrix",
    lambda a, x: jnp.tanh(a @ x),
    lambda n: (normal(64, 64), normal(n, 64)),
    1024,
    uses=BOTH,
    wrt=1,
    in_axes=SHARED,
)
for _size in (4, 32):
    draft(
        "dense",
        f"product of its own matrices, {_size}",
        jnp.matmul,
        lambda n, size=_size: (normal(n, size, size), normal(n, size, size, seed=1)),
        512,
        uses=BOTH,
    )
draft(
    "dense",
    "network",
    mlp,
    lambda n: (mlp_parameters(16, 64, 8), normal(n, 16)),
    256,
    uses=BOTH,
    in_axes=SHARED,
)
draft(
    "dense",
    "attention",
    self_attention,
    lambda n: (attention_parameters(32), normal(n, 16, 32)),
    16,
    uses=BOTH,
    in_axes=SHARED,
)
draft(
    "dense",
    "distances by nested vmaps",
    lambda vmap, x: vmap(vmap(lambda a, b: jnp.sum((a - b) ** 2), (None, 0)), (0, None))(x, x),
    lambda n: (normal(n, 16, 4),),
    64,
    nests=True,
)

# Convolutions: kernels that all share, and own kernels.


def _images(size: int, channels: int) -> Any:
    return lambda n: (normal(3, 3, channels, 8), normal(n, size, size, channels))


def _own(size: int, channels: int) -> Any:
    return lambda n: (normal(n, 3, 3, channels, 8), normal(n, size, size, channels))


_convolved = lambda kernel, x: jnp.tanh(convolve(x[None], kernel)[0])
draft("convolution", "shared", _convolved, _images(16, 3), 32, uses=BOTH, wrt=0, in_axes=SHARED)
for _size, _channels in ((8, 1), (16, 3), (16, 16)):
    _name = f"own, {_size} x {_size} x {_channels}"
    draft("convolution", _name, _convolved, _own(_size, _channels), 16, uses=BOTH)

# Derivatives.

_two_layers = lambda w, x: jnp.tanh(w @ jnp.tanh(w @ x))
_layers = lambda n: (_matrix(8), normal(n, 8))


def _laplacian(of: Any) -> Any:
    return lambda w, x: jnp.trace(jax.hessian(lambda x: of(w, x))(x))


def _forward_over_reverse(w: Any, x: Any) -> Any:
    """The Laplacian by a derivative along each direction of the gradient."""
    grad = jax.grad(lambda x: jnp.sum(_two_layers(w, x)))
    along = lambda v: jax.jvp(grad, (x,), (v,))[1] @ v
    return jnp.sum(jax.vmap(along)(jnp.eye(x.size)))


def pinn(p: Any, x: Any) -> Any:
    """The residual of the heat equation, and its gradient by the parameters."""

    def residual(p: Any) -> Any:
        u = lambda t, y: smooth(p, jnp.stack([t, y]))
        return (jax.grad(u)(x[0], x[1]) - jax.grad(jax.grad(u, 1), 1)(x[0], x[1])) ** 2

    return jax.value_and_grad(residual)(p)


def smooth(p: Any, x: Any) -> Any:
    for w, b in p[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = p[-1]
    return (x @ w + b).sum()


_small = lambda n: (mlp_parameters(4, 32, 32, 1), normal(n, 4))
for _count in (64, 1024):
    for _name, _of in {"jacfwd": jax.jacfwd, "jacrev": jax.jacrev, "hessian": jax.hessian}.items():
        draft(
            "derivative",
            f"{_name} of two layers",
            lambda w, x, of=_of: of(lambda x: _two_layers(w, x))(x),
            _layers,
            _count,
            in_axes=SHARED,
        )
draft(
    "derivative",
    "Laplacian of two layers",
    _laplacian(lambda w, x: jnp.sum(_two_layers(w, x))),
    _layers,
    256,
    in_axes=SHARED,
)
draft("derivative", "forward Laplacian", _forward_over_reverse, _layers, 256, in_axes=SHARED)
draft("derivative", "trace of a hessian", _laplacian(smooth), _small, 64, 512, in_axes=SHARED)
draft(
    "derivative",
    "residual of a PINN",
    pinn,
    lambda n: (mlp_parameters(2, 32, 32, 1), uniform(n, 2)),
    64,
    512,
    in_axes=SHARED,
)
draft(
    "derivative",
    "jacfwd of a network",
    lambda p, x: jax.jacfwd(lambda x: jnp.tanh(mlp(p, x)))(x),
    lambda n: (mlp_parameters(8, 32, 8), normal(n, 8)),
    256,
    in_axes=SHARED,
)
draft(
    "derivative",
    "gradient through a scan",
    lambda w, x: lax.scan(lambda h, _: (jnp.tanh(w @ h + x), None), x, None, length=10)[0],
    lambda n: (_matrix(16), normal(n, 16)),
    128,
    uses=(GRADIENT,),
    wrt=1,
    in_axes=SHARED,
)

# Sorts.


def _of_dtype(dtype: Any, size: int) -> Any:
    return lambda n: ((100 * normal(n, size)).astype(dtype),)


for _dtype in ("float32", "int32", "int8", "float16"):
    for _size in (16, 512):
        _lanes = 8192 // _size * 4
        draft("sort", f"{_dtype}, {_size}", jnp.sort, _of_dtype(_dtype, _size), _lanes)
for _name, _of in {
    "argsort": jnp.argsort,
    "median": jnp.median,
    "largest eight": lambda x: lax.top_k(x, 8),
    "unique": lambda x: jnp.unique(x, size=16),
    "ranks": lambda x: jnp.argsort(jnp.argsort(x)),
}.items():
    draft("sort", _name, _of, _of_dtype("float32", 64), 512)
draft("sort", "gradient of a sort", jnp.sort, _of_dtype("float32", 64), 256, uses=(GRADIENT,))

# Small matrices.

_definite = lambda a: a @ a.T / a.shape[0] + jnp.eye(a.shape[0])
MATRICES = {
    "solve": lambda a: jnp.linalg.solve(_definite(a), a[0]),
    "inv": lambda a: jnp.linalg.inv(_definite(a)),
    "det": jnp.linalg.det,
    "Cholesky": lambda a: jnp.linalg.cholesky(_definite(a)),
    "eigh": lambda a: jnp.linalg.eigh(_definite(a)),
    "svd": lambda a: jnp.linalg.svd(a)[1],
    "qr": lambda a: jnp.linalg.qr(a)[1],
    "pinv": jnp.linalg.pinv,
    "expm": jsp.linalg.expm,
}
for _name, _of in MATRICES.items():
    for _size in (3, 16):
        _data = lambda n, size=_size: (normal(n, size, size),)
        draft("matrix", f"{_name}, {_size} x {_size}", _of, _data, 128)
for _name in ("solve", "Cholesky"):
    _data = lambda n: (normal(n, 4, 4),)
    draft("matrix", f"{_name}, 4 x 4", MATRICES[_name], _data, 128, uses=(GRADIENT,))
