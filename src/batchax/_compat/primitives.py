"""Primitives of JAX by name, what ``jax.vmap`` knows of them, and rules of custom derivatives."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.extend.core.primitives as jex_primitives
from jax._src import config

# What a third party's batching rule did is known only to the tracer it returned.
# JAX lets types (sparse matrices) register a batch form, but has no query for it.
from jax._src.interpreters.batching import (
    AxisData,
    BatchTracer,
    from_elt_handlers,
    to_elt_handlers,
    vmappables,
)
from jax._src.lax.control_flow.conditionals import platform_index_p
from jax._src.shard_map import shard_map_p
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.experimental import hijax
from jax.extend import linear_util
from jax.interpreters import ad, batching

from batchax._compat.jaxprs import Aval, Dim, HighOperation, Primitive, Value, Values
from batchax._compat.staging import tracing


def find_primitive(name: str) -> Primitive | None:
    """Returns the primitive that JAX calls `name`, from the tables that JAX exports."""
    # Some primitives (``pure_callback``, ``random_wrap``, ...) are not exported, but are keys of
    # the public table of batching rules.
    global _tables
    tables = len(batching.fancy_primitive_batchers)
    if name not in _found and tables != _tables:  # a module imported since may have brought it
        _found.update({n: p for n, p in primitives_by_name().items() if n not in _found})
        _tables = tables
    return _found.get(name)


_found: dict[str, Primitive] = {}

_tables = 0


def is_namesake(primitive: Primitive) -> bool:
    """Returns whether JAX uses the name of `primitive` for another primitive."""
    return find_primitive(primitive.name) not in (None, primitive)


def primitives_by_name() -> dict[str, Primitive]:
    """Collects the primitives in the tables that JAX exports, by name."""
    by_name: dict[str, Primitive] = {}
    for module in (jex_primitives, jax.lax, jax.lax.linalg):
        for value in vars(module).copy().values():  # which a thread may be adding to
            if isinstance(value, Primitive):
                by_name[value.name] = value
    for primitive in (*batching.fancy_primitive_batchers.copy(), shard_map_p):
        by_name.setdefault(primitive.name, primitive)  # what others call the same comes later
    return by_name


def platform_index(platforms: object) -> Value:
    # ``jax.lax.platform_dependent`` only offers it together with branches.
    return platform_index_p.bind(platforms=platforms)


def lower_early(
    primitive: Primitive,
    programs: Callable[[Any], Sequence[Any]],
    operations: Callable[..., Any],
    compute: Callable[..., Any],
) -> None:
    """Lowers `primitive` early where the `programs` in its parameters are "high".

    `operations` replace it in a program, and `compute` on arrays.
    """

    # Since 0.12, JAX describes some operations (``jnp.searchsorted``, ``jnp.nonzero``) by objects,
    # and first replaces what holds one by simpler operations. Without these attributes, it looks
    # into some parameters only, and then has no replacement.
    def is_high(*avals: Aval, **params: Any) -> bool:
        return any(program.is_high for program in programs(params))

    def replaced(*operands: Value, **params: Any) -> Value:
        return (operations if tracing() else compute)(*operands, **params)

    primitive.is_high = is_high
    primitive.to_lojax = replaced


def weakly(x: Value) -> Value:
    """Gives `x` the weak type of a Python scalar, which no public function does for arrays."""
    return jax.lax.convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=True, sharding=jax.typeof(x).sharding
    )


def wrapped_parts(x: Any) -> list[Any]:
    """Returns what a wrapped function of JAX holds, which has no public accessors."""
    # Arguments in `nondiff_argnums` are in boxes, recognized by the names of their classes.
    if isinstance(x, linear_util.WrappedFun):
        return [x.f, x.transforms, x.params]
    boxed = type(x).__name__ in {"Unhashable", "Static"} and type(x).__module__.startswith("jax.")
    return [x.val] if boxed else []


def is_tracing_state(x: object) -> bool:
    """Returns whether `x` is tracing state that JAX stores with a derivative rule."""
    # It does not affect the rule. The types are private, and recognized by name.
    states = {"DynamicJaxprTrace", "Store", "EqualStore", "InitialResultPaths"}
    return type(x) is object or type(x).__name__ in states


def rewrapped(fun: Callable[..., Any], like: linear_util.WrappedFun) -> linear_util.WrappedFun:
    """Wraps `fun` for primitives that take functions, under the name of `like`."""
    return linear_util.wrap_init(fun, debug_info=like.debug_info)


class ResidualsDescription:
    """Reads and sets the result of `out_trees` of a ``custom_vjp`` call."""

    # JAX caches each trace of a forward rule, one for each set of differentiated arguments, but
    # describes the residuals of the latest trace only, and none after a trace that failed. The
    # object with the description is private, and found in closures by its class name.
    def __init__(self, out_trees: Callable[[], Any]) -> None:
        holders, unseen = [], [out_trees]
        while unseen:
            x = unseen.pop()
            if type(x).__name__ in {"Store", "EqualStore"}:
                holders.append(x)
            unseen += [cell.cell_contents for cell in getattr(x, "__closure__", None) or ()]
        (self._holder,) = holders

    def get(self) -> object:
        """Returns the description; None after a trace that failed, and before the first."""
        try:
            return self._holder.val
        except Exception:
            return None

    def set(self, description: object) -> None:
        self._holder.reset()
        self._holder.store(description)


def cotangents_and_logs(result: Values | tuple[Values, object]) -> tuple[list[Any], Any]:
    """Splits the result of a custom_vjp reverse rule: a list, and logs since JAX 0.11.1."""
    if isinstance(result, tuple) and len(result) == 2:
        return list(result[0]), result[1]
    return list(result), None


def as_made_by_default(prim: HighOperation) -> Callable[..., list[Any]] | None:
    """Rebuilds a function with derivative rules as JAX makes it by default.

    It takes flat arguments. None if `prim` is another object.
    """
    # With ``jax_custom_vjp3`` and ``jax_custom_jvp3``, JAX turns a call into an object of a private
    # class, whose batching looks at the function alone to find which outputs are batched. If a rule
    # disagrees, JAX 0.12 raises, and 0.10 returns wrong gradients.
    kind = type(prim).__name__
    if kind not in ("CustomVJPTraced", "CustomJVPTraced") or "traced" not in prim.params:
        return None
    arguments = partial(jax.tree.unflatten, prim.in_tree)
    # JAX 0.12 passes what the function closes over as its first argument.
    n_closed = len(jax.tree.leaves(prim.in_avals[0])) if _has_logs(prim) else 0

    def run(*xs: Value) -> list[Any]:
        args, body = arguments(xs), prim.traced.jaxpr
        args = prim.drop_fwd_consts(*args) if hasattr(prim, "drop_fwd_consts") else args
        return eval_jaxpr(body.jaxpr, body.consts, *jax.tree.leaves(args))

    # Messages call the function by its own name and place.
    name, _, place = (prim.traced.jaxpr.debug_info.func_src_info or "").partition(" at ")
    file, _, line = place.rpartition(":")
    if line.isdecimal():
        code = run.__code__.replace(co_filename=file, co_firstlineno=int(line))
        run.__name__, run.__code__ = name, code

    def jvp(primals: Values, tangents: Values) -> tuple[list[Any], list[Any]]:
        out, dots = prim.jvp(arguments(primals), arguments(_zeros_as(ad.Zero, tangents)))
        out, dots = map(prim.out_tree.flatten_up_to, (out, dots))
        return out, _zeros_as(SymbolicZero, dots)

    def reject(
        primals: Values, _: object
    ) -> Any:  # the object raises: `vjp_fwd` reads what it closes over
        prim.vjp_fwd(arguments([True] * len(prim.in_avals_flat)), *prim.in_avals)

    def call(*xs: Value) -> list[Any]:
        if kind == "CustomVJPTraced":
            with _made_by_default():
                closed_over = jax.custom_jvp(lambda x: x)
                closed_over.defjvp(reject)
                xs = *map(closed_over, xs[:n_closed]), *xs[n_closed:]
            return _with_reverse_rule(prim, run, n_closed)(*xs)
        with _made_by_default():
            function: Any = jax.custom_jvp(run)
            function.defjvp(jvp, symbolic_zeros=True)
            return function(*xs)

    return call


def _base_of_objects() -> Any:
    return getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive


def has_transpose(prim: HighOperation) -> bool:
    """Returns whether the author of an operation gave it a transpose."""
    return type(prim).transpose is not _base_of_objects().transpose


def by_reverse_rule(prim: HighOperation) -> Callable[..., list[Any]] | None:
    """Rebuilds an operation with a reverse rule only as a ``custom_vjp`` function."""
    # Programs are differentiated in forward mode before they are transposed, for which the object
    # has no ``jvp``. A ``custom_vjp`` function stays intact until then.
    base, kind = _base_of_objects(), type(prim)
    by_values = _has_logs(prim) or kind.vjp_bwd is base.vjp_bwd
    if kind.__name__ == "VmapOf" and "prim" in prim.params:
        return _batched_by_reverse_rule(prim)
    if kind.jvp is not base.jvp or kind.vjp_fwd is base.vjp_fwd or not by_values:
        return None
    run = lambda *xs: prim.out_tree.flatten_up_to(prim(*jax.tree.unflatten(prim.in_tree, xs)))
    return _with_reverse_rule(prim, run, 0)


def _batched_by_reverse_rule(batched: HighOperation) -> Callable[..., list[Any]] | None:
    # JAX 0.10 batches an object by another one, of a private class. That has a forward mode, which
    # fails where the object inside has none, or the one that JAX gives those of ``custom_vjp``.
    prim = batched.prim
    inner = by_reverse_rule(prim)
    if inner is None and type(prim).__name__ == "CustomVJPTraced":
        inner = as_made_by_default(prim)
    if inner is None:
        return None
    axes = tuple(batched.in_tree.flatten_up_to(batched.in_dims))
    out_axes = batched.out_tree.flatten_up_to(batched.out_dim)
    return jax.vmap(inner, axes, out_axes, **batched._vmap_params)


def _has_logs(prim: HighOperation) -> bool:  # since JAX 0.12
    return hasattr(prim, "vjp_bwd_retval_logs")


def _with_reverse_rule(
    prim: HighOperation, run: Callable[..., Any], n_closed: int
) -> Callable[..., Any]:
    """Gives `run` the reverse rule of an object; its first `n_closed` arguments are constants."""

    def forward(*xs: Value) -> tuple[list[Any], Any]:
        nonzero = [x.perturbed and i >= n_closed for i, x in enumerate(xs)]
        nonzero, args = (
            jax.tree.unflatten(prim.in_tree, flat) for flat in (nonzero, [x.value for x in xs])
        )
        out, residuals, *_ = prim.vjp_fwd(nonzero, *args)
        return prim.out_tree.flatten_up_to(out), residuals

    def backward(residuals: Value, cotangents: Values) -> tuple[Value, ...]:
        pull = prim.vjp_bwd_retval_logs if _has_logs(prim) else prim.vjp_bwd_retval
        cotangents = _zeros_as(ad.Zero, cotangents)
        result = pull(residuals, jax.tree.unflatten(prim.out_tree, cotangents))
        result, logs = result if _has_logs(prim) else (result, None)
        result = prim.in_tree.flatten_up_to(result)
        result = tuple(None if isinstance(c, _ZEROS) else c for c in result)
        return (result, logs) if _has_logs(prim) else result

    def call(*xs: Value) -> list[Any]:
        with _made_by_default():
            function: Any = jax.custom_vjp(run)
            define = function.defvjp_with_logs if _has_logs(prim) else function.defvjp
            # Not `optimize_remat`: ``jax_remat3`` runs the function where it can, anyway.
            define(forward, backward, symbolic_zeros=True)
            return function(*xs)

    return call


_ZEROS = (ad.Zero, SymbolicZero)


def _zeros_as(kind: type, xs: Values) -> list[Any]:
    return [kind(x.aval) if isinstance(x, _ZEROS) else x for x in xs]


@contextmanager
def _made_by_default() -> Iterator[None]:
    """Calls functions with derivative rules as JAX does by default."""
    # There are public settings, but no public contexts for them. JAX 0.10 has one of both.
    names = [name for name in ("custom_vjp3", "custom_jvp3") if hasattr(config, name)]
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(getattr(config, name)(False))
        yield


def is_checkpoint(prim: HighOperation) -> bool:
    """Returns whether a ``call_hi_primitive`` object is ``jax.checkpoint`` with ``jax_remat3``."""
    # The class is private, and recognized by name and parameters.
    return type(prim).__name__ == "RematTraced" and {"jaxpr", "policy"} <= set(prim.params)


def jax_has_rule(primitive: Primitive) -> bool:
    return primitive in batching.fancy_primitive_batchers or primitive.name in {
        "custom_jvp_call",
        "custom_vjp_call",
        "shard_map",
    }


def is_jaxs_rule(rule: Callable[..., Any]) -> bool:
    """Returns whether a rule in JAX's table is from JAX or batchax."""
    module = getattr(_registered(rule), "__module__", None) or ""
    return module.partition(".")[0] in ("jax", "jaxlib", "batchax")


