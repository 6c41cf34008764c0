"""What a program gives batched, and what it gives example after example."""

import contextlib
import functools
import inspect
import warnings
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh

import batchax as bx

from fuzz.evaluate import Endless, NotANumber, NotFinite, Tied, evaluate, evaluate_one, only_finite
from fuzz.programs import HELPERS, PRELUDE, Program
from support.forced import ALONE, DECIDED, FORCED, KERNELS, LAST, SERIAL

OUTER = 2  # lanes of a vmap around
_FORCED = {"FORCED": FORCED, "LAST": LAST, "KERNELS": KERNELS, "SERIAL": SERIAL, "ALONE": ALONE}
_FORCED |= {"DECIDED": DECIDED}


class Discarded(Exception):
    """A program that says nothing: it has no meaning alone, or JAX's vmap refuses it, too."""


class Found(AssertionError):
    """A difference, or an error where there should be none."""

    def __init__(self, signature: str, text: str) -> None:
        super().__init__(text)
        self.signature = signature


@dataclass
class Case:
    """A program, and one way to run it.

    rounded: whether arguments are whole numbers, of which many are equal.
    in_axes: for each argument an int or None.
    out_axes: for each result an int, "bx.AUTO", or a reduction's name.
    options: further arguments of `bx.vmap`, as text.
    around: the text of a vmap around, with a hole for the batched function.
    engine: "staged" (evaluated operation by operation), "jit" or "eager".
    mode: "values", "jvp", "vjp" or "jvp of vjp".
    inner: what `vmap` means inside the program.
    wild: whether arguments hold zeros, infinities and NaN.
    watched: whether it runs with `jax.debug_nans`.
    """

    program: Program
    lanes: int
    seed: int
    rounded: bool
    in_axes: list[int | None]
    out_axes: list[Any]
    options: list[str]
    around: str
    engine: str
    mode: str
    inner: str
    wild: bool = False
    watched: bool = False

    @property
    def nested(self):
        return self.around != "{}"

    @property
    def collective(self):
        """Whether lanes may need values of others."""
        return self.program.named and '"i"' in self.program.source

    @property
    def loose(self):
        return self.program.loose

    def batched(self, vmap="bx.vmap"):
        """The batched function, as text."""
        out_axes = [f'bx.Reduce("{a}")' if a in REDUCTIONS else a for a in self.out_axes]
        text = f"{vmap}(f, in_axes=({_listed(self.in_axes)}), out_axes=({_listed(out_axes)})"
        if self.program.named:
            text += ', axis_name="i"'
        text += "".join(f", {o}" for o in self.options if vmap == "bx.vmap") + ")"
        return self.around.format(text)

    def arguments(self):
        """Text that makes the arguments."""
        lines = [f"rng = np.random.default_rng({self.seed})", "args = ["]
        for t, axis in zip(self.program.arguments, self.in_axes, strict=True):
            shape = list(t.shape)
            if axis is not None:
                shape.insert(axis if axis >= 0 else axis + len(shape) + 1, self.lanes)
            shape = ([OUTER] if self.nested else []) + shape
            lines.append(f"    {array_text(t.dtype, tuple(shape), self)},")
        return "\n".join([*lines, "]"])

    def script(self):
        """A program that can be pasted."""
        run = "def run(f, args):\n    return f(*args)\n"
        if self.mode != "values":
            above = map(inspect.getsource, (is_inexact, derived))
            run = "\n".join([*above, RUN.format(mode=self.mode)])
        compiled = "print(jax.jit(lambda args: run(batched, args))(args))"
        parts = [PRELUDE, f"vmap = {self.inner}\n", helpers_of(self), self.program.source]
        forced = [n for n in _FORCED if n in f"{self.inner} {self.batched()}"]
        if forced:
            names = ", ".join(forced)
            parts.insert(1, f"from support.forced import {names}\n")  # with tests/ in PYTHONPATH
        if self.watched:
            parts.insert(1, 'jax.config.update("jax_debug_nans", True)\n')
        parts += [self.arguments() + "\n", f"batched = {self.batched()}", run]
        parts.append("print(run(batched, args))" if self.engine == "eager" else compiled)
        if self.mode == "values" and not self.nested and not self.program.named:
            parts.append(ALONE.format(axes=self.in_axes, lanes=self.lanes))
        else:
            parts.append(f"batched = {self.batched('jax.vmap')}")
            parts.append(compiled)
        if self.program.effects:
            parts.append("jax.effects_barrier()\nprint(*TOLD, sep='\\n')")
        return "\n".join(part for part in parts if part)


