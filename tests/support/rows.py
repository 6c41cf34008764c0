"""The oracle for ragged batches: a Python loop over the rows, each alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import batchax as bx

from support import oracle
from support.oracle import Claim, direction, is_inexact, same, settle, together

LENGTHS = (3, 5, 1, 4)
SHAPES = ((3, 2), (1, 4), (2, 1), (4, 3))


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


def images(*trailing, shapes=SHAPES, seed=0, dtype=float, axis=(0, 1), spare=1):
    """Random rows of such shapes, ragged along two axes, with NaNs behind the last row."""
    generator, dtype = np.random.default_rng(seed), jax.dtypes.canonicalize_dtype(dtype)
    rows = []
    for sizes in shapes:
        shape = list(trailing)
        for at, size in zip(axis, sizes, strict=True):
            shape.insert(at, size)
        rows.append(generator.normal(size=shape).astype(dtype))
    x = bx.Ragged.from_rows(rows, axis=axis)
    room = [(0, 3 * (k == axis[0])) for k in range(x.data.ndim)]
    data = np.pad(np.asarray(x.data), room, constant_values=np.nan)
    return bx.Ragged(data, x.lengths, tuple(n + spare for n in x.max_length), axis=axis)


def rows_of(x, i):
    """Lane `i` of an argument: row `i` where it is ragged."""
    return jax.tree.map(lambda leaf: leaf[i], x, is_leaf=_is_rows)


def check_rows(
    fun,
    *args,
    in_axes=0,
    derivatives=True,
    tolerance=None,
    traced=True,
    reverse_traced=False,
    eager=False,
    modes=("jvp", "vjp"),
    rules=False,
    ways=None,
    **options,
):
    """Compares `bx.vmap(fun)` with a loop over the rows: values, dtypes and derivatives.

    All of ours is one program, since compiling is what takes time; NumPy evaluates the loop.

    args: `Ragged`s, arrays with a lane for each row, or trees of those; None in `in_axes` for
      what all rows share.
    derivatives: also with respect to every argument of floats: jvp, and vjp of known lengths.
    traced: lengths are traced; else they are known.
    reverse_traced: they are in reverse mode, too.
    eager: also outside of `jit`.
    modes: the derivatives that the function has, where it has not both. Of both, the forward mode
      is computed with `--compile-all` only.
    rules: the function has rules of derivatives, which compute its values in their own way: they
      are computed without derivatives too.
    ways: by name, options of several calls, all compared with one loop. A call whose program is
      that of another is left out.
    options: of `bx.vmap`, of all calls.
    """
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    batched = {
        name: bx.vmap(fun, in_axes=in_axes, **options, **way)
        for name, way in (ways or {"": {}}).items()
    }
    one = jax.jit(fun)  # is looked at once for each length
    raggeds = [x for x in jax.tree.leaves(args, is_leaf=_is_rows) if _is_rows(x)]
    count, lengths = len(raggeds[0]), {id(n) for x in raggeds for n in x.each_length}
    leaves, structure = jax.tree.flatten(args)
    moving = [i for i, x in enumerate(leaves) if derivatives and is_inexact(x)]
    modes = modes if moving else ()
    if len(modes) == 2 and not oracle.COMPILED:
        modes = ("vjp",)  # which what belongs to no row reaches, too
    given = {i: x for i, x in enumerate(leaves) if id(x) not in lengths}
    # What belongs to no row has no derivative; its direction is poisoned as it is.
    tangents = {
        i: np.where(np.isnan(leaves[i]), leaves[i], direction(leaves[i], 1)) for i in moving
    }

    def whole(values):
        return jax.tree.unflatten(structure, [values.get(i, x) for i, x in enumerate(leaves)])

    def alone(values):
        args = whole(values)
        rows = [
            one(*[a if axis is None else rows_of(a, i) for a, axis in zip(args, axes, strict=True)])
            for i in range(count)
        ]
        return [_inexact(row) for row in rows], rows

    cotangents = [
        {name: _direction(y, k) for k, (name, y) in enumerate(row.items())}
        for row in (jax.eval_shape(alone, given)[0] if "vjp" in modes else [])
    ]

    def theirs(values, tangents):
        points = {i: values[i] for i in moving}
        fun = lambda points: alone({**values, **points})
        expected = {}
        if not modes:
            expected["values"] = fun(points)[1]
        if "jvp" in modes:
            _, expected["jvp"], expected["values"] = jax.jvp(
                fun, (points,), (tangents,), has_aux=True
            )
        if "vjp" in modes:
            _, pull, expected["values"] = jax.vjp(fun, points, has_aux=True)
            (expected["vjp"],) = pull(cotangents)
        return expected

    def ours(batched, args, values, tangents):
        points = {i: values[i] for i in moving}
        every = dict(enumerate(jax.tree.leaves(args))) if traced else values
        got = {}

        def fun(points, of=every):
            out = batched(*whole({**of, **points}))
            return _inexact(out), out

        if rules or not ("jvp" in modes or ("vjp" in modes and reverse_traced)):
            got["values"] = fun(points)[1]
        if "jvp" in modes:
            outs, dots, got["values beside jvp"] = jax.jvp(
                fun, (points,), (tangents,), has_aux=True
            )
            got["jvp"] = {name: _with_lengths(dots[name], out) for name, out in outs.items()}
        if "vjp" in modes:
            of = every if reverse_traced else values
            outs, pull, got["values of known lengths"] = jax.vjp(
                lambda points: fun(points, of), points, has_aux=True
            )
            (got["vjp"],) = pull(_cotangents_like(outs, cotangents))
        return got

    if len(batched) > 1:
        known = "vjp" in modes and not reverse_traced
        batched = _of_other_programs(
            batched,
            lambda f: [
                jax.make_jaxpr(f)(*args),
                known and jax.make_jaxpr(lambda values: f(*whole(values)))(given),
            ],
        )

    def verdict(results, loops):
        for way, got in results.items():
            where = f"{way}: " if way else ""
            outside = batched[way](*args) if eager else None
            for expected in loops.values():
                for what in ("values", "values beside jvp", "values of known lengths"):
                    if what in got:
                        _same_rows(got[what], expected["values"], tolerance, where + what)
                if eager:
                    whose = f"{where}values outside of jit"
                    _same_rows(outside, expected["values"], tolerance, whose)
                if "jvp" in modes:
                    _same_rows(got["jvp"], expected["jvp"], tolerance, f"{where}jvp")
                if "vjp" in modes:
                    same(got["vjp"], expected["vjp"], tolerance, f"{where}vjp")

    compiled = {way: partial(ours, f) for way, f in batched.items()}
    loops = {"a loop": lambda args, *given: theirs(*given)}
    settle([Claim(compiled, {}, loops, (args, given, tangents), verdict)])


def _of_other_programs(functions, staged):
    """The first of those `functions` of which `staged` are the same programs."""
    first = {}
    for name, function in functions.items():
        first.setdefault(tuple(map(str, staged(function))), name)
    return {name: functions[name] for name in first.values()}


WAYS = {
    "auto": {},
    "packed": {"layout": "packed"},
    "padded": {"layout": "padded"},
    "grouped": {"layout": "grouped"},
    "chunks": {"batch_size": 2},
    "buckets": {"buckets": 2},
    "compact": {"divergence": "compact"},
    "mesh": {"mesh": "all"},
}
"""Options of `bx.vmap` for rows, by name."""


def ways(*names):
    """Some ways to call `vmap`, by their names in `WAYS`."""
    return {name: WAYS[name] for name in names}


def attend(x):
    return jax.nn.softmax(x @ x.T) @ x


def powers(x):
    """What is not finite where a row is filled up with zeros, and compiles faster."""
    return jnp.tanh(x @ x.T) @ jnp.log(jnp.abs(x))


def check_rows_of_all(functions, *args, **options):
    """`check_rows` of many functions, by their names: one program takes less time than many.

    They share their rows, and where layouts are chosen, what the rows are: what would run in
    packed rows by itself may be padded here, and is better checked by itself.
    Where they fail together, each is compared by itself, and what fails by itself is named.
    """
    try:
        check_rows(together(functions), *args, **options)
    except Exception:
        for name, function in functions.items():
            try:
                check_rows(function, *args, **options)
            except Exception as error:
                error.add_note(f"What fails is {name!r}.")
                raise
        raise


def chosen(functions, names):
    """Those of `functions` that have one of `names`."""
    return {name: functions[name] for name in names}


def _is_rows(leaf):
    return isinstance(leaf, bx.Ragged)


def _inexact(out):
    """What has derivatives among the results, by their places."""
    leaves = jax.tree.leaves_with_path(out, is_leaf=_is_rows)
    return {
        jax.tree_util.keystr(path): y
        for path, y in leaves
        if is_inexact(y.data if isinstance(y, bx.Ragged) else y)
    }


def _direction(y, seed):
    """A fixed cotangent of `y`, which may be traced."""
    return np.random.default_rng(seed).normal(size=y.shape).astype(y.dtype)


def _elements(row, axes):
    """A row as its elements along the first of its ragged axes."""
    moved = np.moveaxis(row, axes, range(axes[0], axes[0] + len(axes)))
    rest = moved.shape[axes[0] + len(axes) :]
    count = int(np.prod([row.shape[at] for at in axes]))
    return moved.reshape(*moved.shape[: axes[0]], count, *rest)


def _with_lengths(dot, out):
    """A tangent of rows, which has none for their lengths, with the lengths of the rows."""
    return out.with_data(dot.data) if isinstance(out, bx.Ragged) else dot


def _cotangents_like(outs, rows):
    """The rows' cotangents, arranged as the batched results are."""
    arranged = {}
    for name, out in outs.items():
        parts = [row[name] for row in rows]
        if not isinstance(out, bx.Ragged):
            arranged[name] = np.stack(parts)
            continue
        packed = np.concatenate([_elements(part, out.axes) for part in parts], out.element_axis)
        room = [(0, 0)] * packed.ndim
        room[out.element_axis] = (
            0,
            out.data.shape[out.element_axis] - packed.shape[out.element_axis],
        )
        # A cotangent for what belongs to no row must not matter.
        packed = np.pad(packed, room, constant_values=np.nan)
        none = [np.zeros(n.shape, jax.dtypes.float0) for n in out.each_length]
        arranged[name] = jax.tree.unflatten(jax.tree.structure(out), [packed, *none])
    return arranged


def _same_rows(got, expected, tolerance, what):
    """Each lane of `got` against the result for that row alone, dtypes included."""
    got = jax.device_get(got) if not isinstance(got, jax.core.Tracer) else got
    for i, alone in enumerate(expected):
        mine = jax.tree.map(lambda leaf, i=i: jnp.asarray(leaf[i]), got, is_leaf=_is_rows)
        theirs = jax.tree.map(jnp.asarray, alone)
        same(mine, theirs, tolerance, f"{what} of row {i}")
