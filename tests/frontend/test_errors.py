"""What a user who makes a mistake is told, and what they can catch.

Each mistake is refused before the function is called; the exception is one of
batchax's own family and also of the built-in type that `jax.vmap` raises.
"""

import collections
import re

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

X = jnp.ones((3, 2))
Y = jnp.ones((4, 2))
Pair = collections.namedtuple("Pair", "left right")


def fails(call, error, *fragments):
    """`call(vmap)` raises `error`, and its message has each of `fragments`."""
    with pytest.raises(error) as caught:
        call(bx.vmap)
    assert isinstance(caught.value, bx.BatchaxError)
    assert isinstance(caught.value, ValueError if error is bx.AxisError else TypeError)
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message, message
    return message


def fails_as_in_jax(call, error, *fragments):
    """The same; and what `jax.vmap` raises for it would catch ours."""
    fails(call, error, *fragments)
    with pytest.raises((ValueError, TypeError)) as caught:
        call(jax.vmap)
    assert issubclass(error, ValueError if isinstance(caught.value, ValueError) else TypeError)


def never(*args, **kwargs):
    raise AssertionError("the function was called")


# Sizes.


MISTAKES_OF_JAX = {
    "sizes, with the odd one out": (
        lambda vmap: vmap(never, in_axes=(0, 1))(X, {"w": [Y.T, X.T], "v": X.T}),
        [
            "the mapped axes must have one size, but they have 3, 4",
            "args[0]: shape (3, 2), axis 0, size 3\n",
            "args[1]['v']: shape (2, 3), axis 1, size 3\n",
            "args[1]['w'][0]: shape (2, 4), axis 1, size 4   <- not 3\n",
            "args[1]['w'][1]: shape (2, 3), axis 1, size 3\n",
            "None in in_axes",
        ],
    ),
    "sizes, by keyword and in containers": (
        lambda vmap: vmap(never)(X, scale=X, pair=Pair(X, Y)),
        [
            "scale: shape (3, 2), axis 0, size 3\n",
            "pair.right: shape (4, 2), axis 0, size 4   <- n",
        ],
    ),
    "sizes that are not axis_size": (
        lambda vmap: vmap(never, axis_size=4)(X, Y),
        [
            "the size given as axis_size, 4",
            "args[0]: shape (3, 2), axis 0, size 3   <- not 4\n",
            "args[1]: shape (4, 2), axis 0, size 4\n",
        ],
    ),
    **{
        f"axis {axis} of several": (
            lambda vmap, axis=axis: vmap(never, in_axes=(0, axis))(X, {"a": X, "b": jnp.ones(3)}),
            [f"args[1]['a']: shape (3, 2), axis {axis}\n", f"['b']: shape (3,), axis {axis}\n"],
        )
        for axis in (2, -3, 7)
    },
    "a number": (lambda vmap: vmap(never)(X, 1.0), ["args[1]: shape (), axis 0", "Pass None"]),
    **{
        f"nothing mapped, {in_axes}": (
            lambda vmap, axes=in_axes, args=args: vmap(never, in_axes=axes)(*args),
            ["nothing is mapped", "axis_size"],
        )
        for in_axes, args in ((None, (X,)), ((None,), (X,)), (0, ()), (0, ({},)))
    },
    **{
        f"{entries} for two": (
            lambda vmap, axes=in_axes: vmap(never, in_axes=axes)(X, X),
            [f"in_axes has {entries}", "2 positional arguments"],
        )
        for in_axes, entries in (((), "0 entries"), ((0,), "1 entry"), ([0, 0, 0], "3 entries"))
    },
    "an output that depends on the batch": (
        lambda vmap: vmap(
            lambda x: {"mean": X.mean(), "all": [x, x.sum()]},
            out_axes={"mean": None, "all": [0, None]},
            axis_name="batch",
        )(X),
        ["out['all'][1] depends on the batch (axis 'batch')", "batchax.AUTO", "batchax.Reduce"],
    ),
    "out_axes of another structure": (
        lambda vmap: vmap(lambda x: (x, {"k": x}), out_axes=(0, [0]))(X),
        ["out_axes does not match out[1]", "a list of length 1", "a dict with keys ['k']"],
    ),
    **{
        f"output axis {axis}": (
            lambda vmap, axis=axis: vmap(lambda x: (x, [x]), out_axes=(0, axis))(X),
            [f"out_axes gives {axis} for out[1][0]", "2 axes with the batch axis", "[-2, 2)"],
        )
        for axis in (2, -3)
    },
}


