"""Can a network tell shapes apart in pictures of different sizes?

Discs, boxes and triangles are drawn with noise into pictures that are 8 to 40 pixels high and wide,
no two alike. The network is written for one picture: two convolutions and the mean over the
picture, which is divided by as many pixels as that has. `batchax.vmap` runs it over a
`batchax.Ragged` with two ragged axes: nothing is cropped or scaled, and no mask keeps padding out
of convolutions and means. Pictures of similar size are put together in four buckets. A loop over
pictures checks values and gradients.

    python examples/silhouettes.py [folder for the picture]
"""

import functools
import sys
import time
from pathlib import Path

try:
    import jax
    import jax.numpy as jnp
    import matplotlib.pyplot as plt
    import numpy as np

    import batchax as bx
except ModuleNotFoundError as missing:
    sys.exit(f"This needs {missing.name}; in a checkout of batchax: pip install '.[demo]'")

plt.switch_backend("Agg")  # pictures are written to files

PICTURES = 240  # half of them to learn from
STEPS = 150
SIZES = 8, 41
SHAPES = ["disc", "box", "triangle"]
CHANNELS = 8
RATE = 0.02


def drawn(rng, shape):
    """A picture of a shape, of any size: noise, and one more inside of the shape."""
    h, w = rng.integers(*SIZES, 2)
    y, x = np.mgrid[:h, :w]
    y, x = (2 * y + 1) / h - 1, (2 * x + 1) / w - 1
    inside = {
        "disc": x**2 + y**2 < 0.7,
        "box": np.maximum(abs(x), abs(y)) < 0.75,
        "triangle": (y < 0.75) & (2 * abs(x) < y + 0.85),
    }[shape]
    return (inside + 0.3 * rng.standard_normal((h, w))).astype(np.float32)


def first_weights(rng):
    filters = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.4, jnp.float32)
    return {
        "first": filters(3, 3, 1, CHANNELS),
        "second": filters(3, 3, CHANNELS, CHANNELS),
        "last": filters(CHANNELS, len(SHAPES)),
    }


def scores(weights, picture):
    """How much one picture looks like each of the shapes."""
    convolved = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    features = jnp.tanh(convolved(picture[None, :, :, None], weights["first"]))
    features = jnp.tanh(convolved(features, weights["second"]))[0]
    return 4 * features.mean((0, 1)) @ weights["last"]


def surprise(weights, picture, label):
    """What learning makes small: minus the logarithm of the probability of the right shape."""
    return -jax.nn.log_softmax(scores(weights, picture))[label]


def learn(weights, pictures, labels):
    """Follows the gradient of the mean over all pictures, as Adam does."""

    @jax.jit  # closed over, sizes of pictures are known, and can be put into buckets
    def step(i, weights, mean, square):
        each = bx.vmap(surprise, (None, 0, 0), buckets=4)
        value, slope = jax.value_and_grad(lambda w: each(w, pictures, labels).mean())(weights)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, slope)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g**2, square, slope)
        move = lambda w, m, s: w - RATE * m / (1 - 0.9**i) / jnp.sqrt(s / (1 - 0.99**i) + 1e-8)
        return value, jax.tree.map(move, weights, mean, square), mean, square

    mean = square = jax.tree.map(jnp.zeros_like, weights)
    values = []
    for i in range(1, STEPS + 1):
        value, weights, mean, square = step(i, weights, mean, square)
        values.append(float(value))
    return weights, values


def compare(weights, pictures, labels):
    """Some of the pictures computed alone."""
    some = bx.Ragged.from_rows([pictures[i] for i in range(4)], axis=(0, 1))
    run = jax.value_and_grad(surprise)
    values, slopes = bx.vmap(run, (None, 0, 0), layout="padded")(weights, some, labels[:4])
    for i in range(4):
        value, slope = run(weights, pictures[i], labels[i])
        np.testing.assert_allclose(values[i], value, rtol=1e-3, atol=1e-5)
        for name, own in slope.items():
            np.testing.assert_allclose(slopes[name][i], own, rtol=1e-3, atol=1e-4)
    print("  4 of them computed alone: values and gradients agreed")


def draw(path, pictures, labels, guesses, values):
    ink, paper, line, cut = "#22223b", "#fbfaf5", "#588b8b", "#c8553d"
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": ink, "axes.edgecolor": ink})
    figure = plt.figure(figsize=(12, 4.4), facecolor=paper, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.6, 1], facecolor=paper)
    left.suptitle("Pictures it has not seen, in their sizes", x=0.02, ha="left", weight="bold")
    grid = left.subplots(3, 8)
    for i, axes in enumerate(grid.flat):
        axes.axis("off")
        if i >= len(pictures):
            continue
        picture, most = np.asarray(pictures[i]), SIZES[1]
        axes.imshow(picture, cmap="bone_r", vmin=-0.5, vmax=1.8)
        h, w = picture.shape
        axes.set(xlim=((w - most) / 2, (w + most) / 2), ylim=((h + most) / 2, (h - most) / 2))
        right_one = guesses[i] == labels[i]
        colour = line if right_one else cut
        axes.set_title(SHAPES[guesses[i]], fontsize=8, color=colour, pad=2)
    axes = right.subplots()
    axes.plot(np.arange(1, len(values) + 1), values, color=line, lw=2)
    axes.set(xlabel="step", ylabel="surprise per picture", ylim=(0, None), facecolor=paper)
    axes.set_title("Learning", loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(folder="out"):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, len(SHAPES), PICTURES)
    pictures = [drawn(rng, SHAPES[label]) for label in labels]
    half = PICTURES // 2
    seen = bx.Ragged.from_rows(pictures[:half], axis=(0, 1))
    unseen = bx.Ragged.from_rows(pictures[half:], axis=(0, 1))
    smallest, largest = (min(p.size for p in pictures), max(p.size for p in pictures))
    print(f"{PICTURES} pictures of {smallest} to {largest:,} pixels, each of its own size")
    print(bx.bucket(seen, 4))

    weights = first_weights(rng)
    compare(weights, seen, labels)
    start = time.perf_counter()
    weights, values = learn(weights, seen, labels[:half])
    print(f"  {STEPS} steps, compiled and run: {time.perf_counter() - start:.1f} s")
    print(f"  surprise per picture from {values[0]:.2f} to {values[-1]:.2f}")
    assert values[-1] < values[0]

    guesses = jnp.argmax(bx.vmap(scores, (None, 0))(weights, unseen), 1)
    told = float(np.mean(np.asarray(guesses) == labels[half:]))
    print(f"  of {len(unseen)} other pictures it tells {told:.0%}")
    path = Path(folder) / "silhouettes.png"
    draw(path, unseen.rows(), labels[half:], np.asarray(guesses), values)
    print(f"Pictures and what it takes them for are drawn in {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
