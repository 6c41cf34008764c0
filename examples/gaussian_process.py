"""Which kernel fits? The hyperparameters of many Gaussian processes, each with folds, at once.

The progress of diabetes over a year (200 of the patients that scikit-learn ships) is predicted by
a Gaussian process with a length scale for each of ten measurements. The fit of one process to one
training set is written once: `jax.grad` of its likelihood, and a loop of Adam. `batchax.vmap` runs
it for all folds of a cross-validation and, around that, from several starts, of which the best is
kept for each fold. A loop over some of the fits checks it, and least squares on the same folds
says what it is worth: as much, for these patients, but without a spread for each.

    python examples/gaussian_process.py [folder for the picture]
"""

import sys
import time
from pathlib import Path

try:
    import jax
    import jax.numpy as jnp
    import matplotlib.pyplot as plt
    import numpy as np
    from jax.scipy.linalg import cho_solve, solve_triangular
    from sklearn.datasets import load_diabetes

    import batchax as bx
except ModuleNotFoundError as missing:
    sys.exit(f"This needs {missing.name}; in a checkout of batchax: pip install '.[demo]'")

plt.switch_backend("Agg")  # pictures are written to files

FOLDS, STARTS = 5, 6
STEPS, RATE = 50, 0.1
CHUNK = 10  # fits in memory at a time
PATIENTS = 200
JITTER = 1e-4  # added to the diagonal: matrices of float32 are positive to about that


def kernel(params, a, b):
    """The covariance of the process at two points: squared exponential, a scale for each axis."""
    apart = (a - b) * jnp.exp(-params["scales"])
    return jnp.exp(2 * params["height"] - 0.5 * jnp.sum(apart**2))


def covariances(params, a, b):
    return bx.vmap(bx.vmap(kernel, (None, None, 0)), (None, 0, None))(params, a, b)


def factor(params, x):
    noise = jnp.exp(2 * params["noise"]) + JITTER
    return jnp.linalg.cholesky(covariances(params, x, x) + noise * jnp.eye(len(x)))


def surprise(params, x, y):
    """Minus the logarithm of the likelihood of one training set, for each patient."""
    lower = factor(params, x)
    white = solve_triangular(lower, y, lower=True)
    prior = 0.05 * sum(jnp.sum(p**2) for p in params.values())
    likelihood = -0.5 * white @ white - jnp.log(jnp.diagonal(lower)).sum()
    return -likelihood / len(y) + prior / len(y)


def fit(start, x, y):
    """The hyperparameters of one process, by Adam, and their surprise."""

    def step(i, carry):
        params, mean, square = carry
        slope = jax.grad(surprise)(params, x, y)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, slope)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g**2, square, slope)
        up = lambda x, by: x / (1 - by ** (i + 1.0))
        move = lambda p, m, s: p - RATE * up(m, 0.9) / (jnp.sqrt(up(s, 0.99)) + 1e-8)
        return jax.tree.map(move, params, mean, square), mean, square

    zero = jax.tree.map(jnp.zeros_like, start)
    params, _, _ = jax.lax.fori_loop(0, STEPS, step, (start, zero, zero))
    return params, surprise(params, x, y)


def predict(params, x, y, point):
    """Mean and standard deviation for one new patient."""
    lower = factor(params, x)
    across = covariances(params, point[None], x)[0]
    mean = across @ cho_solve((lower, True), y)
    left = solve_triangular(lower, across, lower=True)
    return mean, jnp.sqrt(kernel(params, point, point) - left @ left + jnp.exp(2 * params["noise"]))


