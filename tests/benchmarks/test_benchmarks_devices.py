"""The benchmarks of lanes on devices compare programs that compute the same, and say so."""

import os
import subprocess

import jax
import pytest

from benchmarks import __main__ as command
from benchmarks.devices import measure, report
from benchmarks.devices.workloads import WORKLOADS

from support.oracle import at_once, same

TOLERANCE = dict(rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_both_sides_compute_the_same(workload):
    mesh = measure.mesh_of(measure.DEVICES)
    args = workload.placed(mesh, 8 - workload.lanes % 2)
    got, expected = at_once(workload.ours(mesh), workload.by_hand(mesh))(*args)
    same(got, expected, TOLERANCE)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_each_device_has_its_share_of_the_work(workload):
    one, four = (measure.flops_of_one(workload, n) for n in (1, 4))
    assert one / 4 <= four < one / 4 * 1.01


def test_a_process_with_too_few_devices_asks_another(monkeypatch):
    sent = {}

    def run(arguments, **options):
        sent.update(options, code=arguments[-1])
        return subprocess.CompletedProcess(arguments, 0, stdout=measure.pickle.dumps("result"))

    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(measure.subprocess, "run", run)
    workload = next(iter(WORKLOADS.values()))
    assert list(measure.measured(workload, True)) == ["result"]
    assert f"send({workload.name!r}, True)" in sent["code"]
    assert sent["env"]["XLA_FLAGS"].endswith("device_count=4")
    assert sent["env"].items() >= {
        k: v for k, v in os.environ.items() if "XLA" not in k
    }.items() - {("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS"))}


@pytest.mark.nightly
def test_the_command_measures_and_reports(tmp_path, capsys):
    results = command.main(["devices", "--quick", "--only", "elem", "--out", str(tmp_path)])
    assert [r.result.name for r in results] == ["elementwise", "elementwise, uneven"]
    for r in results:
        assert r.result.hlo == "same"
        assert 0 < r.result.run.low <= r.result.run.value <= r.result.run.high
    assert all(r.same for r in results)
    page = (tmp_path / "devices.md").read_text()
    printed = capsys.readouterr().out
    for r in results:
        assert f"| {r.result.name} |" in page
        assert r.result.name in printed
    assert report.summary(results) in page
