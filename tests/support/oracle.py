"""The oracle: what a batched function must equal, lane by lane.

`check` runs a per-example function through `batchax.vmap` and compares it with
a plain Python loop over the examples and with `jax.vmap`: values, dtypes, weak
types, derivatives of both modes, and nestings with itself and `jax.vmap`.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import batchax as bx

from fuzz.evaluate import Unknown, evaluate_by_numpy

# Whether all that results are compared with is compiled, and NumPy's reference one more result.
COMPILED = False


def check(fun, *args, eager=True, jit=True, **options):
    """Compares `bx.vmap(fun)` with the loop over examples, and with `jax.vmap`.

    eager: also call it outside of `jit`, where each operation is compiled by itself.
    jit: compile what is compared, as one program; False where `fun` is compiled already, or
        has to see values.

    The rest are those of `claims`.
    """
    settle(claims(fun, *args, eager=eager, jit=jit, **options), jit)


def check_all(cases, **options):
    """`check` of many functions: one program, which takes a fraction of the time of many.

    cases: for each name, which errors begin with, a function and its arguments, and where they
        differ from `options` its own.
    """
    everything = []
    for name, (fun, *args, own) in cases.items():
        everything += claims(fun, *args, where=f"{name}: ", **{"eager": False, **options, **own})
    settle(everything)


class Claim(NamedTuple):
    """What must hold of functions of the same arguments, each of which has a name.

    compiled: ours, which XLA runs; all claims are one program.
    staged: ours, too; operations that NumPy knows are left to it.
    theirs: references, of which the first is enough that NumPy can evaluate. The last takes the
        least time to compile.
    verdict: looks at the results of ours, and of references, by their names.
    """

    compiled: dict[str, Callable]
    staged: dict[str, Callable]
    theirs: dict[str, Callable]
    args: Sequence[Any]
    verdict: Callable


def settle(claims, jit=True):
    """Computes all that is claimed, what is compiled as one program if `jit`, and judges it.

    Returns the results of each claim: of ours, and of references.
    """
    compiled, arguments, verdicts = [], [], []
    for claim in claims:
        ours, theirs = by_numpy(claim) if jit else ({}, {})
        left = {n: f for n, f in claim.staged.items() if n not in ours}
        compiled.append([together(claim.compiled | left), together(_left(claim.theirs, theirs))])
        arguments.append(claim.args)
        verdicts.append((claim.verdict, ours, theirs))

    def compute(arguments):
        return [[f(*args) for f in two] for two, args in zip(compiled, arguments, strict=True)]

    results = (jax.jit(compute) if jit else compute)(arguments)
    everything = []
    for (verdict, *known), found in zip(verdicts, results, strict=True):
        everything.append([{**x, **y} for x, y in zip(known, found, strict=True)])
        verdict(*everything[-1])
    return everything


def total(fun):
    """A scalar of all outputs of `fun`."""
    return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fun(*args)))


def alike(tolerance=None, where=""):
    """The verdict that each of ours returns the same as each reference."""

    def verdict(ours, theirs):
        for mine, got in ours.items():
            for name, expected in theirs.items():
                same(got, expected, tolerance, f"{where}{mine}, {name}")

    return verdict


def _left(theirs, known):
    """The references that must be compiled."""
    if COMPILED:
        return theirs
    return {} if known else dict([*theirs.items()][-1:])


def by_numpy(claim):
    """Results by NumPy alone: of ours where it can, and of one reference if it can."""
    ours, theirs = {}, {}
    for name, function in claim.theirs.items():
        with suppress(Unknown, TypeError):  # JAX takes no derivatives of a few functions alone
            theirs[f"{name} by NumPy"] = evaluated(function, claim.args)
            break
    if theirs and not COMPILED:
        for name, function in claim.staged.items():
            with suppress(Unknown):
                ours[name] = evaluated(function, claim.args)
    return ours, theirs


def evaluated(fun, args):
    """What `fun` returns by NumPy, operation by operation: nothing is compiled."""
    leaves, tree = jax.tree.flatten(args)
    staged, out = jax.make_jaxpr(
        lambda leaves: fun(*jax.tree.unflatten(tree, leaves)), return_shape=True
    )(leaves)
    return jax.tree.unflatten(jax.tree.structure(out), evaluate_by_numpy(staged, leaves))


def claims(
    fun,
    *args,
    in_axes=0,
    out_axes=0,
    axis_name=None,
    against_jax=True,
    derivatives=True,
    modes=("jvp", "vjp"),
    second=False,
    nested=False,
    eager=True,
    jit=True,
    tolerance=None,
    unrolled=True,
    where="",
):
    """What holds of `bx.vmap(fun)`: functions, their arguments, and what must hold of results.

    in_axes: an int, None, or a tuple of those, one for each argument.
    out_axes: an int, or a tree of ints (None where the output is unbatched).
    against_jax: False where `jax.vmap` does not support the function.
    derivatives: also jvp and vjp with respect to every inexact argument.
    modes: those of the two that the function has.
    second: also forward over reverse.
    nested: also under a second vmap, of batchax and of JAX, in both orders.
    unrolled: False has the loop over examples compiled as one: for what takes long to compile.
    where: what errors begin with.
    """
    if not isinstance(in_axes, tuple):
        in_axes = (in_axes,) * len(args)
    options = dict(in_axes=in_axes, out_axes=out_axes)
    if axis_name is not None:
        options["axis_name"] = axis_name
    batched, staged = bx.vmap(fun, **options), jax.jit(fun) if jit else fun
    compiled = {"jit outside": batched} if jit or not eager else {}
    inside = {"jit inside": bx.vmap(staged, **options)} if jit else {}
    theirs = {}
    if axis_name is None:
        one_by_one = loop_function(staged, in_axes, out_axes)
        theirs["loop"] = one_by_one if unrolled else in_turn(fun, in_axes)
    if against_jax:
        theirs["jax.vmap"] = jax.vmap(staged, **options)
    outside_jit = batched(*args) if eager else None

    def verdict(ours, theirs):
        got = outside_jit if eager else ours["jit outside"]
        for way, value in {**ours, **theirs}.items():
            same(got, value, tolerance, where + way)
        if against_jax:
            expected = types(jax.vmap(staged, **options), args)
            assert [*map(jax.typeof, jax.tree.leaves(got))] == expected, where

    yield Claim(compiled, inside, theirs, args, verdict)
    if derivatives:
        ours = bx.vmap(staged, **options)
        yield from claims_of_derivatives(
            ours, theirs, args, second, tolerance, where, compiled=False, modes=modes
        )
    if nested:
        yield claim_of_nesting(staged, args, options, tolerance, where)


def shares(names, count):
    """`names` in `count` parts, each of which makes one program."""
    names = list(names)
    return [names[i::count] for i in range(count)]


def together(functions):
    """The function whose results are those of all `functions`, by their names."""
    return lambda *args: {name: function(*args) for name, function in functions.items()}


def at_once(*functions):
    """One program for the results of all `functions`, which are given the same."""
    return jax.jit(lambda *args: [function(*args) for function in functions])


def quickly(fun, *args, **options):
    """`check` in one program: far fewer operations to compile one by one."""
    check(fun, *args, eager=False, **options)


def loop_function(fun, in_axes, out_axes):
    """The Python loop over examples as a function of batches."""
    return lambda *args: loop(fun, args, in_axes, out_axes)


def in_turn(fun, in_axes):
    """The same as a loop that is compiled, of which results have the lanes first."""

    def run(*args):
        axes = [a for a in in_axes if a is not None]
        lanes = [arg for arg, a in zip(args, in_axes, strict=True) if a is not None]

        def one(lane):
            mine = iter(lane)
            return fun(
                *[x if a is None else next(mine) for x, a in zip(args, in_axes, strict=True)]
            )

        return jax.lax.map(one, [jnp.moveaxis(x, a, 0) for x, a in zip(lanes, axes, strict=True)])

    return run


def moved(results, out_axes):
    """Results whose lanes come first, with their lanes at `out_axes`."""
    axes = jax.tree.broadcast(out_axes, results)
    return jax.tree.map(lambda x, axis: jnp.moveaxis(x, 0, axis), results, axes)


def loop(fun, args, in_axes, out_axes=0):
    """`fun` called for each example, the results stacked at `out_axes`."""
    size = next(
        x.shape[a]
        for arg, a in zip(args, in_axes, strict=True)
        if a is not None
        for x in jax.tree.leaves(arg)
    )
    outs = []
    for i in range(size):
        example = [
            arg if a is None else jax.tree.map(lambda x, a=a: lane(x, i, a), arg)
            for arg, a in zip(args, in_axes, strict=True)
        ]
        outs.append(fun(*example))
    structure = jax.tree.structure(outs[0])
    axes = jax.tree.leaves(
        jax.tree.broadcast(out_axes, outs[0], is_leaf=lambda x: x is None)
        if out_axes is not None
        else [None] * structure.num_leaves,
        is_leaf=lambda x: x is None,
    )
    leaves = [
        parts[0] if a is None else stack(parts, a)
        for a, parts in zip(axes, zip(*map(jax.tree.leaves, outs), strict=True), strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def lane(x, i, axis):
    """Example `i` of `x`."""
    where = (slice(None),) * (axis % x.ndim) + (i,)
    return jnp.asarray(np.asarray(x)[where]) if known_to_numpy(x) else x[where]


def stack(parts, axis=0):
    """Arrays of one shape, as one."""
    if all(map(known_to_numpy, parts)):
        return jnp.asarray(np.stack([np.asarray(p) for p in parts], axis))
    return jnp.stack([jnp.asarray(p) for p in parts], axis)


def known_to_numpy(x):
    """Whether NumPy can take `x` apart, where JAX compiles a program for each shape."""
    return (
        isinstance(x, jax.Array | np.ndarray)
        and not isinstance(x, jax.core.Tracer)
        and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
        and not jax.typeof(x).weak_type
    )


def check_derivatives(batched, reference, args, second=False, tolerance=None, jit=False):
    """jvp and vjp (and jvp of vjp) of `batched` against those of `reference`."""
    for claim in claims_of_derivatives(batched, reference, args, second, tolerance):
        settle([claim], jit)


def claims_of_derivatives(
    batched,
    theirs,
    args,
    second=False,
    tolerance=None,
    where="",
    compiled=True,
    modes=("jvp", "vjp"),
):
    """See `claims` and `check_derivatives`: one, or none where nothing has derivatives.

    theirs: functions whose derivatives must be the same, by names; or one.
    compiled: whether derivatives of `batched` must be, see `Claim`.
    """
    theirs = theirs if isinstance(theirs, dict) else {"expected": theirs}
    diff = [i for i, arg in enumerate(args) if all(map(is_inexact, jax.tree.leaves(arg)))]
    if not diff:
        return
    points = [args[i] for i in diff]

    def values(f, *xs):
        full = list(args)
        for i, x in zip(diff, xs, strict=True):
            full[i] = x
        return [y for y in jax.tree.leaves(f(*full)) if is_inexact(y)]

    types = jax.eval_shape(partial(values, [*theirs.values()][-1]), *points)
    if not types:
        return
    tangents = tuple(direction(x, 1) for x in points)
    cotangents = [direction(y, 2) for y in types]

    def derivatives(f):
        f = partial(values, f)
        pull = lambda *xs: jax.vjp(f, *xs)[1](cotangents)
        both = {"jvp": lambda *xs: jax.jvp(f, xs, tangents), "vjp": pull}
        ways = {mode: both[mode] for mode in modes}
        if second:
            ways["jvp of vjp"] = lambda *xs: jax.jvp(pull, xs, tangents)[1]
        return together(ways)

    def verdict(ours, theirs):
        for whose, expected in theirs.items():
            for way, value in ours["got"].items():
                same(value, expected[way], tolerance, f"{where}{way}, {whose}")

    theirs = {name: derivatives(f) for name, f in theirs.items()}
    ours = {"got": derivatives(batched)}
    yield Claim(ours if compiled else {}, {} if compiled else ours, theirs, points, verdict)


def claim_of_nesting(fun, args, options, tolerance=None, where=""):
    """Two vmaps of which batchax does one or both; see `claims`."""
    doubled = [
        jax.tree.map(lambda x: jnp.stack([x, x[..., ::-1] if x.ndim else x]), a) for a in args
    ]
    pairs = ((bx.vmap, bx.vmap), (bx.vmap, jax.vmap), (jax.vmap, bx.vmap))
    ways = {
        f"{outer.__module__} of {inner.__module__}": outer(inner(fun, **options))
        for outer, inner in pairs
    }

    theirs = {"jax.vmap": jax.vmap(jax.vmap(fun, **options))}
    return Claim({}, ways, theirs, doubled, alike(tolerance, where))


def agree(got, expected, *args, tolerance=None):
    """A function, or each of several by their names, returns what another does.

    Returns what the first does.
    """
    ours = got if isinstance(got, dict) else {"got": got}
    [(results, _)] = settle([Claim(ours, {}, {"expected": expected}, args, alike(tolerance))])
    return results[next(iter(ours))]


def plainly(fun, *args):
    """What `fun` returns: by NumPy, or as one program if an operation is missing there."""
    if not COMPILED:
        with suppress(Unknown):
            return evaluated(fun, args)
    return jax.jit(fun)(*args)


def same(got, expected, tolerance=None, where=""):
    """Equal structure, shapes, dtypes and values (within rounding), NaN included."""
    assert jax.tree.structure(got) == jax.tree.structure(expected), where
    paths = [f"{where}{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(got)]
    for where, g, e in zip(paths, *map(jax.tree.leaves, (got, expected)), strict=True):
        g, e = jnp.asarray(g), jnp.asarray(e)
        assert g.dtype == e.dtype, (where, g.dtype, e.dtype)
        assert g.shape == e.shape, (where, g.shape, e.shape)
        np.testing.assert_allclose(
            plain(g), plain(e), **(tolerance or tolerances(e.dtype)), err_msg=where
        )


def types(fun, args):
    """The types of what `fun` returns, weak types included."""
    return jax.make_jaxpr(fun)(*args).out_avals


def same_type(got, expected):
    """Equal types, weak type included."""
    assert jax.typeof(got) == jax.typeof(expected), (jax.typeof(got), jax.typeof(expected))


def plain(x):
    """A NumPy array of a dtype NumPy can compare."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    if x.dtype == jax.dtypes.float0:
        return np.zeros(x.shape)
    if not jnp.issubdtype(x.dtype, jnp.number) and x.dtype != jnp.bool_:
        return np.asarray(x)
    if x.dtype.kind not in "biufc" or x.dtype.itemsize < 2:
        return np.asarray(x).astype(np.float32)
    return np.asarray(x)


