"""What a reduction over the batch is.

Lanes run at once, in chunks, on devices, in datasets: so a reduction is computed in parts. It is
described by what is known of some of the lanes (a state), and how two of these become one. That
is associative and has a neutral element, a monoid, and so it does not matter where lanes are cut
(Steele, "Organizing functions for parallel execution; or, foldl and foldr considered slightly
harmful", ICFP 2009). A lane that does not count has the neutral state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.errors import ArgumentTypeError
from batchax.jaxprs.spoken import brief, show
from batchax.jaxprs.words import Value


@_compat.api_boundary
@dataclass(frozen=True, eq=False)
class Reduction:
    """What is known of some lanes of an output, and how that becomes one result of all.

    ``bx.Reduce(bx.Reduction(...))`` in `out_axes` reduces an output by it, in every way that lanes
    run. A state is an array or a pytree of arrays: all that is known of some lanes. Derivatives
    are those of the operations; give a function its own by ``jax.custom_jvp``.

    Chunks add to one state, in turn. Derivatives keep the state of each chunk, unless `combine` is
    ``jnp.add``. This, ``jnp.multiply``, ``jnp.maximum`` and ``jnp.minimum`` combine states array by
    array, and a sum is one exchange between devices. `bx.map` combines the states of batches on the
    host, in double precision.

    Attributes:
      combine: a function of two states, of some lanes and of lanes after them, that returns the
        state of both. It must be associative. The types of states stay.
      neutral: the state of no lanes: ``combine(neutral, state)`` is ``state``. For each array of a
        state a number, or a function that returns one for its dtype; one number for all will do.
      lane: a function of an output of one example that returns the state of that lane; None: the
        output is its state.
      finish: a function of the state of all lanes, and of how many these are, that returns the
        result, an array; None: the state is the result.
      index: whether `lane` takes the index of the lane, too, an int32.
      fold: a function of states, along axis 0 of each array, that returns the state of all; faster
        than to combine two at a time, which is done if this is None.
      of_lanes: a function ``(x, axis)`` of the outputs of all lanes, along an axis, that returns
        the result, for lanes that run at once; None: it is computed by the above.
      of_copies: a function ``(x, n)`` that returns the result of `n` lanes with the same output;
        None: that of copies.
      of_nothing: whether there is a result of no lanes.

    Raises:
      ArgumentTypeError: a parameter is none of these; or, once the function is called, `lane`,
        `combine`, `neutral` and `finish` do not fit each other or the output.

    Example:
      >>> norm = bx.Reduction(jnp.add, 0, lane=jnp.square, finish=lambda total, n: jnp.sqrt(total))
      >>> print(bx.vmap(lambda x: x, out_axes=bx.Reduce(norm), batch_size=1)(jnp.array([3.0, 4.0])))
      5.0
    """

    combine: Callable[[Any, Any], Any]
    neutral: Any
    lane: Callable[..., Any] | None = field(default=None, kw_only=True)
    finish: Callable[[Any, Any], Any] | None = field(default=None, kw_only=True)
    index: bool = field(default=False, kw_only=True)
    fold: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    of_lanes: Callable[..., Any] | None = field(default=None, kw_only=True)
    of_copies: Callable[[Any, Any], Any] | None = field(default=None, kw_only=True)
    of_nothing: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("combine", "lane", "finish", "fold", "of_lanes", "of_copies"):
            given = getattr(self, name)
            if not (callable(given) or (given is None and name != "combine")):
                raise ArgumentTypeError(
                    f"{name} of a Reduction must be a function, got {show(given)}."
                )
        for name in ("index", "of_nothing"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentTypeError(
                    f"{name} of a Reduction must be True or False, got "
                    f"{brief(getattr(self, name))}."
                )
        if self.index and self.lane is None:
            raise ArgumentTypeError(
                "index of a Reduction is True, but there is no lane: give a function of an output "
                "and the index of its lane."
            )
        for leaf in jax.tree.leaves(self.neutral, is_leaf=lambda x: x is None):
            if not callable(leaf) and not _is_number(leaf):
                raise ArgumentTypeError(
                    "neutral of a Reduction must be numbers, or functions that return one for a "
                    f"dtype, in the structure of a state; got {show(leaf)}."
                )

    def __getstate__(self) -> dict[str, Any]:
        # What is known of ``jnp.add`` is known of that object, and a copy of it would be another.
        name = getattr(self.combine, "__name__", "")
        return vars(self) | ({"combine": name} if getattr(jnp, name, 0) is self.combine else {})

    def __setstate__(self, state: dict[str, Any]) -> None:
        combine = state["combine"]
        named = isinstance(combine, str)
        vars(self).update(state, combine=getattr(jnp, combine) if named else combine)

    def __repr__(self) -> str:
        named = {name: getattr(self, name) for name in ("combine", "lane", "finish")}
        of = [f"{k}={getattr(f, '__name__', f)}" for k, f in named.items() if f is not None]
        return f"batchax.Reduction({', '.join(of)})"


def _is_number(x: Value) -> bool:
    return not isinstance(x, str) and np.ndim(x) == 0 and np.asarray(x).dtype.kind in "biufcV"
