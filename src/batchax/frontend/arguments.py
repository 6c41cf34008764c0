"""From a user's call to flat values, each with its batch axis.

`flatten_arguments` spreads `in_axes` over the arguments, checks every mapped leaf, finds the size
of the axis, and rebuilds the arguments that one example sees. Every check happens before any work
is done. `split_key` makes one random key a key for each lane.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.frontend.advice import (
    NO_SUCH_AXIS,
    advise_split_key,
    by_name,
    is_key,
    may_be_key,
    written,
)
from batchax.frontend.containers import (
    LANE_INDEX,
    AxisSpec,
    BatchOfRows,
    Parts,
    is_container,
    parts_of_argument,
)
from batchax.frontend.in_axes import (
    LANES,
    SpecifiedLeaf,
    Terms,
    is_array,
    is_position,
    spread_in_axes,
)
from batchax.jaxprs.error_format import listed, show
from batchax.jaxprs.types import AxesTree, Tree, Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.named_axes import as_lanes

Self = TypeVar("Self", bound="Mapped")


@dataclass(frozen=True, eq=False)
class Mapped:
    """Holds an argument of a batched function: an array, where it came from, and its batch axis."""

    typed: ClassVar[bool] = True  # whether the type of its value may tell where lanes are

    path: str  # what messages call it
    value: Value  # an array of JAX, or of NumPy's where lanes go to devices; a reference
    axis: Position  # None if all lanes have it alike
    spec: Any = None  # what `in_axes` says of a batch of rows
    given: Any = None  # the user's own, if `value` stands for it

    @property
    def lanes(self) -> int | None:
        return None if self.axis is None else self.value.shape[self.axis]

    def with_own_axis(self: Self) -> Self | None:
        """Returns the same with a non-negative axis; None if the array has no such axis."""
        if self.axis is None:
            return self
        ndim = len(self.value.shape)
        if 0 <= self.axis < ndim:
            return self
        return replace(self, axis=self.axis % ndim) if -ndim <= self.axis < 0 else None

    def sharded_over(self) -> tuple[Any, ...]:
        """Returns the mesh axis, or None, that its type shards lanes over, in a tuple; () if it
        says nothing.
        """
        if self.axis is None or not self.typed:
            return ()
        spec = getattr(getattr(jax.typeof(self.value), "sharding", None), "spec", ())
        # A spec may be shorter than the shape: the rest is not sharded.
        return (spec[self.axis] if self.axis < len(spec) else None,)

    def put(self: Self, value: Value) -> Self:
        """Returns the same argument, whose value is now elsewhere, or in another form."""
        if value is self.value:
            return self
        return replace(self, value=value, given=self.value if self.given is None else self.given)


class LaneIndices(Mapped):
    """Is the index of each lane, once it is known how many there are."""

    typed: ClassVar[bool] = False

    @property
    def lanes(self) -> int | None:
        return None

    def with_own_axis(self: Self) -> Self:
        return self


class MappedRows(Mapped):
    """Is a batch of rows of different lengths, which no type describes."""

    typed: ClassVar[bool] = False


class OwnRows(Mapped):
    """Is the rows that this process has by itself, without those of other processes."""

    typed: ClassVar[bool] = False


def find_mesh_axis(mapped: Sequence[Mapped], spmd_axis_name: Hashable | None) -> tuple[Any, Any]:
    """Returns the mesh axis that types of arguments say the mapped axis is sharded over, and its
    mesh. Raises AxisError if they say different things, or not what `spmd_axis_name` says.
    """
    entries = {m.path: entry for m in mapped for entry in m.sharded_over()}
    mesh_axes = set(entries.values())
    if len(mesh_axes) > 1:
        raise AxisError(
            "the mapped axes must be sharded over one mesh axis, but they are sharded as\n"
            + "\n".join(f"  {path}: {entry!r}" for path, entry in entries.items())
            + "\nUse jax.sharding.reshard on the arguments that differ."
        )
    mesh_axis = next(iter(mesh_axes), None)
    if None not in (mesh_axis, spmd_axis_name) and spmd_axis_name not in (mesh_axis, (mesh_axis,)):
        raise AxisError(
            f"spmd_axis_name {spmd_axis_name} does not fit: the mapped axes are sharded over "
            f"{mesh_axis!r} by their types. Remove spmd_axis_name."
        )
    if mesh_axis is None:
        return None, None
    sharded = next(m for m in mapped if m.sharded_over())
    x = sharded.value
    return mesh_axis, (jax.typeof(x) if isinstance(x, Tracer) else x).sharding.mesh


def with_lane_indices(mapped: Sequence[Mapped], axis: Axis) -> list[Mapped]:
    """Puts the indices of all lanes in place of arguments that want that of a lane."""
    of_indices = [m for m in mapped if isinstance(m, LaneIndices)]
    if not of_indices:
        return list(mapped)
    indices = jnp.arange(axis.size, dtype=np.int32)
    if axis.mesh_axis is not None:  # as the types of the arguments have it
        sharded = next(m for m in mapped if m.axis is not None and m not in of_indices)
        if jax.sharding.get_abstract_mesh().empty:
            raise UnsupportedError(
                f"{of_indices[0].path} needs the index of each lane, and {sharded.path} is sharded "
                f"over {axis.mesh_axis!r}, an axis of type Explicit, of a mesh that is not set. "
                "Call it inside `with jax.set_mesh(mesh):`."
            )
        on_mesh = jax.typeof(sharded.value).sharding.update(spec=PartitionSpec(axis.mesh_axis))
        indices = jax.sharding.reshard(indices, on_mesh)
    (indices,) = as_lanes(axis, [indices], [0])
    return [Mapped(m.path, indices, 0) if m in of_indices else m for m in mapped]


class LocalRows:
    """Holds this process's own rows of a batch."""

    def __init__(self, array: Value, shape: tuple[int, ...], first: int = 0) -> None:
        # `shape` and `first` are those among the rows of all processes, once these have said how
        # many they have.
        self.array, self.shape, self.first = array, shape, first

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def __jax_array__(self) -> NoReturn:
        raise only_mapped("it was used as an array")


