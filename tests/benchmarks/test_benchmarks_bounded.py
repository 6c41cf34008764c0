"""The benchmark of bounded loops compares loops that have the same gradients, and says so."""

import jax
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks.bounded import WORKLOADS

from support.oracle import same


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.each_commit(1)
def test_all_loops_have_the_same_gradient(workload):
    data, count = workload.data(), np.int32(5)
    ours, *others = (
        jax.jit(jax.value_and_grad(lambda x, p, f=f: (f(count, x, p) ** 2).sum(), (0, 1)))(*data)
        for f in workload.loops().values()
    )
    for found in others:
        same(found, ours, dict(rtol=1e-4, atol=1e-4))


@pytest.mark.nightly
def test_the_command_measures_and_reports(tmp_path, capsys):
    one = "tanh of 256 numbers"  # each takes seconds to compile
    results = command.main(["bounded", "--quick", "--only", one, "--out", str(tmp_path)])
    assert [r.name for r in results] == [one]
    page = (tmp_path / "bounded.md").read_text()
    printed = capsys.readouterr().out
    for r in results:
        assert all(0 < x.low <= x.value <= x.high for x in r.ratios.values())
        assert f"| {r.name} | {r.steps} |" in page
        assert r.name in printed
    assert "times the temporaries" in page