# What is refused by name, as documented.
REFUSALS = [
    "a function that does input or output",  # differentiated in chunks
    "a callback with ordered=True is not supported",  # in groups of rows
    "a callback has ordered=True",  # on devices
    "the function contains a host callback, and mesh leaves",
    # Of a jvp rule that differentiates a custom_vjp function: `jax.vmap` raises the same.
    "apply forward-mode autodiff (jvp) to a custom_vjp function",
]

# XLA for CPUs chooses a layout for the operand of a Fourier transform that the transform does not
# take: with `jax.vmap` as well.
FAULTS_OF_XLA = ["fft_thunk.cc"]

REDUCTIONS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}

# What a script calls: `derived` is above it.
RUN = """\
def run(f, args):
    tangents = [jnp.cos(x) for x in args if is_inexact(x)]
    ys = jax.eval_shape(derived(f, "values"), args, [], [])[0]
    cotangents = [jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype) for y in ys]
    return derived(f, "{mode}")(args, tangents, cotangents)
"""

ALONE = """\
for i in range({lanes}):
    lane = lambda x, a: x if a is None else x[(slice(None),) * (a % x.ndim) + (i,)]
    print(i, jax.jit(f)(*map(lane, args, {axes})))
"""


def _listed(texts):
    return "".join(f"{t}, " for t in texts).strip()


def helpers_of(case):
    return "\n".join(HELPERS[h] for h in [*case.program.helpers, *["spoil"] * case.wild])


def array_text(dtype, shape, case):
    """Text that makes an array of random numbers."""
    seed = case.seed
    if dtype == "key":
        if not shape:
            return f"jax.random.key({seed})"
        return f"jax.random.split(jax.random.key({seed}), {shape})"
    if dtype == "bool":
        return f"jnp.asarray(rng.integers(0, 2, {shape}) > 0)"
    if "int" in dtype:
        least = 0 if dtype.startswith("u") else -1
        return f'jnp.asarray(rng.integers({least}, 4, {shape}), "{dtype}")'
    values = f"rng.normal(size={shape})"
    if dtype.startswith("complex"):
        values += f" + 1j * rng.normal(size={shape})"
    if case.rounded:
        values = f"np.round({values})"
    if case.wild:
        values = f"spoil({values}, rng)"
    return f'jnp.asarray({values}, "{dtype}")'


def is_inexact(x):
    return jnp.issubdtype(x.dtype, jnp.inexact)


def namespace(case, vmap):
    names = {"jax": jax, "jnp": jnp, "np": np, "lax": lax, "bx": bx, "vmap": vmap}
    names |= {"Mesh": Mesh, "io_callback": io_callback, "TOLD": [], **_FORCED}
    exec(helpers_of(case), names)
    exec(case.program.source, names)
    return names


def derived(f, mode):
    """A function of arguments, directions and cotangents: results, and their derivatives."""

    def run(args, tangents, cotangents):
        floats = [k for k, x in enumerate(args) if is_inexact(x)]

        def of_floats(*points):
            full = list(args)
            for k, x in zip(floats, points, strict=True):
                full[k] = x
            outs = f(*full)
            return [y for y in outs if is_inexact(y)], [y for y in outs if not is_inexact(y)]

        points = [args[k] for k in floats]
        if mode == "values":
            return [*of_floats(*points), [], []]
        if mode == "jvp":
            ys, dots, others = jax.jvp(of_floats, points, tangents, has_aux=True)
            return [ys, others, dots, []]
        ys, pull, others = jax.vjp(of_floats, *points, has_aux=True)
        if mode == "vjp":
            return [ys, others, [], list(pull(cotangents))]

        def pulled(*points):
            return jax.vjp(of_floats, *points, has_aux=True)[1](cotangents)

        return [ys, others, [], list(jax.jvp(pulled, points, tangents)[1])]

    return run