@pytest.mark.parametrize("mistake", MISTAKES_OF_JAX)
def test_mistakes_with_axes(mistake):
    call, fragments = MISTAKES_OF_JAX[mistake]
    fails_as_in_jax(call, bx.AxisError, *fragments)


# Axes of arguments.


@pytest.mark.parametrize(
    ("in_axes", "arg", "fragments"),
    [
        ({"a": 0}, X, ["args[1]", "a dict with keys ['a']", "an array of shape (3, 2)"]),
        ((0, 0), [X, X], ["a tuple of length 2", "a list of length 2"]),
        ({"a": [0, (0, 0)]}, {"a": [X, (X,)]}, ["args[1]['a'][1]", "length 2", "length 1"]),
    ],
)
def test_prefix_that_does_not_match(in_axes, arg, fragments):
    fails_as_in_jax(
        lambda vmap: vmap(never, in_axes=(0, in_axes))(X, arg),
        bx.AxisError,
        "in_axes does not match args[1]",
        *fragments,
    )


MISTAKES = {
    "unknown names": (
        lambda vmap: vmap(lambda a, b: never(), in_axes={"a": 0, "z": 1, "q": 0}),
        bx.AxisError,
        ["in_axes names 'z', 'q'", "are 'a', 'b'", "in_axes=({...},)"],
    ),
    "names that cannot be read": (
        lambda vmap: vmap(max, in_axes={"a": 0}),
        bx.ArgumentTypeError,
        ["'max'", "by position"],
    ),
    "axes for variable arguments": (
        lambda vmap: vmap(lambda *xs: never(), in_axes={"xs": (0, 1)})(X, X, X),
        bx.AxisError,
        ["in_axes['xs'] has 2 entries, but 3 arguments were passed for *xs"],
    ),
    "a callable in_axes": (
        lambda vmap: vmap(never, in_axes=lambda leaf: "first")({"a": X}),
        bx.ArgumentTypeError,
        ["args[0]['a']", "'first'"],
    ),
    "a callable out_axes": (
        lambda vmap: vmap(lambda x: {"a": x}, out_axes=lambda leaf: "first")(X),
        bx.ArgumentTypeError,
        ["out['a']", "'first'"],
    ),
    "an entry of out_axes": (
        lambda vmap: vmap(never, out_axes=(0, {"a": 0.5})),
        bx.ArgumentTypeError,
        ["out_axes[1]['a']"],
    ),
    **{
        option: (
            lambda vmap, option=option: vmap(never, **{option: ["i"]}),
            bx.ArgumentTypeError,
            [f"{option} must be", "['i']"],
        )
        for option in ("axis_name", "spmd_axis_name")
    },
    "axes for the arrays of a sparse matrix": (
        lambda vmap: vmap(never, (jax.tree.map(lambda x: 0, sparse_matrix()),))(sparse_matrix()),
        bx.AxisError,
        ["in_axes gives a BCOO for args[0]"],
    ),
}


def sparse_matrix():
    return jax.experimental.sparse.BCOO.fromdense(jnp.ones((3, 4, 2)), n_batch=1)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    call, error, fragments = MISTAKES[mistake]
    fails(call, error, *fragments)


@pytest.mark.parametrize("leaf", ["0", 0.5, True, np.ones(2)])
def test_in_axes_entry_of_the_wrong_type(leaf):
    fails(
        lambda vmap: vmap(never, in_axes=(0, {"a": leaf})),
        bx.ArgumentTypeError,
        "in_axes[1]['a']",
        "an array of shape (2,) and dtype" if isinstance(leaf, np.ndarray) else repr(leaf),
    )


