"""The benchmarks of nested loops compare programs that do the same, and count their steps."""

import jax
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks.nests import report, steps
from benchmarks.nests.measure import FEW_STEPS, WORKLOADS
from benchmarks.nests.peers import on_threads
from benchmarks.nests.workload import BASE, not_installed

from support.oracle import same, together

LANES = 4
OF_LIBRARIES = {name for name, w in WORKLOADS.items() if w.needs}
CHEAP = {name: w for name, w in WORKLOADS.items() if name not in OF_LIBRARIES}
TOLERANCE = dict(rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("nest", CHEAP.values(), ids=CHEAP)
def test_all_ways_compute_the_same(nest):
    args = nest.data(LANES, FEW_STEPS)
    found = jax.jit(together(nest.ways()))(*args)
    expected = found.pop(BASE)
    for way, got in found.items():
        same(got, expected, TOLERANCE, way)
    counts = nest.inner_steps(args, expected)
    assert counts.shape[:2] == (LANES, FEW_STEPS)
    assert 0 <= steps.bound(counts) <= 1


def test_threads_compute_the_same():
    nest = WORKLOADS["rejection sampling"]
    args = nest.data(LANES, FEW_STEPS)
    pieces = [nest.of_lanes(args, piece) for piece in (slice(0, 2), slice(2, 4))]
    same(on_threads(nest.one_by_one, pieces)(), jax.jit(nest.one_by_one)(*args), TOLERANCE)


def test_steps_with_barriers_and_without():
    counts = np.array([[[1, 2], [3, 0]], [[4, 0], [0, 1]]])
    assert steps.masked(counts) == 4 + 2 + 3 + 1
    assert steps.free(counts) == 6
    assert steps.bound(counts) == 6 / 10
    assert steps.of_use(counts) == (11 / 20, 11 / 12)
    active = steps.active(counts)
    np.testing.assert_allclose(active["with barriers"][1] * 2, [2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    np.testing.assert_allclose(active["without"][1] * 2, [2, 2, 2, 2, 2, 2, 1])
    np.testing.assert_allclose(active["without"][0], np.arange(7) / 10)


def test_leaves_of_each_doubling():
    counts = WORKLOADS["NUTS, 64 chains"].counts
    total, doublings = np.array([[1, 7, 9]]), np.array([[1, 3, 4]])
    leaves = counts(None, (None, (total, doublings)))
    np.testing.assert_array_equal(leaves.sum(-1), total)
    np.testing.assert_array_equal(leaves[0, :, :4], [[1, 0, 0, 0], [1, 2, 4, 0], [1, 2, 4, 2]])


@pytest.mark.nightly
def test_the_command_measures_and_reports(tmp_path, capsys):
    only = "rejection sampling"
    (result,) = command.main(["nests", "--quick", "--only", only, "--out", str(tmp_path)])
    page, printed = (tmp_path / "nests.md").read_text(), capsys.readouterr().out
    for way in result.others.values():
        assert 0 < way.run.low <= way.run.value <= way.run.high
        assert way.same == 1
    assert f"| {only} |" in page
    assert only in printed
    assert report.summary([result]) in page
    assert (tmp_path / "nests.png").stat().st_size > 1000
    assert (tmp_path / "nests-use.png").stat().st_size > 1000


def test_what_is_not_installed_is_left_out(monkeypatch, capsys):
    from benchmarks.nests import measure

    assert not_installed(("jax", "no_such_module")) == ["no_such_module"]
    monkeypatch.setattr(type(WORKLOADS["beam search"]), "missing", lambda _: ["no_such_module"])
    assert list(measure.measured(WORKLOADS["beam search"], quick=True)) == []
    assert "no_such_module" in capsys.readouterr().out
