"""What measures, counts and compares in the benchmarks; and what is kept over commits."""

import jax
import pytest

from benchmarks import __main__ as command
from benchmarks import history
from benchmarks.history import Run
from benchmarks.hlo import normalised_hlo, operations
from benchmarks.libraries.program import PROGRAMS
from benchmarks.measure import Ratio, ratio_of_medians


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


def test_half_of_the_programs_are_held_out():
    held_out = [name for name, program in PROGRAMS.items() if not program.looked_at]
    assert len(held_out) >= len(PROGRAMS) / 2 >= 20


# Over commits.


def runs(**values):
    """Runs of made-up commits, from the values of each measurement; None where it was not made."""
    count = max(map(len, values.values()))
    return [
        Run(f"c{i:02}", f"2100-01-{i + 1:02}", "By hand.", {
            name: Ratio(each[i], each[i] * 0.95, each[i] * 1.05)
            for name, each in values.items()
            if each[i] is not None
        })
        for i in range(count)
    ]  # fmt: skip


HISTORY = runs(
    steady=[1.0, 1.02, 0.98, 1.01, 1.03],
    slow=[1.0, 1.0, 1.1, 1.0, 1.5],
    fast=[2.0, 2.1, 2.0, 1.9, 1.0],
    new=[None, None, None, None, 3.0],
    gone=[1.0, 1.0, 1.0, 1.0, None],
    sparse=[1.0, None, 1.0, None, 1.0],
)


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "folder" / "history.jsonl"
    for run in HISTORY:
        history.append(file, run)
    assert history.read(file) == HISTORY
    again = Run("c01", "2100-02-01", "Again.", {"steady": Ratio(9.0, 9.0, 9.0)})
    history.append(file, again)
    assert history.read(file) == [*HISTORY[:1], *HISTORY[2:], again]


def test_what_became_slower_is_told_first():
    lines = history.lines_of(HISTORY)
    assert [line.name for line in lines] == ["slow", "steady", "new", "sparse", "fast"]
    assert [line.verdict for line in lines] == ["slower", "", "", "", "faster"]
    assert lines[0].change == pytest.approx(1.5)
    assert history.lines_of([]) == []


def test_a_run_of_the_benchmarks_is_a_line(tmp_path, capsys):
    file = tmp_path / "history.jsonl"
    command.main(["vmap", "--quick", "--only", "matvec with own matrix", "--history", str(file)])
    history.main([str(file)])
    (run,) = history.read(file)
    assert run.commit
    assert [name.rpartition(", ")[2] for name in run.ratios] == ["trace", "run"]
    assert "Commits: 1, " in file.with_suffix(".html").read_text()
    assert "Wrote" in capsys.readouterr().out
