"""A batched function as it runs: in time, against a loop, and in chunks of several sizes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
from jax import lax
from jax.core import Tracer

from batchax.errors import ArgumentTypeError, UnsupportedError
from batchax.execution.memory import memory_of
from batchax.explain.account import Timing
from batchax.explain.wording import show_options
from batchax.frontend.arguments import find_axis_size, flatten_arguments, with_lane_indices
from batchax.frontend.containers import arrays_inside
from batchax.frontend.in_axes import argument_names
from batchax.jaxprs.error_format import name_of
from batchax.jaxprs.types import AxesTree
from batchax.kernel.axis import Axis
from batchax.kernel.own_primitive import with_values
from batchax.progress import Progress
from batchax.rows.ragged import Ragged
from batchax.staging import Staged, stage, with_arrays_traced
from batchax.vmap import vmap

_ROUNDS = 7  # whose median, fastest, and slowest are reported
_LONGEST = 0.2  # seconds that one measurement of a round may take, except for a single call
_LONGEST_LOOP = 0.5  # the same of the loop over examples, which runs for some of them
_MOST_EXAMPLES = 256  # that it runs for; of more it takes proportionally longer


_Size = int | Literal["auto", "loop"] | None
"""Lanes at a time, or a loop over examples; None: all."""


@dataclass(frozen=True)
class _Way:
    """Holds a way to run all lanes, or a share of them."""

    batch_size: _Size
    call: Callable[[], Any]
    peak: int | None
    share: float = 1.0
    compiling: float | None = None
    advice: dict[str, Any] = field(default_factory=dict)


def measure_alone(way: _Way, time_limit: float) -> tuple[Timing, ...]:
    end = time.monotonic() + time_limit
    return _times([(way, _first_call(way))], end)


def measure(
    first: _Way,
    fun: Callable[..., Any],
    in_axes: AxesTree,
    out_axes: AxesTree,
    options: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    advised: Sequence[dict[str, Any]],
    time_limit: float,
    lengths_known: bool,
) -> tuple[tuple[Timing, ...], tuple[int | str | None, ...], tuple[dict[str, Any], ...]]:
    """Times the batched function, interleaved with a loop, other chunk sizes, and what findings
    advise. Returns the times, that of the function as it is first; what there was no time for; and
    the advice that was followed, even if it raised. No more is begun after `time_limit` seconds.
    """
    end = time.monotonic() + time_limit
    flat = flatten_arguments(fun, in_axes, args, kwargs)
    lanes = find_axis_size(flat.mapped, options.get("axis_size"))
    rows = any(isinstance(m.value, Ragged) for m in flat.mapped)

    def made(size: _Size, advice: dict[str, Any]) -> _Way:
        start = time.monotonic()
        if size == "loop":
            way = _loop(fun, in_axes, args, kwargs, lanes)
        else:
            more: dict[str, Any] = {} if size == first.batch_size else {"batch_size": size}
            unused = ["progress"]
            # Options that only chunks, or only lanes all at once, may have are left out.
            if "batch_size" in more:
                unused += ["memory_limit", *(["residuals"] if size is None else [])]
            changed: dict[str, Any] = (
                {k: v for k, v in options.items() if k not in unused} | more | advice
            )
            batched = vmap(fun, in_axes, out_axes, **changed)
            other = stage(batched, args, kwargs, (), lengths_known=lengths_known)
            way = as_it_is(size, other, other.compile())
        return replace(way, compiling=time.monotonic() - start, advice=advice)

    ways: list[tuple[Any, dict[str, Any]]] = []
    # Over a named axis lanes meet, and rows differ in length: a loop over examples would
    # be another program.
    if not rows and options.get("axis_name") is None:
        ways.append(("loop", {}))
    sizes: list[_Size] = [advice["batch_size"] for advice in advised if "batch_size" in advice]
    ways += [(first.batch_size, advice) for advice in advised if "batch_size" not in advice]
    if not rows and isinstance(lanes, int):
        sizes = [*sizes, None, *_sizes(lanes)]
    sizes = [size for size in dict.fromkeys(sizes) if size != first.batch_size]
    ways += [(size, {}) for size in sizes]
    # No progress is shown.
    name = name_of(fun)
    shown = Progress(True, f"measuring {name}", len(ways) + 1, unit="ways", attended=True)
    begun, left = [(first, _first_call(first))], []
    # What is begun takes about as long as the longest before, which compiled and ran twice.
    longest = (first.compiling or 0.0) + 2 * begun[0][1]
    tried: list[dict[str, Any]] = []
    in_chunks = True
    for size, advice in ways:
        shown.advance(1)
        start = time.monotonic()
        if not (in_chunks or advice):
            continue
        if start + longest > end:
            left.append((size, advice))
            continue
        tried += [advice] if advice else []
        try:
            way = made(size, advice)
        except UnsupportedError:
            # If one batch_size raises, all do.
            in_chunks = in_chunks and bool(advice)
            continue
        begun.append((way, _first_call(way)))
        longest = max(longest, time.monotonic() - start)
    shown.advance(1)
    shown.close()
    begun[1:] = sorted(begun[1:], key=lambda pair: _in_order(pair[0].batch_size, pair[0].advice))
    left = sorted(left, key=lambda way: _in_order(*way))
    unmeasured = tuple(show_options(advice) or size for size, advice in left)
    return _times(begun, end), unmeasured, tuple(tried)


def _in_order(size: _Size, advice: dict[str, Any]) -> tuple[bool, bool, float]:
    """Sorts the loop first, then chunks by their size, then what was advised."""
    return bool(advice), size != "loop", size if isinstance(size, int) else math.inf


def check_values(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Rejects arguments without values: a function cannot be run on them."""
    named = [*zip(argument_names(fun, len(args)), args, strict=True), *kwargs.items()]
    for name, argument in named:
        for keys, x in jax.tree_util.tree_flatten_with_path(argument)[0]:
            if not isinstance(x, (jax.ShapeDtypeStruct, Tracer)):
                continue
            which = name + jax.tree_util.keystr(keys)
            raise ArgumentTypeError(
                f"measure=True runs the function, but {which} has no values: it is a "
                f"{type(x).__name__}. Pass arrays, or remove measure."
            )


