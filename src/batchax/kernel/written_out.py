"""Bounded loops, and sweeps back over them, as the operations that they stand for.

Both are a loop that one example leaves when it is done, whatever else they are to derivatives. So
they are cut as a ``while`` is where values are all that is asked for.
"""

from __future__ import annotations

from batchax import _compat
from batchax.jaxprs.own_primitives import operations_of
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.words import ClosedJaxpr, Eqn
from batchax.memo import Memo

LOOPS = frozenset({"bounded_loop", "reverse_sweep"})


def written_out(eqn: Eqn) -> ClosedJaxpr | None:
    """The program that an equation stands for, of its operands; None if it is no such loop.

    Nor one that uses the name of an axis: nobody says here how large that is.
    """
    if eqn.primitive.name not in LOOPS or _compat.named_axes(eqn.effects):
        return None
    types = tuple(v.aval for v in eqn.invars)
    key = value_key((eqn.primitive, types, tuple(sorted(eqn.params.items()))))
    return _written.get((key, _compat.trace_context()), lambda: operations_of(eqn))


_written = Memo("bounded loops as operations", most=256)
