"""What rows that share an array of one size cannot do: callbacks and collectives of a row.

Where none of their operands is ragged they are left as they are.
"""

from __future__ import annotations

from typing import Any

from batchax.rows.padded import Operation, Row, padded_rule

_CALLBACK = (
    "what it hands to Python would be a row with padding. Hand over values whose shape is the same "
    "for all rows, such as a sum, or call it on the Ragged outside vmap."
)
_COLLECTIVE = (
    "rows of different lengths cannot be added up or exchanged. Reduce over the row first, so that "
    "each row gives a value of the same shape."
)

_REFUSED = {
    "pure_callback": _CALLBACK,
    "io_callback": _CALLBACK,
    "debug_callback": _CALLBACK,
    "debug_print": _CALLBACK,
    "ffi_call": _CALLBACK,
    "all_gather": _COLLECTIVE,
    "all_gather_invariant": _COLLECTIVE,
    "all_to_all": _COLLECTIVE,
    "pbroadcast": _COLLECTIVE,
    "pgather": _COLLECTIVE,
    "pmax": _COLLECTIVE,
    "pmin": _COLLECTIVE,
    "ppermute": _COLLECTIVE,
    "psum": _COLLECTIVE,
    "psum2": _COLLECTIVE,
    "psum_invariant": _COLLECTIVE,
    "psum_scatter": _COLLECTIVE,
    "ragged_all_to_all": _COLLECTIVE,
    "reduce_scatter": _COLLECTIVE,
}


def _refuse(name: str, why: str) -> None:
    @padded_rule(name)
    def rule(op: Operation, *rows: Row, **params: Any) -> Any:
        raise op.refuse(why)


for _name, _why in _REFUSED.items():
    _refuse(_name, _why)