def quietly(judged):
    """Without warnings, which the example alone would give as well."""

    @functools.wraps(judged)
    def call(case):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            judged(case)

    return call


@quietly
def judge(case):
    """Raises `Found` if the case is batched differently than it runs alone."""
    alone = namespace(case, jax.vmap)
    exec(case.arguments(), alone)
    args = alone["args"]
    rng = np.random.default_rng(case.seed + 1)
    floats = [t for t in case.program.outputs if t.inexact]
    tangents = [direction(x.shape, x.dtype, rng) for x in args if is_inexact(x)]
    cotangents = [
        direction(_batched_shape(case, t, a), t.dtype, rng)
        for t, a in zip(case.program.outputs, case.out_axes, strict=True)
        if t in floats
    ]
    if case.mode == "values":
        tangents, cotangents = [], []
    run_alone = functools.partial(one_by_one, case, alone["f"], args, tangents, cotangents)
    expected = run_alone()
    should, told = list(alone["TOLD"]), []
    got = watched(functools.partial(batched, case, args, tangents, cotangents, told=told))
    problem = difference(got, expected, case.loose)
    if problem is None:
        if said := told_otherwise(told, loops(case, args, should, tangents, cotangents), case):
            raise Found(f"calls: {said[:20]} {' '.join(case.options)}", f"{said}\n{case.script()}")
        return
    if problem.kind == "values":
        if adds_up_infinities(problem):
            raise Discarded("infinite cotangents")
        again = functools.partial(
            one_by_one, case, alone["f"], tangents=tangents, cotangents=cotangents
        )
        if ill_conditioned(again, args, expected, problem, case.loose):
            raise Discarded("ill-conditioned")
        reasons = [undecided(run_alone, lane) for lane in lanes_of(case, problem)]
        if all(reasons):
            raise Discarded(reasons[0])
        if case.mode != "values":
            undifferentiated = one_by_one(replace(case, mode="values"), alone["f"], args, [], [])
            if difference(expected[:2], undifferentiated[:2], case.loose) is not None:
                raise Discarded("JAX changes what an example returns by differentiating it")
    if not case.collective and difference(got, run_alone(compiled=True), case.loose) is None:
        raise Discarded("NumPy says otherwise than XLA, of the example alone")
    run_again = functools.partial(batched, case, args, tangents, cotangents)
    judge_again(case, problem, expected, run_again)
    theirs = ""
    if not case.nested or "jax.vmap" in case.around:
        try:
            other = batched(case, args, tangents, cotangents, engine="jit", vmap="jax.vmap")
            also = difference(other, expected, case.loose)
            theirs = "; jax.vmap is right" if also is None else "; jax.vmap: " + also.text
        except Exception as error:
            theirs = f"; jax.vmap raises {type(error).__name__}"
    raise a_difference(case, problem, theirs)


def judge_again(case, problem, expected, run):
    """Whether the other way to run the program decides about a problem: it is found, or none."""
    if case.engine == "staged":
        if difference(run(engine="jit"), expected, case.loose) is None:
            raise Found("evaluator", f"evaluator: {problem.text}\n\n{case.script()}")
    elif of_nan(problem) and difference(run(engine="staged"), expected, case.loose) is None:
        raise Discarded(COMPILED_NAN)


def a_difference(case, problem, more=""):
    where = f"{problem.kind} of {problem.what} {case.mode} {' '.join(case.options)}"
    return Found(where, f"{problem.text}{more}\n\n{case.script()}")


# XLA's compiler makes a choice of the product of a number and a truth value, which is zero for NaN.
COMPILED_NAN = "NaN in a program as it is, and a number where XLA compiles it, or the reverse"


def of_nan(problem):
    """Whether results that differ are NaN on one side."""
    if problem.kind != "values":
        return False
    got, expected = (x[problem.wrong] for x in problem.sides)
    return got.dtype.kind in "fc" and bool((np.isnan(got) != np.isnan(expected)).all())


