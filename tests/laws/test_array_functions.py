"""The array functions people write programs with, each against the loop and `jax.vmap`.

Tables of calls: an entry is a name and, where one array does not say it all,
what is called. The lanes of every call are the rows of fixed example arrays.
"""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest

from support.oracle import check_all, example

LANES = 3
X = example((LANES, 4, 4), seed=1)
Y = example((LANES, 4, 4), seed=2)
V = example((LANES, 5), seed=3)
W = example((LANES, 5), seed=4)
POSITIVE = example((LANES, 5), seed=5, low=0.1, high=3.0)
UNIT = example((LANES, 5), seed=6, low=0.05, high=0.95)
COUNTS = example((LANES, 6), jnp.int32, seed=7, high=5)
BITS = example((LANES, 8), jnp.bool_, seed=8)
COMPLEX = example((LANES, 4), jnp.complex64, seed=9)

# Of one array of any shape.
ELEMENTWISE = """
    abs angle cbrt conj exp2 fix isfinite isposinf nan_to_num rint round sign signbit sinc i0 frexp
    modf spacing
""".split()
BINARY = """
    arctan2 copysign float_power floor_divide fmax fmod heaviside hypot logaddexp maximum mod
    nextafter power true_divide logical_xor isclose array_equal divmod
""".split()
REDUCTIONS = """
    all any argmax count_nonzero max mean median nanargmin nanmedian nanprod nanstd prod ptp std
""".split()
OF_A_MATRIX = {
    **{
        name: getattr(jnp, name)
        for name in """
            argsort cumprod nancumsum diag diagonal diff flip ravel rot90 sort trace transpose tril
            squeeze corrcoef gradient sort_complex ones_like copy
        """.split()
    },
    "concatenate": lambda x: jnp.concatenate([x, x * 2], axis=1),
    "block": lambda x: jnp.block([[x, x], [x, x]]),
    "insert": lambda x: jnp.insert(x, 1, 5.0, axis=1),
    "delete": lambda x: jnp.delete(x, 1, axis=0),
    "reshape in Fortran order": lambda x: jnp.reshape(x, (2, 8), order="F"),
    "repeat": lambda x: jnp.repeat(x, 2, axis=0),
    "repeat, each its own count": lambda x: jnp.repeat(
        x, jnp.array([1, 0, 2, 1]), axis=0, total_repeat_length=4
    ),
    "roll": lambda x: jnp.roll(x, (1, -2), axis=(0, 1)),
    "pad": lambda x: jnp.pad(x, ((1, 2), (0, 1)), mode="reflect"),
    "select": lambda x: jnp.select([x > 1, x > 0], [x, -x], 0.0),
    "piecewise": lambda x: jnp.piecewise(x, [x < 0, x >= 0], [lambda v: -v, lambda v: v * v]),
    "quantile": lambda x: jnp.quantile(x, 0.3, axis=1, method="nearest"),
    "partition": lambda x: jnp.sort(jnp.partition(x, 2)[..., :2]),
    "take_along_axis": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 0), 0),
    "put_along_axis": lambda x: jnp.put_along_axis(
        x, jnp.argmin(x, 0, keepdims=True), 9.0, 0, inplace=False
    ),
    "apply_along_axis": lambda x: jnp.apply_along_axis(jnp.cumsum, 0, x),
    "vectorize": lambda x: jnp.vectorize(jnp.dot, signature="(n),(n)->()")(x, x[0]),
    "at add": lambda x: x.at[jnp.array([0, 0, 2])].add(1.0),
    "at multiply with lookups of its own": lambda x: x.at[jnp.argmax(x, 0)].multiply(2.0),
    "at get out of range": lambda x: x.at[9].get(mode="fill", fill_value=-1.0),
    "index by a mask": lambda x: jnp.where(x.sum() > 0, x[np.array([True, False, True, True])], 0),
    "index by its own argmax": lambda x: x[jnp.argmax(x[:, 0])],
    "fill_diagonal": lambda x: jnp.fill_diagonal(x, 3.0, inplace=False),
    "linspace": lambda x: jnp.linspace(x[0], x[1], 5),
    "view": lambda x: x.view(jnp.int32),
    "unwrap": lambda x: jnp.unwrap(3 * x),
    "fft": lambda x: jnp.fft.fft2(x),
    "rfft and back": lambda x: jnp.fft.irfft(jnp.fft.rfft(x), n=4),
    "nonzero": lambda x: jnp.nonzero(x > 0, size=5, fill_value=-1),
    "histogram": lambda x: jnp.histogram(x, bins=4, range=(-2, 2)),
    "linalg.det": lambda x: jnp.linalg.det(x),
    "linalg.inv": lambda x: jnp.linalg.inv(x + 5 * jnp.eye(4)),
    "linalg.solve": lambda x: jnp.linalg.solve(x + 5 * jnp.eye(4), x[0]),
    "linalg.slogdet": lambda x: jnp.linalg.slogdet(x),
    "linalg.cholesky": lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(4)),
    "linalg.eigvalsh": lambda x: jnp.linalg.eigvalsh(x),
    "linalg.qr": lambda x: jnp.abs(jnp.linalg.qr(x)[1]),
    "linalg.pinv": lambda x: jnp.linalg.pinv(x + 5 * jnp.eye(4)),
    "linalg.lstsq": lambda x: jnp.linalg.lstsq(x + 5 * jnp.eye(4), x[0])[0],
}
OF_TWO_VECTORS = {
    **{
        name: getattr(jnp, name)
        for name in "convolve correlate dot inner kron outer polyadd polymul polysub vdot".split()
    },
    "interp": lambda v, w: jnp.interp(v, jnp.sort(w), w),
    "searchsorted": lambda v, w: jnp.searchsorted(jnp.sort(v), w),
    "polyval": lambda v, w: jnp.polyval(v, w),
    "polyfit": lambda v, w: jnp.polyfit(v, w, 2),
    "choose": lambda v, w: jnp.choose(jnp.argsort(v) % 2, [v, w], mode="clip"),
}
OF_INTEGERS = {
    "bincount": lambda n: jnp.bincount(n, length=6),
    "gcd": lambda n: jnp.gcd(n, 12),
    "lcm": lambda n: jnp.lcm(n, 4),
    "ldexp": lambda n: jnp.ldexp(1.5, n),
    "unique": lambda n: jnp.unique(n, size=6, fill_value=-1),
    "unravel_index": lambda n: jnp.unravel_index(n, (2, 3)),
    "intersect1d": lambda n: jnp.intersect1d(n, n + 1, size=6, fill_value=-1),
}
OF_BITS = {
    "packbits": jnp.packbits,
    "unpackbits": lambda b: jnp.unpackbits(jnp.packbits(b)),
    "logical_xor reduced": lambda b: jnp.logical_xor.reduce(b),
}
OF_COMPLEX = {
    "angle": jnp.angle,
    "ifft": jnp.fft.ifft,
    "sort": jnp.sort,
    "vdot": lambda z: jnp.vdot(z, z),
}

