"""What editors know of batchax: pyright says of the examples what is written there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).with_name("examples.py")


def test_a_type_checker_says_what_is_written():
    pytest.importorskip("pyright")
    checker = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    run = subprocess.run(
        [*checker, EXAMPLES], cwd=EXAMPLES.parents[2], capture_output=True, text=True
    )
    found = {}
    for message in json.loads(run.stdout)["generalDiagnostics"]:
        revealed = re.search(r' is "(.*)"$', message["message"])
        said = message.get("rule") or (revealed and revealed[1]) or message["message"]
        found[message["range"]["start"]["line"] + 1] = said
    lines = EXAMPLES.read_text().splitlines()
    written = {i: line.split("  # ")[1] for i, line in enumerate(lines, 1) if "  # " in line}
    assert found == written
