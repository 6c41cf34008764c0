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
    abs absolute angle arctan arcsinh cbrt ceil conj cos cosh deg2rad degrees exp exp2 expm1 fabs
    fix floor imag isfinite isinf isnan isneginf isposinf isreal iscomplex logical_not negative
    positive rad2deg radians real real_if_close reciprocal rint round sign signbit sin sinc sinh
    square tan tanh trunc nan_to_num i0 frexp modf spacing
""".split()
ON_POSITIVE = "log log10 log1p log2 sqrt".split()
ON_UNIT = "arccos arcsin arctanh".split()
BINARY = """
    add arctan2 copysign divide equal float_power floor_divide fmax fmin fmod greater
    greater_equal heaviside hypot less less_equal logaddexp logaddexp2 maximum minimum mod
    multiply nextafter not_equal power remainder subtract true_divide logical_and logical_or
    logical_xor isclose allclose array_equal array_equiv divmod
""".split()
REDUCTIONS = """
    all any amax amin argmax argmin average count_nonzero max mean median min nanargmax nanargmin
    nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar prod ptp std sum var
""".split()
OF_A_MATRIX = {
    **{
        name: getattr(jnp, name)
        for name in """
            argsort cumprod cumsum nancumprod nancumsum diag diagonal diff ediff1d fliplr flipud
            flip ravel rot90 sort trace transpose tril triu atleast_3d squeeze corrcoef cov
            gradient sort_complex matrix_transpose zeros_like ones_like empty_like array copy
        """.split()
    },
    "concatenate": lambda x: jnp.concatenate([x, x * 2], axis=1),
    "stack": lambda x: jnp.stack([x, x + 1], axis=-1),
    "hstack": lambda x: jnp.hstack([x, x]),
    "vstack": lambda x: jnp.vstack([x, x[0]]),
    "dstack": lambda x: jnp.dstack([x, x]),
    "column_stack": lambda x: jnp.column_stack([x, x[0]]),
    "block": lambda x: jnp.block([[x, x], [x, x]]),
    "append": lambda x: jnp.append(x, x[0]),
    "insert": lambda x: jnp.insert(x, 1, 5.0, axis=1),
    "delete": lambda x: jnp.delete(x, 1, axis=0),
    "broadcast_to": lambda x: jnp.broadcast_to(x, (2, 4, 4)),
    "expand_dims": lambda x: jnp.expand_dims(x, (0, 2)),
    "moveaxis": lambda x: jnp.moveaxis(x, 0, 1),
    "swapaxes": lambda x: jnp.swapaxes(x, 0, -1),
    "reshape": lambda x: jnp.reshape(x, (2, -1)),
    "reshape in Fortran order": lambda x: jnp.reshape(x, (2, 8), order="F"),
    "repeat": lambda x: jnp.repeat(x, 2, axis=0),
    "repeat, each its own count": lambda x: jnp.repeat(
        x, jnp.array([1, 0, 2, 1]), axis=0, total_repeat_length=4
    ),
    "resize": lambda x: jnp.resize(x, (5, 5)),
    "roll": lambda x: jnp.roll(x, (1, -2), axis=(0, 1)),
    "rollaxis": lambda x: jnp.rollaxis(x, 1),
    "tile": lambda x: jnp.tile(x, (2, 3)),
    "pad": lambda x: jnp.pad(x, ((1, 2), (0, 1)), mode="reflect"),
    "pad with edge": lambda x: jnp.pad(x, 2, mode="edge"),
    "pad with mean": lambda x: jnp.pad(x, 1, mode="mean"),
    "split": lambda x: jnp.split(x, 2, axis=1),
    "array_split": lambda x: jnp.array_split(x, 3, axis=0),
    "unstack": lambda x: jnp.unstack(x, axis=1),
    "clip": lambda x: jnp.clip(x, -0.5, x[0, 0] + 0.5),
    "where": lambda x: jnp.where(x > 0, x, 7),
    "select": lambda x: jnp.select([x > 1, x > 0], [x, -x], 0.0),
    "piecewise": lambda x: jnp.piecewise(x, [x < 0, x >= 0], [lambda v: -v, lambda v: v * v]),
    "percentile": lambda x: jnp.percentile(x, jnp.array([10.0, 60.0]), axis=0),
    "quantile": lambda x: jnp.quantile(x, 0.3, axis=1, method="nearest"),
    "nanquantile": lambda x: jnp.nanquantile(jnp.where(x > 1, jnp.nan, x), 0.5),
    "average with weights": lambda x: jnp.average(x, axis=0, weights=x[:, 0] ** 2),
    "partition": lambda x: jnp.sort(jnp.partition(x, 2)[..., :2]),
    "argpartition": lambda x: jnp.argpartition(x, 1)[..., 1],
    "lexsort": lambda x: jnp.lexsort((x[0] > 0, x[1])),
    "take": lambda x: jnp.take(x, jnp.array([3, 0, 9]), axis=1, mode="clip"),
    "take_along_axis": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 0), 0),
    "put_along_axis": lambda x: jnp.put_along_axis(
        x, jnp.argmin(x, 0, keepdims=True), 9.0, 0, inplace=False
    ),
    "apply_along_axis": lambda x: jnp.apply_along_axis(jnp.cumsum, 0, x),
    "apply_over_axes": lambda x: jnp.apply_over_axes(jnp.sum, x, [0]),
    "vectorize": lambda x: jnp.vectorize(jnp.dot, signature="(n),(n)->()")(x, x[0]),
    "at set": lambda x: x.at[1, 2].set(x[0, 0]),
    "at add": lambda x: x.at[jnp.array([0, 0, 2])].add(1.0),
    "at multiply with lookups of its own": lambda x: x.at[jnp.argmax(x, 0)].multiply(2.0),
    "at min": lambda x: x.at[:, ::2].min(0.0),
    "at get out of range": lambda x: x.at[9].get(mode="fill", fill_value=-1.0),
    "index by a slice backwards": lambda x: x[::-2, 1:3],
    "index by a mask": lambda x: jnp.where(x.sum() > 0, x[np.array([True, False, True, True])], 0),
    "index by its own argmax": lambda x: x[jnp.argmax(x[:, 0])],
    "ix_": lambda x: x[jnp.ix_(jnp.array([0, 2]), jnp.array([1, 3]))],
    "diag_indices": lambda x: x.at[jnp.diag_indices(4)].set(0.0),
    "fill_diagonal": lambda x: jnp.fill_diagonal(x, 3.0, inplace=False),
    "tri and iota": lambda x: x * jnp.tri(4) + jnp.arange(4),
    "linspace": lambda x: jnp.linspace(x[0], x[1], 5),
    "logspace": lambda x: jnp.logspace(x[0, 0], x[0, 1], 4),
    "geomspace": lambda x: jnp.geomspace(x[0, 0] ** 2 + 1, x[0, 1] ** 2 + 2, 4),
    "meshgrid": lambda x: jnp.meshgrid(x[0], x[1]),
    "vander": lambda x: jnp.vander(x[0], 3),
    "astype": lambda x: x.astype(jnp.int8),
    "view": lambda x: x.view(jnp.int32),
    "trapezoid": lambda x: jnp.trapezoid(x, dx=0.5),
    "unwrap": lambda x: jnp.unwrap(3 * x),
    "fft": lambda x: jnp.fft.fft2(x),
    "rfft and back": lambda x: jnp.fft.irfft(jnp.fft.rfft(x), n=4),
    "fftshift": lambda x: jnp.fft.fftshift(x),
    "einsum": lambda x: jnp.einsum("ij,kj->ik", x, x),
    "nonzero": lambda x: jnp.nonzero(x > 0, size=5, fill_value=-1),
    "argwhere": lambda x: jnp.argwhere(x > 0, size=4),
    "flatnonzero": lambda x: jnp.flatnonzero(x > 0, size=4, fill_value=0),
    "extract": lambda x: jnp.extract(x > 0, x, size=6, fill_value=0.0),
    "compress": lambda x: jnp.compress(x[0] > 0, x, axis=0, size=3),
    "histogram": lambda x: jnp.histogram(x, bins=4, range=(-2, 2)),
    "linalg.det": lambda x: jnp.linalg.det(x),
    "linalg.inv": lambda x: jnp.linalg.inv(x + 5 * jnp.eye(4)),
    "linalg.solve": lambda x: jnp.linalg.solve(x + 5 * jnp.eye(4), x[0]),
    "linalg.norm": lambda x: (jnp.linalg.norm(x), jnp.linalg.norm(x, axis=0, ord=1)),
    "linalg.slogdet": lambda x: jnp.linalg.slogdet(x),
    "linalg.cholesky": lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(4)),
    "linalg.eigvalsh": lambda x: jnp.linalg.eigvalsh(x),
    "linalg.qr": lambda x: jnp.abs(jnp.linalg.qr(x)[1]),
    "linalg.svdvals": lambda x: jnp.linalg.svdvals(x),
    "linalg.pinv": lambda x: jnp.linalg.pinv(x + 5 * jnp.eye(4)),
    "linalg.lstsq": lambda x: jnp.linalg.lstsq(x + 5 * jnp.eye(4), x[0])[0],
    "linalg.matrix_power": lambda x: jnp.linalg.matrix_power(x, 3),
    "linalg.matrix_rank": lambda x: jnp.linalg.matrix_rank(x),
    "linalg.multi_dot": lambda x: jnp.linalg.multi_dot([x, x.T, x]),
    "linalg.cond": lambda x: jnp.linalg.cond(x + 5 * jnp.eye(4)),
}
OF_TWO_VECTORS = {
    **{
        name: getattr(jnp, name)
        for name in "convolve correlate dot inner kron outer polyadd polymul polysub vdot".split()
    },
    "interp": lambda v, w: jnp.interp(v, jnp.sort(w), w),
    "searchsorted": lambda v, w: jnp.searchsorted(jnp.sort(v), w),
    "searchsorted by sort": lambda v, w: jnp.searchsorted(jnp.sort(v), w, method="sort"),
    "digitize": lambda v, w: jnp.digitize(v, jnp.sort(w)),
    "cross": lambda v, w: jnp.cross(v[:3], w[:3]),
    "tensordot": lambda v, w: jnp.tensordot(v, w, axes=0),
    "polyval": lambda v, w: jnp.polyval(v, w),
    "polyder": lambda v, w: jnp.polyder(v) * w[0],
    "polyint": lambda v, w: jnp.polyint(v) * w[0],
    "polyfit": lambda v, w: jnp.polyfit(v, w, 2),
    "histogram2d": lambda v, w: jnp.histogram2d(v, w, bins=3, range=((-2, 2), (-2, 2)))[0],
    "isin": lambda v, w: jnp.isin(v, jnp.append(w, v[0])),
    "choose": lambda v, w: jnp.choose(jnp.argsort(v) % 2, [v, w], mode="clip"),
    "fmod with itself": lambda v, w: jnp.fmod(v, jnp.abs(w) + 1),
    "where of three": lambda v, w: jnp.where(v > w, v, w),
    "matvec": lambda v, w: jnp.matvec(jnp.outer(v, w), v),
}
OF_INTEGERS = {
    "bincount": lambda n: jnp.bincount(n, length=6),
    "bitwise_and": lambda n: n & (n + 1),
    "bitwise_or": lambda n: n | 6,
    "bitwise_xor": lambda n: n ^ jnp.int32(3),
    "invert": lambda n: ~n,
    "left_shift": lambda n: n << 2,
    "right_shift": lambda n: n >> 1,
    "bitwise_count": jnp.bitwise_count,
    "gcd": lambda n: jnp.gcd(n, 12),
    "lcm": lambda n: jnp.lcm(n, 4),
    "ldexp": lambda n: jnp.ldexp(1.5, n),
    "mean of integers": jnp.mean,
    "integer power": lambda n: n**3,
    "integer division": lambda n: (n // 3, n % 3, n / 3),
    "unique": lambda n: jnp.unique(n, size=6, fill_value=-1),
    "unique with counts": lambda n: jnp.unique(n, size=6, return_counts=True),
    "unravel_index": lambda n: jnp.unravel_index(n, (2, 3)),
    "ravel_multi_index": lambda n: jnp.ravel_multi_index((n % 2, n % 3), (2, 3), mode="clip"),
    "union1d": lambda n: jnp.union1d(n, n + 1, size=8),
    "intersect1d": lambda n: jnp.intersect1d(n, n + 1, size=6, fill_value=-1),
    "setdiff1d": lambda n: jnp.setdiff1d(n, jnp.array([1, 2]), size=6, fill_value=-1),
    "trim to a mask": lambda n: jnp.where(n > 2, n, 0).sum(),
}
OF_BITS = {
    "packbits": jnp.packbits,
    "unpackbits": lambda b: jnp.unpackbits(jnp.packbits(b)),
    "sum of booleans": jnp.sum,
    "all": jnp.all,
    "argmax of booleans": jnp.argmax,
    "logical_xor reduced": lambda b: jnp.logical_xor.reduce(b),
}
OF_COMPLEX = {
    "abs": jnp.abs,
    "angle": jnp.angle,
    "exp": jnp.exp,
    "ifft": jnp.fft.ifft,
    "sort": jnp.sort,
    "vdot": lambda z: jnp.vdot(z, z),
    "sqrt": jnp.sqrt,
    "real and imaginary": lambda z: (z.real, z.imag),
}

NN = {
    **{
        name: getattr(jax.nn, name)
        for name in """
            celu elu gelu glu hard_sigmoid hard_silu hard_tanh leaky_relu log_sigmoid log_softmax
            mish relu relu6 selu sigmoid silu soft_sign softmax softplus sparse_plus
            sparse_sigmoid squareplus standardize swish hard_swish logmeanexp logsumexp identity
        """.split()
        if hasattr(jax.nn, name)
    },
    "gelu, exact": lambda x: jax.nn.gelu(x, approximate=False),
    "softmax where": lambda x: jax.nn.softmax(x, axis=0, where=x < 1),
    "one_hot": lambda x: jax.nn.one_hot(jnp.argmax(x, 0), 4),
    "attention": lambda x: jax.nn.dot_product_attention(
        *(jnp.stack([x, x * s])[:, :, None] for s in (1.0, 0.5, 2.0))
    ),
}

LINALG = {
    "cho_solve": lambda x: jsp.linalg.cho_solve(jsp.linalg.cho_factor(x @ x.T + jnp.eye(4)), x[0]),
    "expm": lambda x: jsp.linalg.expm(x),
    "lu_solve": lambda x: jsp.linalg.lu_solve(jsp.linalg.lu_factor(x + 5 * jnp.eye(4)), x[0]),
    "lu": lambda x: jsp.linalg.lu(x + 5 * jnp.eye(4)),
    "polar": lambda x: jsp.linalg.polar(x + 5 * jnp.eye(4))[0],
    "solve_triangular": lambda x: jsp.linalg.solve_triangular(x + 5 * jnp.eye(4), x[0]),
    "sqrtm": lambda x: jsp.linalg.sqrtm(x @ x.T + jnp.eye(4)).real,
    "block_diag": lambda x: jsp.linalg.block_diag(x, x[:2]),
    "toeplitz": lambda x: jsp.linalg.toeplitz(x[0]),
    "eigh_tridiagonal": lambda x: jsp.linalg.eigh_tridiagonal(x[0], x[1, :3], eigvals_only=True),
}
SIGNAL = {
    "convolve": lambda v: jsp.signal.convolve(v, v[:3], mode="same"),
    "correlate": lambda v: jsp.signal.correlate(v, v[::-1]),
    "fftconvolve": lambda v: jsp.signal.fftconvolve(v, v),
    "detrend": lambda v: jsp.signal.detrend(v),
    "stft": lambda v: jsp.signal.stft(jnp.tile(v, 4), nperseg=8)[2],
    "welch": lambda v: jsp.signal.welch(jnp.tile(v, 4), nperseg=8)[1],
}
SPECIAL_UNARY = """
    digamma entr erf erfc erfcx exp1 gamma gammaln gammasgn i0 i0e i1 i1e log_ndtr
    ndtr spence sinc
