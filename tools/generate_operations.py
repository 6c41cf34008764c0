"""Writes docs/reference/operations.md: how functions of jax.numpy and its siblings run on rows.

python tools/generate_operations.py [file to write]
"""

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import row_operations

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    page = Path(__file__).parents[1] / "docs" / "reference" / "operations.md"
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else page
    target.write_text(row_operations.page())
