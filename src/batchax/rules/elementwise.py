"""Primitives that act on each element alone, and on matching elements of several operands."""

from __future__ import annotations

from batchax import _compat
from batchax.engine.rule_makers import broadcasting, vectorized

UNARY = """
    abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj
    convert_element_type copy copy_p cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor imag
    integer_pow is_finite lgamma log log1p log2 logistic neg not one_minus_square
    polynomial population_count real reduce_precision round rsqrt sign sin sinh sqrt
    square stop_gradient tan tanh
""".split()

NARY = """
    add add_any and atan2 complex div eq eq_to ge gt igamma igamma_grad_a igammac le le_to lt
    lt_to max min mul mulhi ne nextafter or polygamma pow regularized_incomplete_beta rem
    shift_left shift_right_arithmetic shift_right_logical sub xor zeta
""".split()

for _names, _make in ((UNARY, vectorized), (NARY, broadcasting)):
    for _name in _names:
        _primitive = _compat.find_primitive(_name)
        if _primitive is not None:  # a few exist in newer JAX only
            _make(_primitive)