def test_an_array_is_named_by_its_type():
    x = jnp.ones((2, 300), "float32")
    fails(lambda vmap: vmap(x), bx.ArgumentTypeError, "got an array of shape (2, 300) and dtype")
    with pytest.raises(bx.ArgumentTypeError, match=r"got a traced array of shape \(2, 300\)"):
        jax.make_jaxpr(bx.vmap)(x)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("sum_match", lambda word: bx.vmap(never, sum_match=word)),
        ("reverse", lambda word: bx.scan(never, reverse=word)),
        ("measure", lambda word: bx.explain(never, measure=word)),
        ("compile", lambda word: bx.explain(never, compile=word)),
        ("derivatives", lambda word: bx.check(never, derivatives=word)),
        ("batched", lambda word: bx.map(never, np.ones(3), batched=word)),
    ],
)
def test_a_word_is_not_taken_for_true(name, call):
    with pytest.raises(bx.ArgumentTypeError, match=f"{name} must be True or False, got 'no'"):
        call("no")


def test_what_is_no_function_is_refused_by_whom_it_was_given():
    with pytest.raises(bx.ArgumentTypeError, match="sequential_vmap expects a function of one"):
        bx.sequential_vmap(3)
    with pytest.raises(bx.ArgumentTypeError, match="check_rule expects a function of one"):
        bx.check_rule(3)
    with pytest.raises(bx.ArgumentTypeError, match="a rule for `sin` must be a function, got 3"):
        bx.register_rule(jax.lax.sin_p)(3)


def test_a_list_of_images_of_different_sizes():
    images = [np.ones((2, 3)), np.ones((4, 3)), np.ones((2, 5))]
    fails(
        lambda vmap: vmap(never)(images),
        bx.AxisError,
        "pass batchax.Ragged.from_rows(args[0], axis=(0, 1))",
    )


@pytest.mark.parametrize(
    ("value", "description"),
    [
        ("text", "of type str, not an array"),
        (np.array(["a", "b", "c"]), "an array of dtype <U1, which JAX does not have"),
        (
            np.array([np.ones(1), np.ones(2)], object),
            "an array of dtype object, which JAX does not have. If it holds rows of different "
            "lengths, pass batchax.Ragged.from_rows(args[1][0]).",
        ),
        (iter([X]), "of type list_iterator, not an array. Pass jax.numpy.stack(list(args[1][0]))"),
    ],
)
def test_mapped_argument_that_is_no_array(value, description):
    fails_as_in_jax(
        lambda vmap: vmap(never)(X, [value]),
        bx.ArgumentTypeError,
        f"args[1][0] is to be mapped, but it is {description}",
        "None in in_axes",
    )


def test_keyword_arguments_are_told_that_only_a_name_can_give_them_none():
    by_name = "in_axes={'mode': None} (arguments that are not named there are mapped over axis 0)"
    for mode, error in (("sum", bx.ArgumentTypeError), (1.0, bx.AxisError), (Y, bx.AxisError)):
        for in_axes in (0, (0,)):
            fails_as_in_jax(lambda vmap: vmap(never, in_axes)(X, mode=mode), error, by_name)
    f = lambda x, mode: x if mode == "sum" else never()
    assert bx.vmap(f, in_axes={"mode": None})(X, mode="sum").shape == X.shape  # as it says
    message = fails(lambda vmap: vmap(never)("sum"), bx.ArgumentTypeError, "None in in_axes")
    assert "by name" not in message


# One random key where there should be one for each lane.


