"""Running a program outside ``jit``: compiled once, and in smaller chunks where memory runs out."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer, eval_jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from batchax import _compat
from batchax.cache import Cache
from batchax.errors import SmallerChunksWarning
from batchax.jaxprs.bodies import Anywhere
from batchax.jaxprs.primitive_facts import expanded, facts_of
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Value, Values
from batchax.kernel.registry import is_foreign

# A call outside `jit` stages its function again, and JAX would compile again what was staged
# again. So programs are kept under keys that say what they do.
_compiled = Cache("programs that are compiled outside of jit", most=128)
_inlined = Cache("loops that are compiled outside of jit, or traced", most=1024)


whatever_jit = jax.disable_jit(False)
"""Decorator: ``jax.disable_jit`` is for the user's programs, and not for those compiled here."""


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether a program ran out of memory, in which case it has not run."""
    return "RESOURCE_EXHAUSTED" in str(error)


def error_of_a_lane(
    run: Callable[..., Any], values: Values, axes: Sequence[Any]
) -> RuntimeError | None:
    """Finds the error that lanes raise under ``jax.vmap``, after all together failed.

    Returns None if they raise none other than JAX's, or cannot run there.
    """
    if not all(isinstance(x, jax.Array | np.ndarray) for x in values):
        return None
    traced = any(isinstance(x, Tracer) for x in values)
    if not (traced or all(getattr(x, "is_fully_addressable", True) for x in values)):
        return None
    pairs = list(zip(values, axes, strict=True))
    # A library may convert the error of a host callback in the Python frame that runs the
    # operations, as `equinox.error_if` does, and all lanes run outside of that frame. So they run
    # again as ``jax.vmap`` runs them, up to the first block that fails. Traced values are of a
    # transformation outside of `jit`: what it keeps of them is for all lanes.
    lanes = min((x.shape[a] for x, a in pairs if a is not None), default=1)
    block = lanes if traced else _LANES

    def part(first: int, end: int) -> list[Value]:
        cut = lambda x, a: x if a is None else lax.slice_in_dim(x, first, end, axis=a)
        return [cut(x, a) for x, a in pairs]

    try:
        one = [x if a is None else jnp.take(x, 0, axis=a) for x, a in pairs]
        if not may_call_python.in_program(jax.make_jaxpr(run)(one)):
            return None
        for first in range(0, lanes, block):
            end = min(first + block, lanes)
            jax.vmap(run, in_axes=(list(axes),), axis_size=end - first)(part(first, end))
    except jax.errors.JaxRuntimeError:
        return None
    except RuntimeError as error:
        return error
    except Exception:  # such as of the name of an axis, which lanes do not have here
        return None
    return None


_LANES = 256


def _may_call_python(eqn: Eqn) -> bool:
    if eqn.primitive.name == "call_hi_primitive":
        types = [v.aval for v in eqn.invars]
        return may_call_python.in_program(expanded(eqn.params["_prim"], types))
    # The primitive of a library may be lowered to a callback: `linear_solve` of lineax is.
    return facts_of(eqn.primitive).on_host or is_foreign(eqn.primitive)


may_call_python = Anywhere(_may_call_python)


@whatever_jit
def run_eagerly(
    with_chunk: Callable[[int], tuple[Hashable, Callable[..., list[Any]]]],
    chunk: int,
    operands: Values,
    may_change: bool,
) -> list[Value]:
    """Compiles and runs a program; if memory runs out, with half the chunk size.

    `with_chunk` returns, for a chunk size, a cache key and the program. Operands are not donated,
    so they can be reused.
    """
    while True:
        try:
            outs = jitted(*with_chunk(chunk))(*operands)
            # Errors of asynchronous execution must be raised here to be handled.
            return jax.block_until_ready(outs) if may_change else outs
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error) or not may_change or chunk == 1:
                raise
            if not all(getattr(x, "is_fully_addressable", True) for x in operands):
                # Others may have had enough memory, and would continue with another program.
                error.add_note(
                    f"With several processes {chunk} lanes at a time are not halved where memory "
                    'runs out on one of them. Pass a smaller batch_size, or "auto", on all.'
                )
                raise
            reason = str(error).splitlines()[0]
        warnings.warn_explicit(
            f"out of memory with {chunk} lanes at a time ({reason}): retrying with "
            f"{chunk // 2}. Pass batch_size={chunk // 2} or less to start there.",
            SmallerChunksWarning,
            *_calling_line(),
        )
        chunk //= 2


def jitted(
    key: Hashable, program: Callable[..., list[Any]], inline: bool = False
) -> Callable[..., list[Value]]:
    """Returns ``jax.jit(program)``, cached by `key`.

    With `inline` no call of it remains where it is traced.
    """
    # JAX's cache is then keyed by types, devices, and options only. As a static argument JAX would
    # keep the program, and all that it closes over, forever.
    cache = _inlined if inline else _compiled
    make = lambda: jax.jit(program, inline=inline)
    return cache.get((key, _compat.trace_context()), make)


def compiled_whole(program: ClosedJaxpr) -> Callable[..., list[Value]]:
    """Compiles a program as one function; runs it operation by operation under `disable_jit`."""
    # Programs that differ only in values that they hold, such as lengths of rows, share one
    # compilation: the values are arguments.
    (open_program,), consts = _compat.hoist_constants(program)
    evaluate = functools.partial(eval_jaxpr, open_program.jaxpr, open_program.consts)
    key = value_key(open_program)

    def run(*values: Value) -> list[Value]:
        config: Any = jax.config  # which has no types
        if config.jax_disable_jit or _compat.compiled_later():
            return evaluate(*consts, *values)
        return jitted(key, evaluate)(*consts, *values)

    return run


_IN_A_HURRY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def compile_for_account(
    program: Callable[..., list[Any]], avals: Sequence[Aval]
) -> jax.stages.Compiled:
    """Compiles a program for operand types only, to read XLA's memory analysis."""
    # The program is not run, so on a CPU code generation is minimal; buffers are assigned by then.
    hurry = _IN_A_HURRY if jax.default_backend() == "cpu" else None
    context = jax.sharding.get_abstract_mesh()
    meshes = [mesh for mesh in (context, *(x.sharding.mesh for x in avals)) if not mesh.empty]
    # Inside a trace over a mesh, the compiler needs devices, and types name a mesh at most. Memory
    # does not depend on the choice of devices, so the first ones are used.
    if not meshes or meshes[0].size > jax.device_count():
        return jax.jit(program).lower(*avals).compile(hurry)
    mesh = meshes[0]
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = {name for name, type in types.items() if type == AxisType.Manual}
    devices = Mesh(
        np.array(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes),
        mesh.axis_names,
        axis_types=tuple(AxisType.Auto if name in manual else types[name] for name in types),
    )
    operands = [
        jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            weak_type=x.weak_type,
            sharding=NamedSharding(devices, x.sharding.spec),
        )
        for x in avals
    ]
    checked = bool(_compat.checked_axes())

    def on_each_device(*operands: Value) -> list[Value]:
        outs = program(*map(_compat.varying_as, operands, avals))
        return [x[None] for x in outs]  # what varies is returned side by side

    # Only a mesh with devices can be made manual, and only by a `shard_map` that is the first.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        if not manual:
            return jax.jit(program).lower(*operands).compile(hurry)
        mapped = jax.shard_map(
            on_each_device,
            mesh=devices,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(tuple(manual)),
            axis_names=manual,
            check_vma=checked,
        )
        return jax.jit(mapped).lower(*operands).compile(hurry)


_LIBRARIES = (
    os.path.dirname(jax.__file__),
    os.path.dirname(os.path.dirname(__file__)),
    contextlib.__file__,  # of `whatever_jit`
)


def _calling_line() -> tuple[str, int]:
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
