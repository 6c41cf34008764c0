"""What messages advise: how to leave an argument unmapped, random keys, Python on traced values."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import KeyPath

from batchax import _compat
from batchax.errors import AxisError, BatchaxError
from batchax.frontend.in_axes import ArgumentPath, SpecifiedLeaf
from batchax.jaxprs.error_format import name_of
from batchax.jaxprs.types import Value
from batchax.kernel.inner import of_what_is_around

_TRACED = re.compile(r"when the value leaked was (.*) traced for")
_MADE = re.compile(r"value was created on line (\S.*)\. ?$", re.MULTILINE)
_DERIVED = re.compile(r"wrapped in a (Linearize|JVP|Grad)Tracer")
_TYPE = re.compile(r"with type (\S+)")


class _Mapped(Protocol):
    """Is an argument as messages show it; a `Mapped`, of a module above."""

    @property
    def path(self) -> str: ...
    @property
    def value(self) -> Value: ...
    @property
    def axis(self) -> int | None: ...


def escaped(name: str, message: str, place: str | None) -> str:
    """Says what a function uses that another one left behind, by JAX's message.

    Empty if that says nothing.
    """
    traced, made, type_of = (x.search(message) for x in (_TRACED, _MADE, _TYPE))
    if type_of and _DERIVED.search(message):
        says = of_what_is_around(place or name, type_of[1])
        return f"{says}\nJAX says: Encountered an unexpected tracer."
    if not (traced and type_of):
        return ""
    return (
        f"{name} uses a traced value ({type_of[1]}) of another call, which is over: of "
        f"{traced[1]}{f', made at {made[1]}' if made else ''}. Return it there as an output, and "
        f"pass it to {name} as an argument.\nJAX says: Encountered an unexpected tracer."
    )


def by_name(paths: Sequence[str]) -> str:
    """Shows `in_axes` with None for the keyword arguments among `paths`, or returns ""."""
    # An int, a tuple or a list in ``in_axes`` does not apply to keyword arguments.
    names = dict.fromkeys(p.argument for p in paths if isinstance(p, ArgumentPath) and p.by_keyword)
    if not names:
        return ""
    entries = ", ".join(f"{name!r}: None" for name in names)
    return (
        f"\nPass the axis of a keyword argument by name: in_axes={{{entries}}} (arguments that are "
        "not named there are mapped over axis 0)."
    )


def advise_split_key(path: str, lanes: int | str, each: str, sure: bool = True) -> str:
    """Says what to do with one random key where there should be one for each lane."""
    return (
        f"\n{'' if sure else 'If '}{path} is one random key: jax.random.split(key, {lanes}) makes "
        f"one for each; with None it is the same {each}, and so are the numbers drawn."
    )


def is_key(x: Value) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and not x.shape


def may_be_key(x: Value) -> bool:
    return x.dtype == np.uint32 and x.shape in ((2,), (4,))


def advise(
    error: Exception,
    fun: Callable[..., Any],
    mapped: Sequence[_Mapped],
    shared: Sequence[SpecifiedLeaf],
    each: str,
) -> None:
    """Puts advice on top of an error of a function of one example.

    Of what is `mapped` each has a path, a value and an axis; `shared` is not; `each` says for whom
    it is the same.
    """
    if isinstance(error, NameError):
        if str(error).startswith("Found an unbound axis name") and error.args:
            error.args = (f"{_NO_NAME}{_SAYS}{error.args[0]}", *error.args[1:])
    elif isinstance(error, jax.errors.UnexpectedTracerError):
        place = _compat.raised_at(error) or _compat.fun_sourceinfo(fun)
        short = escaped(name_of(fun), str(error), place)
        if short:
            error.args = (short,)
    elif isinstance(
        error,
        (AttributeError, TypeError, ValueError, jax.errors.NonConcreteBooleanIndexError),
    ):
        top = (
            _batched_already(fun, error)
            or _rows_in_a_list(error, mapped)
            or _found_sizes(error)
            or _no_reverse(error)
            or _what_python_needed(error, mapped, each)
            or _what_is_traced_around(error, shared, each)
            or _key_in_parts(error, mapped, each)
            or _shapes_of_one_example(fun, error, mapped, shared, each)
        )
        # Advice is given once: an inner function of one example may have put its own on top.
        if top and error.args and _SAYS not in str(error.args[0]):
            says = _SAYS if not isinstance(error, (AttributeError, AxisError)) else "\n"
            error.args = (f"{top}{says}{error.args[0]}", *error.args[1:])


@contextmanager
def carry_in_errors() -> Iterator[None]:
    """Puts advice on top of errors of a step of a `bounded_while`, of what it carries."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = _kind(error)
        if kind and error.args and " for bounded_while." in str(error) and _SAYS not in str(error):
            needs, instead = kind
            top = f"{needs} a concrete value, and the carry of a loop is traced. Use {instead}."
            error.args = (f"{top}{_SAYS}{error.args[0]}", *error.args[1:])
        raise


