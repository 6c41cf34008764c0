"""`explain`: what batching did to a function, and the `Explanation` that it returns."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, Unpack, cast

import jax

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.eager import whatever_jit
from batchax.explain.account import Account
from batchax.explain.compiled import counted_by_compiler, find_devices, find_memory
from batchax.explain.findings.batch import find_findings
from batchax.explain.findings.operations import FindingContext
from batchax.explain.listing import Attribution, Listing, Names, Tally, arguments_of, outputs_of
from batchax.explain.measure import as_it_is, check_values, measure_alone
from batchax.explain.measure import measure as measure_ways
from batchax.explain.page import as_embedded_page, as_page
from batchax.explain.text import as_text
from batchax.frontend.batched import Batched
from batchax.frontend.in_axes import check_in_axes
from batchax.frontend.options import check_callable, check_flags
from batchax.frontend.outputs import check_out_axes
from batchax.jaxprs.error_format import count, name_of
from batchax.jaxprs.types import AxesTree
from batchax.staging import Staged, stage
from batchax.vmap import MoreOptions, find_vmap, vmap


class Explanation(Account):
    """Describes how a function was batched and what it costs, from `explain`.

    ``str()`` has the most expensive findings and operations, in about 60 lines. `details` returns
    all of them. `to_html` writes a page, which a notebook displays.

    Attributes:
      name: The name of the function.
      lanes: The size of the batch.
      arguments: The arguments of the function, by the names of a call.
      outputs: The results of the function.
      equations: An entry for each equation of one example. `Equation.parts` has those of loops and
        branches.
      findings: Avoidable costs, most expensive first.
      memory: The memory of the compiled program; None if it could not be compiled.
      outside: The work besides the equations: placing outputs, slicing chunks.
      compiled: FLOPs and bytes of the compiled program by XLA's cost analysis, in which fused
        operations write nothing and a loop counts as one step; or None.
      options: The options of `vmap`.
      timings: The measured times, with `measure`.
      unmeasured: The batch sizes and advised options that `time_limit` left out.
      devices: The devices that lanes are sharded over, or None. Then `memory` and `compiled` are
        those of one device.

    Example:
      >>> def f(m, x):
      ...     return jax.lax.cond(x > 0, jnp.linalg.inv, lambda m: m, m)
      >>> explanation = bx.explain(f, (None, 0))(jnp.eye(30), jnp.arange(8.0))
      >>> explanation
      <Explanation of f: 8 lanes, ... equations, 1 finding; print it, or .to_html(path)>
      >>> for finding in explanation.findings:
      ...     print(finding.message)
      `cond` runs each of its 2 branches for all 8 lanes: ...
    """

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        parts = (
            count(n, what)
            for n, what in (
                (self.lanes, "lane"),
                (sum(1 for _ in self.walk()), "equation"),
                (len(self.findings), "finding"),
            )
        )
        return f"<Explanation of {self.name}: {', '.join(parts)}; print it, or .to_html(path)>"

    def _repr_html_(self) -> str:
        return as_embedded_page(self)

    def details(self) -> str:
        """Returns the whole explanation as text: all findings and equations.

        `print(explanation)` shows the most expensive ones, in about 60 lines.

        Example:
          >>> print(bx.explain(jnp.sin)(jnp.ones(8)).details())
          sin, batched over 8 lanes
          ...
        """
        return as_text(self, details=True)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes an HTML page of the explanation, which opens offline.

        Args:
          path: The file to write, a str or a path.

        Example:
          >>> bx.explain(jnp.sin)(jnp.ones(8)).to_html("sin.html")
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(as_page(self))


P = ParamSpec("P")


@_compat.api_boundary
def explain(
    fun: Callable[P, Any],
    in_axes: AxesTree = 0,
    out_axes: AxesTree = 0,
    *,
    compile: bool = True,
    measure: bool = False,
    time_limit: float = 60.0,
    **vmap_options: Unpack[MoreOptions],
) -> Batched[P, Explanation, Explanation]:
    """Explains how `vmap` batches a function, what that costs, and what to change.

    Example:
      >>> def f(M, v):
      ...     return jnp.tanh(M @ v).sum()
      >>> explanation = bx.explain(f, in_axes=(None, 0))(jnp.ones((3, 5)), jnp.ones((8, 5)))
      >>> print(explanation)
      f, batched over 8 lanes
      ...
      >>> [equation.primitive for equation in explanation.equations]
      ['dot_general', 'tanh', 'reduce_sum']

    Without `measure`, nothing runs. The function is traced, batched, and compiled as by
    ``jax.jit``. Each operation is attributed to the equation of one example, and its line, that it
    comes from.

    Args:
      fun: A function of one example. Or, without other arguments, the result of `vmap`, or of
        `jax.jit`, `jax.grad`, and the like of it. The cost of a gradient counts for the lines of
        the function.
      in_axes, out_axes: As for `vmap`. With `in_axes` None and no other arguments, `fun` takes the
        whole batch and calls a `vmap`.
      compile: Whether to compile the batched program, for the peak memory and some findings. It
        takes most of the time.
      measure: Whether to run the batched function, and to time it next to a loop over examples,
        with the advice of findings, and in chunks of several sizes. Advice that is not faster is
        removed. Arguments must be arrays.
      time_limit: The seconds after which `measure` starts no more runs.
      **vmap_options: Other options of `vmap`, such as ``batch_size``.

    Returns:
      A function of the arguments of the batched function, or of ``jax.ShapeDtypeStruct`` in their
      place, that returns an `Explanation`. The lengths of a `Ragged` of these are traced.

    Raises:
      ArgumentTypeError: (a TypeError) With `measure`, an argument has no values.
      UnsupportedError: (a NotImplementedError) With `measure`, the function has a collective over
        an axis around this call.
      BatchaxError: An option or argument does not fit, as for `vmap`.
    """
    check_callable("explain", "a function of one example, or what vmap made of one", fun)
    check_in_axes(fun, in_axes, "explain")
    check_out_axes(out_axes)
    check_flags(compile=compile, measure=measure)
    plain = in_axes in (0, None) and (out_axes, vmap_options) == (0, {})
    inside = find_vmap(fun, in_axes) if plain else None
    if inside is None:
        batched = vmap(fun, in_axes, out_axes, **vmap_options)
        ways = _Ways(fun, in_axes, out_axes, dict(vmap_options))
    else:
        batched, options = inside.whole, dict(inside.options)
        axes = options.pop("in_axes"), options.pop("out_axes")
        ways = _Ways(inside.fun, *axes, options, not inside.alone, inside.jitted)
    return cast(Any, _of_batched(batched, ways, compile, time_limit if measure else None))


@dataclass(frozen=True)
class _Ways:
    """Holds a function of one example, and how it is batched: as `vmap` was given it."""

    fun: Callable[..., Any]
    in_axes: Any
    out_axes: Any
    options: dict[str, Any]
    # Whether what is explained is more than the batched function, such as its gradient, and so
    # cannot be run in another way to compare.
    alone: bool = False
    jitted: bool = False  # whether `jax.jit` is around all of it: lengths of rows are traced then


def _of_batched(
    batched: Callable[..., Any], ways: _Ways, compile: bool, time_limit: float | None
) -> Callable[..., Explanation]:
    """Explains a call of `batched`; and measures it, if there is a limit for that."""

    @_compat.api_boundary
    @whatever_jit
    def explained(*args: Any, **kwargs: Any) -> Explanation:
        if time_limit is not None:
            check_values(batched, args, kwargs)
        start = time.monotonic()
        lengths_known = not ways.jitted
        staged = stage(batched, args, kwargs, _parameters(batched), lengths_known=lengths_known)
        staged.check_vmap("explain")
        name = name_of(ways.fun)
        around = _compat.named_axes(staged.traced.jaxpr.effects)
        if around and time_limit is not None:
            raise UnsupportedError(
                "measure=True runs the function, but it communicates over the axis "
                f"{min(map(repr, around))} of a vmap or shard_map around the call of explain. "
                "Remove measure, or explain the whole function with that axis."
            )
        # What meets over an axis around this can only be compiled as a part of what maps that.
        compiles = not around and (compile or time_limit is not None)
        compiled = staged.compile() if compiles else None
        made = time.monotonic() - start
        explanation, context = _explain(name, staged, compiled if compile else None, ways.options)
        if time_limit is None:
            return explanation
        assert compiled is not None
        size = ways.options.get("batch_size")
        way = as_it_is(size, staged, compiled, made)
        time_left = time_limit - (time.monotonic() - start)
        if ways.alone:
            timings, left, tried = measure_alone(way, time_left), (), ()
        else:
            how = ways.fun, ways.in_axes, ways.out_axes, ways.options
            advised = [f.advice for f in explanation.findings if f.advice]
            given = args, kwargs, advised, time_left, lengths_known
            timings, left, tried = measure_ways(way, *how, *given)
        # Once more: what was measured decides which advice is given.
        findings = find_findings(replace(context, timings=timings, tried=tried))
        return replace(explanation, timings=timings, unmeasured=left, findings=findings)

    return explained


def _parameters(fun: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # of some built-in functions nothing is known
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional]


def _explain(
    name: str,
    staged: Staged,
    compiled: jax.stages.Compiled | None,
    options: dict[str, Any],
) -> tuple[Explanation, FindingContext]:
    """Makes an explanation without what is measured, and what its findings are made from."""
    recorder, program = staged.recorder, staged.traced.jaxpr
    attribution = Attribution(recorder, program)
    example = recorder.programs[0] if recorder.programs else None
    # Of ragged rows the axis of all of them: a program may be of one bucket.
    axis = next((details["axis"] for about, details in recorder.facts if about == "rows"), None)
    if axis is None:
        axis = example.axis if example else recorder.records[0].axis
    names = Names()
    arguments = arguments_of(staged, example, names)
    listing = Listing(recorder, attribution, names, axis.size)
    # The last one is of the outermost call.
    placed = next(details for about, details in recorder.facts[::-1] if about == "outputs")
    outputs = () if example is None else outputs_of(example, names, **placed)
    memory = counted = None
    if compiled is not None:
        memory = find_memory(compiled)
        counted = counted_by_compiler(compiled)
    shards = next((details for about, details in recorder.facts if about == "shards"), None)
    context = FindingContext(
        equations=listing.equations,
        numbers=listing.numbers,
        tallies=attribution.tallies,
        recorder=recorder,
        options=dict(options),
        lanes=axis.size,
        each=axis.size if shards is None else shards["shards"].each,
        compiled=compiled,
        memory=memory,
        arguments=arguments,
        outputs=outputs,
    )
    devices = None if shards is None else find_devices(context, staged, names, **shards)
    explanation = Explanation(
        name=name,
        lanes=axis.size,
        arguments=arguments,
        outputs=outputs,
        equations=listing.equations,
        findings=find_findings(context),
        memory=memory,
        compiled=counted,
        outside=attribution.tallies.get(None, Tally()).work,
        options=dict(options),
        devices=devices,
    )
    return explanation, context
