"""A call of each function of `jax.numpy` and its siblings on a row, and how rows run it.

A call is an expression of what a row is made into here: `x` and `y`, floats of shape ``(n,)``; `p`,
between 0 and 1; `i`, ints from 0 to 4; `b`, bools; `c`, complex numbers; `m`, of shape ``(n, 3)``,
and `t`, ``(3, n)``; `s`, of shape ``(n, n)``, symmetric with eigenvalues above 1; `n`, its length.
"""

import inspect
import textwrap

import jax
import jax.numpy as jnp
import jax.scipy.linalg
import jax.scipy.signal
import jax.scipy.special
import numpy as np

import batchax as bx

MODULES = {
    "jax.numpy": jnp,
    "jax.numpy.linalg": jnp.linalg,
    "jax.numpy.fft": jnp.fft,
    "jax.nn": jax.nn,
    "jax.scipy.special": jax.scipy.special,
    "jax.scipy.linalg": jax.scipy.linalg,
    "jax.scipy.signal": jax.scipy.signal,
}

# By module and call the functions that are called so, as `f`.
CALLS = {
    "jax.numpy": {
        "f(x)": """
            abs absolute all any amax amin angle arctan arcsinh asinh atan argmax argmin argsort
            around array asarray atleast_1d atleast_2d atleast_3d average cbrt ceil conj conjugate
            copy cos cosh count_nonzero cumprod cumsum cumulative_prod cumulative_sum deg2rad
            degrees diag diagflat diff ediff1d empty_like exp exp2 expm1 fabs flip flipud floor
            frexp gradient i0 imag iscomplex iscomplexobj isfinite isinf isnan isneginf isposinf
            isreal isrealobj max mean median min modf nan_to_num nanargmax nanargmin nancumprod
            nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar ndim negative
            ones_like positive prod ptp rad2deg radians ravel real reciprocal rint round sign
            signbit sin sinc sinh size shape sort sort_complex spacing square std sum tan tanh
            transpose trapezoid trunc unwrap var zeros_like poly polyder polyint vander iterable
            isscalar hstack vstack dstack block column_stack histogram_bin_edges
        """,
        "f(p)": "acos arccos arcsin asin arctanh atanh log log10 log1p log2 sqrt",
        "f(1 + p)": "acosh arccosh",
        "f(x, y)": """
            add allclose append arctan2 atan2 array_equal array_equiv convolve copysign corrcoef
            correlate cov divide divmod dot equal floor_divide fmax fmin fmod greater
            greater_equal heaviside hypot inner isclose isin less less_equal logaddexp logaddexp2
            logical_and logical_or logical_xor matmul maximum minimum mod multiply nextafter
            not_equal outer polyadd polymul polysub polyval remainder subtract true_divide vdot
            vecdot kron
        """,
        "f(p, y)": "float_power pow power",
        "f(i, i + 1)": """
            bitwise_and bitwise_or bitwise_xor gcd lcm bitwise_left_shift left_shift
            bitwise_right_shift right_shift ldexp
        """,
        "f(i)": "bitwise_count bitwise_invert bitwise_not invert",
        "f(b)": "logical_not packbits",
        "f(m)": """
            fliplr matrix_transpose diagonal trace tril triu rot90 tril_indices_from
            triu_indices_from
        """,
        "f((x, y))": "stack concat concatenate lexsort",
        "f(n)": "arange bartlett blackman eye hamming hanning identity ones zeros empty tri",
        "f(n, 5.0)": "kaiser full",
        "f(x, 0.3)": "quantile nanquantile",
        "f(x, 30)": "percentile nanpercentile",
        "f(x, y, size=2)": "intersect1d setxor1d union1d setdiff1d",
        "f(x, size=3)": "argwhere flatnonzero nonzero unique unique_all unique_counts "
        "unique_inverse unique_values",
    },
    "jax.numpy.linalg": {
        "f(x)": "norm vector_norm",
        "f(m)": "matrix_norm matrix_transpose diagonal trace pinv qr svd svdvals cond matrix_rank",
        "f(s)": "cholesky det eig eigh eigvals eigvalsh inv slogdet",
        "f(x, y)": "matmul outer vecdot",
        "f(s, x)": "lstsq solve",
    },
    "jax.numpy.fft": {
        "f(x)": "fft fftshift hfft ifft ifftshift ihfft irfft rfft",
        "f(m)": "fft2 fftn ifft2 ifftn irfft2 irfftn rfft2 rfftn",
        "f(n)": "fftfreq rfftfreq",
    },
    "jax.nn": {
        "f(x)": """
            celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu
            log_sigmoid log_softmax logmeanexp logsumexp mish relu relu6 selu sigmoid silu
            soft_sign softmax softplus sparse_plus sparse_sigmoid squareplus standardize swish
            tanh
        """,
        "f(1 + p)": "log1mexp",
    },
    "jax.scipy.special": {
        "f(x)": """
            dawsn erf erfc erfcx expi expit fresnel i0 i0e i1 i1e log_ndtr log_softmax logsumexp
            ndtr sici softmax wofz
        """,
        "f(p)": "digamma entr exp1 gamma gammaln gammasgn loggamma logit ndtri spence",
        "f(p - 0.5)": "erfinv",
        "f(p, 1 + p)": """
            beta betaln boxcox boxcox1p gammainc gammaincc kl_div poch rel_entr xlog1py xlogy
            owens_t
        """,
        "f(i + 4, i)": "comb",
        "f(i)": "factorial",
    },
    "jax.scipy.linalg": {
        "f(x)": "circulant convolution_matrix fiedler hankel toeplitz",
        "f(s)": """
            cho_factor cholesky det eigh expm hessenberg inv lu lu_factor polar qr schur sqrtm svd
        """,
        "f(n)": "dft helmert hilbert invhilbert invpascal pascal",
        "f(s, x)": "solve solve_triangular",
    },
    "jax.scipy.signal": {
        "f(x, y)": "convolve correlate fftconvolve",
        "f(m, m)": "convolve2d correlate2d",
        "f(x)": "detrend",
    },
}