@_compat.api_boundary
def local(tree: Tree) -> Tree:
    """Marks the rows of an argument of `vmap` as those of this process alone.

    Example:
      >>> rows = np.arange(4.0) + 4 * jax.process_index()  # rows that this process has read
      >>> mean = bx.vmap(jnp.square, out_axes=bx.Reduce("mean"), mesh="all")
      >>> print(mean(bx.local(rows)))  # over the rows of all processes, here of one
      3.5

    In a program of several processes, a NumPy array passed to ``vmap(..., mesh="all")`` is the
    whole batch on each of them. With ``local(x)``, each process passes its own rows, any number of
    them. The batch is the rows of process 0, then those of process 1, and so on. All processes must
    make the call, because they exchange their numbers of rows.

    Args:
      tree: A pytree of arrays, to which `in_axes` applies as usual.

    Returns:
      An argument for a function of `vmap` with `mesh`, outside of `jit`.

    Raises:
      ArgumentTypeError: A leaf is not an array.
      UnsupportedError: A leaf is traced, or already sharded over several processes.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_container)
    return structure.unflatten([_local(f"x{jax.tree_util.keystr(k)}", x) for k, x in leaves])


def _local(path: str, x: Value) -> LocalRows:
    if isinstance(x, Tracer):
        raise UnsupportedError(
            f"local: {path} is traced. Inside of jit, an array is that of all processes, and "
            "the number of rows of each is not known. Call the function of vmap outside of jit."
        )
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise UnsupportedError(
            f"local: {path} is an array of several processes already: pass it as it is."
        )
    if isinstance(x, BatchOfRows):
        raise ArgumentTypeError(
            f"local: {path} is of type {type(x).__name__}. Rows of different lengths are "
            "distributed by lengths that all processes must know. Pass all rows on all "
            "processes, without local, or pad the rows: local(x.to_padded())."
        )
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise ArgumentTypeError(
            f"local: {path} is of type {type(x).__name__}, not an array of NumPy or JAX."
        )
    return LocalRows(x, x.shape)


def only_mapped(what: str) -> ArgumentTypeError:
    """Makes the error for rows that are no argument that lanes of a mesh are taken from."""
    return ArgumentTypeError(
        f"batchax.local(x) is for an argument that vmap maps, with mesh=, but {what}."
    )


@dataclass(frozen=True)
class FlatArguments:
    """Holds a call's mapped arrays, its other arguments, and how to rebuild one example."""

    mapped: list[Mapped]
    shared: list[SpecifiedLeaf]
    rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def flatten_arguments(
    fun: Callable[..., Any],
    in_axes: AxesTree,
    args: tuple[Value, ...],
    kwargs: dict[str, Any],
    terms: Terms = LANES,
    on_mesh: bool = False,
    spread: bool = False,
) -> FlatArguments:
    """Spreads `in_axes` over the arguments of one call.

    Arguments that are not mapped are closed over, as they are. With `on_mesh`, arrays among them
    whose types tell of a mesh are passed without an axis. With `spread`, lanes go to several
    devices: arrays of NumPy stay on the host, and rows may be those of one process.
    """
    leaves, rebuild = spread_in_axes(fun, in_axes, args, kwargs, terms)
    mapped: list[Mapped] = []
    # Inside a ``shard_map`` the types of such arrays are others, and closed over they would keep
    # their old ones.
    parts = [_leaf_parts(leaf, mapped, on_mesh, spread) for leaf in leaves]
    mapped = _in_range(mapped, terms)
    _check_references(mapped)

    shared = [leaf for leaf in leaves if leaf.spec is None]
    made = lambda examples: rebuild([part(examples) for part in parts])
    return FlatArguments(mapped, shared, made)


