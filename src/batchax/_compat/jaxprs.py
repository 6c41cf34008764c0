"""Values, their types, equations, and jaxprs as JAX holds them, and what is read of these.

JAX has no public class for some of these. Its class of variables says only that each has some type,
and parts of a jaxpr that batchax makes look like jaxprs, too: so protocols say what is read. The
types of effects, and that of references, are private: they are recognized by the names of their
classes, and by an attribute. Types inside ``shard_map`` also show over which mesh axes a value
varies.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.extend.core as jex_core
import numpy as np
from jax import lax
from jax._src.config import _check_vma as check_vma
from jax._src.debugging import debug_effect as debug_effect
from jax._src.distributed import global_state
from jax.extend.source_info_util import SourceInfo
from jax.interpreters import mlir, partial_eval
from jax.sharding import AxisType

Primitive = jex_core.Primitive
ClosedJaxpr = jex_core.ClosedJaxpr
"""A jaxpr with the values of its constants."""

Value: TypeAlias = Any
"""An operand or result: an array of JAX or NumPy, a tracer, a number, or a reference."""

Values: TypeAlias = Sequence[Value]

Aval: TypeAlias = Any
"""The type of a value: shape, dtype, and more. JAX has no class for what all of them have."""

Tree: TypeAlias = Any
"""Values in tuples, lists, dicts and other containers, or one value, as `jax.tree` has them."""

AxesTree: TypeAlias = Any
"""What `in_axes` and `out_axes` may be: an axis, None, or a tree of these as a prefix."""

Params: TypeAlias = dict[str, Any]
"""The parameters of an equation, by name."""

Effects: TypeAlias = Iterable[Any]
"""JAX has no public class for what is read of an effect: its name, or its input."""

Var = jex_core.Var
Atom: TypeAlias = jex_core.Var | jex_core.Literal
"""What an equation reads, or a jaxpr returns."""

Dim: TypeAlias = Any
"""A size of an array: an int, or a symbolic one."""

HighOperation: TypeAlias = Any
"""An operation that JAX describes by an object, see ``jax.experimental.hijax``."""


class Eqn(Protocol):
    @property
    def primitive(self) -> Primitive: ...

    @property
    def invars(self) -> Sequence[Any]:
        """Its operands: variables, or literals, which have a value."""
        ...

    @property
    def outvars(self) -> Sequence[Any]: ...

    @property
    def params(self) -> Params:
        """What else the operation needs to know, programs inside it among that."""
        ...

    @property
    def effects(self) -> Effects:
        """What it does besides."""
        ...

    @property
    def source_info(self) -> SourceInfo:
        """The user's line, and the stack of names."""
        ...

    @property
    def ctx(self) -> Any:
        """The surroundings that it was staged in."""
        ...

    def replace(self, **changes: Any) -> Any:
        """The same with changes."""


class Jaxpr(Protocol):
    """A program, or a part of one; the values of its constants are passed separately."""

    @property
    def eqns(self) -> Sequence[Any]:
        """The equations, in order."""
        ...

    @property
    def constvars(self) -> Sequence[Any]:
        """Its constants."""
        ...

    @property
    def invars(self) -> Sequence[Any]:
        """Its arguments."""
        ...

    @property
    def outvars(self) -> Sequence[Any]:
        """Its results: variables or literals."""
        ...

    def replace(self, **changes: Any) -> Any:
        """The same with changes."""


Program: TypeAlias = Jaxpr | jex_core.ClosedJaxpr
"""A jaxpr with or without the values of its constants. Since JAX 0.11, both are of one class."""

JAXPR_TYPES = (jex_core.Jaxpr, jex_core.ClosedJaxpr)  # one class since JAX 0.11


def close(jaxpr: Program, consts: Values = ()) -> ClosedJaxpr:
    """Closes a jaxpr that a parameter holds open (remat, shard_map)."""
    # Since JAX 0.11 there is a single class, and parameters are closed: then the last line can go.
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.with_consts(list(consts)) if consts else jaxpr  # pyright: ignore
    unclosed: Any = jaxpr
    return ClosedJaxpr(unclosed, list(consts))


def without_constants(jaxpr: Program) -> Program:
    """Removes the values of constants, which are part of a jaxpr since JAX 0.12."""
    consts = getattr(jaxpr, "consts", ())
    return jaxpr.with_consts([None] * len(consts)) if consts else jaxpr  # pyright: ignore