_SAYS = "\nJAX says: "
_NO_NAME = (
    "The function uses the name of an axis that is not mapped here. If it is the batch axis, pass "
    'its name: axis_name="..." of batchax.vmap.'
)
NO_SUCH_AXIS = "in_axes names an axis that the argument does not have:"


def _batched_already(fun: Callable[..., Any], error: Exception) -> str:
    if not str(error).startswith((NO_SUCH_AXIS, "vmap was requested to map its argument along")):
        return ""
    return (
        f"{name_of(fun)} gets its arguments without the axes that "
        "are mapped here, and maps over an axis that they do not have. If it is batched already, "
        "pass the function of one example instead, with its in_axes."
    )


def _rows_in_a_list(error: Exception, mapped: Sequence[_Mapped]) -> str:
    lists = [m.path.removesuffix("[0]") for m in mapped if re.fullmatch(r"\w+\[0\]", m.path)]
    if not lists or not re.search(r"'list' object|<class 'list'>", str(error)):
        return ""
    (name, *_) = lists
    return (
        f"{name} is a list of arrays, of which each is mapped: the function gets a list with its "
        f"part of each. If {name} holds one row for each example, pass jnp.stack({name}), or "
        f"batchax.Ragged.from_rows({name}) if rows differ in length."
    )


def _no_reverse(error: Exception) -> str:
    if not str(error).startswith("Reverse-mode differentiation does not work for lax.while_loop"):
        return ""
    return (
        "A loop with an unknown number of steps has no derivative in reverse mode. "
        "Use batchax.bounded_while(cond_fun, body_fun, init_val, max_steps), which has one, or "
        "batchax.scan(..., until=...)."
    )


_COMPRESS = "jax.numpy.compress", "batchax.compress(condition, x)"
_FINDS_SIZES = {
    "Array boolean indices must be concrete": (
        "x[mask], with a boolean mask,",
        "batchax.compress(mask, x)",
    ),
    "size argument of jnp.nonzero": (
        "jax.numpy.nonzero, or jax.numpy.where of one argument,",
        "batchax.nonzero(mask)",
    ),
    "argument of jnp.unique()": ("jax.numpy.unique", "batchax.unique(x)"),
    "size argument of jnp.compress": _COMPRESS,
}


def _found_sizes(error: Exception) -> str:
    """Says what finds a size for each lane, of an error about sizes that depend on values."""
    called = next((names for says, names in _FINDS_SIZES.items() if says in str(error)), None)
    if called is None and isinstance(error, jax.errors.TracerBoolConversionError):
        # Before JAX 0.12 it asks, by an `if`, whether all is in bounds.
        code = inspect.unwrap(jnp.compress).__code__
        in_compress = any(
            frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__)
        )
        called = _COMPRESS if in_compress else None
    if called is None:
        return ""
    what, instead = called
    return (
        f"{what} has a data-dependent size, which differs between lanes. Call {instead}, which "
        "returns a Ragged. For a sum, jax.numpy.where(mask, x, 0) keeps the shape. If all lanes "
        "have the same mask, pass a NumPy array."
    )


_INSTEAD = {
    jax.errors.TracerBoolConversionError: (
        "`if`, `while`, `and`, `or` and `not` of Python need",
        "jax.numpy.where, jax.lax.cond or jax.lax.while_loop",
    ),
    jax.errors.TracerIntegerConversionError: (
        "An index, `range`, and other Python code that takes an int need",
        "an index into an array of jax.numpy, or jax.lax.fori_loop",
    ),
    jax.errors.TracerArrayConversionError: (
        "NumPy, and other code that takes NumPy arrays, need",
        "jax.numpy (`jax.numpy.asarray(array)[i]` for an index), or call NumPy by "
        "jax.pure_callback",
    ),
    jax.errors.ConcretizationTypeError: (
        "`float`, `int`, a shape, and other Python computations need",
        "functions of jax.numpy, and sizes from shapes of one example",
    ),
}


def _what_python_needed(error: Exception, mapped: Sequence[_Mapped], each: str) -> str:
    kind = _kind(error)
    # It names arguments as they were named where the function was staged, which may be elsewhere.
    here = _STAGED_HERE.search(str(error))
    message = here[1] if here else ""
    named = [m for m in mapped if m.axis is not None and _names(message, m.path)]
    if kind is None or not named:
        return ""
    needs, instead = kind
    lines = [f"  {m.path}: {_one_example(m)}" for m in named]
    return (
        f"{needs} a concrete value, and this one is traced. It was computed from\n"
        + "\n".join(lines)
        + f"\nUse {instead}. Or pass None in in_axes for an argument that is the same {each}."
        + by_name([m.path for m in named])
    )


def _kind(error: Exception) -> tuple[str, str] | None:
    """Returns what of Python's needs a known value, and what to use instead; None: nothing does."""
    if str(error).startswith("Shapes must be 1D sequences of concrete values"):
        return _INSTEAD[jax.errors.ConcretizationTypeError]
    return next((text for type, text in _INSTEAD.items() if isinstance(error, type)), None)


