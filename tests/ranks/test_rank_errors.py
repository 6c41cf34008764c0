"""Arguments that do not fit what was declared."""

import re

import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float

import batchax as bx

from support.mistakes import check_raises, raising


@bx.auto_vmap(s=0, v=1, m=2)
def foo(s, v, m):
    return v @ m @ v + s


@bx.auto_vmap("(n),(n,m)->(m)")
def product(v, m):
    return v @ m


DO_NOT_BROADCAST = """\
the batch dimensions of the arguments do not broadcast:
  s: shape (2, 1) = batch (2, 1) + core ()
  v: shape (4, 3) = batch (4,) + core (3,)
  m: shape (2, 5, 3, 3) = batch (2, 5) + core (3, 3)   <- 5 in batch dimension -1, \
where others have 4
"""
TOO_FEW = """\
an argument has fewer dimensions than one example was declared to have:
  v: shape (), declared rank 1
  m: shape (3,), declared rank 2
"""


def returns(fun, signature):
    """What a function of one example returns that is declared to return something else."""
    return lambda: bx.auto_vmap(signature)(fun)(jnp.ones((4, 3)))


MISTAKES = {
    bx.AxisError: {
        re.escape(DO_NOT_BROADCAST.strip()): lambda: foo(
            jnp.ones((2, 1)), jnp.ones((4, 3)), m=jnp.ones((2, 5, 3, 3))
        ),
        re.escape(TOO_FEW.strip()): lambda: foo(1.0, 2.0, jnp.ones(3)),
        r"m: shape \(3,\), declared \(n, m\)": lambda: product(jnp.ones(3), jnp.ones(3)),
        "has size 2, but 3 was declared": lambda: bx.auto_vmap("(3)->()")(jnp.sum)(jnp.ones(2)),
        r"  tree\['a'\]: shape \(3,\) = batch \(3,\) \+ core \(\).*"
        r"  tree\['b'\]\[1\]: shape \(4, 2\) = batch \(4,\) \+ core \(2,\)": lambda: bx.auto_vmap(
            {"a": 0, "b": [1, 1]}, x=1
        )(lambda tree, x: tree["a"])(
            {"a": jnp.ones(3), "b": [jnp.ones(2), jnp.ones((4, 2))]}, x=jnp.ones(2)
        ),
        "a tree of ranks does not match tree.*one rank for": lambda: bx.auto_vmap({"a": 1})(
            lambda tree: tree["a"]
        )({"b": jnp.ones(3)}),
        r"v is a list of lists of diff.*Ragged\.from_rows": lambda: foo(
            1.0, [[1.0, 2.0], [3.0]], jnp.eye(2)
        ),
        r"declares \(n\) for out.*shape \(2,\).*n is 3, as in x": returns(
            lambda x: x[:-1], "(n)->(n)"
        ),
        r"declares \(\) for out of .*shape \(3,\).*its rank is 1": returns(lambda x: x, "(n)->()"),
        "declares 1 outputs of .*, but it returned 2": returns(lambda x: (x, x), "(n)->(n)"),
        "declares 2 outputs of .*, but it returned 1": returns(lambda x: x, "(n)->(n),(n)"),
        r"out\[1\] of .*its rank is 0": returns(lambda x: (x, x[0]), "(n)->(n),(n)"),
    },
    bx.ArgumentTypeError: {
        "s is of type str, which is not an array": lambda: foo("text", jnp.ones(3), jnp.eye(3)),
        "foo.*missing a required argument: 'm'": lambda: foo(1.0, jnp.ones(3)),
        r"foo\(\): too many": lambda: foo(1.0, jnp.ones(3), jnp.eye(3), 4),
        "unexpected keyword argument 'q'": lambda: foo(1.0, jnp.ones(3), m=jnp.eye(3), q=4),
        r"out\['y'\] is of type str": lambda: bx.auto_vmap(0)(lambda x: {"y": "text"})(jnp.ones(3)),
        r"auto_vmap\(ranks\)\(dot\)\(\.\.\.\)": lambda: bx.auto_vmap(jnp.dot, 1, 1),
        r"auto_vmap\(ranks\)\(sum\)\(\.\.\.\)": lambda: bx.auto_vmap(jnp.sum, jnp.ones(3)),
        "it in place of ranks": lambda: bx.auto_vmap(signature="(n)->()")(jnp.sum),
        "no rank, or None, for what": lambda: bx.auto_vmap(1, excluded={1})(jnp.dot),
        r"auto_vmap\(\) got no rank\. Pass ranks": lambda: bx.auto_vmap(),
        "no rank of a parameter of foo": lambda: bx.auto_vmap(batch_size=2)(foo),
    },
}


@raising(MISTAKES)
def test_mistakes_are_named(call, error, match):
    check_raises(call, error, match)


def test_core_sizes_of_annotations():
    @bx.auto_vmap
    def f(
        x: Float[Array, "n"],  # noqa: F821
        y: Float[Array, "n+1"],  # noqa: F821
        z: Float[Array, "#n"] | None = None,  # noqa: F722
    ):
        return x[0] + y[0]

    f(jnp.ones((4, 2)), jnp.ones(3), jnp.ones(1))
    with pytest.raises(
        bx.AxisError, match=r"y: .*core dimension 0 \(n\+1\) has size 2, but n\+1 is 3"
    ):
        f(jnp.ones((4, 2)), jnp.ones(2))
    with pytest.raises(bx.AxisError, match=r"z: .*\(n\) has size 3, but n is 2, as in x"):
        f(jnp.ones(2), jnp.ones(3), jnp.ones(3))