def test_one_key_for_all_lanes():
    draw = lambda key, x: x + jax.random.normal(key)
    split = "random key: jax.random.split(key, 3) makes one for each; with None it is the same"
    keys = [jax.random.key(0), jax.random.PRNGKey(0), jax.random.PRNGKey(0, impl="rbg")]
    for key in keys:
        fails(lambda vmap: vmap(draw)(key, X), bx.AxisError, f"key is one {split} for all")
        fails(lambda vmap: vmap(draw)(x=X, key=key), bx.AxisError, "key is one random")
    fails(lambda vmap: vmap(draw)(jax.random.key(0), 1.0), bx.AxisError, "split(key, n)")
    with pytest.raises(TypeError, match=r"(?s)^If key is one random.*key, 2\).*JAX says"):
        bx.vmap(draw)(keys[1], X.T)  # the two numbers of the key as two lanes


# Options.


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"mesh": "all"}])
def test_of_no_lanes_there_is_no_extreme(options):
    greatest = bx.vmap(lambda x: {"a": x}, out_axes={"a": bx.Reduce("max")}, **options)
    with pytest.raises(bx.AxisError, match=r"out\['a'\], and the batch has no lanes: max of no v"):
        greatest(jnp.ones((0, 3)))


# What Python cannot do with what is traced. JAX's errors, with what batchax knows on top.


@pytest.mark.parametrize(
    ("f", "error", "advice"),
    [
        (lambda x, y: x if y["a"].sum() > 0 else -x, "TracerBoolConversionError", "lax.cond"),
        (lambda x, y: range(y["a"][0].astype(int)), "TracerIntegerConversionError", "fori_loop"),
        (
            lambda x, y: np.sin(y["a"]),
            "TracerArrayConversionError",
            "Use jax.numpy (`jax.numpy.asarray(array)[i]` for an index), or call NumPy by",
        ),
        (lambda x, y: float(y["a"][0]), "ConcretizationTypeError", "functions of jax.numpy"),
    ],
)
def test_python_on_a_mapped_value(f, error, advice):
    y = {"a": Y.T, "b": Y.T}
    for batched in (
        bx.vmap(f, in_axes=(0, 1)),
        jax.jit(bx.vmap(f, in_axes=(0, 1), batch_size=2)),
        lambda x, y: bx.vmap(lambda s: bx.vmap(f, in_axes=(0, 1))(s * x, y))(X[:, 0]),
    ):
        with pytest.raises(getattr(jax.errors, error)) as caught:
            batched(jnp.ones(4), y)
        message = str(caught.value)
        top, jax_says = message.split("\nJAX says: ")
        assert f"\n  y['a']: one example has shape (2,) and dtype {Y.dtype}\n" in top
        assert advice in top
        assert "['b']" not in top
        assert message.count("JAX says") == 1
        assert "depends on the value of the argument y['a']" in jax_says


def test_python_on_a_value_of_a_row_a_step_and_an_argument_by_name():
    sign = lambda x: x if x.sum() > 0 else -x
    rows = bx.Ragged.from_rows([X, X[:1]])
    for call, line in (
        (lambda: bx.vmap(sign)(rows), f"x: one example has shape (n, 2) and dtype {X.dtype}"),
        (lambda: bx.vmap(sign)(x=X), "in_axes={'x': None}"),
        (lambda: bx.vmap(sign, in_axes={"x": 1})(X), "x: one example has shape (3,)"),
        (lambda: bx.scan(lambda c, x: (c, sign(x)))(0.0, X), "x: one example has shape (2,)"),
    ):
        with pytest.raises(jax.errors.TracerBoolConversionError, match=re.escape(line)):
            call()
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        bx.vmap(lambda x: x * jax.jit(sign)(jnp.ones(2)))(X)  # not the batching's doing
    assert "JAX says" not in str(caught.value)


def test_reverse_mode_of_a_while_loop():
    double_up = lambda x: jax.lax.while_loop(lambda x: x < 100, lambda x: 2 * x, x)
    for gradient in (
        jax.grad(lambda x: bx.vmap(double_up)(x).sum()),
        jax.jit(jax.grad(lambda x: bx.vmap(double_up, divergence="compact")(x).sum())),
        bx.vmap(jax.grad(double_up)),
    ):
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not") as caught:
            gradient(jnp.arange(1.0, 4.0))
        assert any("batchax.bounded_while" in note for note in caught.value.__notes__)


