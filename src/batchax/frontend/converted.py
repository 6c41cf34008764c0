"""Arrays of NumPy in the dtypes that JAX computes with."""

from __future__ import annotations

from typing import Any

import numpy as np


def converted(x: np.ndarray, dtype: Any) -> np.ndarray:
    """An array in the dtype that JAX computes with, which may have fewer bits than its own.

    Raises:
      OverflowError: a number does not fit.
    """
    converted = np.asarray(x, dtype)
    narrower = np.issubdtype(x.dtype, np.integer) and converted.dtype != x.dtype
    if narrower and (converted != x).any():  # the last 32 bits are another number
        raise OverflowError(
            f"a number of dtype {x.dtype} does not fit into {dtype}, with which JAX computes if "
            "JAX_ENABLE_X64=1 is not set"
        )
    return converted