# Functions that are called in a way of their own.
OWN = {
    "jax.numpy": {
        "apply_along_axis": "f(jnp.sum, 0, m)",
        "apply_over_axes": "f(jnp.sum, m, [0])",
        "argpartition": "f(x, 1)",
        "array_split": "f(m, 3, axis=1)",
        "astype": "f(x, int)",
        "bincount": "f(i, length=5)",
        "broadcast_arrays": "f(x, y)",
        "broadcast_to": "f(x, (3, n))",
        "choose": "f(i % 2, (x, y), mode='clip')",
        "clip": "f(x, 0, 1)",
        "compress": "f(x[:3] > 0, t, axis=0, size=2)",
        "cross": "f(m, m + 1)",
        "delete": "f(x, 0)",
        "diag_indices": "f(n)",
        "diag_indices_from": "f(s)",
        "digitize": "f(x, jnp.array([0.0, 1.0]))",
        "dsplit": "f(m[None], 3)",
        "einsum": "f('i,ij->j', x, m)",
        "expand_dims": "f(x, 0)",
        "extract": "f(b, x, size=2, fill_value=0)",
        "fill_diagonal": "f(s, 0, inplace=False)",
        "frompyfunc": "f(jnp.add, 2, 1, identity=0)(x, y)",
        "fromfunction": "f(lambda k: k * 2.0, (n,))",
        "full_like": "f(x, 2)",
        "geomspace": "f(1, 2, n)",
        "histogram": "f(x, 3)",
        "histogram2d": "f(x, y, 3)",
        "histogramdd": "f(m, 2)",
        "hsplit": "f(m, 3)",
        "indices": "f((n,))",
        "insert": "f(x, 0, 5.0)",
        "interp": "f(x, jnp.sort(y), p)",
        "ix_": "f(i, jnp.arange(2))",
        "linspace": "f(0, 1, n)",
        "logspace": "f(0, 1, n)",
        "mask_indices": "f(n, jnp.triu, size=1)",
        "matvec": "f(s, x)",
        "meshgrid": "f(x, y)",
        "moveaxis": "f(m, 0, 1)",
        "pad": "f(x, 2)",
        "partition": "f(x, 1)",
        "permute_dims": "f(m, (1, 0))",
        "piecewise": "f(x, [b], [1.0, 2.0])",
        "place": "f(x, b, jnp.array([1.0]), inplace=False)",
        "polydiv": "f(x, jnp.array([1.0, 2.0]))",
        "polyfit": "f(jnp.arange(n) + 0.0, x, 1)",
        "put": "f(x, jnp.array([0]), jnp.array([5.0]), inplace=False)",
        "put_along_axis": "f(x, i % 1, 5.0, 0, inplace=False)",
        "ravel_multi_index": "f((i, i), (5, 5), mode='clip')",
        "repeat": "f(x, 2)",
        "reshape": "f(m, (-1,))",
        "resize": "f(x, (2 * n,))",
        "roll": "f(x, 2)",
        "roots": "f(x, strip_zeros=False)",
        "rollaxis": "f(m, 1)",
        "searchsorted": "f(jnp.sort(x), y)",
        "select": "f([b], [x], 2.0)",
        "split": "f(m, 3, axis=1)",
        "squeeze": "f(x[None], 0)",
        "swapaxes": "f(m, 0, 1)",
        "take": "f(x, jnp.array([0, -1]))",
        "take_along_axis": "f(x, jnp.argsort(y), 0)",
        "minmax": "f(x)",
        "tensordot": "f(m, x, axes=(0, 0))",
        "tile": "f(x, 2)",
        "top_k": "f(x, 2)",
        "tril_indices": "f(3, m=n)",
        "triu_indices": "f(3, m=n)",
        "unpackbits": "f(i.astype('uint8'))",
        "unstack": "f(m, axis=1)",
        "unravel_index": "f(i, (2, 3))",
        "vecmat": "f(x, m)",
        "vectorize": "f(lambda a, b: a + b)(x, y)",
        "vsplit": "f(t, 3)",
        "where": "f(b, x, y)",
    },
    "jax.numpy.linalg": {
        "cross": "f(m, m + 1)",
        "matrix_power": "f(s, 3)",
        "multi_dot": "f([t, m, t])",
        "tensordot": "f(m, x, axes=(0, 0))",
        "tensorinv": "f(s, ind=1)",
        "tensorsolve": "f(s, x)",
    },
    "jax.nn": {
        "dot_product_attention": "f(m[:, None], m[:, None], m[:, None])",
        "glu": "f(jnp.stack([x, y], 1))",
        "one_hot": "f(i, 5)",
    },
    "jax.scipy.special": {
        "betainc": "f(1.5, 0.5, p)",
        "erfcinv": "f(p)",
        "expn": "f(2, p)",
        "hyp1f1": "f(1.5, 2.5, x)",
        "hyp2f1": "f(0.5, 1.5, 2.5, 0.5 * p)",
        "multigammaln": "f(3 + p, 2)",
        "polygamma": "f(2, 1 + p)",
        "sph_harm_y": "f(i[:1] * 0 + 2, i[:1] * 0 + 1, p, p, n_max=2)",
        "zeta": "f(1.5 + p, 1.0)",
    },
    "jax.scipy.linalg": {
        "block_diag": "f(s, x)",
        "cho_solve": "f((jnp.linalg.cholesky(s), True), x)",
        "companion": "f(2 + p)",
        "convolution_matrix": "f(x, 3)",
        "eigh_tridiagonal": "f(x, y[:-1], eigvals_only=True)",
        "expm_frechet": "f(s, s)",
        "fiedler_companion": "f(2 + p)",
        "funm": "f(s, jnp.exp)",
        "hessenberg": "f(s)",
        "leslie": "f(x, p[:-1])",
        "lu_solve": "f(jax.scipy.linalg.lu_factor(s), x)",
        "qr_multiply": "f(s, x)",
        "rsf2csf": "f(s, s)",
        "solve_sylvester": "f(s, s, s)",
    },
    "jax.scipy.signal": {
        "csd": "f(x, y, nperseg=n)",
        "istft": "f(c[:, None], nperseg=2 * n - 2)",
        "stft": "f(x, nperseg=n)[2]",
        "welch": "f(x, nperseg=n)[1]",
    },
}

