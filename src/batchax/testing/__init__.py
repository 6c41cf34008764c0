"""Tests for packages that add a source or a store: classes of pytest, to be subclassed.

It needs pytest, and nothing else of batchax imports it.
"""

import pytest

pytest.register_assert_rewrite("batchax.testing.sources", "batchax.testing.stores")

from batchax.testing.sources import SourceTests  # noqa: E402
from batchax.testing.stores import StoreTests  # noqa: E402

__all__ = ["SourceTests", "StoreTests"]
