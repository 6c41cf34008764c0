"""Must every environment be reset when a few are?

An agent wanders through a cave until it sees the way out; then a new cave is dug,
which takes far longer than a step. For one agent this is `lax.cond`.
Over a batch, masking (`jax.vmap`) digs a new cave for every agent at every step and
throws nearly all of them away; with `divergence="compact"` only those that are
needed are dug.

    python examples/environments.py [folder for the picture]
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

AGENTS = 256
STEPS = 100
SIZE = 21
FLOOR = 100

MOVES = jnp.array([(0, 1), (1, 0), (0, -1), (-1, 0)])


def reset(key):
    """A cave dug by a random walk until enough of it is floor; the way out is where it ends."""
    middle = jnp.array([SIZE // 2, SIZE // 2])

    def dig(carry):
        key, cave, place, dug = carry
        key, now = jax.random.split(key)
        place = jnp.clip(place + MOVES[jax.random.randint(now, (), 0, 4)], 1, SIZE - 2)
        return key, cave.at[tuple(place)].set(True), place, dug + ~cave[tuple(place)]

    cave = jnp.zeros((SIZE, SIZE), bool).at[tuple(middle)].set(True)
    _, cave, out, _ = lax.while_loop(lambda c: c[3] < FLOOR, dig, (key, cave, middle, jnp.array(1)))
    return {"cave": cave, "out": out, "agent": middle, "heading": jnp.array(0)}


def step(world, key):
    """The agent goes on while it can, turns where it cannot, and sometimes where it can."""
    now, later = jax.random.split(key)
    whim, turn = jax.random.uniform(now) < 0.2, jax.random.randint(later, (), 0, 4)
    ahead = world["agent"] + MOVES[world["heading"]]
    free = world["cave"][tuple(ahead)]
    agent = jnp.where(free, ahead, world["agent"])
    heading = jnp.where(free & ~whim, world["heading"], turn)
    near = jnp.all(jnp.abs(agent - world["out"]) <= 2)
    return world | {"agent": agent, "heading": heading}, near


def wander(key):
    """One agent: the world at the end, and at which steps it saw a way out."""

    def one_step(world, key):
        first, second = jax.random.split(key)
        world, found = step(world, first)
        return lax.cond(found, lambda: reset(second), lambda: world), found

    first, rest = jax.random.split(key)
    return lax.scan(one_step, reset(first), jax.random.split(rest, STEPS))


def timed(fun, *args):
    """The result of a compiled function, the seconds to compile it, and to run it."""
    start = time.perf_counter()
    compiled = jax.jit(fun).lower(*args).compile()
    compiling, start = time.perf_counter() - start, time.perf_counter()
    result = jax.block_until_ready(compiled(*args))
    return result, compiling, time.perf_counter() - start


def draw(path, worlds, share, seconds):
    """Some caves, how many agents need a new one, and the time for all of them."""
    ink, paper, red, green = "#22223b", "#fbfaf5", "#c8553d", "#588b8b"
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": ink, "axes.edgecolor": ink})
    figure = plt.figure(figsize=(13, 6), facecolor=paper)
    tiles, side = figure.subfigures(1, 2, width_ratios=[1.2, 1])
    grid = tiles.subplots(
        2, 3, gridspec_kw=dict(left=0.03, right=0.97, top=0.92, bottom=0.03, hspace=0.08)
    )
    for i, place in enumerate(grid.flat):
        place.imshow(worlds["cave"][i], cmap="bone", vmin=-0.35, vmax=1.1)
        (y, x), (v, u) = worlds["agent"][i], worlds["out"][i]
        place.plot(x, y, "o", color=green, label="agent")
        place.plot(u, v, "*", color=red, markersize=12, label="way out")
        place.set(xticks=[], yticks=[])
    tiles.legend(*grid[0, 0].get_legend_handles_labels(), ncols=2, frameon=False, loc="upper left")

    rates, times = side.subplots(
        2, 1, gridspec_kw=dict(left=0.2, right=0.95, top=0.92, bottom=0.08, hspace=0.55)
    )
    rates.bar(np.arange(len(share)), 100 * share, width=1, color=green)
    rates.set(xlabel="step", ylabel="agents, %", xlim=(-0.5, len(share) - 0.5))
    rates.set_title(f"{share.mean():.1%} need a new cave at a step", loc="left", weight="bold")
    bars = times.barh(list(seconds), list(seconds.values()), color=[red, green])
    times.bar_label(bars, [f"{s:.2f} s" for s in seconds.values()], padding=4)
    times.margins(x=0.18)
    times.invert_yaxis()
    times.set_title("Time for all steps", loc="left", weight="bold")
    for part, axes in ((tiles, rates), (side, times)):
        part.set_facecolor(paper)
        axes.set_facecolor(paper)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor=paper)
    plt.close(figure)


def main(folder="out"):
    keys = jax.random.split(jax.random.key(0), AGENTS)
    print(f"{AGENTS:,} agents in caves of {SIZE} x {SIZE}, {STEPS} steps")
    ways = {"jax.vmap": jax.vmap(wander), "compact": bx.vmap(wander, divergence="compact")}
    seconds, results = {}, {}
    print(f"  {'':22}{'compile':>10}{'run':>10}")
    for name, batched in ways.items():
        results[name], compiling, seconds[name] = timed(batched, keys)
        print(f"  {name:22}{compiling:>9.2f}s{seconds[name]:>9.2f}s", flush=True)
    print(f"  {seconds['jax.vmap'] / seconds['compact']:.1f} times as fast")

    jax.tree.map(np.testing.assert_array_equal, *results.values())
    alone = jax.jit(wander)
    for i in range(0, AGENTS, max(1, AGENTS // 8)):
        lane = jax.tree.map(lambda x, i=i: x[i], results["compact"])
        jax.tree.map(np.testing.assert_array_equal, alone(keys[i]), lane)
    worlds, found = jax.tree.map(np.asarray, results["compact"])
    print(f"  {found.sum():,} new caves; the same as jax.vmap, and as a loop over some: agreed")

    picture = Path(folder) / "environments.png"
    draw(picture, worlds, found.mean(0), seconds)
    print(f"Caves, resets and times are drawn in {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