""".split()
SPECIAL = {
    **{name: getattr(jsp.special, name) for name in SPECIAL_UNARY if hasattr(jsp.special, name)},
    "bessel_jn": lambda v: jsp.special.bessel_jn(v, v=2, n_iter=10),
    "beta": lambda v: jsp.special.beta(v, v + 1),
    "betainc": lambda v: jsp.special.betainc(v, v + 1, 0.3),
    "betaln": lambda v: jsp.special.betaln(v, v + 1),
    "gammainc": lambda v: jsp.special.gammainc(v, v + 1),
    "gammaincc": lambda v: jsp.special.gammaincc(v, v + 1),
    "hyp1f1": lambda v: jsp.special.hyp1f1(v, v + 1, 0.5),
    "kl_div": lambda v: jsp.special.kl_div(v, v + 1),
    "rel_entr": lambda v: jsp.special.rel_entr(v, v + 1),
    "logsumexp": lambda v: jsp.special.logsumexp(v, b=v),
    "multigammaln": lambda v: jsp.special.multigammaln(v + 3, 2),
    "polygamma": lambda v: jsp.special.polygamma(1, v),
    "poch": lambda v: jsp.special.poch(v, 2.0),
    "xlogy": lambda v: jsp.special.xlogy(v, v + 1),
    "xlog1py": lambda v: jsp.special.xlog1py(v, v),
    "zeta": lambda v: jsp.special.zeta(v + 2, v),
    "factorial": lambda v: jsp.special.factorial(v),
}
SPECIAL_OF_UNIT = {name: getattr(jsp.special, name) for name in "erfinv logit ndtri expit".split()}
STATS = {
    "norm": lambda v: jsp.stats.norm.logpdf(v, v[0], 2.0),
    "norm.cdf": jsp.stats.norm.logcdf,
    "norm.ppf": lambda v: jsp.stats.norm.ppf(v / 10),
    "beta": lambda v: jsp.stats.beta.logpdf(v / 10, v, 2.0),
    "cauchy": jsp.stats.cauchy.logpdf,
    "chi2": lambda v: jsp.stats.chi2.logpdf(v, 3.0),
    "dirichlet": lambda v: jsp.stats.dirichlet.logpdf(v / v.sum(), v),
    "expon": jsp.stats.expon.logpdf,
    "gamma": lambda v: jsp.stats.gamma.logpdf(v, 2.0),
    "laplace": jsp.stats.laplace.logpdf,
    "logistic": jsp.stats.logistic.logpdf,
    "multivariate_normal": lambda v: jsp.stats.multivariate_normal.logpdf(
        v, jnp.zeros(5), jnp.eye(5) + jnp.outer(v, v)
    ),
    "pareto": lambda v: jsp.stats.pareto.logpdf(v + 1, 2.0),
    "poisson": lambda v: jsp.stats.poisson.logpmf(jnp.floor(v), v),
    "binom": lambda v: jsp.stats.binom.logpmf(jnp.floor(v), 7, 0.3),
    "nbinom": lambda v: jsp.stats.nbinom.logpmf(jnp.floor(v), 7, 0.3),
    "t": lambda v: jsp.stats.t.logpdf(v, 4.0),
    "truncnorm": lambda v: jsp.stats.truncnorm.logpdf(v, 0.0, v + 1),
    "uniform": lambda v: jsp.stats.uniform.logpdf(v, 0.0, 2.0),
    "vonmises": lambda v: jsp.stats.vonmises.logpdf(v, 2.0),
    "rankdata": jsp.stats.rankdata,
    "mode": jsp.stats.mode,
    "sem": jsp.stats.sem,
    "gaussian_kde": lambda v: jsp.stats.gaussian_kde(v).logpdf(v + 0.1),
}
IMAGE = {
    "resize, linear": lambda x: jax.image.resize(x, (7, 3), "linear"),
    "resize, cubic": lambda x: jax.image.resize(x, (2, 6), "cubic"),
    "resize, nearest": lambda x: jax.image.resize(x, (8, 8), "nearest"),
    "resize, lanczos": lambda x: jax.image.resize(x, (6, 6), "lanczos3", antialias=False),
    "scale and translate": lambda x: jax.image.scale_and_translate(
        x, (5, 5), (0, 1), jnp.array([1.2, 0.8]), x[0, :2], "linear"
    ),
    "map_coordinates": lambda x: jsp.ndimage.map_coordinates(x, [x[0] + 1, x[1] + 1], order=1),
    "label by convolution": lambda x: jsp.signal.convolve2d(x, x[:2, :2], mode="valid"),
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
        ("elementwise", named(ON_POSITIVE), (POSITIVE,)),
        ("elementwise", named(ON_UNIT), (UNIT,)),
        ("elementwise", {"arccosh": lambda v: jnp.arccosh(v + 1)}, (POSITIVE,)),
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
