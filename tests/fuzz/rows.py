"""Programs of one row, and ways to run them over ragged batches."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import batchax as bx
from batchax.jaxprs.bodies import with_inside

from fuzz.evaluate import NotFinite, Tied, evaluate, only_finite
from fuzz.judge import (
    Discarded,
    a_difference,
    adds_up_infinities,
    array_text,
    derived,
    difference,
    direction,
    discarding,
    helpers_of,
    ill_conditioned,
    is_inexact,
    judge_again,
    namespace,
    quietly,
    run_by,
    strictly,
    watched,
)
from fuzz.programs import PRELUDE, Program, draw_program
from fuzz.ways import DEVICES, ON_DEVICES

LENGTHS = [[3, 1, 4, 3], [2, 4, 2], [4], [1, 3, 1, 1, 3], [2, 0, 3], [5, 2, 5]]

OPTIONS = [
    ['layout="padded"'],
    ['layout="packed"'],
    ['layout="grouped"'],
    ["batch_size=2"],
    ["buckets=2"],
    ['divergence="compact"'],
    ['layout="padded"', "divergence=bx.Compact(width=2)"],
    ["batch_size=2", "buckets=2"],
    ["batch_size=3", 'divergence="compact"'],
]
ONLY_KNOWN = {'layout="grouped"', "buckets=2"}


@dataclass
class RowCase:
    """A program of one row, and one way to run it.

    lengths: by the name of a size, the lengths of the rows.
    known: whether lengths are known while it is staged.
    """

    program: Program
    lengths: dict[str, list[int]]
    known: bool
    seed: int
    in_axes: list[int | None]
    options: list[str]
    engine: str
    mode: str
    spare: int
    inner: str = "jax.vmap"
    rounded: bool = False
    wild: bool = False
    watched: bool = False

    @property
    def loose(self):
        return self.program.loose

    @property
    def rows(self):
        return len(self.lengths["n"])

    def axes(self):
        several = sum(bool(t.ragged) for t in self.program.arguments) > 1
        axes = []
        for t, a in zip(self.program.arguments, self.in_axes, strict=True):
            name = t.shape[t.ragged[0]] if t.ragged else None
            axes.append(f'bx.ragged("{name}")' if name and several else a)
        return axes

    def batched(self):
        axes = "".join(f"{a}, " for a in self.axes()).strip()
        return f"bx.vmap(f, in_axes=({axes})" + "".join(f", {o}" for o in self.options) + ")"

    def arguments(self):
        lines = [f"rng = np.random.default_rng({self.seed})", "args = ["]
        for t, axis in zip(self.program.arguments, self.in_axes, strict=True):
            if not t.ragged:
                shape = t.shape if axis is None else (self.rows, *t.shape)
                lines.append(f"    {array_text(t.dtype, shape, self)},")
                continue
            at = t.ragged[0]
            lengths = self.lengths[t.shape[at]]
            shape = list(t.shape)
            shape[at] = sum(lengths) + self.spare
            wrap = "np" if self.known else "jnp"
            most = max(lengths) + self.spare
            lines.append(
                f"    bx.Ragged({array_text(t.dtype, tuple(shape), self)}, "
                f"{wrap}.array({lengths}), {most}, axis={at}),"
            )
        return "\n".join([*lines, "]"])

    def script(self):
        helpers = helpers_of(self)
        parts = [PRELUDE, f"vmap = {self.inner}\n", helpers, self.program.source, self.arguments()]
        if self.watched:
            parts.insert(1, 'jax.config.update("jax_debug_nans", True)\n')
        call = f"{self.batched()}(*args)" if self.known else f"jax.jit({self.batched()})(*args)"
        parts.append(f"\n# {self.mode}, {self.engine}\nprint({call})")
        parts.append(
            f"for i in range({self.rows}):\n"
            f"    print(i, f(*[x if a is None else x[i] for x, a in zip(args, {self.in_axes})]))"
        )
        return "\n".join(part for part in parts if part)


def draw_rows(choose):
    """Draws a program of one row and a way to run it."""
    pick = lambda options: options[choose(len(options))]
    chance = lambda percent: choose(100) >= 100 - percent
    more = pick([None] * 6 + ["risky", "risky", "small"])
    program = draw_program(choose, ragged=True, most=5, depth=1 + chance(30), more=more)
    lengths = {"n": pick(LENGTHS)}
    other = [x for x in LENGTHS if len(x) == len(lengths["n"])]
    lengths["m"] = [x + 1 for x in pick(other)[::-1]]
    in_axes = [0 if t.ragged or chance(50) else None for t in program.arguments]
    spread = chance(8)
    options = pick(OPTIONS) if chance(70) else []
    options = [pick(DEVICES), *pick(ON_DEVICES)] if spread else options
    known = bool(set(options) & ONLY_KNOWN) or chance(40)
    mode = pick(["values", "values", "vjp", "jvp", "vjp"])
    if not program.reverse and mode == "vjp":
        mode = "jvp"
    if not program.forward and mode == "jvp":
        mode = "vjp" if program.reverse else "values"
    if not (any(t.inexact for t in program.outputs) and any(t.inexact for t in program.arguments)):
        mode = "values"
    watching = more == "risky" and not spread and chance(50)
    engine = pick(["staged"] * 13 + ["jit", "jit", "eager"])
    return RowCase(
        program=program,
        lengths=lengths,
        known=known,
        seed=choose(1000),
        in_axes=in_axes,
        options=options,
        engine="staged" if watching else "jit" if spread else engine,
        mode=mode,
        spare=pick([2, 0]),
        inner=pick(["jax.vmap", "bx.vmap"]),
        rounded=watching,
        wild=more == "risky" and not watching,
        watched=watching,
    )


def is_rows(x):
    return isinstance(x, bx.Ragged)


def data_of(x):
    return x.data if is_rows(x) else x


@quietly
def judge_rows(case):
    """Raises `Found` if a row is computed differently in the batch than alone."""
    names = namespace(case, jax.vmap)
    exec(case.arguments(), names)
    args = names["args"]
    rng = np.random.default_rng(case.seed + 1)
    tangents = [
        direction(data_of(x).shape, data_of(x).dtype, rng) for x in args if is_inexact(data_of(x))
    ]
    tangents = [] if case.mode in ("values", "vjp") else tangents
    expected, cotangents = alone(case, names["f"], args, tangents)
    got = watched(functools.partial(batched, case, args, tangents, cotangents))
    problem = difference(got, expected, case.loose)
    if problem is None:
        return
    if problem.kind == "values" and adds_up_infinities(problem):
        raise Discarded("infinite cotangents")
    again = lambda args: alone(case, names["f"], args, tangents)[0]
    if problem.kind == "values" and ill_conditioned(again, args, expected, problem, case.loose):
        raise Discarded("ill-conditioned")
    compiled, _ = alone(case, names["f"], args, tangents, compiled=True)
    if difference(got, compiled, case.loose) is None:
        raise Discarded("evaluated by operations otherwise than compiled, the row alone")
    if problem.kind == "values":
        g, k = problem.place
        alone(case, names["f"], args, tangents, finite="any" if g == 3 else k % case.rows)
    run_again = functools.partial(batched, case, args, tangents, cotangents)
    judge_again(case, problem, expected, run_again)
    raise a_difference(case, problem)


def alone(case, f, args, tangents, compiled=False, finite=None):
    """Results of each row alone, derivatives, and the cotangents that they were taken for.

    Of `Ragged` arguments the derivatives with respect to the data of all rows.

    compiled: whether XLA compiles the whole, instead of one operation after another.
    finite: the row, or "any", that is discarded if it transforms NaN or infinities.
    """
    rng = np.random.default_rng(case.seed + 2)
    inexact = [k for k, x in enumerate(args) if is_inexact(data_of(x))]
    run = derived(f, case.mode)
    staged: dict[Any, Any] = {}
    rows, cotangents = [], []
    for i in range(case.rows):
        one = [_row(x, i, a) for x, a in zip(args, case.in_axes, strict=True)]
        dots = [
            _row(args[k].with_data(t) if is_rows(args[k]) else t, i, case.in_axes[k])
            for k, t in zip(inexact, tangents, strict=False)
        ]
        try:
            with discarding():
                shapes = [jax.typeof(x) for x in one]
                if str(shapes) not in staged:
                    outs = jax.eval_shape(f, *one) if case.mode == "vjp" else []
                    wanted = [y for y in outs if is_inexact(y)]
                    operands = one, dots, wanted
                    flat, structure = jax.tree.flatten(operands)
                    fun = lambda *xs, s=structure: run(*jax.tree.unflatten(s, xs))
                    staged[str(shapes)] = (
                        *jax.make_jaxpr(fun, return_shape=True)(*flat),
                        wanted,
                        jax.jit(fun),
                    )
                program, out_shapes, wanted, run_compiled = staged[str(shapes)]
                for eqn in with_inside(program.eqns):
                    if reason := _of_no_elements(eqn, case.mode):
                        raise Discarded(reason)
                pulled_from = [direction(y.shape, y.dtype, rng) for y in wanted]
                flat = jax.tree.leaves((one, dots, pulled_from))
                only_finite.set(finite in (i, "any"))
                if compiled:
                    result = jax.tree.leaves(run_compiled(*flat))
                else:
                    (result,) = evaluate(program, [flat], case.watched)
        except NotFinite:
            # XLA's transforms leave out products with 0 and 1; of a row in a padded array it is
            # Bluestein's, in which each element reaches each frequency. XLA's own differ, too.
            raise Discarded("a transform or convolution of NaN or infinities") from None
        except Tied:
            raise Discarded("a tie that rounding decides") from None
        finally:
            only_finite.set(False)
        row = jax.tree.unflatten(jax.tree.structure(out_shapes), result)
        of_none = any(0 in shape.shape for shape in shapes)
        if (
            of_none
            and case.mode != "values"
            and any(is_inexact(y) and np.isnan(y).any() for y in row[0])
        ):
            raise Discarded("the derivative of a NaN that no elements make: JAX knows it is 0")
        rows.append(row)
        cotangents.append(pulled_from)
    ys, others, dots, _ = (
        [list(column) for column in zip(*[row[g] for row in rows], strict=True)] for g in range(4)
    )
    pulled = []
    if case.mode == "vjp":
        for k, x in enumerate(inexact):
            pulled.append(_together(args[x], [row[3][k] for row in rows], case.in_axes[x]))
    flat = lambda columns: [x for column in columns for x in column]
    return [flat(ys), flat(others), flat(dots), pulled], cotangents


def _of_no_elements(eqn, mode):
    """What an equation makes of no elements that no program for rows of any length can; or ""."""
    extreme = eqn.primitive.name in ("reduce_max", "reduce_min")
    if extreme and mode != "values" and 0 in eqn.invars[0].aval.shape:
        return "the derivative of an extreme of no elements: JAX divides by how many are extreme"
    if eqn.primitive.name == "conv_general_dilated" and 0 in eqn.invars[1].aval.shape:
        return "alone: a convolution by no elements, which JAX stages, and XLA does not compile"
    if eqn.primitive.name == "conv_general_dilated":
        sizes = [eqn.invars[0].aval.shape[d] for d in eqn.params["dimension_numbers"].lhs_spec[2:]]
        if any(n == 0 and d > 1 for n, d in zip(sizes, eqn.params["lhs_dilation"], strict=True)):
            return "dilating no elements: JAX adds sizes up, and does so for one at least"
    if eqn.primitive.name == "pad":
        config = zip(eqn.invars[0].aval.shape, eqn.params["padding_config"], strict=True)
        if any(size == 0 and between for size, (_, _, between) in config):
            return "padding between no elements: JAX adds sizes up, and does so for one at least"
    return ""


def _row(x, i, axis):
    if axis is None:
        return x
    if not is_rows(x):
        return x[i]
    starts = np.concatenate([[0], np.cumsum(x.lengths)])
    place = (slice(None),) * x.axis + (slice(int(starts[i]), int(starts[i + 1])),)
    return np.asarray(x.data)[place]


def _together(arg, parts, axis):
    if axis is None:
        return np.asarray(sum(parts))
    if not is_rows(arg):
        return np.stack(parts)
    packed = np.concatenate(parts, arg.axis)
    room = [(0, 0)] * packed.ndim
    room[arg.axis] = (0, arg.data.shape[arg.axis] - packed.shape[arg.axis])
    return np.pad(packed, room)


def batched(case, args, tangents, cotangents, engine=None):
    """What the batched function gives, row by row."""
    engine = engine or case.engine
    names = namespace(case, eval(case.inner))
    inexact = [k for k, x in enumerate(args) if is_inexact(data_of(x))]

    def refused(error):
        if isinstance(error, bx.UnsupportedError):
            raise Discarded(f"refused: {' '.join(str(error).split(': ')[1:])[:90]}") from error

    def run(fun, data, lengths, tangents, cotangents):
        def of_floats(*points):
            full = list(data)
            for k, x in zip(inexact, points, strict=True):
                full[k] = x
            whole = [
                bx.Ragged(x, n, a.max_length, axis=a.axis) if is_rows(a) else x
                for a, x, n in zip(args, full, lengths, strict=True)
            ]
            outs = fun(*whole)
            lengths_out = [y.lengths for y in outs if is_rows(y)]
            plain = [data_of(y) for y in outs]
            marks[:] = [(y.axis, is_inexact(y.data)) if is_rows(y) else None for y in outs]
            return [y for y in plain if is_inexact(y)], (
                [y for y in plain if not is_inexact(y)],
                lengths_out,
            )

        points = [data[k] for k in inexact]
        if case.mode == "values":
            ys, (others, ends) = of_floats(*points)
            return ys, others, [], [], ends
        if case.mode == "jvp":
            ys, dots, (others, ends) = jax.jvp(of_floats, points, tangents, has_aux=True)
            return ys, others, dots, [], ends
        ys, pull, (others, ends) = jax.vjp(of_floats, *points, has_aux=True)
        flat = [m for y, m in zip(case.program.outputs, marks, strict=True) if y.inexact]
        arranged = [
            _arranged(y, m, [c[k] for c in cotangents], 0.0 if case.watched else np.nan)
            for k, (y, m) in enumerate(zip(ys, flat, strict=True))
        ]
        return ys, others, [], list(pull(arranged)), ends

    marks: list[Any] = []
    data = [data_of(x) for x in args]
    lengths = [x.lengths if is_rows(x) else 0 for x in args]
    fun = eval(case.batched(), names)
    # Cotangents are arguments: XLA's constant folding mixes up elements of constants that
    # `jnp.ldexp` pulls back, on JAX 0.12, without batchax as well.
    operands = (data, lengths, tangents, cotangents)
    body = functools.partial(run, fun)
    if case.known:
        operands = (data, tangents, cotangents)
        body = lambda data, *others: run(fun, data, lengths, *others)

    call = functools.partial(run_by, engine, body, operands, case.watched)
    ys, others, dots, pulled, ends = strictly(call, case, refused)
    ends = iter(ends)
    marked = [
        (t, m, next(ends) if m else None) for t, m in zip(case.program.outputs, marks, strict=True)
    ]
    of_floats = [x for x in marked if x[0].inexact]
    of_others = [x for x in marked if not x[0].inexact]
    return [
        _apart(ys, of_floats, case),
        _apart(others, of_others, case),
        _apart(dots, of_floats, case) if dots else [],
        [np.asarray(x) for x in pulled],
    ]


def _apart(outs, marked, case):
    rows = []
    for x, (kind, mark, lengths) in zip(outs, marked, strict=True):
        x = x if kind.dtype == "key" else np.asarray(x)
        for i in range(case.rows):
            if mark is None:
                rows.append(x[i])
                continue
            starts = np.concatenate([[0], np.cumsum(np.asarray(lengths))])
            place = (slice(None),) * mark[0] + (slice(int(starts[i]), int(starts[i + 1])),)
            rows.append(x[place])
    return rows


def _arranged(y, mark, parts, between):
    """Cotangents of the rows, as the result has them. `between` fills what must not matter.

    It is NaN, unless `jax.debug_nans` would see how it is made.
    """
    if mark is None:
        return jnp.stack(parts)
    packed = jnp.concatenate(parts, mark[0])
    room = [(0, 0)] * packed.ndim
    room[mark[0]] = (0, y.shape[mark[0]] - packed.shape[mark[0]])
    return jnp.pad(packed, room, constant_values=between)
