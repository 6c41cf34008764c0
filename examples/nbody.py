"""Does a star keep its planets when another one passes by? An ensemble of encounters.

A star has four planets; a second star comes by, in each lane on a path of its own. Forces, steps
(leapfrog) and the encounter are written for one system of six bodies: `batchax.scan` over frames,
and a loop of steps between them. `batchax.vmap` runs 2,048 encounters, 256 at a time. What becomes
of the energy tells how good the steps are; a loop over some encounters checks that a batch
does what each does alone.

    python examples/nbody.py [folder for the picture]
"""

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

LANES, CHUNK = 2048, 256
FRAMES, BETWEEN, STEP = 300, 20, 0.01  # a year is two pi: units in which G and the star are 1
RADII = (1.0, 1.8, 3.0, 5.0)  # of the orbits
MASSES = jnp.array([1.0, 1e-4, 1e-4, 1e-4, 1e-4, 0.5])  # the last is the star that passes by
NEAREST = 0.05  # forces are softened below


def accelerations(x):
    apart = x - x[:, None]
    cubes = (jnp.sum(apart**2, -1) + NEAREST**2) ** 1.5
    return jnp.einsum("j,ijk,ij->ik", MASSES, apart, 1 / cubes)


def energy(x, v):
    apart = jnp.sqrt(jnp.sum((x - x[:, None]) ** 2, -1) + NEAREST**2)
    pairs = jnp.triu(MASSES[:, None] * MASSES / apart, 1)
    return jnp.sum(MASSES * jnp.sum(v**2, -1)) / 2 - pairs.sum()


def begin(phases, aim):
    """Planets at their phases; the other star far away, to pass at a distance of about `aim`."""
    radii = jnp.array(RADII)
    ring = lambda angle: jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)
    x = jnp.concatenate([jnp.zeros((1, 2)), radii[:, None] * ring(phases), jnp.zeros((1, 2))])
    speeds = jnp.sqrt(1 / radii)[:, None] * ring(phases + jnp.pi / 2)
    v = jnp.concatenate([jnp.zeros((1, 2)), speeds, jnp.zeros((1, 2))])
    return x.at[-1].set(jnp.array([-20.0, aim])), v.at[-1].set(jnp.array([0.6, 0.0]))


def encounter(phases, aim):
    """Where the bodies are, frame by frame; and by how much the energy is wrong at the end."""

    def leap(_, state):
        x, v = state
        v = v + STEP / 2 * accelerations(x)
        x = x + STEP * v
        return x, v + STEP / 2 * accelerations(x)

    def frame(state):
        state = jax.lax.fori_loop(0, BETWEEN, leap, state)
        return state, state[0]

    state = begin(phases, aim)
    (x, v), path = bx.scan(frame, length=FRAMES)(state)
    return path, (x, v), energy(x, v) / energy(*state) - 1


def kept(x, v):
    """Which planets are bound to the first star at the end."""
    distance = jnp.linalg.norm(x[1:5] - x[0], axis=-1)
    return jnp.sum((v[1:5] - v[0]) ** 2, -1) / 2 < 1 / distance


def compare(phases, aims, paths, errors):
    """Some of the encounters computed alone. Those in which bodies come near differ by rounding."""
    some = np.argsort(errors)[: len(errors) // 2][:: max(1, len(errors) // 8)]
    alone = jax.jit(encounter)
    for i in some:
        path, _, _ = alone(phases[i], aims[i])
        np.testing.assert_allclose(paths[i][: FRAMES // 2], path[: FRAMES // 2], atol=0.02)
    print(f"  {len(some)} of them computed alone: agreed")


def draw(path, paths, aims, share, errors):
    ink, paper, line, cut = "#22223b", "#fbfaf5", "#588b8b", "#c8553d"
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": ink, "axes.edgecolor": ink})
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(13, 4.4), facecolor=paper, layout="constrained"
    )
    lane = len(aims) // 4
    for body, colour in zip(range(6), [ink, *[line] * 4, cut], strict=True):
        left.plot(*paths[lane, :, body].T, color=colour, lw=0.9)
    left.set(xlim=(-12, 12), ylim=(-12, 12), aspect="equal", xticks=[], yticks=[])
    left.set_title("One encounter: planets, and the star that passes", loc="left", fontsize=10)
    for planet, radius in enumerate(RADII):
        middle.plot(
            np.linspace(aims[0], aims[-1], len(share)),
            share[:, planet],
            label=f"planet at {radius:g}",
            lw=1.5,
        )
    middle.set(xlabel="distance at which the star is aimed past", ylabel="share of planets kept")
    middle.set_title(f"{len(aims):,} encounters", loc="left", fontsize=10)
    middle.legend(frameon=False, fontsize=9)
    right.hist(np.log10(np.maximum(errors, 1e-8)), 40, color=line)
    right.set(xlabel="error of the energy, power of ten", ylabel="encounters")
    right.set_title("Energies at the end against those at the beginning", loc="left", fontsize=10)
    for axes in (left, middle, right):
        axes.set_facecolor(paper)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(folder="out"):
    rng = np.random.default_rng(0)
    aims = np.linspace(0.5, 15, LANES, dtype=np.float32)
    phases = rng.uniform(0, 2 * np.pi, (LANES, len(RADII))).astype(np.float32)
    print(f"{LANES:,} encounters of {FRAMES * BETWEEN:,} steps, {min(CHUNK, LANES)} at a time")

    batched = jax.jit(bx.vmap(encounter, batch_size=CHUNK))
    start = time.perf_counter()
    paths, ends, errors = jax.tree.map(np.asarray, batched(phases, aims))
    print(f"  compiled and run in {time.perf_counter() - start:.1f} s")
    errors = np.abs(errors)
    print(
        f"  error of the energy: {np.median(errors):.1e} in the middle, {errors.max():.1e} at most"
    )
    compare(phases, aims, paths, errors)

    bound = np.asarray(bx.vmap(kept)(*ends))
    share = np.stack([part.mean(0) for part in np.array_split(bound, min(24, LANES))])
    print(f"  planets kept: {bound.mean():.0%}; of the innermost {bound[:, 0].mean():.0%}")
    picture = Path(folder) / "nbody.png"
    draw(picture, paths, aims, share, errors)
    print(f"Paths, planets kept and energies are drawn in {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