def constants_as_inputs(program: Program) -> Any:
    """Turns constants of a jaxpr, open or closed, into leading inputs."""
    jaxpr: Any = program
    # JAX 0.11 does so for rules of custom derivatives, and passes the constants along with them.
    if not jaxpr.constvars:
        return jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def hoist_constants(*programs: ClosedJaxpr) -> tuple[list[ClosedJaxpr], list[Any]]:
    """Turns constants of all `programs` into leading inputs, and returns them."""
    # Some primitives (remat, calls) take bodies without constants. And a primitive is
    # differentiated and batched by its operands only, so what a derivative rule closes over must be
    # one.
    different = list({id(program): program for program in programs}.values())
    slots = [v for program in different for v in program.jaxpr.constvars]
    if not slots:
        return list(programs), []
    hoisted = {
        id(program): close(
            program.jaxpr.replace(constvars=[], invars=[*slots, *program.jaxpr.invars])
        )
        for program in different
    }
    consts = [x for program in different for x in program.consts]
    return [hoisted[id(program)] for program in programs], consts


def inputs_as_constants(program: ClosedJaxpr, consts: Values) -> ClosedJaxpr:
    """Gives these values to the leading inputs of a program."""
    jaxpr = constants_as_inputs(program.jaxpr)
    values = [*program.consts, *consts]
    first, rest = jaxpr.invars[: len(values)], jaxpr.invars[len(values) :]
    return close(jaxpr.replace(constvars=first, invars=rest), values)


def jaxpr_of(program: Program) -> Jaxpr:
    """Returns a program without the values of its constants."""
    jaxpr: Any = getattr(program, "jaxpr", program)
    return jaxpr


def opened(body: ClosedJaxpr) -> tuple[Any, list[Any]]:
    """Splits a closed jaxpr into an open one and its constants."""
    return body.jaxpr, list(body.consts)


def used_inputs(program: ClosedJaxpr, outputs: Sequence[bool]) -> list[bool]:
    """Returns which inputs these outputs of `program`, or its effects, depend on."""
    # Only JAX's module for partial evaluation has this.
    jaxpr = constants_as_inputs(program.jaxpr)
    _, used = partial_eval.dce_jaxpr(jaxpr, list(outputs))
    return list(used[len(used) - len(program.jaxpr.invars) :])


def without_dead(program: ClosedJaxpr) -> ClosedJaxpr:
    """Removes equations that no output or effect needs, also in loops and branches."""
    jaxpr = program.jaxpr
    return reduced(program, [True] * len(jaxpr.outvars), [True] * len(jaxpr.invars))[0]


def reduced(
    program: ClosedJaxpr, outputs: Sequence[bool], inputs: Sequence[bool]
) -> tuple[ClosedJaxpr, list[bool]]:
    """Keeps these outputs of `program`, these inputs, and those that the outputs depend on.

    Returns:
      The program, and which inputs it has.
    """
    # Only JAX's module for partial evaluation has this.
    jaxpr = constants_as_inputs(program.jaxpr)
    count = len(jaxpr.invars) - len(program.jaxpr.invars)
    kept = [True] * count + list(inputs)
    live, used = partial_eval.dce_jaxpr(jaxpr, list(outputs), instantiate=kept)
    live = live.replace(constvars=live.invars[:count], invars=live.invars[count:])
    return close(live, program.consts), list(used[count:])


def reduced_while(
    test: ClosedJaxpr, body: ClosedJaxpr, results: Sequence[bool]
) -> tuple[ClosedJaxpr, ClosedJaxpr, list[bool], list[bool]]:
    """Keeps of a loop what these results, its predicate, and the next steps of both read.

    Returns:
      The predicate and the body, the operands that the loop has, of all, and its results.
    """
    n_test, n_body = (len(p.in_avals) - len(results) for p in (test, body))
    of_test = used_inputs(test, [True])[n_test:]
    live, more = list(results), True
    while more:
        of_body = used_inputs(body, live)[n_body:]
        now = list(map(any, zip(live, of_test, of_body, strict=True)))
        live, more = now, now != live
    test, tested = reduced(test, [True], [*[False] * n_test, *live])
    body, given = reduced(body, live, [*[False] * n_body, *live])
    return test, body, [*tested[:n_test], *given], live


class Reduced(NamedTuple):
    """An equation of fewer operands and results."""

    operands: Sequence[bool]  # which of the operands it has
    results: Sequence[bool]  # which of the results
    params: dict[str, Any]