SHAPES = "of types and shapes, not of elements"
HOST = "reads or writes files, memory of the host, or printing"
NO_ROWS = {
    **dict.fromkeys(
        """broadcast_shapes can_cast isdtype issubdtype promote_types result_type get_printoptions
        printoptions set_printoptions einsum_path get_scaled_dot_general_config""".split(),
        SHAPES,
    ),
    **dict.fromkeys(
        "from_dlpack frombuffer fromfile fromiter fromstring load save savez".split(), HOST
    ),
    "scaled_dot_general": "a product of narrow floats, for accelerators",
    "scaled_matmul": "a product of narrow floats, for accelerators",
    "hadamard": "its size is a power of two",
    "bernoulli": "numbers, as many as an int says",
    "bessel_jn": "its orders are an int",
    "trim_zeros": "its size depends on values: see batchax.compress",
    "array_repr": "text",
    "array_str": "text",
}
"""What takes no row, and why."""


def functions(module):
    """The names of the functions of a module."""
    return [
        name
        for name in dir(module)
        if not name.startswith("_")
        and callable(getattr(module, name))
        and not isinstance(getattr(module, name), type)
        and not inspect.isclass(getattr(module, name))
        and "ScalarMeta" not in str(type(getattr(module, name)))
    ]


def calls():
    """The call of each function that takes a row, by its name."""
    by_name = {}
    for title, module in MODULES.items():
        called = {name: call for call, names in CALLS[title].items() for name in names.split()}
        called.update(OWN.get(title, {}))
        there = functions(module)
        for name in there:
            if name not in NO_ROWS and name in called:
                by_name[f"{title}.{name}"] = called[name]
    return by_name


def left_out():
    """Functions of which nothing is said."""
    known = calls()
    return [
        f"{title}.{name}"
        for title, module in MODULES.items()
        for name in functions(module)
        if name not in NO_ROWS and f"{title}.{name}" not in known
    ]


