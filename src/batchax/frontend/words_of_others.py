"""Options as other libraries call them, given to us: what they are here."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from batchax.errors import ArgumentTypeError

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
        "nothing: what has no rule runs one lane after another, with a warning",
    ),
    "excluded": ("jnp.vectorize", "None in in_axes"),
    "signature": ("jnp.vectorize", "batchax.auto_vmap, which takes one"),
    "default": ("eqx.filter_vmap", "in_axes"),
    "padding_value": ("tensor.to_padded_tensor", "fill_value"),
    "static_argnums": ("jax.jit", "None in in_axes, by which an argument stays what it is"),
}


_OF_FUNCTIONS = ("vmap", "scan")  # which a decorator may be meant to be


def in_our_words(fun: F) -> F:
    """Decorator of what users call: options that it does not have are refused with what to give.

    So are options of `vmap` and `scan` without a function.

    Raises:
      ArgumentTypeError: (a TypeError) names the option, and what it is here.
    """
    parameters = inspect.signature(fun).parameters.values()
    names = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_POSITIONAL]

    @functools.wraps(fun)
    def checked(*args: Any, **options: Any) -> Any:
        check_options(fun.__name__, names, options)
        if fun.__name__ in _OF_FUNCTIONS and not args and "fun" not in options:
            raise ArgumentTypeError(_without_function(fun.__name__, options))
        return fun(*args, **options)

    return cast("F", checked)


def check_options(called: str, names: Sequence[str], options: Iterable[str]) -> None:
    """Refuses options of what is `called` so that are not among `names`, its parameters in order.

    Raises:
      ArgumentTypeError: as `in_our_words` says.
    """
    for option in options:
        if option not in names:
            raise ArgumentTypeError(_told(called, names, option))


def _without_function(called: str, options: Iterable[str]) -> str:
    some = "".join(f", {name}=..." for name in options) or ", in_axes=..."
    return (
        f"{called}() was given no function. To decorate one with options, write "
        f"@functools.partial(batchax.{called}{some})."
    )


def _told(called: str, names: Sequence[str], option: str) -> str:
    if option in _OTHERS:
        library, ours = _OTHERS[option]
        return f"{called}() has no option {option!r}. For that of {library} give {ours}."
    near = difflib.get_close_matches(option, names, 1)
    hint = f" Did you mean {near[0]!r}?" if near else f" It has {', '.join(names[1:])}."
    return f"{called}() has no option {option!r}.{hint}"
