"""The only module where batchax touches private JAX or differs by JAX version.

Each name below says why it cannot be had from public JAX. Nothing else in the
package imports from ``jax._src`` or asks which version of JAX is running.

Unless it says otherwise, what is here serves every version from 0.10.2 to 0.12. Where they
differ, it says since when. What is there for the older of two can go when ``pyproject.toml``
asks for the newer: with Python 3.11 at the latest, for which 0.10.2 is the last JAX.
``tests/test_compat.py`` makes an instance of all of it, and says what a new version changed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import jax
import jax.core
import jax.extend.core as jex_core
import jax.extend.core.primitives as jex_primitives
import numpy as np

# Whether types inside ``shard_map`` say over which axes of the mesh a value varies.
from jax._src.config import _check_vma as check_vma

# ``jax.make_jaxpr`` is the only public way to stage with a named axis in scope; it
# wraps its argument in a new ``jit`` at each call, which costs more than staging a
# small function does. This is the one piece of it that cannot be had otherwise.
# The other tells ``jax.shard_map`` which axis of the mesh the batch is sharded over.
# The third says which named axes there are, for what is staged later than now.
from jax._src.core import add_explicit_mesh_axis_names, extend_axis_env_nd, get_axis_env

# What a third party's batching rule did is known only to the tracer it returned.
# Which types have a batch form of their own (sparse matrices) JAX lets one say, not ask.
from jax._src.interpreters.batching import (
    BatchTracer,
    from_elt_handlers,
    to_elt_handlers,
    vmappables,
)

# Exported nowhere, and absent from every table, as it has no operands to batch.
from jax._src.lax.control_flow.conditionals import platform_index_p

# The primitive of ``jax.shard_map`` is in none of the tables that JAX exports.
from jax._src.shard_map import shard_map_p

# A warning is filed under the user's line; publicly it can be had as text only.
from jax._src.source_info_util import user_frame

# JAX turns references into values where it lowers a program, and has no public spelling
# for it. What a primitive of our own runs, or is cut into parts, must be free of them before.
from jax._src.state.discharge import discharge_state
from jax.extend import linear_util, source_info_util
from jax.interpreters import batching, partial_eval

T = TypeVar("T")

Primitive = jex_core.Primitive
ClosedJaxpr = jex_core.ClosedJaxpr
JAXPR_TYPES = (jex_core.Jaxpr, jex_core.ClosedJaxpr)  # one class since JAX 0.11

current_name_stack = source_info_util.current_name_stack
name_stack_extended = source_info_util.transform_name_stack
current_source = source_info_util.current

# What JAX reports as the user's line is not to be one of ours.
source_info_util.register_exclusion(os.path.dirname(__file__))


def user_source(source_info: Any, outer_name_stack: Any) -> AbstractContextManager[None]:
    """Context under which emitted operations carry the user's line and names."""
    return source_info_util.user_context(
        source_info.traceback, name_stack=outer_name_stack + source_info.name_stack
    )


def user_line(source_info: Any, running: bool = False) -> str:
    """`file:line (function)` of the user's code that made an equation.

    Where there is none: "", or, if `running`, the line that is running now.
    """
    line = source_info_util.summarize(source_info)
    if line or not running:
        return line
    frame = _calling_frame()
    return f"{frame.filename}:{frame.lineno} ({frame.name})" if frame else ""


def user_file_and_line(source_info: Any) -> tuple[str, int]:
    """File and line of the user's code that made an equation, as warnings are filed under.

    Where there is none, of the line that is running now.
    """
    frame = user_frame(source_info.traceback)
    if frame is not None:
        return frame.file_name, frame.start_line
    frame = _calling_frame()
    return (frame.filename, frame.lineno or 0) if frame else ("<unknown>", 0)


# JAX forgets where a function was called from when it stages it: the line of an equation may be
# none of the user's, if what is batched is a function of JAX's itself. Then it is the call's.
_NOT_THE_USERS = tuple(
    os.path.dirname(path) if path.endswith("__init__.py") else path
    for path in (jax.__file__, __file__.replace("_compat.py", "__init__.py"),
                 contextlib.__file__, functools.__file__)
)  # fmt: skip