def register_unread_results(
    primitive: Any, reduce: Callable[[Sequence[bool], dict[str, Any]], Reduced | None]
) -> None:
    """Lets JAX drop results of a primitive that nothing reads, as it does those of ``while``.

    Args:
      primitive: the primitive.
      reduce: from which results are read, and the parameters, the smaller equation; None to keep
        all.
    """

    # Since JAX 0.12 a rule also receives which operands are references that are read later.
    def rule(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
        eqn = rest[-1]
        if not any(used) and not eqn.effects:
            return [False] * len(eqn.invars), None
        smaller = None if all(used) or eqn.effects else reduce(used, eqn.params)
        if smaller is None:
            return [True] * len(eqn.invars), eqn
        invars = list(compress(eqn.invars, smaller.operands))
        outvars = list(compress(eqn.outvars, smaller.results))
        smaller_eqn = eqn.replace(invars=invars, outvars=outvars, params=smaller.params)
        return list(smaller.operands), smaller_eqn

    # Only JAX's module for partial evaluation has this: public, but not documented. So it is for
    # versions that the suite ran on. The benchmark `programs` gains 1.8x by it (Dogleg).
    if jax.__version_info__[:2] <= (0, 12):
        partial_eval.dce_rules[primitive] = rule


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many are its carry."""
    # Since JAX 0.11, the parameters hold pytrees with a leaf for each operand; before, two numbers.
    if "ft_in" in params:
        consts, carry, _ = map(len, params["ft_in"].unpack())
        return consts, carry
    return params["num_consts"], params["num_carry"]


def name_and_place(jaxpr: Program) -> str:
    """Returns the function that a program was traced from: ``name at file:line``, or ""."""
    # Only `jaxpr.debug_info`, which is for messages, has it.
    traced: Any = jaxpr
    return traced.debug_info.func_src_info or ""


def name_within_jax(jaxpr: Program) -> str:
    """Returns the name of the function a program was traced from if JAX defines it, else ""."""
    name, _, path = name_and_place(jaxpr).partition(" at ")
    return name if path.startswith(os.path.dirname(jax.__file__)) else ""


def named_axes(effects: Effects) -> set[Hashable]:
    """Returns names of mapped axes that an equation with these effects uses."""
    return {e.name for e in effects if type(e).__name__ == "NamedAxisEffect"}


def observed(effects: Effects) -> bool:
    """Returns whether there are effects other than the use of a named axis."""
    return any(type(e).__name__ != "NamedAxisEffect" for e in effects)


def in_order(effects: Effects) -> bool:
    """Returns whether there are Python callbacks that must run in order."""
    return any(type(e).__name__ in ("OrderedIOEffect", "OrderedDebugEffect") for e in effects)


def ordered_by_lane(effects: Effects) -> bool:
    """Returns whether there is input or output, or something that must run in order."""
    return in_order(effects) or any(type(e).__name__ == "IOEffect" for e in effects)


def calls_back(effects: Effects) -> bool:
    """Returns whether there are Python callbacks with visible effects."""
    return ordered_by_lane(effects) or any(type(e).__name__ == "DebugEffect" for e in effects)


def checks(effects: Effects) -> bool:
    return any(type(e).__name__ == "ErrorEffect" for e in effects)


@contextmanager
def callbacks_fail_silently() -> Iterator[None]:
    """Silences JAX's log of failing callbacks, while it is known that they fail."""
    # The logger is that of a private module, and is found by the module's name.
    logger = logging.getLogger("jax._src.callback")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def is_reference(x: Value) -> bool:
    return hasattr(jax.typeof(x), "inner_aval")


def makes_references(effects: Effects) -> bool:
    return any(type(e).__name__ == "InternalMutableArrayEffect" for e in effects)


def touches_references(eqn: Eqn) -> bool:
    """Returns whether an equation creates references, or takes one."""
    given = any(hasattr(v.aval, "inner_aval") for v in eqn.invars)
    return given or makes_references(eqn.effects)


def written_inputs(jaxpr: Any) -> set[int]:
    """Returns which inputs of a jaxpr or equation are references that it writes to."""
    writes = [e.input for e in jaxpr.effects if type(e).__name__ in {"WriteEffect", "AccumEffect"}]
    return {i for i, v in enumerate(jaxpr.invars) if v in writes}


def checked_axes() -> frozenset[Hashable]:
    """Returns the mesh axes of the enclosing ``shard_map`` whose types show what varies."""
    # No public function returns whether it was called with ``check_vma``.
    if not check_vma.value:
        return frozenset()
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(aval: Aval) -> frozenset[Hashable]:
    """Returns the ``shard_map`` mesh axes that a value of this type varies over."""
    # Types do not expose this publicly.
    aval = getattr(aval, "inner_aval", aval)
    return aval.mat.varying if hasattr(aval, "mat") else frozenset()


def varying_as(x: Value, aval: Aval) -> Value:
    """Casts `x` to vary over the ``shard_map`` mesh axes that `aval` varies over."""
    # Operations of JAX insert this cast themselves, and primitives of batchax do not.
    return varying_over(x, varying_axes(aval))


def varying_alike(xs: Sequence[Any], like: Sequence[Any] = ()) -> list[Any]:
    """Casts `xs` to vary over every mesh axis that any of them, or of `like`, varies over."""
    axes = frozenset().union(*(varying_axes(jax.typeof(x)) for x in (*xs, *like)))
    return [varying_over(x, axes) for x in xs]


def on_mesh_in_scope(x: Value) -> Value:
    """Gives an array the mesh with Explicit axes that is set, if its type carries none."""
    # JAX writes a part into an array only if both carry the same.
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types or not jax.typeof(x).sharding.mesh.empty:
        return x
    spec = jax.sharding.PartitionSpec(*[None] * x.ndim)
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec))


