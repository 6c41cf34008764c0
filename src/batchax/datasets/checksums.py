"""Checksums of what is written: crc32c, by which damage on disk is found."""

from __future__ import annotations

import numpy as np

from batchax.datasets.parts import Rows


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