def test_a_key_for_each_lane_says_not_how_many():
    with pytest.raises(bx.AxisError, match=r"key gives each lane its own value.* axis_size"):
        bx.vmap(lambda key: jax.random.normal(key), bx.split_key)(jax.random.key(0))


# Outputs. What a function returns is known only once it has been called.


OF_TYPE = "the output out[1][0] is of type"
ANOTHER = "is another object each time that the function is traced"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: "text", f"{OF_TYPE} str, not an array"),
        (lambda x: {1.0}, f"{OF_TYPE} set, not an array"),
        (lambda x: lambda y: x + y, ANOTHER),
        (lambda x: object(), ANOTHER),
    ],
)
def test_output_that_is_no_array(make, message):
    call = lambda vmap: vmap(lambda x: (x, [make(x)]))(X)
    fails_as_in_jax(call, bx.ArgumentTypeError, OF_TYPE, message)


@pytest.mark.parametrize("value", [object(), print])
def test_an_object_by_itself_is_neither_mapped_nor_returned(value):
    fails(lambda vmap: vmap(never)(X, value), bx.ArgumentTypeError, "None in in_axes")
    fails(lambda vmap: vmap(lambda x: value)(X), bx.ArgumentTypeError, "the output out is of type")


# The other functions a user calls.


def test_batch_jaxpr():
    jaxpr = jax.make_jaxpr(lambda x, y: x + y)(X, X)
    for call, error, fragment in (
        (lambda: bx.batch_jaxpr(never, 3, (0, 0)), bx.ArgumentTypeError, "closed jaxpr"),
        (lambda: bx.batch_jaxpr(jaxpr, 3, (0,)), bx.AxisError, "in_axes has 1 entry for 2"),
        (lambda: bx.batch_jaxpr(jaxpr, 3, (0, 3)), bx.AxisError, "in_axes[1] is 3"),
        (lambda: bx.batch_jaxpr(jaxpr, 3, (0, -4)), bx.AxisError, "in_axes[1] is -4"),
        (lambda: bx.batch_jaxpr(jaxpr, 3, (0, 0), (9,)), bx.AxisError, "out_axes[0] is 9"),
        (lambda: bx.batch_jaxpr(jaxpr, -3, (0, 0)), bx.ArgumentTypeError, "axis_size"),
        (lambda: bx.batch_jaxpr(jaxpr, 2.5, (0, 0)), bx.ArgumentTypeError, "axis_size"),
    ):
        with pytest.raises(error, match=re.escape(fragment)):
            call()


TAKE_ONE_EXAMPLE = {
    "vmap": lambda f, x: bx.vmap(f)(x),
    "check": lambda f, x: bx.check(f)(x),
    "find_nonfinite with an option": lambda f, x: bx.find_nonfinite(f, batch_size=2)(x),
    "find_nonfinite": lambda f, x: bx.find_nonfinite(f)(x),
    "explain with an option": lambda f, x: bx.explain(f, batch_size=2)(x),
    "explain": lambda f, x: bx.explain(lambda x: f(x) + 1)(x),
    "map": lambda f, x: bx.map(f, x, progress=False),
}


@pytest.mark.parametrize("name", TAKE_ONE_EXAMPLE)
@pytest.mark.parametrize("transform", [bx.vmap, jax.vmap])
def test_what_is_batched_already(name, transform):
    call = lambda: TAKE_ONE_EXAMPLE[name](transform(jnp.sin), np.arange(3.0, dtype=np.float32))
    if name == "find_nonfinite" and transform is bx.vmap:
        assert not call()  # it finds the function of one example inside
        return
    with pytest.raises(ValueError, match=r"(?s)^(sin|<lambda>) gets.*batched already.*(rank|axis)"):
        call()


