"""The function of one row: what it takes, what it returns, and its compiled programs."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.analysis.cost import PLANS, cost_of_program
from batchax.datasets.fingerprint import Staged, digest
from batchax.datasets.inputs import Input, Inputs, elements_of_batches, find_inputs
from batchax.datasets.plan import Data, Leaf, Rows, as_ragged, kept, reject_several_axes
from batchax.datasets.source import native
from batchax.datasets.sources import Keep
from batchax.divergence.runner import for_any_machine
from batchax.errors import ArgumentTypeError, UnsupportedError
from batchax.execution.eager import whatever_jit
from batchax.execution.memory import Auto, fitting_chunk, parse_limit
from batchax.execution.sections import result_type
from batchax.frontend import reductions
from batchax.frontend.advice import come_from
from batchax.frontend.containers import is_container
from batchax.frontend.in_axes import is_position, spread_specs
from batchax.frontend.options import converted, wraps
from batchax.frontend.outputs import (
    AUTO,
    Reduce,
    check_lanes,
    check_reduces,
    flatten_arrays,
    is_added,
    is_output_spec,
)
from batchax.frontend.reductions import Reduction
from batchax.jaxprs.error_format import name_of
from batchax.jaxprs.types import AxesTree, ClosedJaxpr, Tree, Value, Values
from batchax.rows.building import without
from batchax.rows.dynamic_sizes import OutputRows, rows_of_output
from batchax.rows.ragged import Ragged
from batchax.vmap import vmap


def type_of_row(m: Input) -> jax.ShapeDtypeStruct:
    shape = list(m.source.shape)
    del shape[m.axis]
    if m.longest is not None:
        shape.insert(m.source.ragged_axis, m.longest)
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(m.source.dtype))


def type_of_batch(m: Input, batch_size: int) -> jax.ShapeDtypeStruct | Ragged:
    source, dtype = m.source, jax.dtypes.canonicalize_dtype(m.source.dtype)
    if source.lengths is not None:
        elements = elements_of_batches(source.lengths, batch_size)
        capacity = max(1, int(elements.max(initial=0)))
        axis, rest = source.ragged_axis, source.shape[1:]
        data = jax.ShapeDtypeStruct((*rest[:axis], capacity, *rest[axis:]), dtype)
        made = lambda data, lengths: Ragged(data, lengths, m.longest, axis=axis)
        return jax.eval_shape(made, data, jax.ShapeDtypeStruct((batch_size,), np.int32))
    shape = (*source.shape[: m.axis], batch_size, *source.shape[m.axis + 1 :])
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclass(frozen=True)
class Output:
    path: str  # for messages: "out['loss']"
    leaf: Leaf  # the array of all rows; what is reduced over them has the shape of one row
    spec: Reduce | None = None  # how it is reduced over the rows; None if each row has its own
    row: Any = None  # the type of what one row has, if it is reduced

    @property
    def reduces(self) -> bool:
        return self.spec is not None

    @property
    def _reduction(self) -> Reduction:
        assert self.spec is not None
        return self.spec.reduction

    @functools.cached_property
    def state(self) -> Tree:
        return reductions.state_type(self._reduction, self.row)

    def combined(self, parts: Sequence[Any]) -> Tree:
        return reductions.on_host(self._reduction, [jax.tree.map(_wide, part) for part in parts])

    def of_no_rows(self) -> Tree:
        neutral = reductions.neutral_like(self._reduction, self.state)
        return jax.tree.map(lambda x, none: np.full(x.shape, none, x.dtype), self.state, neutral)

    def finished(self, whole: Tree, rows: int) -> np.ndarray:
        return reductions.finished_on_host(self._reduction, whole, rows, self.leaf.dtype)

    def named_parts(self, state: Tree) -> dict[str, np.ndarray]:
        arrays = jax.tree.leaves(state)
        return dict(zip(self._part_names(len(arrays)), arrays, strict=True))

    def state_of(self, named: Mapping[str, np.ndarray]) -> Tree:
        structure = jax.tree.structure(self.state)
        return structure.unflatten([named[name] for name in self._part_names(structure.num_leaves)])

    def _part_names(self, count: int) -> list[str]:
        name = self.leaf.name
        return [name] if count == 1 else [f"{name}#{i}" for i in range(count)]

    @property
    def described(self) -> int | str:
        """Returns the axis of the rows, or the reduction, for JSON."""
        if self.spec is None:
            return self.leaf.axis
        if isinstance(self.spec.kind, str):
            return self.spec.kind
        parts = functools.partial(reductions.in_two_parts, self.spec.kind)
        return digest(jax.make_jaxpr(parts)(self.row, self.row))

    @property
    def of_row(self) -> jax.ShapeDtypeStruct:
        """Returns the type of a row, or of an element if rows have different lengths."""
        shape = [n for i, n in enumerate(self.leaf.shape) if i != self.leaf.axis]
        return self.row if self.reduces else jax.ShapeDtypeStruct(shape, self.leaf.dtype)

    @property
    def row_bytes(self) -> int:
        """Returns the size of a row, or of an element if rows have different lengths."""
        shape = [n for i, n in enumerate(self.leaf.shape) if self.reduces or i != self.leaf.axis]
        return int(np.prod(shape)) * self.leaf.dtype.itemsize


def find_outputs(
    types: Tree, out_axes: AxesTree, rows: int, grows: bool = False, rows_name: str = ""
) -> list[Output]:
    leaves, _ = spread_specs(out_axes, types, "out", "out_axes", is_output_spec, by_name=True)
    named, _ = jax.tree_util.tree_flatten_with_path(types, is_leaf=is_container)
    outputs, size = [], 0 if grows else rows  # of arrays, to begin with
    for leaf, (keys, _) in zip(leaves, named, strict=True):
        x, spec = leaf.value, leaf.spec
        name = jax.tree_util.keystr(keys, simple=True, separator="/")  # of "out['a'][0].b": "a/0/b"
        if isinstance(x, Ragged):
            reject_several_axes(x.axis, leaf.path)
            if not is_position(spec):
                raise UnsupportedError(
                    f"{leaf.path} has rows of different lengths, and out_axes gives {spec!r}: such "
                    "rows are kept one after another, and out_axes is 0."
                )
            row, dtype = without(x.data.shape, [x.element_axis]), native(x.data.dtype, leaf.path)
            outputs.append(Output(leaf.path, Leaf(name, (size, *row), dtype, 0, x.axis, grows)))
            continue
        if is_container(x):
            raise UnsupportedError(
                f"{leaf.path} is of type {type(x).__name__}, which is kept as no array. Return "
                "the arrays that it is made of."
            )
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise UnsupportedError(
                f"{leaf.path} are random keys, which are kept as no array. Return "
                "jax.random.key_data(key)."
            )
        if isinstance(spec, Reduce):
            if spec.unmapped == "keep":
                raise UnsupportedError(
                    f"out_axes gives {spec!r} for {leaf.path}: map returns only what is reduced; "
                    'remove unmapped="keep".'
                )
            one = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
            check_reduces(spec, one, leaf.path)
            check_lanes(spec, rows, leaf.path, "there are no rows")
            reduction, result = spec.reduction, result_type(spec.reduction, x, 0)
            if reduction.index and rows > np.iinfo(np.int32).max:
                raise UnsupportedError(
                    f"out_axes gives {spec!r} for {leaf.path}, and there are {rows:,} rows: their "
                    "numbers do not fit into an int32. Map fewer rows in a call."
                )
            whole = Leaf(name, result.shape, np.dtype(result.dtype))
            outputs.append(Output(leaf.path, whole, spec, one))
        elif is_position(spec) or spec is AUTO:
            axis = 0 if spec is AUTO else int(spec) % len(x.shape)
            shape, dtype = (*x.shape[:axis], size, *x.shape[axis + 1 :]), native(x.dtype, leaf.path)
            leaf_of = Leaf(name, shape, dtype, axis, None, grows, rows_name)
            outputs.append(Output(leaf.path, leaf_of))
        else:
            raise UnsupportedError(
                f"out_axes gives {spec!r} for {leaf.path}: map keeps what each row has, at an axis "
                'given by its number, and reductions, batchax.Reduce("mean").'
            )
    names = [o.leaf.name for o in outputs]
    if len(set(names)) < len(names) or ("" in names and len(names) > 1):
        raise ArgumentTypeError(
            f"each output needs a name, its path, but they are {', '.join(map(repr, names))}. "
            "Return a dict with a name for each."
        )
    return outputs


def lanes_of(out_axes: AxesTree, added: bool = False) -> AxesTree:
    """Returns `out_axes` that keep all rows, except for states if these are `added`."""

    def of_one(x: object) -> object:
        if added and is_added(x):
            return _TOTAL
        return 0 if isinstance(x, Reduce) or x is AUTO else x

    is_leaf = lambda x: x is None or is_output_spec(x)
    return jax.tree.map(of_one, out_axes, is_leaf=is_leaf)


_TOTAL = Reduce(Reduction(jnp.add, 0))


def states_to_add(out: Tree, out_axes: AxesTree, counts: Value | None = None) -> Tree:
    """Replaces outputs that rows add up by states, so that `vmap` adds them (`contractions/`).

    `counts` is False for a row that sums leave out; None: all count.
    """
    leaves, rebuild = spread_specs(out_axes, out, "out", "out_axes", is_output_spec, by_name=True)

    def state(x: Value, reduction: Reduction) -> Value:
        x = jnp.asarray(x)
        x = x if reduction.lane is None else reduction.lane(x)
        return x if counts is None else lax.select(counts, x, lax.full_like(x, 0))

    values = (state(x.value, x.spec.reduction) if is_added(x.spec) else x.value for x in leaves)
    return rebuild(iter(values))


def arrays_of(
    outputs: Sequence[Output], out: Tree, numbers: Value, real: Value | None = None
) -> list[Any]:
    """Reduces the outputs of a batch inside a program, except for those that `vmap` added."""
    leaves = jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, Ragged))
    arrays = []
    for output, x in zip(outputs, leaves, strict=True):
        if output.spec is not None and not is_added(output.spec):
            index, reduction = numbers.astype(np.int32), output.spec.reduction
            states = reductions.states_of(reduction, x, 0, index, real)
            x = reductions.folded(reduction, *states)
        arrays.append(x)
    return arrays


def _wide(x: np.ndarray) -> np.ndarray:
    """Widens to the largest dtype of its kind, to add the parts of many rows."""
    wide = {"b": np.bool_, "c": np.complex128, "u": np.uint64, "i": np.int64}
    return x.astype(wide.get(x.dtype.kind, np.float64))  # bfloat16 has no such kind


def nothing(dtype: np.dtype) -> np.ndarray:
    """Returns the value of a row without a result: NaN, or zero for dtypes without one."""
    has_nan = jnp.issubdtype(dtype, jnp.inexact)
    return np.array(np.nan if has_nan else 0).astype(dtype)


_FEW = 8  # rows, by whose program it is seen what a row takes
_COUNTS = "counts in sums"  # no name that an argument may have


@dataclass(frozen=True, eq=False)
class RowFunction:
    fun: Callable[..., Any]  # the function of one row
    arrays: tuple[Any, ...]  # its arguments, as the user gave them
    inputs: Inputs  # what is known of these
    in_axes: Any  # as for `vmap`, by the place of arguments
    out_axes: Any  # as for `vmap`
    key: Any  # a random key, from which each row gets its own; None for no keys
    options: dict[str, Any]  # other options of `vmap`
    keep: Any = ()  # as for `map`
    _returns: list[Any] = field(default_factory=list)  # the type of what it returned last
    _latest: Any = None  # the program of a batch that was compiled last

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        arrays: tuple[Any, ...],
        in_axes: AxesTree,
        out_axes: AxesTree,
        key: jax.Array | None,
        options: dict[str, Any],
        batched: bool = False,
        start: int = 0,
        keep: Keep = (),
    ) -> RowFunction:
        in_axes = _by_position(fun, in_axes, len(arrays), key is not None)
        keyed = key is not None and not takes_key_by_name(fun)
        called = functools.partial(fun, key) if keyed else fun
        inputs = find_inputs(called, in_axes, arrays, batched, start, keep)
        return cls(fun, arrays, inputs, in_axes, out_axes, key, options, keep)

    @property
    def name(self) -> str:
        return name_of(self.fun)

    @property
    def flat(self) -> bool:
        return bool(self.outputs) and self._returns == [OutputRows]

    @functools.cached_property
    def _unpacked(self) -> Callable[..., Any]:
        """Wraps the function to replace `OutputRows` by their rows."""

        @wraps(self.fun)
        def unpacked(*args: Any, **kwargs: Any) -> Tree:
            out = self.fun(*args, **kwargs)
            self._returns[:] = [type(out)]
            return rows_of_output(out)

        return unpacked

    def batched(
        self, numbers: Value, rows: Sequence[Any], shared: Sequence[Any], real: Value | None = None
    ) -> Tree:
        """Computes the outputs of a batch; `real` masks rows that sums leave out."""

        @wraps(self.fun)
        def adding(*args: Any, **kwargs: Any) -> Tree:
            counts = kwargs.pop(_COUNTS, None)
            return states_to_add(self._unpacked(*args, **kwargs), self.out_axes, counts)

        more = {} if real is None else {_COUNTS: real}
        added = lanes_of(self.out_axes, added=True)
        return self._vmapped(adding, added, numbers, rows, shared, more)

    def _vmapped(
        self,
        fun: Callable[..., Any],
        out_axes: AxesTree,
        numbers: Value,
        rows: Sequence[Any],
        shared: Sequence[Any],
        more: dict[str, Any],
    ) -> Tree:
        args, kwargs = self.inputs.arguments(self._with_same_lengths(rows), shared)
        in_axes = self.in_axes
        if self.key is not None:
            keys = jax.vmap(functools.partial(jax.random.fold_in, self.key))(numbers)
            if takes_key_by_name(self.fun):
                kwargs = {**kwargs, "key": keys}
            else:
                args, in_axes = (keys, *args), _with_key(in_axes, len(args))
        options = dict(self.options)
        # A job may resume on another machine, where results must round the same way.
        options["divergence"] = for_any_machine(options.get("divergence", "auto"))
        with come_from(self.inputs.names):
            outs = vmap(fun, in_axes, out_axes, **options)(*args, **kwargs, **more)
        flatten_arrays(outs, containers=True)  # raises for objects that are not arrays
        return outs

    def _with_same_lengths(self, rows: Sequence[Any]) -> list[Any]:
        """Shares an array of lengths between mapped arguments of equal lengths."""
        # `vmap` matches rows of several arguments by the identity of their lengths.
        return [
            Ragged(x.data, rows[first].lengths, x.max_length, axis=x.axis)
            if isinstance(x, Ragged)
            else x
            for x, first in zip(rows, self._same_lengths, strict=True)
        ]

    @functools.cached_property
    def _same_lengths(self) -> list[int]:
        """Returns for each mapped argument the first one with the same lengths."""
        lengths = [m.source.lengths for m in self.inputs.mapped]
        same = lambda x, y: x is y or np.array_equal(x, y)
        return [next(i for i, x in enumerate(lengths) if same(x, each)) for each in lengths]

    def types(self, batch_size: int) -> tuple[Any, list[Any], list[Any]]:
        numbers = jax.ShapeDtypeStruct((batch_size,), np.uint32)
        rows = [type_of_batch(m, batch_size) for m in self.inputs.mapped]
        shared = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.inputs.shared]
        return numbers, rows, shared

    def of_one_row(self) -> tuple[Callable[..., Any], list[Any]]:
        rows = [type_of_row(m) for m in self.inputs.mapped]
        shared = self.types(1)[2]
        keys = [] if self.key is None else [jax.eval_shape(lambda: self.key)]

        def call(keys: Sequence[Any], rows: Sequence[Any], shared: Sequence[Any]) -> Tree:
            args, kwargs = self.inputs.arguments(rows, shared)
            if takes_key_by_name(self.fun):
                kwargs |= dict(zip(["key"], keys, strict=False))
            else:
                args = (*keys, *args)
            return self._unpacked(*args, **kwargs)

        return call, [keys, rows, shared]

    @property
    def staged_row(self) -> ClosedJaxpr:
        """Returns the jaxpr of one row, or of a few rows where sizes depend on data."""
        call, types = self.of_one_row()
        try:
            return jax.make_jaxpr(call)(*types)
        except UnsupportedError:
            return self._staged[0]

    @property
    def _lanes(self) -> Callable[..., Any]:
        return functools.partial(self._vmapped, self._unpacked, lanes_of(self.out_axes), more={})

    @functools.cached_property
    def _staged(self) -> Staged:
        return jax.make_jaxpr(self._lanes, return_shape=True)(*self.types(_FEW))

    @property
    def _returned(self) -> Tree:
        return self._staged[1]

    @functools.cached_property
    def outputs(self) -> list[Output]:
        grows, labels = bool(self.inputs.streams), self.inputs.labels
        name = labels.dimension if labels else ""
        return find_outputs(self._returned, self.out_axes, self.inputs.rows, grows, name)

    @property
    def of_row(self) -> Tree:
        return self.tree_of([o.of_row for o in self.outputs])

    def tree_of(self, leaves: Sequence[Any]) -> Tree:
        is_leaf = lambda x: isinstance(x, Ragged)
        return jax.tree.structure(self._returned, is_leaf=is_leaf).unflatten(leaves)

    @property
    def row_seconds(self) -> float:
        program, _ = self._staged
        if any(o.reduces for o in self.outputs):
            program = jax.make_jaxpr(self.batched)(*self.types(_FEW))
        return PLANS.time(cost_of_program(program)) / 1e9 / _FEW

    @property
    def row_bytes(self) -> int:
        return sum(m.row_bytes for m in self.inputs.mapped) + sum(o.row_bytes for o in self.outputs)


def takes_key_by_name(fun: Callable[..., Any]) -> bool:
    try:
        names = list(inspect.signature(fun).parameters)
    except (TypeError, ValueError):  # no signature
        return False
    return "key" in names[1:]


def _by_position(fun: Callable[..., Any], in_axes: AxesTree, count: int, keyed: bool) -> AxesTree:
    if not isinstance(in_axes, dict) or not keyed or takes_key_by_name(fun):
        return in_axes
    names = list(inspect.signature(fun).parameters)[1 : count + 1]
    return tuple(in_axes.get(name, 0) for name in names)


def _with_key(in_axes: AxesTree, count: int) -> AxesTree:
    return (0, *(in_axes if isinstance(in_axes, (tuple, list)) else [in_axes] * count))


# Bytes of a batch that batch_size="auto" chooses: more make no CPU faster, but an accelerator.
_MOST_BYTES, _MOST_ELSEWHERE = 8 * 2**20, 64 * 2**20
_PARTS = 8  # of a batch in which rows that fail are looked for; so many more in each of these


class Program:
    def __init__(
        self, function: RowFunction, batch_size: int, shared: Sequence[Any] | None = None
    ) -> None:
        self._given = function.inputs.shared if shared is None else shared
        self.function, self.batch_size = function, batch_size
        self._types = function.types(batch_size)
        self._programs: dict[bool, Any] = {}  # by whether they are masked
        self._lock = threading.Lock()  # several threads may want one

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        return self._traced()

    @functools.cached_property
    def _shared(self) -> list[Any]:
        (_, _, places), _ = self.compiled().input_shardings
        shared = self._given
        return [jax.device_put(x, place) for x, place in zip(shared, places, strict=True)]

    @functools.cached_property
    def smaller(self) -> Program:
        """Returns a program of fewer rows to find failing ones, whose size divides this one's."""
        most = max(1, self.batch_size // _PARTS)
        size = max(n for n in range(1, most + 1) if self.batch_size % n == 0)
        return Program(self.function, size, self._shared)

    @whatever_jit
    def start(self, numbers: np.ndarray, rows: Sequence[Any]) -> list[Any]:
        return self.compiled()(*self._arguments(numbers, rows))

    @whatever_jit
    def reduced(self, numbers: np.ndarray, rows: Sequence[Any], real: np.ndarray) -> list[Any]:
        arguments = self._arguments(numbers, rows)
        return jax.tree.map(np.asarray, self.compiled(masked=True)(*arguments, real))

    def compiled(self, masked: bool = False) -> jax.stages.Compiled:
        """Compiles the program; `masked` takes the rows that count, and has reductions only."""
        # Only one thread compiles.
        with self._lock:
            if masked not in self._programs:
                traced = self._traced(masked) if masked else self.traced
                self._programs[masked] = traced.lower().compile()
            return self._programs[masked]

    @whatever_jit
    def _traced(self, masked: bool = False) -> jax.stages.Traced:
        run, types = self._run_masked if masked else self._run, [*self._types]
        if masked:
            types.append(jax.ShapeDtypeStruct((self.batch_size,), np.bool_))
        # What is not used stays an argument: all programs are called alike.
        return jax.jit(run, keep_unused=True).trace(*types)

    def _run(self, *batch: Value) -> list[Any]:
        numbers, *_ = batch
        return arrays_of(self.function.outputs, self.function.batched(*batch), numbers)

    def _run_masked(self, numbers: Value, rows: Values, shared: Values, real: Value) -> list[Any]:
        outputs = self.function.outputs
        out = self.function.batched(numbers, rows, shared, real)
        arrays = arrays_of(outputs, out, numbers, real)
        return [x for x, o in zip(arrays, outputs, strict=True) if o.reduces]

    def _arguments(self, numbers: np.ndarray, rows: Values) -> tuple[Value, Values, Values]:
        typed = [_as_typed(x, type) for x, type in zip(rows, self._types[1], strict=True)]
        return numbers.astype(np.uint32), typed, self._shared


def program_of(function: RowFunction, batch_size: int) -> Program:
    program: Program | None = function._latest
    if program is None or program.batch_size != batch_size:
        program = Program(function, batch_size)
        object.__setattr__(function, "_latest", program)
    return program


def staged_batch(function: RowFunction, batch_size: int) -> ClosedJaxpr:
    """Traces the program of a batch, with all that the user passed: rules and reductions, too."""
    # The number of devices may change between calls, so it is not part of the program.
    if function.options.get("mesh") is not None:
        function = replace(function, options={**function.options, "mesh": None}, _latest=None)
    return program_of(function, batch_size).traced.jaxpr


def fitting(function: RowFunction, memory_limit: int | str | None) -> int:
    room = _MOST_BYTES if jax.default_backend() == "cpu" else _MOST_ELSEWHERE
    most = max(1, min(function.inputs.rows, room // max(function.row_bytes, 1)))
    auto = Auto(parse_limit(memory_limit), function.name)
    compile_for = lambda size: program_of(function, size).compiled()
    return fitting_chunk(auto, most, ("map", object()), compile_for, all_at_first=True)


def _as_typed(x: Data, type: jax.ShapeDtypeStruct | Ragged) -> np.ndarray | Ragged:
    if not isinstance(x, Rows):
        return converted(x, type.dtype)
    assert isinstance(type, Ragged)
    shape = (type.data.shape[type.element_axis], *without(type.data.shape, [type.element_axis]))
    data = np.zeros(shape, type.dtype)
    data[: len(x.data)] = converted(x.data, type.dtype)
    return as_ragged(x._replace(data=data), type.axis, type.max_length)


def fetched(outputs: Sequence[Output], arrays: Sequence[Any], rows: int) -> list[Any]:
    """Copies the first `rows` of each result of `Program.start` to the host."""
    results = []
    for output, x in zip(outputs, arrays, strict=True):
        if isinstance(x, Ragged):
            results.append(kept(x, rows))
        elif output.reduces:
            results.append(jax.tree.map(np.asarray, x))
        else:
            results.append(np.asarray(x)[(slice(None),) * output.leaf.axis + (slice(rows),)])
    return results
