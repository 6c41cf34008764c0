"""Evaluates programs operation by operation, on one example or on all lanes in lock step.

To compile each random program would take most of the time of a run. Here JAX compiles an
operation once for its shapes, and what is simple NumPy does. Loops, branches and calls are
opened. With several lanes, each holds its own values; a collective sees those of all.
"""

import contextvars
import functools

import jax
import numpy as np
from jax.extend import core

from batchax.jaxprs.primitive_facts import operations_of

from fuzz import numpy_operations

MOST_STEPS = 1000


class Endless(Exception):
    """A loop takes more steps than a random program should."""


class Unknown(Exception):
    """An operation is not among those that NumPy has."""


class NotFinite(Exception):
    """A transform or convolution of NaN or infinities: its algorithm decides what they reach.

    Some algorithms multiply them by zeros, and others leave these products out: those of padding
    and of holes in a convolution, and those of a Fourier transform.
    """


class Tied(Exception):
    """Keys of a sort are the same up to rounding, which decides what comes first."""


class NotANumber(Exception):
    """An operation that was watched gave NaN, as `jax.debug_nans` would have noticed."""


def evaluate(closed, lanes, watch=False):
    """The results of a staged program for each lane: lists of arrays, one for each lane.

    watch: whether to raise where an operation by itself gives NaN. Calls, loops and branches are
      one operation each, as they are outside of `jit`.
    """
    with np.errstate(all="ignore"):
        columns = [list(column) for column in zip(*lanes, strict=True)]
        consts = [[_known(c)] * len(lanes) for c in closed.consts]
        outs = _run(closed.jaxpr, consts, columns, len(lanes), watch)
    return [list(row) for row in zip(*outs, strict=True)] if outs else [[] for _ in lanes]


def evaluate_one(closed, args, watch=False):
    """The results of a staged program for one set of arguments."""
    return evaluate(closed, [[_known(x) for x in args]], watch)[0]


def evaluate_by_numpy(closed, args):
    """The same by NumPy alone: nothing is compiled; `Unknown` where it lacks an operation."""
    before = _only_numpy.set(True)
    try:
        return evaluate_one(closed, args)
    finally:
        _only_numpy.reset(before)


only_finite = contextvars.ContextVar("only_finite", default=False)
"""Whether to raise `NotFinite`, and `Tied`."""
_only_numpy = contextvars.ContextVar("only_numpy", default=False)


def _known(x):
    """A NumPy array, where there is one of the kind."""
    if isinstance(x, jax.Array) and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return np.asarray(x)
    return np.asarray(x) if isinstance(x, (bool, int, float, complex, np.generic)) else x


def _run(jaxpr, consts, args, size, watch=False):
    env = {}
    env.update(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(v):
        if isinstance(v, core.Literal):
            return [np.asarray(v.val, v.aval.dtype)] * size
        return env[v]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        outs = _equation(eqn, operands, size, watch)
        if watch and any(_has_nan(x) for column in outs for x in column):
            raise NotANumber(eqn.primitive.name)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _has_nan(x):
    return isinstance(x, np.ndarray) and x.dtype.kind not in "iubO" and bool((x != x).any())


def _equation(eqn, operands, size, watch=False):
    name = eqn.primitive.name
    if name in _CALLS:
        inner = eqn.params[_CALLS[name]]
        return _closed(inner, operands, size, watch and name.startswith("custom_"))
    if name in _COLLECTIVES and "i" in _names(eqn.params):
        return _COLLECTIVES[name](eqn, operands, size)
    if name in _LOCK_STEP:
        return _LOCK_STEP[name](eqn, operands, size)
    if name in _SEPARATE:
        lanes = [_SEPARATE[name](eqn, [x[i] for x in operands]) for i in range(size)]
    else:
        stands_for = operations_of(eqn)
        if stands_for is not None and _only_numpy.get():
            raise Unknown(name)  # what is run is to be tested, not what it stands for
        if stands_for is not None:
            return _closed(stands_for, operands, size)
        lanes = [_operation(eqn, [x[i] for x in operands]) for i in range(size)]
    return [list(column) for column in zip(*lanes, strict=True)] or [[] for _ in eqn.outvars]


def _closed(program, operands, size, watch=False):
    if isinstance(program, core.ClosedJaxpr):
        consts = [[_known(c)] * size for c in program.consts]
        program = program.jaxpr
    else:
        consts = []
    return _run(program, consts, operands, size, watch)


def _operation(eqn, xs):
    primitive = eqn.primitive
    if only_finite.get() and _multiplies_zeros(eqn) and not all(map(_is_finite, xs)):
        raise NotFinite
    if only_finite.get() and _has_ties(eqn, xs):
        raise Tied
    fun = numpy_operations.find(primitive, xs, eqn.params)
    if fun is not None:
        outs = fun(*xs, **eqn.params)
        outs = outs if primitive.multiple_results else [outs]
        return [np.asarray(x, v.aval.dtype) for x, v in zip(outs, eqn.outvars, strict=True)]
    if _only_numpy.get():
        raise Unknown(primitive.name)
    run = functools.partial(primitive.bind, **primitive.get_bind_params(eqn.params))
    if primitive.name == "shard_map":
        run = jax.jit(lambda *xs, bind=run: list(bind(*xs)))
    outs = run(*xs)
    return [_known(x) for x in (outs if primitive.multiple_results else [outs])]


def _multiplies_zeros(eqn):
    p = eqn.params
    if eqn.primitive.name == "conv_general_dilated":
        return any(map(any, p["padding"])) or max(*p["lhs_dilation"], *p["rhs_dilation"], 1) > 1
    return eqn.primitive.name == "fft"


def _has_ties(eqn, xs):
    name, p = eqn.primitive.name, eqn.params
    stable = p.get("is_stable", True)
    if name == "sort" and len(xs) > 1:
        axis = p["dimension"]
    elif name in ("argmax", "argmin", "top_k"):
        axis = p["axes"][0] if "axes" in p else p.get("axis", -1)
    else:
        return False
    if np.asarray(xs[0]).dtype.kind not in "fc" or np.shape(xs[0])[axis] < 2:
        return False
    keys = np.sort(np.asarray(xs[0]), axis)
    gaps = np.abs(np.diff(keys, axis=axis))
    sizes = np.abs(np.delete(keys, 0, axis))
    # What is the same here may differ by rounding where it is compiled, except for round numbers.
    rounded = sizes * 1024 % 1 != 0
    return bool(((gaps <= 1e-5 * sizes) & ((gaps > 0) | rounded | (not stable))).any())


def _is_finite(x):
    return bool(np.isfinite(np.asarray(x).astype(complex)).all())


_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}


