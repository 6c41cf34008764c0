"""Operations of JAX on NumPy arrays: nothing to compile, whatever the shapes are.

Only those whose meaning in NumPy leaves no doubt. The rest is run by JAX.
"""

import ml_dtypes
import numpy as np
from jax.lax import RoundingMethod
from scipy import special

from fuzz import numpy_gathers

SMALL_FLOATS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


def _divide(x, y):
    if x.dtype.kind in "fc":
        return x / y
    return np.where(y == 0, -1, np.trunc(x / np.where(y == 0, 1, y))).astype(x.dtype)


def _select(which, *cases):
    return np.where(which, cases[1], cases[0]) if which.dtype == bool else np.choose(which, cases)


def _broadcast(x, *, shape, broadcast_dimensions, **_):
    ones = [1] * len(shape)
    for size, d in zip(x.shape, broadcast_dimensions, strict=True):
        ones[d] = size
    x = x.transpose(np.argsort(broadcast_dimensions))
    return np.broadcast_to(x.reshape(ones), shape)


def _reshape(x, *, new_sizes, dimensions, **_):
    return (x if dimensions is None else x.transpose(dimensions)).reshape(new_sizes)


def _slice(x, *, start_indices, limit_indices, strides, **_):
    strides = strides or (1,) * x.ndim
    return x[tuple(map(slice, start_indices, limit_indices, strides))]


def _pad(x, value, *, padding_config):
    for d, (low, high, interior) in enumerate(padding_config):
        x = np.moveaxis(x, d, 0)
        size = x.shape[0] + interior * max(x.shape[0] - 1, 0)
        wide = np.full((max(low, 0) + size + max(high, 0), *x.shape[1:]), value, x.dtype)
        wide[max(low, 0) :][:size][:: interior + 1] = x
        x = np.moveaxis(wide[max(-low, 0) : len(wide) - max(-high, 0)], 0, d)
    return x


def _places(x, sizes, starts):
    return tuple(
        slice(s := int(min(max(start, 0), most - size)), s + size)
        for start, size, most in zip(starts, sizes, x.shape, strict=True)
    )


def _dynamic_slice(x, *starts, slice_sizes):
    return x[_places(x, slice_sizes, starts)]


def _dynamic_update_slice(x, update, *starts):
    x = x.copy()
    x[_places(x, update.shape, starts)] = update
    return x


def _dot(x, y, *, dimension_numbers, **_):
    (left, right), (left_batch, right_batch) = dimension_numbers
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    mine = [next(letters) for _ in x.shape]
    theirs = [next(letters) for _ in y.shape]
    for a, b in zip((*left, *left_batch), (*right, *right_batch), strict=True):
        theirs[b] = mine[a]
    rest = [m for d, m in enumerate(mine) if d not in (*left, *left_batch)]
    more = [t for d, t in enumerate(theirs) if d not in (*right, *right_batch)]
    out = [mine[d] for d in left_batch] + rest + more
    return np.einsum(f"{''.join(mine)},{''.join(theirs)}->{''.join(out)}", x, y)


def _reduction(fun):
    return lambda x, *, axes, **_: fun(x, axis=tuple(axes)) if axes else x


def _running(fun):
    def run(x, *, axis, reverse):
        flip = (slice(None),) * axis + (slice(None, None, -1),)
        return fun(x[flip], axis=axis)[flip] if reverse else fun(x, axis=axis)

    return run


def _plain(fun):
    return lambda *xs, **_: fun(*xs)


def _power(x, y):
    """`np.power`, which for one exponent of 0.5 takes the square root: of -inf, NaN and not inf."""
    shape = np.broadcast_shapes(np.shape(x), np.shape(y))
    return np.power(x, np.full(shape or 1, y)).reshape(shape)


def _sign(x):
    return np.where(np.isnan(x), x, np.sign(x)) if x.dtype.kind == "f" else np.sign(x)