NN = {
    **{
        name: getattr(jax.nn, name)
        for name in """
            celu gelu glu hard_sigmoid log_sigmoid log_softmax relu relu6 silu softplus
            standardize logmeanexp logsumexp
        """.split()
        if hasattr(jax.nn, name)
    },
    "softmax where": lambda x: jax.nn.softmax(x, axis=0, where=x < 1),
    "attention": lambda x: jax.nn.dot_product_attention(
        *(jnp.stack([x, x * s])[:, :, None] for s in (1.0, 0.5, 2.0))
    ),
}

LINALG = {
    "expm": lambda x: jsp.linalg.expm(x),
    "lu_solve": lambda x: jsp.linalg.lu_solve(jsp.linalg.lu_factor(x + 5 * jnp.eye(4)), x[0]),
    "solve_triangular": lambda x: jsp.linalg.solve_triangular(x + 5 * jnp.eye(4), x[0]),
    "sqrtm": lambda x: jsp.linalg.sqrtm(x @ x.T + jnp.eye(4)).real,
    "eigh_tridiagonal": lambda x: jsp.linalg.eigh_tridiagonal(x[0], x[1, :3], eigvals_only=True),
}
SIGNAL = {
    "fftconvolve": lambda v: jsp.signal.fftconvolve(v, v),
    "stft": lambda v: jsp.signal.stft(jnp.tile(v, 4), nperseg=8)[2],
}
SPECIAL_UNARY = """
    digamma entr erf erfc erfcx exp1 gamma gammaln gammasgn i0 i0e i1 i1e log_ndtr
    ndtr spence sinc
""".split()
SPECIAL = {
    **{name: getattr(jsp.special, name) for name in SPECIAL_UNARY if hasattr(jsp.special, name)},
    "bessel_jn": lambda v: jsp.special.bessel_jn(v, v=2, n_iter=10),
    "betainc": lambda v: jsp.special.betainc(v, v + 1, 0.3),
    "gammainc": lambda v: jsp.special.gammainc(v, v + 1),
    "hyp1f1": lambda v: jsp.special.hyp1f1(v, v + 1, 0.5),
    "polygamma": lambda v: jsp.special.polygamma(1, v),
    "zeta": lambda v: jsp.special.zeta(v + 2, v),
}
SPECIAL_OF_UNIT = {name: getattr(jsp.special, name) for name in "erfinv logit ndtri expit".split()}
STATS = {
    "multivariate_normal": lambda v: jsp.stats.multivariate_normal.logpdf(
        v, jnp.zeros(5), jnp.eye(5) + jnp.outer(v, v)
    ),
    "vonmises": lambda v: jsp.stats.vonmises.logpdf(v, 2.0),
    "rankdata": jsp.stats.rankdata,
    "mode": jsp.stats.mode,
    "gaussian_kde": lambda v: jsp.stats.gaussian_kde(v).logpdf(v + 0.1),
}
IMAGE = {
    "resize, cubic": lambda x: jax.image.resize(x, (2, 6), "cubic"),
    "scale and translate": lambda x: jax.image.scale_and_translate(
        x, (5, 5), (0, 1), jnp.array([1.2, 0.8]), x[0, :2], "linear"
    ),
    "map_coordinates": lambda x: jsp.ndimage.map_coordinates(x, [x[0] + 1, x[1] + 1], order=1),
}
RANDOM = {
    name: lambda n, draw=draw: draw(jax.random.key(n[0]))
    for name, draw in {
        "uniform": lambda k: jax.random.uniform(k, (3,)),
        "normal": lambda k: jax.random.normal(k, (3,)),
        "bits": lambda k: jax.random.bits(k, (2,)),
        "randint": lambda k: jax.random.randint(k, (4,), 0, 10),
        "bernoulli": lambda k: jax.random.bernoulli(k, 0.3, (4,)),
        "categorical": lambda k: jax.random.categorical(k, jnp.arange(3.0)),
        "choice": lambda k: jax.random.choice(k, 6, (3,), replace=False),
        "permutation": lambda k: jax.random.permutation(k, 5),
        "gamma": lambda k: jax.random.gamma(k, 2.0, (2,)),
        "poisson": lambda k: jax.random.poisson(k, 3.0, (2,)),
        "truncated_normal": lambda k: jax.random.truncated_normal(k, -1.0, 1.0, (2,)),
        "split and fold_in": lambda k: jax.random.normal(
            jax.random.fold_in(jax.random.split(k, 3)[1], 7)
        ),
        "multivariate_normal": lambda k: jax.random.multivariate_normal(
            k, jnp.zeros(2), jnp.eye(2)
        ),
    }.items()
}