def is_vmap_of_impl(primitive: Primitive) -> bool:
    """Returns whether a library registered ``jax.vmap`` of its `impl` as the rule of `primitive`.

    That is what ``equinox.internal.create_vprim`` does.
    """
    rule = batching.fancy_primitive_batchers.get(primitive)
    made_by = getattr(rule and _registered(rule), "__qualname__", "")
    return made_by == "create_vprim.<locals>.batch_rule"


def is_nontraceable(primitive: Primitive) -> bool:
    """Returns whether it is Equinox's identity that raises where it is transformed."""
    return primitive.name == "nontraceable"


def _registered(rule: Callable[..., Any]) -> Callable[..., Any]:
    # JAX wraps rules in its older tables in a function that closes over the rule.
    rule = getattr(rule, "func", rule)
    if "BatchersProxy" in getattr(rule, "__qualname__", ""):
        inside = (cell.cell_contents for cell in rule.__closure__ or ())
        rule = next(x for x in inside if callable(x) and not isinstance(x, Primitive))
        rule = getattr(rule, "func", rule)
    return rule


def batched_by_jax(x: Value) -> tuple[Any, int | None]:
    """Returns a value inside ``jax.vmap`` with its batch axis."""
    # As an output it could only be placed at an axis. Whether it is batched at all, which rules of
    # third parties decide, would be lost.
    with jex_core.take_current_trace() as trace:
        if isinstance(x, BatchTracer) and x._trace is trace:
            return x.val, x.batch_dim
    return x, None


