"""Decompositions and products that can be computed with lanes last, by the names of primitives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.jaxprs.bodies import Anywhere
from batchax.jaxprs.primitive_facts import divided
from batchax.jaxprs.types import Aval, Eqn, Value, Values
from batchax.linalg import eigh, product, qr, svd
from batchax.linalg.elements import largest, parts
from batchax.linalg.pays import of_library
from batchax.linalg.systems import cholesky, lu, triangular_solve, with_permutation

_SIZE = 112  # an odd multiple of a vector's: rows that lie powers of two apart evict each other


def in_blocks(
    run: Callable[..., Sequence[Any]], first: bool, types: Sequence[Aval], *arrays: Value
) -> list[Any]:
    """Computes `run`, which has lanes last, of a block of lanes of `arrays` at a time.

    With `first`, lanes come first in arrays and results; `types` are those of the results.
    """
    at = lambda x: 0 if first else x.ndim - 1
    lanes = arrays[0].shape[at(arrays[0])]

    placed = lambda *arrays: as_blocks_are(run, first, arrays)
    if lanes <= _SIZE:
        return placed(*arrays)

    # Lanes of the last block that there are too few of are computed by the last two.
    def block(i: Value, outs: Values) -> list[Any]:
        start = lax.min(i * _SIZE, lanes - _SIZE)
        parts = [lax.dynamic_slice_in_dim(x, start, _SIZE, at(x)) for x in arrays]
        written = zip(outs, placed(*parts), strict=True)
        return [lax.dynamic_update_slice_in_dim(x, y, start, at(x)) for x, y in written]

    outs = [jnp.zeros(x.shape, x.dtype) for x in types]
    return lax.fori_loop(0, -(-lanes // _SIZE), block, outs)


def as_blocks_are(run: Callable[..., Sequence[Any]], first: bool, arrays: Values) -> list[Any]:
    """Computes `run`, which has lanes last, of arrays that have them first or last, as the results
    do.
    """
    if not first:
        return list(run(*arrays))
    return [jnp.moveaxis(x, -1, 0) for x in run(*(jnp.moveaxis(x, 0, -1) for x in arrays))]


class Decomposition(NamedTuple):
    """Describes how a decomposition, or a product, is computed."""

    # Of operands with lanes last and the parameters of the primitive; its results are those of the
    # primitive, in a list, with lanes last.
    run: Callable[..., list[Any]]
    ranks: tuple[int, ...] | None  # dimensions of one matrix, or vector, of each operand; None: all
    # whether it does what the primitive does for these operands of one matrix
    serves: Callable[[Sequence[Aval], Any], bool] = lambda lane, params: True
    # whether it takes less time, for so many lanes, in a loop or not
    pays: Callable[[Sequence[Aval], int, Any, int], bool] | None = None
    # Whether its results are seldom operands of others. Lanes that are first stay so, then, outside
    # of it: a block is transposed sooner than all.
    alone: bool = False
    # results that are a choice among right ones, such as signs of vectors
    choices: tuple[int, ...] = ()
    # Whether it does what the library does for finite matrices only. Of a NaN or an infinity the
    # library makes pivots, signs and numbers that follow no rule.
    finite: bool = False
    # makes all results from those of the library
    of_library: Callable[..., list[Any]] = lambda *outs: list(outs)


DECOMPOSITIONS = {
    "cholesky": Decomposition(cholesky, (2,), alone=True, finite=True),
    "lu": Decomposition(lu, (2,), finite=True, of_library=with_permutation),
    "triangular_solve": Decomposition(triangular_solve, (2, 2)),
    "eigh": Decomposition(eigh.eigh, (2,), eigh.serves, alone=True, choices=(0,)),
    "qr": Decomposition(qr.qr, (2,), qr.serves, alone=True, choices=(0, 1), finite=True),
    "svd": Decomposition(svd.svd, (2,), svd.serves, alone=True, choices=(1, 2)),
    "dot_general": Decomposition(product.product, None, product.serves, product.pays),
}


def _chooses(eqn: Eqn) -> bool:
    decomposition = DECOMPOSITIONS.get(eqn.primitive.name)
    return decomposition is not None and bool(decomposition.choices)


chooses = Anywhere(_chooses)
"""Whether a decomposition has results that are a choice."""


def with_lanes_last(
    primitive: str,
    operands: Values,
    types: Sequence[Aval],
    params: dict[str, Any],
    first: bool,
    library: Callable[..., list[Any]],
) -> list[Any]:
    """Computes what a primitive of JAX computes on a CPU, with lanes last, or as if so.

    `library` computes the same of all lanes; it runs only where there are lanes that this does not
    serve.
    """
    decomposition = DECOMPOSITIONS[primitive]
    run = functools.partial(decomposition.run, **params)
    if not decomposition.finite:
        return _in_one_function(decomposition, run, first, types, operands)
    with_flags = lambda a: [*run(a), largest(parts(a)) < np.inf]
    at = 0 if first else -1
    flags = jax.ShapeDtypeStruct((operands[0].shape[at],), bool)
    *outs, finite = _in_one_function(decomposition, with_flags, first, [*types, flags], operands)

    def repaired(outs: Values, operands: Values) -> list[Any]:
        others = decomposition.of_library(*library(*operands))
        own = lambda x: lax.broadcast_in_dim(finite, x.shape, [at % x.ndim])
        return [jnp.where(own(x), x, y) for x, y in zip(outs, others, strict=True)]

    # Nearly always all lanes are finite, and the library is not called.
    return lax.cond(finite.all(), lambda outs, _: outs, repaired, outs, operands)


def _in_one_function(
    decomposition: Decomposition,
    run: Callable[..., list[Any]],
    first: bool,
    types: Sequence[Aval],
    operands: Values,
) -> list[Any]:
    # A product is one operation. A compiler that divides lanes among devices knows neither which
    # lanes a block has, nor what a call of a separate function needs of others.
    if decomposition.ranks is None or divided():
        return as_blocks_are(run, first, operands)
    in_turn = functools.partial(in_blocks, run, first, types)
    return _compat.single_kernel(in_turn, types, operands)


def lanes_last_pays(
    primitive: str, lane: Sequence[Aval], lanes: int, params: dict[str, Any], in_loop: int
) -> bool:
    """Whether a primitive of JAX is to be computed with lanes last on a CPU.

    `lane` has the types of the operands for one matrix; `in_loop` is as `Axis.in_loop`.
    """
    decomposition = DECOMPOSITIONS.get(primitive)
    if decomposition is None or not decomposition.serves(lane, params):
        return False
    if decomposition.ranks is not None and not _compat.single_kernels():
        return False  # as so many operations they would take long to compile, and to run
    if decomposition.pays is not None:
        return decomposition.pays(lane, lanes, params, in_loop)
    return of_library(primitive, lane[0].dtype.name, max(lane[0].shape), lanes, in_loop)