def adds_up_infinities(problem):
    """Whether cotangents that differ are infinite, or NaN, on both sides.

    A sum of cotangents is multiplied by an infinite derivative, or each of them, and then they are
    added up: infinity, or infinity less infinity.
    """
    got, expected = (x[problem.wrong] for x in problem.sides)
    finite = np.isfinite(got) | np.isfinite(expected)
    return problem.what == "cotangents" and not finite.any()


def lanes_of(case, problem):
    """The lanes that a problem is in, after the numbers of a vmap around; or ["any"]."""
    g, k = problem.place
    outs = list(zip(case.program.outputs, case.out_axes, strict=True))
    axes = [
        [a for t, a in outs if t.inexact],
        [a for t, a in outs if not t.inexact],
        [a for t, a in outs if t.inexact],
        [a for t, a in zip(case.program.arguments, case.in_axes, strict=True) if t.inexact],
    ]
    axis = axes[g][k]
    if case.collective or not isinstance(axis, int):
        return ["any"]
    own = problem.wrong.ndim - case.nested
    at = np.nonzero(problem.wrong)
    around = at[0] if case.nested else np.zeros_like(at[0])
    return sorted({*zip(around.tolist(), at[axis % own + case.nested].tolist(), strict=True)})


def undecided(run_alone, lane):
    """What is left open for a lane alone: what NaN and infinities reach, or the order of a sort."""
    try:
        run_alone(finite=lane)
    except NotFinite:
        return "a transform or convolution of NaN or infinities"
    except Tied:
        return "a tie that rounding decides"
    return ""


def loops(case, args, should, tangents, cotangents):
    """What calls loops over examples make: those of `should`, and then those of other loops."""
    yield should
    run = functools.partial(one_by_one, case, args=args)
    if case.inner != "jax.vmap":
        # JAX's vmap makes the calls of both branches, and once those that do not differ.
        yield _calls_of(namespace(case, _looped), run, tangents, cotangents)
    if case.mode != "values":
        # JAX leaves out calls of what it differentiates, and repeats those that it recomputes.
        yield _calls_of(namespace(case, jax.vmap), run, tangents, cotangents, compiled=True)
        run = functools.partial(one_by_one, replace(case, mode="values"), args=args)
        yield _calls_of(namespace(case, jax.vmap), run, [], [])
        # It differentiates a loop over lanes with effects: of a loop in that, which is the same for
        # all lanes but for these, JAX drops every call, for `lax.map`, too.
        told = []
        with contextlib.suppress(Exception):  # `lax.map` has fewer options
            batched(case, args, tangents, cotangents, vmap="looped", told=told)
            yield told


def _calls_of(names, run, tangents, cotangents, **options):
    with contextlib.suppress(Discarded):
        run(f=names["f"], tangents=tangents, cotangents=cotangents, **options)
    jax.effects_barrier()
    return names["TOLD"]


def _looped(f, in_axes=0, out_axes=0):
    """A vmap that is a loop."""

    def call(*args):
        axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        moved = [x if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(args, axes, strict=True)]

        def one(mapped):
            mapped = iter(mapped)
            return f(*[x if a is None else next(mapped) for x, a in zip(args, axes, strict=True)])

        outs = lax.map(one, [x for x, a in zip(moved, axes, strict=True) if a is not None])
        to = out_axes if isinstance(out_axes, tuple) else (out_axes,) * len(outs)
        return tuple(jnp.moveaxis(x, 0, a) for x, a in zip(outs, to, strict=True))

    return call


def watched(run):
    """What `run(engine=None)` gives; `Found` if `jax.debug_nans` stops it outside of `jit`."""
    try:
        return run()
    except NotANumber as error:
        try:
            with jax.debug_nans(True):
                run(engine="eager")
        except Found as found:
            if "FloatingPointError" in found.signature:
                raise
        raise Discarded("NaN, but inside of a call") from error


def told_otherwise(got, loops, case):
    """What is wrong with the calls of callbacks; None if nothing is.

    Each call happens as often as in one of the `loops` over examples, or more often than in one
    and less often than in another. Ordered calls happen, for one lane, in the order in which they
    do alone; and at a place that each lane calls once at most, in the order of the lanes (of one
    axis: a step of a loop is made for all lanes before the next one).
    """
    first, seen = None, []
    for calls in loops:
        seen.append(calls)
        said = _counted_otherwise(got, seen, case) or _ordered_otherwise(got, calls, case)
        if said is None:
            return None
        first = first or said
    return first


