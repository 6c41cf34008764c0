"""The benchmarks of rows compare programs that compute the same, and say so."""

import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from benchmarks import __main__ as command
from benchmarks.rows import measure, report
from benchmarks.rows.workloads import WORKLOADS, data

from support.oracle import at_once, same

COUNT = 5
TOLERANCE = dict(rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.each_commit(2)
def test_all_ways_compute_the_same(workload):
    rows, weights = data(workload, COUNT)
    by_hand = filter(None, (workload.padded, workload.packed))
    got, *found = at_once(measure.ours(workload), *by_hand)(rows, weights)
    if isinstance(got, bx.Ragged):
        (padded,) = found
        got, found = got.data, [jnp.asarray(np.asarray(padded)[np.asarray(rows.mask)])]
    for expected in found:
        same(got, expected, tolerance=TOLERANCE)


@pytest.mark.compiles(60)
def test_the_command_measures_and_reports(tmp_path, capsys):
    results = command.main(["rows", "--quick", "--only", "bag", "--out", str(tmp_path)])
    ways = [measure.PADDED, measure.PACKED, measure.LOOP]
    assert [r.way for r in results] == 2 * ways
    page = (tmp_path / "rows.md").read_text()
    printed = capsys.readouterr().out
    for r in results:
        assert 0 < r.run.low <= r.run.value <= r.run.high
        assert f"| {r.name} | {r.way} |" in page
        assert r.name in printed
    assert report.summary(results) in page
    assert (tmp_path / "rows.png").stat().st_size > 1000
