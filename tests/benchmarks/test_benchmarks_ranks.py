"""The benchmarks of declared ranks compare programs that compute the same, and say so."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import __main__ as command
from benchmarks.ranks import measure, report
from benchmarks.ranks.workloads import WORKLOADS

from support.oracle import at_once, same

SIZE = 3
TOLERANCE = dict(rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_all_ways_compute_the_same(workload):
    args = workload.data(SIZE)
    others = measure.others(workload)
    assert measure.BY_HAND in others
    got, *found = at_once(measure.ours(workload), *others.values())(*args)
    for way, expected in zip(others, found, strict=True):
        same(got, expected, TOLERANCE, way)


def test_jnp_vectorize_is_measured_where_no_argument_is_a_tree():
    for workload in WORKLOADS.values():
        trees = any(not isinstance(rank, int) for rank in workload.ranks)
        assert not (trees and workload.signature)
        assert (measure.VECTORIZE in measure.others(workload)) == (workload.signature is not None)


def test_a_function_is_traced_anew_each_time():
    traces = []

    @measure.anew
    def make(x):
        traces.append(x)
        return x

    for _ in range(2):
        jax.make_jaxpr(make())(1.0)
    assert len(traces) == 2


def test_another_package_is_measured_if_it_is_there(monkeypatch):
    class Package:
        @staticmethod
        def auto_vmap(*ranks):
            assert ranks == (2, 1)
            return lambda fun: jax.vmap(fun, (None, 0))

    workload = WORKLOADS["one matrix, many vectors"]
    monkeypatch.setattr(measure, "jax_autovmap", None)
    assert measure.AUTOVMAP not in measure.others(workload)
    monkeypatch.setattr(measure, "jax_autovmap", Package)
    other = measure.others(workload)[measure.AUTOVMAP]
    assert other(jnp.eye(2), jnp.ones((3, 2))).shape == (3, 2)


@pytest.mark.nightly
def test_the_command_measures_and_reports(tmp_path, capsys):
    chosen = "all of two dimensions"
    results = command.main(["ranks", "--quick", "--only", chosen, "--out", str(tmp_path)])
    expected = [
        f"{name}, {way}"
        for name, workload in WORKLOADS.items()
        if chosen in name
        for way in measure.others(workload)
    ]
    assert [r.name for r in results] == expected
    for r in results:
        assert 0 < r.trace.low <= r.trace.value <= r.trace.high
        assert 0 < r.run.low <= r.run.value <= r.run.high
        assert r.ours.counts["equations"] > 0
    page = (tmp_path / "ranks.md").read_text()
    printed = capsys.readouterr().out
    for r in results:
        assert f"| {r.name} |" in page
        assert r.name in printed
    assert report.summary(results) in page
    found = {r.name: r for r in results}
    merged = found[f"scalars, vectors, matrices, all of two dimensions, {measure.MERGED_BY_HAND}"]
    assert merged.hlo == "same"
