"""What each primitive is: said once, by the module that has its rule, and asked by many.

How lanes are masked, rows packed, programs compared and costs estimated depends on properties of
primitives. Each family lists them next to its rules, in a table: words, and the primitives they are
true of. The default is false, which is safe, and may be slow. Then there is what changes no result
of a reduction.

A primitive of batchax exists only so that a derivative or an outer batch axis can treat what it
does as one thing. Compilers and readers of jaxprs get the operations of JAX that it stands for,
which the last part has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import mlir
from jax.sharding import AbstractMesh

from batchax import _compat
from batchax.cache import Cache
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, HighOperation, Value, Values


@dataclass(frozen=True)
class Facts:
    """Says what is true of a primitive."""

    elementwise: bool = False  # acts on matching elements of operands that broadcast
    linear: bool = False  # a zero cotangent stays zero, whatever the operands are
    additive: bool = False  # f(a + b) = f(a) + f(b), of all operands together
    # Results and derivatives are bounded, or sums of products of operands: no NaN comes of moderate
    # numbers. (Not a gather: it makes a NaN of an index out of bounds.)
    moderate: bool = False
    # has the elements of its operand in order, perhaps with another shape or type
    alias: bool = False
    # A loop that ends on values, or a callback, or what a user's rule may be: it must not see
    # operands of lanes that do not run it.
    endless: bool = False
    costly: bool = False  # a loop or a callback: worth skipping when no lane runs it
    library: bool = False  # on a CPU, a call of a library whose threads may wait for one another
    body: tuple[str, ...] = ()  # of a call: the parameters that may hold its program
    again: bool = False  # of a call: in reverse its program is recomputed
    marked: bool = False  # of a call: says how its program is to be compiled or run
    once: bool = False  # a call of the host that is made once, for all lanes
    on_host: bool = False  # calls a function of Python, or prints
    shows: bool = False  # such a call that only shows values: no result depends on it
    guarded: bool = False  # runs for active lanes only, which the primitive gets
    control: bool = False  # control flow: its body runs more or less often than the code around it
    combines: bool = False  # its program is the function that combines two elements
    names: str = ""  # the parameter with named axes that no effect tells of
    looks: bool = False  # looks at all lanes, through the batch axis: they share the result
    cast: bool = False  # changes only what JAX knows of a value along the axes of a mesh
    reduces: bool = False  # removes the dimensions of its parameter `axes`
    # then: from the dtype, a value that changes no result; None if unknown
    neutral: Callable[[Any], Any] | None = None

    @property
    def is_plain_call(self) -> bool:
        return bool(self.body) and not (self.again or self.marked)


UNKNOWN = Facts()

# By name what is of JAX: some of its primitives are exported nowhere, and some exist only once
# the module that owns them is imported. A third party's may have the same name.
_facts: dict[_compat.Primitive | str, Facts] = {}

# What is known of primitives that have been asked about: of each equation many ask several times.
_looked_up: dict[_compat.Primitive, Facts] = {}


def enter(table: str, **facts: Any) -> tuple[str, ...]:
    """Enters a table of primitives of JAX, with lines such as ``linear moderate: add sub``.

    A line without a colon has the words of the one before. With nothing before the colon,
    primitives have an entry, and none of the words is true of them.
    """
    names: list[str] = []
    words: dict[str, Any] = {}
    for line in filter(str.strip, table.splitlines()):
        before, colon, after = line.rpartition(":")
        words = dict.fromkeys(before.split(), True) if colon else words
        describe(after.split(), **facts, **words)
        names += after.split()
    return tuple(names)


def describe(primitives: Iterable[_compat.Primitive | str], **facts: Any) -> None:
    """Enters what is true of some primitives, besides what has been entered."""
    for primitive in primitives:
        _facts[primitive] = replace(_facts.get(primitive, UNKNOWN), **facts)
    _forget()


def forget(primitive: _compat.Primitive) -> None:
    """Takes back what a maker of rules said of a primitive, whose rule is another one now."""
    _facts.pop(primitive, None)
    _forget()


def _forget() -> None:
    global _looked_up
    _looked_up = {}  # another one: what a thread has looked up before now goes to the old one


def body_parameter(primitive: _compat.Primitive, params: Mapping[str, Any]) -> str:
    """Returns the parameter of a call, one whose `Facts` say so, that holds the program inside."""
    return next(name for name in facts_of(primitive).body if name in params)


def has_entry(primitive: _compat.Primitive) -> bool:
    """Whether a table lists `primitive`, even if no fact is true of it."""
    by_name = primitive.name in _facts and not _compat.is_namesake(primitive)
    return by_name or primitive in _facts


def facts_of(primitive: _compat.Primitive) -> Facts:
    looked_up = _looked_up
    facts = looked_up.get(primitive)
    if facts is None:
        facts = _find(primitive)
        if _compat.find_primitive(primitive.name) is not None:  # whose namesakes are known by now
            looked_up[primitive] = facts
    return facts


def _find(primitive: _compat.Primitive) -> Facts:
    # An entry by primitive comes before one by name, which is of JAX's primitive of that name.
    facts = _facts.get(primitive)
    if facts is not None:
        return facts
    facts = _facts.get(primitive.name)
    return UNKNOWN if facts is None or _compat.is_namesake(primitive) else facts


def lowest(dtype: np.dtype[Any]) -> float:
    """Returns what no value of `dtype` is less than."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return -_infinity(dtype)
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def highest(dtype: np.dtype[Any]) -> float:
    """Returns what no value of `dtype` is more than."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return _infinity(dtype)
    return True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


def _infinity(dtype: np.dtype[Any]) -> float:
    """Returns infinity; of small floats without one, such as float8_e4m3fn, the largest number."""
    return np.inf if np.isinf(np.asarray(np.inf, dtype)) else float(jnp.finfo(dtype).max)


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which values of `dtype` are added up: float32 for smaller floats."""
    small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if small else dtype


NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": lowest,
    "min": highest,
    "and": lambda dtype: -1 if jnp.issubdtype(dtype, jnp.signedinteger) else highest(dtype),
    "or": lambda dtype: 0,
    "xor": lambda dtype: 0,
    "logsumexp": lowest,
}
"""For each kind of reduction, by the dtype of its operand, a value that changes no result."""


@dataclass(frozen=True)
class _Own:
    operations: Callable[..., Any]
    called: str


_own: dict[_compat.Primitive, _Own] = {}


def stands_for(
    primitive: _compat.Primitive,
    operations: Callable[..., Any],
    called: str,
    on_cpu: Callable[..., Any] | None = None,
    elsewhere: Callable[..., Callable[..., Any] | None] | None = None,
) -> None:
    """Lowers `primitive` as the function `operations` of operands and parameters, called `called`
    in messages. `on_cpu`, and what `elsewhere` returns for platforms other than the default one,
    take its place there. These may depend on nothing but the types of operands and the parameters:
    they are staged once for all that are equal.
    """
    _own[primitive] = _Own(operations, called)
    several = primitive.multiple_results
    ordinary = mlir.lower_fun(operations, multiple_results=several)
    mlir.register_lowering(primitive, ordinary)
    if on_cpu is not None:
        mlir.register_lowering(primitive, _lowering(primitive, on_cpu), platform="cpu")
    if elsewhere is None:
        return

    def run(*operands: Value, **params: Any) -> Value | list[Value]:
        function = elsewhere(**params)
        assert function is not None
        return function(*operands)

    other = _lowering(primitive, run)

    def lower_for(platform: str | None) -> Callable[..., Any]:
        def lower(
            ctx: mlir.LoweringRuleContext, *operands: Value, **params: Any
        ) -> Sequence[object]:
            # Parameters were chosen for the default platform, and hold for it. `jax.export` lowers
            # for others, too.
            default = jax.default_backend()
            decided = default == platform or (platform is None and default not in _PLATFORMS)
            rule = ordinary if decided or elsewhere(**params) is None else other
            return rule(ctx, *operands, **params)

        return lower

    for platform in (None, *_PLATFORMS):
        mlir.register_lowering(primitive, lower_for(platform), platform=platform)


_PLATFORMS = ("cpu", "gpu", "tpu")


