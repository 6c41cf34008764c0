"""What a batch makes slow, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure import Ratio
from benchmarks.report import interval, made_with, named, ratio, size
from benchmarks.slow.measure import Outcome
from benchmarks.slow.workload import HAND, JAX, OURS

TITLE = "What a batch makes slow: bx.vmap against jax.vmap and programs by hand"


def line(result: Outcome) -> str:
    """One workload on one line of a terminal."""
    times = "  ".join(f"over {name} {interval(r)}" for name, r in result.ratios.items())
    return f"{result.name:40} {times}"


def summary(results: Sequence[Outcome]) -> str:
    """What the numbers say, as a Markdown list."""
    missed = (r for r in results if not r.reached)
    points = [
        f"{sum(r.reached for r in results)} of {len(results)} goals are reached; not"
        + named(
            missed,
            lambda r: (
                f"{r.ratios[r.workload.rival].value:.2f} of {r.workload.rival}, "
                f"goal {r.workload.goal:g}"
            ),
        ),
        "More than 1.5x the time of `jax.vmap` to trace and compile"
        + named(
            (r for r in results if JAX in r.compiled and r.compiled[JAX].value > 1.5),
            lambda r: f"{r.compiled[JAX].value:.2f}",
        ),
    ]
    return "\n".join(f"- {p}." for p in points)


def write(results: Sequence[Outcome], folder: Path) -> list[Path]:
    """Writes `slow.md` into `folder`."""
    page = folder / "slow.md"
    page.write_text(_page(results))
    return [page]


def _page(results: Sequence[Outcome]) -> str:
    return f"""# {TITLE}

{made_with()}

{summary(results)}

Some operations are slow when they are batched. People who need them fast write the program for the
whole batch by hand ([benchmarks/slow](../../benchmarks/slow)). Here both are compared with
`bx.vmap` of the function of one example, with no option except for those named.

All run interleaved in one process. Ratios are times of `bx.vmap` over the other's, with a 95%
bootstrap interval: below 1, `bx.vmap` is faster. *Goal* is the intended ratio, and to which
program. *First call* is CPU time to trace and compile, over that of `jax.vmap`. *Temporaries* are
memory besides arguments and results: `jax.vmap`, by hand, `bx.vmap`. With
[rbg keys](https://docs.jax.dev/en/latest/jax.random.html), `bx.vmap` draws what each key draws
alone, and `jax.vmap` does not.

{_table(results)}
"""


def _table(results: Sequence[Outcome]) -> str:
    heads = ["", "lanes", *(f"{n}, ms" for n in (JAX, HAND, OURS))]
    heads += [f"over {JAX}", f"over {HAND}", "goal", "first call", "temporaries"]
    rows = [heads, ["---"] + ["---:"] * 6 + ["---"] + ["---:"] * 2]
    family = None
    for r in results:
        work = r.workload
        if work.family != family:
            family = work.family
            rows.append([f"**{family}**"] + [""] * (len(heads) - 1))
        rows.append(
            [
                work.name,
                f"{work.lanes:,}",
                *(_number(r.seconds.get(name)) for name in (JAX, HAND, OURS)),
                *(_ratio(r.ratios.get(name)) for name in (JAX, HAND)),
                f"{work.goal:g} of {work.rival}" + ("" if r.reached else ", missed"),
                _ratio(r.compiled.get(JAX)),
                " / ".join(size(each) for each in r.temporary_bytes.values()),
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _ratio(of: Ratio | None) -> str:
    return "" if of is None else ratio(of)


def _number(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.3g}"