def axis_from(data: Any, axis_type: Any) -> Any:
    """Makes an `Axis` from JAX's description of the axis being mapped."""
    # Without a name, JAX has a bare object in its place.
    name = None if type(data.name) is object else data.name
    return axis_type(data.size, name, data.spmd_name, data.explicit_mesh_axis)


def axis_data(name: Hashable, size: Dim, spmd_name: tuple[Hashable, ...] | None) -> AxisData:
    """Makes the axis description that batching methods of JAX's extensible operations take."""
    # The operations (``jax.experimental.hijax``) are public, and the class that their methods take
    # is not. Since 0.12, functions of ``jax.numpy`` are built on them.
    return AxisData(name, size, spmd_name, None)


def own_batches(x: object) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the functions that take such a batch apart, and that build one."""
    # There is a public function to register them, and none to look them up.
    return to_elt_handlers[type(x)], from_elt_handlers[type(x)]


def type_of_batch_axis(x: object) -> type:
    """Returns the type of the axis of such a batch."""
    return vmappables[type(x)][0]


def types_of_batch_axes() -> set[type]:
    """Returns the types of all such axes, except for ints."""
    return {spec_type for spec_type, _ in list(vmappables.values())} - {int}


_lent: set[type] = set()


def lend_batches(
    type: type, spec_type: type, to_example: Callable[..., Any], to_batch: Callable[..., Any]
) -> None:
    """Registers batches of `type` with JAX, unless they are registered."""
    if type not in vmappables or type in _lent:
        batching.register_vmappable(type, spec_type, int, to_example, to_batch, None)
        _lent.add(type)


def forget_batches(type: type) -> None:
    if type in _lent:
        _lent.discard(type)
        # `batching.unregister_vmappable` is there, and does nothing on the JAX of today.
        for table in (vmappables, to_elt_handlers, from_elt_handlers):
            table.pop(type, None)
