"""Sizes that a function finds while it runs: how many elements of an array hold something, say.

Such a size differs from lane to lane, as the length of a row does, but nobody knows it before the
function has computed it. The function is staged with a symbol for it, by one equation, whose result
has that size: the places where a condition holds. On padded rows that equation says what the size
comes to in the row at hand, and from there on it is a size as any other.

A function of arrays that finds a size is staged a second time, on padded rows without a length of
their own. What that makes is an ordinary function of arrays, which returns the sizes of its results
beside them, and so chunks, devices, loops that lanes leave and derivatives know nothing of it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from batchax import _compat
from batchax.errors import AxisError, UnsupportedError
from batchax.frontend.outputs import Described, FlatOutputs, OutputArray
from batchax.frontend.rows import finds_sizes
from batchax.memo import Memo
from batchax.rows.arguments import RowSize
from batchax.rows.call import RowCall
from batchax.rows.checks import known_lengths
from batchax.rows.comparisons import Lengths, SizeOfRow, asked_for_number, greatest, question_of
from batchax.rows.found_places import found_places_p
from batchax.rows.outputs import FoundLengths, as_ragged, place_ragged
from batchax.rows.padded import CannotPad, Row, run_padded
from batchax.rows.sizes import Sizes, has_symbols, is_symbolic
from batchax.rows.user_code import line_of


@dataclass
class Finding:
    """A function that is being staged, and the sizes that it has found so far.

    Attributes:
      scope: of the symbols of its program; None where it has none yet, and will be staged again.
      needed: whether it asked for a symbol where it has none.
      places: by condition and limit what was found: what has one condition has one size.
      outermost: what JAX traces where no function inside is traced, if there is a scope.
    """

    scope: Any
    needed: bool = False
    outermost: Any = None
    places: list[tuple[Any, int | None, Any, Any]] = field(default_factory=list)

    def places_of(self, condition: Any, limit: int | None, called: str, given: Any) -> Any:
        """The places where a vector of bools, which is made of what is `given`, is true."""
        if self.scope is None:
            self.needed = True
            raise _SizeNeeded
        here = _trace_state()
        for condition_then, its_limit, where, places in self.places:
            if condition_then is given and its_limit == limit and where == here:
                return places
        most = condition.shape[0]
        bound = greatest(most)
        if bound is None and limit is None:
            raise UnsupportedError(
                f"{called}: of an array of the size {most} it is not known how long it may be. "
                "Give max_size, or the Ragged a smaller max_length."
            )
        size = self._symbol(min(x for x in (bound, limit) if x is not None))
        places = found_places_p.bind(condition, size=size, limit=limit, called=called)
        self.places.append((given, limit, here, places))
        return places

    def _symbol(self, bound: int) -> Any:
        # The same ones each time that a function is staged: by types JAX knows what it has traced.
        # What it has traced under `jax.jit` it keeps, and so there each is another one.
        number = len(self.places) if _trace_state() == self.outermost else next(_numbers)
        name = f"found{number}_{bound}"
        self.scope.lengths.found[name] = bound
        return _compat.another_symbol(SizeOfRow, name, self.scope)


_SYMBOL = re.compile(r"\bfound\d+_\d+\b")


class _SizeNeeded(Exception):
    """A function that is staged without symbols found a size."""


def _trace_state() -> Any:
    return get_opaque_trace_state(convention="nnx")


_numbers = itertools.count(1000)

_finding: ContextVar[Finding | None] = ContextVar("batchax_finding", default=None)


def finding_sizes() -> Finding | None:
    """What is being staged by `vmap`, and may find sizes; None outside of it."""
    return _finding.get()


# What `jax.jit` has traced where sizes may be found has their symbols in it, which mean nothing
# elsewhere.
_in_scope = jax.make_user_context(None)


@contextmanager
def _staged_with(scope: Any) -> Iterator[Finding]:
    finding = Finding(scope, outermost=None if scope is None else _trace_state())
    before = _finding.set(finding)
    try:
        with _in_scope(scope):
            yield finding
    except Exception as error:
        if finding.places and _SYMBOL.search(str(error)):
            error.add_note(
                "Sizes such as found0_8 are those that batchax.compress, nonzero and unique find, "
                "8 at most. Results of one condition, computed once, have one size."
            )
        raise
    finally:
        _finding.reset(before)


_scopes = Memo("the scope of sizes that are found where there are no rows", most=1)


@finds_sizes
def with_sizes_found(function: Described) -> Described:
    """`function`, which may find sizes: of arrays it returns arrays, and the sizes that they have.

    Whether it does is known once it asks, and then it is staged again.
    """

    def run(*examples: Any) -> tuple[list[Any], FlatOutputs]:
        with _staged_with(None) as first:
            try:
                returned = function(*examples)
            except Exception:
                if not first.needed:
                    raise
            else:
                if not first.needed:
                    return returned
        sizes: Iterator[Any] = (d for x in examples for d in jnp.shape(x) if is_symbolic(d))
        symbol = next(sizes, None)
        if symbol is None:
            return _as_arrays(function, examples)
        with _staged_with(symbol.scope):  # of rows, which run padded
            return function(*examples)

    _compat.named_after(run, function)
    return run


@_compat.standing_in()
def _as_arrays(function: Described, examples: Sequence[Any]) -> tuple[list[Any], FlatOutputs]:
    """What a function that finds sizes returns, as arrays with room for all there may be."""
    scope = _scopes.get(None, lambda: _compat.RowScope(Lengths({}, False)))

    def staged(*examples: Any) -> tuple[list[Any], FlatOutputs]:
        with _staged_with(scope):
            return function(*examples)

    try:
        program, outputs = _compat.stage_described(staged, list(map(jax.typeof, examples)))
    except Exception as error:
        if not asked_for_number(error):
            raise
        line = line_of(error)
        raise UnsupportedError(
            f"{line + ': ' if line else ''}the function needs a size that it finds as a number, "
            f"which differs from lane to lane: {question_of(error)}. To compute with such a size "
            "use jnp.asarray(y.shape[0])."
        ) from None
    if any(has_symbols(jnp.shape(x)) for x in program.consts):
        raise UnsupportedError(
            "a function that finds sizes closes over an array of a function around it that has a "
            "size of its own, of a row or found there. Find sizes in the outer function alone."
        )
    shapes = [jnp.shape(aval) for aval in program.out_avals]
    described = list(map(place_ragged, outputs.described, shapes))
    sizes = Sizes({}, {})
    given = [Row(x, jnp.shape(x)) for x in examples]
    try:
        rows = run_padded(sizes, program.jaxpr, program.consts, given)
    except CannotPad as error:
        raise UnsupportedError(
            f"{error}\nA size that is found is not known before the program runs. Find sizes in a "
            "call of their own, and give them to a second one: bx.size, in in_axes."
        ) from None
    return with_lengths(sizes, rows, replace(outputs, described=described), outputs.rebuild)


def with_lengths(
    sizes: Sizes,
    rows: Sequence[Row],
    outputs: FlatOutputs,
    rebuild: Callable[[list[Any]], Any],
    call: RowCall | None = None,
) -> tuple[list[Any], FlatOutputs]:
    """The results of one padded row as arrays, and the sizes that were found beside them.

    Args:
      sizes: those of the row, found ones among them.
      rows: its results.
      outputs: what describes those.
      rebuild: makes the outputs of the results of all rows, some of which are rows.
      call: of the function, if its arguments are rows.
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

    def of_all(outs: Sequence[Any]) -> Any:
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


def _room(sizes: Sizes, of_rows: Sequence[RowSize], dim: Any) -> int | None:
    """How many elements all rows have at most of what was found of them, if less than padded."""
    while str(dim) in sizes.found_of:
        dim = sizes.found_of[str(dim)]
    return next((size.capacity for size in of_rows if str(dim) == size.name), None)


def _known_or_more(lengths: Any, room: int | None) -> FoundLengths:
    """Sizes that were found, and how many elements all rows have at most, if that is known."""
    own = known_lengths(lengths)
    if own is not None:
        return own.astype(np.int32), int(own.sum())
    return jnp.maximum(lengths, 0), room  # of a row that a function does not take, it is the least


def _check_limit(called: str, limit: int, counts: Any) -> None:
    """Refuses more than there may be, where it is known how many there are."""
    sizes = known_lengths(counts)
    if sizes is not None and sizes.size and sizes.max() > limit:
        lane = int(np.argmax(sizes))
        raise AxisError(
            f"{called}: max_size is {limit}, and lane {lane} has {sizes[lane]} elements. Give a "
            "greater one."
        )
