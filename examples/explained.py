"""What does batching make of a fit, and what can be done about it?

A classifier of tumours by ten measurements is fitted by gradient descent until the
gradient is small, for many strengths of its ridge penalty at once: strong ones are done
in dozens of steps, weak ones take thousands. `batchax.explain` says what that costs in a batch,
before anything has run, and what to do; this does it, and shows what it was worth.

    python examples/explained.py [folder for the pages]
"""

import sys
import time
from pathlib import Path

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from sklearn.datasets import load_breast_cancer

    import batchax as bx
except ModuleNotFoundError as missing:
    sys.exit(f"This needs {missing.name}; in a checkout of batchax: pip install '.[demo]'")

PENALTIES = 512
WEAKEST, STRONGEST = 1e-3, 10.0
MOST_STEPS = 5_000
SMALL = 1e-3  # a gradient at which a fit is done


def fit(measurements, malignant, penalty):
    """The weights of the classifier for one penalty, and the steps they took."""

    def loss(weights):
        margins = (measurements @ weights) * jnp.where(malignant, 1.0, -1.0)
        return jnp.mean(jnp.logaddexp(0.0, -margins)) + penalty / 2 * weights @ weights

    rate = 1 / (0.25 * measurements.shape[1] + penalty)  # one over a bound of the curvature

    def unfinished(carry):
        step, _, gradient = carry
        return (jnp.linalg.norm(gradient) > SMALL) & (step < MOST_STEPS)

    def descend(carry):
        step, weights, gradient = carry
        weights = weights - rate * gradient
        return step + 1, weights, jax.grad(loss)(weights)

    start = jnp.zeros(measurements.shape[1])
    steps, weights, _ = lax.while_loop(unfinished, descend, (0, start, jax.grad(loss)(start)))
    return weights, steps


def seconds(call):
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def main(folder="out"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = load_breast_cancer()
    table = data.data[:, :10]
    measurements = jnp.asarray((table - table.mean(0)) / table.std(0), jnp.float32)
    malignant = jnp.asarray(data.target == 0)
    penalties = jnp.geomspace(WEAKEST, STRONGEST, PENALTIES, dtype=jnp.float32)
    args = measurements, malignant, penalties

    results = {}
    for divergence in ("predicate", "compact"):
        options = {"divergence": divergence}
        explanation = bx.explain(fit, (None, None, 0), **options)(*args)
        page = folder / f"explained_{divergence}.html"
        explanation.to_html(page)
        print(f'divergence="{divergence}": {len(explanation.findings)} findings, see {page}')
        for finding in explanation.findings:
            print(f"  {finding.message}\n  -> {finding.remedy}")
        batched = jax.jit(bx.vmap(fit, (None, None, 0), **options))
        print(f"  {seconds(lambda f=batched: f(*args)) * 1e3:.0f} ms")
        results[divergence] = batched(*args)

    steps = np.asarray(results["compact"][1])
    print(
        f"{PENALTIES} fits took {steps.min()} to {steps.max()} steps, {steps.mean():.0f} on average"
    )
    one = jax.jit(fit)
    for lane in (0, PENALTIES // 2, PENALTIES - 1):
        alone, _ = one(measurements, malignant, penalties[lane])
        for weights, _ in results.values():
            np.testing.assert_allclose(weights[lane], alone, atol=1e-2)
    print("some of them compared with fits alone: agreed")


if __name__ == "__main__":
    main(*sys.argv[1:])
