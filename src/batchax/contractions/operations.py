"""Rules by which the products that a value is made of pass through an operation."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import broadcast_in_dim_p

from batchax.contractions.products import Factor, Label, Operand, Product, Terms, itself
from batchax.jaxprs.types import Eqn, Value, Values

_MOST_TERMS = 16  # what is added up more often is summed as it is
_MOST_PIECES = 512

# The operands that are neither indices nor booleans.
_FLOATS = {
    "select_n": slice(1, None),
    "scatter-add": slice(0, 3, 2),
    "dynamic_update_slice": slice(2),
}

# Float16 overflows where another order of the products does not.
_DTYPES = ("bfloat16", "float32", "float64")


def terms_of(eqn: Eqn, operands: Sequence[Operand], outs: Values) -> list[Terms | None]:
    """Returns for each result the products whose sum it is; None if unknown."""
    pass_on = OPERATIONS.get(eqn.primitive.name)
    numbers = _FLOATS.get(eqn.primitive.name, slice(None))
    values = [x.value for x in operands[numbers]]
    dtypes = {jax.typeof(x).dtype.name for x in (*values, *outs)}
    repeats = eqn.primitive is broadcast_in_dim_p and not np.shape(values[0])
    if pass_on is None or not (repeats or dtypes.issubset(_DTYPES)):
        return [None] * len(outs)
    terms = pass_on(eqn, *operands)
    each = list(terms) if eqn.primitive.multiple_results and terms else [terms] * len(outs)
    return [t if t and _are_few(t) else None for t in each]


def _are_few(terms: Terms) -> bool:
    return len(terms) <= _MOST_TERMS or (
        len(terms) <= _MOST_PIECES and len({t.starts for t in terms}) * _MOST_TERMS >= len(terms)
    )


def _all_or_none(terms: Sequence[Product | None]) -> Terms | None:
    some = tuple(t for t in terms if t is not None)
    return some if len(some) == len(terms) else None


def _of_each(change: Callable[..., Product | None]) -> Callable[..., Terms | None]:
    """Lifts a change of one product to each product of the only operand."""

    def pass_on(eqn: Eqn, x: Operand) -> Terms | None:
        return _all_or_none([change(eqn, term, np.shape(x.value)) for term in x.products])

    return pass_on


def _negative(eqn: Eqn, x: Product, shape: tuple[int, ...]) -> Product:
    return replace(x, negative=not x.negative)


def _same(eqn: Eqn, x: Product, shape: Sequence[int]) -> Product:
    return x


def is_wider(eqn: Eqn) -> bool:
    """Returns whether a conversion keeps or increases the number of bits."""
    return np.dtype(eqn.params["new_dtype"]).itemsize >= eqn.invars[0].aval.dtype.itemsize


def _wider(eqn: Eqn, x: Product, shape: tuple[int, ...]) -> Product | None:
    return x if is_wider(eqn) else None


def _transposed(eqn: Eqn, x: Product, shape: tuple[int, ...]) -> Product:
    order = eqn.params["permutation"]
    return replace(
        x, dims=tuple(x.dims[d] for d in order), starts=tuple(x.starts[d] for d in order)
    )


def _broadcast(eqn: Eqn, x: Product, shape: tuple[int, ...]) -> Product:
    new, placed = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    old = {d: k for k, d in enumerate(placed) if shape[k] == new[d]}
    repeated = lambda n: () if n == 1 else (Label(n),)
    dims = tuple(x.dims[old[d]] if d in old else repeated(n) for d, n in enumerate(new))
    starts = tuple(x.starts[old[d]] if d in old else 0 for d in range(len(new)))
    return replace(x, dims=dims, starts=starts)


def _reshaped(eqn: Eqn, x: Product, shape: tuple[int, ...]) -> Product | None:
    """Reshapes: labels join in one dimension, or a dimension splits into several."""
    new = eqn.outvars[0].aval.shape
    if 0 in shape:
        return None
    if x.shape != shape:  # a piece
        kept = [d for d, n in enumerate(shape) if n != 1]
        if [shape[d] for d in kept] != [n for n in new if n != 1]:
            return None
        each = iter(kept)
        places = [None if n == 1 else next(each) for n in new]
        dims = tuple(() if d is None else x.dims[d] for d in places)
        return replace(x, dims=dims, starts=tuple(0 if d is None else x.starts[d] for d in places))
    # Labels that are split are reshaped in all factors.
    split: dict[Label, list[Label]] = {}
    left = list(x.labels[::-1])
    dims = []
    for size in new:
        own = []
        while size > 1 and left:
            label = left.pop()
            if label.size > size and label.size % size == 0:
                parts = [Label(size), Label(label.size // size)]
                _divide(split, label, parts)
                left.append(parts[1])
                label = parts[0]
            if size % label.size:
                return None
            size //= label.size
            own.append(label)
        if size != 1:
            return None
        dims.append(tuple(own))
    if any(not split.keys().isdisjoint(f.labels) for f in x.one_hot):
        return None
    factors = tuple(_of_divided(factor, split) for factor in x.factors)
    return replace(x, factors=factors, dims=tuple(dims), starts=(0,) * len(dims))


def _divide(split: dict[Label, list[Label]], label: Label, parts: list[Label]) -> None:
    """Records that `label` consists of `parts`. It may be part of another."""
    for whole, own in split.items():
        if own[-1] is label:
            split[whole] = [*own[:-1], *parts]
            return
    split[label] = parts


def _of_divided(factor: Factor, split: dict[Label, list[Label]]) -> Factor:
    if split.keys().isdisjoint(factor.labels):
        return factor
    labels = tuple(m for n in factor.labels for m in split.get(n, [n]))
    return Factor(lax.reshape(factor.value, [n.size for n in labels]), labels)


def _multiplied(eqn: Eqn, x: Operand, y: Operand) -> Terms | None:
    return _products(*(_as_large(v, v.products, eqn) for v in (x, y)))


def _as_large(x: Operand, terms: Terms, eqn: Eqn) -> Terms:
    """Broadcasts the terms of an operand to the shape of the result."""
    old, new = np.shape(x.value), eqn.outvars[0].aval.shape
    if old == new:
        return terms
    repeated = [() if n == 1 else (Label(n),) for n in new]
    kept = [len(old) == len(new) and old[d] == n for d, n in enumerate(new)]
    return tuple(
        replace(
            t,
            dims=tuple(t.dims[d] if k else repeated[d] for d, k in enumerate(kept)),
            starts=tuple(t.starts[d] if k else 0 for d, k in enumerate(kept)),
        )
        for t in terms
    )


def _products(xs: Terms, ys: Terms) -> Terms | None:
    pairs = [_both(x, y) for x in xs for y in ys]
    some = tuple(t for terms in pairs for t in terms or ())
    return None if None in pairs or not some else some


def _both(x: Product, y: Product) -> Terms | None:
    """Multiplies two products; none for pieces without a common element."""
    if x.is_apart(y):
        return ()
    if x.matrices is not None and y.matrices is not None:
        return None
    # Labels of different products must differ, unless they are identified below.
    y = y.relabelled({n: Label(n.size) for n in {*x.labels, *x.in_factors}})
    dims, starts = [], []
    for d, (mine, others) in enumerate(zip(x.dims, y.dims, strict=True)):
        begin, start = x.starts[d], y.starts[d]
        end, stop = begin + x.shape[d], start + y.shape[d]
        sizes = [[n.size for n in own] for own in (mine, others)]
        # Along a repeated dimension of one, the other decides. Where both vary, labels are
        # identified.
        if y.repeats(d) and start <= begin and end <= stop:
            dims.append(mine)
        elif x.repeats(d) and begin <= start and stop <= end:
            dims.append(others)
        elif begin == start and sizes[0] == sizes[1]:
            pairs = list(zip(mine, others, strict=True))
            both = {n: m for m, n in pairs if m in x.in_factors and n in y.in_factors}
            y = y.relabelled(both)
            dims.append(tuple(m if n in both or m in x.in_factors else n for m, n in pairs))
        else:
            return None
        starts.append(max(begin, start))
    product = Product(
        (*x.factors, *y.factors),
        tuple(dims),
        tuple(starts),
        x.negative != y.negative,
        x.precision if x.matrices else y.precision,
        x.matrices or y.matrices,
    )
    return (product,)


def _divided(eqn: Eqn, x: Operand, y: Operand) -> Terms | None:
    """Divides by a value of fewer dimensions."""
    (by,) = y.products if len(y.products) == 1 else (None,)
    fewer = by is not None and len(by.in_factors) < max(1, np.ndim(x.value))
    if by is None or not fewer or len(by.factors) != 1 or by.matrices:
        return None
    value, labels, _ = by.factors[0]
    inverse = replace(by, factors=(Factor(1 / value, labels),))
    return _products(_as_large(x, x.products, eqn), _as_large(y, (inverse,), eqn))


def _added(eqn: Eqn, x: Operand, y: Operand) -> Terms | None:
    minus = eqn.primitive.name == "sub"
    others = tuple(replace(t, negative=t.negative != minus) for t in y.products)
    return _sum(eqn, (x, x.products), (y, others))


def _sum(eqn: Eqn, *each: tuple[Operand, Terms]) -> Terms:
    """Collects the terms of all operands, except for zeros."""
    others = [(x, own) for x, own in each if not x.is_zero] or each[:1]
    return tuple(t for x, own in others for t in _as_large(x, own, eqn))


def _contracted(eqn: Eqn, x: Operand, y: Operand) -> Terms | None:
    if not _is_plain(eqn, x, y):
        return None
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = map(_as_operand, (x, y))
    paired = zip((*lhs_contract, *lhs_batch), (*rhs_contract, *rhs_batch), strict=True)
    # Contracted and batch dimensions are identified, label by label.
    alike = [zip(lhs.dims[a], rhs.dims[b], strict=True) for a, b in paired]
    rhs = rhs.relabelled({n: m for m, n in itertools.chain(*alike)})
    free = lambda dims, *others: [
        own for d, own in enumerate(dims) if d not in itertools.chain(*others)
    ]
    dims = (
        *(lhs.dims[d] for d in lhs_batch),
        *free(lhs.dims, lhs_contract, lhs_batch),
        *free(rhs.dims, rhs_contract, rhs_batch),
    )
    summed = [n for d in lhs_contract for n in lhs.dims[d]]
    return (_summed(eqn, (lhs, rhs), dims, summed),)


def _is_plain(eqn: Eqn, *operands: Operand) -> bool:
    """Returns whether sums are in the precision of the operands, or higher."""
    precision, result = eqn.params["precision"], eqn.outvars[0].aval
    plain = precision is None or isinstance(precision, (tuple, lax.Precision))
    wide = result.dtype.itemsize >= max(jax.typeof(v.value).dtype.itemsize for v in operands)
    return plain and wide and eqn.params.get("out_sharding") is None


def _as_operand(x: Operand) -> Product:
    """Returns an operand of a matrix product: an array, possibly repeated."""
    term, *others = x.products
    repeated = not term.in_factors.issuperset(term.labels) and not others
    alone = repeated and len(term.factors) == 1 and not term.negative and not any(term.starts)
    return term if alone and term.shape == np.shape(x.value) else itself(x.value)


def _summed(
    eqn: Eqn, each: Sequence[Product], dims: tuple[tuple[Label, ...], ...], summed: list[Label]
) -> Product:
    """Multiplies arrays and sums over labels. A label of a single array is summed at once."""
    factors: list[Factor] = []
    for x in each:
        (factor,) = x.factors
        others = {n for y in each if y is not x for n in y.in_factors}
        alone = [n for n in summed if n in x.in_factors and n not in others]
        value = jnp.sum(factor.value, [factor.labels.index(n) for n in alone])
        kept = tuple(n for n in factor.labels if n not in alone)
        factors.append(Factor(value, kept) if alone else factor)
    # Sum over repeated dimensions: a factor of their size.
    if repeated := [n.size for n in summed if not any(n in x.in_factors for x in each)]:
        times = jnp.asarray(math.prod(repeated), eqn.outvars[0].aval.dtype)
        factors.append(Factor(times, ()))
    matrices = eqn.outvars[0] if any(n in f.labels for f in factors for n in summed) else None
    return Product(tuple(factors), dims, (0,) * len(dims), False, eqn.params["precision"], matrices)


def _convolved(eqn: Eqn, x: Operand, y: Operand) -> Terms | None:
    """Rewrites the gradient of a convolution kernel as that of a matrix.

    Its rows are the parts of the image that the kernel meets at each position.
    """
    params, (out,) = eqn.params, eqn.outvars
    grouped = params["feature_group_count"] * params["batch_group_count"] != 1
    if grouped or not _is_plain(eqn, x, y):
        return None
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    image, other = (np.shape(v.value) for v in (x, y))
    places = [other[d] for d in rhs_spec[2:]]
    kernel = [out.aval.shape[d] for d in out_spec[2:]]
    rows = math.prod(places) * image[lhs_spec[1]]
    # More rows than the kernel has channels take more memory than the kernel.
    parts_count = math.prod(kernel)
    large = parts_count > 1 and rows > other[rhs_spec[0]]
    if large or parts_count > _MOST_PARTS or 0 in (*image, *other):
        return None
    # Its batch, its features, and its places, those between elements that are apart among them.
    edges = zip(params["padding"], params["lhs_dilation"], strict=True)
    padding = [(0, 0, 0), (0, 0, 0), *((low, high, apart - 1) for (low, high), apart in edges)]
    value = lax.pad(lax.transpose(x.value, lhs_spec), lax.full_like(x.value, 0, shape=()), padding)
    steps = params["rhs_dilation"]
    places_of = lambda starts: zip(starts, places, steps, strict=True)
    parts = [
        lax.slice(
            value,
            (0, 0, *starts),
            (*value.shape[:2], *(a + (n - 1) * s + 1 for a, n, s in places_of(starts))),
            (1, 1, *steps),
        )
        for starts in itertools.product(
            *(range(0, n * s, s) for n, s in zip(kernel, params["window_strides"], strict=True))
        )
    ]
    rank = len(places)
    patches = jnp.stack(parts, 2).reshape(*value.shape[:2], *kernel, *places)
    lhs, rhs = itself(patches), itself(lax.transpose(y.value, rhs_spec))
    alike = zip((lhs.dims[1], *lhs.dims[2 + rank :]), rhs.dims[1:], strict=True)
    rhs = rhs.relabelled({n: m for own, others in alike for m, n in zip(own, others, strict=True)})
    dims = [lhs.dims[0], rhs.dims[0], *lhs.dims[2 : 2 + rank]]
    placed = tuple(dims[out_spec.index(d)] for d in range(len(dims)))
    return (_summed(eqn, (lhs, rhs), placed, [n for own in rhs.dims[1:] for n in own]),)


_MOST_PARTS = 128


def _scattered(eqn: Eqn, x: Operand, indices: Operand, updates: Operand) -> Terms | None:
    """Follows rows added to a table: the gradient of an embedding."""
    params, shape = eqn.params, np.shape(x.value)
    numbers = params["dimension_numbers"]
    indexed, windows = numbers.scatter_dims_to_operand_dims, numbers.update_window_dims
    if numbers.operand_batching_dims or 0 in np.shape(updates.value):
        return None
    rows = itself(updates.value)
    own = [dims for d, dims in enumerate(rows.dims) if d not in windows]
    kept = [d for d in range(len(shape)) if d not in numbers.inserted_window_dims]
    windows = {d: rows.dims[k] for d, k in zip(kept, windows, strict=True)}
    clip = params["mode"] == lax.GatherScatterMode.CLIP
    places = {
        d: _clipped(i, shape[d]) if clip else _in_range(i, shape[d])
        for d, i in zip(indexed, jnp.moveaxis(jnp.int32(indices.value), -1, 0), strict=True)
    }
    return _placed_rows(eqn, x, rows, own, windows, places)


def _updated(eqn: Eqn, x: Operand, update: Operand, *starts: Operand) -> Terms | None:
    """Follows rows written to a table of zeros: the gradient of a row read by its index."""
    shape, own = np.shape(x.value), np.shape(update.value)
    if not x.is_zero or 0 in own:
        return None
    rows = itself(update.value)
    # JAX clamps starts so that the update fits.
    places = {
        d: _clipped(jnp.int32(starts[d].value), n) for d, n in enumerate(shape) if n != own[d]
    }
    return _placed_rows(eqn, x, rows, [], dict(enumerate(rows.dims)), places)


def _placed_rows(
    eqn: Eqn,
    x: Operand,
    rows: Product,
    own: list[tuple[Label, ...]],
    windows: dict[int, tuple[Label, ...]],
    places: dict[int, Value],
) -> Terms | None:
    """Adds `rows` to the table `x`.

    `own` are labels of the dimensions that number the rows, `windows` those of others by table
    dimension, and `places` the indices by table dimension.
    """
    shape = np.shape(x.value)
    sizes = {d: math.prod(n.size for n in windows.get(d, ())) for d in range(len(shape))}
    fits = all(sizes[d] == (1 if d in places else n) for d, n in enumerate(shape))
    if not fits or any(shape[d] == 1 for d in places) or math.prod(shape) > _MOST_INDICES:
        return None
    labels = tuple(n for dims in own for n in dims)
    new = {d: Label(shape[d]) for d in places}
    one_hot = [
        Factor(lax.reshape(value, [n.size for n in labels]), (*labels, new[d]), True)
        for d, value in places.items()
    ]
    dims = tuple((new[d],) if d in places else windows[d] for d in range(len(shape)))
    factors = (*rows.factors, *one_hot)
    added = Product(factors, dims, (0,) * len(dims), matrices=eqn.outvars[0])
    return (added,) if x.is_zero else (*x.products, added)


_MOST_INDICES = 2**31 - 1


def _in_range(index: Value, size: int) -> jax.Array:
    # The value `size` marks an index out of range, which is dropped.
    return jnp.where((index >= 0) & (index < size), index, size)


def _clipped(index: Value, size: int) -> jax.Array:
    return jnp.clip(index, 0, size - 1)


def _concatenated(eqn: Eqn, *operands: Operand) -> Terms:
    d = eqn.params["dimension"]
    sizes = [np.shape(x.value)[d] for x in operands]
    begins = itertools.accumulate(sizes, initial=0)
    return tuple(
        replace(t, starts=(*t.starts[:d], begin + t.starts[d], *t.starts[d + 1 :]))
        for x, begin in zip(operands, begins, strict=False)
        for t in (x if x.has_arrays else Operand(x.value)).products
    )


def _sliced(eqn: Eqn, x: Operand) -> Terms | None:
    params = eqn.params
    if any(n != 1 for n in params["strides"] or ()):
        return None
    terms: Terms | None = x.products
    for d, ends in enumerate(zip(params["start_indices"], params["limit_indices"], strict=True)):
        terms = terms and cut(terms, d, *ends)
    return terms


def _split(eqn: Eqn, x: Operand) -> list[Terms | None]:
    ends = itertools.pairwise(itertools.accumulate(eqn.params["sizes"], initial=0))
    return [cut(x.products, eqn.params["axis"], *each) for each in ends]


def cut(terms: Terms, d: int, start: int, limit: int) -> Terms | None:
    """Slices terms along a dimension."""
    each = [_cut_one(t, d, start, limit) for t in terms]
    return None if None in each else tuple(t for own in each for t in own or ())


def _cut_one(x: Product, d: int, start: int, limit: int) -> Terms | None:
    begin, end = x.starts[d], x.starts[d] + x.shape[d]
    first, last = max(begin, start), min(end, limit)
    # A piece outside of the slice vanishes.
    if first >= last and begin < end:
        return ()
    placed = (*x.starts[:d], first - start, *x.starts[d + 1 :])
    if (first, last) == (begin, end):
        return (replace(x, starts=placed),)
    own: tuple[Label, ...] = () if last - first == 1 else (Label(last - first),)
    dims = (*x.dims[:d], own, *x.dims[d + 1 :])
    if x.repeats(d):
        return (replace(x, dims=dims, starts=placed),)
    if len(x.dims[d]) != 1:
        return None
    (label,) = x.dims[d]

    def part(factor: Factor) -> Factor:
        value, labels, one_hot = factor
        if label not in labels:
            return factor
        place = labels.index(label)
        left = (*labels[:place], *own, *labels[place + 1 :])
        if not (one_hot and label is labels[-1]):
            value = lax.slice_in_dim(value, first - begin, last - begin, axis=place)
            return Factor(value if own else lax.squeeze(value, [place]), left, one_hot)
        if not own:
            return Factor(lax.convert_element_type(value == first - begin, dtype), left)
        return Factor(_in_range(value - (first - begin), own[0].size), left, True)

    dtype = jnp.result_type(*(f.value for f in x.factors if not f.one_hot))
    return (replace(x, factors=tuple(map(part, x.factors)), dims=dims, starts=placed),)


def _padded(eqn: Eqn, x: Operand, value: Operand) -> Terms | None:
    """Follows padding with zeros: the gradient of a slice."""
    lows, highs, apart = zip(*eqn.params["padding_config"], strict=True)
    if any(apart) or min((*lows, *highs)) < 0 or not value.is_zero:
        return None
    moved = lambda t: tuple(a + low for a, low in zip(t.starts, lows, strict=True))
    return tuple(replace(t, starts=moved(t)) for t in x.products)


def _selected(eqn: Eqn, which: Operand, *cases: Operand) -> Terms | None:
    """Selects between two operands by one boolean for all elements."""
    (by,) = which.products if len(which.products) == 1 else (None,)
    if by is None or by.in_factors or len(by.factors) != 1 or len(cases) != 2:
        return None
    chosen = by.factors[0].value
    no, yes = (x.products for x in cases)
    dtype = eqn.outvars[0].aval.dtype
    both = [_of_numbers(chosen, dtype, *pair) for pair in zip(no, yes, strict=False)]
    if len(no) == len(yes) and None not in both:
        return _all_or_none(both)
    kept: list[tuple[Operand, Terms]] = [
        (x, tuple(_where(chosen, value, t) for t in x.products))
        for x, value in zip(cases, (False, True), strict=True)
    ]
    return _sum(eqn, *kept)


def _of_numbers(chosen: Value, dtype: np.dtype[Any], no: Product, yes: Product) -> Product | None:
    """Selects between two products that differ only in scalar factors."""
    arrays = [[f for f in x.factors if f.labels] for x in (no, yes)]
    same = lambda x, y: x.value is y.value and x.labels == y.labels
    alike = len(arrays[0]) == len(arrays[1]) and all(map(same, *arrays))
    if not alike or (no.dims, no.starts) != (yes.dims, yes.starts) or not arrays[0]:
        return None
    numbers = [
        functools.reduce(
            lax.mul,
            [lax.convert_element_type(f.value, dtype) for f in x.factors if not f.labels],
            lax.convert_element_type(-1 if x.negative else 1, dtype),
        )
        for x in (no, yes)
    ]
    number = Factor(lax.select_n(chosen, *numbers), ())
    return replace(no, factors=(*arrays[0], number), negative=False)


def _where(chosen: Value, value: bool, x: Product) -> Product:
    """Zeroes a product unless `chosen` is `value`, also if its factors are not finite."""

    def kept(factor: Factor) -> Factor:
        if factor.one_hot:
            return factor
        x = jax.numpy.asarray(factor.value)
        cases = [x, lax.full_like(x, 0)]
        return Factor(lax.select_n(chosen, *(cases[::-1] if value else cases)), factor.labels)

    return x if x.is_zero else replace(x, factors=tuple(map(kept, x.factors)))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "mul": _multiplied,
    "div": _divided,
    "dot_general": _contracted,
    "conv_general_dilated": _convolved,
    "scatter-add": _scattered,
    "dynamic_update_slice": _updated,
    "select_n": _selected,
    "concatenate": _concatenated,
    "slice": _sliced,
    "pad": _padded,
    "split": _split,
    "square": lambda eqn, x: x.products if x.is_zero else None,
    "neg": _of_each(_negative),
    "copy": _of_each(_same),
    "copy_p": _of_each(_same),
    "convert_element_type": _of_each(_wider),
    "transpose": _of_each(_transposed),
    "broadcast_in_dim": _of_each(_broadcast),
    **dict.fromkeys(("add", "sub", "add_any"), _added),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _of_each(_reshaped)),
}
"""Of an equation and its operands the products of its result, or those of each; None: unknown."""

OF_ARRAYS = ("dot_general", "conv_general_dilated", "scatter-add", "dynamic_update_slice")
"""Those whose operands are arrays, of which it does not matter what they are made of."""
