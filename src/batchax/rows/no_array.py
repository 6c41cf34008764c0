"""What a batch of rows says to who takes it for an array."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import jax

from batchax.errors import ArgumentTypeError

_ADVICE = (
    "What is done to an array is done to each row by batchax.vmap: batchax.vmap(jnp.sum)(x), or "
    "batchax.vmap(lambda row: row + 1)(x). All elements, without their rows, are x.data; rows "
    "padded to one size are x.to_padded()."
)


class NoArray:
    """Refuses arithmetic, comparisons but ``==``, and functions and methods of arrays, by name."""

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("NumPy wants an array")

    def __array_ufunc__(self, ufunc: Any, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(f"numpy.{ufunc.__name__} is of arrays")

    @property
    def __jax_array__(self) -> Any:
        # Of its primitives' operands JAX asks only whether they have this, and refuses them without
        # a word of what they are.
        if sys._getframe(1).f_code.co_name in ("typeof", "shaped_abstractify", "bind"):
            _refuse("JAX wants an array")
        return functools.partial(_refuse, "JAX wants an array")

    if not TYPE_CHECKING:  # else every name would be an attribute to type checkers

        def __getattr__(self, name: str) -> NoReturn:
            told = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(jax.Array, name):
                told = f"a Ragged is a batch of rows, no array: it has no {name!r}. {_ADVICE}"
            raise AttributeError(told, name=name, obj=self)


def _refuse(why: str) -> NoReturn:
    raise ArgumentTypeError(f"a Ragged is a batch of rows, no array, and {why}. {_ADVICE}")


def _refusing(operator: str) -> Any:
    def refuse(self: Any, *others: Any) -> NoReturn:
        _refuse(f"`{operator}` is of arrays")

    return refuse


_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "matmul": "@", "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
    "divmod": "divmod",
}  # fmt: skip
_UNARY = {"neg": "-", "pos": "+", "invert": "~", "abs": "abs"}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_NUMBERS = {"float": "float", "int": "int", "complex": "complex", "index": "an index"}

for _name, _operator in {**_OPERATORS, **_UNARY, **_COMPARISONS, **_NUMBERS}.items():
    setattr(NoArray, f"__{_name}__", _refusing(_operator))
for _name, _operator in _OPERATORS.items():
    setattr(NoArray, f"__r{_name}__", _refusing(_operator))
