"""Which handwritten digits does a classifier find hard? Per-example gradients tell.

A small classifier is trained on the 1,797 handwritten digits that scikit-learn
ships. Then the gradient of the loss is taken for each digit alone: the function
is written for one example, and `batchax.vmap` runs it over all of them, a few at
a time, in the memory of those. ``jax.vmap``, and some digits one by one, check the
result. Digits with a large gradient pull hard on the classifier: they are the ones
it gets wrong, or that hardly look like what they are labelled.

    python examples/digits.py [folder for the picture]
"""

import sys
import time
from pathlib import Path

try:
    import jax
    import jax.numpy as jnp
    import matplotlib.pyplot as plt
    import numpy as np
    from sklearn.datasets import load_digits

    import batchax as bx
except ModuleNotFoundError as missing:
    sys.exit(f"This needs {missing.name}; in a checkout of batchax: pip install '.[demo]'")

plt.switch_backend("Agg")  # pictures are written to files

HIDDEN = 32
STEPS = 400
CHUNK = 64  # digits at a time


def logits(params, image):
    """Scores of the ten digits for one image of 64 pixels."""
    hidden = jnp.tanh(image @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss(params, image, label):
    """Cross-entropy of one image: everything here is written for one example."""
    return -jax.nn.log_softmax(logits(params, image))[label]


def length(params, image, label):
    """How hard one image pulls: the norm of the gradient of its loss."""
    gradient = jax.grad(loss)(params, image, label)
    return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))


def train(params, images, labels):
    """Plain gradient descent on the mean loss, itself a reduced output of `vmap`."""
    mean_loss = bx.vmap(loss, in_axes=(None, 0, 0), out_axes=bx.Reduce("mean"))

    @jax.jit
    def step(params):
        value, gradient = jax.value_and_grad(mean_loss)(params, images, labels)
        return jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient), value

    for i in range(1, STEPS + 1):
        params, value = step(params)
        if i % 100 == 0:
            print(f"  step {i:3d}   mean loss {value:.3f}", flush=True)
    return params


def initial(key):
    k1, k2 = jax.random.split(key)
    return {
        "w1": jax.random.normal(k1, (64, HIDDEN)) / 8,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(k2, (HIDDEN, 10)) / HIDDEN**0.5,
        "b2": jnp.zeros(10),
    }