def function_of(name, call):
    """The call as a function of a row."""
    title, _, own = name.rpartition(".")
    code = compile(call, name, "eval")

    def of_row(x):
        n = x.shape[0]
        at = jnp.arange(n)
        y, p = jnp.cos(3 * x) + 0.1 * x, jax.nn.sigmoid(x)
        made = {
            "f": getattr(MODULES[title], own),  # where another may stand in
            "np": np, "jnp": jnp, "jax": jax, "x": x, "y": y, "p": p, "n": n,
            "i": (at * 7) % 5, "b": x > 0, "c": x + 1j * y,
            "m": jnp.stack([x, y, p], 1), "t": jnp.stack([x, y, p]),
            "s": x[:, None] * x + jnp.where(at[:, None] == at, 2.0 + at, 0.0),
        }  # fmt: skip
        return jax.tree.map(_with_one_size, eval(code, made))

    return of_row


def _with_one_size(y):
    """Results of several axes by their sums along one: a Ragged has one ragged axis."""
    if isinstance(y, (str, bool, int, float)) or jnp.ndim(y) < 2:
        return y
    return [jnp.sum(y, axis) for axis in (0, -1)]


LENGTHS = np.array([3, 5, 2, 4])
FEW, MANY = 6, 40
"""Bounds of lengths, for which a program for each may be compiled, and for which it may not."""


def rows(bound):
    """Rows, of lengths that are traced where they are given to a function under `jit`."""
    data = np.random.default_rng(0).normal(size=20).astype(jax.dtypes.canonicalize_dtype(float))
    return bx.Ragged(jnp.asarray(data), jnp.asarray(LENGTHS), bound)


def why_not(fun, bound, **options):
    """How it fails to be staged for traced lengths of up to `bound`; None if it does not."""
    try:
        jax.make_jaxpr(bx.vmap(fun, **options))(rows(bound))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def ran():
    """How each call runs."""
    return {name: kind_of(function_of(name, call)) for name, call in calls().items()}


def kind_of(fun):
    """How it runs for traced lengths: "any", "parted", "each" or "refused"."""
    for kind, bound, options in (
        ("any", MANY, {"layout": "padded"}),
        ("parted", MANY, {}),
        ("each", FEW, {}),
    ):
        if why_not(fun, bound, **options) is None:
            return kind
    return "refused"


PAGE = """# Supported operations on variable-length rows

*Which functions of `jax.numpy` work on a row of a [`Ragged`](../guides/ragged.md)?*
With known lengths, all below do: rows of one length run together where needed.
With traced lengths, under `jit`, JAX {version} compiles one of these:

- **any length**: one program for rows of any length, packed or padded;
- **all but few**: one program, and others for a few lengths that the function distinguishes;
- **each length**: one program for each length, if `max_length` is at most 32.

{counts}

`make docs` writes this page. Tests compare each function with the row alone.
"""


def page():
    """The page of all of them."""
    results = ran()
    kinds = ("any", "parted", "each", "refused")
    lines = ["| module | functions | any length | all but few | each length | not supported |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    total = dict.fromkeys(kinds, 0)
    for title in MODULES:
        own = [kind for name, kind in results.items() if name.rpartition(".")[0] == title]
        counts = {kind: own.count(kind) for kind in kinds}
        total = {kind: total[kind] + counts[kind] for kind in kinds}
        lines.append(f"| `{title}` | {len(own)} | " + " | ".join(map(str, counts.values())) + " |")
    number = sum(total.values())
    lines.append(
        f"| all | {number} | "
        + " | ".join(f"{count} ({100 * count / number:.1f}%)" for count in total.values())
        + " |"
    )
    text = PAGE.format(version=jax.__version__, counts="\n".join(lines))
    for kind, title in (
        ("refused", "Not supported"),
        ("each", "A program for each length"),
        ("parted", "One program for all but few lengths"),
        ("any", "One program for any length"),
    ):
        if kind in results.values():
            text += f"\n## {title}\n" + "".join(_of_module(m, kind, results) for m in MODULES)
    text += "\n## Functions that do not take a row\n\n| functions | why |\n| --- | --- |\n"
    reasons = {why: [] for why in NO_ROWS.values()}
    for name, why in NO_ROWS.items():
        reasons[why].append(f"`{name}`")
    return text + "".join(f"| {', '.join(names)} | {why} |\n" for why, names in reasons.items())


def _of_module(module, kind, results):
    """The names of its functions that run so, folded up if they are many."""
    names = [
        f"`{name.rpartition('.')[2]}`"
        for name, own in results.items()
        if own == kind and name.rpartition(".")[0] == module
    ]
    if not names:
        return ""
    if len(names) < 30:
        return "\n" + _wrapped(f"{module}: {', '.join(names)}")
    head = f"\n<details><summary>{module}: {len(names)}</summary>\n\n"
    return f"{head}{_wrapped(', '.join(names))}\n</details>\n"


def _wrapped(text):
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"
