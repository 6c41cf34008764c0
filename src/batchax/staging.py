"""From a call of a batched function to its program, with notes of how it came about."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.stages import Compiled

from batchax.errors import ArgumentTypeError
from batchax.frontend.containers import arrays_inside
from batchax.frontend.in_axes import without_objects
from batchax.jaxprs.types import Value
from batchax.kernel.inner import NEEDS_VALUES
from batchax.kernel.recording import Recorder
from batchax.rows.ragged import Ragged

T = TypeVar("T")


@dataclass(frozen=True)
class Staged:
    """A batched function, staged for arguments of certain types.

    Attributes:
      recorder: the notes of how it was batched.
      traced: what ``jax.jit(...).trace`` returned.
      placeholders: for each traced argument, the variable that stands for it.
      paths: what each is called.
      arrays: what was given for each.
      results: The names of the results: "out['loss']".
    """

    recorder: Recorder
    traced: Any
    placeholders: Sequence[Any]
    paths: Sequence[str]
    arrays: Sequence[Any]
    results: Sequence[str]

    def check_vmap(self, called: str) -> None:
        """Raises if there are no notes of a `vmap`, for the function that is `called` so."""
        if not self.recorder.facts:
            raise ArgumentTypeError(
                f"{called} found no vmap: the function was called before, and jax.jit or "
                "jax.checkpoint inside of it remembers what it did. Remove jit, or pass "
                f"{called} what vmap returned."
            )

    def compile(self) -> Compiled:
        """The compiled program, whose operations bear the marks of their equations.

        It has a separate entry in JAX's cache of compiled programs on disk, which takes no notice
        of marks: without one it could be a program with others, and be what the user runs later.
        """
        with self.recorder.active():
            lowered = self.traced.lower()
            marks = zlib.crc32(lowered.as_text(debug_info=True).encode()) >> 1
            # How many buffers the compiler shows if it dumps them, which it does not here.
            return lowered.compile({"xla_debug_buffer_assignment_show_max": marks})


def stage(
    batched: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Sequence[str],
    lengths_known: bool = True,
) -> Staged:
    """Stages a batched function, without running it.

    Arrays, and `jax.ShapeDtypeStruct` in their place, become arguments of the program. Other
    Python objects stay what they are, and so do the lengths of rows, as outside of `jit`.

    Args:
      batched: what `vmap` returned.
      args, kwargs: a call's arguments.
      names: what the positional parameters are called.
      lengths_known: Whether lengths of rows that have values are known, as outside of `jit`.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    rows = filter(_is_ragged, jax.tree.leaves((args, kwargs), is_leaf=_is_ragged))
    lengths = {id(n) for x in rows for n in x.each_length}

    def staged(is_traced: Callable[[Any], bool]) -> Staged:
        chosen = [
            i
            for i, (_, x) in enumerate(leaves)
            if (_is_abstract(x) or not lengths_known if id(x) in lengths else is_traced(x))
        ]
        results: list[str] = []

        @functools.wraps(batched)
        def run(*arrays: Value) -> list[Value]:
            values = [x for _, x in leaves]
            for i, x in zip(chosen, arrays, strict=True):
                values[i] = x
            call_args, call_kwargs = jax.tree.unflatten(tree, values)
            out = without_objects(batched(*call_args, **call_kwargs))
            inside = arrays_inside(out)
            keys = [k for k, _ in jax.tree_util.tree_flatten_with_path(out)[0]]
            paths = list(map(jax.tree_util.keystr, keys))
            if len(paths) != len(inside):  # of containers
                paths = [f"[{k}]" for k in range(len(inside))]
            results[:] = [f"out{path}" for path in paths]
            return inside

        recorder, arrays = Recorder(), [leaves[i][1] for i in chosen]
        with recorder.active():
            traced = jax.jit(run).trace(*arrays)
        paths = [_path(leaves[i][0], names) for i in chosen]
        # What the function closes over of a trace around this comes before its arguments.
        inputs = traced.jaxpr.jaxpr.invars
        return Staged(recorder, traced, inputs[len(inputs) - len(paths) :], paths, arrays, results)

    return with_arrays_traced(staged)


def with_arrays_traced(make: Callable[[Callable[[Any], bool]], T]) -> T:
    """What `make` makes of a predicate that says of an argument whether it is traced.

    All arrays are, unless the function branches in Python on an unbatched one.
    """
    try:
        return make(_is_array)
    except NEEDS_VALUES:
        return make(_is_abstract)


def _is_abstract(x: object) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _is_array(x: object) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))


def _is_ragged(x: object) -> bool:
    return isinstance(x, Ragged)


def _path(keys: Sequence[Any], names: Sequence[str]) -> str:
    """What an argument is called: by the names of parameters, as in ``params['w']``."""
    _, which, *rest = keys
    if isinstance(which, jax.tree_util.SequenceKey):
        i: int = which.idx
        first: str = names[i] if i < len(names) else f"args[{i}]"
    else:
        first = str(which.key)
    return first + jax.tree_util.keystr(tuple(rest))
