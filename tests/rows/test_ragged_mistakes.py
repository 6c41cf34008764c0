"""What `Ragged` says of arguments that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx
from batchax import Ragged

from support.mistakes import check_raises, raising
from support.rows import ragged

EXAMPLE = bx.Ragged(np.arange(6.0), [2, 0, 3, 1])
LONG = bx.Ragged(np.arange(42.0), [40, 2])  # more sizes than have programs of their own
zeros, TWO = np.zeros, np.zeros((2, 3), np.float32)
MISTAKES = {
    bx.ArgumentTypeError: {
        r"data must be an array, got list.*from_rows": lambda: Ragged([[1.0], [1.0, 2.0]], [1, 2]),
        "lengths must be integers.*float": lambda: Ragged(zeros(3), [1.0, 2.0]),
        r"lengths along the axes \(0, 1\) are traced. Pass a bound": lambda: jax.jit(
            lambda n: Ragged(jnp.zeros(4), (n, n), axis=(0, 1)).data
        )(jnp.array([2])),
        r"max_length must be an int, got 3\.0": lambda: Ragged(zeros(3), [0, 3], 3.0),
        "axis must be an int, got 'n'": lambda: Ragged(zeros(3), [3], axis="n"),
        r"rows\[1\] has dtype float32, but rows\[0\] has int32": lambda: Ragged.from_rows(
            [zeros(2, np.int32), zeros(2, np.float32)]
        ),
        r"rows\[1\] has dtype int\d+, .* Pass np\.asarray\(row, np\.float": lambda: (
            Ragged.from_rows([[1.0, 2], [3]])
        ),
        r"rows\[0\] must be an array, got str": lambda: Ragged.from_rows(["a"]),
        r"lengths must be known.*traced.*to_padded\(\)": lambda: jax.jit(lambda x: x.rows())(
            EXAMPLE
        ),
    },
    bx.AxisError: {
        "axis is 0, but a row has 0 axes": lambda: Ragged(1.0, [1]),
        r"lengths must have one axis.*\(1, 2\)": lambda: Ragged(zeros(3), [[1, 2]]),
        r"axis is \(1, 0\); ragged axes are .* in order": lambda: Ragged(
            zeros(4), ([2], [2]), axis=(1, 0)
        ),
        "2 ragged axes, but lengths are 1": lambda: Ragged(zeros(4), [4], axis=(0, 1)),
        r"lengths\[0\] is of 1 rows, and lengths\[1\] of 2": lambda: Ragged(
            zeros(4), ([2], [1, 1]), axis=(0, 1)
        ),
        r"lengths\[1\]\[1\] is -1": lambda: Ragged(zeros(4), ([2, 0], [2, -1]), axis=(0, 1)),
        r"max_length is \(3,\), for .* \(0, 1\)": lambda: Ragged(
            zeros(4), ([2], [2]), (3,), axis=(0, 1)
        ),
        r"have 5 elements, but data, of shape \(4,\)": lambda: Ragged(
            zeros(4), ([2, 1], [2, 1]), axis=(0, 1)
        ),
        r"may differ along axis 0 only\. Pass axis=\(0, 1\)": lambda: Ragged.from_rows(
            [zeros((1, 2)), zeros((2, 3))]
        ),
        r"may differ along axes \(0, 1\) only": lambda: Ragged.from_rows(
            [zeros((1, 2, 3)), zeros((2, 1, 4))], axis=(0, 1)
        ),
        r"ragged along axis \(1, 2\), and there only the first axes": lambda: Ragged(
            zeros((3, 4)), ([2], [2]), axis=(1, 2)
        ).to_arrow(),
        r"lengths\[1\] is -2": lambda: Ragged(zeros(3), [1, -2]),
        r"add up to 4, but .* \(3,\), has 3 .* axis 0": lambda: Ragged(zeros(3), [2, 2]),
        "add up to": lambda: Ragged(zeros(3), [2**40]),
        r"lengths\[1\] is 3, more than max_length, 2": lambda: Ragged(zeros(3), [0, 3], 2),
        "needs at least one row": lambda: Ragged.from_rows([]),
        r"Ragged.from_rows: rows\[0\] is a number": lambda: Ragged.from_rows([1.0, 2.0]),
        r"rows\[1\] has shape \(1, 3\) and rows\[0\] \(1, 2\).*axis 0 only": lambda: (
            Ragged.from_rows([zeros((1, 2)), zeros((1, 3))])
        ),
        r"padded has shape \(3,\)": lambda: Ragged.from_padded(zeros(3), [1]),
        r"padded has 2 rows.*lengths has shape \(1,\)": lambda: Ragged.from_padded(TWO, [1]),
        r"lengths\[1\] is 4, more than the 3 elements": lambda: Ragged.from_padded(TWO, [1, 4]),
        r"never decrease.*\[0, 2, 1\]": lambda: Ragged.from_offsets(zeros(3), [0, 2, 1]),
        "one entry more than there are rows": lambda: Ragged.from_offsets(zeros(3), []),
        "add up to 6": lambda: EXAMPLE.with_data(zeros(5)),
    },
    IndexError: {
        "no row 4 of 4 rows": lambda: EXAMPLE[4],
    },
    TypeError: {
        r'may have different sizes.*: n elements.*: m elements.*bx.ragged\("n"\)': lambda: jax.jit(
            bx.vmap(lambda a, b: a + b)
        )(LONG, LONG[:])
    },
    ValueError: {
        r"may have different sizes.*: n elements.*: m elements.*JAX says: scan": lambda: jax.jit(
            bx.vmap(lambda a, b: jax.lax.scan(lambda c, x: (c + x[0] * x[1], c), 0.0, (a, b)))
        )(LONG, LONG[:])
    },
}


@raising(MISTAKES)
def test_a_mistake_is_named(call, error, match):
    check_raises(call, error, match)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.5, "int32"),
        (np.nan, "int32"),
        (-1, "uint8"),
        ("0", "float32"),
        (1j, "float32"),
        ([0.0], "float32"),
    ],
    ids=str,
)
def test_a_fill_value_of_another_kind(value, dtype):
    rows = Ragged(np.ones(3, dtype), [2, 1])
    with pytest.raises(bx.ArgumentTypeError, match=f"fill_value must be a number of dtype {dtype}"):
        rows.to_padded(value)


@pytest.mark.parametrize("spec", [P(), P("d"), P(None, "d")], ids=str)
def test_rows_on_a_mesh_that_types_tell_of(spec):
    """They run where they are whole on each device; else the argument is named."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    rows = ragged(2, lengths=[2, 0, 3])
    data = jax.device_put(rows.data, NamedSharding(mesh, spec))
    spread = bx.Ragged(data, rows.lengths, rows.max_length)
    batched = bx.vmap(lambda row: jnp.sin(row).sum(0))
    with pytest.raises(bx.UnsupportedError, match=r"row: the data are .* mesh"):
        batched(spread)
    with jax.set_mesh(mesh):
        if spec == P():
            np.testing.assert_allclose(batched(spread), batched(rows), rtol=1e-6)
            return
        with pytest.raises(bx.UnsupportedError, match=r"sharded over .*reshard"):
            batched(spread)
        whole = bx.Ragged(jax.sharding.reshard(data, P()), rows.lengths, rows.max_length)
        np.testing.assert_allclose(batched(whole), batched(rows), rtol=1e-6)


