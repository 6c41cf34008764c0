"""The benchmarks around the compiled program compare things that do the same, and say so."""

import pytest

from benchmarks import __main__ as command
from benchmarks.around.workloads import WORKLOADS

from support.oracle import same

# Rows of different lengths are compared with a batch of equal ones: those compute other things.
ALIKE = ("jax.vmap", "all lanes at once")
CALLS = {n: w for n, w in WORKLOADS.items() if w.family != "tracing" and w.other in ALIKE}


@pytest.mark.parametrize("pair", CALLS.values(), ids=CALLS)
@pytest.mark.compiles(80)
def test_both_sides_call_the_same_function(pair):
    ours, other = (run() for run in pair.make(True))
    same(ours, other, dict(rtol=1e-4, atol=1e-5))


@pytest.mark.compiles(150)
@pytest.mark.nightly
def test_the_command_measures_and_reports(tmp_path, capsys):
    results = command.main(["around", "--quick", "--out", str(tmp_path)])
    assert [r.pair.name for r in results] == [w.name for w in WORKLOADS.values()]
    assert all(0 < r.ratio.low <= r.ratio.value <= r.ratio.high for r in results)
    page = (tmp_path / "around.md").read_text()
    printed = capsys.readouterr().out
    for r in results:
        assert f"| {r.pair.name} | {r.pair.other} |" in page
        assert r.pair.name in printed
    assert "processor time more than `import jax` alone" in page
