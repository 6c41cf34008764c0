"""Programs of other libraries are measured, and tabled in two halves."""

from benchmarks import __main__ as command
from benchmarks.libraries.program import PROGRAMS


def test_the_command_measures_programs_and_tables_both_halves(tmp_path, capsys):
    only = ["--only", "Adam to a tolerance", "--only", "walks until"]
    results = command.main(["programs", "--quick", *only, "--out", str(tmp_path)])
    assert {r.half for r in results} == {"looked at", "held out"}
    for r in results:
        assert not r.failed
        assert min(r.same.values()) == 1
        assert all(ratio.low <= ratio.value <= ratio.high for ratio in r.run.values())
    page = (tmp_path / "programs.md").read_text()
    assert "## Looked at" in page
    assert "| optax: Adam to a tolerance, 64 | yes | " in page
    assert "walks until" in capsys.readouterr().out


def test_half_of_the_programs_are_held_out():
    held_out = [name for name, program in PROGRAMS.items() if not program.looked_at]
    assert len(PROGRAMS) >= 40
    assert len(held_out) >= len(PROGRAMS) / 2
