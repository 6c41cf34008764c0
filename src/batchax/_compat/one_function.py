"""Programs of which a compiler for CPUs makes one function.

XLA makes a function of each fusion of a program, by way of MLIR, and calls one after another. Two
words on a call, which only XLA's own sources mention, have it write the whole of what is called as
one function instead, with its loops: it compiles in a fifth of the time, and small steps of a loop
run faster. XLA does so itself with loops each of whose steps touches less than a kilobyte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core.primitives import cond_p

from batchax._compat.jaxprs import (
    Aval,
    ClosedJaxpr,
    Value,
    checked_axes,
    hoist_constants,
    varying_alike,
)
from batchax._compat.staging import stage
from batchax.config import config

# What XLA makes of these two words is tested on these versions of jaxlib; see `single_kernels`.
_RUN_ON = frozenset(("0.10.2", "0.12.0.1"))


def single_kernels() -> bool:
    """Returns whether loops may be compiled as a single XLA kernel here."""
    # XLA documents neither of the two attributes, and a mistake ends the process. So they are used
    # only with versions that the test suite ran on, and ``batchax.config`` can turn them off. For a
    # new version, the canary in ``tests/test_compat.py`` shows whether it may be added.
    return config.single_kernels and jaxlib.version.__version__ in _RUN_ON


def single_kernel(
    run: Callable[..., Sequence[Any]], types: Sequence[Any], operands: Sequence[Any]
) -> list[Any]:
    """Compiles `run` of `operands` as a single XLA kernel, for CPUs; results are of `types`.

    The first operand is not empty. Without `single_kernels`, operations are ordinary ones.
    """

    # The kernel runs on one thread. It may not contain floating-point sums over a dimension, matrix
    # products, or library calls, for which XLA has no code inside of one.
    if not single_kernels():
        return list(run(*operands))

    def called(*operands: Value) -> list[Any]:
        # If XLA divides something among threads, it calls what such a kernel lacks. It divides
        # nothing in a branch of a conditional, so this is one, with a predicate that is always
        # true, which only LLVM finds out.
        # XLA ends the process if nothing in a kernel reads an operand, or no result depends on it.
        # In the other branch, all results depend on all operands.
        always = lax.ne(lax.bitwise_or(_bits(operands[0]), np.int32(1)), np.int32(0))
        given = tuple(map(jax.typeof, operands))
        # What varies over the axes of a mesh is staged for the mesh that is in scope.
        never = _never.__wrapped__ if checked_axes() else _never
        branches, consts = hoist_constants(never(given, tuple(types)), stage(run, given))
        index = lax.convert_element_type(always, np.int32)
        return cond_p.bind(index, *consts, *operands, branches=tuple(branches))

    # XLA must not see what an operand is, such as a key made from a number: it would recompute that
    # in the kernel, and nothing would read the operand.
    outs = list(jax.jit(called)(*lax.optimization_barrier(tuple(operands))))
    words = {"inlineable": "false", "xla_cpu_small_call": "true"}
    # The attributes are on the call if on any of its results that is read.
    return [x if _is_key(x) else set_xla_metadata(x, **words) for x in outs]


@functools.lru_cache(256)
def _never(given: tuple[Aval, ...], types: tuple[Aval, ...]) -> ClosedJaxpr:
    """Returns a program of operands `given`, on all of which each of its results depends."""

    def run(*operands: Value) -> list[Any]:
        every = functools.reduce(lax.bitwise_xor, map(_bits, [x for x in operands if x.size]))
        return [_anything(every, t) for t in types]

    return stage(run, given)


def _bits(x: Value) -> Value:
    """Returns the first element of an array as an integer."""
    x = jax.random.key_data(x) if _is_key(x) else x
    first = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))
    first = lax.real(first) if jnp.issubdtype(first.dtype, np.complexfloating) else first
    if jnp.issubdtype(first.dtype, np.floating):
        if first.dtype.itemsize < 4:
            first = lax.convert_element_type(first, np.float32)
        first = lax.bitcast_convert_type(first, f"int{8 * first.dtype.itemsize}")
    return lax.convert_element_type(first, np.int32)


def _anything(number: Value, aval: Aval) -> Value:
    if _is_key(aval):
        return varying_alike([lax.empty(aval.shape, aval.dtype)], like=[number])[0]
    return lax.broadcast(lax.convert_element_type(number, aval.dtype), aval.shape)


def _is_key(x: Value | Aval) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)
