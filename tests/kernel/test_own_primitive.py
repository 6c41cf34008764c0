"""How a primitive of batchax is made, and that all of them are made so."""

import ast
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.errors import UnsupportedError
from batchax.jaxprs.own_primitives import is_own, operations_of, shown
from batchax.kernel import own_primitive as module
from batchax.kernel.own_primitive import OF_OPERATIONS, NoDerivative, declared, own_primitive

SOURCES = Path(bx.__file__).parent
X = jnp.arange(3.0)


@pytest.fixture
def make(monkeypatch):
    """`own_primitive` for a primitive of a test, ``x * y`` of numbers, which nobody finds later."""
    monkeypatch.setattr(module, "_declared", [])

    def rule(axis, args, axes, /):
        front = [bx.match_axis(axis, x, a, 0) for x, a in zip(args, axes, strict=True)]
        return jax.vmap(lambda x, y: x * y)(*front), 0

    return functools.partial(
        own_primitive,
        called="a product",
        operations=lambda x, y: x * y,
        types=lambda x, y: x,
        programs=(),
        facts="",
        rule=rule,
        jvp=OF_OPERATIONS,
        transpose=OF_OPERATIONS,
        several=False,
    )


def test_nothing_but_operations_and_a_rule_is_needed(make):
    product_p = make("product_of_a_test")
    product = product_p.bind
    assert float(product(2.0, 3.0)) == float(jax.jit(product)(2.0, 3.0)) == 6
    for vmap in (jax.vmap, bx.vmap):
        np.testing.assert_array_equal(vmap(product)(X, X), X * X)
    assert jax.jvp(product, (2.0, 3.0), (1.0, 10.0))[1] == 23
    assert jax.grad(product)(2.0, 3.0) == 3
    assert jax.linear_transpose(lambda x: product(x, 3.0), 1.0)(2.0) == (6,)
    (eqn,) = jax.make_jaxpr(product)(2.0, 3.0).eqns
    assert [e.primitive.name for e in operations_of(eqn).jaxpr.eqns] == ["mul"]
    assert is_own(product_p)
    assert shown(product_p) == "a product"


def test_without_a_derivative_it_says_why(make):
    none = NoDerivative("products of a test have no derivative.")
    product = make("product_without_derivative", jvp=none, transpose=none).bind
    with pytest.raises(UnsupportedError, match="products of a test"):
        jax.grad(product)(2.0, 3.0)
    with pytest.raises(UnsupportedError, match="products of a test"):
        jax.linear_transpose(lambda x: product(x, 3.0), 1.0)(2.0)


def test_whatever_is_left_out_is_missed(make):
    with pytest.raises(TypeError, match="'operations', 'types', 'programs'"):
        own_primitive("product_without_parts", called="a product")


def test_all_are_defined():
    assert all(map(is_own, declared()))


def test_primitives_are_made_in_one_place():
    made = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Primitive")
    }
    assert made == {"kernel/own_primitive.py"}
