"""Where JAX is told to refuse promotion, users' own is refused, and batchax does none."""

from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from explain.test_rule_names import CASES

from support import features
from support.every_rule import NAME, RULES
from support.features import FEATURES


@contextmanager
def strict(x64):
    with (
        jax.enable_x64(x64),
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
    ):
        yield


in_both_precisions = pytest.mark.parametrize("x64", [False, True], ids=["single", "double"])


@in_both_precisions
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.compiles(60)
@pytest.mark.each_commit(34)
def test_features(name, x64, monkeypatch):
    with strict(x64):
        for data in "XVW":
            values = np.asarray(getattr(features, data))
            monkeypatch.setattr(features, data, jnp.asarray(values, float))
        if name == "check_rule":  # compares values
            FEATURES[name]()
        else:
            jax.make_jaxpr(lambda: FEATURES[name]())()


@in_both_precisions
@pytest.mark.parametrize(("module", "name"), CASES, ids=[name for _, name in CASES])
@pytest.mark.each_commit(235)
def test_rules(module, name, x64):
    fun, *types = RULES[module][name]
    example = [jax.ShapeDtypeStruct(t.shape[1:], t.dtype) for t in types]
    with strict(x64):
        try:
            jax.make_jaxpr(fun, axis_env=[(NAME, 4)])(*example)
        except Exception:
            pytest.skip("the program does not run for one example")
        jax.eval_shape(bx.vmap(fun, axis_name=NAME), *types)
        jax.eval_shape(bx.vmap(fun, axis_name=NAME, batch_size=2), *types)


def of_a_window(row):
    return lax.reduce_window(row, row.dtype.type(0), lax.add, (3,), (1,), "SAME")


def attention(row):
    scores = row[:, None] * row[None, :]
    return jax.nn.softmax(scores, axis=1) @ row


def loop(row):
    step = lambda carry, x: (carry * x, carry + x)
    last, every = lax.scan(step, row.sum(), row)
    return lax.while_loop(lambda x: x.sum() > 9, lambda x: x / 2, lax.stop_gradient(every * last))


