"""The oracle for kinds of axis: what is written by hand, in every way of running."""

import jax
import numpy as np

from support.oracle import Claim, alike, claims_of_derivatives, is_inexact, same, settle

WAYS = {
    "all at once": {},
    "chunks": {"batch_size": 2},
    "kept": {"batch_size": 2, "residuals": "keep"},
    "compact": {"divergence": "compact"},
}
EAGER = ("all at once", "chunks")
"""Ways that are also run outside of `jit`."""


def check_kind(make, reference, *args, ways=WAYS, derivatives=True, outer=True, tolerance=None):
    """Compares `make(**options)`, a batched function, with `reference` for each way of running.

    Values outside of jit and inside, derivatives of both modes with respect to inexact arguments,
    one over the other, and the same under `jax.vmap` over a stack of them.
    """
    reference = jax.jit(reference)  # staged once for all ways
    expected, claims = reference(*args), []
    for way, options in ways.items():
        batched = make(**options)
        if way in EAGER:
            same(batched(*args), expected, tolerance, f"{way}, eager")
        in_jit = lambda ours, _, way=way: same(ours["got"], expected, tolerance, f"{way}, jit")
        claims.append(Claim({"got": batched}, {}, {}, args, in_jit))
        if derivatives:
            claims += claims_of_derivatives(batched, reference, args, True, tolerance, f"{way}: ")
    varied = [i for i, x in enumerate(args) if all(map(is_inexact, jax.tree.leaves(x)))]
    if outer and varied:
        axes = tuple(0 if i in varied else None for i in range(len(args)))
        twice = [
            jax.tree.map(lambda x: np.stack([x, x * 2 + 1]), x) if i in varied else x
            for i, x in enumerate(args)
        ]
        under = {"under jax.vmap": jax.vmap(make(), axes)}, {}, {"": jax.vmap(reference, axes)}
        claims.append(Claim(*under, twice, alike(tolerance)))
    settle(claims)
