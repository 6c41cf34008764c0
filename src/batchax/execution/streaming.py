"""Reducing over the batch chunk by chunk, without a result for each lane.

What is added up over the batch, or is the extreme of it, floats of less than 32 bits in float32,
is held once by a chunk loop; so is any other state, but for derivatives: these need the state of
each chunk. A mean is the sum over all lanes divided once, so that a last chunk with fewer lanes
counts for what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from batchax.execution.operand_specs import SUM, Combined, Extreme, PerChunk, Result
from batchax.frontend import reducing
from batchax.frontend.reduction import Reduction
from batchax.jaxprs.words import Value
from batchax.memo import memoized
from batchax.sums.contracted import Summands

_ONE_ARRAY = jax.tree.structure(0)


class Partial(NamedTuple):
    """Of what kind that is which one chunk adds to a reduction.

    Attributes:
      specs: how a chunk loop collects each array of it.
      structure: of the state.
      result: the type that the reduction has when done all at once.
    """

    specs: list[Result]
    structure: Any
    result: Any


def partial_result(
    reduction: Reduction, x: Value, axis: int, index: Any = None, real: Any = None
) -> tuple[list[Any], Partial]:
    """What one chunk adds to a reduction of `x`, whose lanes are along `axis`: arrays.

    Args:
      reduction: which one.
      x: the outputs of lanes, or what lanes add up.
      axis: along which.
      index: of these lanes, if the reduction takes that.
      real: which lanes count; None: all.
    """
    if isinstance(x, Summands):
        of_one = (1, *x.like.shape), x.like.dtype, x.like.weak_type
        result = _result_type(reduction, 0, *of_one)
        return [x.state(reduction, real)], Partial([SUM], _ONE_ARRAY, result)
    result = result_type(reduction, x, axis)
    states, at = reducing.states_of(reduction, x, axis, index, real)
    arrays, structure = jax.tree.flatten(states)
    specs: list[Result]
    operation = reducing.operation_of(reduction)
    match operation and operation.held:
        case None if operation is None:
            state = reducing.folded(reduction, states, at)
            arrays, none = jax.tree.leaves(state), reducing.neutral_like(reduction, state)
            specs = [
                Combined(reduction, structure, k, number)
                for k, number in enumerate(jax.tree.leaves(none))
            ]
        case None:
            # The derivative of a product needs, for each chunk, the product of the others. So the
            # product of each chunk is kept.
            arrays = [s[None] for s in jax.tree.leaves(reducing.folded(reduction, states, at))]
            specs = [PerChunk(0) for _ in arrays]
        case "sum":
            arrays = jax.tree.leaves(reducing.folded(reduction, states, at))
            specs = [SUM for _ in arrays]
        case kind:
            specs = [Extreme(kind, at) for _ in arrays]
    return arrays, Partial(specs, structure, result)


def finish(reduction: Reduction, part: Partial, results: Sequence[Value], size: int) -> Any:
    """The reduction over all lanes, from what a chunk loop collected.

    `part` is of what kind the chunks added something.
    """
    state = jax.tree.unflatten(part.structure, results)
    if PerChunk in map(type, part.specs):
        state = reducing.folded(reduction, state)
    return reducing.finished(reduction, state, size).astype(part.result.dtype)


def result_type(reduction: Reduction, x: Value, axis: int) -> Any:
    """The type of a reduction of lanes along an axis, done all at once."""
    aval = jax.typeof(x)
    shape = (*aval.shape[:axis], 1, *aval.shape[axis + 1 :])
    return _result_type(reduction, axis, shape, aval.dtype, aval.weak_type)


@memoized("types of reductions", most=256)
def _result_type(reduction: Reduction, axis: int, shape: Any, dtype: Any, weak_type: bool) -> Any:
    one = jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)
    return jax.eval_shape(lambda x: reducing.of_all(reduction, x, axis), one)