def _calling_frame() -> traceback.FrameSummary | None:
    """The innermost line of the user's that runs now."""
    for frame, line in traceback.walk_stack(None):
        code = frame.f_code
        if not code.co_filename.startswith(_NOT_THE_USERS):
            return traceback.FrameSummary(code.co_filename, line, code.co_qualname)
    return None


def tracing() -> bool:
    """Whether operations are being traced here, whatever their operands.

    The class of the trace that computes operations at once is private.
    """
    with jex_core.take_current_trace() as trace:
        return type(trace).__name__ != "EvalTrace"


def named_axes(effects: Any) -> set[Hashable]:
    """Names of the mapped axes that an equation with these effects uses.

    The effect type is private; it is recognised by its class name.
    """
    return {e.name for e in effects if type(e).__name__ == "NamedAxisEffect"}


_ANY_ARGUMENTS = inspect.signature(lambda *args: None)


def stage(
    fun: Callable[..., Any],
    avals: Sequence[Any],
    axis_env: Sequence[tuple[Hashable, Any]] = (),
    arg_names: Sequence[str] | None = None,
    transformation: str = "vmap",
    selecting: bool = False,
) -> ClosedJaxpr:
    """What ``jax.make_jaxpr(fun, axis_env=axis_env)(*avals)`` returns, in half the time.

    Args:
      fun: a function of flat arguments that returns a list.
      avals: the types of the arguments.
      axis_env: names and sizes of the mapped axes that `fun` may use.
      arg_names: what JAX's messages call the arguments.
      transformation: what they say the function is staged for.
      selecting: whether what a predicate selects is to vary over a mesh as the predicate does.
    """
    if arg_names is None:
        debug_info = jax.api_util.debug_info(transformation, fun, tuple(avals), {})
    else:  # to inspect the signature for them takes as long as staging a few operations
        debug_info = jax.api_util.debug_info(transformation, fun, (), {}, signature=_ANY_ARGUMENTS)
        debug_info = debug_info._replace(arg_names=tuple(arg_names))
    if checked_axes():
        fun = _in_shard_map(fun, selecting)
    with extend_axis_env_nd(list(axis_env)):
        jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(
            linear_util.wrap_init(fun, debug_info=debug_info), list(avals)
        )
    return close(jaxpr, consts)


def stage_described(
    fun: Callable[..., tuple[list[Any], Any]], avals: Sequence[Any], **how: Any
) -> tuple[ClosedJaxpr, Any]:
    """As `stage`, of a function that returns a list and what describes it; both are returned."""
    return described(fun, lambda arrays: stage(arrays, avals, **how))


def described(
    fun: Callable[..., tuple[list[Any], Any]], use: Callable[[Callable[..., list[Any]]], T]
) -> tuple[T, Any]:
    """What `use` makes of the arrays that `fun` returns, and what `fun` says of them.

    JAX takes functions of arrays alone, to stage them, batch them or differentiate them, and may
    call one more than once: the last call counts.
    """
    descriptions: list[Any] = []

    @functools.wraps(fun)
    def arrays(*args: Any) -> list[Any]:
        outs, description = fun(*args)
        descriptions.append(description)
        return outs

    return use(arrays), descriptions[-1]


class _InShardMap:
    """A trace inside ``shard_map`` that types what lanes do as ``jax.vmap`` would.

    Their index does not vary over the mesh, though JAX says that it varies over their axis, and
    cannot cast anything to. And what a predicate selects varies as the predicate does, if
    `selecting`: JAX types what ``cond`` and ``while`` return by what their programs return.
    JAX asks nothing of a trace but its methods; to put one in front of another is not public.
    """

    def __init__(self, trace: Any, selecting: bool) -> None:
        self._trace, self._selecting = trace, selecting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trace, name)

    def process_primitive(self, primitive: Primitive, operands: Any, params: Any) -> Any:
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


