"""Rules of the user for new primitives, what they return, and primitives of batchax."""

import ast
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import batchax as bx
from batchax.errors import UnsupportedError
from batchax.jaxprs.primitive_facts import UNKNOWN, facts_of, is_own, operations_of, shown
from batchax.kernel import own_primitive as module
from batchax.kernel import registry
from batchax.kernel.own_primitive import NoDerivative, own_primitive
from batchax.kernel.registry import find_rule, rule_origin

from support.mistakes import cases
from support.new_primitive import new_primitive
from support.oracle import check, example, same


def test_rule_by_name():
    p = new_primitive("called_this", lambda x: x)

    def rule(axis, args, axes):
        return args[0] + 1, axes[0]

    with pytest.warns(UserWarning, match="The rule waits for one of that name") as seen:
        bx.register_rule("called_this")(rule)
    assert seen[0].filename == __file__

    same(bx.vmap(lambda x: p.bind(x))(jnp.ones(2)), jnp.full(2, 2.0))
    assert find_rule(p) is rule
    assert rule_origin(p) == __name__
    assert rule_origin(lax.axis_index_p) == "batchax.rules.collectives"


def test_a_rule_of_batchaxs_that_is_replaced_and_serves_again():
    """Said at the line that does it, by name as by the primitive; one call takes both back."""
    x, rule = jnp.ones(2), lambda axis, args, axes, **params: (args[0] * 0 + 7, axes[0])
    compiled = jax.jit(bx.vmap(jnp.sin))
    for which in (lax.sin_p, "cos", "remat2"):
        with pytest.warns(
            bx.RuleReplacedWarning, match=r"primitive `\w+` \(batchax.rules."
        ) as seen:
            bx.register_rule(which)(rule)
        assert seen[0].filename == __file__
        bx.register_rule(which)(rule)  # one's own may be replaced in silence
    bx.register_rule("sin", rule)
    same(bx.vmap(lambda x: jnp.sin(x) + jnp.cos(x))(x), jnp.full(2, 14.0))
    same(compiled(x), jnp.full(2, 7.0))
    same(jax.vmap(jnp.sin)(x), jnp.sin(x))  # JAX keeps its own
    for which in ("sin", "cos", "remat2"):
        bx.unregister_rule(which)
    same(compiled(x), jnp.sin(x))
    assert rule_origin(lax.sin_p) == "batchax.rules.elementwise"
    for wrong in ("sin", lax.cos_p, 3):
        with pytest.raises(bx.ArgumentTypeError, match="unregister_rule: no rule"):
            bx.unregister_rule(wrong)


def test_a_rule_is_taken_back():
    """Programs that were batched by it are batched again, here and by `jax.vmap`."""
    p = new_primitive("taken_back", lambda x: x)
    f = lambda x: p.bind(x)
    calls = {
        "here": bx.vmap(f),
        "jit": jax.jit(bx.vmap(f)),
        "chunks": bx.vmap(f, batch_size=2),
        "jax": jax.vmap(f),
    }
    x = jnp.ones(3)
    for factor in (2.0, 3.0):
        bx.register_rule(p, lambda axis, args, axes, f=factor: (f * args[0], axes[0]))
        for name, call in calls.items():
            same(call(x), factor * x, None, name)
    bx.unregister_rule(p)
    assert find_rule(p) is None
    for name in ("here", "jit", "chunks"):
        with pytest.warns(bx.SequentialFallbackWarning, match="taken_back"):
            same(calls[name](x), x, None, name)
    with pytest.raises(NotImplementedError, match="taken_back"):
        calls["jax"](x)
    with pytest.raises(bx.ArgumentTypeError, match="no rule was registered for"):
        bx.unregister_rule(p)


def test_what_a_maker_said_is_taken_back():
    p = new_primitive("cubed_back", lambda x: x**3)
    bx.vectorized(p)
    rows = bx.Ragged.from_rows([jnp.ones(2), jnp.ones(3)])
    assert jax.jit(bx.vmap(lambda x: p.bind(x)))(rows).data.shape == (5,)
    assert facts_of(p).elementwise
    bx.unregister_rule(p)
    assert facts_of(p) is UNKNOWN


def test_vectorized_with_several_operands():
    """Wherever their batch axes are; one without an axis is repeated, as the shapes must agree."""

    p = new_primitive("of_two", lambda x, y: x * y + x)
    bx.vectorized(p)
    x, one = example((4, 3)), example((3,), seed=1)
    cases = [((0, 1), 1, x, 2 * x.T), ((0, None), 0, x, one), ((None, 0), 0, one, x)]
    for in_axes, out_axes, *args in cases:
        check(p.bind, *args, in_axes=in_axes, out_axes=out_axes, against_jax=False)
    with pytest.raises(bx.ArgumentTypeError, match=r"one shape.*\(3,\), \(\).*broadcasting"):
        bx.vmap(lambda x: p.bind(x, 2.0))(x)