def timed(call, repeats=1):
    """The result of a call and the seconds until it is there, at best."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        result = jax.block_until_ready(call())
        best = min(best, time.perf_counter() - start)
    return result, best


def compare(params, images, labels):
    """How long each gradient is, by ``jax.vmap`` and by `batchax.vmap`: time, and memory."""
    ways = {
        "jax.vmap": jax.vmap(length, in_axes=(None, 0, 0)),
        f"batchax.vmap, {CHUNK} at a time": bx.vmap(length, in_axes=(None, 0, 0), batch_size=CHUNK),
    }
    print(f"  {'':28}{'compile':>10}{'run':>12}{'memory':>12}")
    lengths = []
    for name, batched in ways.items():
        lowered = jax.jit(batched).lower(params, images, labels)
        compiled, compiling = timed(lowered.compile)
        each, running = timed(lambda: compiled(params, images, labels), 5)
        memory = compiled.memory_analysis().temp_size_in_bytes / 1e6
        print(f"  {name:28}{compiling:>9.2f}s{running * 1e3:>10.1f}ms{memory:>10.1f}MB")
        lengths.append(np.asarray(each))

    some = range(0, len(images), 50)
    alone = jax.jit(length)
    one_by_one = [alone(params, images[i], labels[i]) for i in some]
    np.testing.assert_allclose(lengths[0], lengths[1], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(lengths[1][some], one_by_one, rtol=1e-4, atol=1e-6)
    print(f"  the same lengths, and those of {len(some)} digits one by one")
    return lengths[1]


def draw(path, images, labels, predicted, norms):
    """The hardest digits, and how the size of the gradients is spread."""
    right = predicted == labels
    hardest = np.argsort(-norms)[:40]
    ink, paper, wrong, well = "#22223b", "#fbfaf5", "#c8553d", "#588b8b"
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": ink, "axes.edgecolor": ink})
    figure = plt.figure(figsize=(13, 7.6), facecolor=paper)
    tiles, side = figure.subfigures(1, 2, width_ratios=[1.55, 1])
    for part in (tiles, side):
        part.set_facecolor(paper)

    figure.text(0.035, 0.945, "The digits that pull hardest", fontsize=20, weight="bold")
    figure.text(
        0.035,
        0.905,
        f"{len(hardest)} of {len(images):,} handwritten digits, by the size of their own gradient."
        "   Below each: its label, and what the classifier reads.",
        fontsize=10.5,
    )
    grid = tiles.subplots(
        5, 8, gridspec_kw=dict(left=0.055, right=0.98, top=0.87, bottom=0.05, hspace=0.25)
    )
    for place, i in zip(grid.flat, hardest, strict=True):
        place.imshow(images[i].reshape(8, 8), cmap="bone_r", interpolation="bicubic")
        place.set(xticks=[], yticks=[])
        colour = well if right[i] else wrong
        for spine in place.spines.values():
            spine.set(color=colour, linewidth=2)
        reading = f"{labels[i]}" if right[i] else f"{labels[i]}, read as {predicted[i]}"
        place.set_xlabel(reading, fontsize=9, color=colour, labelpad=3)

    spread, by_digit = side.subplots(
        2, 1, gridspec_kw=dict(left=0.14, right=0.94, top=0.845, bottom=0.09, hspace=0.42)
    )
    bins = np.geomspace(max(norms.min(), 1e-4), norms.max(), 45)
    spread.hist(
        [norms[right], norms[~right]],
        bins=bins,
        stacked=True,
        color=[well, wrong],
        label=[f"read right ({right.sum():,})", f"read wrong ({(~right).sum():,})"],
    )
    spread.set(xscale="log", xlabel="norm of the gradient of one example", ylabel="digits")
    spread.set_title("Most digits have nothing left to teach", loc="left", fontsize=11.5)
    spread.legend(frameon=False, fontsize=9.5, loc="upper left")
    spread.set_ylim(top=1.3 * spread.get_ylim()[1])

    median = [np.median(norms[labels == d]) for d in range(10)]
    top = [np.quantile(norms[labels == d], 0.95) for d in range(10)]
    by_digit.vlines(range(10), median, top, color=ink, linewidth=1.5, alpha=0.35)
    by_digit.scatter(range(10), top, color=wrong, s=55, zorder=3, label="hardest twentieth")
    by_digit.scatter(range(10), median, color=well, s=55, zorder=3, label="median")
    by_digit.set(yscale="log", xticks=range(10), xlabel="digit", ylabel="gradient norm")
    by_digit.set_title("Some digits are harder than others", loc="left", fontsize=11.5)
    by_digit.legend(
        frameon=False, fontsize=9.5, ncols=2, loc="upper left", bbox_to_anchor=(0, 1.04)
    )
    by_digit.margins(y=0.16)
    for axes in (spread, by_digit):
        axes.set_facecolor(paper)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=ink, which="both")

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, facecolor=paper)
    plt.close(figure)


def main(folder="out"):
    pixels, labels = load_digits(return_X_y=True)
    images, labels = jnp.asarray(pixels / 16, jnp.float32), jnp.asarray(labels)
    print(f"{len(images):,} handwritten digits of 8 x 8 pixels")

    print("Training a classifier with one hidden layer")
    params = train(initial(jax.random.key(0)), images, labels)
    predicted = bx.vmap(lambda p, x: jnp.argmax(logits(p, x)), in_axes=(None, 0))(params, images)
    print(f"  reads {jnp.mean(predicted == labels):.1%} of them right")

    print("The gradient of each example alone")
    norms = compare(params, images, labels)
    picture = Path(folder) / "digits.png"
    draw(picture, *map(np.asarray, (images, labels, predicted)), norms)
    print(f"The digits that pull hardest are drawn in {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
