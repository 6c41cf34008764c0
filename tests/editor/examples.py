"""Calls as users write them. What a type checker is to say of a line stands behind it.

Behind `reveal_type` that is a type; elsewhere the rule of pyright that is broken, or nothing. Where
mypy differs what it says comes second.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, reveal_type

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import batchax as bx

x, rows = jnp.ones(3), bx.Ragged.from_rows([np.ones(2), np.ones(3)])


class State(NamedTuple):
    position: Array
    step: Array


def f(x: Array, scale: float = 2.0) -> Array:
    return x * scale


def move(state: State, force: Array) -> tuple[State, Array]:
    return State(state.position + force, state.step + 1), force


def number(x: float, y: float, z: float) -> float:
    return x


def keyed(x: Array, *, key: Array) -> Array:
    return x


def plain(x, y=1):
    return x + y


class Model:
    def __call__(self, x: Array) -> Array:
        return x

    @bx.vmap
    def method(self, x: Array) -> Array:
        return x


# vmap: arrays where the function of one example has arrays, and anything elsewhere
reveal_type(bx.vmap(f)(x))  # Array
reveal_type(bx.vmap(f)(x, scale=3.0))  # Array
reveal_type(bx.vmap(f)(rows))  # Any
reveal_type(bx.vmap(f)(x, x))  # Any
reveal_type(bx.vmap(f)(np.ones(3)))  # Any
reveal_type(bx.vmap(bx.vmap(f))(x))  # Array
reveal_type(bx.vmap(plain, (0, None))(x, 2))  # Any
reveal_type(bx.vmap(Model())(x))  # Array
reveal_type(bx.vmap(move)(State(x, x), x)[0].position)  # Array
reveal_type(bx.vmap(lambda x: (x, x))(x))  # tuple[Any, Any]
reveal_type(bx.vmap(f).__name__)  # str
reveal_type(bx.vmap(number)(x, x, x))  # Any
reveal_type(bx.vmap(bx.vmap(f))(rows))  # Any
reveal_type(bx.vmap(keyed)(x, key=x))  # Array
reveal_type(bx.vmap(jax.grad(f))(x))  # Any
reveal_type(bx.vmap(jax.value_and_grad(f))(x))  # tuple[Any, Any]
# JAX says no more of a gradient than that it may be called: who declares its type keeps it.
declared: Callable[[Array], Array] = jax.grad(f)
reveal_type(bx.vmap(declared)(x))  # Array

# what is missing, misspelled or too much
bx.vmap(f)()  # reportCallIssue
bx.vmap(f)(x, x, x)  # reportCallIssue
bx.vmap(f)(x, scal=3.0)  # reportCallIssue
bx.vmap(f)(rows, rows, rows)  # reportCallIssue
bx.vmap(number)(x, x)  # reportCallIssue
bx.vmap(keyed)(x)  # reportCallIssue
bx.vmap(keyed)(x, x)  # reportCallIssue
bx.vmap(lambda x, y: x)(rows)  # reportCallIssue
bx.vmap(bx.vmap(f))(x, scal=3.0)  # reportCallIssue
bx.check(f)()  # reportCallIssue
bx.explain(f)(x, scal=3.0)  # reportCallIssue
bx.find_nonfinite(number)(rows)  # reportCallIssue
bx.scan(move)(State(x, x))  # reportCallIssue
bx.auto_vmap(f)(x, scal=3.0)  # reportCallIssue

# what is right
bx.vmap(jnp.add)(x, x)
bx.vmap(jax.jit(f))(rows)
bx.vmap(jax.grad(f))(x)
Model().method(rows)
Model().method(x)
jax.jit(bx.vmap(f))(rows)
jax.grad(bx.vmap(f))(x)
jax.vmap(bx.vmap(f))(x)
bx.vmap(f, layout="paddd")  # reportArgumentType
bx.vmap(f, divergence="compcat")  # reportArgumentType
bx.vmap(f, divergence=bx.Compact(width=4), out_axes=bx.Reduce("mean"))
bx.vmap(f, residuals="kept")  # reportArgumentType
bx.vmap(f, batch_size="aut")  # reportArgumentType
bx.vmap(f, batchsize=3)  # reportCallIssue
bx.vmap(3)  # reportArgumentType
bx.Reduce("avg")  # reportArgumentType
bx.Reduce("sum", unmapped="drop")  # reportArgumentType
bx.Reduce(bx.Reduction(jnp.add, 0, lane=jnp.square))
bx.Reduction("sum", 0)  # reportArgumentType


# auto_vmap
@bx.auto_vmap(x=1)
def named(x: Array, n: int = 1) -> Array:
    return x * n


@bx.auto_vmap
def annotated(x: Array) -> Array:
    return x


@bx.auto_vmap("(n)->()", batch_size=4)
def total(x: Array) -> Array:
    return x.sum()


reveal_type(named(x, n=2))  # Array
reveal_type(named([1.0, 2.0]))  # Any
reveal_type(annotated(x))  # Array
reveal_type(total(x))  # Array
reveal_type(bx.auto_vmap(f)(x))  # Array

# scan: the carry has the type that a step returns
reveal_type(bx.scan(move)(State(x, x), x)[0])  # State
reveal_type(bx.scan(move)(State(x, x), force=x)[0])  # State
reveal_type(bx.scan(move)(State(x, x), rows)[0])  # State
bx.scan(lambda carry, x: (carry + x, None))(0.0, x)
bx.scan(f)(0.0, x)  # reportArgumentType


# loops, and functions with rules
def halve(x: Array) -> Array:
    return x / 2


def both(state: State) -> State:
    return State(state.position / 2, state.step + 1)


reveal_type(bx.bounded_while(lambda x: x > 1, halve, 8.0, 10))  # Array
reveal_type(bx.bounded_while(lambda x: x > 1, halve, x, 10))  # Array
reveal_type(bx.bounded_while(lambda s: s.step < 5, both, State(x, x), 10))  # State
bx.bounded_while(lambda s: s.speed < 5, both, State(x, x), 10)  # reportAttributeAccessIssue
bx.bounded_while(lambda x: True, plain, (0, x), 10)
bx.bounded_while(lambda x: x > 1, both, State(x, x))  # reportCallIssue


@bx.custom_vmap
def solve(a: Array, b: Array) -> Array:
    return jnp.linalg.solve(a, b)


@solve.def_vmap
def solve_batch(axis_size: int, in_batched: Any, a: Array, b: Array):
    return jnp.linalg.solve(a, b[..., None])[..., 0], True


reveal_type(solve(x, x))  # Array
solve(x)  # reportCallIssue
reveal_type(bx.vmap(solve)(x, x))  # Array
reveal_type(bx.sequential_vmap(f)(x))  # Array
bx.host_function(f, jax.ShapeDtypeStruct((), jnp.float32))(x)

# what looks at functions
reveal_type(bx.check(f)(rows))  # Checked
reveal_type(bx.explain(f)(x).lanes)  # int
reveal_type(bx.explain(f)(rows).lanes)  # int
reveal_type(bx.find_nonfinite(f)(rows).lanes)  # ndarray[tuple[Any, ...], dtype[Any]]

# options that are passed on
bx.check(f, batch_size=2, layout="padded", out_axes=1)(x)
bx.check(f, batchsize=2)(x)  # reportCallIssue
bx.explain(f, mesh="all", divergence=bx.Compact())(x)
bx.explain(f, divergence="compcat")(x)  # reportArgumentType
bx.find_nonfinite(f, residuals="kept")(x)  # reportArgumentType
bx.find_nonfinite(f, mesh="al")(x)  # reportArgumentType
bx.auto_vmap(x=1, divergence="compcat")(f)  # reportArgumentType | reportCallIssue
bx.auto_vmap(x=1, batch_size="auto")(f)
