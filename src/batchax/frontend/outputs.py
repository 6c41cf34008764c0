"""From batched outputs to the structure that `out_axes` asks for, and the checks of carries."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend import reductions
from batchax.frontend.containers import (
    AxisSpec,
    BatchOfRows,
    is_container,
    is_container_spec,
    parts_of_output,
)
from batchax.frontend.in_axes import (
    LANES,
    SpecifiedLeaf,
    Terms,
    is_array,
    is_object,
    is_position,
    is_rule,
    spread_specs,
)
from batchax.frontend.options import check_one_of, not_one_of
from batchax.frontend.reductions import REDUCTIONS, Kind, Reduction, adds_up, has_reduction
from batchax.jaxprs.error_format import brief, name_of, show
from batchax.jaxprs.types import Aval, AxesTree, ClosedJaxpr, Tree, Value, Values
from batchax.kernel.axis import Axis, Position, Positions, match_axis, move_axis
from batchax.kernel.registry import describe_returned


class _Auto:
    """Gives an output batch axis 0 if it depends on the batch, and else no axis.

    In `batch_jaxpr`, the batch axis may be at any position.

    Example:
      >>> f = lambda w, x: {"w": 2 * w, "y": w * x}
      >>> out = bx.vmap(f, in_axes=(None, 0), out_axes=bx.AUTO)(3.0, jnp.ones(8))
      >>> jax.tree.map(jnp.shape, out)
      {'w': (), 'y': (8,)}
    """

    def __repr__(self) -> str:
        return "batchax.AUTO"

    def __reduce__(self) -> str:
        return "AUTO"  # as of `LANE_INDEX`


AUTO = _Auto()


@_compat.api_boundary
@dataclass(frozen=True)
class Reduce:
    """Reduces an output over the batch, in `out_axes`.

    Attributes:
      kind: The reduction. Dtypes, NaN, and results for no lanes follow ``jnp.sum``,
        ``jax.nn.logsumexp``, and so on. One of

        - "sum", "mean", "max", "min", "prod", "logsumexp", "any", "all".
        - "var": the variance, divided by the number of lanes.
        - "argmax", "argmin": the index of a lane, the first of equal ones.
        - a `Reduction`.
      unmapped: The result for an output that does not depend on the batch. "reduce" (default): that
        of a copy for each lane. "keep": the output itself.

    Raises:
      ArgumentTypeError: `kind` or `unmapped` is neither a word nor a `Reduction`.
      OptionError: `kind` or `unmapped` is another word.

    References:
      T. F. Chan, G. H. Golub and R. J. LeVeque, "Algorithms for computing the sample variance:
      analysis and recommendations", The American Statistician 37(3), 1983: for "var" in chunks.

    Example:
      >>> loss = lambda w, x: (w * x) ** 2
      >>> print(bx.vmap(loss, (None, 0), bx.Reduce("mean"))(2.0, jnp.array([1.0, 2.0, 3.0, 4.0])))
      30.0
    """

    kind: Kind | Reduction
    unmapped: Literal["reduce", "keep"] = "reduce"

    def __post_init__(self) -> None:
        if not isinstance(self.kind, Reduction) and (
            not isinstance(self.kind, str) or self.kind not in REDUCTIONS
        ):
            raise not_one_of(
                "Reduce: kind", self.kind, *REDUCTIONS, other="a batchax.Reduction of your own"
            )
        check_one_of("Reduce: unmapped", self.unmapped, "reduce", "keep")

    def __repr__(self) -> str:
        unmapped = "" if self.unmapped == "reduce" else f", unmapped={self.unmapped!r}"
        return f"batchax.Reduce({self.kind!r}{unmapped})"

    @property
    def reduction(self) -> Reduction:
        """The reduction that `kind` names, or `kind` itself."""
        return self.kind if isinstance(self.kind, Reduction) else REDUCTIONS[self.kind]


def is_added(spec: object) -> bool:
    """Whether an output is the sum over lanes, or what is made of that."""
    return isinstance(spec, Reduce) and adds_up(spec.reduction)


@dataclass(frozen=True)
class OutputArray:
    """One array the per-example function returned."""

    path: str
    spec: Any


@dataclass(frozen=True)
class FlatOutputs:
    """Says how to rebuild batched what the per-example function returned flat."""

    described: Sequence[OutputArray]  # what is known of each array
    rebuild: Callable[[Sequence[Any]], Any]  # makes the outputs of the arrays, batched
    # outputs that are not arrays, with what messages call them
    objects: Sequence[tuple[str, Any]]

    @property
    def added(self) -> list[bool]:
        """Returns which arrays are summed over lanes; empty if none is reduced."""
        specs = [output.spec for output in self.described]
        return list(map(is_added, specs)) if Reduce in map(type, specs) else []


Described = Callable[..., tuple[list[Any], FlatOutputs]]
"""A flat function of one example: it returns arrays, and how to rebuild what they are of."""


def check_out_axes(out_axes: AxesTree) -> None:
    """Raises an error, when `vmap` is called, for an `out_axes` that no output could satisfy."""
    if is_output_spec(out_axes):
        return
    for keys, leaf in jax.tree_util.tree_flatten_with_path(out_axes)[0]:
        if not (is_output_spec(leaf) or is_container_spec(leaf)):
            raise ArgumentTypeError(
                f"out_axes{jax.tree_util.keystr(keys)} must be an int, None, batchax.AUTO or "
                f"batchax.Reduce(...); got {_got(leaf)}."
            )


def _got(spec: object) -> str:
    if isinstance(spec, Reduction):
        return f"{spec!r}, which is given as batchax.Reduce(batchax.Reduction(...))"
    return show(spec)


def is_output_spec(spec: object) -> bool:
    return is_position(spec) or isinstance(spec, (_Auto, Reduce, AxisSpec)) or _is_rule(spec)


def _is_rule(spec: object) -> bool:
    """Whether `spec` is a function from the outputs of one example to where they go."""
    return is_rule(spec) and not isinstance(spec, (_Auto, Reduce, type))


def _from_rule(leaf: SpecifiedLeaf) -> AxesTree:
    spec = leaf.spec(leaf.value)
    if spec is None or (is_output_spec(spec) and not _is_rule(spec)) or is_container_spec(spec):
        return spec
    raise ArgumentTypeError(
        f"the callable given in out_axes must return an int, None, batchax.AUTO or "
        f"batchax.Reduce(...), except for {leaf.path} it returned {_got(spec)}."
    )


def lanes_first(options: dict[str, Any]) -> dict[str, Any]:
    """Returns options of `vmap` except for those that say where results go."""
    return {k: v for k, v in options.items() if k not in ("out_axes", "sum_match")}


def flatten_outputs(
    out: Tree, out_axes: AxesTree, size: int, terms: Terms = LANES, sum_match: bool = False
) -> tuple[list[Any], FlatOutputs]:
    """Spreads `out_axes` over what the per-example function returned.

    Returns the arrays it is made of, and what to do with them once batched.
    """
    leaves, rebuild_tree = spread_specs(
        out_axes, out, terms.outputs, "out_axes", is_output_spec, by_name=True
    )
    arrays: list[Value] = []
    described: list[OutputArray] = []
    objects: list[tuple[str, Any]] = []

    def part(leaf: SpecifiedLeaf, whole: bool) -> Callable[[Sequence[Any]], Any]:
        """Adds the arrays of one leaf; returns how it is made of what these become."""
        value, spec = leaf.value, leaf.spec
        if isinstance(value, Tracer) and type(spec) is int and spec in (0, -1):
            return added(value, leaf.path, spec)  # as most are: nothing can be wrong
        if _is_rule(spec):
            spec = _from_rule(leaf)
        shared = is_object(value, leaf.path) and not is_container(value)
        # Objects are no results of a program: the lanes have the same one, which comes back as it
        # is.
        if shared and (leaf.inside or spec is None):
            objects.append((leaf.path, value))
            return lambda _: value
        if isinstance(spec, AxisSpec):
            check_array(value, leaf.path)
            made_of = spec.of_output(value, leaf.path, size)
        else:
            made_of = parts_of_output(value, spec, leaf.path, size)
        if made_of is not None:
            inside = [part(SpecifiedLeaf(*named), False) for named in made_of.named(leaf.path)]
            join = made_of.join  # the values of one lane end with the trace
            return lambda outs: join([each(outs) for each in inside])
        check_array(value, leaf.path)
        _check_position(value, leaf.path, spec, terms)
        constant = not isinstance(value, Tracer) and not jax.export.is_symbolic_dim(value)
        if spec is None and constant and whole:
            return lambda _: value  # a constant comes back as it is
        if spec is None and whole and sum_match and not _is_extended(value):
            spec = Reduce("sum", unmapped="keep")
        return added(value, leaf.path, spec)

    def added(value: Value, path: str, spec: Any) -> Callable[[Sequence[Any]], Any]:
        arrays.append(value)
        described.append(OutputArray(path, spec))
        return operator.itemgetter(len(arrays) - 1)

    parts = [part(leaf, True) for leaf in leaves]
    return arrays, FlatOutputs(
        described, lambda outs: rebuild_tree(iter([each(outs) for each in parts])), objects
    )


def flatten_arrays(out: Tree, containers: bool = False, name: str = "out") -> tuple[list[Any], Any]:
    """Returns the arrays that a function returned, and their structure; `containers` stay whole."""
    is_whole = is_container if containers else None
    leaves, structure = jax.tree_util.tree_flatten_with_path(out, is_leaf=is_whole)
    for keys, leaf in leaves:
        if not (containers and is_container(leaf)):
            check_array(leaf, f"{name}{jax.tree_util.keystr(keys)}")
    return [leaf for _, leaf in leaves], structure


def check_array(value: Value, path: str) -> None:
    if isinstance(value, BatchOfRows):
        raise ArgumentTypeError(
            f"the function returned {path}, a batch of rows for each lane, from an inner vmap. "
            "A batch of such batches is not supported. Return them padded, x.to_padded(), "
            "with x.lengths; or pass all rows to one vmap."
        )
    if not is_array(value):
        raise ArgumentTypeError(
            f"the output {path} is of type {type(value).__name__}, not an array. Return arrays "
            "and numbers from a batched function."
        )


def _is_extended(value: Value) -> bool:
    """Whether it is of a dtype that cannot be added up, as random keys are."""
    return jnp.issubdtype(jnp.result_type(value), jax.dtypes.extended)


def _check_position(value: Value, path: str, spec: AxesTree, terms: Terms) -> None:
    if not (spec is None or is_output_spec(spec)):
        raise ArgumentTypeError(
            f"out_axes gives {brief(spec)} for {path}, which is an array: that kind of axis is "
            "for another type. Pass an int, None, batchax.AUTO or batchax.Reduce(...). An "
            "output whose size depends on the row is returned as a Ragged without it."
        )
    if isinstance(spec, Reduce):
        if _is_extended(value):
            raise ArgumentTypeError(
                f"out_axes gives {spec!r} for {path}, of dtype {value.dtype}, which has no such "
                "reduction. Pass an int, and reduce what is made of it."
            )
        check_reduces(spec, jax.typeof(value), path)
    if not is_position(spec) or spec in (0, -1):
        return
    ndim = jnp.ndim(value) + 1
    if not -ndim <= spec < ndim:
        raise AxisError(
            f"out_axes gives {spec} for {path}, which has {ndim} axes with the {terms.axis}: "
            f"pass an int in [{-ndim}, {ndim})."
        )


def check_reduces(spec: Reduce, output: Aval, path: str) -> None:
    """Raises an error for an output of one example that has no such reduction, by its type."""
    if not all(isinstance(n, int) for n in output.shape):
        return  # of rows of different lengths, for which there is another message
    if isinstance(spec.kind, Reduction):
        reductions.check(spec.kind, output, path)
    elif not has_reduction(spec.kind, output.dtype):
        raise ArgumentTypeError(
            f"out_axes gives {spec!r} for {path}, of dtype {output.dtype}, which has no such "
            "reduction."
        )


def check_lanes(spec: Reduce, lanes: int, path: str, nothing: str) -> None:
    """Raises an error for a reduction of no lanes, if there is no result of nothing."""
    if isinstance(lanes, int) and not lanes and not spec.reduction.of_nothing:
        raise AxisError(
            f"out_axes gives {spec!r} for {path}, and {nothing}: {spec.kind} of no values is not "
            "defined."
        )


def check_unbatched(axis: Axis, described: Sequence[OutputArray], positions: Positions) -> None:
    """Raises an error for outputs that depend on the batch where `out_axes` says None."""
    wrong = [
        output.path
        for output, position in zip(described, positions, strict=True)
        if output.spec is None and position is not None
    ]
    if wrong:
        named = "" if axis.name is None else f" (axis {axis.name!r})"
        one = len(wrong) == 1
        raise AxisError(
            f"{', '.join(wrong)} {'depends' if one else 'depend'} on the batch{named}, but "
            f"out_axes says None for {'it' if one else 'them'}. Pass the position the batch axis "
            "should have, or batchax.AUTO; or reduce over the batch with batchax.Reduce('mean') "
            "or a collective."
        )


def as_array(x: Value) -> Value:
    """Returns a result as an array: a constant of a staged program has a type of JAX's own."""
    constant = isinstance(x, (np.ndarray, bool, int, float, complex))
    return jnp.asarray(x) if constant and jax.typeof(x).dtype != jax.dtypes.float0 else x


