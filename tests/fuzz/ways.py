"""Draws ways to run a program."""

from fuzz.judge import REDUCTIONS, Case
from fuzz.programs import draw_program

GRID = 'Mesh(np.array(jax.devices()).reshape(2, 2), ("d", "e"))'
DEVICES = [
    'mesh="all"',
    'mesh=Mesh(np.array(jax.devices()[:2]), ("d",))',
    'mesh=Mesh(np.array(jax.devices()[1:]), ("d",))',
    'mesh=Mesh(np.array(jax.devices()[:1]), ("d",))',
    f'mesh=({GRID}, "d")',
    f'mesh=({GRID}, ("e", "d"))',
    'mesh=jax.make_mesh((4,), ("d",))',
    'mesh=(jax.make_mesh((2, 2), ("d", "e")), ("e", "d"))',
]

# What goes with a mesh.
ON_DEVICES = [
    [],
    ['divergence="serial"'],
    ['divergence="compact"'],
    ["batch_size=2", 'residuals="keep"'],
    ["batch_size=2", "divergence=bx.Compact(width=2)"],
    ["divergence=FORCED"],
]

# What else a program is drawn from; see `draw_program`.
MORE = [None] * 12 + ["risky"] * 3 + ["small", "small", "effects", "effects"]

OPTIONS = [
    ["batch_size=2"],
    ["batch_size=3"],
    ['divergence="serial"'],
    ["batch_size=5"],
    ["batch_size=2", 'residuals="keep"'],
    ['divergence="compact"'],
    ["divergence=bx.Compact(width=2)"],
    ["divergence=bx.Compact(width=2, threshold=0.25)"],
    ["divergence=FORCED"],
    ["divergence=DECIDED"],
    ["divergence=LAST"],
    ["divergence=KERNELS"],
    ["divergence=SERIAL"],
    ["divergence=ALONE"],
    ["batch_size=3", "divergence=FORCED"],
    ["batch_size=3", 'divergence="compact"'],
    ["batch_size=3", "divergence=bx.Compact(width=2)"],
]

INNER = [
    "bx.vmap",
    "bx.vmap",
    "jax.vmap",
    "lambda f, *axes: bx.vmap(f, *axes, batch_size=2)",
    'lambda f, *axes: bx.vmap(f, *axes, divergence="compact")',
    "lambda f, *axes: bx.vmap(f, *axes, divergence=FORCED)",
    "lambda f, *axes: bx.vmap(f, *axes, divergence=LAST)",
    "lambda f, *axes: bx.vmap(f, *axes, divergence=KERNELS)",
]
AROUND = [
    "jax.vmap({})",
    "bx.vmap({})",
    "bx.vmap({}, divergence=FORCED)",
    "bx.vmap({}, batch_size=1)",
    "jax.jit({})",
]


def draw_case(choose):
    """Draws a program and a way to run it, by a function `choose(n)` of a number below `n`."""
    pick = lambda options: options[choose(len(options))]
    chance = lambda percent: choose(100) >= 100 - percent
    more = pick(MORE)
    program = draw_program(choose, named=chance(18), more=more)
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
        if chance(8) and t.inexact:
            few = mode != "values" or t.dtype != "float64"
            axis = pick(["sum", "mean"] if few else list(REDUCTIONS))
        if chance(8) and mode == "values":
            axis = "bx.AUTO"
        out_axes.append(axis)
    spread = chance(10)
    options = pick(OPTIONS) if chance(60) else []
    options = [pick(DEVICES), *pick(ON_DEVICES)] if spread else options
    around = pick(AROUND) if chance(22) else "{}"
    if program.effects:
        # JAX's own vmap refuses calls in order, and makes those of branches that are not taken.
        around = around.replace("jax.vmap", "bx.vmap")
        # A chunk is recomputed for its derivatives, and so are its calls.
        mode = "values" if "batch_size" in f"{options} {around}" else mode
    if around == "jax.jit({})":
        around = "{}"
    if around != "{}" and (set(out_axes) & {"bx.AUTO"}):
        around = "{}"
    engine = pick(["staged"] * 13 + ["jit", "jit", "eager"])
    if spread or (program.effects and chance(50)):
        engine = "jit"
    watched = more == "risky" and not spread and chance(40)
    case = Case(
        program=program,
        lanes=lanes,
        seed=choose(1000),
        rounded=watched or (chance(8) and not program.effects),
        in_axes=in_axes,
        out_axes=out_axes,
        options=options,
        around=around,
        engine="staged" if watched else engine,
        mode=mode,
        inner=pick(INNER),
        wild=more == "risky" and not watched,
        watched=watched,
    )
    if program.effects and "batch_size" in case.inner and "vmap(" in program.source:
        case.mode = "values"  # as above
    return case