NEAR_WORDS = {
    "a reduction": (lambda: bx.Reduce("avg"), "mean"),
    "unmapped": (lambda: bx.Reduce("sum", unmapped="Keep"), "keep"),
    "divergence": (lambda: bx.vmap(jnp.sin, divergence="sequential"), "serial"),
    "another case": (lambda: bx.vmap(jnp.sin, divergence="Compact"), "compact"),
    "layout": (lambda: bx.vmap(jnp.sin, layout="pad"), "padded"),
    "residuals": (lambda: bx.vmap(jnp.sin, batch_size=2, residuals="remat"), "recompute"),
    "small matrices": (lambda: bx.vmap(jnp.sin, small_matrices="lapack"), "library"),
    "batch_size": (lambda: bx.vmap(jnp.sin, batch_size="Auto"), "auto"),
    "rows that fail": (lambda: bx.map(jnp.sin, np.ones(3), on_error="skip"), "quarantine"),
    "resume": (lambda: bx.map(jnp.sin, np.ones(3), resume="append"), "extend"),
    "a short batch": (lambda: bx.map_batches(jnp.sin, np.ones(3), last="discard"), "drop"),
    "tiles": (lambda: bx.tiles(2, last="shorter"), "short"),
    "a process": (lambda: bx.gather(jnp.ones(2), to="every"), "all"),
}


@pytest.mark.parametrize("name", NEAR_WORDS)
def test_a_word_that_an_option_does_not_take(name):
    make, meant = NEAR_WORDS[name]
    with pytest.raises(bx.OptionError, match=rf'got .*\. Did you mean "{meant}"\?'):
        make()


def test_options_without_effect():
    with pytest.raises(bx.ArgumentTypeError, match="residuals is 'keep', but batch_size is None"):
        bx.vmap(jnp.sin, residuals="keep")
    with pytest.raises(bx.ArgumentTypeError, match=r"layout needs rows.*no mapped argument is a"):
        bx.vmap(jnp.sin, layout="packed")(jnp.ones(3))


def test_register_rule_and_register_container():
    with pytest.raises(bx.ArgumentTypeError, match="expects a primitive"):
        bx.register_rule(jnp.sin)
    for register in (bx.vectorized, bx.broadcasting, bx.reducing):
        with pytest.raises(bx.ArgumentTypeError, match=f"{register.__name__} expects a"):
            register("sin")
    ways = dict.fromkeys(["to_arrays", "to_example", "from_example", "to_batch"], never)
    with pytest.raises(bx.ArgumentTypeError, match="`type` must be a type, got 'Pair'"):
        bx.register_container("Pair", **ways)
    with pytest.raises(bx.ArgumentTypeError, match="`spec_type` must be a type, got 3"):
        bx.register_container(Pair, spec_type=3, **ways)


def test_outputs_that_do_not_fit_are_refused_before_anything_runs():
    ran = []

    def f(x):
        y = jax.pure_callback(
            lambda v: (ran.append(v), v)[1],
            jax.ShapeDtypeStruct((), jnp.float32),
            x,
            vmap_method="sequential",
        )
        return y, {"a": x}

    with pytest.raises(bx.AxisError, match=r"out\[0\], out\[1\]\['a'\] depend on the batch"):
        bx.vmap(f, out_axes=None)(jnp.ones(3))
    with pytest.raises(bx.AxisError, match=r"out_axes gives 1 for out\[1\]\['a'\]"):
        bx.vmap(f, out_axes=(0, 1))(jnp.ones(3))
    assert not ran
    shared = bx.vmap(lambda x: jax.lax.psum(x, "i"), axis_name="i", out_axes=None)
    assert shared(jnp.ones(3)) == 3


# What goes wrong inside of the function.


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"divergence": "compact"}], ids=str)
def test_shapes_of_one_example_where_shapes_do_not_fit(options):
    def affine(w, batch):
        return w @ batch["x"]

    with pytest.raises(TypeError) as caught:
        bx.vmap(affine, (None, 0), **options)(np.ones((5, 4)), {"x": np.ones((7, 3), np.float32)})
    assert str(caught.value).startswith(
        "affine is given one example of each argument that is mapped, without its batch axis:\n"
        "  batch['x']: one example has shape (3,) and dtype float32\n"
        f"  w: shape (5, 4) and dtype {np.ones(1).dtype}, the same for all lanes\nJAX says: "
    )


