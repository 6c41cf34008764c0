"""How does the root of an equation move with the equation?

The quantile of a mixture of Gaussians is the root of an equation, found here by
Newton's method, with bisection wherever a step of Newton would leave the bracket:
a while loop, for one mixture. `batchax.vmap` runs it for many, each with its own
number of steps. `jax.grad` cannot go back through `lax.while_loop`; through
`batchax.bounded_while` it can, and the implicit function theorem says what the
gradient must be. These are the derivatives of samples of a mixture with respect to
its parameters: with respect to the means they are the shares of its components.

    python examples/roots.py [folder for the picture]
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
    from jax import lax
    from jax.scipy.stats import norm

    import batchax as bx
except ModuleNotFoundError as missing:
    sys.exit(f"This needs {missing.name}; in a checkout of batchax: pip install '.[demo]'")

plt.switch_backend("Agg")  # pictures are written to files

EQUATIONS = 32_768
COMPONENTS = 16
MAX_STEPS = 64
LEVELS = 200
EDGE = 30.0  # all roots lie between -EDGE and EDGE

bounded_while = functools.partial(bx.bounded_while, max_steps=MAX_STEPS)


def cdf(mixture, x):
    shares = jax.nn.softmax(mixture["weights"])
    return jnp.sum(shares * norm.cdf(x, mixture["means"], jnp.exp(mixture["log_scales"])))


def quantile(mixture, p, while_loop=bounded_while):
    """The root x of cdf(mixture, x) = p, and how many steps it took: one equation."""
    density = jax.value_and_grad(cdf, argnums=1)

    def step(carry):
        n, low, high, x, moved, _ = carry
        value, slope = density(mixture, x)
        low, high = jnp.where(value < p, x, low), jnp.where(value < p, high, x)
        newton = x - (value - p) / jnp.maximum(slope, 1e-12)
        exact = jnp.abs(value - p) < 5e-7  # rounding allows no more
        good = (low < newton) & (newton < high) & (2 * jnp.abs(newton - x) < moved)
        new = jnp.where(exact | good, newton, (low + high) / 2)
        moved = jnp.abs(new - x)
        return n + 1, low, high, new, moved, exact | good & (moved < 1e-4)

    first = (0, *(jnp.full((), x) for x in (-EDGE, EDGE, 0.0, 2 * EDGE)), jnp.array(False))
    n, _, _, x, *_ = while_loop(lambda carry: ~carry[-1], step, first)
    return x, n


def implicit(mixture, x):
    """What the implicit function theorem says of the derivatives of the root."""
    of_mixture, of_x = jax.grad(cdf, argnums=(0, 1))(mixture, x)
    return jax.tree.map(lambda g: -g / of_x, of_mixture)


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


def draw(path, steps, mixture, levels, roots, slopes):
    """Steps of each equation; and how the roots of one mixture follow each of its means."""
    ink, paper, green = "#22223b", "#fbfaf5", "#588b8b"
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": ink, "axes.edgecolor": ink})
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 5), width_ratios=[1, 1.5], facecolor=paper, layout="constrained"
    )
    left.hist(steps, bins=np.arange(steps.min(), steps.max() + 2) - 0.5, color=green)
    left.set(xlabel="steps to the root", ylabel="equations")
    left.set_title(f"{steps.mean():.1f} steps, at most {steps.max()}", loc="left", weight="bold")

    order = np.argsort(mixture["means"])
    colours = plt.get_cmap("tab20b")(np.linspace(0, 1, len(order)))
    right.stackplot(levels, slopes.T[order], colors=colours, alpha=0.85)
    right.set(xlabel="level of the quantile", ylim=(0, 1), xlim=(levels[0], levels[-1]))
    right.set_ylabel("derivative with respect to each mean")
    right.set_title("Each root moves with the means near it", loc="left", weight="bold")
    height = right.twinx()
    height.plot(levels, roots, color=ink, linewidth=2.5, label="root")
    height.set_ylabel("root")
    height.legend(loc="lower right", facecolor=paper)
    for axes in (left, right):
        axes.set_facecolor(paper)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor=paper)
    plt.close(figure)


def main(folder="out"):
    rng = np.random.default_rng(0)
    spread = {"weights": 1.0, "means": 3.0, "log_scales": 0.5}
    mixtures = {
        name: (size * rng.normal(size=(EQUATIONS, COMPONENTS))).astype(np.float32)
        for name, size in spread.items()
    }
    p = rng.uniform(0.01, 0.99, EQUATIONS).astype(np.float32)
    print(f"{EQUATIONS:,} equations")

    by_while = functools.partial(quantile, while_loop=lax.while_loop)
    gradient = jax.value_and_grad(quantile, has_aux=True)
    print(f"  {'':32}{'compile':>10}{'run':>12}")
    results = {}
    for name, batched in {
        "roots: jax.vmap, while_loop": jax.vmap(by_while),
        "roots: compact, while_loop": bx.vmap(by_while, divergence="compact"),
        "gradients: bounded_while": bx.vmap(gradient),
        "gradients: bounded, compact": bx.vmap(gradient, divergence="compact"),
    }.items():
        results[name], compiling, running = timed(batched, mixtures, p)
        print(f"  {name:32}{compiling:>9.2f}s{running * 1e3:>10.1f}ms", flush=True)

    (reference, steps), (roots, _), *gradients = results.values()
    alone = jax.jit(by_while)
    some = np.linspace(0, EQUATIONS - 1, 20).astype(int)
    loop = [alone(jax.tree.map(lambda x, i=i: x[i], mixtures), p[i])[0] for i in some]
    np.testing.assert_allclose(roots, reference, atol=1e-3)
    np.testing.assert_allclose(roots[some], loop, atol=1e-3)
    expected = jax.jit(jax.vmap(implicit))(mixtures, roots)
    for _, found in gradients:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, expected
        )
    far = lambda a, b: np.mean(abs(a - b))
    distance = jax.tree.reduce(max, jax.tree.map(far, gradients[1][1], expected))
    print(f"  roots as in a loop over {len(some)}; gradients are {distance:.0e} from those of the")
    print("  implicit function theorem in the mean: agreed")

    levels = np.linspace(0.01, 0.99, LEVELS).astype(np.float32)
    mixture = {name: x[0] for name, x in mixtures.items()}
    (places, _), moves = jax.jit(bx.vmap(gradient, (None, 0)))(mixture, levels)
    picture = Path(folder) / "roots.png"
    draw(picture, np.asarray(steps), mixture, levels, places, np.asarray(moves["means"]))
    print(f"Steps and derivatives are drawn in {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
