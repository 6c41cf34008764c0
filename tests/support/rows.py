"""The oracle for ragged batches: a Python loop over the rows, each alone."""

import jax
import jax.numpy as jnp
import numpy as np

import batchax as bx

from support.oracle import direction, is_inexact, same

LENGTHS = (3, 5, 1, 4)


def ragged(*trailing, lengths=LENGTHS, seed=0, dtype=float, axis=0, poison=True, spare=2):
    """Random rows of shape ``(n, *trailing)``, ragged in `axis`.

    poison: behind the last row come NaNs, which belong to no row.
    spare: by how much `max_length` exceeds the longest row.
    """
    generator, dtype = np.random.default_rng(seed), jax.dtypes.canonicalize_dtype(dtype)
    shape = list(trailing)
    shape.insert(axis, sum(lengths))
    if jnp.issubdtype(dtype, jnp.inexact):
        data = generator.normal(size=shape).astype(dtype)
    else:
        data = generator.integers(0, 4, size=shape).astype(dtype)
    if poison and jnp.issubdtype(dtype, jnp.inexact):
        tail = list(shape)
        tail[axis] = 3
        data = np.concatenate([data, np.full(tail, np.nan, dtype)], axis)
    lengths = np.array(lengths, np.int32)
    bound = int(lengths.max(initial=0)) + spare
    return bx.Ragged(jnp.asarray(data), lengths, bound, axis=axis)


def rows_of(x, i):
    """Lane `i` of an argument: row `i` where it is ragged."""
    is_rows = lambda leaf: isinstance(leaf, bx.Ragged)
    return jax.tree.map(lambda leaf: leaf[i], x, is_leaf=is_rows)


def check_rows(
    fun,
    *args,
    in_axes=0,
    derivatives=True,
    tolerance=None,
    traced=True,
    modes=("jvp", "vjp"),
    **options,
):
    """Compares `bx.vmap(fun)` with a loop over the rows: values, dtypes and derivatives.

    args: `Ragged`s, arrays with a lane for each row, or trees of those; None in `in_axes` for
      what all rows share.
    derivatives: also jvp and vjp with respect to every argument of floats.
    traced: lengths are traced, under `jit`; else they are known.
    modes: the derivatives that the function has, where it has not both.
    options: of `bx.vmap`.
    """
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    batched = bx.vmap(fun, in_axes=in_axes, **options)
    count = next(
        len(x)
        for x in jax.tree.leaves(args, is_leaf=lambda x: isinstance(x, bx.Ragged))
        if isinstance(x, bx.Ragged)
    )

    def example(args, i):
        return [a if axis is None else rows_of(a, i) for a, axis in zip(args, axes, strict=True)]

    leaves, structure = jax.tree.flatten(args)
    moving = [i for i, x in enumerate(leaves) if derivatives and is_inexact(x)]

    def with_leaves(values):
        changed = list(leaves)
        for i, x in zip(moving, values, strict=True):
            changed[i] = x
        return jax.tree.unflatten(structure, changed)

    points = [leaves[i] for i in moving]
    # What belongs to no row has no derivative; its direction is poisoned as it is.
    tangents = [jnp.where(jnp.isnan(x), x, direction(x, 1)) for x in points]
    every = lambda args: [fun(*example(args, i)) for i in range(count)]
    expected = jax.jit(lambda xs: every(with_leaves(xs)))(points)  # compiled once for all rows
    got = jax.jit(batched)(*args) if traced else batched(*args)
    _same_rows(got, expected, tolerance, "values")
    if not moving:
        return

    def ours(values):
        return _inexact(batched(*with_leaves(values)))

    def alone(values):
        whole = with_leaves(values)
        return [_inexact(fun(*example(whole, i))) for i in range(count)]

    def of_ours(values, tangents, cotangents):
        dots = pulled = None
        if "jvp" in modes:
            outs, dots = jax.jvp(ours, (values,), (tangents,))
            dots = [_with_lengths(dot, out) for dot, out in zip(dots, outs, strict=True)]
        if "vjp" in modes:
            outs, pull = jax.vjp(ours, values)
            pulled = pull(_cotangents_like(outs, cotangents))[0]
        return dots, pulled

    def of_alone(values, tangents, cotangents):
        dots = jax.jvp(alone, (values,), (tangents,))[1] if "jvp" in modes else None
        return dots, jax.vjp(alone, values)[1](cotangents)[0] if "vjp" in modes else None

    outs = jax.eval_shape(alone, points)
    cotangents = [[direction(y, k) for k, y in enumerate(row)] for row in outs]
    dots, pulled = jax.jit(of_alone)(points, tangents, cotangents)
    run = jax.jit(of_ours) if traced else of_ours
    our_dots, our_pulled = run(points, tangents, cotangents)
    if "jvp" in modes:
        _same_rows(our_dots, dots, tolerance, "jvp")
    if "vjp" in modes:
        same(our_pulled, pulled, tolerance, "vjp")


def _inexact(out):
    is_rows = lambda leaf: isinstance(leaf, bx.Ragged)
    leaves = jax.tree.leaves(out, is_leaf=is_rows)
    return [y for y in leaves if is_inexact(y.data if isinstance(y, bx.Ragged) else y)]


def _with_lengths(dot, out):
    """A tangent of rows, which has none for their lengths, with the lengths of the rows."""
    return out.with_data(dot.data) if isinstance(out, bx.Ragged) else dot


def _cotangents_like(outs, rows):
    """The rows' cotangents, arranged as the batched results are."""
    arranged = []
    for k, out in enumerate(outs):
        parts = [jnp.asarray(row[k]) for row in rows]
        if not isinstance(out, bx.Ragged):
            arranged.append(jnp.stack(parts))
            continue
        packed = jnp.concatenate(parts, out.axis)
        room = [(0, 0)] * packed.ndim
        room[out.axis] = (0, out.data.shape[out.axis] - packed.shape[out.axis])
        # A cotangent for what belongs to no row must not matter.
        packed = jnp.pad(packed, room, constant_values=np.nan)
        none = np.zeros(out.lengths.shape, jax.dtypes.float0)
        arranged.append(jax.tree.unflatten(jax.tree.structure(out), [packed, none]))
    return arranged


def _same_rows(got, expected, tolerance, what):
    """Each lane of `got` against the result for that row alone, dtypes included."""
    is_rows = lambda leaf: isinstance(leaf, bx.Ragged)
    got = jax.device_get(got) if not isinstance(got, jax.core.Tracer) else got
    for i, alone in enumerate(expected):
        mine = jax.tree.map(lambda leaf, i=i: jnp.asarray(leaf[i]), got, is_leaf=is_rows)
        theirs = jax.tree.map(jnp.asarray, alone)
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            assert a.shape == b.shape, (what, i, a.shape, b.shape)
            assert a.dtype == b.dtype, (what, i, a.dtype, b.dtype)
        same(mine, theirs, tolerance, f"{what} of row {i}")
