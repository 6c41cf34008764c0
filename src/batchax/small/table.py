"""The decompositions that can be computed with lanes last, by the names of JAX's primitives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from batchax.jaxprs.words import Aval
from batchax.small import eigh, qr, svd
from batchax.small.cholesky import cholesky
from batchax.small.lu import lu
from batchax.small.pays import pays
from batchax.small.triangular_solve import triangular_solve


class Decomposition(NamedTuple):
    """A decomposition.

    Attributes:
      run: computes it, of operands with lanes last and the parameters of the primitive. Its results
        are those of the primitive, in a list, with lanes last.
      ranks: how many dimensions of each operand are of one matrix, or of one vector.
      serves: whether it does what the primitive does for these operands of one matrix and
        parameters.
    """

    run: Callable[..., list[Any]]
    ranks: tuple[int, ...]
    serves: Callable[[Sequence[Aval], Any], bool] = lambda lane, params: True


DECOMPOSITIONS = {
    "cholesky": Decomposition(cholesky, (2,)),
    "lu": Decomposition(lu, (2,)),
    "triangular_solve": Decomposition(triangular_solve, (2, 2)),
    "eigh": Decomposition(eigh.eigh, (2,), eigh.serves),
    "qr": Decomposition(qr.qr, (2,), qr.serves),
    "svd": Decomposition(svd.svd, (2,), svd.serves),
}


def lanes_last_pays(primitive: str, lane: Sequence[Aval], lanes: int, params: Any) -> bool:
    """Whether a primitive of JAX is to be computed with lanes last on a CPU.

    Args:
      primitive: its name.
      lane: the types of the operands for one matrix.
      lanes: how many matrices there are.
      params: the parameters of the primitive.
    """
    decomposition = DECOMPOSITIONS.get(primitive)
    if decomposition is None or not decomposition.serves(lane, params):
        return False
    return pays(primitive, lane[0].dtype.name, max(lane[0].shape), lanes)