def as_decided(
    decided: Callable[..., list[Any]], elsewhere: Callable[..., list[Any]], operands: Values
) -> list[Any]:
    """Runs `decided` on the default platform, for which it was chosen, and `elsewhere` on others.

    For operations whose derivative would leave out what a primitive runs `elsewhere`.
    """
    default = jax.default_backend()
    names = ("cuda", "rocm") if default == "gpu" else (default,)
    chosen = dict.fromkeys(names, decided)
    return list(lax.platform_dependent(*operands, **chosen, default=elsewhere))


def _lowering(primitive: _compat.Primitive, function: Callable[..., Any]) -> Callable[..., Any]:
    """Lowers `primitive` as a function, staged as it is outside of ``shard_map``."""
    several = primitive.multiple_results
    lowering = mlir.lower_fun(_staged_once(primitive, function), multiple_results=several)

    def lower(ctx: mlir.LoweringRuleContext, *operands: Value, **params: Any) -> Sequence[object]:
        token = _divided.set(_compat.is_divided(ctx))
        try:
            if not any(map(_compat.varying_axes, ctx.avals_in)):
                return lowering(ctx, *operands, **params)
            # Inside ``shard_map`` JAX checks which values vary along the mesh. Here the types say
            # nothing of it, and the mesh is empty, so that nothing in the function has to be cast.
            types: list[Aval] = list(ctx.avals_in)
            plain = [ShapedArray(x.shape, x.dtype) for x in types]
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return lowering(ctx.replace(avals_in=plain), *operands, **params)
        finally:
            _divided.reset(token)

    return lower


def _staged_once(primitive: _compat.Primitive, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, staged once for operands of the same types: a draw or a sort is many
    operations in many places.
    """
    several = primitive.multiple_results

    def run(*operands: Value, **params: Any) -> Value | list[Value]:
        # Operands inside ``shard_map`` say where they vary, and must be staged as they are.
        if _compat.checked_axes():
            return function(*operands, **params)
        types = tuple(map(jax.typeof, operands))
        named = tuple(sorted(params.items()))
        key = primitive, function, types, named, divided(), _compat.trace_context()

        def listed(*xs: Value) -> list[Any]:
            out = function(*xs, **params)
            return list(out) if several else [out]

        outs = _compat.inlined(_programs.get(key, lambda: _compat.stage(listed, types)), operands)
        return outs if several else outs[0]

    return run


_programs = Cache("what primitives of batchax do on some platforms", most=512)

_divided: ContextVar[bool] = ContextVar("batchax_divided", default=False)


def divided() -> bool:
    """Whether what is staged is for a program that its compiler divides among devices."""
    # Inside ``shard_map`` each device has its own arrays: `is_divided` is false there.
    return _divided.get()


def is_own(primitive: _compat.Primitive) -> bool:
    return primitive in _own


def shown(primitive: _compat.Primitive) -> str:
    """Returns what a message calls a primitive; one of batchax by what users know it by."""
    own = _own.get(primitive)
    return primitive.name if own is None else own.called


def operations_of(eqn: Eqn) -> ClosedJaxpr | None:
    """Stages the program that an equation of batchax stands for; returns None for others."""
    own = _own.get(eqn.primitive)
    if own is None:
        return None

    def run(*operands: Value) -> Value | list[Value]:
        out = own.operations(*operands, **eqn.params)
        return out if eqn.primitive.multiple_results else [out]

    with eqn.ctx.manager:  # of the mesh that was in scope, and its axes inside `shard_map`
        mesh = jax.sharding.get_abstract_mesh()
        names = [(name, mesh.shape[name]) for name in mesh.manual_axes]
        return _compat.stage(run, [v.aval for v in eqn.invars], names)


def expanded(prim: HighOperation, avals: Sequence[Aval]) -> ClosedJaxpr:
    """Stages the program that a `call_hi_primitive` (of ``jax.experimental.hijax``) stands for."""

    def run(*operands: Value) -> list[Any]:
        return jax.tree.leaves(prim.expand(*jax.tree.unflatten(prim.in_tree, operands)))

    return _compat.stage(run, avals)