TABLE = {
    name: _plain(fun)
    for name, fun in {
        "add": np.add,
        "add_any": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": _divide,
        "neg": np.negative,
        "max": np.maximum,
        "min": np.minimum,
        "abs": np.abs,
        "pow": _power,
        "sin": np.sin,
        "cos": np.cos,
        "tan": np.tan,
        "asin": np.arcsin,
        "acos": np.arccos,
        "atan": np.arctan,
        "sinh": np.sinh,
        "cosh": np.cosh,
        "tanh": np.tanh,
        "exp": np.exp,
        "exp2": np.exp2,
        "log": np.log,
        "log1p": np.log1p,
        "expm1": np.expm1,
        "sqrt": np.sqrt,
        "rem": np.fmod,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "cbrt": np.cbrt,
        "square": np.square,
        "floor": np.floor,
        "ceil": np.ceil,
        "asinh": np.arcsinh,
        "acosh": np.arccosh,
        "atanh": np.arctanh,
        "erf": special.erf,
        "erfc": special.erfc,
        "erf_inv": special.erfinv,
        "lgamma": special.gammaln,
        "digamma": special.digamma,
        "bessel_i0e": special.i0e,
        "bessel_i1e": special.i1e,
        "atan2": np.arctan2,
        "is_finite": np.isfinite,
        "logistic": lambda x: 1 / (1 + np.exp(-x)),
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": np.invert,
        "nextafter": np.nextafter,
        "conj": np.conj,
        "real": np.real,
        "imag": np.imag,
        "complex": lambda x, y: x + 1j * y,
        "select_n": _select,
        "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
        "copy": np.copy,
        "copy_p": np.copy,
        "stop_gradient": np.copy,
        "name": np.copy,
        "pvary": np.copy,
    }.items()
} | {
    "integer_pow": lambda x, *, y: x**y if y >= 0 else 1 / x ** (-y),
    "sign": lambda x: _sign(x),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": lambda x, *, dimensions: np.squeeze(x, tuple(dimensions)),
    "expand_dims": lambda x, *, dimensions: np.expand_dims(x, tuple(dimensions)),
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "transpose": lambda x, *, permutation: np.transpose(x, permutation),
    "rev": lambda x, *, dimensions: np.flip(x, dimensions) if dimensions else x,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "tile": lambda x, *, reps: np.tile(x, reps),
    "round": lambda x, *, rounding_method: (
        np.round(x)
        if rounding_method == RoundingMethod.TO_NEAREST_EVEN
        else np.copysign(np.floor(abs(x) + 0.5), x)
    ),
    "split": lambda x, *, sizes, axis: np.split(x, np.cumsum(sizes)[:-1], axis),
    "device_put": lambda *xs, **_: list(xs),
    "unstack": lambda x, *, axis: list(np.moveaxis(x, axis, 0)),
    "slice": _slice,
    "iota": lambda *, dtype, shape, dimension, **_: np.broadcast_to(
        np.arange(shape[dimension]).reshape(
            [-1 if d == dimension else 1 for d in range(len(shape))]
        ),
        shape,
    ),
    "dot_general": _dot,
    "reduce_sum": _reduction(np.sum),
    "reduce_prod": _reduction(np.prod),
    "reduce_max": _reduction(np.max),
    "reduce_min": _reduction(np.min),
    "reduce_and": _reduction(np.bitwise_and.reduce),
    "reduce_or": _reduction(np.bitwise_or.reduce),
    "reduce_xor": _reduction(np.bitwise_xor.reduce),
    "argmax": lambda x, *, axes, **_: np.argmax(x, axes[0]),
    "argmin": lambda x, *, axes, **_: np.argmin(x, axes[0]),
    "cumsum": _running(np.cumsum),
    "cumprod": _running(np.cumprod),
    "cummax": _running(np.maximum.accumulate),
    "cummin": _running(np.minimum.accumulate),
    "optimization_barrier": lambda *xs: list(xs),
}


def _fits(name, xs, params):
    """Whether NumPy means the same by an operation of these operands."""
    if not all(isinstance(x, np.ndarray) for x in xs):
        return False
    kinds = {x.dtype.kind for x in xs}
    if not kinds <= set("fiubc"):
        return False
    if name == "scatter" and params["update_jaxpr"] is not None:
        return False
    if name == "iota":
        return np.dtype(params["dtype"]).kind in "fiu"
    if kinds & {"c"} and name not in _COMPLEX:
        return False
    if name.startswith(("reduce_max", "reduce_min")):
        return all(x.size for x in xs)
    if name == "rem":
        return bool((xs[1] != 0).all())
    if name.startswith("dynamic_"):
        return len(params) < 2  # not of sizes that vary
    return not (
        name == "div" and kinds & set("iu") and any(abs(x).max(initial=0) > 2**50 for x in xs)
    )


_COMPLEX = frozenset(
    "add add_any sub mul neg real imag select_n copy broadcast_in_dim reshape squeeze expand_dims "
    "transpose rev concatenate stack unstack split device_put slice pad tile gather scatter "
    "scatter-add dynamic_slice dynamic_update_slice dot_general reduce_sum abs conj eq ne name "
    "stop_gradient pvary".split()
)


def convert(x, *, new_dtype, **_):
    """`convert_element_type`, or None where NumPy may mean something else."""
    new = np.dtype(new_dtype)
    if new in SMALL_FLOATS:
        new = np.dtype(np.float32)
    if new.kind not in "fiub" or x.dtype.kind not in "fiub":
        return None
    if x.dtype.kind == "f" and new.kind in "iu":
        if not (
            np.isfinite(x).all() and (abs(x) < 2**30).all() and (new.kind == "i" or (x >= 0).all())
        ):
            return None
        return np.trunc(x).astype(new)
    return (x != 0) if new.kind == "b" else x.astype(new)


def find(primitive, xs, params):
    """The NumPy function for an equation, of operands and parameters; or None."""
    wide = [_wide(x) for x in xs]
    fun = _find(primitive.name, wide, params)
    if fun is None or all(a is b for a, b in zip(wide, xs, strict=True)):
        return fun
    return None if primitive.name == "nextafter" else lambda *_, **params: fun(*wide, **params)


def _wide(x):
    """Floats of 16 bits are rounded after each operation, which is done with more."""
    return x.astype(np.float32) if getattr(x, "dtype", None) in SMALL_FLOATS else x


def _find(name, xs, params):
    if name == "convert_element_type":
        whole = isinstance(xs[0], np.ndarray) and not hasattr(params["new_dtype"], "_rules")
        return convert if whole and convert(xs[0], **params) is not None else None
    fun = TABLE.get(name) or numpy_gathers.TABLE.get(name)
    return fun if fun is not None and _fits(name, xs, params) else None