def _counted_otherwise(got, loops, case):
    for call in [*got, *(call for calls in loops for call in calls)]:
        count = lambda calls, call=call: sum(_same_call(call, c, case.loose) for c in calls)
        least, most = min(map(count, loops)), max(map(count, loops))
        if case.mode != "values" and not call[1]:
            # JAX leaves out calls without an order that a derivative does not need, where it finds
            # out: in a batch others than in an example. And it repeats those that it recomputes.
            least, most = 0, len(got) * most
        if count(got) > most:
            return f"a call that no example makes, or once more: {call}"
        if count(got) < least:
            return f"calls are missing: {call}"
    return None


def _ordered_otherwise(got, expected, case):
    free, places = list(range(len(expected))), []
    for call in got:
        found = next((k for k in free if _same_call(call, expected[k], case.loose)), None)
        if found is not None:
            free.remove(found)
            places.append(found)
    ordered = [k for k in places if expected[k][1]]
    lane = lambda k: expected[k][2].tobytes()
    for order, i in {(expected[k][1], lane(k)) for k in ordered}:
        mine = [k for k in ordered if expected[k][1] == order and lane(k) == i]
        if mine != sorted(mine):
            return f"order in a lane: {[expected[k] for k in mine]}"
    for place in {expected[k][0] for k in ordered if not case.nested}:
        mine = [k for k in ordered if expected[k][0] == place]
        if len({lane(k) for k in mine}) == len(mine) and mine != sorted(mine):
            return f"order of the lanes: {[expected[k] for k in mine]}"
    return None


def _same_call(a, b, loose):
    return a[:2] == b[:2] and all(
        x.shape == y.shape and x.dtype == y.dtype and not _wrong(x, y, loose).any()
        for x, y in zip(a[2:], b[2:], strict=True)
    )


def direction(shape, dtype, rng):
    x = rng.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.normal(size=shape)
    return np.asarray(x, dtype)


def _batched_shape(case, kind, axis):
    shape = list(kind.shape)
    if axis not in REDUCTIONS:
        axis = 0 if axis == "bx.AUTO" else axis
        shape.insert(axis if axis >= 0 else axis + len(shape) + 1, case.lanes)
    return tuple([OUTER] if case.nested else []) + tuple(shape)


def one_by_one(case, f, args, tangents, cotangents, compiled=False, finite=None):
    """What the loop over examples gives, arranged as a batched function's results are.

    compiled: whether XLA compiles an example as a whole.
    finite: a lane of `lanes_of`, of which `NotFinite` is raised.
    """
    rounds = []
    for o in range(OUTER if case.nested else 1):
        of_round = (
            [[x[o] for x in xs] for xs in (args, tangents, cotangents)]
            if case.nested
            else (args, tangents, cotangents)
        )
        of_lane = finite if finite in (None, "any") else finite[1] if finite[0] == o else None
        rounds.append(_one_batch(case, f, *of_round, compiled, of_lane))
    if not case.nested:
        return rounds[0]
    return jax.tree.map(lambda *xs: _stacked(xs, 0), *rounds)


@contextlib.contextmanager
def discarding():
    """For an example alone, which says nothing where it raises."""
    try:
        yield
    except (Discarded, NotFinite, Tied):
        raise
    except NotANumber:
        raise Discarded("NaN alone") from None
    except Endless:
        raise Discarded("endless") from None
    except Exception as error:
        raise Discarded(f"alone: {type(error).__name__}: {first_line(error)}") from error