def _in_shard_map(fun: Callable[..., Any], selecting: bool) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with jex_core.take_current_trace() as trace:
            around: Any = _InShardMap(trace, selecting)
        with jex_core.set_current_trace(around):
            return fun(*args)

    return run


def is_live(tracer: Any) -> bool:
    """Whether `tracer` is of a trace that is going on, around what runs now.

    Neither the trace of a tracer nor the one around another is public.
    """
    own = getattr(tracer._trace, "tag", tracer._trace)
    with jex_core.take_current_trace() as trace:
        around: Any = trace
    while around is not None:
        if getattr(around, "tag", around) is own:
            return True
        around = getattr(around, "parent_trace", None)
    return False


@contextmanager
def usable(values: Iterable[Any]) -> Iterator[None]:
    """While a function is staged that closes over `values`, of traces that may be over.

    Since 0.11.1 JAX refuses to take those of ``linearize`` as constants, and there is no public
    way to tell it that they will be replaced by values. Before, no trace here is over.
    """
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


def close(jaxpr: Any, consts: Any = ()) -> ClosedJaxpr:
    """A closed jaxpr from one that a parameter holds open (remat, shard_map).

    Since JAX 0.11 there is a single class and parameters are closed already: then the
    last line can go.
    """
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.with_consts(list(consts)) if consts else jaxpr  # pyright: ignore
    return ClosedJaxpr(jaxpr, list(consts))


def without_constants(jaxpr: Any) -> Any:
    """`jaxpr` without the values of its constants, which since JAX 0.12 are part of it."""
    consts = getattr(jaxpr, "consts", ())
    return jaxpr.with_consts([None] * len(consts)) if consts else jaxpr  # pyright: ignore


def is_reference(x: Any) -> bool:
    """Whether `x` is a mutable reference; the class of their types is private."""
    return hasattr(jax.typeof(x), "inner_aval")


def makes_references(effects: Any) -> bool:
    """Whether a program with these effects creates references.

    The effect type is private; it is recognised by its class name.
    """
    return any(type(e).__name__ == "InternalMutableArrayEffect" for e in effects)


def without_references(program: ClosedJaxpr, name: Hashable | None, size: Any) -> ClosedJaxpr:
    """`program`, which may use the axis `name`, with references it creates turned into values."""
    if not makes_references(program.effects):
        return program
    with named_scope(name, size):
        return discharge_state(program)


def weakly(x: Any) -> Any:
    """`x` with the weak type of a Python scalar, which no public function gives an array."""
    return jax.lax.convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=True, sharding=jax.typeof(x).sharding
    )