def place(axis: Axis, output: OutputArray, value: Value, position: Position) -> Value:
    """Puts one batched output where `out_axes` wants it."""
    spec = output.spec
    if type(spec) is int and spec == position:  # by far the most frequent case
        return value
    if isinstance(spec, Reduce):
        if position is None:
            if spec.unmapped == "keep":
                return value
            return reductions.of_shared(spec.reduction, jnp.asarray(value), axis.size)
        check_lanes(spec, axis.size, output.path, "the batch has no lanes")
        return reductions.of_all(spec.reduction, value, position)
    if spec is None:
        return value
    if isinstance(spec, _Auto):
        return value if position is None else move_axis(value, position, 0)
    if position is None:  # as under jax.vmap, it names a mesh only if its value does
        axis = replace(axis, mesh=None)
    return match_axis(axis, value, position, int(spec))


T = TypeVar("T")


def flatten_carry(init: Tree, name: str, loop: str, advice: str) -> tuple[list[Any], Any]:
    """Returns the arrays of the first carry, and its structure.

    `advice` says what to do with other objects.
    """
    leaves, structure = jax.tree.flatten(init)
    for keys, leaf in zip(carry_keys(init), leaves, strict=True):
        if not is_array(leaf):
            raise ArgumentTypeError(
                f"{name}{keys}, of the first carry, is of type {type(leaf).__name__}, which is "
                f"not an array. The carry of a {loop} must be a pytree of arrays and numbers; "
                f"{advice}."
            )
    return leaves, structure