def find_axis_size(mapped: Sequence[Mapped], axis_size: int | None, terms: Terms = LANES) -> int:
    """Returns the one size that all mapped axes have, or raises AxisError."""
    sizes = [n for m in mapped if (n := m.lanes) is not None]
    if not sizes:
        if axis_size is None:
            if mapped:  # such as the key of `split_key`
                raise AxisError(
                    f"{mapped[-1].path} gives each lane its own value, and no argument has an axis "
                    f"of {terms.lanes}, so their number is unknown. Pass {terms.size}, or map an "
                    "argument over an axis."
                )
            raise AxisError(
                "nothing is mapped: every in_axes entry is None or covers no array, so the "
                f"number of {terms.lanes} is unknown. Map at least one argument, or pass "
                f"{terms.size}."
            )
        return axis_size
    if sizes.count(sizes[0]) == len(sizes) and axis_size in (None, sizes[0]):
        return sizes[0]
    sized = [m for m in mapped if m.lanes is not None]
    # The size that most axes have is taken to be right, and the others are marked, except in a tie.
    usual = axis_size if axis_size is not None else Counter(sizes).most_common(1)[0][0]
    tie = axis_size is None and list(Counter(sizes).values()).count(sizes.count(usual)) > 1
    lines = [
        f"  {m.path}: shape {written(m.value.shape)}, axis {m.axis}, size {s}"
        + ("" if tie or s == usual else f"   <- not {usual}")
        for m, s in zip(sized, sizes, strict=True)
    ]
    demand = "one size" if axis_size is None else f"the size given as {terms.size}, {axis_size}"
    odd = [m for m, s in zip(sized, sizes, strict=True) if tie or s != usual]
    keys = [m for m in odd if m.axis == 0 and may_be_key(m.value)]
    rest = {s for m, s in zip(sized, sizes, strict=True) if m not in keys}
    lanes = rest.pop() if len(rest) == 1 else "n"
    raise AxisError(
        f"the mapped axes must have {demand}, but they have {_few_sizes(sizes)}:\n"
        + few_lines(lines, [tie or s != usual for s in sizes])
        + _hint_for_rows(sized)
        + _hint_for_trees(sized)
        + f"\nPass None in in_axes for an argument that is the same {terms.each}."
        + by_name([m.path for m in odd])
        + "".join(advise_split_key(m.path, lanes, terms.each, sure=False) for m in keys)
    )


_MOST_LINES = 10


def _few_sizes(sizes: Sequence[Any]) -> str:
    different = sorted(set(sizes))
    more = len(different) - _MOST_LINES
    if more <= 0:
        return listed(different)
    return f"{len(different)} of them, from {different[0]} to {different[-1]}"


