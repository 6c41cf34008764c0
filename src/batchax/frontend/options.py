"""Checks of options, and of those that other libraries name; NumPy arrays in dtypes of JAX."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
from jax.typing import DTypeLike

from batchax.errors import ArgumentTypeError, BatchaxError, OptionError
from batchax.jaxprs.error_format import brief, show


def is_word(given: object, *words: str) -> bool:
    """Whether `given` is one of these words; an array would be compared element by element."""
    return isinstance(given, str) and given in words


def check_one_of(name: str, given: object, *choices: str | None) -> None:
    """Raises for an option that is none of some words, or None where that is a choice."""
    if not (is_word(given, *filter(None, choices)) or (given is None and None in choices)):
        raise not_one_of(name, given, *choices)


def not_one_of(name: str, given: object, *choices: str | None, other: str = "") -> BatchaxError:
    """The error about an option that is none of some words; it names the word that was meant.

    Args:
      name: the option.
      given: its value.
      choices: the words.
      other: what it may be besides, such as an object of a class.
    """
    words = ["None" if choice is None else f'"{choice}"' for choice in choices]
    *others, last = [*words, other] if other else words
    error = OptionError if isinstance(given, str) else ArgumentTypeError
    near = near_word(given, *filter(None, choices))
    hint = f' Did you mean "{near}"?' if near else ""
    return error(f"{name} must be {', '.join(others)} or {last}, got {brief(given)}.{hint}")


def near_word(given: object, *words: str) -> str:
    """The one of some words that was meant: a synonym, or spelled much the same; or ""."""
    if not isinstance(given, str):
        return ""
    spelled = given.strip().lower().replace("_", "-")
    meant = [word for word in words if spelled in _SYNONYMS.get(word, "").split()]
    return next(iter(meant or difflib.get_close_matches(spelled, words, 1)), "")


# What other libraries call the words of options.
_SYNONYMS = {
    "all": "every and",
    "any": "some or",
    "compact": "compaction active dynamic refill",
    "content": "hash checksum bytes",
    "drop": "discard skip ignore",
    "extend": "append add",
    "file": "path name mtime",
    "grouped": "bucketed buckets by-length",
    "keep": "save store residuals",
    "library": "lapack loop vmap",
    "logsumexp": "lse log-sum-exp",
    "max": "maximum amax",
    "mean": "avg average pmean",
    "min": "minimum amin",
    "never": "no off fresh new",
    "packed": "flat ragged jagged concatenated",
    "padded": "dense masked",
    "predicate": "mask masked lockstep vmap",
    "prod": "product mul multiply",
    "quarantine": "skip ignore continue warn",
    "raise": "error fail stop",
    "recompute": "remat checkpoint rematerialize",
    "serial": "sequential sequentially loop scan map",
    "short": "partial keep remainder",
    "sum": "add total psum",
    "var": "variance",
    "vectorized": "batched together",
}


def check_count(
    name: str,
    given: Any,
    least: int = 0,
    or_none: bool = False,
    other: str = "",
    most: float = math.inf,
) -> None:
    """Raises for an option that is not an int of at least `least`, 0 or 1, and at most `most`.

    `other` is what else it may be, for the message.
    """
    is_int = isinstance(given, (int, np.integer)) and not isinstance(given, bool)
    if not (is_int and least <= given <= most) and not (or_none and given is None):
        kind = "a positive int" if least else "a non-negative int"
        kind += "" if most == math.inf else f" of at most {most:,}"
        kinds = [kind, other, "None" * or_none]
        *others, last = filter(None, kinds)
        allowed = f"{', '.join(others)} or {last}" if others else last
        error = OptionError if is_int else ArgumentTypeError
        raise error(f"{name} must be {allowed}, got {show(given)}.")


def check_callable(where: str, what: str, fun: object) -> None:
    if not callable(fun):
        raise ArgumentTypeError(f"{where} expects {what}, got {show(fun)}.")


def checked_list(where: str, what: str, given: Any) -> list[Any]:
    if isinstance(given, (str, bytes, Mapping)) or not np.iterable(given):
        raise ArgumentTypeError(f"{where} expects a list of {what}, got {show(given)}.")
    return list(given)


def check_flags(**flags: object) -> None:
    """Raises an error for what is neither True nor False: a word would count as True."""
    for name, flag in flags.items():
        if not isinstance(flag, (bool, np.bool_)):
            raise ArgumentTypeError(f"{name} must be True or False, got {show(flag)}.")


def check_tolerances(**tolerances: Any) -> None:
    """Raises an error for what is neither a number, zero or more, nor None."""
    for name, given in tolerances.items():
        number = isinstance(given, (int, float, np.number)) and not isinstance(given, bool)
        if not (given is None or (number and given >= 0)):
            error = OptionError if number else ArgumentTypeError
            raise error(f"{name} must be a number, zero or more, got {brief(given)}.")


def check_small_matrices(option: object) -> None:
    check_one_of("small_matrices", option, "auto", "library", "vectorized")


def check_progress(progress: object, unit: str) -> None:
    if not (isinstance(progress, bool) or callable(progress)):
        raise ArgumentTypeError(
            f"progress must be True, False, or a function of the {unit} done and of those there "
            f"are; got {brief(progress)}."
        )


def converted(x: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Converts an array to the dtype that JAX computes with; raises OverflowError if a number does
    not fit.
    """
    converted = np.asarray(x, dtype)
    narrower = np.issubdtype(x.dtype, np.integer) and converted.dtype != x.dtype
    if narrower and (converted != x).any():  # the last 32 bits are another number
        raise OverflowError(
            f"a number of dtype {x.dtype} does not fit into {dtype}, with which JAX computes if "
            "JAX_ENABLE_X64=1 is not set"
        )
    return converted


