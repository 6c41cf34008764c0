"""How much of a Mandelbrot picture is computed for points that have already escaped?

The function counts the steps of one point, and stops when the point escapes. Over
a batch, masking (`jax.vmap`) runs every point until the last one is done; with
`divergence="compact"` points that are done leave the loop, and it narrows.
`LaneSteps` counts the steps that were computed, and those that were of use.

    python examples/mandelbrot.py [folder for the picture]
"""

import sys
import time
from pathlib import Path

try:
    import jax
    import jax.numpy as jnp
    import matplotlib.pyplot as plt
    import numpy as np
    from jax import lax

    import batchax as bx
except ModuleNotFoundError as missing:
    sys.exit(f"This needs {missing.name}; in a checkout of batchax: pip install '.[demo]'")

plt.switch_backend("Agg")  # pictures are written to files

HEIGHT, WIDTH = 512, 640
LIMIT = 1000


def escape(x, y):
    """Steps until z -> z**2 + (x + iy) leaves the circle of radius two: one point."""

    def step(carry):
        n, a, b = carry
        return n + 1, a * a - b * b + x, 2 * a * b + y

    inside = lambda carry: (carry[0] < LIMIT) & (carry[1] ** 2 + carry[2] ** 2 < 4)
    return lax.while_loop(inside, step, (0, jnp.zeros_like(x), jnp.zeros_like(y)))[0]


def timed(fun, *args, repeats=3):
    """The result of a compiled function, the seconds to compile it, and to run it at best."""
    start = time.perf_counter()
    compiled = jax.jit(fun).lower(*args).compile()
    compiling, best = time.perf_counter() - start, float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        result = jax.block_until_ready(compiled(*args))
        best = min(best, time.perf_counter() - start)
    return result, compiling, best


def draw(path, counts, box, compacted):
    """The picture, and how many of its points are still at work at each step."""
    ink, paper, red, green = "#22223b", "#fbfaf5", "#c8553d", "#588b8b"
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": ink, "axes.edgecolor": ink})
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 5.8), width_ratios=[1.25, 1], facecolor=paper, layout="constrained"
    )
    escaped = np.where(counts < LIMIT, np.log(counts), np.nan)
    left.imshow(escaped, extent=box, origin="lower", cmap="YlGnBu_r")
    left.set_facecolor(ink)
    left.set_title("Steps until a point escapes", loc="left", weight="bold")

    steps = np.arange(LIMIT + 1)
    running = 1 - np.searchsorted(np.sort(counts.ravel()), steps, side="right") / counts.size
    right.fill_between(
        steps, running, 1, color=red, alpha=0.25, label="done: masking still runs it"
    )
    right.fill_between(steps, 0, running, color=green, alpha=0.7, label="still running")
    right.set(
        xscale="symlog", xlim=(0, LIMIT), ylim=(0, 1), xlabel="step", ylabel="share of points"
    )
    right.set_title(
        f"Steps of use: {counts.mean() / counts.max():.0%} masked, {compacted:.0%} compacted",
        loc="left",
        weight="bold",
    )
    right.legend(frameon=True, facecolor=paper, loc="upper right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor=paper)
    plt.close(figure)


def main(folder="out"):
    box = (-2.1, 0.7, -1.12, 1.12)
    x, y = jnp.meshgrid(jnp.linspace(*box[:2], WIDTH), jnp.linspace(*box[2:], HEIGHT))
    x, y = x.ravel(), y.ravel()
    print(f"{x.size:,} points, at most {LIMIT:,} steps for each")

    masked, compile_masked, run_masked = timed(jax.vmap(escape), x, y)
    compact = bx.vmap(escape, divergence="compact")
    counts, compile_compact, run_compact = timed(compact, x, y)
    print(f"  {'':22}{'compile':>10}{'run':>12}")
    print(f"  {'jax.vmap':22}{compile_masked:>9.2f}s{run_masked * 1e3:>10.1f}ms")
    print(f"  {'compact':22}{compile_compact:>9.2f}s{run_compact * 1e3:>10.1f}ms")
    print(f"  {run_masked / run_compact:.1f} times as fast")

    some = np.linspace(0, x.size - 1, 50).astype(int)
    alone = np.array([escape(x[i], y[i]) for i in some])
    assert np.mean(alone == counts[some]) > 0.9  # at the edge, rounding decides
    print(f"  {np.mean(counts == masked):.2%} of the counts equal those of jax.vmap,", end=" ")
    print(f"{np.mean(alone == counts[some]):.2%} of {len(some)} those of a loop")

    steps = bx.LaneSteps()
    bx.vmap(escape, divergence=bx.Compact(steps=steps))(x, y)
    print(f"  {steps}")
    picture = Path(folder) / "mandelbrot.png"
    draw(picture, np.asarray(counts).reshape(HEIGHT, WIDTH), box, steps.utilization)
    print(f"The picture is in {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
