"""What is compared where a batch makes things slow computes the same; the page shows programs."""

import pytest

from benchmarks import __main__ as command
from benchmarks.slow.measure import WORKLOADS
from benchmarks.slow.workload import HAND, JAX, OURS

from support.oracle import at_once, same


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.each_commit(3)
def test_all_ways_compute_the_same(workload):
    ways = workload.ways()
    assert set(ways) == ({JAX, HAND, OURS} if workload.batched else {HAND, OURS})
    *others, got = at_once(*ways.values())(*workload.data(3))
    for way, expected in zip(ways, others, strict=False):
        if workload.family == "Random bits" and way == JAX:
            continue  # of rbg keys jax.vmap draws other numbers than each key by itself
        same(got, expected, dict(rtol=2e-3, atol=2e-3), way)


def test_the_command_measures_and_shows_what_was_written_by_hand(tmp_path, capsys):
    results = command.main(["slow", "--quick", "--only", "det, 3 x 3", "--out", str(tmp_path)])
    (result,) = results
    assert 0 < result.ratios[JAX].low <= result.ratios[JAX].value <= result.ratios[JAX].high
    assert set(result.seconds) == set(result.temporary_bytes) == {JAX, HAND, OURS}
    page = (tmp_path / "slow.md").read_text()
    assert "def determinant_by_hand(m):" in page
    assert "| det, 3 x 3 |" in page
    assert "det, 3 x 3" in capsys.readouterr().out