def test_shapes_of_what_all_share_are_listed_by_leaf_and_not_without_end():
    model = {"layers": [np.ones((2, 2), np.float32)] * 20, "rate": 0.1, "name": "net"}
    with pytest.raises(TypeError) as caught:
        bx.vmap(lambda x, model: model["layers"][0] @ x, {"model": None})(X.T, model=model)
    message = str(caught.value)
    assert "  model['layers'][7]: shape (2, 2) and dtype float32, the same for all lanes" in message
    assert "layers'][8]" not in message
    assert "  and 12 more arrays, the same for all lanes\nJAX says" in message
    with pytest.raises(TypeError, match=r"  w: shape \(3, 2\) .*, the same at every step\nJAX"):
        bx.scan(lambda c, w, x: (c, w @ x), (None, 0))(0.0, X, X.T)


# What `jax.jit` traces, and all lanes share.


@pytest.mark.parametrize(
    "f",
    [
        lambda x, n: x if n > 2 else -x,
        lambda x, n: x * jnp.ones(n),
        lambda x, n: x * jnp.zeros((n, 2)).sum(),
        lambda x, n: sum(x for _ in range(n)),
    ],
)
def test_static_arguments_under_jit(f):
    batched = bx.vmap(f, (0, None))
    with pytest.raises(TypeError) as caught:
        jax.jit(batched)(jnp.ones(4), 3)
    top, jax_says = str(caught.value).split("\nJAX says: ")
    assert f"\n  n: shape () and dtype {jnp.asarray(3).dtype}\n" in top
    assert "  x:" not in top
    assert "Pass static_argnames='n' to jax.jit" in top
    assert "racer" in jax_says
    assert jax.jit(batched, static_argnames="n")(jnp.ones(4), n=3).shape[0] == 4  # as it says
    with pytest.raises(TypeError, match="It was computed from\n  n: one example has shape"):
        bx.vmap(f)(jnp.ones(4), jnp.arange(4))  # of a mapped one the advice is another


def test_an_axis_name_that_is_not_mapped():
    with pytest.raises(NameError, match=r'(?s)axis_name="...".*unbound axis name: batch'):
        bx.vmap(lambda x: jax.lax.psum(x, "batch"))(X)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("in_dims", "For that of torch.func.vmap, pass in_axes."),
        ("chunk_size", "For that of torch.func.vmap, pass batch_size."),
        ("randomness", "batchax.split_key"),
        ("signature", "batchax.auto_vmap"),
        ("batchsize", "Did you mean 'batch_size'?"),
        ("what", "It has in_axes, out_axes"),
    ],
)
def test_options_in_the_words_of_others(option, says):
    calls = [bx.vmap, bx.explain, bx.check, bx.find_nonfinite]
    for call in calls:
        with pytest.raises(TypeError, match=re.escape(f"has no option {option!r}")) as raised:
            call(jnp.sin, **{option: 0})(jnp.ones(3))
        assert says in str(raised.value)
    with pytest.raises(TypeError, match=r"functools\.partial\(batchax\.vmap, in_axes=\.\.\.\)"):
        bx.vmap()
    with pytest.raises(TypeError, match=r"functools\.partial\(batchax\.vmap, batch_size=\.\.\.\)"):
        bx.vmap(batch_size=2)


def test_options_of_what_else_takes_some():
    xs = jnp.ones((2, 3))
    for call, near in [
        (lambda: bx.map(jnp.sum, xs, on_nonfinit="raise"), "on_nonfinite"),
        (lambda: bx.map_batches(jnp.sum, xs, batchsize=2), "batch_size"),
        (lambda: bx.scan(lambda c, x: (c, x), inaxes=0), "in_axes"),
        (lambda: bx.clipped_grad(jnp.sum, 1.0, batchsize=2), "batch_size"),
    ]:
        with pytest.raises(bx.ArgumentTypeError, match=f"Did you mean '{near}'"):
            call()
    with pytest.raises(bx.AxisError, match=r"use batchax.vmap\(f, batch_size=...\)"):
        bx.map(jnp.sum, batch_size=2)  # as functools.partial(bx.map, batch_size=2)(f) calls it


