"""`explain`: how a function was batched, and what that costs."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from batchax import _compat
from batchax.execution.eager import whatever_jit
from batchax.explain.account import Timing
from batchax.explain.attribution import Attribution, Tally
from batchax.explain.devices import find_devices
from batchax.explain.explanation import Explanation
from batchax.explain.findings.draft import Draft
from batchax.explain.findings.every import find_findings
from batchax.explain.interface import arguments_of, outputs_of
from batchax.explain.listing import Listing
from batchax.explain.measure import check_values
from batchax.explain.measure import measure as measure_ways
from batchax.explain.memory import counted_by_compiler, find_memory
from batchax.explain.naming import Names
from batchax.explain.staging import Staged, stage
from batchax.vmap import made_by_vmap, vmap


@_compat.api_boundary
def explain(
    fun: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    compile: bool = True,
    measure: bool = False,
    time_limit: float = 60.0,
    **vmap_options: Any,
) -> Callable[..., Explanation]:
    """Shows how ``batchax.vmap(fun, in_axes, out_axes, **vmap_options)`` batches a function.

    Nothing is run, but with `measure`. The function is staged, batched and compiled as ``jax.jit``
    would compile it, and each operation of the batched program is traced back to the equation of
    the per-example function, and so to the line, that it comes from.

    Args:
      fun: the per-example function; or, without more than that, what `vmap` made of one.
      in_axes, out_axes: as in `vmap`.
      compile: whether to compile the batched program, for the peak memory and for findings that
        depend on what the compiler makes of it. That takes most of the time.
      measure: whether to run the batched function, too, and to time it against a loop over
        examples and in chunks of several sizes. Arguments must then be arrays.
      time_limit: with `measure`, seconds after which no other chunk size is tried and nothing is
        timed again; `Explanation.unmeasured` has what there was no time for. The function as it
        is runs once however long that takes.
      **vmap_options: the other options of `vmap`, such as ``batch_size``.

    Returns:
      A function of the arguments that the batched function takes. An array may be given as a
      ``jax.ShapeDtypeStruct``. It returns an `Explanation`.

    Raises:
      ArgumentTypeError: (a TypeError) `measure` is asked for and an argument has no values.
      BatchaxError: what `vmap` raises, for options and arguments that do not fit.

    Example:
      >>> def f(M, v):
      ...     return jnp.tanh(M @ v).sum()
      >>> explanation = bx.explain(f, in_axes=(None, 0))(jnp.ones((3, 5)), jnp.ones((8, 5)))
      >>> print(explanation)
      f, batched over 8 lanes
      ...
      >>> [equation.primitive for equation in explanation.equations]
      ['dot_general', 'tanh', 'reduce_sum']
    """
    made = made_by_vmap(fun)
    if made is not None and (in_axes, out_axes, vmap_options) == (0, 0, {}):
        batched, (fun, vmap_options) = fun, made
        in_axes, out_axes = vmap_options["in_axes"], vmap_options["out_axes"]
        vmap_options = {
            k: v
            for k, v in vmap_options.items()
            if k not in ("in_axes", "out_axes") and v is not _USUAL[k].default
        }
    else:
        batched = vmap(fun, in_axes, out_axes, **vmap_options)
    limit = time_limit if measure else None
    return _of_batched(batched, fun, in_axes, out_axes, vmap_options, compile, limit)


_USUAL = inspect.signature(vmap).parameters


def _of_batched(
    batched: Callable[..., Any],
    fun: Callable[..., Any],
    in_axes: Any,
    out_axes: Any,
    options: dict[str, Any],
    compile: bool,
    measuring: float | None,
) -> Callable[..., Explanation]:
    @_compat.api_boundary
    @whatever_jit
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        if measuring is not None:
            check_values(args, kwargs)
        start = time.monotonic()
        staged = stage(batched, args, kwargs, _parameters(fun))
        name = getattr(fun, "__name__", type(fun).__name__)
        compiled = staged.compile() if compile or measuring is not None else None
        timings: tuple[Timing, ...] = ()
        left: tuple[Any, ...] = ()
        if measuring is not None:
            call = args, kwargs, staged, compiled
            limits = time.monotonic() - start, measuring
            timings, left = measure_ways(fun, in_axes, out_axes, options, *call, *limits)
        compiled = compiled if compile else None
        return _explain(name, staged, compiled, dict(options), timings, left)

    return explained


def _parameters(fun: Callable[..., Any]) -> list[str]:
    """The names of a function's positional parameters."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # of some built-in functions nothing is known
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional]


def _explain(
    name: str,
    staged: Staged,
    compiled: Any,
    options: dict[str, Any],
    timings: tuple[Timing, ...],
    unmeasured: tuple[Any, ...],
) -> Explanation:
    recorder, program = staged.recorder, staged.traced.jaxpr
    attribution = Attribution(recorder, program)
    example = recorder.programs[0] if recorder.programs else None
    axis = next((details["axis"] for about, details in recorder.facts if about == "rows"), None)
    if axis is None:
        axis = example.axis if example else recorder.records[0].axis
    names = Names()
    arguments = arguments_of(staged, example, names)
    listing = Listing(recorder, attribution, names, axis.size)
    placed = next(details for about, details in recorder.facts[::-1] if about == "outputs")
    outputs = () if example is None else outputs_of(example, names, **placed)
    memory = counted = None
    if compiled is not None:
        memory = find_memory(compiled, recorder, listing.numbers, staged.paths)
        counted = counted_by_compiler(compiled)
    shards = next((details for about, details in recorder.facts if about == "shards"), None)
    draft = Draft(
        equations=listing.equations,
        numbers=listing.numbers,
        tallies=attribution.tallies,
        recorder=recorder,
        options=options,
        lanes=axis.size,
        each=axis.size if shards is None else shards["shards"].each,
        compiled=compiled,
        temporaries=memory and memory.temporaries,
        timings=timings,
        arguments=arguments,
        outputs=outputs,
    )
    devices = None if shards is None else find_devices(draft, staged, names, **shards)
    return Explanation(
        name=name,
        lanes=axis.size,
        arguments=arguments,
        outputs=outputs,
        equations=listing.equations,
        findings=find_findings(draft),
        memory=memory,
        compiled=counted,
        timings=timings,
        unmeasured=unmeasured,
        outside=attribution.tallies.get(None, Tally()).work,
        options=options,
        devices=devices,
    )
