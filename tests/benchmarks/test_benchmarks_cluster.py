"""What a thousand workers lose, on paper; and the command that measures what it is made of."""

import pytest

from benchmarks import __main__ as command
from benchmarks.cluster.simulated import Case, simulated


def test_without_a_scheduler_little_is_lost():
    found = simulated(Case("shards", 0.5, 0.0), workers=100, units=50_000)
    assert 0 < found.lost < 0.05
    assert found.busy == 0
    assert found.again > 0


def test_a_scheduler_that_is_too_slow_is_the_limit():
    found = simulated(Case("slow", 0.5, 0.01), workers=100, units=10_000)
    assert found.busy == pytest.approx(1, abs=0.01)
    assert found.lost == pytest.approx(1, abs=0.05)  # it takes a second for what workers do in half


@pytest.mark.only_in_whole_runs
def test_the_command_measures_and_reports(tmp_path, capsys):
    results = command.main(["cluster", "--quick", "--out", str(tmp_path)])
    page = (tmp_path / "cluster.md").read_text()
    printed = capsys.readouterr().out
    assert len(results) == 7
    for result in results[:3]:
        assert f"| {result.name} |" in page
        assert result.name in printed
    assert "What breaks first" in page