def carry_keys(init: Tree) -> list[str]:
    leaves = jax.tree_util.tree_flatten_with_path(init)[0]
    return [jax.tree_util.keystr(keys) for keys, _ in leaves]


def settle(
    stage: Callable[[Sequence[Any]], tuple[ClosedJaxpr | None, ClosedJaxpr, T]],
    carry: Values,
) -> tuple[ClosedJaxpr | None, ClosedJaxpr, T, Sequence[Any]]:
    """Stages a step until the types of the carry stay; returns the last result, and the carry."""
    # Python scalars in the carry get the types that steps return. Inside ``shard_map`` a carry
    # varies over the axes of the mesh that a step, or the predicate, makes it vary over. This ends,
    # because types only move up: from weak to strong, and to more axes.
    while True:
        tested, staged, description = stage(carry)
        promoted = list(map(_promoted, carry, staged.out_avals))
        if tested is not None:
            promoted = [_compat.varying_as(x, tested.out_avals[0]) for x in promoted]
        if all(new is old for new, old in zip(promoted, carry, strict=True)):
            return tested, staged, description, carry
        carry = promoted


def _promoted(x: Value, new: Aval) -> Value:
    """Promotes a weakly typed `x` with its next value, as ``lax.scan`` does."""
    x = _compat.varying_as(x, new)
    old = jax.typeof(x)
    if not getattr(old, "weak_type", False) or _same_type(old, new):
        return x
    struct = jax.ShapeDtypeStruct(new.shape, new.dtype, weak_type=new.weak_type)
    return lax.convert_element_type(x, jax.dtypes.result_type(x, struct))