def _sizes(lanes: int) -> list[int]:
    """Lists chunk sizes to try: powers of four below the number of lanes.

    The largest come first: small ones are the slowest.
    """
    return [4**k for k in range(11, 0, -1) if 4**k < lanes]


def as_it_is(
    batch_size: _Size,
    staged: Staged,
    compiled: jax.stages.Compiled,
    compiling: float | None = None,
) -> _Way:
    """Returns a batched function that was staged and compiled, as a way to run its lanes."""
    peak = memory_of(compiled).bytes
    return _Way(batch_size, lambda: compiled(*staged.arrays), peak, compiling=compiling)


def _loop(
    fun: Callable[..., Any],
    in_axes: AxesTree,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lanes: int,
) -> _Way:
    leaves, tree = jax.tree.flatten((args, kwargs))
    flat = flatten_arguments(fun, in_axes, args, kwargs)
    flat = replace(flat, mapped=with_lane_indices(flat.mapped, Axis(lanes)))

    @jax.jit  # with the place as an argument: one program for all examples
    def example_at(values: list[Any], i: Any) -> list[Any]:
        return [
            x if m.axis is None else lax.dynamic_index_in_dim(x, i, m.axis, keepdims=False)
            for m, x in zip(flat.mapped, values, strict=True)
        ]

    values = [m.value for m in flat.mapped]
    example = example_at(values, 0)

    def compiled(is_traced: Callable[[Any], bool]) -> Callable[[list[Any]], Any]:
        places = [i for i, x in enumerate(leaves) if is_traced(x)]
        arrays = [leaves[i] for i in places]

        def one_example(arrays: list[Any], example: list[Any]) -> Any:
            whole = jax.tree.unflatten(tree, with_values(leaves, places, arrays))
            args, kwargs = flatten_arguments(fun, in_axes, *whole).rebuild(example)
            # What is computed of arrays that are not traced is known at once, as in `vmap`.
            with nullcontext() if arrays else jax.ensure_compile_time_eval():
                return arrays_inside(fun(*args, **kwargs))

        program = jax.jit(one_example).lower(arrays, example).compile()
        return lambda example: program(arrays, example)

    run = with_arrays_traced(compiled)
    jax.block_until_ready(run(example))
    # As many examples as half a second allows, spread evenly over the lanes.
    fitting = int(_LONGEST_LOOP / max(_seconds(lambda: run(example), 1), 1e-6))
    count = min(lanes, _MOST_EXAMPLES, max(1, fitting))
    examples = [example_at(values, k * lanes // count) for k in range(count)]
    return _Way("loop", lambda: [run(example) for example in examples], None, count / lanes)


def _first_call(way: _Way) -> float:
    """Returns the seconds of a call: of the second, where the first is short."""
    first = _seconds(way.call, 1)
    return first if first > 1 else _seconds(way.call, 1)


def _times(begun: list[tuple[_Way, float]], end: float) -> tuple[Timing, ...]:
    # As many calls in a round as take a share of `_LONGEST`. All ways take turns, so that a machine
    # that slows down slows all of them.
    calls = [max(1, int(_LONGEST / _ROUNDS / max(once, 1e-6))) for _, once in begun]
    a_round = sum(n * once for n, (_, once) in zip(calls, begun, strict=True))
    measured: list[list[float]] = [[] for _ in begun]
    for _ in range(_ROUNDS):
        if time.monotonic() + a_round > end:
            break
        for (way, _), n, seconds in zip(begun, calls, measured, strict=True):
            seconds.append(_seconds(way.call, n) / way.share)
    timings = []
    for (way, once), seconds in zip(begun, measured, strict=True):
        s = seconds or [once / way.share]
        median, spread = statistics.median(s), (min(s), max(s))
        how = way.peak, way.compiling, way.advice
        timings.append(Timing(way.batch_size, median, spread, *how))
    return tuple(timings)


def _seconds(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    out = None
    for _ in range(times):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / times
