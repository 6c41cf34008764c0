"""Calls of the host by functions of rows, where rows do not run as they come."""

from __future__ import annotations

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.words import ClosedJaxpr
from batchax.rules.lane_calls import calls_in


def refuse_order(program: ClosedJaxpr) -> None:
    """Refuses a program of a row with calls in order, where rows run in groups.

    Raises:
      UnsupportedError: it has one.
    """
    for call in (call for eqn in program.jaxpr.eqns for call in calls_in(eqn)):
        if _compat.in_order(call.effects):
            raise UnsupportedError(
                f"{_compat.user_line(call.source_info)}: a callback is to be called in order "
                "(ordered=True), and rows run in groups, by their lengths (buckets= or "
                'layout="grouped" was given, or the function needs lengths as numbers). Leave out '
                "ordered, or what groups them."
            )


def refuse_calls(program: ClosedJaxpr) -> None:
    """Refuses a program of a row that calls the host, where rows are dealt out to devices.

    Raises:
      UnsupportedError: it does.
    """
    for call in (call for eqn in program.jaxpr.eqns for call in calls_in(eqn)):
        raise UnsupportedError(
            f"{_compat.user_line(call.source_info)}: a callback with effects is called for rows "
            "that are dealt out to devices (mesh was given): some have a row that is there twice, "
            "and would make its calls twice. Return values instead, or leave mesh out."
        )
