"""Features by name, and calls of several of them at once, next to the loop over examples.

A feature brings arguments, options, or what is in or around the function; whatever goes together is
one call, `call`, and what that should give is `reference`.
"""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import batchax as bx

LANES, OUTER = 5, 2
X = np.cos(np.arange(LANES * 3.0)).reshape(LANES, 3)
TILES = np.sin(np.arange(LANES * 2.0))
LENGTHS = np.array([3, 1, 4, 2, 3], np.int32)
ROWS = [np.cos(i + np.arange(float(n))) for i, n in enumerate(LENGTHS)]

OPTIONS = {
    "mesh": {"mesh": "all"},
    "chunks": {"batch_size": 2},
    "progress": {"progress": lambda done, total: None},
    "compact": {"divergence": "compact"},
    "packed": {"layout": "packed"},
    "padded": {"layout": "padded"},
    "grouped": {"layout": "grouped"},
    "buckets": {"buckets": 2},
}

# What each feature is, and the options or calls that it is written as.
FEATURES = {
    "mesh": ("examples sharded over devices", '`mesh="all"`'),
    "chunks": ("chunks", "`batch_size=2`"),
    "progress": ("a progress bar or callback", "`progress=`"),
    "compact": ("compaction of divergent loops", '`divergence="compact"`'),
    "rows": ("variable-length rows", "`Ragged`"),
    "packed": ("packed rows", '`layout="packed"`'),
    "padded": ("padded rows", '`layout="padded"`'),
    "grouped": ("rows grouped by length", '`layout="grouped"`'),
    "buckets": ("buckets of similar length", "`buckets=2`"),
    "rule": ("a function with a batching rule", "`custom_vmap`"),
    "keys": ("a random key for each example", "`split_key`"),
    "tiles": ("blocks of an axis as examples", "`tiles`"),
    "sizes": ("a size for each example", "`size`"),
    "reduce": ("results reduced over the batch", '`Reduce("mean")`'),
    "names": ("collectives", "`axis_name=`"),
    "grad": ("reverse mode", "`jax.grad` around"),
    "jvp": ("forward mode", "`jax.jvp` around"),
    "jax.vmap": ("nested vmap", "`jax.vmap` around"),
    "bx.vmap": ("nested vmap", "`bx.vmap` around"),
    "jit": ("compiled", "`jax.jit` around"),
}

# What cannot be had without another feature.
NEEDS = {
    "progress": "chunks",
    "packed": "rows",
    "padded": "rows",
    "grouped": "rows",
    "buckets": "rows",
}
# One option, of which a call has one value.
LAYOUTS = {"packed", "padded", "grouped"}


def complete(features):
    """With what features need."""
    return frozenset(features) | {NEEDS[f] for f in features if f in NEEDS}


@bx.custom_vmap
def by_rule(x):
    return jnp.sin(x) * 2


@by_rule.def_vmap
def _(axis_size, in_batched, x):
    return 2 * jnp.sin(x), True


def step(x):
    """A loop that takes another number of steps in each lane."""
    more = lambda c: (c[0] < 3) & (jnp.sum(c[1]) < 2.0)
    return bx.bounded_while(more, lambda c: (c[0] + 1, c[1] * 0.5 + 1.0), (0, x), 4)[1]


def example(features, x, row=None, tile=None, key=None, n=None):
    """What a lane computes by itself: a dict of results."""
    y = jnp.tanh(x) * 1.5
    if "compact" in features:
        y = step(y)
    if "rule" in features:
        y = y + by_rule(x)
    if tile is not None:
        y = y + jnp.cumsum(tile)[-1] * x
    if key is not None:
        y = y + jax.random.uniform(key, (3,), x.dtype)
    if n is not None:
        y = y + jnp.sum(jnp.arange(n) * 0.1) * x
    out = {"y": y}
    if row is not None:
        out["y"] = y + jnp.max(row) * x + jnp.tanh(row).sum()
        out["row"] = row * x[0] + jnp.cumsum(row)
    if "reduce" in features:
        out["total"] = jnp.sin(out["y"]).sum()
    return out


def rows(x):
    return bx.Ragged(np.concatenate(ROWS) * x[0, 0], LENGTHS)


def key(x):
    return jax.random.fold_in(jax.random.key(3), (x[0, 0] > 0.7).astype(int))


# By feature: the name of the argument, its entry in `in_axes`, the batch of it, what a lane has of
# it. They depend on `x`, so that what is around the batch differentiates and batches them, too.
KINDS = {
    "rows": ("row", 0, rows, lambda x, i: ROWS[i] * x[0, 0]),
    "tiles": (
        "tile",
        bx.tiles(size=2),
        lambda x: TILES * x[0, 1],
        lambda x, i: TILES[2 * i : 2 * i + 2] * x[0, 1],
    ),
    "keys": ("key", bx.split_key, key, lambda x, i: jax.random.fold_in(key(x), i)),
    "sizes": ("n", bx.size("n", max_size=4), lambda x: LENGTHS, lambda x, i: int(LENGTHS[i])),
}


