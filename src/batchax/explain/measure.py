"""A batched function as it runs: in time, against a loop, and in chunks of several sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax import lax
from jax.core import Tracer

from batchax.errors import ArgumentTypeError, UnsupportedError
from batchax.explain.account import Timing
from batchax.explain.staging import Staged, stage, with_arrays_traced
from batchax.frontend.arguments import find_axis_size, flatten_arguments, give_lane_indices
from batchax.frontend.containers import arrays_inside
from batchax.kernel.axis import Axis
from batchax.kernel.derivatives import with_values
from batchax.programs.peak import memory_of
from batchax.rows.ragged import Ragged
from batchax.vmap import vmap

_ROUNDS = 7
_LONGEST = 0.2  # seconds that one measurement of a round may take, but for a single call
_MOST_EXAMPLES = 256  # that the loop is run for; of more it takes proportionally longer


@dataclass(frozen=True)
class _Way:
    """A way to run all lanes."""

    batch_size: int | Literal["loop"] | None
    call: Callable[[], Any]
    peak: int | None
    share: float = 1.0


def measure(
    fun: Callable[..., Any],
    in_axes: Any,
    out_axes: Any,
    options: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    staged: Staged,
    compiled: Any,
) -> tuple[Timing, ...]:
    """Times the batched function, in turns with a loop over examples and with other chunk sizes.

    The loop calls the compiled per-example function for one lane after another, on examples cut
    before; over a named axis, and for rows, there is none. For more than 256 lanes it runs for
    256, and its time is that times the number of lanes over 256.

    Args:
      fun, in_axes, out_axes, options: the function, and how it is batched.
      args, kwargs: the call's arguments.
      staged, compiled: the batched function as it is.

    Returns:
      The function as it is first, then the others. The time of one call is the median of seven
      rounds, the spread their fastest and slowest.
    """
    flat = flatten_arguments(fun, in_axes, args, kwargs)
    lanes = find_axis_size(flat.mapped, options.get("axis_size"))
    rows = any(isinstance(m.value, Ragged) for m in flat.mapped)
    given = options.get("batch_size")
    ways = [_batched(given, staged, compiled)]
    if not rows and options.get("axis_name") is None:
        ways.append(_loop(fun, in_axes, args, kwargs, lanes))
    sizes = [] if rows or not isinstance(lanes, int) else [*_sizes(lanes), None]
    for size in sizes:
        if size == given:
            continue
        changed = {**options, "batch_size": size}
        changed.pop("memory_limit", None)
        try:
            other = stage(vmap(fun, in_axes, out_axes, **changed), args, kwargs, ())
            ways.append(_batched(size, other, other.compile()))
        except UnsupportedError:
            break  # it cannot run in chunks
    return _times(ways)


def check_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses arguments that a function cannot be run on.

    Raises:
      ArgumentTypeError: an argument has no values.
    """
    for keys, x in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(x, (jax.ShapeDtypeStruct, Tracer)):
            which = ("kwargs" if keys[0].idx else "args") + jax.tree_util.keystr(keys[1:])
            raise ArgumentTypeError(
                f"measure=True runs the function, but {which} has no values: it is a "
                f"{type(x).__name__}. Give arrays, or leave measure out."
            )


def _sizes(lanes: int) -> list[int]:
    """Chunk sizes to try: powers of four below the number of lanes."""
    return [4**k for k in range(1, 12) if 4**k < lanes]


def _batched(batch_size: Any, staged: Staged, compiled: Any) -> _Way:
    return _Way(batch_size, lambda: compiled(*staged.arrays), memory_of(compiled).bytes)


def _loop(
    fun: Callable[..., Any],
    in_axes: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lanes: int,
) -> _Way:
    leaves, tree = jax.tree.flatten((args, kwargs))
    flat = flatten_arguments(fun, in_axes, args, kwargs)
    give_lane_indices(flat.mapped, Axis(lanes))
    count = min(lanes, _MOST_EXAMPLES)
    examples = [
        [
            m.value if m.axis is None else lax.index_in_dim(m.value, i, m.axis, keepdims=False)
            for m in flat.mapped
        ]
        for i in range(count)
    ]

    def compiled(is_traced: Callable[[Any], bool]) -> Callable[[list[Any]], Any]:
        places = [i for i, x in enumerate(leaves) if is_traced(x)]
        arrays = [leaves[i] for i in places]

        def one_example(arrays: list[Any], example: list[Any]) -> Any:
            whole = jax.tree.unflatten(tree, with_values(leaves, places, arrays))
            args, kwargs = flatten_arguments(fun, in_axes, *whole).rebuild(example)
            # What is computed of arrays that are not traced is known at once, as in `vmap`.
            with nullcontext() if arrays else jax.ensure_compile_time_eval():
                return arrays_inside(fun(*args, **kwargs))

        program = jax.jit(one_example).lower(arrays, examples[0]).compile()
        return lambda example: program(arrays, example)

    run = with_arrays_traced(compiled)
    return _Way("loop", lambda: [run(example) for example in examples], None, count / lanes)


def _times(ways: list[_Way]) -> tuple[Timing, ...]:
    calls = []
    for way in ways:
        jax.block_until_ready(way.call())
        once = _seconds(way.call, 1)
        calls.append(max(1, int(_LONGEST / _ROUNDS / max(once, 1e-6))))
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(_ROUNDS):
        for way, n, seconds in zip(ways, calls, found, strict=True):
            seconds.append(_seconds(way.call, n) / way.share)
    return tuple(
        Timing(way.batch_size, statistics.median(s), (min(s), max(s)), way.peak)
        for way, s in zip(ways, found, strict=True)
    )


def _seconds(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    out = None
    for _ in range(times):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / times
