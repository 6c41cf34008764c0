"""Calls: the program inside acts on padded rows, too."""

from __future__ import annotations

from typing import Any

from batchax import _compat
from batchax.rows.padded import Operation, Row, padded_rule, run_padded


@padded_rule("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "composite")
def _call(op: Operation, *rows: Row, **params: Any) -> Any:
    body = _compat.close(params.get("jaxpr") or params["call_jaxpr"])
    return run_padded(op.sizes, body.jaxpr, body.consts, rows)