OF_RANKS = {
    "signature": 'it in place of ranks: batchax.auto_vmap("(n),(n)->()")',
    "excluded": "no rank, or None, for what is not batched",
}
"""Options of ``jnp.vectorize``: what to give `auto_vmap` for them."""

F = TypeVar("F", bound=Callable[..., Any])

_OTHERS = {
    "in_dims": ("torch.func.vmap", "in_axes"),
    "out_dims": ("torch.func.vmap", "out_axes"),
    "chunk_size": ("torch.func.vmap", "batch_size"),
    "randomness": ("torch.func.vmap", "a key for each lane, by in_axes=batchax.split_key"),
    "fallback_to_while_loop": (
        "tf.vectorized_map",
        "nothing: what has no rule runs sequentially, with a warning",
    ),
    "excluded": ("jnp.vectorize", "None in in_axes"),
    "signature": ("jnp.vectorize", "batchax.auto_vmap, which takes one"),
    "default": ("eqx.filter_vmap", "in_axes"),
    "padding_value": ("tensor.to_padded_tensor", "fill_value"),
    "has_aux": ("jax.grad", "a loss without aux: batchax.vmap(loss) returns its values and aux"),
    "static_argnums": ("jax.jit", "None in in_axes, by which an argument stays what it is"),
}


def wraps(fun: Callable[..., Any]) -> Callable[[F], F]:
    """``functools.wraps`` of any callable, such as a pytree whose `__name__` is not a string."""

    def wrapper(made: F) -> F:
        try:
            return cast("F", functools.update_wrapper(made, fun))
        except Exception:  # as in JAX: names are for messages alone
            vars(made)["__wrapped__"] = fun
            return made

    return wrapper


_OF_FUNCTIONS = ("vmap", "scan")  # which a decorator may be meant to be
_BY_POSITION = ("map", "map_batches")  # where keyword arguments are options alone


def translate_argument_names(fun: F) -> F:
    """Makes what users call raise an error for unknown options, which names the right one.

    Options of `vmap` and `scan` without a function raise one, too.
    """
    parameters = inspect.signature(fun).parameters.values()
    names = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]

    @functools.wraps(fun)
    def checked(*args: Any, **options: Any) -> Any:
        of = args[0] if args and fun.__name__ in _BY_POSITION else None
        check_options(fun.__name__, names, options, of)
        if fun.__name__ in _OF_FUNCTIONS and not args and "fun" not in options:
            raise ArgumentTypeError(_without_function(fun.__name__, options))
        return fun(*args, **options)

    return cast("F", checked)


def check_options(
    called: str, names: Sequence[str], options: Iterable[str], of: Callable[..., Any] | None = None
) -> None:
    """Raises an error for options of the function `called` that are not among `names`.

    `of` is a per-example function whose arguments `called` takes by position alone.
    """
    for option in options:
        if option not in names:
            raise ArgumentTypeError(_unknown_option(called, names, option, of))


def _without_function(called: str, options: Iterable[str]) -> str:
    some = "".join(f", {name}=..." for name in options) or ", in_axes=..."
    return (
        f"{called}() was given no function. To decorate one with options, write "
        f"@functools.partial(batchax.{called}{some})."
    )


def _unknown_option(
    called: str, names: Sequence[str], option: str, of: Callable[..., Any] | None
) -> str:
    with contextlib.suppress(TypeError, ValueError):
        if of is not None and option in inspect.signature(of).parameters:
            return (
                f"{called}() has no option {option!r}. Pass arguments of the function by position, "
                "with None in in_axes if all examples share them."
            )
    if option in _OTHERS:
        library, ours = _OTHERS[option]
        return f"{called}() has no option {option!r}. For that of {library}, pass {ours}."
    near = difflib.get_close_matches(option, names, 1)
    hint = f" Did you mean {near[0]!r}?" if near else f" It has {', '.join(names[1:])}."
    return f"{called}() has no option {option!r}.{hint}"
