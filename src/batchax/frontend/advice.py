"""What messages advise: how to leave an argument unmapped, random keys, Python on traced values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax.errors import AxisError, BatchaxError
from batchax.jaxprs.words import Value


def by_name(paths: Sequence[Any]) -> str:
    """Of keyword arguments among `paths`: how to give them None. Empty if there are none.

    An int, a tuple or a list in ``in_axes`` says nothing of keyword arguments.
    """
    names = dict.fromkeys(p.argument for p in paths if getattr(p, "by_keyword", False))
    if not names:
        return ""
    entries = ", ".join(f"{name!r}: None" for name in names)
    return (
        f"\nA keyword argument has its axis by name: in_axes={{{entries}}} (what that does not "
        "name is mapped over axis 0)."
    )


def split_key(path: str, lanes: Any, each: str, sure: bool = True) -> str:
    """What to do with one random key where there should be one for each lane."""
    return (
        f"\n{'' if sure else 'If '}{path} is one random key: jax.random.split(key, {lanes}) makes "
        f"one for each; with None it is the same {each}, and so are the numbers drawn."
    )


def is_key(x: Value) -> bool:
    """Whether `x` is one random key of the typed kind."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and not x.shape


def may_be_key(x: Value) -> bool:
    """Whether `x` may be one random key of the old kind, an array of numbers."""
    return x.dtype == np.uint32 and x.shape in ((2,), (4,))


@contextmanager
def named_in_errors(fun: Any, mapped: Sequence[Any], each: str) -> Iterator[None]:
    """While a function of one example is run: puts on top of errors what to do about them.

    Args:
      fun: the function.
      mapped: what is mapped, each with a path, a value and an axis.
      each: when an argument is the same for each of the lanes.
    """
    try:
        yield
    except NameError as error:
        if str(error).startswith("Found an unbound axis name") and error.args:
            error.args = (f"{_NO_NAME}{_SAYS}{error.args[0]}", *error.args[1:])
        raise
    except (TypeError, ValueError) as error:
        top = (
            _batched_already(fun, error)
            or _what_python_needed(error, mapped, each)
            or _key_in_parts(error, mapped, each)
            or _shapes_of_one_example(fun, error, mapped)
        )
        if top and error.args and _SAYS not in str(error.args[0]):
            says = "\n" if isinstance(error, AxisError) else _SAYS
            error.args = (f"{top}{says}{error.args[0]}", *error.args[1:])
        raise


_SAYS = "\nJAX says: "
_NO_NAME = (
    "The function uses the name of an axis that is not mapped here. If it is the batch axis, give "
    'its name: axis_name="..." of batchax.vmap.'
)
NO_SUCH_AXIS = "in_axes names an axis that the argument does not have:"


def _batched_already(fun: Any, error: Exception) -> str:
    if not str(error).startswith((NO_SUCH_AXIS, "vmap was requested to map its argument along")):
        return ""
    return (
        f"{getattr(fun, '__name__', type(fun).__name__)} gets its arguments without the axes that "
        "are mapped here, and maps over an axis that they do not have. If it is batched already, "
        "give the function of one example instead, with its in_axes."
    )


_INSTEAD = {
    jax.errors.TracerBoolConversionError: (
        "`if`, `while`, `and`, `or` and `not` of Python need",
        "jax.numpy.where, jax.lax.cond or jax.lax.while_loop",
    ),
    jax.errors.TracerIntegerConversionError: (
        "An index, `range` and what else takes an int of Python needs",
        "an index into an array of jax.numpy, or jax.lax.fori_loop",
    ),
    jax.errors.TracerArrayConversionError: (
        "NumPy and what else takes its arrays needs",
        "the function of jax.numpy, or jax.pure_callback",
    ),
    jax.errors.ConcretizationTypeError: (
        "`float`, `int`, a shape and what else Python computes needs",
        "functions of jax.numpy; sizes are those of one example",
    ),
}


def _what_python_needed(error: Exception, mapped: Sequence[Any], each: str) -> str:
    kind = next((text for type, text in _INSTEAD.items() if isinstance(error, type)), None)
    # It names arguments as they were named where the function was staged, which may be elsewhere.
    here = _STAGED_HERE.search(str(error))
    message = here[1] if here else ""
    named = [m for m in mapped if m.axis is not None and _names(message, m.path)]
    if kind is None or not named:
        return ""
    needs, instead = kind
    lines = [f"  {m.path}: {_one_example(m)}" for m in named]
    return (
        f"{needs} a value that is known, and this one is traced. It was computed from\n"
        + "\n".join(lines)
        + f"\nUse {instead}; or give None in in_axes for an argument that is the same {each}."
        + by_name([m.path for m in named])
    )


_STAGED_HERE = re.compile(r" for (?:vmap|scan)\..* of the arguments? (.*)")


def _names(message: str, path: str) -> bool:
    """Whether a message names what has this path, and not only something inside of it."""
    return bool(re.search(r"(?<![\w.\]])" + re.escape(path) + r"(?!\w|\[|\.\w| \()", message))


def _key_in_parts(error: Exception, mapped: Sequence[Any], each: str) -> str:
    if "PRNG key" not in str(error):
        return ""
    keys = [m for m in mapped if m.axis == 0 and may_be_key(m.value)]
    advice = [split_key(m.path, m.value.shape[0], each, sure=False) for m in keys]
    return "".join(advice).removeprefix("\n")


_ABOUT_SHAPES = re.compile(r"shape|dimension|broadcast|rank|ndim|contract", re.IGNORECASE)


def _shapes_of_one_example(fun: Any, error: Exception, mapped: Sequence[Any]) -> str:
    """Of an error about shapes that the function itself made: which shapes it was given."""
    arrays = [m for m in mapped if m.axis is not None and hasattr(m.value, "dtype")]
    elsewhere = isinstance(error, (BatchaxError, *_INSTEAD))
    if elsewhere or not arrays or not _ABOUT_SHAPES.search(str(error)):
        return ""
    lines = [f"  {m.path}: {_one_example(m)}" for m in arrays]
    name = getattr(fun, "__name__", type(fun).__name__)
    return (
        f"{name} is given one example of each argument that is mapped, without its batch axis:\n"
        + "\n".join(lines)
    )


def _one_example(m: Any) -> str:
    shape = list(m.value.shape)
    del shape[m.axis]
    row = ", ".join("n" if n is None else str(n) for n in shape)
    dtype = m.value.dtype
    return f"one example has shape ({row}{',' if len(shape) == 1 else ''}) and dtype {dtype}"
