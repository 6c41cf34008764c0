"""`map_batches`: results batch after batch, in order, of arrays, files and streams."""

import gc
import itertools
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.processes import python

FLOAT = jax.dtypes.canonicalize_dtype(float)
X = np.random.default_rng(0).standard_normal((11, 3)).astype(FLOAT)
Y = np.arange(11) % 3


def dot(row):
    return {"dot": row["x"] @ row["x"], "y": row["y"] + 1}


def dicts():
    return ({"x": x, "y": y} for x, y in zip(X, Y, strict=True))


def readers():
    return [t for t in threading.enumerate() if t.name == "batchax-read" and t.is_alive()]


@pytest.fixture(autouse=True)
def _here():
    until(lambda: not readers())  # of tests before
    yield
    until(lambda: not readers())  # however a test went on, the thread ends


def until(condition):
    """Soon, or when nobody has any more what a test left behind."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + 60
        time.sleep(0.02)
        if time.monotonic() > begun + 0.1:  # in a process of many tests it takes long
            gc.collect()


class Loader:
    """As torch's: it is iterated over, has a length, and no numbers."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return -(-len(X) // self.size)

    def __iter__(self):
        for i in range(0, len(X), self.size):
            yield [Tensor(X[i : i + self.size]), Tensor(Y[i : i + self.size])]


class Tensor:
    """As torch's: NumPy makes an array of it."""

    def __init__(self, x):
        self._x = x

    def __array__(self, dtype=None):
        return np.asarray(self._x, dtype)