def named(names, module=jnp):
    return {name: getattr(module, name) for name in names if hasattr(module, name)}


CALLS = [
    (f"{family}: {name}", call, arrays)
    for family, table, arrays in (
        ("elementwise", named(ELEMENTWISE), (V,)),
        ("binary", named(BINARY), (V, POSITIVE)),
        ("reduction", named(REDUCTIONS), (X,)),
        ("matrix", OF_A_MATRIX, (X,)),
        ("matrices", {"matmul": jnp.matmul, "dot": jnp.dot, "inner": jnp.inner}, (X, Y)),
        ("vectors", OF_TWO_VECTORS, (V, W)),
        ("integers", OF_INTEGERS, (COUNTS,)),
        ("bits", OF_BITS, (BITS,)),
        ("complex", OF_COMPLEX, (COMPLEX,)),
        ("nn", NN, (X,)),
        ("linalg", LINALG, (X,)),
        ("signal", SIGNAL, (V,)),
        ("special", SPECIAL, (POSITIVE,)),
        ("special", SPECIAL_OF_UNIT, (UNIT,)),
        ("stats", STATS, (POSITIVE,)),
        ("image", IMAGE, (X,)),
        ("random", RANDOM, (COUNTS,)),
    )
    for name, call in table.items()
]


TOGETHER = 20  # are one program: most of the time goes to compiling
GROUPS = [CALLS[i : i + TOGETHER] for i in range(0, len(CALLS), TOGETHER)]


@pytest.mark.parametrize("calls", GROUPS, ids=lambda calls: f"{calls[0][0]} to {calls[-1][0]}")
@pytest.mark.each_commit(6)
def test_functions_of_an_example(calls):
    cases = {name: (call, *arrays, {}) for name, call, arrays in calls}
    options = dict(derivatives=False, unrolled=False, jit=False)  # most are jitted already
    check_all(cases, tolerance=dict(rtol=2e-4, atol=2e-5), **options)
