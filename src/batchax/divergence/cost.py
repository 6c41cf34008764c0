"""What a program costs, by its own equations: enough to choose how lanes are run.

The unit is one elementary operation on one number, about a nanosecond of one core of a
processor. That is a guess made before anything is compiled; no result depends on it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

from jax.extend.core import jaxprs_in_params

_STEPS_OF_WHILE = 16  # what a loop is taken to do if it does not say

# Multiplications and additions of a contraction run many at a time.
_CONTRACTION = 0.15

_FREE = frozenset("broadcast_in_dim reshape squeeze expand_dims convert_element_type".split())
_SLOW = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv
    erfc exp exp2 expm1 lgamma log log1p logistic pow rem sin sinh tan tanh
    """.split()
)
_VERY_SLOW = frozenset("igamma igammac random_gamma regularized_incomplete_beta".split())
_CUBIC = frozenset(
    """
    cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd triangular_solve
    """.split()
)

_known: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()


def work(jaxpr: Any) -> float:
    """Elementary operations of a program, those of the programs inside it included."""
    if jaxpr not in _known:
        _known[jaxpr] = sum(map(_of_equation, jaxpr.eqns))
    return _known[jaxpr]


def bytes_of(avals: Any) -> int:
    """The memory that arrays of these types take."""
    return sum(_size(a) * a.dtype.itemsize for a in avals if hasattr(a, "dtype"))


def _of_equation(eqn: Any) -> float:
    name = eqn.primitive.name
    inner = [work(getattr(p, "jaxpr", p)) for p in jaxprs_in_params(eqn.params)]
    if name == "scan":
        return sum(inner) * eqn.params["length"]
    if name == "while":
        return sum(inner) * _STEPS_OF_WHILE
    if name == "cond":
        return max(inner)
    if name in _OF_SHAPE:
        return _OF_SHAPE[name](eqn)
    if inner and name not in _ELEMENTS_WITH_PROGRAM:
        return max(inner)  # a derivative rule, beside a program, is not run
    size = max(map(_size, (v.aval for v in (*eqn.invars, *eqn.outvars))), default=1)
    if name in _FREE:
        return 0.0
    if name in _CUBIC:
        return 2.0 * size * math.sqrt(_matrix(eqn)) + 1000.0
    return size * (10.0 if name in _SLOW else 200.0 if name in _VERY_SLOW else 1.0)


def _matrix(eqn: Any) -> int:
    shape = eqn.invars[0].aval.shape
    return math.prod(shape[-2:])


def _contraction(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    terms = math.prod(shape[d] for d in contracted)
    return 2.0 * _size(eqn.outvars[0].aval) * terms * _CONTRACTION


def _convolution(eqn: Any) -> float:
    kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
    features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * _size(out) * _size(kernel) / max(features, 1) * _CONTRACTION


def _random(eqn: Any) -> float:
    return 30.0 * _size(eqn.outvars[0].aval)


def _sort(eqn: Any) -> float:
    size = _size(eqn.invars[0].aval)
    return 5.0 * size * math.log2(size + 2)


def _moved(eqn: Any) -> float:
    """Of a slice or a gather: what it returns, not what it reads from."""
    return float(_size(eqn.outvars[0].aval))


def _updated(eqn: Any) -> float:
    """Of an update in place: what is written."""
    return float(max((_size(v.aval) for v in eqn.invars[1:]), default=1))


_OF_SHAPE: dict[str, Callable[[Any], float]] = {
    "dot_general": _contraction,
    "conv_general_dilated": _convolution,
    "random_bits": _random,
    "random_fold_in": _random,
    "random_split": _random,
    "threefry2x32": _random,
    "sort": _sort,
    "slice": _moved,
    "dynamic_slice": _moved,
    "gather": lambda eqn: 4.0 * _moved(eqn),
    "dynamic_update_slice": _updated,
    **dict.fromkeys(
        ["scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"],
        lambda eqn: 8.0 * _updated(eqn),
    ),
}
_ELEMENTS_WITH_PROGRAM = frozenset("reduce argsort".split())


def _size(aval: Any) -> int:
    shape = getattr(aval, "shape", ())
    return math.prod(n if isinstance(n, int) else 1 for n in shape)
