"""The search compiles, runs and tables drafted programs."""

from benchmarks import __main__ as command
from benchmarks.search.drafted import HALVES, PROGRAMS, half


def test_the_command_measures_drafted_programs_and_tables_them(tmp_path, capsys):
    only = ["--only", "int8, 16", "--only", "cumulative sum"]
    results = command.main(["search", "--quick", *only, "--out", str(tmp_path)])
    total, sort = results
    assert total.same
    assert total.run.value == 1
    assert 0 < sort.run.low <= sort.run.value <= sort.run.high
    assert all(s > 0 for r in results for s in (*r.compile_seconds, *r.trace_seconds))
    page = (tmp_path / "search.md").read_text()
    assert "Of 2 programs,\n1 compile to the same program" in page
    assert "| running | " in page
    assert "dense: cumulative sum" in capsys.readouterr().out


def test_halves_are_alike_in_size():
    ours = [name for name in PROGRAMS if half(name) == HALVES[0]]
    assert 0.4 < len(ours) / len(PROGRAMS) < 0.6