def _scan(eqn, operands, size):
    p = eqn.params
    if "num_consts" in p:
        num_consts, num_carry = p["num_consts"], p["num_carry"]
    else:
        num_consts, num_carry, _ = map(len, p["ft_in"].unpack())
    consts = operands[:num_consts]
    carry = operands[num_consts : num_consts + num_carry]
    xs = operands[num_consts + num_carry :]
    length, steps = p["length"], []
    order = range(length)
    for t in reversed(order) if p["reverse"] else order:
        outs = _closed(p["jaxpr"], [*consts, *carry, *([x[t] for x in row] for row in xs)], size)
        carry = outs[:num_carry]
        steps.append(outs[num_carry:])
    if p["reverse"]:
        steps.reverse()
    stacked = []
    for k, v in enumerate(eqn.outvars[num_carry:]):
        rows = [[step[k][i] for step in steps] for i in range(size)]
        stacked.append([_stack(row, v.aval) for row in rows])
    return [*carry, *stacked]


def _stack(rows, aval):
    if all(isinstance(x, np.ndarray) for x in rows):
        return np.stack(rows) if rows else np.zeros(aval.shape, aval.dtype)
    return jax.numpy.stack(rows)


def _while(eqn, xs):
    p = eqn.params
    test, body = p["cond_nconsts"], p["body_nconsts"]
    tested, consts, carry = xs[:test], xs[test : test + body], xs[test + body :]
    one = lambda values: [[x] for x in values]
    for _ in range(MOST_STEPS):
        goes_on = np.asarray(_closed(p["cond_jaxpr"], one([*tested, *carry]), 1)[0][0])
        if not goes_on.any():
            return carry
        new = [x[0] for x in _closed(p["body_jaxpr"], one([*consts, *carry]), 1)]
        carry = [_keep(goes_on, n, o) for n, o in zip(new, carry, strict=True)]
    raise Endless


def _keep(goes_on, new, old):
    """A loop with a predicate for each lane, as JAX allows them: those that are done stay."""
    if goes_on.ndim == 0:
        return new
    ones = (1,) * (np.ndim(new) - goes_on.ndim)
    return _known(jax.numpy.where(goes_on.reshape(goes_on.shape + ones), new, old))


def _cond(eqn, xs):
    branches = eqn.params["branches"]
    which = min(max(int(xs[0]), 0), len(branches) - 1)
    return [x[0] for x in _closed(branches[which], [[x] for x in xs[1:]], 1)]


_LOCK_STEP = {"scan": _scan}
_SEPARATE = {"while": _while, "cond": _cond}


def _names(params):
    found = params.get("axes", params.get("axis_name", ()))
    return found if isinstance(found, (tuple, list)) else (found,)


def _collective(fun):
    """Of an operation on the stacked lanes, which has each lane's result along axis 0."""

    def run(eqn, operands, size):
        outs = []
        for column, v in zip(operands, eqn.outvars, strict=True):
            result = fun(np.stack(column), eqn.params, size)
            outs.append([np.asarray(x, v.aval.dtype) for x in result])
        return outs

    return run


def _reduced(fun):
    def run(x, params, size):
        positions = tuple(1 + a for a in params["axes"] if isinstance(a, int))
        return np.broadcast_to(r := fun(x, axis=(0, *positions)), (size, *r.shape))

    return _collective(run)


def _gathered(x, params, size):
    d = params["all_gather_dimension"]
    each = np.moveaxis(x, 0, d)
    if params["tiled"]:
        each = each.reshape(*each.shape[:d], -1, *each.shape[d + 2 :])
    return np.broadcast_to(each, (size, *each.shape))


def _scattered(x, params, size):
    total, d = x.sum(0), params["scatter_dimension"]
    parts = np.split(total, size, d)
    return np.stack(parts if params["tiled"] else [np.squeeze(p, d) for p in parts])


def _permuted(x, params, size):
    out = np.zeros_like(x)
    for source, target in params["perm"]:
        out[target] = x[source]
    return out


def _exchanged(x, params, size):
    split, concat = params["split_axis"], params["concat_axis"]
    parts = [np.split(lane, size, split) for lane in x]
    if params["tiled"]:
        return np.stack([np.concatenate([p[i] for p in parts], concat) for i in range(size)])
    return np.stack(
        [np.stack([np.squeeze(p[i], split) for p in parts], concat) for i in range(size)]
    )


_COLLECTIVES = {
    "psum": _reduced(np.sum),
    "psum_invariant": _reduced(np.sum),
    "pmax": _reduced(np.max),
    "pmin": _reduced(np.min),
    "all_gather": _collective(_gathered),
    "reduce_scatter": _collective(_scattered),
    "ppermute": _collective(_permuted),
    "all_to_all": _collective(_exchanged),
    "axis_index": lambda eqn, operands, size: [[np.int32(i) for i in range(size)]],
}
