"""Ranks from a signature in the manner of NumPy's generalised ufuncs: "(n),(n,m)->(m)"."""

from __future__ import annotations

import re

from batchax.errors import ArgumentTypeError
from batchax.jaxprs.spoken import brief
from batchax.ranks.core import Core, Dim

_CORE = r"\(\s*(?:\w+(?:\s*,\s*\w+)*)?\s*\)"
_LIST = rf"\s*(?:{_CORE}(?:\s*,\s*{_CORE})*)?\s*"
_SIGNATURE = re.compile(rf"({_LIST})->({_LIST})")


def parse_signature(text: str) -> tuple[list[Core], list[Core]]:
    """The cores of the inputs and of the outputs.

    Raises:
      ArgumentTypeError: `text` is not a signature.
    """
    match = _SIGNATURE.fullmatch(text)
    if match is None:
        raise ArgumentTypeError(
            f"{brief(text)} is not a signature of core dimensions: expected the form "
            '"(n),(n,m)->(m)", with a name or a size for each dimension, and () for a scalar.'
        )
    inputs, outputs = (list(map(_core, re.findall(_CORE, part))) for part in match.groups())
    return inputs, outputs


def _core(text: str) -> Core:
    return Core(tuple(map(_dim, re.findall(r"\w+", text))))


def _dim(text: str) -> Dim:
    if text.isdigit():
        return Dim(text, size=int(text))
    if not text.isidentifier():
        raise ArgumentTypeError(
            f"{brief(text)} is neither a name nor the size of a core dimension."
        )
    return Dim(text, name=text)
