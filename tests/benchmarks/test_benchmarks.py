"""The benchmarks measure what they claim to: equal results, and a report that says so."""

from collections import Counter

import jax
import pytest

import batchax as bx
from batchax.programs.hlo import normalised_hlo, operations
from benchmarks import __main__ as command
from benchmarks.measure import ratio_of_medians
from benchmarks.programs import counts, primitives
from benchmarks.workloads import WORKLOADS

from support.oracle import at_once, same, same_type

LANES = 3


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.each_commit(8)
def test_both_vmaps_give_the_same(workload):
    args = workload.data(LANES)
    expected, got = at_once(*map(workload.batched_by, (jax.vmap, bx.vmap)))(*args)
    same(got, expected, tolerance=dict(rtol=1e-4, atol=1e-4))
    jax.tree.map(same_type, got, expected)


def test_the_command_measures_and_reports(tmp_path, capsys):
    chosen = ["softmax and logsumexp", "matvec with own matrix"]
    only = [word for name in chosen for word in ("--only", name)]
    results = command.main(["--quick", *only, "--out", str(tmp_path)])
    assert [r.name for r in results] == chosen
    for r in results:
        assert r.ours.counts["equations"] > 0
        assert min(r.ours.total_bytes, r.other.total_bytes) > 0
        assert 0 < r.trace.low <= r.trace.value <= r.trace.high
        assert 0 < r.run.low <= r.run.value <= r.run.high
    page = (tmp_path / "vmap.md").read_text()
    printed = capsys.readouterr().out
    for name in chosen:
        assert f"| {name} |" in page
        assert name in printed
    assert (tmp_path / "vmap.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_names_what_there_is(capsys):
    with pytest.raises(SystemExit):
        command.main(["--only", "no such workload"])
    assert "softmax and logsumexp" in capsys.readouterr().err


def test_counts_reach_inner_programs():
    def f(x):
        return jax.lax.scan(lambda c, y: (jax.jit(lambda a: a.T + 1)(c) @ y, c), x, x[None])

    found = list(primitives(jax.make_jaxpr(f)(jax.numpy.ones((2, 2))).jaxpr))
    assert sorted(found) == sorted(
        ["broadcast_in_dim", "scan", "jit", "transpose", "add", "dot_general"]
    )
    counted = counts(Counter(found))
    assert counted["equations"] == 6
    assert counted["transposes"] == counted["broadcasts"] == counted["contractions"] == 1


def test_a_transpose_inside_a_reshape_counts():
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.reshape(x, (6,), (1, 0)))(jax.numpy.ones((2, 3)))
    assert list(primitives(jaxpr.jaxpr)) == ["reshape", "transpose"]


def test_hlo_is_compared_without_names_but_with_operations():
    x = jax.numpy.ones((4, 4))

    def compiled(f):
        return normalised_hlo(jax.jit(f).lower(x).compile().as_text())

    def first(a):
        return jax.numpy.sin(a) @ a

    def renamed(b):
        with jax.named_scope("elsewhere"):
            return jax.numpy.sin(b) @ b

    assert compiled(first) == compiled(renamed)
    assert operations(compiled(first))["sine"] == 1
    assert compiled(first) != compiled(lambda a: jax.numpy.cos(a) @ a)


def test_ratio_pairs_the_turns():
    slow_then_fast = [4.0] * 5 + [1.0] * 6  # the machine got faster half-way, for both
    ratio = ratio_of_medians([2 * t for t in slow_then_fast], slow_then_fast)
    assert ratio == type(ratio)(2.0, 2.0, 2.0)