def folds(x, y, rng):
    """Training and test sets: every patient is in one of the test sets."""
    order = rng.permutation(len(x) // FOLDS * FOLDS).reshape(FOLDS, -1)
    rest = [np.concatenate([*order[:i], *order[i + 1 :]]) for i in range(FOLDS)]
    return (x[np.array(rest)], y[np.array(rest)]), (x[order], y[order])


def draw(path, names, surprises, params, found, truth, errors):
    ink, paper, line, cut = "#22223b", "#fbfaf5", "#588b8b", "#c8553d"
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": ink, "axes.edgecolor": ink})
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(13, 4.2), facecolor=paper, layout="constrained"
    )
    for fold, of_starts in enumerate(surprises.T):
        left.scatter(np.full(len(of_starts), fold), of_starts, s=25, color=cut, alpha=0.5)
    left.scatter(range(FOLDS), surprises.min(0), s=45, color=line, label="the best start")
    left.set(xlabel="fold", ylabel="surprise")
    left.set_title(f"{surprises.size} fits", loc="left", weight="bold")
    left.legend(frameon=False)
    relevance = np.exp(-params["scales"])
    middle.barh(names, relevance.mean(0), xerr=relevance.std(0), color=line)
    middle.set_title("Measurements that matter: one over the scale", loc="left", fontsize=11)
    (mean, spread), order = found, np.argsort(found[0])
    place = np.arange(len(order))
    right.fill_between(
        place, *(mean[order] + side * 2 * spread[order] for side in (-1, 1)), color=line, alpha=0.25
    )
    right.plot(place, mean[order], color=line)
    right.scatter(place, truth[order], s=4, color=ink)
    right.set(xlabel="patients, by what is predicted", ylabel="progress of diabetes")
    title = "\n".join(f"{name}: error {error:.1f}" for name, error in errors.items())
    right.set_title(title, loc="left", fontsize=10)
    for axes in (left, middle, right):
        axes.set_facecolor(paper)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(folder="out"):
    rng = np.random.default_rng(0)
    data = load_diabetes()
    x, y = data.data[:PATIENTS] / data.data.std(0), data.target[:PATIENTS]
    unit, shift = y.std(), y.mean()
    (x, y), (x_test, y_test) = jax.tree.map(
        lambda a: jnp.asarray(a, jnp.float32), folds(x, (y - shift) / unit, rng)
    )
    starts = {
        "scales": rng.uniform(0.5, 2.5, (STARTS, x.shape[-1])).astype(np.float32),
        "height": rng.uniform(-1, 1, STARTS).astype(np.float32),
        "noise": rng.uniform(-1, 0, STARTS).astype(np.float32),
    }
    print(f"{STARTS * FOLDS} fits to {x.shape[1]} patients each, at most {CHUNK} at a time")
    of_folds = bx.vmap(fit, (None, 0, 0))
    fits = jax.jit(bx.vmap(of_folds, (0, None, None), batch_size=max(1, CHUNK // FOLDS)))
    begun = time.perf_counter()
    params, surprises = jax.block_until_ready(fits(starts, x, y))
    print(f"  compiled and run in {time.perf_counter() - begun:.1f} s")
    alone = jax.jit(fit)
    for start, fold in ((0, 0), (STARTS - 1, FOLDS - 1)):
        _, expected = alone(jax.tree.map(lambda p: p[start], starts), x[fold], y[fold])
        np.testing.assert_allclose(surprises[start, fold], expected, atol=1e-3)
    print("  2 of them computed alone: agreed")

    best = np.argmin(surprises, axis=0)
    chosen = jax.tree.map(lambda p: p[best, np.arange(FOLDS)], params)
    of_points = bx.vmap(predict, (None, None, None, 0))
    found = jax.jit(bx.vmap(of_points))(chosen, x, y, x_test)
    weights = bx.vmap(lambda x, y: jnp.linalg.lstsq(x, y)[0])(x, y)
    guesses = {
        "Gaussian processes": found[0],
        "least squares": jnp.einsum("fpm,fm->fp", x_test, weights),
    }
    off = {name: float(unit * jnp.sqrt(jnp.mean((g - y_test) ** 2))) for name, g in guesses.items()}
    for name, error in off.items():
        print(f"  {name:18} are off by {error:.1f} (of a spread of {unit:.1f})")
    inside = jnp.mean(jnp.abs(found[0] - y_test) < 2 * found[1])
    print(f"  {inside:.0%} of the patients are within two standard deviations of the mean")

    picture = Path(folder) / "gaussian_process.png"
    mean, spread, truth = (np.ravel(a) * unit for a in (*found, y_test))
    arrays = jax.tree.map(np.asarray, (surprises, chosen))
    draw(picture, data.feature_names, *arrays, (mean + shift, spread), truth + shift, off)
    print(f"Fits, scales and predictions are drawn in {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
