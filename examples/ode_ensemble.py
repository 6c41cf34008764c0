"""What does it cost to solve easy equations together with stiff ones?

A van der Pol oscillator is solved by diffrax, with steps of adaptive size: one
oscillator, one initial value. Over an ensemble whose stiffness spans decades a
few need dozens of times as many steps as most. With `jax.vmap` all wait for the
last; with `divergence="compact"` a solver that is done makes room for another.

    python examples/ode_ensemble.py [folder for the picture]
"""

import sys
import time
from pathlib import Path

try:
    import diffrax
    import jax
    import jax.numpy as jnp
    import matplotlib.pyplot as plt
    import numpy as np

    import batchax as bx
except ModuleNotFoundError as missing:
    sys.exit(f"This needs {missing.name}; in a checkout of batchax: pip install '.[demo]' diffrax")

plt.switch_backend("Agg")  # pictures are written to files

LANES = 4096
STIFFEST = 100.0
END = 20.0


def field(t, y, stiffness):
    return jnp.stack([y[1], stiffness * (1 - y[0] ** 2) * y[1] - y[0]])


def solve(stiffness, start):
    """Where one oscillator is at the end, and how many steps the solver took."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=0.0,
        t1=END,
        dt0=0.01,
        y0=start,
        args=stiffness,
        saveat=diffrax.SaveAt(t1=True),
        stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-6),
        max_steps=20_000,
    )
    return solution.ys[0], solution.stats["num_steps"]


def timed(fun, *args):
    """The result of a compiled function, the seconds to compile it, and to run it."""
    start = time.perf_counter()
    compiled = jax.jit(fun).lower(*args).compile()
    compiling, start = time.perf_counter() - start, time.perf_counter()
    result = jax.block_until_ready(compiled(*args))
    return result, compiling, time.perf_counter() - start


def draw(path, stiffness, steps, seconds):
    """The steps of each oscillator, and the time for all of them."""
    ink, paper, red, green = "#22223b", "#fbfaf5", "#c8553d", "#588b8b"
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": ink, "axes.edgecolor": ink})
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 5), width_ratios=[1.7, 1], facecolor=paper, layout="constrained"
    )
    order = np.argsort(steps)
    lanes = np.arange(len(steps))
    left.fill_between(lanes, steps[order], steps.max(), color=red, alpha=0.2, label="waiting")
    left.fill_between(lanes, 0, steps[order], color=green, label="solving")
    left.set(
        xlabel="oscillators, sorted",
        ylabel="steps of the solver",
        ylim=(0, 1.02 * steps.max()),
        xlim=(0, lanes[-1]),
    )
    left.set_title(
        f"Stiffness {stiffness.min():.1g} to {stiffness.max():.0f}: {np.median(steps):.0f} steps "
        f"in the middle, {steps.max():,} at most",
        loc="left",
        weight="bold",
    )
    left.legend(frameon=False, loc="center left")
    bars = right.barh(list(seconds), list(seconds.values()), color=[red, green])
    right.bar_label(bars, [f"{s:.2f} s" for s in seconds.values()], padding=4)
    right.margins(x=0.18)
    right.invert_yaxis()
    right.set_title("Time to solve all", loc="left", weight="bold")
    for axes in (left, right):
        axes.set_facecolor(paper)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor=paper)
    plt.close(figure)


def main(folder="out"):
    rng = np.random.default_rng(0)
    stiffness = np.geomspace(0.1, STIFFEST, LANES).astype(np.float32)
    starts = rng.normal(1, 1, (LANES, 2)).astype(np.float32)
    print(f"{LANES:,} oscillators of stiffness {stiffness[0]:.1f} to {stiffness[-1]:.0f}")

    ways = {
        "jax.vmap": jax.vmap(solve),
        "compact": bx.vmap(solve, divergence="compact"),
    }
    seconds = {}
    print(f"  {'':22}{'compile':>10}{'run':>10}")
    for name, batched in ways.items():
        (ends, steps), compiling, seconds[name] = timed(batched, stiffness, starts)
        print(f"  {name:22}{compiling:>9.2f}s{seconds[name]:>9.2f}s", flush=True)
    print(f"  {seconds['jax.vmap'] / seconds['compact']:.1f} times as fast")
    steps = np.asarray(steps)
    print(f"  steps of the solver: {np.median(steps):.0f} in the middle, {steps.max():,} at most")

    some = np.linspace(0, LANES - 1, 4).astype(int)
    alone = [solve(stiffness[i], starts[i])[0] for i in some]
    difference = np.max(np.abs(np.stack(alone) - ends[some]))
    np.testing.assert_allclose(ends[some], np.stack(alone), atol=1e-2)
    print(f"  largest difference from a loop over {len(some)} of them {difference:.0e}: agreed")

    picture = Path(folder) / "ode_ensemble.png"
    draw(picture, stiffness, steps, seconds)
    print(f"The steps and times are drawn in {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