def _what_is_traced_around(error: Exception, shared: Sequence[SpecifiedLeaf], each: str) -> str:
    """Says which arguments ``jax.jit`` around traces, though they are not mapped."""
    kind = _kind(error)
    traced = [(path, x) for path, x in _arrays_of(shared) if isinstance(x, Tracer)]
    named = [(path, x) for path, x in traced if _names(str(error), path)]
    numbers = [(path, x) for path, x in traced if not x.shape]
    if kind is None or not traced:
        return ""
    needs, instead = kind
    first = (named or numbers or traced)[0][0]
    name = getattr(first, "argument", first)
    return (
        f"{needs} a concrete value. These are the same {each}, but are traced "
        "by a transformation around, such as jax.jit:\n"
        + _listed(named or numbers or traced, each="")
        + f"\nPass static_argnames={name!r} to jax.jit, or close over {name}. For a model of "
        f"Equinox, use equinox.filter_jit in place of jax.jit. Or use {instead}."
    )


_STAGED_HERE = re.compile(r" for (?:vmap|scan)\..* of the arguments? (.*)")


def _names(message: str, path: str) -> bool:
    """Whether a message names what has this path, and not only something inside of it."""
    return bool(re.search(r"(?<![\w.\]])" + re.escape(path) + r"(?!\w|\[|\.\w| \()", message))


def _key_in_parts(error: Exception, mapped: Sequence[_Mapped], each: str) -> str:
    if "PRNG key" not in str(error):
        return ""
    keys = [m for m in mapped if m.axis == 0 and may_be_key(m.value)]
    advice = [advise_split_key(m.path, m.value.shape[0], each, sure=False) for m in keys]
    return "".join(advice).removeprefix("\n")


ABOUT_SHAPES = re.compile(r"shape|dimension|broadcast|rank|ndim|contract|\bsizes\b", re.IGNORECASE)

SIZES_DIFFER = "The rows of these arguments may have different sizes:"


def _shapes_of_one_example(
    fun: Callable[..., Any],
    error: Exception,
    mapped: Sequence[_Mapped],
    shared: Sequence[SpecifiedLeaf],
    each: str,
) -> str:
    """Says which shapes the function was given, of an error about shapes that it made itself."""
    arrays = [m for m in mapped if m.axis is not None and hasattr(m.value, "dtype")]
    elsewhere = isinstance(error, (BatchaxError, *_INSTEAD)) or SIZES_DIFFER in str(error)
    if elsewhere or not arrays or not ABOUT_SHAPES.search(str(error)):
        return ""
    lines = [f"  {_whence(m.path)}: {_one_example(m)}" for m in arrays]
    others = _listed([(p, x) for p, x in _arrays_of(shared) if x.shape], f", the same {each}")
    return (
        f"{name_of(fun)} is given one example of each argument that is mapped, without its batch "
        "axis:\n" + "\n".join([*lines, *([others] if others else [])])
    )


_MOST = 8  # arrays of a model that are listed


def _listed(arrays: Sequence[tuple[str, Any]], each: str) -> str:
    lines = [
        f"  {_whence(p)}: shape {written(x.shape)} and dtype {x.dtype}{each}" for p, x in arrays
    ]
    more = len(lines) - _MOST
    return "\n".join(lines[:_MOST] + ([f"  and {more} more arrays{each}"] if more > 0 else []))


def _arrays_of(shared: Sequence[SpecifiedLeaf]) -> list[tuple[str, Any]]:
    """Lists the arrays in arguments that are not mapped, with what messages call them."""
    return [
        (leaf.path if not keys else _below(leaf.path, keys), x)
        for leaf in shared
        for keys, x in jax.tree_util.tree_flatten_with_path(leaf.value)[0]
        if isinstance(x, (jax.Array, np.ndarray))
    ]


def _below(path: Any, keys: KeyPath) -> str:
    return type(path)(path + jax.tree_util.keystr(keys), path.argument, path.by_keyword)


_whences: ContextVar[Mapping[str, str]] = ContextVar("whences", default={})  # noqa: B039


@contextmanager
def come_from(whence: Mapping[str, str]) -> Iterator[None]:
    """Lets messages about shapes call arguments what `whence` says, files and all."""
    token = _whences.set(whence)
    try:
        yield
    finally:
        _whences.reset(token)


def _whence(path: str) -> str:
    return _whences.get().get(path, path)


def _one_example(m: _Mapped) -> str:
    shape = list(m.value.shape)
    assert m.axis is not None
    del shape[m.axis]
    one = "one row" if m.path in _whences.get() else "one example"
    return f"{one} has shape {written(shape)} and dtype {m.value.dtype}"


def written(shape: Sequence[Any]) -> str:
    """Returns a shape for messages; None is a size that differs between rows."""
    sizes = ", ".join("n" if n is None else str(n) for n in shape)
    return f"({sizes}{',' if len(shape) == 1 else ''})"
