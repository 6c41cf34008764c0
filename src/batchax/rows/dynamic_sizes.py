"""Sizes that a function computes: `compress`, `nonzero`, `unique`.

Such a size differs from lane to lane, as the length of a row does, but it is known only when the
function has computed it. The function is staged with a symbol for it, by one equation, whose result
has that size: the places where a condition holds. On padded rows that equation says what the size
comes to in the row at hand, and from there on it is a size as any other.

A function of arrays that finds a size is staged a second time, on padded rows. The result is an
ordinary function of arrays, which also returns the sizes of its results. So chunks, devices,
divergent loops, and derivatives need no rules for it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer, eval_jaxpr
from jax.extend import core

from batchax import _compat
from batchax.cache import Cache
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.frontend.in_axes import is_position
from batchax.frontend.outputs import Described, FlatOutputs, OutputArray
from batchax.frontend.rows import FINDING, IN_SCOPE, SizesNeeded
from batchax.jaxprs.error_format import brief
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Jaxpr, Tree, Value, Values
from batchax.kernel.axis import Axis, Position, Positions, axis_to_front
from batchax.kernel.inner import batch_function, closed_over, returning_alike
from batchax.kernel.own_primitive import own_primitive
from batchax.rows.building import known_lengths
from batchax.rows.call import (
    FoundLengths,
    RowCall,
    RowSize,
    as_ragged,
    check_max_size,
    place_ragged,
)
from batchax.rows.padded import CannotPad, Row, run_padded
from batchax.rows.padded_rules.positions import pad_end
from batchax.rows.places_where import places_where
from batchax.rows.size_classes import class_switch
from batchax.rows.sizes import (
    ASKED_FOR_NUMBERS,
    Dim,
    Lengths,
    Limited,
    Shape,
    SizeOfRow,
    Sizes,
    agreed,
    depends_on_sizes,
    finds_inside,
    finds_size,
    found_places_p,
    greatest,
    has_symbols,
    is_symbolic,
    line_of,
    needs_number,
    question_of,
    trace_state,
)
from batchax.rules.masking import find_collective


@dataclass
class Finding:
    """A function that is being staged, and the sizes that it has found so far."""

    scope: Any  # of the symbols of its program
    outermost: Any  # what JAX traces where no function inside is traced
    # By condition and limit what was found: what has one condition has one size.
    places: list[tuple[Any, int | None, Any, Any]] = field(default_factory=list)

    def places_of(
        self, condition: Value, limit: int | None, called: str, given: Value
    ) -> jax.Array:
        """The places where a vector of bools, which is made of what is `given`, is true."""
        here = trace_state()
        for condition_then, its_limit, where, places in self.places:
            if condition_then is given and its_limit == limit and where == here:
                return places
        most = condition.shape[0]
        bound = greatest(most)
        if bound is None and limit is None:
            raise UnsupportedError(
                f"{called}: of an array of the size {most} it is not known how long it may be. "
                "Pass max_size, or the Ragged a smaller max_length."
            )
        size = self._symbol(min(x for x in (bound, limit) if x is not None))
        places = found_places_p.bind(condition, size=size, limit=limit, called=called)
        self.places.append((given, limit, here, places))
        return places

    def _symbol(self, bound: int) -> SizeOfRow:
        # The same ones each time that a function is staged: by types JAX knows what it has traced.
        # What it has traced under `jax.jit` it keeps, and so there each is another one.
        number = len(self.places) if trace_state() == self.outermost else next(_numbers)
        name = f"found{number}_{bound}"
        self.scope.lengths.found[name] = bound
        return _compat.another_symbol(SizeOfRow, name, self.scope)


_SYMBOL = re.compile(r"\bfound\d+_\d+\b")


_numbers = itertools.count(1000)


@contextmanager
def _staged_with(scope: _compat.RowScope) -> Iterator[None]:
    finding = Finding(scope, trace_state())
    before = FINDING.set(finding)
    try:
        with IN_SCOPE(scope):
            yield
    except Exception as error:
        if finding.places and _SYMBOL.search(str(error)):
            error.add_note(
                "Sizes such as found0_8 are those that batchax.compress, nonzero and unique find, "
                "8 at most. Results of one condition, computed once, have one size."
            )
        raise
    finally:
        FINDING.reset(before)


_scopes = Cache("the scope of sizes that are found where there are no rows", most=1)


def call_with_sizes(function: Described, examples: Sequence[Any]) -> tuple[list[Any], FlatOutputs]:
    """Calls a function that finds sizes: of arrays it returns arrays, and the sizes they have."""
    sizes = (d for x in examples for d in jnp.shape(x) if _compat.is_row_size(d))
    symbol = next(sizes, None)
    if symbol is None:
        return _as_arrays(function, examples)
    with _staged_with(symbol.scope):  # of rows, which run padded
        return function(*examples)


@_compat.patched()
def _as_arrays(function: Described, examples: Sequence[Any]) -> tuple[list[Any], FlatOutputs]:
    """What a function that finds sizes returns, as arrays that can hold all elements."""
    scope = _scopes.get(None, lambda: _compat.RowScope(Lengths({}, False)))

    def staged(*examples: Value) -> tuple[list[Any], FlatOutputs]:
        with _staged_with(scope):
            return function(*examples)

    try:
        program, outputs = _compat.stage_described(staged, list(map(jax.typeof, examples)))
    except Exception as error:
        if not needs_number(error):
            raise
        line = line_of(error)
        raise UnsupportedError(
            f"{line + ': ' if line else ''}the function needs a size that it finds as a number, "
            f"which differs from lane to lane: {question_of(error)}. To compute with such a size "
            "use jnp.asarray(y.shape[0])."
        ) from None
    if any(has_symbols(jnp.shape(x)) for x in program.consts):
        raise UnsupportedError(
            "a function that finds sizes closes over an array of a function around it, whose size "
            "differs from lane to lane. Find sizes in the outer function alone."
        )
    shapes = [jnp.shape(aval) for aval in program.out_avals]
    described = list(map(place_ragged, outputs.described, shapes))
    given = [Row(x, jnp.shape(x)) for x in examples]
    try:
        sizes, rows = run_found(program, given)
    except CannotPad as error:
        raise UnsupportedError(
            f"{error}\nA size that is found is not known before the program runs. Find sizes in a "
            "first call, and pass them to a second one with bx.size in in_axes."
        ) from None
    return with_lengths(sizes, rows, replace(outputs, described=described), outputs.rebuild)


def with_lengths(
    sizes: Sizes,
    rows: Sequence[Row],
    outputs: FlatOutputs,
    rebuild: Callable[[list[Any]], Any],
    call: RowCall | None = None,
) -> tuple[list[Any], FlatOutputs]:
    """The results of one padded row as arrays, and then the sizes that were found.

    `rebuild` makes the outputs of the results of all rows, some of which are rows. `call` is that
    of the function, if its arguments are rows.
    """
    of_rows = () if call is None else call.sizes
    shapes = [row.shape for row in rows]
    own = {size.name for size in of_rows}
    dims = {str(d): d for shape in shapes for d in shape if is_symbolic(d)}
    unknown = {k: d for k, d in dims.items() if not _compat.symbols(d) <= own}
    lengths = [jnp.asarray(sizes.size(d), np.int32) for d in unknown.values()]
    limited = list(sizes.limited)
    arrays = [*(row.value for row in rows), *lengths, *(each.count for each in limited)]
    hidden = [OutputArray(f"the size {name}", 0) for name in unknown]
    hidden += [OutputArray(f"the size found by {each.called}", 0) for each in limited]
    room = {name: _room(sizes, of_rows, d) for name, d in unknown.items()}

    def of_all(outs: Sequence[Any]) -> Tree:
        parts = iter(outs)
        values = [next(parts) for _ in shapes]
        sizes_found = {name: _known_or_more(next(parts), room[name]) for name in unknown}
        for each in limited:
            _check_limit(each.called, each.limit, next(parts))
        arguments = () if call is None else call.arguments
        results = [
            as_ragged(x, shape, of_rows, arguments, sizes_found) if has_symbols(shape) else x
            for x, shape in zip(values, shapes, strict=True)
        ]
        return rebuild(results)

    return arrays, replace(outputs, described=[*outputs.described, *hidden], rebuild=of_all)


def _room(sizes: Sizes, of_rows: Sequence[RowSize], dim: Dim) -> int | None:
    """How many elements all rows have at most of what was found of them, if less than padded."""
    while str(dim) in sizes.found_of:
        dim = sizes.found_of[str(dim)]
    return next((size.capacity for size in of_rows if str(dim) == size.name), None)


def _known_or_more(lengths: Value, room: int | None) -> FoundLengths:
    """Sizes that were found, and how many elements all rows have at most, if that is known."""
    own = known_lengths(lengths)
    if own is not None:
        return own.astype(np.int32), int(own.sum())
    return jnp.maximum(lengths, 0), room  # of a row that a function does not take, it is the least


def _check_limit(called: str, limit: int, counts: Value) -> None:
    sizes = known_lengths(counts)
    if sizes is not None and sizes.size and sizes.max() > limit:
        lane = int(np.argmax(sizes))
        raise AxisError(
            f"{called}: max_size is {limit}, and lane {lane} has {sizes[lane]} elements. Pass a "
            "greater one."
        )


@_compat.api_boundary
def compress(
    condition: Value, x: Value, axis: int | None = None, *, max_size: int | None = None
) -> jax.Array:
    """Selects the elements of `x` where `condition` is true, as ``numpy.compress``.

    Example:
      >>> x = jnp.array([[3, -1, 2], [-5, -6, 4]])
      >>> y = bx.vmap(lambda x: bx.compress(x > 0, x))(x)
      >>> [row.tolist() for row in y.rows()]
      [[3, 2], [4]]
      >>> print(bx.vmap(lambda x: bx.compress(x > 0, x).mean())(x))
      [2.5 4. ]

    Under `vmap`, the size differs between lanes. The result behaves like a row of a `Ragged`, and
    is returned as a `Ragged`. Results of one condition (one array, not a recomputed one) share a
    size.

    Args:
      condition: An array of shape ``(n,)``: bools, or numbers that are true unless zero.
      x: An array. Without `axis`, it is flattened.
      axis: The axis of `x` to select along, of size `n` or more.
      max_size: An upper bound of the number of selected elements, which saves memory.

    Returns:
      An array like `x`, with the selected elements along `axis`. Differentiable with respect to
      `x`.

    Raises:
      ArgumentTypeError: `max_size` is not an int, or `x` or `condition` is not an array.
      AxisError: `condition` does not have one axis, or is longer than `x`; or, outside of
        ``jax.jit``, more elements are selected than `max_size`. Under ``jax.jit``, in loops and
        branches, and on several devices, elements beyond it are dropped.
      UnsupportedError: `condition` is traced, outside of `vmap`.
    """
    called = "batchax.compress"
    given = condition
    condition = _array(condition, called, "condition")
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError):
        raise _no_array(x, called, "x") from None
    if condition.ndim != 1:
        raise AxisError(
            f"{called}: condition must have one axis, got the shape {condition.shape}. To choose "
            "elements of an array of more axes, ravel both."
        )
    if axis is None:
        x, axis = jnp.ravel(x), 0
    elif not is_position(axis) or not -x.ndim <= axis < x.ndim:
        raise AxisError(f"{called}: axis {brief(axis)} is out of range for x, of shape {x.shape}.")
    count, size = condition.shape[0], x.shape[axis]
    if not agreed(size, count):
        raise AxisError(
            f"{called}: condition has {count} elements, and x, of shape {x.shape}, {size} along "
            f"axis {axis}. Sizes that are found are one where one condition found them: compute it "
            "once."
        )
    places = _places(condition != 0, max_size, called, given)
    return _taken(x, places, axis)


@_compat.api_boundary
def nonzero(condition: Value, *, max_size: int | None = None) -> tuple[Any, ...]:
    """Finds the indices where `condition` is true, as ``numpy.nonzero``.

    Under `vmap`, their number differs between lanes, as for `compress`.

    Args:
      condition: An array with at least one axis.
      max_size: As for `compress`.

    Returns:
      An array of ints for each axis of `condition`, with an entry for each true element.

    Raises:
      ArgumentTypeError: `condition` is not an array, or `max_size` is not an int.
      AxisError: `condition` is a number; or, outside of ``jax.jit``, more elements are true than
        `max_size`.
      UnsupportedError: `condition` is traced, outside of `vmap`.

    Example:
      >>> edges = jnp.array([[[0, 1], [1, 0]], [[0, 0], [0, 1]]])
      >>> senders, receivers = bx.vmap(bx.nonzero)(edges)
      >>> [row.tolist() for row in senders.rows()], [row.tolist() for row in receivers.rows()]
      ([[0, 1], [1]], [[1, 0], [1]])
    """
    called = "batchax.nonzero"
    given = condition
    condition = _array(condition, called, "condition")
    if condition.ndim == 0:
        raise AxisError(f"{called}: condition must have at least one axis, but is a number.")
    rest = _places(condition.reshape(-1) != 0, max_size, called, given).astype(int)
    indices = []
    for size in condition.shape[:0:-1]:
        size = jnp.asarray(size, rest.dtype)
        indices.append(rest % size)
        rest = rest // size
    return (rest, *indices[::-1])


@_compat.api_boundary
def unique(x: Value, *, max_size: int | None = None) -> jax.Array:
    """Finds the sorted, distinct elements of `x`, as ``numpy.unique`` does.

    NaN occurs once. Under `vmap`, their number differs between lanes, as for `compress`.

    Args:
      x: An array, which is flattened.
      max_size: As for `compress`.

    Raises:
      ArgumentTypeError: `x` is not an array, or `max_size` is not an int.
      AxisError: Outside of ``jax.jit``, there are more than `max_size`.
      UnsupportedError: `x` is traced, outside of `vmap`.

    Example:
      >>> y = bx.vmap(bx.unique)(jnp.array([[3, 1, 3, 2], [5, 5, 5, 5]]))
      >>> [row.tolist() for row in y.rows()]
      [[1, 2, 3], [5]]
    """
    called = "batchax.unique"
    x = _array(x, called, "x")
    if not isinstance(x, Tracer):
        with jax.ensure_compile_time_eval():
            different = jnp.unique(x)
        check_max_size(max_size, called)
        _check_enough(different.size, max_size, called)
        return different
    ordered = jnp.sort(x.reshape(-1))
    at = jnp.arange(ordered.shape[0])
    before = _taken(ordered, at - 1)
    alike = (ordered == before) | ((ordered != ordered) & (before != before))
    new = (at == 0) | ~alike
    return _taken(ordered, _places(new, max_size, called, new))


def _taken(x: Value, places: Value, axis: int = 0) -> jax.Array:
    if not _has_elements(x.shape[axis]):  # JAX takes nothing of what may have none, as `x[1:]` may
        shape = list(x.shape)
        shape[axis] = 1
        x = jnp.concatenate([x, jnp.full(shape, 0, x.dtype)], axis)
    return jnp.take(x, places, axis, mode="clip")


def _has_elements(size: Dim) -> bool:
    try:
        return size >= 1
    except ASKED_FOR_NUMBERS:
        return False


def _places(condition: Value, max_size: int | None, called: str, given: Value) -> jax.Array:
    """Where a vector of bools is true, as int32."""
    check_max_size(max_size, called)
    if isinstance(condition, Tracer):
        finding = FINDING.get()
        if finding is None:
            raise UnsupportedError(
                f"{called}: its result has a size that depends on values, which are traced under "
                "jax.jit and jax.vmap. Call it in a function under batchax.vmap, "
                "or batchax.map without out=, where each lane has its own size; for one example, "
                "use jax.numpy with size=."
            )
        if isinstance(finding, SizesNeeded):
            raise finding.noted()
        return finding.places_of(condition, max_size, called, given)
    (places,) = np.nonzero(condition)
    _check_enough(len(places), max_size, called)
    return jnp.asarray(places, np.int32)


def _check_enough(count: int, max_size: int | None, called: str) -> None:
    if max_size is not None and count > max_size:
        raise AxisError(f"{called}: max_size is {max_size}, and there are {count} elements.")


def _array(x: Value, called: str, name: str) -> Value:
    """An array, of NumPy if its values are known: what is computed of it is known, too."""
    try:
        x = x if isinstance(x, Tracer) else np.asarray(x)
        jax.typeof(x)
        return x
    except (TypeError, ValueError):
        raise _no_array(x, called, name) from None


def _no_array(x: Value, called: str, name: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"{called}: {name} must be an array, got {type(x).__name__}.")


@jax.tree_util.register_pytree_node_class
class OutputRows:
    """Holds the zero or more output rows that a function of one row returns to `map`.

    The output is a folder of Parquet files. Columns that `map` copies (``keep=``) repeat with the
    rows.

    Args:
      values: An array, or a pytree of arrays, with a row of output for each index of axis 0.
      count: The number of rows to use, the first ones: an int or a bool. 0 drops the row.

    Raises:
      ArgumentTypeError: Arrays have different numbers of rows, or `count` is not an int.

    Example:
      >>> np.save("x.npy", np.arange(6.0))
      >>> def odd_twice(x):
      ...     return bx.OutputRows(jnp.stack([x, -x]), jnp.where(x % 2 == 1, 2, 0))
      >>> report = bx.map(odd_twice, "x.npy", out="odd.parquet", progress=False)
      >>> import pyarrow.parquet
      >>> pyarrow.parquet.read_table("odd.parquet")["result"].to_pylist()
      [1.0, -1.0, 3.0, -3.0, 5.0, -5.0]
    """

    def __init__(self, values: Tree, count: Value) -> None:
        self.values, self.count = values, count

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        return (self.values, self.count), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any, Any]) -> OutputRows:
        return cls(*children)


def rows_of_output(out: Tree) -> Tree:
    """What a function of one row returned; in place of `OutputRows`, as many as there are."""
    is_rows = lambda x: isinstance(x, OutputRows)
    if not is_rows(out):
        if any(map(is_rows, jax.tree.leaves(out, is_leaf=is_rows))):
            raise ArgumentTypeError(
                "the function returns OutputRows inside another container. Return one OutputRows, "
                "whose values are a dict of all arrays."
            )
        return out
    values, structure = jax.tree.flatten(out.values)
    shapes = [jnp.shape(x) for x in values]
    if not shapes or () in shapes or len({shape[0] for shape in shapes}) > 1:
        raise ArgumentTypeError(
            "OutputRows: values must be arrays with one number of rows along axis 0, but have the "
            f"shapes {shapes}."
        )
    count = out.count
    if jnp.shape(count) != () or jnp.result_type(count).kind not in "iub":
        raise ArgumentTypeError(
            f"OutputRows: count must be an int, the number of rows, or a bool; got {brief(count)}."
        )
    there = jnp.arange(shapes[0][0]) < count
    return structure.unflatten([compress(there, x, 0) for x in values])


# What follows from a size that is found. A condition of 3,600 elements may hold anywhere, but a
# neighbor list has some hundred entries: so it is compiled for two bounds, and the least of them
# that serves for all lanes runs. What comes before runs once.

SHARES = 16, 1
"""The parts of the elements of a condition for which there is a separate program each."""

_LEAST = 256  # elements of a condition: of fewer, all programs take as long


def run_found(program: ClosedJaxpr, rows: Sequence[Row]) -> tuple[Sizes, list[Row]]:
    """The results of a function of arrays that finds sizes, and these sizes."""
    jaxpr, sizes = program.jaxpr, Sizes({}, {})
    rest = _rest(program)
    if rest is None:
        return sizes, run_padded(sizes, jaxpr, program.consts, rows)
    finds = [eqn for eqn in rest if finds_size(eqn)]
    made = {v for eqn in rest for v in eqn.outvars}
    used = [v for eqn in rest for v in eqn.invars] + [*jaxpr.outvars]
    needed = list(
        dict.fromkeys(v for v in used if not isinstance(v, core.Literal) and v not in made)
    )
    before = run_padded(sizes, jaxpr.replace(outvars=needed), program.consts, rows)
    at = dict(zip(needed, before, strict=True))
    found = []
    for eqn in finds:
        (condition,), (limit, called) = eqn.invars, (eqn.params[k] for k in ("limit", "called"))
        name, room = str(eqn.params["size"]), condition.aval.shape[0]
        least = -(-sizes.most_found(name, room, limit) // SHARES[0])
        found.append(places_where(at[condition].value, least))
        count = found[-1][1]
        limited = None if limit is None else Limited(called, limit, count)
        sizes.find(name, room, count, limited)
    most = [sizes.bounds[str(eqn.params["size"])] for eqn in finds]
    bounds = [[-(-bound // share) for bound in most] for share in SHARES]
    moving = [v for v in needed if not isinstance(at[v].value, np.ndarray)]
    body = jaxpr.replace(invars=needed, constvars=[], eqns=rest)
    names = [str(eqn.params["size"]) for eqn in finds]

    def with_room(bound: Sequence[int]) -> ClosedJaxpr:
        def run(*values: Value) -> list[Any]:
            n, at_most = len(names), dict(zip(names, bound, strict=True))
            earlier, rest = zip(values[:n], values[n : 2 * n], strict=True), values[2 * n :]
            own = Sizes({}, {}, at_most=at_most, before=dict(zip(names, earlier, strict=True)))
            inputs = {**at, **{v: Row(x, at[v].shape) for v, x in zip(moving, rest, strict=True)}}
            outs = run_padded(own, body, [], [inputs[v] for v in needed])
            return [_whole(sizes, jnp.asarray(out.value), out.shape) for out in outs]

        return _compat.stage(run, list(map(jax.typeof, given)))

    places, counts = zip(*found, strict=True)
    given = [*places, *counts, *(at[v].value for v in moving)]
    programs = tuple(map(with_room, bounds))
    outs = found_switch_p.bind(
        jnp.stack(counts),
        *given,
        programs=programs,
        bounds=tuple(map(tuple, bounds)),
    )
    shapes = [getattr(v.aval, "shape", ()) for v in jaxpr.outvars]
    return sizes, [Row(x, shape) for x, shape in zip(outs, shapes, strict=True)]


def _rest(program: ClosedJaxpr) -> list[Eqn] | None:
    """The equations that read sizes that are found, or what has one; None if all run at once."""
    jaxpr: Jaxpr = program.jaxpr
    made: set[Any] = set()
    rest: list[Eqn] = []
    for eqn in jaxpr.eqns:
        reads = any(v in made for v in eqn.invars if not isinstance(v, core.Literal))
        if not (reads or depends_on_sizes(eqn)):
            continue
        if finds_size(eqn):
            if reads:
                return None
        elif finds_inside(eqn):
            return None
        rest.append(eqn)
        made.update(eqn.outvars)
    finds = [eqn for eqn in rest if finds_size(eqn)]
    most = [_most(eqn) for eqn in finds]
    if program.effects or find_collective(jaxpr) is not None or any(map(closed_over, jaxpr.eqns)):
        return None
    keys = any(
        jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
        for eqn in rest
        for v in (*eqn.invars, *eqn.outvars)
    )
    enough = finds and min(most) >= _LEAST and len(rest) > len(finds)
    return None if keys or not enough else rest


def _most(eqn: Eqn) -> int:
    size, limit = eqn.invars[0].aval.shape[0], eqn.params["limit"]
    return size if limit is None else min(size, limit)


def _whole(sizes: Sizes, x: Value, shape: Shape) -> Value:
    for axis, dim in enumerate(shape):
        if is_symbolic(dim):
            x = pad_end(x, axis, sizes.bound(dim) - x.shape[axis])
    return x


def _operations(
    counts: Value, *xs: Value, programs: Sequence[ClosedJaxpr], bounds: Sequence[Sequence[int]]
) -> list[Any]:
    program = programs[-1]
    return eval_jaxpr(program.jaxpr, program.consts, *xs)


def _types(
    counts: Aval, *avals: Aval, programs: Sequence[ClosedJaxpr], bounds: Sequence[Sequence[int]]
) -> list[Any]:
    return list(programs[-1].out_avals)


def _batched(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    programs: Sequence[ClosedJaxpr],
    bounds: Sequence[Sequence[int]],
) -> tuple[list[Any], Positions]:
    if axes[0] is None or axis.mesh_axis is not None or axis.spmd_name is not None:
        run = lambda *xs: _operations(*xs, programs=programs, bounds=bounds)
        return batch_function(axis, run, args, axes)
    most = jnp.max(axis_to_front(axis, args[0], axes[0]), 0)
    room = np.asarray(bounds, np.int32)[:-1]
    number = jnp.sum(jnp.any(most > room, 1), dtype=np.int32)

    def of_bound(program: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Position]]:
        def run(*xs: Value) -> tuple[list[Any], list[Position]]:
            one = lambda *xs: eval_jaxpr(program.jaxpr, program.consts, *xs)
            parts = _parts(axis.size) if program is programs[-1] else 1
            lanes, at = replace(axis, size=axis.size // parts), []

            def of_part(fronted: Sequence[Any]) -> list[Any]:
                each = iter(fronted)
                given = [x if a is None else next(each) for x, a in zip(xs, axes[1:], strict=True)]
                places = [None if a is None else 0 for a in axes[1:]]
                outs, at[:] = batch_function(lanes, one, given, places)
                return [axis_to_front(lanes, x, a) for x, a in zip(outs, at, strict=True)]

            fronted = [
                axis_to_front(axis, x, a)
                for x, a in zip(xs, axes[1:], strict=True)
                if a is not None
            ]
            if parts == 1:
                return of_part(fronted), at
            outs = lax.map(of_part, [x.reshape(parts, -1, *x.shape[1:]) for x in fronted])
            return [lax.collapse(x, 0, 2) for x in outs], at

        return _compat.stage_described(run, list(map(jax.typeof, args[1:])))

    staged = list(map(of_bound, programs))
    alike = returning_alike([program for program, _ in staged])
    outs = class_switch(number, alike, args[1:])
    types = alike[0].out_avals
    shared = [all(a is None for a in each) for each in zip(*(at for _, at in staged), strict=True)]
    outs = [_compat.weakly(x) if t.weak_type else x for x, t in zip(outs, types, strict=True)]
    return [x[0] if s else x for x, s in zip(outs, shared, strict=True)], [
        None if s else 0 for s in shared
    ]


def _parts(lanes: int) -> int:
    """In how many parts lanes run whose arrays hold all elements: each needs little memory."""
    return max(parts for parts in range(1, SHARES[0] + 1) if lanes % parts == 0)


found_switch_p = own_primitive(
    "found_switch",
    called="what follows from sizes that are found",
    operations=_operations,
    types=_types,
    rule=_batched,
)
