"""The oracle for chunks: a chunked vmap equals the same vmap with all lanes at once."""

import jax
import jax.numpy as jnp

import batchax as bx

from support.oracle import (
    Claim,
    alike,
    direction,
    is_inexact,
    loop_function,
    same,
    same_type,
    settle,
)


def computed(xs):
    """The same, by an operation: what is returned as it came is not reduced in chunks."""
    return jax.tree.map(lambda x: jnp.squeeze(x[None], 0), xs)


def check_chunks(
    fun,
    *args,
    batch_size=2,
    in_axes=0,
    out_axes=0,
    derivatives=True,
    forward=True,
    second=False,
    residuals="recompute",
    eager=True,
    against_loop=False,
    tolerance=None,
    **options,
):
    """Compares `bx.vmap(fun, batch_size=...)` with `bx.vmap(fun)`.

    Values, types, and derivatives of both modes (not `forward`: of one) with respect to
    every inexact argument; `second`: forward over reverse, too. `eager`: also outside jit.
    `against_loop`: also with the Python loop over examples.
    """
    if isinstance(in_axes, int):
        in_axes = (in_axes,) * len(args)
    options = dict(options, in_axes=in_axes, out_axes=out_axes)
    chunked = bx.vmap(fun, batch_size=batch_size, residuals=residuals, **options)
    plain = bx.vmap(fun, **options)
    jax.tree.map(same_type, jax.eval_shape(chunked, *args), jax.eval_shape(plain, *args))

    everything, points = {}, ()
    for way, f in {"got": chunked, "all at once": plain}.items():
        everything[way], points = _everything(f, args, derivatives, forward, second)
    ours = {"got": everything.pop("got")}
    claims = [Claim(ours, {}, everything, points, alike(tolerance))]
    if against_loop:
        looped = loop_function(jax.jit(fun), in_axes, out_axes)
        claims.append(Claim({}, {}, {"loop": looped}, args, lambda *_: None))
    (ours, _), *looped = settle(claims)
    for _, results in looped:
        alike(tolerance)({"got": ours["got"]["out"]}, results)
    if eager:
        out = chunked(*args)
        same(out, ours["got"]["out"], tolerance, "outside jit")
        jax.tree.map(same_type, out, jax.eval_shape(plain, *args))


def _everything(f, args, derivatives, forward, second):
    """Outputs and derivatives of `f` as one function, and what it is called with."""
    leaves, structure = jax.tree.flatten(args)
    inexact = [i for i, x in enumerate(leaves) if is_inexact(x)] if derivatives else []

    def only(*xs):
        full = list(leaves)
        for i, x in zip(inexact, xs, strict=True):
            full[i] = x
        out = f(*jax.tree.unflatten(structure, full))
        return [y for y in jax.tree.leaves(out) if is_inexact(y)], out

    def run(*points):
        ys, pull, out = jax.vjp(only, *points, has_aux=True)
        found = {"out": out}
        if points and ys:
            tangents = tuple(direction(x, 1) for x in points)
            cotangents = [direction(y, 2) for y in ys]
            if forward:
                found["jvp"] = jax.jvp(only, points, tangents, has_aux=True)[1]
            found["vjp"] = pull(cotangents)
            if second:
                gradient = lambda *points: jax.vjp(only, *points, has_aux=True)[1](cotangents)
                found["jvp of vjp"] = jax.jvp(gradient, points, tangents)[1]
        return found

    return run, [leaves[i] for i in inexact]