def test_lists_of_numbers_are_told_from_arrays():
    for batch, hint in (
        ([1.0, 2.0], r"(?m)If x is one batch, pass jax.numpy.asarray\(x\)\.$"),
        ([[1.0, 2.0], [3.0]], r"(?m)different lengths batchax.Ragged.from_rows\(x\)\.$"),
    ):
        with pytest.raises(bx.AxisError, match=hint):
            bx.vmap(lambda x: x)(batch)


def test_a_reshape_to_another_number_of_elements_is_refused_as_alone():
    """JAX does not ask that of symbolic sizes: rows were padded, or cut, in silence."""
    x = ragged(2, lengths=[3, 1, 3])
    for reshaped in (lambda x: x.reshape(6), lambda x: x.reshape(x.shape[0], 3)):
        with pytest.raises(TypeError, match="reshape"):
            bx.vmap(reshaped)(x)
    longer = bx.Ragged(x.data, x.lengths, max_length=100)
    with pytest.raises(bx.UnsupportedError, match=r"are reshaped to .* another number of elements"):
        jax.jit(bx.vmap(lambda x: x.reshape(6)))(longer)
    alike = bx.vmap(lambda x: x.reshape(6))(ragged(2, lengths=[3, 3]))
    np.testing.assert_array_equal(alike, [row.ravel() for row in ragged(2, lengths=[3, 3])])
    even = lambda x: x.reshape(x.shape[0] // 2, 2, 2)
    np.testing.assert_array_equal(bx.vmap(even)(ragged(2, lengths=[4, 2])).lengths, [2, 1])


def test_a_ragged_is_a_pytree_of_floats_and_lengths_to_jax():
    x = bx.Ragged(jnp.arange(6.0), [1, 3, 2])
    loss = lambda x: bx.vmap(lambda row: jnp.sum(row**2))(x).sum()
    with pytest.raises(TypeError, match="allow_int"):
        jax.grad(loss)(x)
    np.testing.assert_allclose(jax.grad(loss, allow_int=True)(x).data, 2 * x.data)
    with pytest.raises(ValueError, match=r"x\.lengths"):
        jax.vmap(lambda x, y: y)(x, jnp.ones(3))
    sums = jax.vmap(lambda x, y: bx.vmap(lambda row: y * row.sum())(x), (None, 0))
    np.testing.assert_array_equal(sums(x, jnp.arange(2.0)), [[0, 0, 0], [0, 6, 9]])


def test_a_float_of_a_size_is_not_taken_for_sizes_that_differ():
    counts = lambda a, b: jnp.arange(b.shape[0] + 1.0) + a.sum()
    batched = jax.jit(bx.vmap(counts, layout="padded"))
    with pytest.raises(bx.UnsupportedError) as caught:
        batched(ragged(lengths=[2, 1]), ragged(lengths=[1, 3]))
    assert "may have different sizes" not in str(caught.value)
