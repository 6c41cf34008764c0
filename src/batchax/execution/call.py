"""A call of `vmap` as a value, the passes it goes through, and `execute`, which runs it.

A `Call` is a function of one example, its arguments, and the *strategy* by which its axis runs. It
begins as one of all lanes at once. A pass takes a call and returns one: with lanes sharded over
devices, or with a few that run at a time. What is left after all passes is executed::

    outs, outputs = execute(apply_passes(passes, Call(axis, function, mapped)))

A new strategy is a subclass of `Strategy`, and a pass that gives it to its calls.

References become values here, so that what uses them can be cut into sections. JAX discharges those
that a jaxpr creates. But that also inlines operations in loops and branches that JAX lowers early,
such as functions with custom derivatives, whose rules would be lost without an error. So an
equation without references is held, meanwhile, as a primitive that JAX does not know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
from jax.core import Tracer, eval_jaxpr

from batchax import _compat
from batchax.cache import Cache
from batchax.contractions.contracted import factored, run_adding
from batchax.contractions.deferred import DeferredContraction
from batchax.errors import UnsupportedError
from batchax.execution.eager import compiled_whole, may_call_python
from batchax.frontend.arguments import Mapped
from batchax.frontend.in_axes import SpecifiedLeaf, is_array
from batchax.frontend.outputs import (
    Described,
    FlatOutputs,
    OutputArray,
    as_array,
    check_unbatched,
    place,
)
from batchax.jaxprs.evaluate import Inside, rewritten
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position, Positions
from batchax.kernel.inner import MappedProgram, example_aval, remembered, stage_described
from batchax.kernel.interpreter import WHOLE, checks_nans_here, hide_from_debug_nans
from batchax.kernel.own_primitive import held, released
from batchax.kernel.registry import call_key

Self = TypeVar("Self", bound="Call")

Outputs = tuple[list[Any], FlatOutputs]
"""What a call returns: arrays, and how to rebuild what they are of."""


class Strategy:
    """Describes an execution strategy as a value: equal ones do the same for equal calls.

    Subclasses must define `run`; `execute` handles tracing, notes, and caches.
    """

    # `hides`: it computes values that ``jax.debug_nans`` must not see, such as masked lanes.
    hides: ClassVar[bool] = True
    # `compiles`: outside of `jit`, all operations are compiled as one program, which is faster than
    # one by one.
    compiles: ClassVar[bool] = False
    # `makes_calls`: `run` makes calls that are executed on their own; nothing is traced for it.
    makes_calls: ClassVar[bool] = False

    @property
    def cache(self) -> Cache | None:
        """Returns the cache of its programs for calls outside of `jit`, or None."""
        return None

    def run(self, call: Call) -> tuple[list[Value], Any]:
        """Returns the arrays of all lanes, and details on them that hold no arrays."""
        raise NotImplementedError

    def needs_program(self, call: Call) -> bool:
        """Returns whether the function is traced before it runs."""
        return True

    def note(self, call: Call) -> None:
        recording.found_program(call.axis, call.staged, call.mapped)

    def prepared(self, call: Call) -> Call:
        """Adapts a call to this strategy, or raises UnsupportedError."""
        return call

    def stages_whole(self, call: Call) -> bool:
        """Returns whether everything is traced before any of it is computed."""
        return True

    def passes_constants(self, call: Call) -> bool:
        """Returns whether values that the function closes over are passed as arguments."""
        return self.cache is not None and not call.traced

    def put(self, constants: Sequence[Any]) -> Sequence[Any]:
        """Moves values that the function closes over to their devices."""
        return constants

    def may_keep(self, said: Any) -> bool:
        """Returns whether a program with these details may be cached."""
        return True

    def check(self, call: Call, said: Any) -> None:
        """Raises for invalid results before they are computed."""

    def finish(self, call: Call, arrays: list[Value], said: Any) -> Outputs:
        return arrays, call.outputs


@dataclass(frozen=True)
class AllAtOnce(Strategy):
    """Runs all lanes at once, equation by equation, as ``jax.vmap`` does."""

    hides: ClassVar[bool] = False

    def stages_whole(self, call: Call) -> bool:
        # Results with no output axis must not depend on the batch, which is known only after the
        # last operation.
        return any(output.spec is None for output in call.described)

    def run(self, call: Call) -> tuple[list[Value], _Placed]:
        values, positions, outputs = call.values, call.positions, call.outputs
        program = MappedProgram(call.axis, call.staged, values, positions, call.computes)
        if not outputs.added:
            arrays, positions = program.run()
            return arrays, _Placed(positions, ())
        arrays, positions = run_adding(program, outputs.added)
        totals = [k for k, x in enumerate(arrays) if isinstance(x, DeferredContraction)]
        for k in totals:
            # Sums that consumed a contraction were deferred: they take all lanes here.
            arrays[k] = arrays[k].of_all(outputs.described[k].spec.reduction)
        return arrays, _Placed(positions, totals)

    def check(self, call: Call, said: Any) -> None:
        check_unbatched(call.axis, call.described, said.positions)

    def finish(self, call: Call, arrays: list[Value], said: Any) -> Outputs:
        outputs = call.outputs
        placed = zip(outputs.described, arrays, said.positions, strict=True)
        return [
            x if k in said.totals else place(call.axis, output, x, a)
            for k, (output, x, a) in enumerate(placed)
        ], outputs


class _Placed(NamedTuple):
    """Holds the batch axes of results, and which are sums over it."""

    positions: Positions
    totals: Sequence[int]


@dataclass(frozen=True, eq=False)
class Call:
    """Describes a function of one example, called for all lanes."""

    axis: Axis
    function: Described  # returns arrays and their description
    # Arguments. The first `constants` of them stand for values that the function closes over.
    mapped: Sequence[Mapped]
    strategy: Strategy = AllAtOnce()
    constants: int = 0
    # traced for one example, once needed; with its outputs
    program: tuple[ClosedJaxpr, FlatOutputs] | None = None
    computes: bool = False  # whether what it emits is computed at once

    @property
    def values(self) -> list[Value]:
        return [m.value for m in self.mapped]

    @property
    def positions(self) -> list[Position]:
        return [m.axis for m in self.mapped]

    @property
    def shared(self) -> list[Value]:
        return [m.value for m in self.mapped if m.axis is None]

    @property
    def staged(self) -> ClosedJaxpr:
        return (self.program or self._program)[0]

    @property
    def outputs(self) -> FlatOutputs:
        return (self.program or self._program)[1]

    @property
    def described(self) -> Sequence[OutputArray]:
        return self.outputs.described

    @property
    def _program(self) -> tuple[ClosedJaxpr, FlatOutputs]:
        # A cached_property of Python 3.11 has one lock for all calls: a function that waits for a
        # thread in which another is staged would wait forever.
        if "found" not in self.__dict__:
            self.__dict__["found"] = self._stage()
        return self.__dict__["found"]

    def _stage(self) -> tuple[ClosedJaxpr, FlatOutputs]:
        given = self.mapped[self.constants :]
        avals = [example_aval(self.axis, jax.typeof(m.value), m.axis) for m in given]
        paths = [m.path for m in given]
        staged, outputs = stage_described(self.axis, self.function, avals, paths)
        if outputs.added:  # sums over the batch may be factored out of contractions
            positions = [m.axis for m in given]
            staged = factored(self.axis, staged, positions, outputs.added, self.given_traced)
        return staged, outputs

    def with_program(self: Self) -> Self:
        """Traces the function now, so that calls derived from this one share the trace."""
        return self if self.program is not None else replace(self, program=self._program)

    @property
    def given_traced(self) -> bool:
        return any(isinstance(m.value, Tracer) for m in self.mapped)

    @property
    def traced(self) -> bool:
        """Returns whether running it traces operations instead of computing them."""
        return self.given_traced or any(isinstance(x, Tracer) for x in self.staged.consts)

    def with_values(self, values: Values) -> Call:
        if all(x is m.value for m, x in zip(self.mapped, values, strict=True)):
            return self
        mapped = [m.put(x) for m, x in zip(self.mapped, values, strict=True)]
        return replace(self, mapped=mapped)

    def with_constants_passed(self) -> Call:
        """Passes constants as arguments, so that the program holds no values and can be cached."""
        (staged,), consts = _compat.hoist_constants(self.staged)
        given = [Mapped(CONSTANT, x, None) for x in self.strategy.put(consts)]
        return replace(
            self,
            mapped=[*given, *self.mapped],
            constants=len(given) + self.constants,
            program=(staged, self.outputs),
        )

    @property
    def key(self) -> Hashable:
        """Returns a key for calls that compute the same for any values, if nothing is traced."""
        specs = tuple(output.spec for output in self.described)
        places = zip(map(jax.typeof, self.values), self.positions, strict=True)
        return call_key(self.axis, self.staged, self.strategy, specs, *places)


CONSTANT = "a value that the function closes over"

Pass = Callable[[Call], Call]


def apply_passes(passes: Iterable[Pass], call: Call) -> Call:
    return functools.reduce(lambda call, change: change(call), passes, call)


def execute(call: Call) -> Outputs:
    """Runs a call by its strategy.

    Raises AxisError if a result depends on the batch where it must not, and UnsupportedError if the
    strategy does not support the call.
    """
    strategy = call.strategy
    # The calls that it makes come back here, one by one.
    if strategy.makes_calls:
        return hide_from_debug_nans(
            lambda *values: strategy.run(call.with_values(values)), call.values, WHOLE
        )
    with _compat.name_stack_extended("vmap"):
        recorded = recording.is_on()
        if recorded or strategy.needs_program(call):
            call = call.with_program()
        if recorded:
            strategy.note(call)
        call = strategy.prepared(call)
        strategy = call.strategy
        if strategy.passes_constants(call) and not recorded:
            call = call.with_constants_passed()
        if strategy.hides:
            run = lambda *values: _evaluated(call.with_values(values))
            arrays, said = hide_from_debug_nans(run, call.values, WHOLE)
        else:
            arrays, said = _evaluated(call)
        _raise_here(call, arrays)
        outs, outputs = strategy.finish(call, arrays, said)
    return list(map(as_array, outs)), outputs


def _raise_here(call: Call, arrays: Values) -> None:
    """Raises errors of host callbacks outside of `jit` in the call, not where results are read.

    JAX runs an operation later if it waits for one from before, and then no caller of the function
    could handle the error.
    """
    computed = [x for x in map(_compat.array_behind, arrays) if x is not None]
    if not computed:
        return
    # An operation of `jax.experimental.hijax` is staged for its program, which may name the axis.
    with _compat.named_scope(call.axis.name, call.axis.size):
        waits = may_call_python.in_program(call.staged)
    if waits:
        jax.block_until_ready(computed)


def _evaluated(call: Call) -> tuple[list[Value], Any]:
    """Returns the arrays of a strategy, and its details on them."""
    strategy = call.strategy
    # If nothing is traced, operations would run as they are met. Tracing all of them first finds
    # errors before anything is computed, and the program can be cached.
    if not call.traced and strategy.stages_whole(call):
        whole = _whole(call)
        strategy.check(call, whole.said)
        if (
            not checks_nans_here()
        ):  # at the results of the user's operations, which are those of `run`
            return whole.run(*call.values), whole.said
    arrays, said = strategy.run(call)
    strategy.check(call, said)
    return arrays, said


class _Whole(NamedTuple):
    """Holds everything that a strategy does as one program."""

    program: ClosedJaxpr
    said: Any
    run: Callable[..., list[Any]]


def _whole(call: Call) -> _Whole:
    strategy, cache = call.strategy, call.strategy.cache

    def run(*values: Value) -> tuple[list[Value], Any]:
        return strategy.run(replace(call.with_values(values), computes=True))

    def stage() -> _Whole:
        program, said = _compat.stage_described(run, list(map(jax.typeof, call.values)))
        if strategy.compiles and not program.effects and not recording.is_on():
            return _Whole(program, said, compiled_whole(program))
        evaluate = functools.partial(eval_jaxpr, program.jaxpr, program.consts)
        return _Whole(program, said, evaluate)

    # While notes are taken, no cached program is used: nothing would be noted.
    if cache is None or recording.is_on():
        return stage()
    key = call.key
    kept = cache.find(key)
    if kept is None:
        kept = stage()
        if strategy.may_keep(kept.said):
            kept = cache.get(key, lambda: kept)
    return kept


def without_references(program: ClosedJaxpr, name: Hashable | None, size: Value) -> ClosedJaxpr:
    """Removes the references that `program` creates, which may use the axis `name`."""
    if not _compat.makes_references(program.effects):
        return program

    def with_values() -> ClosedJaxpr:
        # JAX discharges references by tracing again. Equations that touch none are held in a
        # placeholder meanwhile, so that they stay as they are.
        left = rewritten(program, _hold)
        return rewritten(_compat.without_references(left, name, size), _release)

    return remembered(program, ("without references", name, size), with_values)


def _hold(eqn: Eqn, inside: Inside) -> Eqn:
    if _compat.touches_references(eqn):
        return eqn.replace(params=inside())
    return held(eqn)


def _release(eqn: Eqn, inside: Inside) -> Eqn:
    return released(eqn) or eqn.replace(params=inside())


def mapped_as_values(call: Call) -> tuple[Call, Callable[[Outputs], Outputs]]:
    """Turns mapped references into values, and returns a function that writes new values back."""
    at = [i for i, m in enumerate(call.mapped) if m.axis is not None and _is_reference(m.value)]
    if not at:
        return call, lambda results: results
    references = [call.mapped[i].value for i in at]

    def function(*examples: Value) -> tuple[list[Value], FlatOutputs]:
        # Each lane has its part of such a reference, so lanes run in any order. The part is a
        # reference created inside, and its last value is one more output.
        own = [jax.new_ref(x) if i in at else x for i, x in enumerate(examples)]
        arrays, outputs = call.function(*own)
        parts = [OutputArray(call.mapped[i].path, call.mapped[i].axis) for i in at]
        described = [*outputs.described, *parts]
        return [*arrays, *(own[i][...] for i in at)], replace(outputs, described=described)

    def write(results: Outputs) -> Outputs:
        arrays, outputs = results
        for reference, i, new in zip(references, at, arrays[-len(at) :], strict=True):
            old = mapped[i].value
            here = isinstance(old, Tracer) or isinstance(new, Tracer)
            reference[...] = new if here else jax.device_put(new, old.sharding)  # from a mesh
        return arrays[: -len(at)], replace(outputs, described=outputs.described[: -len(at)])

    _compat.named_after(function, call.function)
    mapped = [m.put(m.value[...]) if i in at else m for i, m in enumerate(call.mapped)]
    return replace(call, function=function, mapped=mapped), write


def check_not_shared(shared: Iterable[SpecifiedLeaf]) -> None:
    """Raises UnsupportedError for a reference among the arguments that all lanes share."""
    for leaf in shared:
        for keys, x in jax.tree_util.tree_flatten_with_path(leaf.value)[0]:
            if _is_reference(x):
                raise UnsupportedError(shared_reference(leaf.path + jax.tree_util.keystr(keys)))


def shared_reference(which: str) -> str:
    return (
        f"{which} is a reference (jax.new_ref) that all lanes share, and batch_size or mesh was "
        "given: what a lane reads would depend on which lanes have run. Pass the reference an axis "
        "in in_axes, create it inside the function, or pass its value, reference[...]."
    )


def _is_reference(x: Value) -> bool:
    return is_array(x) and _compat.is_reference(x)