def scan_counts(params: Any) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are its carry.

    Since JAX 0.11 the parameters hold trees with a leaf for each operand; before, two numbers.
    """
    if "ft_in" in params:
        consts, carry, _ = map(len, params["ft_in"].unpack())
        return consts, carry
    return params["num_consts"], params["num_carry"]


def without_dead(program: ClosedJaxpr) -> ClosedJaxpr:
    """`program`, and the loops and branches in it, without what no output or effect needs.

    Only the module that partial evaluation is written in spells it.
    """
    jaxpr = constants_as_inputs(program.jaxpr)
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    count = len(jaxpr.invars) - len(program.jaxpr.invars)
    live = live.replace(constvars=live.invars[:count], invars=live.invars[count:])
    return close(live, program.consts)


def observed(effects: Any) -> bool:
    """Whether these effects of an equation are anything but the use of a named axis.

    That effect's type is private; it is recognised by its class name.
    """
    return any(type(e).__name__ != "NamedAxisEffect" for e in effects)


def platform_index(platforms: Any) -> Any:
    """The number of the platform that a program is compiled for.

    Only ``jax.lax.platform_dependent`` spells it, together with the branches.
    """
    return platform_index_p.bind(platforms=platforms)


def ordered_by_lane(effects: Any) -> bool:
    """Whether a program with these effects must run for one lane after another.

    So do input and output in a program that some lanes do not run, and whatever
    is to happen in order. The effect types are private; they are recognised by
    class name.
    """
    ordered = {"IOEffect", "OrderedIOEffect", "OrderedDebugEffect"}
    return any(type(e).__name__ in ordered for e in effects)


def calls_back(effects: Any) -> bool:
    """Whether a program with these effects calls Python where it can be seen; see above."""
    return ordered_by_lane(effects) or any(type(e).__name__ == "DebugEffect" for e in effects)


def written_inputs(jaxpr: Any) -> set[int]:
    """Which inputs of `jaxpr`, or of an equation, are references that it writes to.

    The effect types are private; they are recognised by class name.
    """
    writes = [e.input for e in jaxpr.effects if type(e).__name__ in {"WriteEffect", "AccumEffect"}]
    return {i for i, v in enumerate(jaxpr.invars) if v in writes}


def varying_as(x: Any, aval: Any) -> Any:
    """`x`, cast to vary over the axes of a ``shard_map`` mesh that `aval` varies over.

    Operations of JAX insert this cast themselves, primitives of our own do not.
    """
    return varying_over(x, varying_axes(aval))


def varying_alike(xs: Sequence[Any], like: Sequence[Any] = ()) -> list[Any]:
    """`xs`, cast to vary over every mesh axis that any of them, or of `like`, varies over."""
    axes = frozenset().union(*(varying_axes(jax.typeof(x)) for x in (*xs, *like)))
    return [varying_over(x, axes) for x in xs]


def varying_over(x: Any, axes: frozenset[Hashable]) -> Any:
    """`x`, cast to vary over these axes of a mesh, too; references stay as they are."""
    missing = axes - varying_axes(jax.typeof(x))
    if not missing or is_reference(x):
        return x
    return jax.lax.pcast(x, tuple(missing), to="varying")


def type_varying_over(aval: Any, axes: frozenset[Hashable]) -> Any:
    """The type `aval` of values that vary over these axes of a mesh, too."""
    return with_varying_axes(aval, varying_axes(aval) | axes)


def with_varying_axes(aval: Any, axes: frozenset[Hashable]) -> Any:
    """The type `aval` of values that vary over these axes of a mesh.

    No public function makes a type from another with this changed.
    """
    if axes == varying_axes(aval):
        return aval
    if hasattr(aval, "inner_aval"):
        return aval.update(inner_aval=with_varying_axes(aval.inner_aval, axes))
    if aval.sharding.mesh.empty:  # of a number, or what was staged without a mesh
        mesh = jax.sharding.get_abstract_mesh()
        aval = aval.update(sharding=jax.sharding.NamedSharding(mesh, aval.sharding.spec))
    return aval.update(manual_axis_type=aval.mat.update(varying=axes))


def checked_axes() -> frozenset[Hashable]:
    """The axes of the mesh of the ``shard_map`` around over which types say what varies.

    Whether it was called with ``check_vma`` no public function says.
    """
    if not check_vma.value:
        return frozenset()
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def scalar_like(aval: Any, dtype: Any) -> Any:
    """The type of a scalar that varies over the same mesh axes as values of type `aval`."""
    sharding = aval.sharding.update(spec=jax.sharding.PartitionSpec())
    return aval.update(shape=(), dtype=dtype, weak_type=False, sharding=sharding)


def varying_axes(aval: Any) -> frozenset[Hashable]:
    """The axes of a ``shard_map`` mesh that a value of this type varies over.

    Types do not say so publicly.
    """
    aval = getattr(aval, "inner_aval", aval)
    return aval.mat.varying if hasattr(aval, "mat") else frozenset()


def find_primitive(name: str) -> Primitive | None:
    """The primitive JAX calls `name`, from any of the tables that JAX exports.

    Some primitives (``pure_callback``, ``random_wrap``, ...) are exported
    nowhere by themselves but are keys of the public table of batching rules.
    """
    global _tables
    tables = len(batching.fancy_primitive_batchers)
    if name not in _found and tables != _tables:  # a module imported since may have brought it
        _found.update({n: p for n, p in primitives_by_name().items() if n not in _found})
        _tables = tables
    return _found.get(name)


_found: dict[str, Primitive] = {}
_tables = 0


def is_namesake(primitive: Primitive) -> bool:
    """Whether `primitive` is another one than that which JAX calls by its name."""
    return find_primitive(primitive.name) not in (None, primitive)


def batched_by_jax(x: Any) -> tuple[Any, int | None]:
    """A value inside a function under ``jax.vmap``, and where its batch axis is.

    Returned from that function it could only be placed at an axis: whether it is
    batched at all, which rules of third parties decide, would be lost.
    """
    with jex_core.take_current_trace() as trace:
        if isinstance(x, BatchTracer) and x._trace is trace:
            return x.val, x.batch_dim
    return x, None


def has_own_batches(x: Any) -> bool:
    """Whether `x` is of a type that says itself what a batch of it is, and an example of one."""
    return type(x) in vmappables


def own_batches(x: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The functions that take such a batch apart for one example, and put one together.

    There is a public function to register them, and none to ask for them.
    """
    return to_elt_handlers[type(x)], from_elt_handlers[type(x)]


