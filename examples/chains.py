"""What do short NUTS trajectories pay for when a few chains need long ones?

A No-U-Turn sampler by blackjax draws from a Gaussian: one chain, one `lax.scan`
over its draws. Each chain has a target of its own size, so the trees that NUTS
builds differ, from chain to chain and from draw to draw. With `jax.vmap` each tree
is as long as the longest; with `divergence="compact"` chains that have their tree
make room. The covariance of the draws is compared with that of the target.

    python examples/chains.py [folder for the picture]
"""

import sys
import time
from pathlib import Path

try:
    import blackjax
    import jax
    import jax.numpy as jnp
    import matplotlib.pyplot as plt
    import numpy as np
    from jax import lax

    import batchax as bx
except ModuleNotFoundError as missing:
    sys.exit(f"This needs {missing.name}; in a checkout of batchax: pip install '.[demo]' blackjax")

plt.switch_backend("Agg")  # pictures are written to files

CHAINS = 512
DRAWS = 10
SIZE = 64
DOUBLINGS = 8


def target(size):
    """The covariance that draws should have, and its inverse."""
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(size, size)))
    scales = np.geomspace(0.2, 1, size)
    between = lambda power: (turn * scales ** (2 * power)) @ turn.T
    return between(1), jnp.asarray(between(-1), jnp.float32)


def sample(key, start, scale, precision):
    """The draws of one chain, divided by its scale, and how many steps each took."""
    kernel = blackjax.nuts(
        lambda x: -0.5 * x @ precision @ x / scale**2,
        step_size=0.05,
        inverse_mass_matrix=jnp.ones(len(start)),
        max_num_doublings=DOUBLINGS,
    )

    def draw(state, key):
        state, info = kernel.step(key, state)
        return state, (state.position / scale, info.num_integration_steps)

    return lax.scan(draw, kernel.init(start), jax.random.split(key, DRAWS))[1]


def timed(fun, *args):
    """The result of a compiled function, the seconds to compile it, and to run it."""
    start = time.perf_counter()
    compiled = jax.jit(fun).lower(*args).compile()
    compiling, start = time.perf_counter() - start, time.perf_counter()
    result = jax.block_until_ready(compiled(*args))
    return result, compiling, time.perf_counter() - start


def draw(path, lengths, expected, found, seconds):
    """The trees of all chains, the spread of the draws, and the time for all of them."""
    ink, paper, red, green = "#22223b", "#fbfaf5", "#c8553d", "#588b8b"
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": ink, "axes.edgecolor": ink})
    figure, (trees, spread, times) = plt.subplots(
        1, 3, figsize=(15, 4.8), width_ratios=[1.2, 1, 1], facecolor=paper, layout="constrained"
    )
    image = trees.imshow(lengths, aspect="auto", cmap="YlGnBu", interpolation="nearest")
    figure.colorbar(image, ax=trees, label="steps")
    trees.set(xlabel="draw", ylabel="chains, by the scale of their target")
    wasted = 1 - lengths.sum() / (lengths.max(0).sum() * len(lengths))
    trees.set_title(f"Of masked steps {wasted:.0%} are waiting", loc="left", weight="bold")
    spread.plot([0, 1], [0, 1], color=ink, linewidth=1, alpha=0.4)
    spread.scatter(expected, found, color=green, s=22)
    spread.set(xlabel="standard deviation of the target", ylabel="of the draws")
    spread.set_title("The draws are spread as they should be", loc="left", weight="bold")
    bars = times.barh(list(seconds), list(seconds.values()), color=[red, green])
    times.bar_label(bars, [f"{s:.2f} s" for s in seconds.values()], padding=4)
    times.margins(x=0.2)
    times.invert_yaxis()
    times.set_title("Time for all draws", loc="left", weight="bold")
    for axes in (spread, times):
        axes.set_facecolor(paper)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor=paper)
    plt.close(figure)


def main(folder="out"):
    rng = np.random.default_rng(1)
    covariance, precision = target(SIZE)
    scales = np.geomspace(0.3, 3, CHAINS).astype(np.float32)
    starts = np.float32(scales[:, None] * rng.normal(size=(CHAINS, SIZE)) / 2)
    keys = jax.random.split(jax.random.key(0), CHAINS)
    args = keys, starts, scales, precision
    print(f"{CHAINS:,} chains of {DRAWS} draws in {SIZE} dimensions")

    axes, seconds = (0, 0, 0, None), {}
    print(f"  {'':22}{'compile':>10}{'run':>10}")
    for name, batched in {
        "jax.vmap": jax.vmap(sample, axes),
        "compact": bx.vmap(sample, axes, divergence="compact"),
    }.items():
        (draws, lengths), compiling, seconds[name] = timed(batched, *args)
        print(f"  {name:22}{compiling:>9.2f}s{seconds[name]:>9.2f}s", flush=True)
    print(f"  {seconds['jax.vmap'] / seconds['compact']:.1f} times as fast")
    draws, lengths = np.asarray(draws), np.asarray(lengths)
    print(f"  trees of {lengths.min()} to {lengths.max()} steps, {lengths.mean():.0f} in the mean")

    alone = jax.jit(sample)
    some = np.linspace(0, CHAINS - 1, 3).astype(int)
    for i in some:
        positions, _ = alone(keys[i], starts[i], scales[i], precision)
        np.testing.assert_allclose(positions[0], draws[i, 0], atol=1e-3)
    print(f"  the first draw is that of the chain alone, for {len(some)} chains: agreed")

    later = draws[:, DRAWS // 2 :].reshape(-1, SIZE)
    values, directions = np.linalg.eigh(covariance)
    expected, found = np.sqrt(values), np.std(later @ directions, axis=0)
    ratio, noise = found / expected, 1 / np.sqrt(2 * len(later))
    print(f"  standard deviations over those of the target: {ratio.min():.2f} to {ratio.max():.2f}")
    assert np.all(abs(ratio - 1) < 8 * noise), ratio
    picture = Path(folder) / "chains.png"
    draw(picture, lengths, expected, found, seconds)
    print(f"Trees, spread and times are drawn in {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