def few_lines(lines: Sequence[str], odd: Sequence[bool] = ()) -> str:
    """Joins the first lines, and says how many more there are: one of each kind, odd or not, is
    listed.
    """
    if len(lines) <= _MOST_LINES:
        return "\n".join(lines)
    chosen = {*range(_MOST_LINES), *(odd.index(x) for x in set(odd))}
    more = len(lines) - len(chosen)
    rest = [f"  and {more} more arrays"] if more else []
    return "\n".join([*(lines[k] for k in sorted(chosen)), *rest])


def _hint_for_trees(sized: Sequence[Mapped]) -> str:
    """Says what to do with a list of trees that are alike, such as models, one of each lane."""
    trees: dict[str, dict[str, list[Any]]] = {}
    for m in sized:
        whole = getattr(m.path, "argument", m.path)
        match = _TREE_IN_LIST.match(m.path, len(whole))
        if match:
            of_one = trees.setdefault(whole, {}).setdefault(match[1], [])
            # They are alike if the same places hold arrays of the same types.
            of_one.append((match[2], m.value.shape, m.value.dtype))
    for path, listed_trees in trees.items():
        first, *others = listed_trees.values()
        if others and all(other == first for other in others):
            return f"{_TREE} If {path} is a list of models, one a lane, pass batchax.stack({path})."
    return ""


def _hint_for_numbers(wrong: Sequence[Mapped]) -> str:
    """Says what to do with a list of numbers, or of lists of them, that may be an array."""
    for m in wrong:
        whole = getattr(m.path, "argument", m.path)
        match = _IN_LIST.match(m.path, len(whole))
        if match and not m.value.shape:
            one = whole + match[1]
            advice = f"pass jax.numpy.asarray({one})"
            if match[2].count("[") > 1:
                advice += f", or of rows of different lengths batchax.Ragged.from_rows({one})"
            return f"{_TREE} If {one} is one batch, {advice}."
    return ""


_IN_LIST = re.compile(r"(.*?)((?:\[\d+\])+)$")
_TREE_IN_LIST = re.compile(r"\[(\d+)\](.+)$")
_TREE = "\nA list or tuple is a pytree of batches."


def _hint_for_rows(sized: Sequence[Mapped]) -> str:
    """Says what to do with a list of arrays that may be rows of different lengths."""
    lists: dict[str, list[Mapped]] = {}
    for m in sized:
        parent, _, index = m.path.rpartition("[")
        if index[:-1].isdigit() and m.path != getattr(m.path, "argument", m.path):
            lists.setdefault(parent, []).append(m)
    for path, rows in lists.items():
        shapes = {tuple(m.value.shape) for m in rows}
        if len(shapes) > 1 and len(set(map(len, shapes))) == 1:
            sizes = enumerate(zip(*shapes, strict=True))
            axes = tuple(axis for axis, lengths in sizes if len(set(lengths)) > 1)
            option = "" if axes == (0,) else f", axis={axes[0] if len(axes) == 1 else axes}"
            return (
                f"{_TREE} If {path} is one batch, of rows of different sizes, pass "
                f"batchax.Ragged.from_rows({path}{option})."
            )
    return ""


def check_untraced(purpose: str, arguments: Tree) -> None:
    """Raises an error for arguments without values, for what has a purpose that needs some."""
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments)):
        raise ArgumentTypeError(f"{purpose}, and an argument is traced. Call it outside of jit.")


def check_axis_size(axis_size: object, terms: Terms = LANES) -> None:
    if not (axis_size is None or _is_size(axis_size)):
        raise ArgumentTypeError(f"{terms.size} must be a non-negative int, got {show(axis_size)}.")


def _is_size(x: Value) -> bool:
    if jax.export.is_symbolic_dim(x):
        return True
    try:
        return not isinstance(x, bool) and operator.index(x) >= 0
    except TypeError:
        return False


def mesh_axis_names(spmd_axis_name: Hashable) -> tuple[Hashable, ...] | None:
    """Returns the names in an `spmd_axis_name`, which may be one or a tuple of them."""
    check_axis_name(spmd_axis_name, "spmd_axis_name")
    if spmd_axis_name is None or isinstance(spmd_axis_name, tuple):
        return spmd_axis_name
    return (spmd_axis_name,)