class Table:
    """As a dataset of Hugging Face: rows by number, dicts of what JSON has."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        if isinstance(i, int) and not 0 <= i < len(X):
            raise IndexError(i)
        self.asked.append(i)
        return {"x": X[i].tolist(), "y": int(Y[i])}

    def __iter__(self):
        return (self[i] for i in range(len(self)))


def as_pair(row):
    x, y = row
    return dot({"x": x, "y": y})


def of_arrays(x, y):
    return dot({"x": x, "y": y})


def files():
    np.save("x.npy", X)
    np.save("y.npy", Y)
    return "x.npy", "y.npy"


SOURCES = {
    "a tree of arrays": (dot, lambda: ({"x": X, "y": Y},), {}),
    "files": (of_arrays, files, {}),
    "rows from a generator": (dot, lambda: (dicts(),), {}),
    "rows from two": (of_arrays, lambda: (iter(X), iter(Y)), {}),
    "a loader": (as_pair, lambda: (Loader(3),), {"batched": True}),
    "a loader of large batches": (as_pair, lambda: (Loader(9),), {"batched": True}),
    "a dataset": (dot, lambda: (Table(),), {}),
}


def joined(batches):
    batches = list(batches)
    return jax.tree.map(lambda *x: np.concatenate(x), *batches), [len(b["y"]) for b in batches]


@pytest.mark.filterwarnings("error::DeprecationWarning")
@pytest.mark.parametrize("kind", SOURCES)
def test_the_results_of_map_in_order(kind):
    fun, sources, how = SOURCES[kind]
    expected = {"dot": (X * X).sum(1), "y": Y + 1}
    for start in (0, 5, 11, 20):
        batches = bx.map_batches(fun, *sources(), batch_size=4, start=start, **how)
        if start >= len(X):
            assert list(batches) == []
            continue
        results, sizes = joined(batches)
        assert sizes == [min(4, len(X) - i) for i in range(start, len(X), 4)]
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y[start:], rtol=1e-5), results, expected
        )
        assert batches.rows == len(X)


def test_rows_of_a_dataset_that_are_passed_over_are_not_made():
    table = Table()
    list(bx.map_batches(dot, table, batch_size=4, start=9))
    assert table.asked == [9, 10]


def test_going_on_where_a_loop_ended():
    key = jax.random.key(3)
    noisy = lambda x, key: x[0] + jax.random.normal(key)
    whole = bx.map(noisy, X, key=key, progress=False).outputs
    batches = bx.map_batches(noisy, X, key=key, batch_size=4)
    first = next(batches)
    batches.close()
    rest = bx.map_batches(noisy, iter(X), key=key, batch_size=4, start=batches.rows)
    np.testing.assert_allclose(np.concatenate([first, *rest]), whole, rtol=1e-5)


def test_sizes_of_batches():
    sizes = lambda *args, **how: [len(b) for b in bx.map_batches(jnp.sum, *args, **how)]
    assert sizes(X, batch_size=4, last="drop") == [4, 4]
    assert sizes(iter(X), batch_size=4, last="drop") == [4, 4]
    assert sizes(iter([X[:5], X[5:10], X[10:]]), batched=True) == [5, 5, 1]
    assert sizes(X) == [11]
    assert sizes(X[:0], batch_size=4) == []
    assert sizes(iter([]), batch_size=4) == []
    with pytest.raises(bx.AxisError, match="different numbers of rows: some of the streams"):
        bx.map_batches(lambda x, y: x, iter(X), iter([]))


def test_rows_of_different_lengths():
    rows = [np.arange(n).astype(FLOAT) for n in (3, 1, 0, 4, 2)]
    ragged = bx.Ragged.from_rows(rows)
    sums = np.concatenate(list(bx.map_batches(jnp.sum, ragged, batch_size=2)))
    np.testing.assert_allclose(sums, [r.sum() for r in rows])
    doubled = [r for b in bx.map_batches(lambda x: 2 * x, ragged, batch_size=2) for r in b.rows()]
    for got, row in zip(doubled, rows, strict=True):
        np.testing.assert_array_equal(got, 2 * row)


def test_few_batches_are_ahead():
    taken = []

    def rows():
        for i in itertools.count():
            taken.append(i)
            yield np.full(3, i, FLOAT)

    with bx.map_batches(jnp.sum, rows(), batch_size=2, ahead=2) as batches:
        for i in range(5):
            assert next(batches).tolist() == [6 * i, 6 * i + 3]
            time.sleep(0.01)
            assert len(taken) <= 2 * (i + 1 + 2 + 2 + 2)
    assert list(batches) == []


def test_a_generator_of_a_loader_is_closed_and_the_users_own_is_not():
    ended = []

    class Endless:
        def __iter__(self):
            try:
                while True:
                    yield X[0]
            finally:
                ended.append(True)

    with bx.map_batches(jnp.sum, Endless(), batch_size=2) as batches:
        next(batches)
    assert ended == [True]
    own = Endless().__iter__()
    with bx.map_batches(jnp.sum, own, batch_size=2) as batches:
        next(batches)
    next(own)
    assert ended == [True]


def test_who_drops_the_iterator_ends_its_thread():
    before = len(readers())
    batches = bx.map_batches(jnp.sum, (X[0] for _ in itertools.count()), batch_size=2)
    next(batches)
    assert len(readers()) == before + 1
    del batches  # the fixture sees the thread end


ENDS = """
import sys
import numpy as np
import batchax as bx

def double(x):
    return x * 2

def rows():
    while True:
        yield np.ones(3, np.float32)

def of_file():
    return bx.map_batches(double, sys.argv[1], batch_size=1000)

kept = [of_file(), bx.map_batches(double, rows(), batch_size=10)]
ring = [of_file()]  # which only the collector can free
ring.append(ring)
for batches in (*kept, ring[0]):
    next(batches)
