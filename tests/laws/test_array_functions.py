"""The array functions people write programs with, each against the loop and `jax.vmap`.

Those of `jax.numpy` and its siblings are called as `support.row_operations` says; beside them are
ways to index, statistics and images. The lanes of a call are the rows of fixed example arrays.
"""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest

from support.oracle import check_all, example
from support.row_operations import calls, function_of

LANES = 3
X, V = example((LANES, 4, 4), seed=1), example((LANES, 5), seed=3)
POSITIVE = example((LANES, 5), seed=5, low=0.1, high=3.0)
COMPLEX = example((LANES, 4), jnp.complex64, seed=9)

OF_A_MATRIX = {
    "reshape in Fortran order": lambda x: jnp.reshape(x, (2, 8), order="F"),
    "repeat, each its own count": lambda x: jnp.repeat(
        x, jnp.array([1, 0, 2, 1]), axis=0, total_repeat_length=4
    ),
    "roll": lambda x: jnp.roll(x, (1, -2), axis=(0, 1)),
    "pad": lambda x: jnp.pad(x, ((1, 2), (0, 1)), mode="reflect"),
    "quantile": lambda x: jnp.quantile(x, 0.3, axis=1, method="nearest"),
    "vectorize": lambda x: jnp.vectorize(jnp.dot, signature="(n),(n)->()")(x, x[0]),
    "at add": lambda x: x.at[jnp.array([0, 0, 2])].add(1.0),
    "at multiply with lookups of its own": lambda x: x.at[jnp.argmax(x, 0)].multiply(2.0),
    "at get out of range": lambda x: x.at[9].get(mode="fill", fill_value=-1.0),
    "at apply": lambda x: x.at[jnp.argsort(x[0])[:2]].apply(jnp.square),
    "index by a mask": lambda x: jnp.where(x.sum() > 0, x[np.array([True, False, True, True])], 0),
    "index by its own argmax": lambda x: x[jnp.argmax(x[:, 0])],
    "view": lambda x: x.view(jnp.int32),
    "softmax where": lambda x: jax.nn.softmax(x, axis=0, where=x < 1),
    "sqrtm": lambda x: jsp.linalg.sqrtm(x @ x.T + jnp.eye(4)).real,
    "resize, cubic": lambda x: jax.image.resize(x, (2, 6), "cubic"),
    "scale and translate": lambda x: jax.image.scale_and_translate(
        x, (5, 5), (0, 1), jnp.array([1.2, 0.8]), x[0, :2], "linear"
    ),
    "map_coordinates": lambda x: jsp.ndimage.map_coordinates(x, [x[0] + 1, x[1] + 1], order=1),
}
OF_COMPLEX = {
    "ifft": jnp.fft.ifft,
    "sort": jnp.sort,
    "vdot": lambda z: jnp.vdot(z, z),
}
STATS = {
    "multivariate_normal": lambda v: jsp.stats.multivariate_normal.logpdf(
        v, jnp.zeros(5), jnp.eye(5) + jnp.outer(v, v)
    ),
    "vonmises": lambda v: jsp.stats.vonmises.logpdf(v, 2.0),
    "rankdata": jsp.stats.rankdata,
    "mode": jsp.stats.mode,
    "gaussian_kde": lambda v: jsp.stats.gaussian_kde(v).logpdf(v + 0.1),
    "bessel_jn": lambda v: jsp.special.bessel_jn(v, v=2, n_iter=10),
}
ALL = [
    (name, call, array)
    for table, array in (
        ({name: function_of(name, call) for name, call in calls().items()}, V),
        (OF_A_MATRIX, X),
        (OF_COMPLEX, COMPLEX),
        (STATS, POSITIVE),
    )
    for name, call in table.items()
]
TOGETHER = 20  # are one program: most of the time goes to compiling
GROUPS = [ALL[i : i + TOGETHER] for i in range(0, len(ALL), TOGETHER)]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group[0][0]} to {group[-1][0]}")
@pytest.mark.each_commit(6)
def test_functions_of_an_example(group):
    cases = {name: (call, array, {}) for name, call, array in group}
    options = dict(derivatives=False, unrolled=False, jit=False)  # most are jitted already
    check_all(cases, tolerance=dict(rtol=2e-4, atol=2e-5), **options)