def check_axis_name(axis_name: object, option: str = "axis_name") -> None:
    """Raises an error, when `vmap` is called, for an axis name that nothing could look up."""
    try:
        hash(axis_name)
    except TypeError:
        raise ArgumentTypeError(
            f"{option} must be hashable, such as a string, got {show(axis_name)}."
        ) from None


def _leaf_parts(
    leaf: SpecifiedLeaf, mapped: list[Mapped], on_mesh: bool, spread: bool
) -> Callable[[Sequence[Any]], Any]:
    """Adds the arrays of one leaf to `mapped`; returns how an example sees the leaf."""
    value, spec = leaf.value, leaf.spec
    if spec is None:
        return _parts_on_mesh(leaf, mapped) if on_mesh else lambda _: value
    own = operator.itemgetter(len(mapped))
    if isinstance(value, Tracer) and type(spec) is int:  # as most are
        mapped.append(Mapped(leaf.path, value, spec))
        return own
    if isinstance(value, BatchOfRows):
        _check_rows_spec(leaf.path, spec)
        value.check_is_one_batch(leaf.path)
        mapped.append(MappedRows(leaf.path, value, 0, spec))
        return own
    if isinstance(spec, AxisSpec):
        made_of = spec.of_argument(value, leaf.path)
    else:
        made_of = parts_of_argument(value, spec, leaf.path)
    if made_of is not None:
        inside = [
            _leaf_parts(SpecifiedLeaf(path, x, a), mapped, on_mesh, spread)
            for path, x, a in made_of.named(leaf.path)
        ]
        return lambda examples: made_of.join([part(examples) for part in inside])
    if not is_position(spec):
        raise ArgumentTypeError(
            f"in_axes gives {show(spec)} for {leaf.path}, which is "
            f"{show(value)}: that kind of axis is for another registered container."
        )
    kind = Mapped
    if value is LANE_INDEX:
        kind = LaneIndices
    elif isinstance(value, LocalRows):
        kind = OwnRows
        if not spread:
            raise only_mapped(f"for {leaf.path} there is no mesh")
    else:
        value = _as_array(value, leaf.path, spread)
    mapped.append(kind(leaf.path, value, int(spec)))
    return own


def _check_rows_spec(path: str, spec: object) -> None:
    """Raises an error for what cannot be said of a batch of rows."""
    if is_position(spec) and spec != 0:
        raise AxisError(
            f"in_axes gives {spec} for {path}, whose rows are along axis 0. Pass 0, or a "
            'name for their size, batchax.ragged("n").'
        )
    if not is_position(spec) and not getattr(spec, "names_rows", False):
        raise ArgumentTypeError(
            f"in_axes gives {show(spec)} for {path}, which is a batch of rows: that kind of axis "
            'is for arrays. Pass 0, or a name for the size of rows, batchax.ragged("n").'
        )


def _parts_on_mesh(leaf: SpecifiedLeaf, mapped: list[Mapped]) -> Callable[[Sequence[Any]], Any]:
    """Adds the arrays of an unmapped leaf whose types tell of a mesh, without an axis."""
    values, structure = jax.tree.flatten(leaf.value)
    index_of = {}
    for i, x in enumerate(values):
        if isinstance(x, jax.Array) and not jax.typeof(x).sharding.mesh.empty:
            index_of[i] = len(mapped)
            mapped.append(Mapped(leaf.path, x, None))
    if not index_of:
        return lambda _: leaf.value
    return lambda examples: jax.tree.unflatten(
        structure, [examples[index_of[i]] if i in index_of else x for i, x in enumerate(values)]
    )


def array_inside(value: Value, path: str) -> str:
    """Advises on pandas tables, xarray arrays, and iterators; empty for other values."""
    if isinstance(value, Iterator):
        return (
            f"Pass jax.numpy.stack(list({path})) for one array, or iterate over the results of "
            "batchax.map_batches, which reads a stream of batches. "
        )
    if isinstance(value, np.ndarray) and value.dtype.kind == "O":
        return f"If it holds rows of different lengths, pass batchax.Ragged.from_rows({path}). "
    inside = getattr(value, "values", None)
    return f"Pass {path}.values, a NumPy array. " if isinstance(inside, np.ndarray) else ""


