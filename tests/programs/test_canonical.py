"""Programs in canonical form: equal ones compute the same, and rewritten ones are equal."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import batchax as bx
from batchax import _compat
from batchax.programs.canonical import CanonicalProgram, Table

from support.expressions import random_expression
from support.programs import random_program
from support.rewrites import mutable, mutated, rewritten

REAL = jax.dtypes.canonicalize_dtype(float)
ARGS = (
    jax.ShapeDtypeStruct((3,), REAL),
    jax.ShapeDtypeStruct((2, 3), REAL),
    jax.ShapeDtypeStruct((), jnp.int32),
    jax.ShapeDtypeStruct((3, 3), REAL),
)


def some_values():
    rng = np.random.default_rng(0)
    floats = [jnp.asarray(rng.normal(size=a.shape), a.dtype) for a in ARGS if a.shape]
    return [*floats[:2], jnp.int32(1), floats[2]]


def staged(seed):
    return _compat.without_dead(jax.make_jaxpr(random_program(seed))(*ARGS))


@pytest.mark.parametrize("seed", range(25))
def test_a_program_written_differently_is_the_same(seed):
    program = staged(seed)
    other = rewritten(program, np.random.default_rng(seed))
    found = bx.same_program(jaxpr_as_fun(program), other, *ARGS)
    assert found, found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.each_commit(4)
def test_a_program_with_one_operation_changed_is_not(seed):
    program = staged(seed)
    assert mutable(program)
    for which in range(len(mutable(program))):
        other = mutated(program, which)
        if bx.same_program(jaxpr_as_fun(program), other, *ARGS):
            # The change changed nothing, as the turning of one element does.
            values = some_values()
            for a, b in zip(jaxpr_as_fun(program)(*values), other(*values), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize(
    ("count", "least"), [(500, 5), pytest.param(900, 20, marks=pytest.mark.nightly)]
)
@pytest.mark.compiles(100)
def test_equal_expressions_compute_the_same(count, least):
    rng = np.random.default_rng(0)
    shapes = [(2, 3), (3, 2), (3,), (2, 2), (1, 3), (2, 1, 3)]
    arrays = [jnp.asarray(rng.normal(size=s) * 2, REAL) for s in shapes]
    table, groups = Table(), defaultdict(list)
    for _ in range(count):
        fun, shape = random_expression(rng, shapes, 3)
        program = _compat.without_dead(jax.make_jaxpr(lambda *a, fun=fun: fun(a))(*arrays))
        groups[CanonicalProgram(table, program).outputs[0], shape].append(program)
    # A group computes one value; equal programs need not be run.
    several = [{str(p): p for p in group} for group in groups.values()]
    several = [list(group.values()) for group in several if len(group) > 1]
    assert len(several) > least
    for first, *others in several:
        expected = jaxpr_as_fun(first)(*arrays)[0]
        for other in others[:5]:
            np.testing.assert_allclose(
                jaxpr_as_fun(other)(*arrays)[0], expected, rtol=1e-4, atol=1e-4
            )