def check_structure(fun: Callable[..., Any], old: Tree, new: Tree) -> None:
    """Raises an error for a step that changes the structure of the carry."""
    first, then = jax.tree.structure(old), jax.tree.structure(new)
    if first != then:
        shown = [str(tree).removeprefix("PyTreeDef(").removesuffix(")") for tree in (first, then)]
        raise ArgumentTypeError(
            f"the carry that {name_of(fun)!r} returns must have the structure of the one it is "
            "given, but (each * an array)\n  {}\nbecame\n  {}".format(*shown)
        )
    for path, leaf in zip(carry_keys(new), jax.tree.leaves(new), strict=True):
        if not is_array(leaf):
            raise ArgumentTypeError(
                f"carry{path} that {name_of(fun)!r} returns is of type {type(leaf).__name__}, not "
                "an array. Return arrays and numbers."
            )


def check_types(fun: Callable[..., Any], keys: Sequence[str], carry: Values, outs: Values) -> None:
    """Raises an error for a step that changes the shapes or dtypes of the carry."""
    wrong = [
        f"  carry{path}: {old.str_short()} became {new.str_short()}"
        for path, old, new in zip(keys, map(jax.typeof, carry), outs, strict=False)
        if not _same_type(old, new)
    ]
    if wrong:
        raise ArgumentTypeError(
            f"the carry that {name_of(fun)!r} returns must have the shapes and dtypes of the one "
            "it is given, but\n" + "\n".join(wrong) + "\nPass a first carry of the type that each "
            "step returns, or convert the carry in the step."
        )


def check_predicate(fun: Callable[..., Any], out: Value) -> Value:
    """Returns `out`, which `fun` returned, if it is one truth value."""
    try:
        aval = jax.typeof(out)
    except TypeError:
        aval = None
    if aval is None or aval.shape != () or aval.dtype != np.bool_:
        returned = describe_returned(out) if aval is None else aval.str_short()
        raise ArgumentTypeError(
            f"{name_of(fun)!r} must return one truth value, a boolean array of shape (), but it "
            f"returned {returned}."
        )
    return out


def _same_type(a: Aval, b: Aval) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)