"""


@pytest.mark.only_in_whole_runs
def test_python_ends_in_the_middle_of_it(tmp_path):
    """Nothing waits, and nothing is said."""
    # No thread of the user's runs a map meanwhile: what ends Python in one that computes, ends it
    # in the compiled program, and the process aborts, with JAX alone as well.
    np.save(tmp_path / "x.npy", np.ones((100_000, 4), np.float32))
    done = python("-W", "error", "-c", ENDS, tmp_path / "x.npy")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_errors_come_where_they_arise():
    def rows():
        yield from X[:5]
        raise FileNotFoundError("a part is missing")

    batches = bx.map_batches(jnp.sum, rows(), batch_size=2)
    assert [len(next(batches)) for _ in range(2)] == [2, 2]
    with pytest.raises(FileNotFoundError, match="a part is missing"):
        next(batches)
    assert list(batches) == []
    assert batches.rows == 4


def test_a_row_that_fails_is_named():
    def bad(x):
        def host(x):
            if x == X[6, 0]:
                raise ValueError("not this one")
            return x

        result = jax.ShapeDtypeStruct((), FLOAT)
        return jax.pure_callback(host, result, x[0], vmap_method="sequential")

    batches = bx.map_batches(bad, X, batch_size=4)
    np.testing.assert_array_equal(next(batches), X[:4, 0])
    with pytest.raises(bx.RowError, match=r"row 6 of x fails: .*not this one"):
        next(batches)


ODD: Any = {"last": "pad"}
REFUSED = [
    (lambda: bx.map_batches(jnp.sum, iter(["a"])), bx.ArgumentTypeError,
     r"\w+, item 0.*not numbers"),
    (lambda: bx.map_batches(jnp.sum, iter([{}])), bx.ArgumentTypeError, "item 0 has no arrays"),
    (lambda: list(bx.map_batches(dot, iter([{"x": X[0], "y": 1}, {"x": X[0]}]), batch_size=2)),
     bx.ArgumentTypeError, r"row, item 1 is .* all must be alike"),
    (lambda: bx.map_batches(jnp.sum, iter([bx.Ragged.from_rows([X[0]])])), bx.ArgumentTypeError,
     "item 0 is a Ragged, not an array. Pad rows"),
    (lambda: list(bx.map_batches(jnp.sum, iter([X[0], X[0, :2]]), batch_size=2)), bx.AxisError,
     r"\w+, item 1 has rows of shape \(2,\)"),
    (lambda: bx.map_batches(as_pair, iter([(X[:2], Y[:3])]), batched=True), bx.AxisError,
     r"shapes \(2, 3\), \(3,\)"),
    (lambda: bx.map_batches(lambda d, y: y, dicts(), Y), bx.UnsupportedError, "some are arrays"),
    (lambda: bx.map_batches(of_arrays, iter(X), Y), bx.UnsupportedError, "some are arrays"),
    (lambda: bx.map_batches(jnp.sum, X, batched=True), bx.ArgumentTypeError, "no argument is a st"),
    (lambda: bx.map_batches(jnp.sum, X, out_axes=bx.Reduce("sum")), bx.UnsupportedError, "reduces"),
    (lambda: bx.map_batches(jnp.sum, iter(X), in_axes=1), bx.AxisError, "along axis 0"),
    (lambda: bx.map_batches(of_arrays, iter(X), iter(Y), in_axes=(None, 0)), bx.UnsupportedError,
     r"x are rows that come one after another"),
    (lambda: bx.map_batches(jnp.sum, X, batch_size=0), bx.OptionError, "batch_size"),
    (lambda: bx.map_batches(jnp.sum, X, start=-1), bx.OptionError, "start"),
    (lambda: bx.map_batches(jnp.sum, X, **ODD), bx.OptionError, "last must be"),
    (lambda: list(bx.map_batches(of_arrays, iter(X), iter(Y[:5]), batch_size=3)), bx.AxisError,
     "from row 3 on there are 3 and 2"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_refused(case):
    call, error, match = REFUSED[case]
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("batched", [False, True])
def test_a_generator_that_makes_rows_in_the_same_memory(batched):
    def rows():
        buffer = np.zeros((2, 3) if batched else 3, np.float32)
        for i in range(6):
            buffer[...] = i
            yield buffer

    got = np.concatenate(list(bx.map_batches(jnp.sum, rows(), batch_size=4, batched=batched)))
    np.testing.assert_array_equal(got, np.repeat(np.arange(6), 1 + batched) * 3)