def type_of_batch_axis(x: Any) -> type:
    """Of what type the axis of such a batch is."""
    return vmappables[type(x)][0]


def types_of_batch_axes() -> set[type]:
    """Those of all such types, but for ints."""
    return {spec_type for spec_type, _ in list(vmappables.values())} - {int}


_lent: set[type] = set()


def lend_batches(
    type: type, spec_type: type, to_example: Callable[..., Any], to_batch: Callable[..., Any]
) -> None:
    """Tells JAX what a batch of `type` is, unless it knows from somebody else."""
    if type not in vmappables or type in _lent:
        batching.register_vmappable(type, spec_type, int, to_example, to_batch, None)
        _lent.add(type)


def forget_batches(type: type) -> None:
    """Undoes `lend_batches`."""
    if type in _lent:
        _lent.discard(type)
        # `batching.unregister_vmappable` is there, and does nothing on the JAX of today.
        for table in (vmappables, to_elt_handlers, from_elt_handlers):
            table.pop(type, None)


def jax_has_rule(primitive: Primitive) -> bool:
    """Whether JAX itself can batch `primitive`."""
    return primitive in batching.fancy_primitive_batchers or primitive.name in {
        "custom_jvp_call",
        "custom_vjp_call",
        "shard_map",
    }


def primitives_by_name() -> dict[str, Primitive]:
    """The primitives in the tables that JAX exports, by the names JAX gives them."""
    found: dict[str, Primitive] = {}
    for module in (jex_primitives, jax.lax, jax.lax.linalg):
        for value in vars(module).copy().values():  # which a thread may be adding to
            if isinstance(value, Primitive):
                found[value.name] = value
    for primitive in (*batching.fancy_primitive_batchers.copy(), shard_map_p):
        found.setdefault(primitive.name, primitive)  # what others call the same comes later
    return found


