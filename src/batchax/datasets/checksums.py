"""Checksums of what is written: crc32c, by which damage on disk is found.

What is written as JSON holds its own: a line `{...,"crc32c":"01234567"}`, of all that precedes it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from batchax.datasets.parts import Rows
from batchax.errors import StorageError


def crc32c(data: bytes | np.ndarray, so_far: int = 0) -> int:
    """The crc32c of bytes, or of an array's in C order, that follow those with the crc `so_far`."""
    try:
        import google_crc32c
    except ImportError as error:
        raise ImportError(
            "Checksums of what is written need google-crc32c: pip install 'batchax[data]'"
        ) from error
    if isinstance(data, np.ndarray):
        # As plain bytes: types that NumPy has not of itself, bfloat16 for one, lend out no memory.
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return google_crc32c.extend(so_far, data)


def checksum(result: np.ndarray | Rows) -> int:
    """The crc32c of a result: of an array, or of the data of rows and then their lengths."""
    if isinstance(result, Rows):
        # Stores hand lengths back in the type of integers that they keep them in.
        return crc32c(np.asarray(result.lengths, np.int64), crc32c(result.data))
    return crc32c(result)


_SEAL = b',"crc32c":"%08x"}'
_SEAL_SIZE = len(_SEAL % 0)


def sealed(entry: Mapping[str, Any]) -> bytes:
    """A line of JSON that holds its own checksum, with its end; there must be something in it."""
    text = json.dumps(entry, separators=(",", ":")).encode()[:-1]
    return text + _SEAL % crc32c(text) + b"\n"


def is_whole(line: bytes) -> bool:
    """Whether a line, without its end, is what `sealed` made it."""
    text, seal = line[:-_SEAL_SIZE], line[-_SEAL_SIZE:]
    return seal == _SEAL % crc32c(text)


def unsealed(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """What lines say that are whole. All at once: a parser is begun once for all of them."""
    return json.loads(b"[" + b",".join(lines) + b"]")


@contextlib.contextmanager
def foreign(path: object) -> Iterator[None]:
    """For what is read of lines that are whole: if they say something else than ours do, somebody
    else wrote them.

    Raises:
      StorageError: they do.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StorageError(
            f"{path} holds what batchax did not write: {type(error).__name__}: {error}. Look who "
            "put it there, and delete it, or the folder that it is in, to compute that again."
        ) from error
