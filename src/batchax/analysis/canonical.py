"""Jaxprs in a form that drops what does not matter.

A jaxpr becomes a graph of *nodes*: an operation, its parameters, and the nodes it reads. A `Table`
gives equal nodes one number, so that equal equations are one node, unused ones are not reachable,
and two jaxprs read into one table share their common nodes.

A *value* of the jaxpr is a node and how its axes are seen (`CanonicalValue`). Axes of size one are
in no node, and a transpose or a broadcast is only another view of one; most operations pass the
view on (`canonical_form`). It becomes a node where an operation cannot, and at outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal
from jax.sharding import AxisType

from batchax import _compat
from batchax.jaxprs.evaluate import evaluate
from batchax.jaxprs.primitive_facts import facts_of, operations_of
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Jaxpr, Value

LEAVES = frozenset({"argument", "constant", "captured", "carried", "shard", "result", "effect"})
"""Names of nodes that are no operations: where values enter, and results of several."""


@dataclass(frozen=True)
class CanonicalValue:
    """Describes a value: dimension `d` is axis `axes[d]` of the node.

    Where that is None, the value repeats along `shape[d]`. Every axis of the node occurs once.
    """

    node: int
    axes: tuple[int | None, ...]
    shape: tuple[Any, ...]
    eqn: Eqn | None = field(default=None, compare=False, repr=False)

    def see(self, dims: Sequence[int | None], shape: Sequence[Any], eqn: Eqn) -> CanonicalValue:
        """Selects and orders dimensions `dims` of this value; None broadcasts."""
        axes = tuple(
            None if d is None or size == 1 else self.axes[d]
            for d, size in zip(dims, shape, strict=True)
        )
        return CanonicalValue(self.node, axes, tuple(shape), eqn)


@dataclass(frozen=True)
class Node:
    """Describes an operation of the canonical form; `reads` are the numbers of its inputs."""

    name: str
    params: Hashable
    refs: tuple[Hashable, ...]
    reads: tuple[int, ...]
    shape: tuple[Any, ...]
    dtype: Any


class Table:
    """Holds the nodes of all programs that are compared, each once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._numbers: dict[Node, int] = {}
        self._arrays: dict[Hashable, list[Any]] = {}  # by dtype and shape, the large constants

    def number(self, node: Node) -> int:
        """Returns the number of this node, a new one if there is none like it."""
        n = self._numbers.setdefault(node, len(self.nodes))
        if n == len(self.nodes):
            self.nodes.append(node)
        return n

    def contents(self, x: Value) -> Hashable:
        """Returns a key that arrays with equal contents share."""
        if isinstance(x, Tracer) or _compat.is_reference(x):
            return value_key(x)
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return str(jax.random.key_impl(x)), self.contents(jax.random.key_data(x))
        # Equal contents must not depend on where an array is.
        x = x if isinstance(x, jax.Array) else np.asarray(x)
        kind = x.dtype, x.shape
        if x.nbytes <= _SMALL:
            return *kind, np.asarray(x).tobytes()
        # Few arrays have the same shape, and comparing two takes less time than hashing one. Most
        # are the same object in all programs.
        alike = self._arrays.setdefault(kind, [])
        same = (k for k, other in enumerate(alike) if x is other or _same_bytes(x, other))
        number = next(same, len(alike))
        if number == len(alike):
            alike.append(x)
        return *kind, number


_SMALL = 1024  # bytes of an array that is part of its key; larger ones are compared


def _same_bytes(x: Value, y: Value) -> bool:
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (x, y))
    return np.array_equal(a, b)


def whole(node: int, shape: Sequence[Any]) -> CanonicalValue:
    """Returns a node as it is, with the axes of size one that nodes omit."""
    count, axes = 0, []
    for size in shape:
        axes.append(None if size == 1 else count)
        count += size != 1
    return CanonicalValue(node, tuple(axes), tuple(shape))


