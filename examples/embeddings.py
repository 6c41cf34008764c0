"""Vectors of a million images, from disk to disk, in a process that is killed halfway.

A small convolutional network is trained on handwritten digits, and is to make a vector of each
image in a file: digits that it has seen and others, moved and with noise. `batchax.map` runs it
over the file, in a process that kills itself (SIGKILL) when half of the rows are done. The same
call goes on from there. Then images are looked up by their vectors: those nearest to a digit that
the network has never seen should show the same one.

    python examples/embeddings.py [folder for the files and the picture]
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

try:
    import jax
    import jax.numpy as jnp
    import matplotlib.pyplot as plt
    import numpy as np
    import tensorstore  # noqa: F401  (writes Zarr)
    from sklearn.datasets import load_digits

    import batchax as bx
except ModuleNotFoundError as missing:
    sys.exit(f"This needs {missing.name}; in a checkout of batchax: pip install '.[demo,data]'")

plt.switch_backend("Agg")  # pictures are written to files

ROWS = 1_000_000
COMMIT = 8192  # rows that are committed at once
STEPS = 500
SEEN = 1400  # digits that the network is trained on; the rest it never sees


def convolve(x, kernel):
    """A 3 x 3 convolution of one image of shape (height, width, channels)."""
    out = jax.lax.conv_general_dilated(
        x[None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(out[0])


def halved(x):
    """The largest of each 2 x 2 pixels."""
    height, width, channels = x.shape
    return x.reshape(height // 2, 2, width // 2, 2, channels).max((1, 3))


def embed(params, image):
    """The vector of one image, of length 1."""
    x = halved(convolve(image[:, :, None], params["conv1"]))
    x = halved(convolve(x, params["conv2"]))
    x = x.reshape(-1) @ params["dense"]
    return x / (jnp.linalg.norm(x) + 1e-6)


def loss(params, image, label):
    scores = 10 * embed(params, image) @ params["classes"]
    return -jax.nn.log_softmax(scores)[label]


def initial(key):
    shapes = {"conv1": (3, 3, 1, 24), "conv2": (3, 3, 24, 48), "dense": (192, 32)}
    shapes["classes"] = (32, 10)
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(key, shape) / np.prod(shape[:-1]) ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def varied(images, rng):
    """Images moved by up to a pixel, with noise."""
    padded = np.pad(images, [(0, 0), (1, 1), (1, 1)])
    out = np.empty_like(images)
    for place in range(9):
        some = slice(place, None, 9)
        down, right = divmod(place, 3)
        out[some] = padded[some, down : down + 8, right : right + 8]
    return out + 0.1 * rng.standard_normal(out.shape, np.float32)


def train(images, labels, rng):
    mean_loss = bx.vmap(loss, in_axes=(None, 0, 0), out_axes=bx.Reduce("mean"))

    @jax.jit
    def step(params, speed, images, labels):
        value, gradient = jax.value_and_grad(mean_loss)(params, images, labels)
        speed = jax.tree.map(lambda v, g: 0.9 * v - 0.02 * g, speed, gradient)
        return jax.tree.map(jnp.add, params, speed), speed, value

    params = initial(jax.random.key(0))
    speed = jax.tree.map(jnp.zeros_like, params)
    for i in range(1, STEPS + 1):
        some = rng.integers(SEEN, size=128)
        params, speed, value = step(params, speed, varied(images[some], rng), labels[some])
        if i % 100 == 0:
            print(f"  step {i}   mean loss {value:.3f}", flush=True)
    return {name: np.asarray(x) for name, x in params.items()}


def embed_all(folder, commit, dies):
    """What the other process does: the whole job, or half of it."""

    def die_halfway(done, total):
        if done >= total / 2:
            os.kill(os.getpid(), signal.SIGKILL)

    report = bx.map(
        embed,
        dict(np.load(folder / "weights.npz")),
        folder / "images.npy",
        in_axes=(None, 0),
        out=folder / "embeddings.zarr",
        batch_size=min(256, commit),
        commit_rows=commit,
        progress=die_halfway if dies else False,
    )
    print(f"  {report}")


def in_another_process(folder, dies):
    """Runs `embed_all`; returns when it began, and how it ended."""
    begun = time.time()
    how = [str(COMMIT), "dies" if dies else "lives"]
    done = subprocess.run([sys.executable, __file__, str(folder), *how], check=False)
    return begun, done.returncode


def journal(out):
    """When each unit was done, and how many rows it has."""
    lines = Path(f"{out}.job/journal/main.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines if not line.endswith("torn")]
    return np.array([(e["ended"], e["stop"] - e["start"]) for e in entries])


def nearest(vectors, of, among, count):
    """For each row of `of` the rows of `among` whose vectors are most alike."""
    return among[np.argsort(-(vectors[of] @ vectors[among].T), axis=1)[:, :count]]


def draw(path, starts, killed, units, images, queries, found, agree):
    ink, paper, line, cut = "#22223b", "#fbfaf5", "#588b8b", "#c8553d"
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": ink, "axes.edgecolor": ink})
    figure = plt.figure(figsize=(12, 4.6), facecolor=paper)
    left, right = figure.subfigures(1, 2, width_ratios=[1.7, 1])
    for part in (left, right):
        part.set_facecolor(paper)
    axes = left.subplots(gridspec_kw=dict(left=0.11, right=0.96, top=0.86, bottom=0.13))
    axes.set_facecolor(paper)
    ended, rows = units.T
    done, before = np.cumsum(rows), ended <= killed
    for part, start in zip((before, ~before), starts, strict=True):
        first = done[part][0] - rows[part][0] if part.any() else 0
        at = np.concatenate([[start], ended[part]]) - starts[0]
        axes.step(at, np.concatenate([[first], done[part]]) / 1000, color=line, where="post", lw=2)
    axes.axvline(killed - starts[0], color=cut, lw=1)
    axes.annotate(
        f"killed: {done[before][-1]:,.0f} rows\nare on the disk",
        (killed - starts[0], done[-1] / 1000),
        xytext=(6, -4),
        textcoords="offset points",
        va="top",
        color=cut,
    )
    axes.axvline(starts[1] - starts[0], color=ink, lw=0.8, ls=":")
    axes.annotate(
        "the same call again",
        (starts[1] - starts[0], 0),
        xytext=(6, 6),
        textcoords="offset points",
    )
    axes.set(xlabel="seconds (each process starts and compiles first)", ylabel="thousand rows done")
    axes.set_title(f"{len(images):,} images, from disk to disk", loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    grid = right.subplots(
        5, 6, gridspec_kw=dict(left=0.03, right=0.97, top=0.8, bottom=0.04, wspace=0.1, hspace=0.1)
    )
    for row, query, alike in zip(grid, queries, found, strict=False):
        for place, i in zip(row, [query, *alike], strict=True):
            place.imshow(images[i], cmap="bone_r")
            place.set(xticks=[], yticks=[])
            for spine in place.spines.values():
                spine.set(color=cut if i == query else line, linewidth=2 if i == query else 0.5)
    right.text(0.03, 0.93, "Digits never seen, and the most alike", weight="bold", fontsize=11)
    right.text(0.03, 0.85, f"the same digit in {agree:.0%} of cases", fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "embeddings.zarr"
    for old in (out, Path(f"{out}.job")):  # of an earlier run: images and weights are made anew
        shutil.rmtree(old, ignore_errors=True)
    rng = np.random.default_rng(0)
    digits = load_digits()
    known, labels = digits.images.astype(np.float32) / 16, digits.target
    print(f"Training on {SEEN:,} handwritten digits")
    np.savez(folder / "weights.npz", **train(known, labels, rng))
    which = rng.integers(len(known), size=ROWS)
    images = varied(known[which], rng)
    np.save(folder / "images.npy", images)

    print(f"Vectors of {ROWS:,} images, in a process that kills itself halfway")
    first, ended = in_another_process(folder, dies=True)
    killed = journal(out)[-1, 0]
    print(f"  ended by signal {-ended}; {journal(out)[:, 1].sum():,.0f} rows are done")
    assert ended == -signal.SIGKILL
    print("The same call again")
    second, ended = in_another_process(folder, dies=False)
    assert ended == 0

    params = dict(np.load(folder / "weights.npz"))
    vectors = bx.map(lambda x: x, out, progress=False).outputs
    some = rng.integers(ROWS, size=min(1000, ROWS))
    expected = jax.jit(jax.vmap(embed, (None, 0)))(params, images[some])
    np.testing.assert_allclose(vectors[some], expected, atol=1e-5)
    print(f"  {len(some):,} of them computed once more: agreed")

    unseen = np.flatnonzero(which >= SEEN)[:500]
    among = np.flatnonzero(which < SEEN)[:20_000]
    found = nearest(vectors, unseen, among, 5)
    agree = np.mean(labels[which[found]] == labels[which[unseen]][:, None])
    print(f"Of digits never seen, the nearest show the same one in {agree:.0%} of cases")
    picture = folder / "embeddings.png"
    starts = [first, second]
    draw(picture, starts, killed, journal(out), images, unseen[:5], found[:5], agree)
    print(f"Drew {picture}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        embed_all(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "dies")
    else:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("out"))