def tolerances(dtype):
    """Rounding to allow for: lanes may be summed in another order than alone."""
    if jnp.issubdtype(dtype, jnp.inexact):
        eps = float(jnp.finfo(dtype).eps)
        return dict(rtol=100 * eps, atol=100 * eps)
    return dict(rtol=0, atol=0)


def is_inexact(x):
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def direction(tree, seed):
    """A fixed direction of the shape of `tree`."""

    def one(x):
        values = np.random.default_rng(seed).normal(size=jnp.shape(x))
        return jnp.asarray(values.astype(jnp.result_type(x)))

    return jax.tree.map(one, tree)


def example(shape, dtype=float, seed=0, low=None, high=None):
    """A fixed random array: normal for inexact dtypes, else in [low, high).

    dtype: Python's `float` is float64 where x64 is enabled, elsewhere float32.
    """
    rng = np.random.default_rng(seed)
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if dtype == jnp.bool_:
        x = rng.integers(0, 2, shape)
    elif jnp.issubdtype(dtype, jnp.integer):
        x = rng.integers(low or 0, 5 if high is None else high, shape)
    else:
        x = rng.normal(size=shape) if low is None else rng.uniform(low, high, shape)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            x = x + 1j * rng.normal(size=shape)
    return jnp.asarray(np.asarray(x).astype(dtype))
