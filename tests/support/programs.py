"""Random programs of one example, by number; see `fuzz.programs`."""

import functools

import jax
import numpy as np

from fuzz.programs import HELPERS, NAMES, draw_program


@functools.cache
def random_program(seed, most=8):
    """What was drawn, in double precision."""
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        return draw_program(lambda n: int(rng.integers(n)), most=most)


def function_of(program):
    """A new function each time."""
    names = {**NAMES, "vmap": jax.vmap}
    for source in (*map(HELPERS.get, program.helpers), program.source):
        exec(source, names)
    return names["f"]