def batched(features):
    """A function of `x`, batched with features: a list of arrays."""
    kinds = [KINDS[k] for k in KINDS if k in features]
    options = {k: v for f in features for k, v in OPTIONS.get(f, {}).items()}
    if "names" in features:
        options["axis_name"] = "i"

    def fun(x, *others):
        out = example(features, x, **dict(zip((k[0] for k in kinds), others, strict=True)))
        if "names" in features:
            out["y"] = out["y"] - lax.pmean(out["y"], "i")
        return out

    out_axes = {"y": 0}
    if "reduce" in features:
        out_axes["total"] = bx.Reduce("mean")
    mapped = bx.vmap(fun, (0, *(k[1] for k in kinds)), out_axes, **options)

    def run(x):
        out = mapped(x, *(k[2](x) for k in kinds))
        return [v.data if isinstance(v, bx.Ragged) else v for _, v in sorted(out.items())]

    return run


def looped(features):
    """The same by a loop over examples."""

    def run(x):
        kinds = [KINDS[k] for k in KINDS if k in features]
        lanes = [
            example(features, x[i], **{name: at(x, i) for name, _, _, at in kinds})
            for i in range(LANES)
        ]
        out = {name: [lane[name] for lane in lanes] for name in lanes[0]}
        out["y"] = jnp.stack(out["y"])
        if "names" in features:
            out["y"] = out["y"] - out["y"].mean(0)
        if "row" in out:
            out["row"] = jnp.concatenate(out["row"])
        if "total" in out:
            out["total"] = jnp.mean(jnp.stack(out["total"]))
        return [v for _, v in sorted(out.items())]

    return run


def around(features, run, vmap=None):
    """`run` with derivatives, a vmap and `jit` around, as the features say; and its argument.

    vmap: what the vmaps around are; None: each as it is named.
    """
    x = jnp.asarray(X)
    if "grad" in features:
        total = lambda x, run=run: sum(jnp.sum(jnp.sin(v)) for v in run(x))
        run = lambda x: [jax.grad(total)(x)]
    if "jvp" in features:
        run = lambda x, f=run: [*jax.jvp(f, (x,), (jnp.cos(x),))]
    for name, theirs in [("jax.vmap", jax.vmap), ("bx.vmap", bx.vmap)]:
        if name in features:
            x = jnp.stack([x, 1 - x / 2])
            run = (vmap or theirs)(run)
    return (jax.jit(run) if "jit" in features and vmap is None else run), x


def by_loop(run):
    """A vmap that is a loop."""
    return lambda xs: jax.tree.map(lambda *ys: jnp.stack(ys), *(run(x) for x in xs))


def call(features):
    features = complete(features)
    run, x = around(features, batched(features))
    return run(x)


def reference(features):
    features = complete(features)
    run, x = around(features, looped(features), by_loop)
    return run(x)


# What is refused together, by what the error says; and so is whatever more there is in a call.
REFUSED = {
    frozenset({"chunks", "packed"}): 'layout="packed" does not go with batch_size',
    frozenset({"buckets", "grouped"}): 'layout="grouped" runs rows of one length together',
    frozenset({"grouped", "mesh"}): 'mesh does not support layout="grouped"',
    frozenset({"grouped", "names"}): "it can only run for rows of one length at a time",
    frozenset({"buckets", "names"}): "the rows of one bucket run at a time",
    frozenset({"mesh", "rows", "names"}): "a device has only its own rows",
    frozenset({"mesh", "sizes", "names"}): "a device has only its own rows",
}


def runs(features):
    """Whether features go together in one call."""
    features = complete(features)
    return len(LAYOUTS & features) < 2 and not any(refused <= features for refused in REFUSED)


def together(size):
    """All features that go together, so many at a time."""
    return [chosen for chosen in map(frozenset, combinations(FEATURES, size)) if runs(chosen)]


def covering_array(most=10):
    """Sets of features, at most so many, in which all pairs that go together are; and triples.

    All in one program each, which is cheaper than its operations one by one.
    """
    pairs, triples = set(together(2)), set(together(3))
    rows = []
    while pairs:
        row = complete(min(pairs, key=sorted) | {"jit"})
        while len(row) < most:
            new = lambda f, row=row: (
                sum(p <= row | {f} for p in pairs),
                sum(t <= row | {f} for t in triples),
                f,
            )
            more = [f for f in FEATURES if f not in row and runs(row | {f})]
            if not more:
                break
            row = complete(row | {max(more, key=new)})
        rows.append(row)
        pairs = {p for p in pairs if not p <= row}
        triples = {t for t in triples if not t <= row}
    return rows


def refusal(features):
    """The error of a call with these features."""
    try:
        call(features)
    except (bx.UnsupportedError, bx.ArgumentTypeError) as error:
        return error
    raise AssertionError(f"{sorted(features)} are not refused")


def page():
    """`docs/reference/together.md`."""
    lines = [PREFACE, "| feature | in a call |", "|---|---|"]
    lines += [f"| {about} | {written} |" for about, written in FEATURES.values()]
    lines += [REFUSALS, "| combination | error |", "|---|---|"]
    for features in REFUSED:
        names = " and ".join(FEATURES[f][1] for f in FEATURES if f in features)
        text = " ".join(str(refusal(features)).split())
        lines.append(f"| {names} | {text} |")
    return "\n".join(lines) + "\n"


PREFACE = """\
# Option compatibility

The suite runs every pair of these features, and most triples, in calls with up to ten of them, and
compares the results with the loop over examples. A nightly run covers every triple. `make docs`
writes this page.
"""

REFUSALS = """
`progress=` needs `batch_size`. `layout=` and `buckets=` need a `Ragged`. A call has one `layout`.

## Not supported

These combinations raise an error. All other pairs and triples work with known lengths of rows. With
traced lengths, as under `jax.jit`, `layout="grouped"` raises, and so does `buckets=` with
`batch_size=`.
"""
