"""The benchmarks of lanes that diverge compare programs that compute the same, and say so."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import measure
from benchmarks.divergence import report
from benchmarks.divergence.measure import FEW_STEPS, WORKLOADS
from benchmarks.divergence.workload import BASE

from support.oracle import same, together

LANES = 4
SLOW_TO_COMPILE = {"adaptive ODE solver", "NUTS"}
CHEAP = {
    name: w
    for name, w in WORKLOADS.items()
    if name not in SLOW_TO_COMPILE and not name.startswith("in place, ")
}
CHEAP["in place"] = WORKLOADS["in place, 10,000 elements"]
TOLERANCE = dict(rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("workload", CHEAP.values(), ids=CHEAP)
@pytest.mark.each_commit(3)
def test_all_ways_compute_the_same(workload):
    args = workload.arguments(LANES, FEW_STEPS)
    ways = workload.uses()["values"]
    assert {"auto", "compact"} <= set(ways)
    found = jax.jit(together(ways))(*args)
    expected = found.pop(BASE)
    for way, got in found.items():
        same(got, expected, TOLERANCE, way)


@pytest.mark.parametrize("lanes", [1, 3, 100])
def test_compaction_and_refill_by_hand(lanes):
    workload = WORKLOADS["64x64 products, heavy-tailed counts"]
    args = workload.arguments(lanes, FEW_STEPS)
    found = jax.jit(together({**workload.others, "jax.vmap": workload.ways()["jax.vmap"]}))(*args)
    expected = found.pop(BASE)
    assert found
    for way, got in found.items():
        same(got, expected, TOLERANCE, way)


def test_the_steps_of_use_are_those_that_lanes_take():
    workload = WORKLOADS["64x64 products, heavy-tailed counts"]
    args = workload.arguments(LANES, FEW_STEPS)
    counts = np.asarray(args[0])
    compact, masked = workload.utilization(args)
    assert masked == counts.sum() / (LANES * counts.max())
    assert masked <= compact <= 1


@pytest.mark.nightly
def test_the_command_measures_and_reports(tmp_path, capsys):
    only = "heavy-tailed"
    results = command.main(["divergence", "--quick", "--only", only, "--out", str(tmp_path)])
    assert [r.name for r in results] == ["64x64 products, heavy-tailed counts"]
    page = (tmp_path / "divergence.md").read_text()
    printed = capsys.readouterr().out
    for r in results:
        assert r.yardsticks
        for way in r.others.values():
            assert 0 < way.run.low <= way.run.value <= way.run.high
        assert f"| {r.name} |" in page
        assert r.name in printed
    assert report.summary(results) in page
    assert (tmp_path / "divergence.png").stat().st_size > 1000


def test_on_another_device_sizes_and_ways_are_those_of_it(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        command.main(["divergence", "--device", "gpu", "--quick"])
    assert "JAX runs programs on cpu here" in capsys.readouterr().err
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    hurry = replace(measure.QUICK, most_lanes=LANES, times_lanes=3)
    monkeypatch.setattr(measure, "ON_A_GPU", hurry)
    only = ["--only", "Newton", "--minutes", "1", "--out", str(tmp_path)]
    (result,) = command.main(["divergence", "--device", "gpu", *only])
    assert result.lanes == 3 * LANES
    assert {"auto", "compact"} <= set(result.ways)
    assert "lax.map" not in result.ways
    assert "on a GPU\n" in (tmp_path / "divergence.md").read_text()
