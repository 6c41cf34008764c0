"""Writes docs/reference/together.md: which features go together, and what refuses which.

python tools/generate_together.py [file to write]
"""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import together

if __name__ == "__main__":
    page = Path(__file__).parents[1] / "docs" / "reference" / "together.md"
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else page
    target.write_text(together.page())
