"""Families of primitives, with the batch axis anywhere: values, types and counts of operations."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.lax import linalg as ll

import batchax as bx
from batchax import _compat
from rules.test_contraction import (
    DIMENSIONS,
    RAGGED,
    SCALED,
    SHAPE,
    SIZES,
    TRANSFORMS,
    contraction,
    ragged_contraction,
    transform,
)
from rules.test_indexing import INDICES, METHODS, MODES, put

from support.batches import SIZE, batch, positions
from support.operations import no_more_operations
from support.oracle import check_all, shares

WINDOW = dict(
    window_dimensions=(2, 3),
    window_strides=(2, 1),
    padding=((0, 1), (1, 0)),
    base_dilation=(1, 2),
    window_dilation=(1, 1),
)
PLAIN = {k: WINDOW[k] for k in ("window_dimensions", "window_strides", "padding")}
START = {"reduce_window_sum": 0.0, "reduce_window_max": -jnp.inf, "reduce_window_min": jnp.inf}
COMPUTE = {"reduce_window_sum": lax.add, "reduce_window_max": lax.max, "reduce_window_min": lax.min}


def pool(name, window=WINDOW):
    return lambda x: lax.reduce_window(x, START[name], COMPUTE[name], **window)


class Operand(NamedTuple):
    rank: int
    make: Any  # from the batch axis, or None, and a seed


def of(*shape, dtype=float, **options):
    return Operand(len(shape), lambda axis, seed: batch(shape, axis, dtype, seed, **options))


class Program(NamedTuple):
    fun: Any
    operands: tuple
    step: int = 1  # of all combinations of batch axes, which are tried
    counted: bool = False  # whether it has no more operations than under JAX
    smooth: bool = False  # whether its derivatives are compared, too
    in_jax: bool = True
    in_turn: bool = False  # whether lanes run one after another, with a warning
    tolerance: Any = None


def bound(name, **params):
    primitive = _compat.find_primitive(name)
    return lambda *args: primitive.bind(*args, **params)


def larger(a, b):
    """A computation on pairs: the larger value, and where it is."""
    (x, i), (y, j) = a, b
    return lax.select(x >= y, x, y), lax.select(x >= y, i, j)


FROM = -jnp.inf, np.int32(-1)
IMAGE, PLACES, NUMBER = of(4, 5), of(4, 5, dtype=jnp.int32), of()


def select_and_scatter():
    # JAX has no rule for it, and calls it with programs for its two computations.
    number = jnp.zeros(())
    return bound(
        "select_and_scatter",
        select_jaxpr=jax.make_jaxpr(lax.ge)(number, number).jaxpr,
        select_consts=(),
        scatter_jaxpr=jax.make_jaxpr(lax.add)(number, number).jaxpr,
        scatter_consts=(),
        window_dimensions=(2, 2),
        window_strides=(2, 2),
        padding=((0, 0), (0, 1)),
    )


PICKED = {
    f"select_and_gather_add {select}": bound("select_and_gather_add", select_prim=select, **WINDOW)
    for select in (lax.ge_p, lax.le_p)
}
WINDOWS = {
    **{name: Program(pool(name), (IMAGE,), counted=True) for name in START},
    **{f"{name}, plain": Program(pool(name, PLAIN), (IMAGE,), 2, smooth=True) for name in START},
    **{name: Program(fun, (IMAGE, IMAGE), 3, counted=True) for name, fun in PICKED.items()},
    "select_and_scatter_add": Program(
        bound("select_and_scatter_add", select_prim=lax.ge_p, **PLAIN),
        (of(2, 4), IMAGE),
        3,
        counted=True,
    ),
    "select_and_scatter": Program(
        select_and_scatter(), (IMAGE, of(2, 3), NUMBER), 7, in_jax=False, in_turn=True
    ),
    "by a function": Program(
        lambda x: lax.reduce_window(x, 1.0, lambda a, b: a * b, **WINDOW), (IMAGE,)
    ),
    "of several": Program(
        lambda x, i: lax.reduce_window((x, i), FROM, larger, **PLAIN), (IMAGE, PLACES), 4
    ),
    "from a start": Program(
        lambda x, start: lax.reduce_window(x, start, lambda a, b: a + b, **PLAIN),
        (IMAGE, NUMBER),
        2,
        in_jax=False,
    ),
}

ROWS = of(2, 4)
# Keys with ties, so that the second key and stability show.
KEYS = of(4, dtype=jnp.int32, high=2), of(4, dtype=jnp.int32, high=3)
SORTS = {
    **{
        f"sort along {d}": Program(
            lambda x, d=d: lax.sort(x, d), (ROWS,), counted=True, smooth=True
        )
        for d in (0, 1)
    },
    **{
        f"sort of {dtype}": Program(lax.sort, (of(2, 4, dtype=dtype),), 2)
        for dtype in ("bfloat16", "int8", "uint32", "bool", "complex64")
    },
    **{
        f"by {n} keys": Program(lambda *xs, n=n: lax.sort(xs, num_keys=n), (*KEYS, of(4)), 2)
        for n in (1, 2)
    },
    "of not a number, and zeros": Program(
        lambda x: (jnp.sort(1 / jnp.trunc(x)), jnp.argsort(jnp.trunc(x))), (ROWS,)
    ),
    **{
        f"top_k {d}": Program(lambda x, d=d: lax.top_k(x, 2, axis=d), (ROWS,), smooth=True)
        for d in (0, 1)
    },
    **{
        f"approx_max_k {d}": Program(
            lambda x, d=d: lax.approx_max_k(x, 2, reduction_dimension=d), (ROWS,), smooth=True
        )
        for d in (0, 1, -1, -2)
    },
}


def casts(dtype):
    """To a width of 16 bits, which may take in the last dimension, and of 8."""
    width = 16 // jax.dtypes.itemsize_bits(jnp.dtype(dtype))
    fun = lambda x: [lax.bitcast_convert_type(x, to) for to in (jnp.float16, jnp.uint8)]
    # JAX takes the batch axis for the dimension that a wider type consumes.
    return Program(fun, (of(3, max(width, 2) if width > 1 else 2, dtype=dtype),), in_jax=False)


TWO = of(2, 3), of(2, 3)
SHAPES = {
    # JAX cannot transpose this form for reverse mode, batched or not.
    "broadcast that permutes": Program(
        lambda x: lax.broadcast_in_dim(x, (3, 4, 2), (2, 0)), TWO[:1]
    ),
    **{
        f"concatenate and stack {d}": Program(
            lambda x, y, d=d: (jnp.concatenate([x, y, x], d), jnp.stack([y, x], d)), TWO, 2,
            counted=True, smooth=True,
        )
        for d in (0, 1)
    },
    "pad with a value": Program(
        lambda x, v: (lax.pad(x, v, [(1, 2, 1)]), lax.pad(x, v, [(-1, 1, 0)])),
        (of(3), NUMBER), counted=True, smooth=True,
    ),
    **{f"casts of {dtype}": casts(dtype) for dtype in ("uint8", "int32", "bfloat16")},
}  # fmt: skip

START_OF = of(dtype=jnp.int32, low=-2, high=8)  # some out of range: slices are moved to fit
INDEX = Operand(1, lambda axis, seed: put(INDICES[:SIZE], axis))


def reads(x, i):
    return [
        x.at[i].get(mode="fill", fill_value=7.0),
        x.at[:, i].get(mode="clip", wrap_negative_indices=False),
        x.at[i, i[::-1]].get(mode="fill"),
        x.at[i[:, None], i].get(mode="clip"),
        x.at[:, abs(i) % 3].get(mode="promise_in_bounds"),
    ]


def writes_of_each_mode(x, i, u):
    outside = [(x.at[i].add(u, mode=m), x.at[i[::-1]].max(u[0], mode=m)) for m in MODES[:2]]
    return outside, x.at[abs(i) % 3].add(u, mode="promise_in_bounds")


def slices(x, i, k):
    y = lax.dynamic_slice(x, (i, i), (2, 2))
    return y, lax.dynamic_update_slice(x, y, (k, k))


def updates(x, u, i):
    return lax.dynamic_update_slice(x, u, (i, 0 * i)), lax.dynamic_update_slice(x, u[:, :2], (i, i))


INDEXING = {
    "dynamic_slice": Program(
        lambda x, i, j: lax.dynamic_slice(x, (i, j), (2, 3)), (of(3, 4), START_OF, START_OF), 2,
        counted=True, smooth=True,
    ),
    "dynamic_update_slice": Program(
        updates, (of(4, 3), of(2, 3), START_OF), 3, counted=True, smooth=True
    ),
    "whole update": Program(
        lambda x, i, u: lax.dynamic_update_slice(x, u, (i, i)), (of(2, 3), START_OF, of(2, 3)), 4
    ),
    **{
        f"index of {dtype}": Program(
            slices, (of(3, 3), *[of(dtype=dtype, low=0, high=9)] * 2), 4
        )
        for dtype in ("int8", "uint32")
    },
    "gather": Program(reads, (of(3, 3), INDEX), counted=True, smooth=True),
    "scatter": Program(
        lambda x, i, u: [getattr(x.at[i], method)(u) for method in METHODS],
        (of(3), INDEX, of(2)), 2, counted=True,
    ),
    "modes": Program(writes_of_each_mode, (of(3, 2), INDEX, of(2, 2)), 9, smooth=True),
}  # fmt: skip

REDUCTIONS = {
    **{
        f"max over {axes}": Program(
            lambda x, axes=axes: jnp.max(x, axes), (of(2, 1, 4),), counted=True, smooth=True
        )
        for axes in [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2), ()]
    },
    "reduce of several": Program(
        lambda x, i: lax.reduce((x, i), FROM, larger, (1,)), (ROWS, of(2, 4, dtype=jnp.int32)), 3
    ),
    **{
        f"from starts, of {length}": Program(
            lambda x, start: lax.reduce(x, start, lax.add, (1,)),
            (of(2, length), NUMBER),
            2,
            in_jax=False,
            in_turn=True,
        )
        for length in (0, 5)
    },
    "of several from starts": Program(
        lambda x, i, start: lax.reduce((x, i), (start, np.int32(-1)), larger, (0, 2)),
        (of(2, 3, 4), of(2, 3, 4, dtype=jnp.int32), NUMBER),
        9,
        in_jax=False,
        in_turn=True,
    ),
}


def sizes_along(prefix):
    """Sizes of groups: lane i has, at place p of the prefix, row i + p of `SIZES`."""
    places = np.arange(SIZE).reshape(-1, *[1] * len(prefix))
    each = SIZES[(places + np.arange(np.prod(prefix, dtype=int)).reshape(prefix)) % SIZE]
    make = lambda axis, seed: each[0] if axis is None else jnp.moveaxis(each, 0, axis)
    return Operand(each.ndim - 1, make)


def of_float8(*shape, dtype):
    make = lambda axis, seed: batch(shape, axis, jnp.float32, seed, low=0.5, high=2.0)
    return Operand(len(shape), lambda axis, seed: make(axis, seed).astype(dtype))


def scaled(x, y, x_scale, y_scale):
    return lax.scaled_dot(x, y, lhs_scale=x_scale, rhs_scale=y_scale, dimension_numbers=SCALED)


STEPS = {"with a batch dimension": 3, "two of each": 5, "matrix matrix": 2}
BLOCKS = [(2, 4, 8), (2, 5, 8)], [(2, 4, 2), (2, 5, 2)]
CONTRACTIONS = {
    **{
        name: Program(
            contraction(name), (of(*lhs), of(*rhs)), STEPS.get(name, 1), counted=True, smooth=True
        )
        for name, (lhs, rhs, _) in DIMENSIONS.items()
    },
    **{
        f"ragged, {name}, sizes along {along}": Program(
            ragged_contraction(name),
            (of(*lhs), of(*rhs), sizes_along(along)),
            13,
            in_jax=False,
            smooth=name == "free",
        )
        for name, (_, lhs, rhs, prefix) in RAGGED.items()
        for along in {(), prefix}
    },
    "scaled": Program(
        scaled,
        (
            *(of_float8(*shape, dtype=jnp.float8_e4m3fn) for shape in BLOCKS[0]),
            *(of_float8(*shape, dtype=jnp.float8_e8m0fnu) for shape in BLOCKS[1]),
        ),
        130,
    ),
    **{
        name: Program(transform(name), (of(*SHAPE, dtype=dtype),), counted=True, smooth=True)
        for name, (_, _, dtype) in TRANSFORMS.items()
    },
}

LOOSE = dict(rtol=2e-3, atol=2e-3)


def matrix(axis, seed):
    """Well conditioned matrices, the lanes at any axis."""
    x = batch((3, 3), None if axis is None else 0, seed=seed) * 0.3 + 2 * jnp.eye(3)
    return x if axis is None else jnp.moveaxis(x, 0, axis)


MATRIX, VECTOR = Operand(2, matrix), of(3)
factor = lambda a: jnp.linalg.cholesky(a @ a.T)
reflected = bound("geqrf")
LINALG = {
    "cholesky": Program(factor, (MATRIX,), smooth=True, tolerance=LOOSE),
    **{
        f"triangular_solve {left, lower, transposed}": Program(
            lambda a, b, left=left, lower=lower, transposed=transposed: ll.triangular_solve(
                a, b, left_side=left, lower=lower, transpose_a=transposed, unit_diagonal=not lower
            ),
            (MATRIX, of(3, 3)),
            2,
            tolerance=LOOSE,
        )
        for left in (True, False)
        for lower in (True, False)
        for transposed in (True, False)
    },
    "tridiagonal_solve": Program(
        lambda a, d, b: ll.tridiagonal_solve(a, d + 9, a[::-1], b),
        (VECTOR, VECTOR, of(3, 2)),
        3,
        smooth=True,
        tolerance=LOOSE,
    ),
    "ormqr": Program(
        lambda a, t, c: ll.ormqr(reflected(a)[0], t * 0.2, c, left=True),
        (MATRIX, VECTOR, MATRIX),
        5,
        tolerance=LOOSE,
    ),
    "cholesky_update": Program(
        lambda a, w: ll.cholesky_update(factor(a).T, w.at[1].set(0)),
        (MATRIX, VECTOR),
        in_jax=False,
        tolerance=LOOSE,
    ),
    "geqp3": Program(
        lambda a, p: bound("geqp3", use_magma=None)(a, p * 0),
        (MATRIX, of(3, dtype=jnp.int32)),
        2,
        in_jax=False,
        tolerance=LOOSE,
    ),
}

# A predicate, or bounds, that are one number for an array.
ELEMENTWISE = {
    "select by a number": Program(
        lambda i, x, y: lax.select_n(i > 0, x, y), (NUMBER, *TWO), smooth=True
    ),
    "clamp between numbers": Program(lambda i, x: lax.clamp(i, x, i + 1), (NUMBER, TWO[0])),
    "select and clamp by arrays": Program(
        lambda i, x, y: (lax.select_n(i > 0, x, y), lax.clamp(i, x, y)), (*TWO, TWO[0]), 3
    ),
}

FAMILIES = {
    "elementwise": ELEMENTWISE,
    "linalg": LINALG,
    "contraction": CONTRACTIONS,
    "windows": WINDOWS,
    "sorting": SORTS,
    "shape": SHAPES,
    "indexing": INDEXING,
    "reduction": REDUCTIONS,
}
PARTS = [(name, part) for name, table in FAMILIES.items() for part in shares(table, 3)]


@pytest.mark.parametrize(("family", "names"), PARTS, ids=str)
@pytest.mark.each_commit(6)
def test_values_wherever_the_batch_axis_is(family, names):
    cases = {}
    for name in names:
        program = FAMILIES[family][name]
        ranks = [operand.rank for operand in program.operands]
        for in_axes in positions(*ranks)[:: program.step]:
            args = [
                operand.make(axis, seed)
                for seed, (operand, axis) in enumerate(zip(program.operands, in_axes, strict=True))
            ]
            if program.counted:
                no_more_operations(program.fun, *args, in_axes=in_axes)
            smooth = program.smooth and in_axes == positions(*ranks)[0]
            own = dict(in_axes=in_axes, derivatives=smooth, against_jax=program.in_jax)
            own["tolerance"] = program.tolerance
            cases[f"{name} {in_axes}"] = (program.fun, *args, own)
    in_turn = any(FAMILIES[family][name].in_turn for name in names)
    with pytest.warns(bx.SequentialFallbackWarning) if in_turn else nullcontext():
        check_all(cases, jit=False, unrolled=False)