def _one_batch(case, f, args, tangents, cotangents, compiled, finite):
    n = case.lanes
    floats = [k for k, x in enumerate(args) if is_inexact(x)]
    float_axes = [case.in_axes[k] for k in floats]
    outs = list(zip(case.program.outputs, case.out_axes, strict=True))
    cotangent_axes = [a for t, a in outs if t.inexact]
    other_axes = [a for t, a in outs if not t.inexact]

    def lanes_of(x, axis):
        if axis is None or axis == "sum":
            return [x] * n
        if axis == "mean":
            return [x / n] * n
        return [_lane(x, i, axis) for i in range(n)]

    given = (args, case.in_axes), (tangents, float_axes), (cotangents, cotangent_axes)
    columns = [lanes_of(x, a) for xs, axes in given for x, a in zip(xs, axes, strict=bool(xs))]
    lanes = list(zip(*columns, strict=True))
    counts = len(args), len(args) + len(tangents)
    run = derived(f, case.mode)

    def flat(*xs):
        return run(xs[: counts[0]], list(xs[counts[0] : counts[1]]), list(xs[counts[1] :]))

    with discarding():
        env = [("i", n)] if case.program.named else []
        staged, shapes = jax.make_jaxpr(flat, axis_env=env, return_shape=True)(*lanes[0])
        if compiled:
            results = [jax.tree.leaves(jax.jit(flat)(*lane)) for lane in lanes]
        else:
            if finite is not None:
                before = only_finite.set(True)
                try:
                    evaluate(staged, lanes if finite == "any" else [lanes[finite]], case.watched)
                finally:
                    only_finite.reset(before)
            results = evaluate(staged, lanes, case.watched)
    structure = jax.tree.structure(shapes)
    columns = jax.tree.unflatten(structure, [list(c) for c in zip(*results, strict=True)])
    ys, others, dots, pulled = columns

    def place(column, axis):
        if axis == "bx.AUTO":
            return np.stack(column) if not _is_key(column[0]) else jnp.stack(column)
        if axis in REDUCTIONS:
            return np.asarray(REDUCTIONS[axis](np.stack(column), 0))
        return _stacked(column, axis)

    def back(column, axis):
        return np.asarray(sum(column)) if axis is None else _stacked(column, axis)

    return [
        [place(c, a) for c, a in zip(ys, cotangent_axes, strict=True)],
        [place(c, a) for c, a in zip(others, other_axes, strict=True)],
        [place(c, a) for c, a in zip(dots, cotangent_axes, strict=True)] if dots else [],
        [back(c, a) for c, a in zip(pulled, float_axes, strict=True)] if pulled else [],
    ]


def _is_key(x):
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _stacked(xs, axis):
    return jnp.stack(list(xs), axis) if _is_key(xs[0]) else np.stack(xs, axis)


def _lane(x, i, axis):
    return x[(slice(None),) * (axis % x.ndim) + (i,)]


def batched(case, args, tangents, cotangents, engine=None, vmap="bx.vmap", told=None):
    """What the batched function gives; calls of callbacks are noted in `told`."""
    engine = engine or case.engine
    names = namespace(case, eval(case.inner) if vmap == "bx.vmap" else jax.vmap)
    names["looped"] = _looped
    try:
        with warnings.catch_warnings():
            strict()
            fun = eval(case.batched(vmap), names)
            run = derived(fun, case.mode)
            outs = run_by(engine, run, (args, tangents, cotangents), case.watched)
            jax.block_until_ready(outs)
            if case.program.effects and told is not None:
                jax.effects_barrier()
                told += names["TOLD"]
            return outs
    except NotANumber:
        raise
    except Exception as error:
        if vmap != "bx.vmap":
            raise
        discard_refused(error)
        try:
            batched(case, args, tangents, cotangents, engine="staged", vmap="jax.vmap")
        except Exception as theirs:
            if not case.options or str(theirs)[:60] == str(error)[:60]:
                raise Discarded(f"JAX too: {type(error).__name__}: {str(error)[:60]}") from error
        raise a_find(error, case) from error


def run_by(engine, fun, args, watch):
    """What `fun` returns of `args` by one of the engines of a `Case`."""
    if engine != "staged":
        return (jax.jit(fun) if engine == "jit" else fun)(*args)
    operands, structure = jax.tree.flatten(args)
    flat = lambda *xs: fun(*jax.tree.unflatten(structure, xs))
    staged, shapes = jax.make_jaxpr(flat, return_shape=True)(*operands)
    outs = evaluate_one(staged, operands, watch)
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def discard_refused(error):
    """Raises `Discarded` for what is refused by name, and where XLA's own checks fail."""
    for text in [*REFUSALS, *FAULTS_OF_XLA]:
        if text in str(error):
            raise Discarded(f"refused: {text}") from error


