"""What are the energies and forces of a thousand molecules of different sizes?

Water, methane, ethanol and other chains of carbon and oxygen are built from standard bond lengths
and tetrahedral angles, and shaken. The energy is written for one molecule, from the places of its
atoms alone: springs between neighbours, Lennard-Jones between the others. Its forces are
`jax.grad` of that. `batchax.vmap` runs both over a `batchax.Ragged`, in which each molecule has as
many rows as atoms: no padding and no mask. Following the forces brings all of them to rest. A loop
over molecules checks energies and forces.

    python examples/molecules.py [folder for the picture]
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

MOLECULES = 1000
LONGEST = 20  # atoms of a chain, hydrogen not counted
NAMED = {"O": "water", "C": "methane", "CO": "methanol", "CCO": "ethanol", "OCCO": "glycol"}
NAMED["C" * LONGEST] = "an alkane"
STEPS = 200
BONDS = {"CC": 1.54, "CO": 1.43, "OC": 1.43, "CH": 1.09, "OH": 0.96}  # angstrom
HALF = np.deg2rad(109.47) / 2  # of the tetrahedral angle

# Lennard-Jones by element, in the order H, C, O: radius (angstrom) and depth (kcal/mol), as in
# common force fields; and the springs, which hold atoms that a built molecule has so near.
RADII, DEPTHS = jnp.array([2.5, 3.5, 3.12]), jnp.array([0.03, 0.066, 0.17])
SPRING, NEAR = 300.0, 2.6


def molecule(chain):
    """Elements and places of a chain, "CCO" for ethanol, with its hydrogen atoms."""
    along, across = np.sin(HALF), np.cos(HALF)
    elements, places, at = [], [], np.zeros(3)
    for i, atom in enumerate(chain):
        up = (-1) ** i
        elements.append(atom)
        places.append(at)
        if atom == "C":
            for side in (-1, 1):
                elements.append("H")
                places.append(at + BONDS["CH"] * np.array([0, up * across, side * along]))
        for end, forward in ((0, -1), (len(chain) - 1, 1)):
            if i == end:
                elements.append("H")
                places.append(at + BONDS[atom + "H"] * np.array([forward * along, -up * across, 0]))
        if i + 1 < len(chain):
            at = at + BONDS[atom + chain[i + 1]] * np.array([along, -up * across, 0])
    return np.array(["HCO".index(e) for e in elements]), np.array(places, np.float32)


def energy(places, built, elements):
    """The energy of one molecule, from where its atoms are and where they were built."""
    atoms = places.shape[0]
    first, second = jnp.arange(atoms)[:, None], jnp.arange(atoms)

    def distances(x):  # of an atom to itself: 1, since a square root has no derivative at 0
        squares = jnp.sum((x[:, None] - x) ** 2, -1)
        return jnp.sqrt(jnp.where(first == second, 1.0, squares))

    now, rest = distances(places), distances(built)
    radius = jnp.sqrt(RADII[elements][:, None] * RADII[elements])
    depth = jnp.sqrt(DEPTHS[elements][:, None] * DEPTHS[elements])
    sixth = (radius / now) ** 6
    pairs = jnp.where(rest < NEAR, SPRING / 2 * (now - rest) ** 2, 4 * depth * (sixth**2 - sixth))
    return jnp.where(first < second, pairs, 0.0).sum()


energy_and_slope = jax.value_and_grad(energy)


def at_rest(places, built, elements):
    """Where the atoms of one molecule end up if they follow the forces."""
    step = lambda _, x: x - 1e-4 * jnp.clip(jax.grad(energy)(x, built, elements), -1e3, 1e3)
    return jax.lax.fori_loop(0, STEPS, step, places)


def compare(shaken, built, elements, energies, slopes):
    """Some of the molecules computed alone."""
    some = np.linspace(0, len(energies) - 1, 6).astype(int)
    found = slopes.rows()
    for i in some:
        alone, slope = energy_and_slope(shaken[int(i)], built[int(i)], elements[int(i)])
        np.testing.assert_allclose(energies[i], alone, rtol=1e-3)
        np.testing.assert_allclose(found[i], slope, rtol=1e-3, atol=0.05)
    print(f"  {len(some)} of them computed alone: agreed")


def draw(path, molecules, shaken, slopes, before, after):
    ink, paper, line, cut = "#22223b", "#fbfaf5", "#588b8b", "#c8553d"
    plt.rcParams.update({"font.family": "DejaVu Sans", "text.color": ink, "axes.edgecolor": ink})
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 4.4), width_ratios=[1.5, 1], facecolor=paper, layout="constrained"
    )
    for i, name in enumerate(NAMED.values()):
        elements, built = molecules[i]
        place = [-12 + 6 * i, 0] if i < 5 else [-12, -5]
        (x, y), forces = (np.array(shaken[i])[:, :2] + place).T, -np.array(slopes[i])[:, :2].T
        for j, k in np.argwhere(np.linalg.norm(built[:, None] - built, axis=-1) < 1.6):
            left.plot(x[[j, k]], y[[j, k]], color=ink, lw=1.2, zorder=1)
        colours = np.array(["#dfdcd0", "#4a4e69", cut])[elements]
        left.scatter(x, y, np.array([25, 60, 60])[elements], colours, edgecolor=ink, lw=0.6)
        left.quiver(
            x, y, *forces, angles="xy", scale_units="xy", scale=250, color=line, width=0.003
        )
        left.text(*np.add(place, [-1, 2.2]), f"{name}: {len(x)} atoms", fontsize=9)
    left.set(aspect="equal", xticks=[], yticks=[], ylim=(-8, 3.5))
    left.spines[:].set_visible(False)
    left.set_title("Forces on shaken molecules", loc="left", weight="bold")
    sizes = [len(elements) for elements, _ in molecules]
    right.scatter(sizes, before, s=5, color=cut, alpha=0.5, label="shaken")
    right.scatter(sizes, after, s=5, color=line, alpha=0.5, label="at rest")
    right.set(xlabel="atoms", ylabel="energy (kcal/mol)", yscale="symlog")
    right.set_title(f"Energies of {len(sizes):,} molecules", loc="left", weight="bold")
    right.legend(frameon=False, loc="lower right")
    right.spines[["top", "right"]].set_visible(False)
    for axes in (left, right):
        axes.set_facecolor(paper)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(folder="out"):
    rng = np.random.default_rng(0)
    chains = list(NAMED)
    while len(chains) < MOLECULES:
        chains.append("".join(rng.choice(["C", "C", "C", "O"], rng.geometric(0.2) % LONGEST + 1)))
    molecules = [molecule(chain.replace("OO", "OC")) for chain in chains]
    elements = bx.Ragged.from_rows([elements for elements, _ in molecules])
    built = bx.Ragged.from_rows([places for _, places in molecules])
    shaken = built.with_data(built.data + 0.1 * rng.standard_normal(built.data.shape, np.float32))
    atoms = bx.ragged("atoms")  # of which elements and places have as many
    shortest, most = int(min(built.lengths)), built.max_length
    print(f"{len(chains):,} molecules of {shortest} to {most} atoms, {len(built.data):,} in all")

    each = jax.jit(bx.vmap(energy_and_slope, atoms))
    start = time.perf_counter()
    before, slopes = jax.block_until_ready(each(shaken, built, elements))
    print(f"  energies and forces, compiled and run: {time.perf_counter() - start:.1f} s")
    compare(shaken, built, elements, before, slopes)

    rest = jax.jit(bx.vmap(at_rest, atoms))(shaken, built, elements)
    after, last = each(rest, built, elements)
    largest = [f"{np.abs(slopes.data).max():,.0f}" for slopes in (slopes, last)]
    print(f"  {STEPS} steps along the forces: from {np.mean(before):,.1f} to {np.mean(after):,.1f}")
    print(f"  kcal/mol, and the largest force from {largest[0]} to {largest[1]} kcal/mol/angstrom")
    assert np.all(after < before)
    picture = Path(folder) / "molecules.png"
    draw(picture, molecules, shaken, slopes, before, after)
    print(f"Molecules, forces and energies are drawn in {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