def varying_over(x: Value, axes: frozenset[Hashable]) -> Value:
    """Casts `x` to vary over more mesh axes; references stay as they are."""
    missing = axes - varying_axes(jax.typeof(x))
    if not missing or is_reference(x):
        return x
    return jax.lax.pcast(x, tuple(missing), to="varying")


def type_varying_over(aval: Aval, axes: frozenset[Hashable]) -> Aval:
    """Returns the type of values that also vary over these mesh axes."""
    return with_varying_axes(aval, varying_axes(aval) | axes)


def with_varying_axes(aval: Aval, axes: frozenset[Hashable]) -> Aval:
    """Returns the type of values that vary over exactly these mesh axes."""
    # No public function changes this in a type.
    if axes == varying_axes(aval):
        return aval
    if hasattr(aval, "inner_aval"):
        return aval.update(inner_aval=with_varying_axes(aval.inner_aval, axes))
    if aval.sharding.mesh.empty:  # of a number, or what was staged without a mesh
        mesh = jax.sharding.get_abstract_mesh()
        aval = aval.update(sharding=jax.sharding.NamedSharding(mesh, aval.sharding.spec))
    return aval.update(manual_axis_type=aval.mat.update(varying=axes))


def scalar_like(aval: Aval, dtype: np.dtype[Any]) -> Aval:
    """Returns the type of a scalar that varies over the same mesh axes as `aval`."""
    sharding = aval.sharding.update(spec=jax.sharding.PartitionSpec())
    return aval.update(shape=(), dtype=dtype, weak_type=False, sharding=sharding)


def filled(aval: Aval, value: Value, dtype: np.dtype[Any] | None = None) -> Value:
    # Since JAX 0.12, ``lax.full`` omits the mesh if nothing is sharded over it.
    dtype, sharding = dtype or aval.dtype, aval.sharding
    if sharding.mesh.empty:
        return lax.full(aval.shape, value, dtype)
    x = lax.full(aval.shape, value, dtype, sharding=sharding)
    return jax.sharding.reshard(x, sharding) if jax.typeof(x).sharding.mesh.empty else x


@jax.tree_util.register_pytree_node_class
class Outputs:
    """Holds the outputs of a function for `jax.shard_map`, or their sharding."""

    # JAX takes `out_specs` before it runs the function, which may determine them, but reads the
    # leaves only afterwards. So one such object, without leaves, is passed as `out_specs`, and the
    # function sets it.
    def __init__(self, arrays: Sequence[Any] = ()) -> None:
        self.arrays = list(arrays)

    def with_sharding(self, arrays: Sequence[Any], specs: Sequence[Any]) -> Outputs:
        """Wraps the outputs; this object now holds their sharding."""
        self.arrays = list(specs)
        return Outputs(arrays)

    def tree_flatten(self) -> tuple[list[Any], None]:
        return self.arrays, None

    @classmethod
    def tree_unflatten(cls, _: None, arrays: Sequence[Any]) -> Outputs:
        return cls(arrays)


def is_divided(ctx: mlir.LoweringRuleContext) -> bool:
    """Returns whether a program is being lowered for devices among which XLA divides it."""
    # The context of a lowering rule has no public names for this.
    context: Any = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        return getattr(context, "num_devices", 1) > 1
    rest = [size for name, size in mesh.shape.items() if name not in context.manual_axes]
    return any(size > 1 for size in rest)


def shared_store() -> Any:
    """Returns the client of JAX's key-value store; None without ``jax.distributed.initialize``."""
    # Processes find each other by it, and it works while devices are busy or programs are lowered.
    # Public JAX starts it, and has no name for it.
    return global_state.client