@pytest.mark.compiles(60)
def test_reducing_dimensions_counted_from_the_end():
    p = new_primitive("last_sum", lambda x, *, axes: x.sum(axes))
    bx.reducing(p, neutral=0)
    x = example((2, 3, 4))
    for axes in ((-1,), (-2,), (0, -1)):
        fun = lambda x, axes=axes: p.bind(x, axes=axes)
        together = jax.jit(lambda x, f=fun: [bx.vmap(f, in_axes=i)(x) for i in range(3)])
        same(together(x), [jax.vmap(lambda x, a=axes: x.sum(a), in_axes=i)(x) for i in range(3)])
    rows = [example((n, 3), seed=n) for n in (2, 4)]
    of_rows = lambda x: p.bind(x, axes=(-2,))
    for layout in ("auto", "packed", "padded"):
        found = bx.vmap(of_rows, layout=layout)(bx.Ragged.from_rows(rows))
        same(found, jnp.stack([x.sum(0) for x in rows]))
    for axes, cure in (((2,), "has 2 dimensions"), (1, "is a tuple of ints")):
        with pytest.raises((bx.AxisError, bx.ArgumentTypeError), match=cure):
            registry.find_rule(p)(bx.Axis(4), [x], [2], axes=axes)


# The helpers of rules


def test_moving_and_matching_axes():
    axis, x = bx.Axis(5), example((5, 3))
    match = bx.match_axis
    assert match(axis, x, None, None) is x
    same(match(axis, x, -2, np.int64(1)), x.T)
    same(match(axis, x, 0, None, sum_match=True), x.sum(0))
    same(match(axis, x[0], None, None, sum_match=True), x[0])
    same(match(axis, 2.0, None, 0), jnp.full(5, 2.0))
    ranges = "Pass an int from -2 to 1"
    wrong = [
        (lambda: bx.move_axis(x, 0, 5), f"destination is 5, but x, of shape (5, 3), .*{ranges}"),
        (lambda: bx.move_axis(x, -3, 0), f"source is -3.*{ranges}"),
        (lambda: match(axis, x, 7, 0), f"source is 7.*{ranges}"),
        (lambda: match(axis, x, 2, None, sum_match=True), f"source is 2.*{ranges}"),
        (lambda: match(axis, x[0], None, 2), "has 2 axes once it is repeated for each lane"),
        (lambda: match(axis, x, 0, None), "sum_match=True for their sum"),
        (lambda: bx.axis_to_front(axis, x, -4), f"source is -4.*{ranges}"),
        (lambda: bx.axis_to_front(axis, 2.0, 0), "has no axis"),
    ]
    for call, message in wrong:
        with pytest.raises(bx.AxisError, match=message.replace("(5, 3)", r"\(5, 3\)")):
            call()
    with pytest.raises(
        bx.ArgumentTypeError, match=r"axis must be .*, got an array of shape \(5, 3"
    ):
        bx.axis_to_front(x, x, None)
    for position in (None, True, 0.0):
        with pytest.raises(bx.ArgumentTypeError, match=f"must be an int, got {position}"):
            bx.move_axis(x, 0, position)


@pytest.mark.parametrize("rule", [lambda args, dims: None, lambda args, dims, **params: None])
def test_a_rule_in_the_form_of_jax_is_refused(rule):
    p = Primitive("in the form of another")
    with pytest.raises(bx.ArgumentTypeError, match=r"rule\(axis, args, axes, .*\(args, dims"):
        bx.register_rule(p)(rule)
    assert find_rule(p) is None


def test_reducing_tells_of_the_shape_of_the_batch():
    """Some primitives have the shape of their operand among their parameters."""
    shapes = []

    def run(x, axes, input_shape):
        shapes.append(input_shape)
        return x.sum(axes)

    p = new_primitive("sum_of_shape", run)
    bx.reducing(p)
    x = example((3, 4, 2))
    got = bx.vmap(lambda x: p.bind(x, axes=(0,), input_shape=(4, 2)))(x)
    same(got, x.sum(1))
    assert shapes[-1] == (3, 4, 2)


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
        rule=rule,
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


def test_primitives_are_made_in_one_place():
    made = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Primitive")
    }
    assert made == {"kernel/own_primitive.py"}


VMAPS = pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap], ids=["bx", "jax"])
X_RULE_RESULTS = jnp.arange(6, dtype=jnp.float32).reshape(3, 2)


