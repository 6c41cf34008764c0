"""The benchmarks of datasets on disk compare ways to the same results, and say so."""

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks.datasets import report
from benchmarks.datasets.measure import STEADY, Memory, Timed, Units
from benchmarks.datasets.ways import NEEDS, WAYS
from benchmarks.datasets.workloads import WORKLOADS


@pytest.mark.parametrize("name", [way for way in WAYS if way not in NEEDS])
def test_ways_lead_to_the_same_results(name, tmp_path):
    import zarr

    work = WORKLOADS["products of short rows"]
    work.save(tmp_path / "x.npy", 1500)  # the last slice is shorter
    WAYS[name](work, tmp_path / "x.npy", tmp_path / "y")
    x = np.load(tmp_path / "x.npy")
    (found,) = tmp_path.glob("y.[nz]*[yr]")
    got = np.load(found) if found.suffix == ".npy" else zarr.open_array(found, mode="r")[...]
    np.testing.assert_allclose(got, (x[:, :, None] * x[:, None]).reshape(len(x), -1), rtol=1e-6)


@pytest.mark.nightly
def test_the_command_measures_and_reports(tmp_path, capsys):
    only = [a for name in ("products", "memory", "many units") for a in ("--only", name)]
    timed, memory, units = command.main(["datasets", "--quick", *only, "--out", str(tmp_path)])
    assert isinstance(timed, Timed)
    assert isinstance(memory, Memory)
    assert isinstance(units, Units)
    assert timed.slowest in ("reading", "computing", "writing")
    assert timed.seconds.keys() >= {"reading", "computing", "writing", STEADY, "a loop to .npy"}
    assert list(memory.peak) == [0.01, 0.02]
    assert all(memory.peak[gb] >= memory.before[gb] > 1e7 for gb in memory.peak)
    page = (tmp_path / "datasets.md").read_text()
    assert report.summary([timed, memory, units]) in page
    assert "| products of short rows |" in page
    assert "products of short rows" in capsys.readouterr().out
