"""What is decided for the programs of the benchmarks, in a golden file that reviews see change."""

import difflib

import jax
import pytest

from support import decisions

OF_FILE = jax.__version__ == "0.10.2" and not jax.config.jax_enable_x64


@pytest.mark.skipif(not OF_FILE, reason="the file is of the oldest JAX, in single precision")
@pytest.mark.parametrize("kind", decisions.KINDS)
@pytest.mark.in_every_part
@pytest.mark.compiles(300)
def test_decisions_are_those_of_the_golden_file(kind):
    blocks = decisions.FILE.read_text().split("\n")
    starts = [i for i, line in enumerate(blocks) if line and not line.startswith(" ")]
    ends = [*starts[1:], len(blocks)]
    mine = [
        line
        for i, j in zip(starts, ends, strict=True)
        if blocks[i].endswith(f"| {kind}")
        for line in blocks[i:j]
        if line
    ]
    changed = difflib.unified_diff(mine, list(decisions.lines(kind)), "golden", "now", n=1)
    assert not (diff := "\n".join(changed)), (
        f"{diff}\nIf that is meant, run `make decisions` and commit the file."
    )
