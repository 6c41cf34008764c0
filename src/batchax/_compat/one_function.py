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

from batchax._compat.mesh_types import varying_alike
from batchax.config import config

# What XLA makes of these two words is tested on these versions of jaxlib; see `single_kernels`.
_RUN_ON = frozenset(("0.10.2", "0.12.0.1"))


def single_kernels() -> bool:
    """Whether loops may be compiled as one function here: the guard of all that asks for it.

    No version of XLA documents the two words, and a mistake ends the process. So they are used with
    versions alone on which the suite ran, and ``batchax.config`` switches them off. For a new
    version the canary in ``tests/test_compat.py`` says whether it may be added to the table.
    """
    return config.single_kernels and jaxlib.version.__version__ in _RUN_ON


def single_kernel(
    run: Callable[..., Sequence[Any]], types: Sequence[Any], operands: Sequence[Any]
) -> list[Any]:
    """`run` of `operands`, of which the first is not empty, compiled as one function; for CPUs.

    Its results are of `types`.

    Where `single_kernels` does not hold they are ordinary operations.

    It runs on one thread. Sums of floating-point numbers over a dimension, products of matrices and
    calls of libraries may not be in it: XLA has no such function for them.
    """

    if not single_kernels():
        return list(run(*operands))

    def called(*operands: Any) -> list[Any]:
        # What XLA divides among threads calls what is not there in such a function; in a branch of
        # a conditional it divides nothing. So this is one, of a predicate that is always true,
        # which only LLVM finds out.
        # XLA ends the process if an operand is read by nothing in it, which is so where XLA finds
        # out that no result depends on it. In the other branch all results depend on all operands.
        def never(*operands: Any) -> list[Any]:
            every = functools.reduce(lax.bitwise_xor, map(_bits, [x for x in operands if x.size]))
            return [_anything(every, t) for t in types]

        always = lax.ne(lax.bitwise_or(_bits(operands[0]), np.int32(1)), np.int32(0))
        return list(lax.cond(always, run, never, *operands))

    # Nor may XLA find out what an operand is, such as a key made of a number: it would compute that
    # in the function again, and nothing would read the operand.
    outs = list(jax.jit(called)(*lax.optimization_barrier(tuple(operands))))
    words = {"inlineable": "false", "xla_cpu_small_call": "true"}
    # The words are on the call if on any of its results that is read.
    return [x if _is_key(x) else set_xla_metadata(x, **words) for x in outs]


def _bits(x: Any) -> Any:
    """The first element of an array as an integer."""
    x = jax.random.key_data(x) if _is_key(x) else x
    first = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))
    first = lax.real(first) if jnp.issubdtype(first.dtype, np.complexfloating) else first
    if jnp.issubdtype(first.dtype, np.floating):
        if first.dtype.itemsize < 4:
            first = lax.convert_element_type(first, np.float32)
        first = lax.bitcast_convert_type(first, f"int{8 * first.dtype.itemsize}")
    return lax.convert_element_type(first, np.int32)


def _anything(number: Any, aval: Any) -> Any:
    if _is_key(aval):
        return varying_alike([lax.empty(aval.shape, aval.dtype)], like=[number])[0]
    return lax.broadcast(lax.convert_element_type(number, aval.dtype), aval.shape)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)