def with_rule(rule, several=False):
    """A function that binds a primitive with that rule: the same, or that and the sum."""
    p = new_primitive("mine", (lambda x: [x, x.sum()]) if several else (lambda x: x), several)
    bx.register_rule(p)(rule)

    def bound(x):
        return p.bind(x)

    return bound


# For each error: rule, whether there are two results, what the message says. What does not fit
# the types is in `custom_rules/test_rule_errors.py`, too.
WRONG = {
    bx.ArgumentTypeError: {
        "no pair": (
            lambda axis, args, axes: args[0],
            False,
            r"must return a pair `out, out_axis`, but it returned one array of shape \(3, 2\)",
        ),
        "one of two": (
            lambda axis, args, axes: ([args[0]], [0]),
            True,
            "a list of 2 in outs, one for each result of `mine`, but it returned a list of length",
        ),
        "no position": (
            lambda axis, args, axes: (args[0], True),
            False,
            "must return an int or None as out_axis, but it returned True of type bool",
        ),
    },
    bx.AxisError: {
        "both": (
            lambda axis, args, axes: ([args[0].T, args[0]], [0, 0]),
            True,
            r"(?s)outs\[0\]: with .* got \(2, 3\)\n  outs\[1\]: with .* expected shape \(3,\), got",
        ),
        "position": (
            lambda axis, args, axes: (args[0], 2),
            False,
            "out_axis = 2, but with the lanes that result has 2 dimensions, of which the last is 1",
        ),
        "position of one": (
            lambda axis, args, axes: ([args[0], args[0].sum(1)], [0, 1]),
            True,
            r"out_axes\[1\] = 1, but with the lanes that result has 1 dimension, of",
        ),
    },
}


@VMAPS
@pytest.mark.parametrize(("error", "rule", "several", "message"), cases(WRONG))
def test_what_a_rule_returns(vmap, error, rule, several, message):
    f = with_rule(rule, several)
    with pytest.raises(error, match=message) as caught:
        vmap(f)(X_RULE_RESULTS)
    said = str(caught.value)
    assert f"{__file__}:{rule.__code__.co_firstlineno}" in said  # the rule
    assert "the batching rule of the primitive `mine` (at " in said
    assert f"{__file__}:{f.__code__.co_firstlineno + 1}" in said  # the user's line


@VMAPS
def test_what_fits_has_the_type_of_one_example(vmap):
    """Also counted from the end, of NumPy, a number, or of a weak type."""
    for rule, expected in (
        (lambda axis, args, axes: (args[0].T, -1), X_RULE_RESULTS),
        (lambda axis, args, axes: (args[0], np.int64(axes[0])), X_RULE_RESULTS),
        (lambda axis, args, axes: (np.ones((3, 2), np.float32), 0), X_RULE_RESULTS * 0 + 1),
        (
            lambda axis, args, axes: (jnp.full((3, 2), 2.0, X_RULE_RESULTS.dtype), 0),
            X_RULE_RESULTS * 0 + 2,
        ),
    ):
        got = vmap(with_rule(rule))(X_RULE_RESULTS)
        same(got, expected)
        assert not got.weak_type
    shared = vmap(
        with_rule(lambda axis, args, axes: ([args[0], 7], [0, None]), True), out_axes=[0, None]
    )
    same(shared(X_RULE_RESULTS), [X_RULE_RESULTS, jnp.float32(7)])


@VMAPS
def test_an_exception_in_a_rule_names_the_rule_and_the_line(vmap):
    def broken(axis, args, axes):
        raise KeyError("mine")

    f = with_rule(broken)
    with pytest.raises(KeyError, match="mine") as caught:
        vmap(jax.jit(f))(X_RULE_RESULTS)
    (note,) = (n for n in caught.value.__notes__ if n.startswith("batchax: "))
    assert "broken` (" in note
    assert f"{__file__}:{f.__code__.co_firstlineno + 1}" in note


@VMAPS
@pytest.mark.parametrize(
    ("make", "bind", "message"),
    [
        (
            bx.vectorized,
            lambda p, x: p.bind(x, x[:1], size=1),
            "`odd` have .* Use batchax.broadcasting",
        ),
        (bx.reducing, lambda p, x: p.bind(x, size=1), r"parameter `axes`; `odd` has 'size'"),
        (bx.vectorized, lambda p, x: p.bind(x, size=1), r"expected shape \(3, 1\), got \(1, 2\)"),
    ],
    ids=["operands", "parameter", "not elementwise"],
)
def test_a_word_for_a_family_that_does_not_fit(vmap, make, bind, message):
    p = new_primitive("odd", lambda x, *_, size: x[:size])
    make(p)
    with pytest.raises(bx.BatchaxError, match=message):
        vmap(lambda x: bind(p, x))(X_RULE_RESULTS)