def _as_array(value: Value, path: str, on_host: bool) -> Value:
    """Returns an argument as an array; one of NumPy may stay `on_host`."""
    if isinstance(value, (jax.Array, Tracer)):  # a reference is no jax.Array
        return value
    try:
        if on_host and isinstance(value, np.ndarray):
            jax.typeof(value)
            return value
        if isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)) or hasattr(
            value, "__jax_array__"
        ):
            return jnp.asarray(value)
        jax.typeof(value)  # references and other values that JAX knows stay as they are
        return value
    except TypeError:
        kind = (
            f"an array of dtype {value.dtype}, which JAX does not have"
            if isinstance(value, (np.ndarray, np.generic))
            else f"of type {type(value).__name__}, not an array"
        )
        raise ArgumentTypeError(
            f"{path} is to be mapped, but it is {kind}. {array_inside(value, path)}To pass it to "
            "the function unchanged, pass None in in_axes." + by_name([path])
        ) from None


def _in_range(mapped: Sequence[Mapped], terms: Terms) -> list[Mapped]:
    """Makes axes non-negative; raises AxisError with every axis that its array does not have."""
    own = [m.with_own_axis() for m in mapped]
    checked = [m for m in own if m is not None]
    if len(checked) < len(mapped):
        wrong = [m for m, right in zip(mapped, own, strict=True) if right is None]
        sizes = {n for m in checked if (n := m.lanes) is not None}
        lanes = sizes.pop() if len(sizes) == 1 else "n"
        raise AxisError(
            f"{NO_SUCH_AXIS}\n"
            + few_lines(
                [f"  {m.path}: shape {written(m.value.shape)}, axis {m.axis}" for m in wrong]
            )
            + _hint_for_numbers(wrong)
            + "\nAn axis must be in [-ndim, ndim). Pass None for an argument without a batch axis."
            + by_name([m.path for m in wrong])
            + "".join(advise_split_key(m.path, lanes, terms.each) for m in wrong if is_key(m.value))
        )
    return checked


def _check_references(mapped: list[Mapped]) -> None:
    """Raises an error for one reference at two places: one would read what the other wrote."""
    first: dict[int, Mapped] = {}
    for m in mapped:
        same = first.setdefault(id(m.value), m)
        if same is not m and is_array(m.value) and _compat.is_reference(m.value):
            raise AxisError(
                f"{same.path} and {m.path} are the same reference (jax.new_ref), and a function "
                "that is staged must be given each only once. Pass it at one of the two places, or "
                "its value, reference[...], at the other."
            )


class _SplitKey(AxisSpec):
    """Maps one random key in `in_axes`: each lane gets its own key.

    Example:
      >>> noisy = lambda key, x: x + jax.random.normal(key)
      >>> ys = bx.vmap(noisy, (bx.split_key, 0))(jax.random.key(0), jnp.zeros(1000))
      >>> 0.9 < ys.std() < 1.1
      Array(True, dtype=bool)

    Lane `i` gets ``jax.random.fold_in(key, i)``, for any chunks, buckets, or mesh. In nested vmaps,
    it gets the key of its outer lane folded with its inner index. Lanes draw the numbers that `fun`
    draws alone with that key, also for keys of ``impl="rbg"``.

    A key with axis None is shared: all lanes draw the same numbers. Inside your own ``shard_map``,
    lanes are counted in each shard, so fold ``jax.lax.axis_index`` of the mesh axis into the key
    first.
    """

    def of_argument(self, value: Value, path: str) -> Parts:
        if not (hasattr(value, "dtype") and (is_key(value) or may_be_key(value))):
            raise ArgumentTypeError(
                f"in_axes gives {self!r} for {path}, which is {show(value)}: it takes one "
                "random key, of jax.random.key(seed). Pass 0 for an array of keys, one for each "
                "lane."
            )
        names = [path, path]
        return Parts([value, LANE_INDEX], [None, 0], lambda x: jax.random.fold_in(*x), names)

    def __repr__(self) -> str:
        return "batchax.split_key"

    def __reduce__(self) -> str:
        return "split_key"  # as of `LANE_INDEX`


split_key = _SplitKey()