ROWS = {
    "elementwise": lambda row: jnp.where(row > 0, jnp.sin(row), row),
    "sum": lambda row: row.sum(),
    "max": lambda row: row.max() * row.min(),
    "mean and spread": lambda row: (row - row.mean()) / row.std(),
    "product": jnp.prod,
    "logsumexp": jax.nn.logsumexp,
    "size": lambda row: row * row.size,
    "one of found place": lambda row: row[jnp.argmax(row)],
    "several": lambda row: row[jnp.array([0, 2, -1])],
    "several, filled": lambda row: row.at[jnp.array([0, 2])].get(mode="fill", fill_value=0),
    "several, clipped": lambda row: row.at[jnp.array([0, 2])].get(mode="clip"),
    "slice": lambda row: row[1:] - row[:-1],
    "strided": lambda row: row[::2],
    "reversed": lambda row: row[::-1],
    "window at": lambda row: lax.dynamic_slice(row, (jnp.argmin(row),), (1,)),
    "window at, in 32 bits": lambda row: lax.dynamic_slice(
        row, (jnp.argmin(row).astype(np.int32),), (1,)),
    "window set": lambda row: lax.dynamic_update_slice(row, row[:1], (jnp.argmax(row),)),
    "set": lambda row: row.at[jnp.argmin(row)].set(0),
    "added": lambda row: row.at[jnp.array([0, 2])].add(1),
    "scattered": lambda row: jnp.zeros_like(row).at[jnp.argsort(row)].add(row, mode="clip"),
    "part set": lambda row: row.at[1:].set(0),
    "matrix set": lambda row: (row[:, None] * row[None]).at[
        jnp.array([0, 1])].set(row[None]).sum(1),
    "matrix part": lambda row: (row[:, None] * row[None]).at[1:].set((row[1:, None] * row[None]).at[
        :, jnp.array([1, 0, -1])].set(jnp.broadcast_to(row[1:, None], (row.size - 1, 3)))).sum(1),
    "matrix element": lambda row: (row[:, None] * row[None]).at[
        jnp.arange(row.size), jnp.arange(row.size)].set(0).sum(1),
    "sorted": lambda row: jnp.sort(row) * row[jnp.argsort(row)],
    "running sum": lambda row: jnp.cumsum(row) / jnp.cumsum(jnp.ones_like(row)),
    "associative scan": lambda row: lax.associative_scan(jnp.add, row),
    "running max": lambda row: lax.cummax(row),
    "joined": lambda row: jnp.concatenate([row, row[1:]]),
    "padded": lambda row: jnp.pad(row, (1, 2)),
    "tiled by its size": lambda row: lax.tile(row, (row.size,)).sum(),
    "reshaped": lambda row: (row[:, None] * row[None]).reshape(-1),
    "convolution": lambda row: jnp.convolve(row, row[:2]),
    "windows": of_a_window,
    "attention": attention,
    "loops": loop,
    "branch": lambda row: lax.cond(row.sum() > 0, jnp.sin, jnp.cos, row),
    "solve": lambda row: jnp.linalg.solve(
        row[:, None] * row[None] + jnp.eye(row.size, dtype=row.dtype), row),
    "random": lambda row: row * jax.random.normal(jax.random.key(0), row.shape, row.dtype),
    "permuted": lambda row: jax.random.permutation(jax.random.key(0), row),
}  # fmt: skip
# All that promotes in single precision does so in double, where integers are of two types.
WAYS = {
    "single": {},
    "packed": dict(layout="packed"),
    "padded": dict(layout="padded"),
    "chunks": dict(batch_size=2),
    "buckets": dict(buckets=2),
    "grouped": dict(layout="grouped"),  # which needs lengths that are known
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.each_commit(40)
def test_rows(name, way):
    """Values and derivatives, with lengths that are known or traced, of either type of integers."""
    x64 = way != "single"
    with strict(x64):
        data, lengths = jnp.linspace(0.1, 2, 10), np.array([3, 2, 5], np.int64 if x64 else np.int32)
        f = bx.vmap(ROWS[name], **WAYS[way])

        def total(data, lengths):
            out = f(bx.Ragged(data, lengths, 6))
            return jnp.sum(out.data if isinstance(out, bx.Ragged) else out)

        run = jax.value_and_grad(total)
        if way == "grouped":
            jax.make_jaxpr(lambda data: run(data, lengths))(data)
        else:
            jax.make_jaxpr(run)(data, lengths)


def exchanged():
    """Parts of rows sent to others, with each number of another type."""
    places = [np.zeros((3, 3), t) for t in (np.int32, np.uint32, np.int16, np.int32)]
    exchange = lambda x, *places: lax.ragged_all_to_all(x, x, *places, axis_name="i")
    return bx.vmap(exchange, axis_name="i")(jnp.ones((3, 4)), *map(jnp.asarray, places))


def on_devices():
    rows = bx.Ragged(jnp.linspace(0.1, 2, 10), np.array([3, 2, 1, 1, 3], np.int32))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    f = bx.vmap(lambda row: row / row.sum(), mesh=mesh)
    total = lambda data: f(bx.Ragged(data, rows.lengths)).data.sum()
    return f(rows), jax.make_jaxpr(jax.grad(total))(rows.data)


X = np.linspace(0.1, 2, 14, dtype=np.float32).reshape(7, 2)
ROWS_OF_X = bx.Ragged(X[:, 0], np.array([3, 4], np.int32))
OTHERS = {
    **{
        kind: lambda kind=kind: jax.make_jaxpr(
            jax.jacrev(bx.vmap(jnp.sin, batch_size=3, out_axes=bx.Reduce(kind)))
        )(X)
        for kind in ("sum", "mean", "max", "min", "prod", "logsumexp", "var")
    },
    "argmax": lambda: bx.vmap(jnp.sin, batch_size=3, out_axes=bx.Reduce("argmax"))(X),
    "reductions of a map": lambda: bx.map(
        lambda x: (x, x), X, out_axes=(bx.Reduce("var"), bx.Reduce("logsumexp")), batch_size=3
    ).reduced,
    "exchanges": exchanged,
    "rows on devices": on_devices,
    "map": lambda: bx.map(lambda x, key: x + jax.random.normal(key, x.shape, x.dtype), X,
                          key=jax.random.key(0), batch_size=3).outputs,
    "map of rows": lambda: bx.map(lambda row: row / row.sum(), ROWS_OF_X).outputs,
    "check": lambda: bx.check(lambda x: x / x.sum())(X),
    "check of rows": lambda: bx.check(jnp.sort)(ROWS_OF_X),
    "find_nonfinite": lambda: bx.find_nonfinite(lambda x: jnp.log(x - x[:1]).sum())(X),
}  # fmt: skip


@in_both_precisions
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.compiles(300)
@pytest.mark.each_commit(9)
def test_others(name, x64):
    with strict(x64):
        OTHERS[name]()


PROMOTIONS = {
    "ranks": (lambda x: (jnp.ones((2, 2), x.dtype) + x)[0], ValueError, "rank_promotion"),
    "dtypes": (lambda x: x * jnp.arange(2), jax.dtypes.TypePromotionError, "strict"),
}
BATCHED = {
    "vmap": lambda f: bx.vmap(f)(X),
    "chunks": lambda f: bx.vmap(f, batch_size=3)(X),
    "rows": lambda f: bx.vmap(lambda row: f(row[:2]))(ROWS_OF_X),
    "scan": lambda f: bx.scan(lambda c, x: (c, f(x)))(0, X),
    "auto_vmap": lambda f: bx.auto_vmap("(n)->(n)")(f)(X),
}  # fmt: skip


@pytest.mark.parametrize("way", BATCHED)
@pytest.mark.parametrize("of", PROMOTIONS)
def test_what_the_user_promotes_is_refused(of, way):
    fun, error, words = PROMOTIONS[of]
    with strict(x64=False), pytest.raises(error, match=words):
        BATCHED[way](fun)
    BATCHED[way](fun)  # and elsewhere is not
