"""What goes wrong in a rule is said in terms of the rule."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.mistakes import cases

VMAPS = pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap], ids=["bx", "jax"])


def with_rule(rule, fun=lambda x: x):
    @bx.custom_vmap
    def my_function(x):
        return fun(x)

    my_function.def_vmap(rule)
    return my_function


def pair(x):
    return {"a": x, "b": (x.sum(), 1)}


# For each error: rule, function, what the message says
WRONG = {
    bx.ArgumentTypeError: {
        "no pair": (
            lambda n, b, x: x,
            pair,
            "must return a pair `out, out_batched`, but it returned",
        ),
        "three": (lambda n, b, x: (x, x, x), pair, "but it returned a tuple of length 3"),
        "flags type": (
            lambda n, b, x: (x, 0),
            lambda x: x,
            "True or False for each result in out_batched, but it returned\n  out_batched: 0",
        ),
        "flags type inside": (
            lambda n, b, x: ({"a": x, "b": (x[:, 0], 1)}, {"a": True, "b": (None, 1)}),
            pair,
            r"out_batched\['b'\]\[1\]: 1",
        ),
    },
    bx.AxisError: {
        "several": (
            lambda n, b, x: ({"a": x.T, "b": (x[:, 0], x)}, True),
            pair,
            r"(?s)out\['a'\]: .*out\['b'\]\[1\]: ",
        ),
        "structure": (
            lambda n, b, x: ({"a": x}, True),
            pair,
            r"\{'a': \*, 'b': \(\*, \*\)\}\nbecame\n  \{'a': \*\}",
        ),
        "list of two": (
            lambda n, b, x: ([x, x], [True, True]),
            lambda x: x,
            r"\*\nbecame\n  \[\*, \*\]",
        ),
        "flags structure": (
            lambda n, b, x: ({"a": x, "b": (x[:, 0], 1)}, {"a": True}),
            pair,
            r"out_batched of the structure of `out`, or a prefix of it",
        ),
        "lanes missing": (
            lambda n, b, x: (x[0], True),
            lambda x: x,
            r"out: with out_batched True expected shape \(3, 2\), got \(2,\)",
        ),
        "lanes unsaid": (
            lambda n, b, x: (x, False),
            lambda x: x,
            r"out: with out_batched False expected shape \(2,\), got \(3, 2\)",
        ),
        "lanes elsewhere": (
            lambda n, b, x: ({"a": x.T, "b": (x[:, 0], 1)}, {"a": True, "b": (True, False)}),
            pair,
            r"out\['a'\]: with out_batched True expected shape \(3, 2\), got \(2, 3\)",
        ),
        "dtype": (
            lambda n, b, x: (x.astype(jnp.int8), True),
            lambda x: x,
            "out: expected dtype float(32|64), got int8",
        ),
        "no array": (
            lambda n, b, x: ("text", True),
            lambda x: x,
            "out: a str, which is not an array",
        ),
    },
}


@VMAPS
@pytest.mark.parametrize(("error", "rule", "fun", "message"), cases(WRONG))
def test_what_a_rule_returns(vmap, error, rule, fun, message):
    with pytest.raises(error, match=message) as caught:
        vmap(with_rule(rule, fun))(jnp.ones((3, 2)))
    assert "the batching rule of my_function" in str(caught.value)
    assert f"{__file__}:{rule.__code__.co_firstlineno}" in str(caught.value)
    assert isinstance(caught.value, bx.BatchaxError)


@VMAPS
def test_an_exception_in_a_rule_names_the_rule_and_the_call(vmap):
    def broken_rule(axis_size, in_batched, x):
        raise KeyError("mine")

    f = with_rule(broken_rule)

    def calls_it(x):
        return f(x)

    with pytest.raises(KeyError, match="mine") as caught:
        vmap(calls_it)(jnp.ones(3))
    note = next(n for n in caught.value.__notes__ if n.startswith("batchax: "))
    assert "broken_rule` (" in note
    assert "the batching rule of my_function" in note
    assert f"{calls_it.__code__.co_firstlineno + 1}" in note
    assert "calls_it" in note
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert any(frame.name == "broken_rule" for frame in frames)


@pytest.mark.parametrize(
    "make",
    [
        lambda: bx.custom_vmap(3),
        lambda: bx.custom_vmap(jnp.sin).def_vmap(None),
        lambda: bx.custom_vmap(jnp.sin).def_jvp("rule"),
        lambda: bx.custom_vmap(jnp.sin).def_vjp(jnp.sin, None),
        lambda: bx.sequential_vmap(3),
    ],
)
def test_what_is_not_callable(make):
    with pytest.raises(bx.ArgumentTypeError, match="expects a"):
        make()


def test_collective_in_a_rule_that_does_not_ask_for_the_name():
    rule = lambda n, b, x: (jax.lax.psum(x, "lanes"), True)
    with pytest.raises(NameError) as caught:
        bx.vmap(with_rule(rule), axis_name="lanes")(jnp.ones(3))
    notes = "".join(caught.value.__notes__)
    assert "if it has a keyword-only parameter `axis_name`" in notes


@VMAPS
def test_a_value_that_only_an_object_in_the_rule_holds(vmap):
    class Held:
        pass

    def outer(x, y):
        held = Held()
        held.value = 2 * y
        return with_rule(lambda n, b, x: (x * held.value, True))(x)

    inside = vmap(jax.jit(outer), in_axes=(0, None))
    with pytest.raises(bx.UnsupportedError, match=r"that is over\. Pass the value as an argument"):
        inside(jnp.ones(3), 1.0)
    if vmap is bx.vmap:
        with pytest.raises(bx.UnsupportedError, match="uses a value that is batched"):
            vmap(outer)(jnp.ones(3), jnp.ones(3))


def test_input_and_output_that_results_depend_on_is_not_done_twice():
    from jax.experimental import io_callback

    def read(x):
        return x * io_callback(lambda: np.float32(2), jax.ShapeDtypeStruct((), jnp.float32))

    f = with_rule(lambda n, b, x: (2 * x, True), read)
    with pytest.raises(bx.UnsupportedError, match="depend on input or output"):
        bx.vmap(jax.grad(f))(jnp.ones(3))


def test_a_rule_for_rows_that_takes_what_def_vmap_gives():
    """What stands for the rows is named in the message, not printed with all it holds."""
    f = bx.custom_vmap(lambda x: jnp.cumsum(x))
    f.def_rows(lambda size, batched, x: (jnp.cumsum(x.reshape(size, -1), 1), True))
    with pytest.raises(TypeError, match=r"<Rows: where 2 rows are; len\(rows\) is how many>"):
        bx.vmap(f)(bx.Ragged.from_rows([jnp.ones(2), jnp.ones(3)]))


@VMAPS
def test_a_default_that_the_rule_lacks_is_named(vmap):
    @bx.custom_vmap
    def power(x, *, by=2):
        return x**by

    power.def_vmap(lambda axis_size, in_batched, x, *, by: (x**by, True))
    xs = jnp.arange(3.0)
    np.testing.assert_array_equal(vmap(lambda x: power(x, by=2))(xs), xs**2)
    with pytest.raises(TypeError, match="required keyword-only argument: 'by'") as caught:
        vmap(power)(xs)
    notes = "".join(traceback.format_exception(caught.value))
    assert "Repeat the defaults of power in the rule." in notes
