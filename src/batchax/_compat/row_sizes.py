"""Symbolic sizes of rows, of a separate class."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
import jax.core
import numpy as np
from jax._src.dtypes import (
    python_scalar_types,
    python_scalar_types_to_dtypes,
    register_weak_scalar_type,
)
from jax.typing import DTypeLike

from batchax._compat.jaxprs import Dim, Value


class RowScope(jax.export.SymbolicScope):
    """Holds the sizes of the rows of one call. `lengths` answers questions about them."""

    def __init__(self, lengths: object) -> None:
        super().__init__()
        self.lengths = lengths


SIZE: Any = type(jax.export.symbolic_shape("n")[0])


class RowDimension(SIZE):
    """Is a symbolic size of rows: JAX's, in a class whose comparisons can raise."""

    # JAX's sizes return False if they cannot decide equality, and no public option makes them
    # raise. Results of arithmetic must be of this class, too: JAX names its own class there, so its
    # methods that return sizes are wrapped.
    __slots__ = ()

    def __init_subclass__(cls) -> None:
        # JAX looks these up by the type itself, in tables that have no public way in.
        register_weak_scalar_type(cls)
        python_scalar_types.add(cls)
        python_scalar_types_to_dtypes[cls] = python_scalar_types_to_dtypes[SIZE]

    def is_known_to_be(self, other: Any) -> bool:
        """Returns JAX's answer to whether two sizes are equal: False if they may differ."""
        if isinstance(other, SIZE):
            return other.scope is self.scope and self._eq(other)
        return isinstance(other, (int, np.integer)) and self._eq(other)

    def astype(self, dtype: DTypeLike) -> jax.Array:
        """Converts the size to an array, like NumPy's integers."""
        return jax.numpy.asarray(self).astype(dtype)

    def hashed(self) -> int:
        """Returns JAX's hash of the expression."""
        return SIZE.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return self.is_known_to_be(other)

    def __ne__(self, other: object) -> bool:
        return not self.is_known_to_be(other)

    def __hash__(self) -> int:
        return self.hashed()


def _of_its_class(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: Any, *others: object) -> Any:
        if any(isinstance(other, tuple) for other in others):  # what iterates asks so, since 0.12
            int(self)
        made = method(self, *others)
        own = lambda x: type(self)(x._sorted_terms, x._scope) if type(x) is SIZE else x
        return tuple(map(own, made)) if isinstance(made, tuple) else own(made)

    return wrapped


for _name in (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __neg__ __floordiv__ __rfloordiv__ "
    "__mod__ __rmod__ __divmod__ __rdivmod__ max rmax min rmin __deepcopy__"
).split():
    setattr(RowDimension, _name, _of_its_class(getattr(SIZE, _name)))


def row_symbols(kind: type[RowDimension], names: Sequence[str], lengths: object) -> tuple[Any, ...]:
    """Makes symbolic sizes of rows, of class `kind`, in a new scope."""
    if not names:
        return ()
    of_jax: Any = jax.export.symbolic_shape(", ".join(names), scope=RowScope(lengths))
    return tuple(kind(size._sorted_terms, size.scope) for size in of_jax)


def another_symbol(kind: type[RowDimension], name: str, scope: RowScope) -> RowDimension:
    """Makes one more symbolic size in a scope, or returns that of the name."""
    of_jax: Any = jax.export.symbolic_shape(name, scope=scope)[0]
    return kind(of_jax._sorted_terms, scope)


def is_row_size(x: object) -> TypeGuard[RowDimension]:
    return isinstance(x, RowDimension)


def symbols(dim: Dim) -> frozenset[str]:
    """Returns the names in a symbolic size; ``_get_vars`` has no public equivalent."""
    return frozenset(dim._get_vars())


def evaluate_size(dim: Dim, values: dict[str, Any]) -> Value:
    """Evaluates a symbolic size for `values`, which may be arrays or traced."""
    # JAX only does this itself when it lowers an exported program, in its default integers.
    values = {k: v.astype(int) if hasattr(v, "astype") else v for k, v in values.items()}
    if any(isinstance(value, jax.core.Tracer) for value in values.values()):
        return dim._evaluate(values)
    # The remainder by an empty row's is left undefined. JAX may ask for the type of an operation,
    # and then nothing is traced or computed, since 0.12.
    with jax.core.eval_context(), np.errstate(divide="ignore"):
        size = _evaluate_known(dim, values)
    return np.asarray(size) if isinstance(size, jax.Array) else size


def _evaluate_known(dim: Any, values: dict[str, Any]) -> Value:
    """Evaluates a size in NumPy: JAX would compile each maximum, for each number of rows."""
    total: Any = 0
    for term, count in dim._sorted_terms:
        product: Any = int(count)
        for factor, power in term._factors:
            own = values.get(factor.var)
            if own is None and factor.var is not None:
                own = factor.evaluate(values, dim.scope)  # one of another scope, or an error
            elif own is None:
                operands = (_evaluate_known(x, values) for x in factor.operands)
                own = _OF_SIZES[factor.operation](*operands)
            product = product * own ** int(power)
        total = total + product
    return total


_OF_SIZES: dict[str, Callable[..., Any]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": np.maximum,
    "min": np.minimum,
}
