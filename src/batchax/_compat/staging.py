"""Traces functions to jaxprs, what tracers know of it, and what JAX caches."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import jax
import jax.core
import jax.extend.core as jex_core
import jax.extend.core.primitives as jex_primitives
from jax._src.api_util import InternalFloatingPointError, fun_sourceinfo
from jax._src.config import trace_context as jax_trace_context
from jax._src.core import add_explicit_mesh_axis_names, extend_axis_env_nd, get_axis_env
from jax._src.state.discharge import discharge_state
from jax._src.util import register_cache, weakref_cache_key_types
from jax.extend import linear_util
from jax.interpreters import partial_eval

from batchax._compat.jaxprs import (
    ClosedJaxpr,
    Dim,
    Params,
    Primitive,
    Value,
    Values,
    Var,
    check_vma,
    checked_axes,
    close,
    varying_as,
)

T = TypeVar("T")

_DEBUG_INFO = jax.api_util.debug_info("vmap", lambda: None, (), {})


def stage(
    fun: Callable[..., Any],
    avals: Sequence[Any],
    axis_env: Sequence[tuple[Hashable, Any]] = (),
    arg_names: Sequence[str] | None = None,
    transformation: str = "vmap",
    selecting: bool = False,
) -> ClosedJaxpr:
    """Traces `fun` like ``jax.make_jaxpr``, in half the time.

    `fun` maps flat arguments to a list. `axis_env` holds names and sizes of mapped axes;
    `arg_names` and `transformation` are for messages. `selecting`: what a predicate selects varies
    over a mesh as the predicate does.
    """
    if arg_names is None:  # to ask the signature for them takes as long as a few operations
        arg_names = [f"args[{i}]" for i in range(len(avals))]
    debug_info = _DEBUG_INFO._replace(
        traced_for=transformation, func_src_info=fun_sourceinfo(fun), arg_names=tuple(arg_names)
    )
    if checked_axes():
        fun = _through(fun, lambda trace: _InShardMap(trace, selecting))
    wrapped = linear_util.wrap_init(fun, debug_info=debug_info)
    with extend_axis_env_nd(list(axis_env)) if axis_env else nullcontext():
        jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, list(avals))
    return close(jaxpr, consts)


def stage_described(
    fun: Callable[..., tuple[list[Any], Any]], avals: Sequence[Any], **how: Any
) -> tuple[ClosedJaxpr, Any]:
    """Traces a function that returns a list and its description; both are returned."""
    return described(fun, lambda arrays: stage(arrays, avals, **how))


def described(
    fun: Callable[..., tuple[list[Any], Any]], use: Callable[[Callable[..., list[Any]]], T]
) -> tuple[T, Any]:
    """Returns what `use` makes of the arrays of `fun`, and how `fun` describes them."""
    # JAX traces, batches, and differentiates functions of arrays only, and may call one several
    # times: the last call counts.
    descriptions: list[Any] = []

    def arrays(*args: Value) -> list[Any]:
        outs, description = fun(*args)
        descriptions.append(description)
        return outs

    named_after(arrays, fun)
    return use(arrays), descriptions[-1]


def named_after(made: Callable[..., Any], fun: Callable[..., Any]) -> None:
    """Has JAX's messages name `fun` where `made` is traced, as ``functools.wraps`` does."""
    # What that stands for itself, which JAX would look for at each staging.
    vars(made)["__wrapped__"] = getattr(fun, "__wrapped__", fun)


class _Around:
    """Passes what is traced on to another trace; subclasses change some of it."""

    # Putting a trace in front of another is not public.
    def __init__(self, trace: jax.core.Trace) -> None:
        self._trace = trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trace, name)


def _through(
    fun: Callable[..., Any], around: Callable[[jax.core.Trace], _Around]
) -> Callable[..., Any]:
    """Has operations of `fun` go through `around` the trace that is active."""

    @functools.wraps(fun)
    def run(*args: Value) -> Any:
        with jex_core.take_current_trace() as trace:
            passed: Any = around(trace)
        with jex_core.set_current_trace(passed):
            return fun(*args)

    return run