def without_ones(shape: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(s for s in shape if s != 1)


def typed(aval: Aval) -> tuple[tuple[Any, ...], Any]:
    """Returns shape and dtype of a type. Types other than arrays count as dtypes."""
    if hasattr(aval, "dtype") and not hasattr(aval, "inner_aval"):
        return tuple(aval.shape), aval.dtype
    return (), value_key(aval)


def is_placed(sharding: object) -> bool:
    """Returns whether a sharding is part of types, which name axes of type Explicit only."""
    types = getattr(getattr(sharding, "mesh", None), "axis_types", (AxisType.Explicit,))
    return sharding is not None and AxisType.Explicit in types


IMPURE = frozenset({"rng_uniform"})
"""Primitives with other results each time, which JAX does not treat as an effect."""

CanonicalRule = Callable[["CanonicalProgram", Any, list[CanonicalValue]], list[CanonicalValue]]
rules: dict[str, CanonicalRule] = {}
"""The families of primitives, by name; others take `CanonicalProgram.opaque`."""
rules_by_fact: dict[str, CanonicalRule] = {}
"""The families that are all of which a fact is true; see `Facts`."""


def _find_rule(primitive: _compat.Primitive) -> CanonicalRule:
    if _compat.is_namesake(primitive):  # a third party's, by the name of one of JAX
        return CanonicalProgram.opaque
    facts = facts_of(primitive)
    by_fact = (rule for fact, rule in rules_by_fact.items() if getattr(facts, fact))
    return rules.get(primitive.name) or next(by_fact, CanonicalProgram.opaque)


class CanonicalProgram:
    def __init__(self, table: Table, program: ClosedJaxpr) -> None:
        self.table = table
        self.equations: dict[int, Any] = {}
        self._marks: dict[Any, int] = {}
        self.level = 0
        self.effect = self.leaf("effect", "start", (), (), None)
        inputs = [self.entry("argument", i, v.aval) for i, v in enumerate(program.jaxpr.invars)]
        self.outputs = [self.plain(x).node for x in self.read(program, inputs)]

    # Nodes

    def node(
        self,
        eqn: Eqn | None,
        name: str,
        params: Hashable,
        refs: Sequence[Any],
        shape: Sequence[Any],
        dtype: object,
        also: Sequence[int] = (),
    ) -> int:
        """Returns the node of an operation.

        It reads the first entry of each of `refs`, and `also`.
        """
        reads = (*(r[0] for r in refs), *also)
        made = Node(name, params, tuple(refs), tuple(reads), tuple(shape), dtype)
        number = self.table.number(made)
        self.equations.setdefault(number, eqn)
        return number

    def leaf(
        self, name: str, params: Hashable, reads: Sequence[int], shape: Sequence[Any], dtype: object
    ) -> int:
        return self.node(None, name, params, [(r,) for r in reads], shape, dtype)

    def entry(
        self, name: str, params: Hashable, aval: Aval, reads: Sequence[int] = ()
    ) -> CanonicalValue:
        """Creates a value that enters a program or a body."""
        shape, dtype = typed(aval)
        return whole(self.leaf(name, params, reads, without_ones(shape), dtype), shape)

    def results(self, eqn: Eqn, node: int) -> list[CanonicalValue]:
        return [
            self.entry("result", i, v.aval, [node])
            if len(eqn.outvars) > 1
            else whole(node, typed(v.aval)[0])
            for i, v in enumerate(eqn.outvars)
        ]

    # Views made operations

    def solid(self, x: CanonicalValue, dims: Sequence[int] | None = None) -> CanonicalValue:
        """Makes the repetition of `x` along `dims` (default: all) an operation."""
        dims = range(len(x.shape)) if dims is None else dims
        # A dimension of size one repeats nothing.
        new = [d for d in dims if x.axes[d] is None and x.shape[d] != 1]
        if not new:
            return x
        old = self.table.nodes[x.node]
        sizes = tuple(x.shape[d] for d in new)
        name, ref = "broadcast_in_dim", [(x.node,)]
        node = self.node(x.eqn, name, sizes, ref, (*old.shape, *sizes), old.dtype)
        axes = list(x.axes)
        for i, d in enumerate(new):
            axes[d] = len(old.shape) + i
        return replace(x, node=node, axes=tuple(axes))

    def plain(self, x: CanonicalValue) -> CanonicalValue:
        """Orders the axes of `x` with nothing repeated, as any operation accepts it."""
        x = self.solid(x)
        order = tuple(a for a in x.axes if a is not None)
        if order == tuple(range(len(order))):
            return x
        old = self.table.nodes[x.node]
        shape = [old.shape[a] for a in order]
        node = self.node(x.eqn, "transpose", order, [(x.node,)], shape, old.dtype)
        return replace(whole(node, x.shape), eqn=x.eqn)

    # Reading

    def read(self, program: ClosedJaxpr, inputs: Sequence[CanonicalValue]) -> list[CanonicalValue]:
        """Returns the outputs of a program for these inputs, with calls inlined."""
        consts = [self.constant(c) for c in program.consts]
        return self._read(program.jaxpr, [*consts, *inputs])

    def _read(self, jaxpr: Jaxpr, inputs: Sequence[CanonicalValue]) -> list[CanonicalValue]:
        consts = len(jaxpr.constvars)

        def number(literal: Literal) -> CanonicalValue:
            return self.constant(literal.val, literal.aval)

        return evaluate(jaxpr, inputs[:consts], inputs[consts:], self._equation, number)

    def _equation(self, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
        # Primitives of batchax are compared by the operations that they stand for.
        own = operations_of(eqn)
        if own is not None:
            return self.read(_compat.without_dead(own), args)
        return _find_rule(eqn.primitive)(self, eqn, args)

    def opaque(self, eqn: Eqn, args: list[CanonicalValue]) -> list[CanonicalValue]:
        """Reads an unknown equation: its operands as they are, and all parameters."""
        args = [self.plain(x) for x in args]
        bodies: list[int] = []
        params = self.parameters(eqn.params, [x.node for x in args], bodies)
        return self.results(eqn, self.operation(eqn, params, args, bodies))

    def operation(
        self, eqn: Eqn, params: Hashable, args: Sequence[CanonicalValue], also: Sequence[int] = ()
    ) -> int:
        """Returns the node of an equation, which reads the effects before it if it has one."""
        refs: list[Any] = [(x.node, x.axes, x.shape) for x in args]
        observed = _compat.observed(eqn.effects) or eqn.primitive.name in IMPURE
        # Effects form a chain, so that their order counts.
        if observed:
            refs.append((self.effect,))
        types = tuple(typed(v.aval) for v in eqn.outvars)
        key = (value_key(eqn.primitive), params, types, _context(eqn))
        shape, dtype = types[0] if len(types) == 1 else ((), None)
        node = self.node(eqn, eqn.primitive.name, key, refs, without_ones(shape), dtype, also=also)
        if observed:
            self.effect = node
        return node

    def body(
        self, program: ClosedJaxpr, inputs: Callable[[Any], list[CanonicalValue]]
    ) -> tuple[list[CanonicalValue], Hashable]:
        """Returns the outputs of a loop body or branch, and its last effect.

        `inputs` makes its inputs for a nesting depth.
        """
        with self._inside():
            start = self.effect
            outs = self.read(program, inputs(self.level))
            return outs, (None if self.effect == start else self.effect)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        outside, self.level = self.effect, self.level + 1
        # Effects in a body form a separate chain, which starts at its level.
        self.effect = self.leaf("effect", self.level, (), (), None)
        try:
            yield
        finally:
            self.effect, self.level = outside, self.level - 1

    # Constants and parameters

    def constant(self, x: Value, aval: Aval = None) -> CanonicalValue:
        """Returns the node of a known value: equal ones share it."""
        shape, dtype = typed(jax.typeof(x) if aval is None else aval)
        if isinstance(x, (bool, int, float, complex)):
            x = np.asarray(x, dtype)
        node = self.leaf(
            "constant", (self.table.contents(x), shape), (), without_ones(shape), dtype
        )
        return whole(node, shape)

    def parameters(self, params: object, reads: Sequence[int], bodies: list[int]) -> Hashable:
        """Turns parameters into a key, and reads jaxprs among them, whose nodes go to `bodies`."""

        inside: list[int] = []

        def held(x: Value, parts: dict[str, Any]) -> Hashable:
            # Objects may refer to each other in a cycle: a back reference is by depth.
            if id(x) in inside:
                return inside.index(id(x))
            inside.append(id(x))
            key = type(x), inner(parts)
            inside.pop()
            return key

        def inner(x: Value) -> Hashable:
            if isinstance(x, _compat.JAXPR_TYPES):
                # One that is open is run with values for its constants, as for its other inputs.
                # Since JAX 0.12 an open one still holds those of its trace, which is over.
                over = any(isinstance(c, Tracer) for c in getattr(x, "consts", ()))
                opened = over or (not hasattr(x, "consts") and x.constvars)
                program = _compat.close(_compat.constants_as_inputs(x) if opened else x)

                def inputs(level: int) -> list[CanonicalValue]:
                    avals = [v.aval for v in program.jaxpr.invars]
                    return [
                        self.entry("carried", (level, i), a, reads) for i, a in enumerate(avals)
                    ]

                outs, effects = self.body(program, inputs)
                nodes = tuple(self.plain(y).node for y in outs)
                bodies.extend(nodes)
                return "program", nodes, effects
            if isinstance(x, dict):
                return tuple((k, inner(v)) for k, v in sorted(x.items(), key=lambda kv: str(kv[0])))
            if isinstance(x, (tuple, list)):
                return tuple(map(inner, x))
            if isinstance(x, np.generic):
                x = x.item()
            if type(x) is object:  # a mark: which is which does not matter, which are the same does
                return object, self._marks.setdefault(x, len(self._marks))
            parts = _attributes(x)
            if parts:
                return held(x, parts)
            if not _is_hashable(x):
                leaves, structure = jax.tree.flatten(x)
                if not any(leaf is x for leaf in leaves):
                    return structure, inner(leaves)
            array = isinstance(x, (np.ndarray, jax.Array))
            return self.table.contents(x) if array else value_key(x)

        return inner(params)


def _attributes(x: Value) -> dict[str, Any]:
    """Returns the attributes of a Python object, unless its class defines equality."""
    kind = type(x)
    # Types with a custom `__new__` or `__eq__` define which objects are equal.
    if kind.__new__ is not object.__new__ or isinstance(x, (_compat.Primitive, Tracer)):
        return {}
    if kind.__eq__ is not object.__eq__:
        return {}
    names = {name for c in kind.__mro__ for name in c.__dict__.get("__slots__", ())}
    names = sorted(n for n in names - {"__weakref__", "__dict__"} if hasattr(x, n))
    return {**getattr(x, "__dict__", {}), **{name: getattr(x, name) for name in names}}


def _is_hashable(x: Value) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _context(eqn: Eqn) -> Hashable:
    """Returns the settings in an equation's context that change its results."""
    names = ("compute_type", "threefry_partitionable")
    return tuple(value_key(getattr(eqn.ctx, name, None)) for name in names)
