"""What does it cost a classifier not to remember anybody's digits? Private stochastic descent.

DP-SGD (Abadi et al., 2016) clips the gradient of each example to a norm, so that none of them moves
the weights far, adds the clipped ones up, and adds noise. So it needs a gradient for each example,
and nothing of them but a sum: `batchax.vmap` of `jax.grad`, clipped, under `bx.Reduce("sum")`, with
`batch_size` examples in memory at a time. The classifier learns the handwritten digits that
scikit-learn ships, with noise of several sizes and without: one function of the noise, and the runs
are lanes, too. A loop over examples checks the sum.

How private that is, epsilon for a delta, takes an accountant, of which there are libraries; this
says what one needs to know for it: the noise multiplier, the sampling rate and the number of steps.

    python examples/private_sgd.py [folder for the picture]
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
STEPS = 150
RATE = 0.15  # of the training set in a step: each example with that probability (Poisson)
CHUNK = 128  # examples whose gradients are in memory at a time
CLIP = 1.0  # the norm that no gradient exceeds
NOISE = (1.0, 4.0, 16.0)  # multipliers: standard deviations of the noise, in units of CLIP
TRAINING = 1437  # digits; the rest tests


def logits(params, image):
    hidden = jnp.tanh(image @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss(params, image, label):
    """Cross-entropy of one image."""
    return -jax.nn.log_softmax(logits(params, image))[label]


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree)))


def clipped_gradient(params, clip, image, label, taken):
    """The gradient of one example, no longer than `clip`; nothing if it was not taken."""
    gradient = jax.grad(loss)(params, image, label)
    scale = taken * jnp.minimum(1.0, clip / (norm(gradient) + 1e-12))
    return jax.tree.map(lambda g: scale * g, gradient)


summed = bx.vmap(
    clipped_gradient, (None, None, 0, 0, 0), out_axes=bx.Reduce("sum"), batch_size=CHUNK
)


def noisy_sum(key, params, noise, clip, images, labels):
    """What DP-SGD lets out of a batch: the sum of clipped gradients, and noise."""
    for_batch, for_noise = jax.random.split(key)
    taken = jax.random.bernoulli(for_batch, RATE, (len(images),))
    total = summed(params, clip, images, labels, taken)
    leaves, tree = jax.tree.flatten(total)
    keys = jax.random.split(for_noise, len(leaves))
    drawn = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.map(lambda x, z: x + noise * clip * z, total, tree.unflatten(drawn))


def accuracy(params, images, labels):
    right = lambda image, label: jnp.argmax(logits(params, image)) == label
    return bx.vmap(right, out_axes=bx.Reduce("mean"))(images, labels)


def learn(noise, clip, train, test):
    """The parameters, and after each step the share of test digits that are read right."""
    k1, k2, key = jax.random.split(jax.random.key(0), 3)
    params = {
        "w1": jax.random.normal(k1, (64, HIDDEN)) / 8,
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(k2, (HIDDEN, 10)) / HIDDEN**0.5,
        "b2": jnp.zeros(10),
    }
    expected = RATE * len(train[0])

    def step(params, i):
        gradient = noisy_sum(jax.random.fold_in(key, i), params, noise, clip, *train)
        params = jax.tree.map(lambda p, g: p - g / expected, params, gradient)
        return params, accuracy(params, *test)

    return jax.lax.scan(step, params, jnp.arange(STEPS))


def compare(params, images, labels):
    """The sum of some clipped gradients, and the same example by example."""
    found = summed(params, CLIP, images, labels, jnp.ones(len(images)))
    alone = jax.jit(clipped_gradient)
    one_by_one = [alone(params, CLIP, x, y, 1.0) for x, y in zip(images, labels, strict=True)]
    expected = jax.tree.map(lambda *gs: sum(gs), *one_by_one)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), found, expected)
    assert max(map(norm, one_by_one)) < 1.001 * CLIP
    print(f"  {len(images)} clipped gradients added up one by one: agreed")


def draw(path, curves):
    ink, paper = "#22223b", "#fbfaf5"
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": ink, "axes.edgecolor": ink})
    figure, axes = plt.subplots(figsize=(8, 4.4), facecolor=paper, layout="constrained")
    colours = [ink, "#588b8b", "#8d99ae", "#e09f3e", "#c8553d"]
    for (name, curve), colour in zip(curves.items(), colours, strict=False):
        axes.plot(1 + np.arange(len(curve)), curve, color=colour, lw=1.2, label=name)
    axes.set(xlabel="steps", ylabel="test digits read right", ylim=(0, 1), facecolor=paper)
    axes.set_title("A classifier of digits, by the noise on its gradients", loc="left")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(folder="out"):
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))
    images, labels = jnp.asarray(pixels[order] / 16, jnp.float32), jnp.asarray(labels[order])
    train, test = (images[:TRAINING], labels[:TRAINING]), (images[TRAINING:], labels[TRAINING:])
    print(f"{TRAINING:,} digits to learn from, {len(test[0])} to test; {STEPS} steps, each with a")
    print(f"share of {RATE:.0%}, {CHUNK} gradients in memory at a time for each run")

    runs = {"not private": (0.0, 1e6), "clipped, no noise": (0.0, CLIP)}
    runs |= {f"noise multiplier {noise:g}": (noise, CLIP) for noise in NOISE}
    noises, clips = jnp.array(list(runs.values())).T
    start = time.perf_counter()
    learn_all = jax.jit(bx.vmap(learn, (0, 0, None, None)))
    params, curves = jax.block_until_ready(learn_all(noises, clips, train, test))
    print(f"  {len(runs)} runs at once, compiled and run: {time.perf_counter() - start:.1f} s")
    curves = dict(zip(runs, np.asarray(curves), strict=True))
    for name, curve in curves.items():
        print(f"  {name:20} {curve[-STEPS // 10 :].mean():.1%} of the test digits read right")
    compare(jax.tree.map(lambda p: p[-1], params), images[:100], labels[:100])

    picture = Path(folder) / "private_sgd.png"
    draw(picture, curves)
    print(f"What they read right, step by step, is drawn in {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
