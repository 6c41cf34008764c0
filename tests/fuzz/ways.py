"""Draws ways to run a program."""

from fuzz.judge import REDUCTIONS, Case
from fuzz.programs import draw_program

OPTIONS = [
    ["batch_size=2"],
    ["batch_size=3"],
    ["batch_size=1"],
    ["batch_size=5"],
    ["batch_size=2", 'residuals="keep"'],
    ['divergence="compact"'],
    ["divergence=bx.Compact(width=2)"],
    ["divergence=bx.Compact(width=2, threshold=0.25)"],
    ["batch_size=3", 'divergence="compact"'],
    ["batch_size=3", "divergence=bx.Compact(width=2)"],
    ['mesh="all"'],
    ['mesh="all"', "batch_size=1"],
    ['mesh="all"', 'divergence="compact"'],
]

INNER = [
    "bx.vmap",
    "bx.vmap",
    "jax.vmap",
    "lambda f, *axes: bx.vmap(f, *axes, batch_size=2)",
    'lambda f, *axes: bx.vmap(f, *axes, divergence="compact")',
]
AROUND = ["jax.vmap({})", "bx.vmap({})", "bx.vmap({}, batch_size=1)", "jax.jit({})"]


def draw_case(choose):
    """Draws a program and a way to run it, by a function `choose(n)` of a number below `n`."""
    pick = lambda options: options[choose(len(options))]
    chance = lambda percent: choose(100) >= 100 - percent
    program = draw_program(choose, named=chance(18))
    lanes = 5 if program.named else pick([5, 5, 5, 4, 5, 1])
    in_axes = []
    for k, t in enumerate(program.arguments):
        axis = None if k and chance(30) else choose(t.rank + 1) if chance(50) else 0
        axis = 0 if axis and t.dtype == "key" else axis
        if axis is not None and t.dtype != "key" and chance(10):
            axis -= t.rank + 1
        in_axes.append(axis)
    mode = pick(["values", "values", "vjp", "jvp", "vjp", "jvp of vjp"])
    if not program.reverse and mode.endswith("vjp"):
        mode = "jvp"
    if not program.forward and mode.startswith("jvp"):
        mode = "vjp" if program.reverse else "values"
    if not any(t.inexact for t in program.outputs):
        mode = "values"
    out_axes = []
    for t in program.outputs:
        axis = choose(t.rank + 1) if chance(40) else 0
        axis = 0 if t.dtype == "key" else axis
        if chance(10) and t.dtype != "key":
            axis -= t.rank + 1
        if chance(8) and t.dtype == "float64":
            axis = pick(["sum", "mean"] if mode != "values" else list(REDUCTIONS))
        if chance(8) and mode == "values":
            axis = "bx.AUTO"
        out_axes.append(axis)
    options = pick(OPTIONS) if chance(60) else []
    around = pick(AROUND) if chance(22) else "{}"
    if around == "jax.jit({})":
        around = "{}"
    if around != "{}" and (set(out_axes) & {"bx.AUTO"}):
        around = "{}"
    engine = pick(["staged"] * 13 + ["jit", "jit", "eager"])
    return Case(
        program=program,
        lanes=lanes,
        seed=choose(1000),
        rounded=chance(8),
        in_axes=in_axes,
        out_axes=out_axes,
        options=options,
        around=around,
        engine=engine,
        mode=mode,
        inner=pick(INNER),
    )