def constants_as_inputs(jaxpr: Any) -> Any:
    """`jaxpr`, open or closed, with its constants as leading inputs and none left.

    Since 0.11 JAX does so already for the rules of custom derivatives. What this package stages
    itself, and hands on without constants, needs it with every version.
    """
    if not jaxpr.constvars:
        return jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def hoist_constants(body: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """`body` with its constants as leading inputs, and the constants.

    Some primitives (remat, calls) take a body without constants only.
    """
    return close(constants_as_inputs(body.jaxpr)), list(body.consts)


def staged_variable(x: Any) -> Any:
    """The variable that `x` stands for in the program it was staged in, or None.

    Tracers say so only through a private attribute.
    """
    return getattr(x, "val", None) if type(x).__name__ == "DynamicJaxprTracer" else None


def wrapped_parts(x: Any) -> list[Any]:
    """What a wrapped function of JAX holds; its class has no public accessors.

    Arguments that its `nondiff_argnums` set apart are in boxes, recognised by their class name.
    """
    if isinstance(x, linear_util.WrappedFun):
        return [x.f, x.transforms, x.params]
    return [x.val] if type(x).__name__ == "Unhashable" else []


def is_tracing_state(x: Any) -> bool:
    """Whether `x` is what JAX keeps, with a derivative rule, of the trace it was staged in.

    It has no say in what the rule does. The types are private; they are recognised by name.
    """
    states = {"DynamicJaxprTrace", "Store", "EqualStore", "InitialResultPaths"}
    return type(x) is object or type(x).__name__ in states


def rewrapped(fun: Callable[..., Any], like: Any) -> Any:
    """`fun` as primitives that take functions want it, known by the name of `like`."""
    return linear_util.wrap_init(fun, debug_info=like.debug_info)


def names_in_scope() -> list[tuple[Hashable, Any]]:
    """Names and sizes of the mapped axes that collectives may use here; see `stage`."""
    return list(get_axis_env().axis_sizes.items())


def named_scope(name: Hashable | None, size: Any) -> AbstractContextManager[None]:
    """Context in which collectives over `name` may be traced; see `stage`."""
    return extend_axis_env_nd([] if name is None else [(name, size)])


def mesh_axis_taken(mesh_axis: Any) -> AbstractContextManager[None]:
    """Context in which what is staged cannot itself be sharded over `mesh_axis`."""
    if mesh_axis is None:
        return nullcontext()
    return add_explicit_mesh_axis_names(mesh_axis if isinstance(mesh_axis, tuple) else (mesh_axis,))


def cotangents_and_logs(result: Any) -> tuple[list[Any], Any]:
    """What the reverse rule of a custom_vjp returned: a list, and since JAX 0.11.1 logs with it."""
    if isinstance(result, tuple) and len(result) == 2:
        return list(result[0]), result[1]
    return list(result), None


def opened(body: ClosedJaxpr) -> tuple[Any, list[Any]]:
    """An open jaxpr and its constants, where JAX wants the two apart."""
    return body.jaxpr, list(body.consts)


def axis_from(data: Any, axis_type: Any) -> Any:
    """An `Axis` from what JAX tells a batching rule about the axis being mapped.

    Where ``jax.vmap`` was given no name JAX has a bare object in its place.
    """
    name = None if type(data.name) is object else data.name
    return axis_type(data.size, name, data.spmd_name, data.explicit_mesh_axis)


def axis_data(name: Hashable, size: Any, spmd_name: Any) -> Any:
    """What the batching methods of JAX's extensible operations take for an axis.

    The operations (``jax.experimental.hijax``) are public, the class their methods expect is
    not. Since 0.12 functions of ``jax.numpy`` are made of them.
    """
    from jax._src.interpreters.batching import AxisData

    return AxisData(name, size, spmd_name, None)


class RowScope(jax.export.SymbolicScope):
    """The scope of the sizes of the rows of one call.

    Attributes:
      lengths: what the rows may be like, for whoever answers a question about these sizes.
    """

    def __init__(self, lengths: Any) -> None:
        super().__init__()
        self.lengths = lengths


def row_symbols(names: Sequence[str], lengths: Any) -> tuple[Any, ...]:
    """Symbolic sizes of rows, in a scope of their own."""
    if not names:
        return ()
    return tuple(jax.export.symbolic_shape(", ".join(names), scope=RowScope(lengths)))


def is_row_size(x: Any) -> bool:
    """Whether `x` is an expression of sizes that `row_symbols` made."""
    return type(x) is _SIZE and type(x.scope) is RowScope


_SIZE: Any = type(jax.export.symbolic_shape("n")[0])


def answers_for_row_sizes(*names: str) -> Callable[[Any], Any]:
    """Decorator: what methods of these names, such as ``__eq__``, do where rows' sizes are asked.

    It is called with the method's name, what JAX does, the frame of the caller, and the
    operands. JAX's sizes say False where they cannot tell whether they are equal, and there is no
    public way to make them refuse. Sizes of other scopes are left as they are.
    """

    def decorate(answer: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            # Without a `__bool__` an object is true.
            setattr(_SIZE, name, _answered(name, getattr(_SIZE, name, bool), answer))
        return answer

    return decorate


def _answered(name: str, original: Any, answer: Callable[..., Any]) -> Any:
    if original is bool:
        original = lambda size: True

    @functools.wraps(original)
    def method(self: Any, *others: Any) -> Any:
        if type(self.scope) is not RowScope:
            return original(self, *others)
        return answer(name, original, sys._getframe(1), self, *others)

    return method


def stands_in_for(module: str, name: str) -> Callable[[Any], Any]:
    """Decorator: what a function within JAX does while rows are staged (`standing_in`).

    For those that read a size as a number where they need not, and cannot be told otherwise. It is
    called with that function first, and does what that does for all but sizes of rows.
    """

    def decorate(replacement: Callable[..., Any]) -> Callable[..., Any]:
        try:
            within = importlib.import_module(module)
            original = getattr(within, name)
        except (ModuleNotFoundError, AttributeError):  # a JAX that has moved it refuses as ever
            return replacement
        ours = functools.wraps(original)(functools.partial(replacement, original))
        _stand_ins.append((within, name, original, ours))
        return replacement

    return decorate


_stand_ins: list[tuple[Any, str, Any, Any]] = []  # where, its name, JAX's, ours; made by imports
_standing_in = 0
_stand_ins_lock = threading.Lock()


@contextmanager
def standing_in() -> Iterator[None]:
    """While it lasts JAX's functions are those of `stands_in_for`, and afterwards its own again.

    Other threads that call them meanwhile get what JAX does: they have no sizes of rows.
    """
    global _standing_in
    with _stand_ins_lock:
        _standing_in += 1
        if _standing_in == 1:
            for within, name, _, ours in _stand_ins:
                setattr(within, name, ours)
    try:
        yield
    finally:
        with _stand_ins_lock:
            _standing_in -= 1
            if _standing_in == 0:
                for within, name, original, _ in _stand_ins:
                    setattr(within, name, original)


def symbols(dim: Any) -> frozenset[str]:
    """The names in a symbolic size; ``_get_vars`` has no public spelling."""
    return frozenset(dim._get_vars())


def evaluate_size(dim: Any, values: dict[str, Any]) -> Any:
    """A symbolic size where its names have `values`, which may be arrays or traced.

    JAX does this only for itself, when it lowers an exported program, and computes in the
    integers that are its default.
    """
    values = {k: v.astype(int) if hasattr(v, "astype") else v for k, v in values.items()}
    if any(isinstance(value, jax.core.Tracer) for value in values.values()):
        return dim._evaluate(values)
    # A maximum of sizes is computed by JAX; the remainder by an empty row's is left undefined.
    with jax.ensure_compile_time_eval(), np.errstate(divide="ignore"):
        size = dim._evaluate(values)
    return np.asarray(size) if isinstance(size, jax.Array) else size


def name_within_jax(jaxpr: Any) -> str:
    """The name of the function a program was staged from if JAX defines it, otherwise "".

    Only the description for messages, `jaxpr.debug_info`, says so.
    """
    name, _, path = (jaxpr.debug_info.func_src_info or "").partition(" at ")
    return name if path.startswith(os.path.dirname(jax.__file__)) else ""


def hlo_proto(compiled: Any) -> bytes:
    """The program that a compiler made, in its own words: an `HloModuleProto`.

    Public JAX hands out a text; in it, instructions do not have the ids by which the compiler's
    assignment of memory speaks of them. What it was compiled to is public, but not its methods.

    Raises:
      NotImplementedError: the backend does not say.
    """
    executable = compiled.runtime_executable()
    if not hasattr(executable, "hlo_modules"):
        raise NotImplementedError(f"{type(executable).__name__} has no HLO modules")
    try:
        return executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    except jax.errors.JaxRuntimeError as error:
        raise NotImplementedError(str(error)) from error
