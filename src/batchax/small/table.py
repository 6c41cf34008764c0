"""Decompositions and products that can be computed with lanes last, by the names of primitives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from batchax import _compat
from batchax.jaxprs.own_primitives import divided
from batchax.jaxprs.words import Aval, Value
from batchax.small import eigh, product, qr, svd, tridiagonal_solve
from batchax.small.blocks import as_blocks_are, in_blocks
from batchax.small.cholesky import cholesky
from batchax.small.lu import lu
from batchax.small.pays import of_library
from batchax.small.triangular_solve import triangular_solve


class Decomposition(NamedTuple):
    """A decomposition, or a product.

    Attributes:
      run: computes it, of operands with lanes last and the parameters of the primitive. Its results
        are those of the primitive, in a list, with lanes last.
      ranks: how many dimensions of each operand are of one matrix, or of one vector; None: all.
      serves: whether it does what the primitive does for these operands of one matrix and
        parameters.
      pays: whether it takes less time, for so many lanes, in a loop or not.
      alone: whether its results are seldom operands of others. Where lanes are first they stay so,
        then, outside of it: a block is transposed sooner than all.
    """

    run: Callable[..., list[Any]]
    ranks: tuple[int, ...] | None
    serves: Callable[[Sequence[Aval], Any], bool] = lambda lane, params: True
    pays: Callable[[Sequence[Aval], int, Any, bool], bool] | None = None
    alone: bool = False


DECOMPOSITIONS = {
    "cholesky": Decomposition(cholesky, (2,), alone=True),
    "lu": Decomposition(lu, (2,)),
    "triangular_solve": Decomposition(triangular_solve, (2, 2)),
    "eigh": Decomposition(eigh.eigh, (2,), eigh.serves, alone=True),
    "qr": Decomposition(qr.qr, (2,), qr.serves, alone=True),
    "svd": Decomposition(svd.svd, (2,), svd.serves, alone=True),
    "tridiagonal_solve": Decomposition(
        tridiagonal_solve.tridiagonal_solve,
        (1, 1, 1, 2),
        tridiagonal_solve.serves,
        tridiagonal_solve.pays,
    ),
    "dot_general": Decomposition(product.product, None, product.serves, product.pays),
}


def with_lanes_last(
    primitive: str, operands: Sequence[Value], types: Sequence[Aval], params: Any, first: bool
) -> list[Any]:
    """What a primitive of JAX computes on a CPU, with lanes last, or as if so; of `types`.

    Lanes come last in operands and results, or first.
    """
    decomposition = DECOMPOSITIONS[primitive]
    run = functools.partial(decomposition.run, **params)
    # A product is one operation. A compiler that divides lanes among devices knows neither which
    # lanes a block has, nor what a call of a function of its own needs of others.
    if decomposition.ranks is None or divided():
        return as_blocks_are(run, first, operands)
    in_turn = functools.partial(in_blocks, run, first, types)
    return _compat.in_one_function(in_turn, types, operands)


def lanes_last_pays(
    primitive: str, lane: Sequence[Aval], lanes: int, params: Any, in_loop: bool
) -> bool:
    """Whether a primitive of JAX is to be computed with lanes last on a CPU.

    Args:
      primitive: its name.
      lane: the types of the operands for one matrix.
      lanes: how many matrices there are.
      params: the parameters of the primitive.
      in_loop: whether it is in a loop.
    """
    decomposition = DECOMPOSITIONS.get(primitive)
    if decomposition is None or not decomposition.serves(lane, params):
        return False
    if decomposition.ranks is not None and not _compat.single_kernels():
        return False  # as so many operations they would take long to compile, and to run
    if decomposition.pays is not None:
        return decomposition.pays(lane, lanes, params, in_loop)
    return of_library(primitive, lane[0].dtype.name, max(lane[0].shape), lanes, in_loop)
