"""Many short rows sorted by a network, an element of all rows at a time, on a CPU.

XLA sorts rows of several operands on a CPU one after another, by calls of a comparison. Batcher's
network ("Sorting networks and their applications", AFIPS 1968) compares the same places whatever
the numbers are: with rows last, a step is a minimum and a maximum of vectors. Of n elements it has
about log2(n)**2 / 2 steps, which are a loop here, as each written out would have to be compiled.

Order is that of ``jax.lax.sort``: NaN last, zeros of either sign equal, and the place that an
element had decides between equals. Keys that are too small to be normal are left to XLA, versions
of which differ in whether they equal zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.cache import cached
from batchax.jaxprs.types import Value, Values
from batchax.kernel.axis import Axis, PlacedOutputs, Positions, shift_dims
from batchax.kernel.named_axes import may_be_spread
from batchax.kernel.own_primitive import own_primitive
from batchax.kernel.registry import matched
from batchax.linalg.pays import pays_back
from batchax.rules.sorting_by_image import image, magnitude


def pays(operands: Sequence[Any], dimension: int, num_keys: int, in_loop: int) -> bool:
    """Returns whether a network sorts operands of these types faster."""
    # Measured on two cores for 64 to 100,000 rows: 0.12x to 0.3x the time (0.3x to 0.45x for keys
    # of 64 bits), and 0.65x for rows of 512. Rows are computed in blocks, which XLA would send
    # between devices if rows were sharded.
    shape = operands[0].shape
    if not all(isinstance(n, int) for n in shape):  # symbolic ones: the size is unknown
        return False
    size = shape[dimension]
    ordered = all(jnp.issubdtype(x.dtype, jnp.integer) or _is_real(x) for x in operands[:num_keys])
    plain = all(not jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in operands)
    total = math.prod(shape)
    if not (1 < size <= _MOST and total >= _LEAST and ordered and plain):
        return False
    # Microseconds for each element, of rows of 3 to 64. `slow`: argsort of rows of 16, and the sort
    # of pivots in the gradient of solve, 4 x 4.
    gain = 0.035 + 0.008 * math.log2(size)
    seconds = _COMPILING[any(jnp.issubdtype(x.dtype, jnp.floating) for x in operands[:num_keys])]
    return pays_back(gain, seconds, total, in_loop) and not may_be_spread(operands)


_MOST = 256
_LEAST = 2**14  # elements: of fewer, in a loop, vectors are short
_COMPILING = (0.17, 0.4)  # seconds longer; of floats both ways are compiled
_BLOCK = 2**12  # elements


def _is_real(x: Value) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits >= 16


def _operations(*operands: Value, **params: Any) -> list[Any]:
    return list(lax.sort_p.bind(*operands, **params))


def _on_cpu(*operands: Value, dimension: int, num_keys: int, is_stable: bool) -> list[Any]:
    # Inside ``shard_map`` JAX's type of what is sorted by others does not say that it varies so.
    operands = tuple(_compat.varying_alike(operands))
    how = {"dimension": dimension, "num_keys": num_keys}
    network = functools.partial(_by_network, **how)
    floats = [x for x in operands[:num_keys] if jnp.issubdtype(x.dtype, jnp.floating)]
    if not floats:
        return network(*operands)
    # Whether such numbers are zeros is a matter of how XLA compiles a comparison.
    subnormal = functools.reduce(lax.bitwise_or, map(_has_subnormal, floats))
    compared = functools.partial(_operations, is_stable=is_stable, **how)
    return lax.cond(subnormal, compared, network, *operands)


def _has_subnormal(x: Value) -> jax.Array:
    size, normal = magnitude(x)
    return jnp.any(lax.lt(size, lax.full_like(size, normal)) & lax.gt(size, lax.full_like(size, 0)))


def _by_network(*operands: Value, dimension: int, num_keys: int) -> list[Any]:
    first = operands[0]
    order = [*(d for d in range(first.ndim) if d != dimension), dimension]
    moved = [first.shape[d] for d in order]
    size, rows = moved[-1], math.prod(moved[:-1])
    # Only keys pass through the network. Its result is a permutation, by which operands are
    # gathered.
    given = [lax.reshape(lax.transpose(x, order), (rows, size)) for x in operands]
    places = _in_blocks(_order, list(map(_wide, given[:num_keys])), max(1, _BLOCK // size))
    back = list(np.argsort(order))
    return [lax.transpose(lax.reshape(_looked_up(x, places), moved), back) for x in given]


def _wide(x: Value) -> jax.Array:
    small = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return lax.convert_element_type(x, np.float32) if small else x  # a kernel holds no small floats


def _looked_up(x: Value, places: Value) -> jax.Array:
    return jnp.take_along_axis(x, places, 1, mode="promise_in_bounds")


def _in_blocks(run: Callable[..., Any], xs: Values, most: int) -> jax.Array:
    """Runs blocks of rows, which stay in a core's cache."""
    rows, size = xs[0].shape
    if rows <= most:
        return run(xs)

    def step(xs: Values, k: Value, out: Value) -> jax.Array:
        # The last block is moved back to fit, so some rows are computed twice.
        start = lax.min(k * most, lax.full_like(k, rows - most))
        some = run([lax.dynamic_slice_in_dim(x, start, most) for x in xs])
        return lax.dynamic_update_slice_in_dim(out, some, start, 0)

    def every(*xs: Value) -> list[Any]:
        (nothing,) = _compat.varying_alike([jnp.zeros((rows, size), jnp.uint32)], xs)
        return [lax.fori_loop(0, -(-rows // most), functools.partial(step, xs), nothing)]

    # One kernel: an argsort of rows of 16 compiles in 0.21 s, as separate operations in 0.34 s.
    return _compat.single_kernel(every, [jax.ShapeDtypeStruct((rows, size), np.uint32)], xs)[0]


def _order(keys: Values) -> jax.Array:
    """Returns the permutation that sorts each row."""
    # All 32-bit words of the keys are in one array, which keeps a step small to compile. The last
    # word is the index, so no two elements are equal and the sort is stable.
    words = [lax.transpose(word, (1, 0)) for x in keys for word in _words(x)]
    words.append(lax.broadcasted_iota(np.int32, words[0].shape, 0))
    partners = jnp.asarray(_partners(words[0].shape[0]))

    def step(k: Value, mine: Value) -> jax.Array:
        partner = lax.dynamic_index_in_dim(partners, k, keepdims=False)
        theirs = mine.at[partner].get(mode="promise_in_bounds")
        # Lexicographic comparison, from the last word to the first.
        before = functools.reduce(
            lambda rest, w: (mine[:, w] < theirs[:, w]) | ((mine[:, w] == theirs[:, w]) & rest),
            range(len(words) - 2, -1, -1),
            mine[:, -1] < theirs[:, -1],
        )
        is_low = lax.gt(partner, lax.iota(partner.dtype, partner.size))
        swap = lax.ne(before, lax.broadcast_in_dim(is_low, before.shape, (0,)))
        return lax.select(lax.broadcast_in_dim(swap, mine.shape, (0, 2)), theirs, mine)

    last = lax.fori_loop(0, len(partners), step, jnp.stack(words, 1))[:, -1]
    return lax.bitcast_convert_type(lax.transpose(last, (1, 0)), jnp.uint32)


def _words(x: Value) -> list[Any]:
    """Splits numbers into 32-bit integers, most significant first, of the same order."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        # -0.0 equals 0.0, and every NaN comes last, as in JAX.
        x = lax.select(lax.eq(x, lax.full_like(x, 0)), lax.full_like(x, 0), x)
        x = lax.select(lax.ne(x, x), lax.full_like(x, np.nan), x)
        dtype = np.dtype(f"int{8 * x.dtype.itemsize}")
        x = image(lax.bitcast_convert_type(x, dtype), dtype)
    bits, signed = jnp.iinfo(x.dtype).bits, jnp.issubdtype(x.dtype, jnp.signedinteger)
    if bits < 32:
        return [lax.convert_element_type(x, np.int32)]
    # Unsigned words compare as signed ones with the highest bit flipped.
    words = lax.bitcast_convert_type(x, np.int32)
    words = [words] if bits == 32 else [words[..., 1], words[..., 0]]
    lowest = np.array(np.iinfo(np.int32).min, np.int32)
    return [word if k == 0 and signed else word ^ lowest for k, word in enumerate(words)]


@cached("steps of networks that sort", most=256)
def _partners(size: int) -> np.ndarray:
    """Returns, for each step of Batcher's network, the partner of each position."""
    steps = []
    block = 1
    while block < size:
        apart = block
        while apart:
            partner = np.arange(size, dtype=np.uint32)
            # Batcher's odd-even merge sort (1968): compare elements `apart` within blocks of 2
            # `block`.
            for start in range(apart % block, size - apart, 2 * apart):
                for low in range(start, min(start + apart, size - apart)):
                    if low // (2 * block) == (low + apart) // (2 * block):
                        partner[[low, low + apart]] = low + apart, low
            steps.append(partner)
            apart //= 2
        block *= 2
    return np.stack(steps)


def _batched(
    axis: Axis, args: Values, axes: Positions, /, *, dimension: int, **params: Any
) -> PlacedOutputs:
    operands, position = matched(axis, args, axes)
    (dim,) = shift_dims((dimension,), position)
    outs = sorted_rows_p.bind(*operands, dimension=dim, **params)
    return outs, [position] * len(outs)


sorted_rows_p = own_primitive(
    "sorted_rows",
    called="sort",
    operations=_operations,
    types=lambda *xs, **params: list(xs),
    rule=_batched,
    on_cpu=_on_cpu,
)