class _KeepingCalls(_Around):
    """Traces each call of ``jax.jit`` as a call."""

    # JAX inlines some of its functions, and then nothing shows that they were one call, of which
    # only the results are checked for NaN.
    def process_primitive(self, primitive: Primitive, operands: Values, params: Params) -> Value:
        if primitive is jex_primitives.jit_p:
            inline = params["inline"]  # a bool, since 0.12 one of several words
            params = {**params, "inline": getattr(type(inline), "AUTO", False)}
        return self._trace.process_primitive(primitive, operands, params)


def keeping_calls(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Traces each ``jax.jit`` in `fun` as a call, whatever its `inline` option is."""
    return _through(fun, _KeepingCalls)


class _KnownAtOnce(_Around):
    """Passes operations on values that are differentiated outside to that derivative."""

    # Their results keep values that Python may branch on. ``jax.ensure_compile_time_eval`` computes
    # at once only operations without tracers among their operands.
    def __init__(self, trace: jax.core.Trace, stays: Callable[[Primitive, Any], bool]) -> None:
        super().__init__(trace)
        self._stays = stays

    def __getattr__(self, name: str) -> Any:
        with_rules = name in ("process_custom_jvp_call", "process_custom_vjp_call")
        return functools.partial(self._called, name) if with_rules else getattr(self._trace, name)

    def _known(self, operands: Values) -> list[Any]:
        """Returns the tracers among operands if all are of derivatives; else none."""
        tracers = [x for x in operands if isinstance(x, jax.core.Tracer)]
        return tracers if all(map(_is_derived, tracers)) else []

    def process_primitive(self, primitive: Primitive, operands: Values, params: Params) -> Value:
        tracers = self._known(operands)
        if not tracers or self._stays(primitive, params):
            return self._trace.process_primitive(primitive, operands, params)
        with within_trace_of(tracers):
            return primitive.bind(*operands, **params)

    def _called(self, method: str, *call: Any, **how: Any) -> Any:
        """Calls a function with derivative rules, whose operands come last."""
        tracers = self._known(call[-1])
        if not tracers:
            return getattr(self._trace, method)(*call, **how)
        with within_trace_of(tracers), jex_core.take_current_trace() as trace:
            own: Any = trace
            with jex_core.set_current_trace(own):
                return getattr(own, method)(*call, **how)


def known_at_once(
    fun: Callable[..., Any], stays: Callable[[Primitive, Any], bool]
) -> Callable[..., Any]:
    """Computes what depends on no argument of `fun` at once while it is traced.

    That includes differentiated values. Operations for which `stays` returns True are traced.
    """

    def known(*args: Value) -> Any:
        with jax.ensure_compile_time_eval():
            return fun(*args)

    return _through(functools.wraps(fun)(known), lambda trace: _KnownAtOnce(trace, stays))


def inlined(program: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Runs `program`; where a program is traced, its equations are inlined."""
    # This takes a third of the time of binding them again. Public JAX inlines
    # ``jax.jit(inline=True)``, whose call takes as long as it saves.
    return jex_primitives.jit_p.bind(*operands, **_of_jit(program, _OF_JIT))


def as_one_call(jaxpr: Any) -> Any:
    """Wraps a jaxpr, open or closed, in one call of ``jax.jit``."""
    if not jaxpr.eqns:
        return jaxpr
    outs = [jex_core.Var(v.aval) for v in jaxpr.outvars]
    params = _of_jit(close(jaxpr), {**_OF_JIT, "inline": _A_CALL.params["inline"]})
    call = _A_CALL.replace(invars=list(jaxpr.invars), outvars=outs, params=params)
    call = call.replace(effects=jaxpr.effects, ctx=jaxpr.eqns[0].ctx)
    return jaxpr.replace(eqns=[call], outvars=outs)


def _of_jit(program: ClosedJaxpr, params: dict[str, Any]) -> Params:
    ins, outs = len(program.in_avals), len(program.out_avals)
    counts = {"in_shardings": ins, "in_layouts": ins, "donated_invars": ins}
    counts |= {"out_shardings": outs, "out_layouts": outs}
    return {**params, **{k: params[k] * count for k, count in counts.items()}, "jaxpr": program}


(_A_CALL,) = jax.make_jaxpr(jax.jit(lambda x: -x))(0.0).jaxpr.eqns
_inline = type(_A_CALL.params["inline"])  # a bool, since 0.12 one of several words
_OF_JIT = {**_A_CALL.params, "inline": getattr(_inline, "JAX_EARLY", True)}


class _InShardMap(_Around):
    """Traces in ``shard_map`` with the types that ``jax.vmap`` would have."""

    # The lane index does not vary over the mesh, though JAX types it so, and cannot cast to it.
    # With `selecting`, results of ``cond`` and ``while`` vary as the predicate does, where JAX uses
    # the types of their programs.
    def __init__(self, trace: jax.core.Trace, selecting: bool) -> None:
        super().__init__(trace)
        self._selecting = selecting

    def process_primitive(self, primitive: Primitive, operands: Values, params: Params) -> Value:
        process = self._trace.process_primitive
        if primitive is jax.lax.axis_index_p and params["axis_name"] not in checked_axes():
            with check_vma(False):
                return process(primitive, operands, params)
        outs = process(primitive, operands, params)
        if not self._selecting or primitive not in (jex_primitives.cond_p, jex_primitives.while_p):
            return outs
        branches = primitive is jex_primitives.cond_p
        by = jax.typeof(operands[0]) if branches else params["cond_jaxpr"].out_avals[0]
        with jex_core.set_current_trace(self._trace):
            return [varying_as(x, by) for x in outs]


def names_in_scope() -> list[tuple[Hashable, Any]]:
    """Returns names and sizes of mapped axes that collectives may use here."""
    return list(get_axis_env().axis_sizes.items())


def named_scope(name: Hashable | None, size: Dim) -> AbstractContextManager[None]:
    """Allows collectives over `name` inside."""
    return extend_axis_env_nd([] if name is None else [(name, size)])


def mesh_axis_taken(mesh_axis: Hashable) -> AbstractContextManager[None]:
    """Prevents what is traced inside from being sharded over `mesh_axis` itself."""
    if mesh_axis is None:
        return nullcontext()
    return add_explicit_mesh_axis_names(mesh_axis if isinstance(mesh_axis, tuple) else (mesh_axis,))


def without_references(program: ClosedJaxpr, name: Hashable | None, size: Dim) -> ClosedJaxpr:
    """Turns references that `program` creates into values; it may use the axis `name`."""
    # By default JAX also expands operations that it lowers early, which loses their derivatives. In
    # loops and branches that use references it does so in any case.
    with named_scope(name, size):
        return discharge_state(program, lower=False)


def tracing() -> bool:
    """Returns whether operations are traced here, whatever their operands."""
    # The class of the trace that computes operations at once is private.
    return _kind_of_trace() != "EvalTrace"


def staging() -> bool:
    """Returns whether JAX traces a program here, with no transformation in between."""
    return _kind_of_trace() == "DynamicJaxprTrace"


def compiled_later() -> bool:
    """Returns whether operations here become part of a program, through any transformations."""
    # Otherwise each operation is compiled separately, under derivatives, too.
    return any(type(trace).__name__ == "DynamicJaxprTrace" for trace in _traces_around())


def _traces_around() -> Iterator[Any]:
    with jex_core.take_current_trace() as trace:
        around: Any = trace
    return _with_outer(around)


def _with_outer(around: jax.core.Trace | None) -> Iterator[Any]:
    """Yields a trace and those around it, which is not public."""
    while around is not None:
        while isinstance(around, _Around):
            around = around._trace
        yield around
        around = getattr(around, "parent_trace", None)


def _kind_of_trace() -> str:
    with jex_core.take_current_trace() as trace:
        return type(trace).__name__


def value_of(tracer: jax.core.Tracer) -> jax.Array | None:
    """Returns the array behind a tracer, if any: differentiated tracers have values."""
    # Private; publicly ``bool(tracer)`` reads it. A NumPy array is on no device, hence None.
    value = tracer.to_concrete_value()
    return value if isinstance(value, jax.Array) else None


def array_behind(x: Value) -> jax.Array | None:
    """Returns the array that `x` is, or that a tracer of derivatives or batches holds, if any."""
    # The attributes of tracers are private.
    while isinstance(x, jax.core.Tracer):
        x = getattr(x, "primal", getattr(x, "val", None))
    return x if isinstance(x, jax.Array) else None


def is_live(tracer: jax.core.Tracer) -> bool:
    """Returns whether the trace of `tracer` is active around the code that runs now."""
    # The trace of a tracer is not public.
    own = getattr(tracer._trace, "tag", tracer._trace)
    return any(getattr(trace, "tag", trace) is own for trace in _traces_around())


def within_trace_of(tracers: Iterable[Any]) -> AbstractContextManager[Any]:
    """Runs operations in the innermost of the traces of `tracers`."""
    # It need not be active: derivative rules run outside of the derivative.
    traces = [x._trace for x in tracers]
    if not traces:
        return nullcontext()
    return jex_core.set_current_trace(max(traces, key=lambda t: len(list(_with_outer(t)))))


def is_inside(tracer: jax.core.Tracer, trace: jax.core.Trace) -> bool:
    """Returns whether the trace of `tracer` was started inside `trace`, if JAX knows."""
    (trace, *_), (own, *outer) = map(list, map(_with_outer, (trace, tracer._trace)))
    return own is not trace and any(t is trace for t in outer)


def any_inside(values: Values, trace: jax.core.Trace) -> bool:
    """Returns whether `is_inside` is true of any of these values."""
    # Values of one trace are alike, and there are few traces.
    one_of_each = {x._trace: x for x in values if isinstance(x, jax.core.Tracer)}
    return any(is_inside(x, trace) for x in one_of_each.values())


def is_left(tracer: jax.core.Tracer) -> bool:
    """Returns whether the code that runs now is outside of the derivative of `tracer`."""
    # With a mesh or the like in between, JAX does not know the enclosing trace: then False.
    if staged_variable(tracer) is not None or is_live(tracer):
        return False
    *_, last = traces = list(_traces_around())
    if type(last).__name__ == "DynamicJaxprTrace" and _is_derived(tracer):
        # JAX traces the derivative of a jitted function inside of nothing: it is cached for other
        # calls, and so holds no value of this one.
        return True
    around = [getattr(trace, "tag", trace) for trace in traces]
    _, *outer = _with_outer(tracer._trace)
    return any(getattr(trace, "tag", trace) is t for trace in outer for t in around)


def _is_derived(tracer: jax.core.Tracer) -> bool:
    return type(tracer).__name__ in ("JVPTracer", "LinearizeTracer")


def noting_trace(fun: Callable[..., T], traces: list[Any]) -> Callable[..., T]:
    def run(*args: Value) -> T:
        with jex_core.take_current_trace() as trace:
            traces.append(trace)
        return fun(*args)

    named_after(run, fun)
    return run


def is_over(tracer: jax.core.Tracer) -> bool:
    """Returns whether the trace of a tracer has ended, from JAX 0.11.1 on."""
    return not tracer._trace.is_valid()


def reject_escaped(tracer: jax.core.Tracer) -> None:
    """Raises JAX's error for a tracer whose trace has ended."""
    with jax.ensure_compile_time_eval():  # where nothing may be traced
        jax.lax.optimization_barrier(tracer)


def staged_variable(x: object) -> Var | None:
    # Tracers only have it as a private attribute.
    return getattr(x, "val", None) if type(x).__name__ == "DynamicJaxprTracer" else None


@contextmanager
def usable(values: Iterable[Any]) -> Iterator[None]:
    """Allows tracing a function that closes over `values` of traces that may have ended."""
    # Since 0.11.1, JAX rejects those of ``linearize`` as constants, and there is no public way to
    # announce that values replace them later. Before, no trace has ended here.
    traces = {x._trace for x in values if isinstance(x, jax.core.Tracer)}
    with _lock:
        over = [t for t in traces if t in _in_use or not t.is_valid()]
        for trace in over:
            _in_use[trace] = _in_use.get(trace, 0) + 1
            trace._invalidated = False
    try:
        yield
    finally:
        with _lock:
            for trace in over:
                _in_use[trace] -= 1
                if not _in_use[trace]:  # in no other thread either
                    del _in_use[trace]
                    trace._invalidated = True


_in_use: dict[Any, int] = {}

_lock = threading.RLock()


Kind = TypeVar("Kind", bound=type)

FoundNaN = InternalFloatingPointError


def trace_context() -> Hashable:
    """Returns a key for contexts in which functions are traced and compiled alike."""
    return jax_trace_context()


def empty_with_caches(cache: Any) -> None:
    """Has JAX call ``cache.cache_clear()`` when it clears caches. It holds `cache` weakly."""
    register_cache(cache, f"batchax: {cache.of}")


def held_weakly(cls: Kind) -> Kind:
    """Keeps JAX's caches from holding parameters of this class."""
    # They hold a program, or a function of the user, and so all arrays that it closes over.
    weakref_cache_key_types.add(cls)
    return cls