def strict():
    """Only the warnings of batchax are errors; JAX's say the same of the example alone."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", bx.SequentialFallbackWarning)


def first_line(error):
    """The first line of an error's message, without numbers and names of values."""
    lines = str(error).splitlines() or [""]
    return "".join(c for c in lines[0][:100] if not c.isdigit())[:70]


def a_find(error, case):
    name = type(error).__name__
    text = f"{name}: {str(error)[:2000]}\n\n{case.script()}"
    return Found(f"{name}: {first_line(error)}", text)


def strictly(call, case, refused):
    """Calls with warnings as errors; an error is a find, unless `refused` says otherwise."""
    try:
        with warnings.catch_warnings():
            strict()
            return jax.block_until_ready(call())
    except NotANumber:
        raise
    except Exception as error:
        discard_refused(error)
        refused(error)
        raise a_find(error, case) from error


@dataclass
class Problem:
    kind: str
    what: str
    text: str
    place: tuple[int, int] = (0, 0)
    worst: float = 0.0
    wrong: Any = None
    sides: Any = ()


def difference(got, expected, loose):
    """The first difference between results; None if there is none."""
    what = ["results", "results", "tangents", "cotangents"]
    for g, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            name = f"{what[g]} {k}"
            if _is_key(b):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            if jax.dtypes.float0 == getattr(b, "dtype", None):
                continue
            a, b = np.asarray(a), np.asarray(b)
            if a.dtype != b.dtype:
                return Problem("dtype", what[g], f"dtype of {name}: {a.dtype}, alone {b.dtype}")
            if a.shape != b.shape:
                # Not batched, where `out_axes` leaves that open.
                if a.shape == b.shape[1:]:
                    a = np.broadcast_to(a, b.shape)
                else:
                    return Problem("shape", what[g], f"shape of {name}: {a.shape}, alone {b.shape}")
            wrong = _wrong(a, b, loose)
            if wrong.any():
                at = np.unravel_index(np.argmax(wrong), wrong.shape)
                text = f"{name} at {tuple(map(int, at))}: {a[at]}, alone {b[at]}"
                text += f" ({wrong.sum()} of {wrong.size} differ)"
                with np.errstate(all="ignore"):
                    worst = np.nanmax(np.abs(a.astype(complex) - b)) if wrong.any() else 0.0
                return Problem("values", what[g], text, (g, k), float(worst), wrong, (a, b))
    return None


def _wrong(a, b, loose):
    if a.dtype.kind not in "iub":
        a, b = a.astype(complex), b.astype(complex)
        tolerance = loose or 1e-8
        with np.errstate(all="ignore"):
            scale = np.nanmax(np.where(np.isfinite(b), np.abs(b), 0), initial=1.0)
            close = np.abs(a - b) <= tolerance * np.maximum(scale, 1)
        return ~(close | (a == b) | (np.isnan(a) & np.isnan(b)))
    return np.asarray(a != b)


def digits_lost(loose):
    """By how much rounding is more than in double precision."""
    return 1e8 if loose > 0.1 else 1e7 if loose == 0.1 else 1e5 if loose else 1


def ill_conditioned(run, args, expected, problem, loose):
    """Whether rounding may have done it: a slight change of what `run` is given does as much."""
    rng = np.random.default_rng(0)
    g, k = problem.place

    def moved(x):
        if not is_inexact(x):
            return x
        return jnp.asarray(np.asarray(x) + size * direction(x.shape, x.dtype, rng), x.dtype)

    for size in (1e-14, 1e-13, 1e-12, 1e-11, 1e-10, 1e-9):
        size = size * digits_lost(loose)
        try:
            other = run(args=jax.tree.map(moved, args))
        except Discarded:
            return True
        a, b = np.asarray(other[g][k]), np.asarray(expected[g][k])
        with np.errstate(all="ignore"):
            if (np.isnan(a) != np.isnan(b)).any() or (np.isfinite(a) != np.isfinite(b)).any():
                return True
            if np.nanmax(np.abs(a.astype(complex) - b), initial=0.0) * 3 >= problem.worst:
                return True
    return False