def test_a_traced_value_of_a_call_that_is_over():
    kept = []
    bx.vmap(lambda x: kept.append(x * 3) or x)(jnp.ones(3))
    with pytest.raises(jax.errors.UnexpectedTracerError) as raised:
        bx.vmap(lambda y: y + kept[0])(jnp.ones(3))
    first, last = str(raised.value).splitlines()
    assert re.match(
        r"<lambda> uses a traced value \(float\d\d\[\]\) of another call, which is over: of "
        r"<lambda> at .*test_errors.py:\d+, made at .*test_errors.py:\d+",
        first,
    )
    assert last == "JAX says: Encountered an unexpected tracer."


@pytest.mark.parametrize("name", ["vmap", "explain", "check", "find_nonfinite"])
def test_a_batch_in_place_of_axes(name):
    """The message says what the call looks like."""
    call = getattr(bx, name)
    for given in (X, np.ones(3), [X]):
        with pytest.raises(bx.ArgumentTypeError, match=rf"batchax\.{name}\(sin\)\(\.\.\.\)"):
            call(jnp.sin, given)
    with pytest.raises(bx.ArgumentTypeError) as caught:
        call(jnp.sin, "rows")
    assert "A batch is given" not in str(caught.value)


@pytest.mark.parametrize(
    ("fun", "advice"),
    [
        (lambda r: r[r > 0].sum(), "batchax.compress(mask, x)"),
        (lambda r: jnp.nonzero(r)[0], "batchax.nonzero(mask)"),
        (lambda r: jnp.where(r > 0)[0], "batchax.nonzero(mask)"),
        (jnp.unique, "batchax.unique(x)"),
        (lambda r: jnp.compress(r > 0, r), "batchax.compress(condition, x)"),
        (lambda r: jnp.extract(r > 0, r), "batchax.compress(condition, x)"),
    ],
)
def test_sizes_that_depend_on_values(fun, advice):
    """Each is told of what finds such a size; and that does what JAX does for one example."""
    with pytest.raises((IndexError, TypeError)) as caught:
        bx.vmap(fun)(X)
    assert advice in str(caught.value)
    assert "JAX says" in str(caught.value)


def test_arrays_of_xarray_and_pandas():
    class Labelled:
        values = np.ones((3, 4))

    for call in (bx.vmap(jnp.sum), bx.auto_vmap(1)(jnp.sum)):
        with pytest.raises(bx.ArgumentTypeError, match=r"Pass a\.values, a NumPy array"):
            call(Labelled())


def test_padding_in_the_words_of_torch():
    rows = bx.Ragged.from_rows([np.ones(2), np.ones(3)])
    with pytest.raises(bx.ArgumentTypeError, match="pass fill_value"):
        rows.to_padded(padding_value=0)


@pytest.mark.parametrize(
    "fun", [lambda x: x.mean(), jnp.sum, jnp.tanh], ids=["method", "sum", "tanh"]
)
def test_a_list_of_rows_of_one_length(fun):
    rows = [np.ones(3, np.float32)] * 4
    with pytest.raises((AttributeError, TypeError), match=r"pass jnp.stack\(\w+\), or batchax.Rag"):
        bx.vmap(fun)(rows)
    assert bx.vmap(lambda x: x[0] + x[1])(rows[:2]).shape == (3,)


def test_a_mask_that_all_lanes_share_is_an_array_of_numpy():
    keep = [True, False, True]
    with pytest.raises(jax.errors.NonConcreteBooleanIndexError, match="pass a NumPy array"):
        bx.vmap(lambda x: x.at[jnp.array(keep)].set(0.0))(jnp.ones((2, 3)))
    masked = bx.vmap(lambda x: x.at[np.array(keep)].set(0.0))(jnp.ones((2, 3)))
    np.testing.assert_array_equal(masked, [[0, 1, 0]] * 2)
