"""`cond` and `switch`: each row takes its own branch."""

from __future__ import annotations

from typing import Any

from jax import lax

from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.padded_rules.inside import Moving, as_function


@padded_rule("cond")
def _cond(op: Operation, index: Row, *rows: Row, branches: Any, **params: Any) -> Any:
    operands = Moving(rows)
    functions = [as_function(op, branch, operands) for branch in branches]
    if params.get("branches_platforms"):
        # The index is that of the platform compiled for, which must be known as such.
        by_platform: dict[str, Any] = {}
        for function, platforms in zip(functions, params["branches_platforms"], strict=True):
            by_platform.update(dict.fromkeys(platforms or ("default",), function))
        return lax.platform_dependent(*operands.values, **by_platform)
    return lax.switch(index.value, functions, *operands.values)
