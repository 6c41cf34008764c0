"""The oracle for programs of many operations: everything compiled, a few programs in all."""

import jax

import batchax as bx

from support.oracle import Claim, alike, direction, is_inexact, loop_function, same_type, settle


def check_compiled(fun, *args, in_axes=0, out_axes=0, axis_name=None, reverse=True, types=True):
    """Compares `bx.vmap(fun)` with the loop over examples and with `jax.vmap`.

    Values and types; derivatives of both modes (`reverse`: of the second, too)
    with respect to every inexact argument.
    """
    if not isinstance(in_axes, tuple):
        in_axes = (in_axes,) * len(args)
    options = dict(in_axes=in_axes, out_axes=out_axes, axis_name=axis_name)
    inexact = [i for i, x in enumerate(args) if is_inexact(x)]

    staged = jax.jit(fun)

    def everything(vmap):
        f = vmap(staged, **options)

        def only(*xs):
            full = list(args)
            for i, x in zip(inexact, xs, strict=True):
                full[i] = x
            out = f(*full)
            return [y for y in jax.tree.leaves(out) if is_inexact(y)], out

        def run(*points):
            tangents = tuple(direction(x, 1) for x in points)
            ys, tangents, out = jax.jvp(only, points, tangents, has_aux=True)
            if not reverse:
                return out, tangents
            return (
                out,
                tangents,
                jax.vjp(only, *points, has_aux=True)[1]([direction(y, 2) for y in ys]),
            )

        return run

    theirs = {"jax.vmap": everything(jax.vmap)}
    if axis_name is None:
        one_by_one = lambda fun, in_axes, out_axes, **_: loop_function(fun, in_axes, out_axes)
        theirs = {"loop": everything(one_by_one), **theirs}
    points = [args[i] for i in inexact]
    settle([Claim({"got": everything(bx.vmap)}, {}, theirs, points, alike())])
    if types:
        jax.tree.map(
            same_type, *(jax.eval_shape(v(fun, **options), *args) for v in (bx.vmap, jax.vmap))
        )


def compiled_bytes(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def compilations(call):
    """What JAX compiles during a call."""
    found = []

    def listen(name, duration, **details):
        if name == "/jax/core/compile/backend_compile_duration":
            found.append(details)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return found
