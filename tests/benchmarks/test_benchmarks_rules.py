"""The benchmarks of rules compare programs that compute the same, and say so."""

import jax
import pytest

import batchax as bx
from benchmarks import __main__ as command
from benchmarks.rules.workloads import USES, WORKLOADS

from support.oracle import same

LANES = 3
TOLERANCE = dict(rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.each_commit(2)
def test_a_function_with_its_rule_is_the_function(workload):
    functions = (workload.with_rule(), workload.fun)
    arguments = {name: workload.arguments(name, LANES) for name in USES}

    @jax.jit
    def compute(arguments):
        return {
            name: [USES[name].of(f)(*args) for f in functions] for name, args in arguments.items()
        }

    for name, (got, expected) in compute(arguments).items():
        same(got, expected, TOLERANCE, name)


@pytest.mark.parametrize("name", USES)
def test_the_rule_is_measured_where_there_is_a_batch(name, monkeypatch):
    batched = []

    def recording(fun, *args):
        batched.append(fun)
        return vmap(fun, *args)

    workload = WORKLOADS["few operations"]
    ruled, vmap = workload.with_rule(), bx.vmap
    monkeypatch.setattr(bx, "vmap", recording)
    jax.make_jaxpr(USES[name].of(ruled))(*workload.arguments(name, LANES))
    assert (workload.fun in batched) == USES[name].batched  # the rule batches this


def test_a_function_is_traced_anew_each_time():
    workload = WORKLOADS["few operations"]
    for name, use in USES.items():
        traces = []

        def fun(w, x, traces=traces):
            traces.append(x)
            return workload.fun(w, x)

        args = workload.arguments(name, LANES)
        jax.make_jaxpr(use.of(fun))(*args)
        once = len(traces)
        jax.make_jaxpr(use.of(fun))(*args)
        assert len(traces) == 2 * once > 0


@pytest.mark.nightly
def test_the_command_measures_and_reports(tmp_path, capsys, monkeypatch):
    for use in set(USES) - {"call", "vmap of gradient"}:
        monkeypatch.delitem(USES, use)
    results = command.main(["rules", "--quick", "--only", "few operations", "--out", str(tmp_path)])
    assert [r.name for r in results] == [f"few operations, {use}" for use in USES]
    for r in results:
        assert 0 < r.trace.low <= r.trace.value <= r.trace.high
        assert 0 < r.run.low <= r.run.value <= r.run.high
        assert r.ours.counts["equations"] > 0
    page = (tmp_path / "rules.md").read_text()
    printed = capsys.readouterr().out
    for r in results:
        assert f"| {r.name} |" in page
        assert r.name in printed
    for use in USES:
        assert f"- Tracing, {use}: " in page
    assert "Functions with a loop" not in page
