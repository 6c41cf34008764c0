"""Networks and rows: Flax, Equinox, Haiku, molecules, graphs, tracks, images."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import batchax as bx
from benchmarks.libraries.program import program
from benchmarks.workload import integers, normal, uniform


def _sizes(n: int, low: int, high: int) -> Any:
    return np.random.default_rng(4).integers(low, high + 1, n).astype(np.int32)


def _rows(sizes: Any, *shape: int, bound: int | None = None) -> Any:
    """Rows of numbers, whose lengths a program that takes them does not know."""
    data = normal(int(sizes.sum()), *shape)
    return bx.Ragged(data, jnp.asarray(sizes), bound or int(sizes.max()))


def _padded(rows: Any, *others: Any) -> tuple[Any, ...]:
    """The rows as arrays with padding, and their lengths."""
    return rows.to_padded(), rows.lengths, *others


def _mask(padded: Any, lengths: Any) -> Any:
    return jnp.arange(padded.shape[1]) < lengths[:, None]


# --- a language model on sequences of different lengths


WORDS, WIDTH = 512, 64


def _weights() -> dict[str, Any]:
    shapes = {"in": (WORDS, WIDTH), "out": (WIDTH, WORDS), "up": (WIDTH, 256), "down": (256, WIDTH)}
    shapes |= dict.fromkeys(("query", "key", "value"), (WIDTH, WIDTH))
    return {k: normal(*s, seed=i) / s[0] ** 0.5 for i, (k, s) in enumerate(shapes.items())}


def _logits(weights: Any, tokens: Any) -> Any:
    x = weights["in"][tokens]
    query, key, value = (x @ weights[name] for name in ("query", "key", "value"))
    scores = query @ key.T / WIDTH**0.5
    place = jnp.arange(tokens.shape[0])
    scores = jnp.where(place[:, None] >= place, scores, -1e9)
    x = x + jax.nn.softmax(scores) @ value
    x = x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]
    return jax.nn.log_softmax(x @ weights["out"])


def _sentences(n: int) -> tuple[Any, ...]:
    sizes = np.clip(np.random.default_rng(0).lognormal(3.6, 0.8, n), 2, 256).astype(np.int32)
    tokens = integers(int(sizes.sum()), below=WORDS)
    return bx.Ragged(tokens, jnp.asarray(sizes), 256), _weights()


def _padded_next_token(tokens: Any, lengths: Any, weights: Any) -> Any:
    def one(tokens, length):
        logits = _logits(weights, tokens)
        picked = jnp.take_along_axis(logits[:-1], tokens[1:, None], 1)[:, 0]
        return -jnp.sum(jnp.where(jnp.arange(tokens.size - 1) < length - 1, picked, 0)) / length

    return jax.vmap(one)(tokens, lengths)


@program(
    "JAX",
    "next-token loss, 64 sentences",
    _sentences,
    64,
    in_axes=(0, None),
    instead=_padded_next_token,
    before=_padded,
    looked_at=True,
)
def next_token(tokens, weights):
    logits = _logits(weights, tokens)
    return -jnp.sum(jnp.take_along_axis(logits[:-1], tokens[1:, None], 1)) / tokens.shape[0]


# --- molecules


def _pair_energy(x: Any, among: Any) -> Any:
    away = ~jnp.eye(x.shape[0], dtype=bool) & among
    square = jnp.sum((x[:, None] - x) ** 2, -1)
    inverse = 1 / jnp.where(away, square + 0.5, 1.0) ** 3
    return jnp.sum(jnp.where(away, inverse**2 - inverse, 0)) / 2


def _molecules(n: int) -> tuple[Any, ...]:
    return (_rows(_sizes(n, 5, 60), 3),)


@program(
    "JAX",
    "energies and forces of 300 molecules",
    _molecules,
    300,
    instead=lambda x, lengths: jax.vmap(
        lambda x, m: jax.value_and_grad(_pair_energy)(x, m & m[:, None])
    )(x, _mask(x, lengths)),
    before=_padded,
    looked_at=True,
)
def molecules(x):
    return jax.value_and_grad(lambda x: _pair_energy(x, True))(x)


def _all_pairs(x: Any) -> Any:
    def one(x):
        square = jnp.sum((x[:, None] - x) ** 2, -1)
        near = (square < 0.3) & ~jnp.eye(x.shape[0], dtype=bool)
        return jnp.sum(jnp.where(near, 1 / (square + 0.1), 0))

    return jax.vmap(one)(x)


@program(
    "JAX",
    "neighbors in a cutoff, bx.nonzero, 64 x 60",
    lambda n: (3 * uniform(n, 60, 3),),
    64,
    instead=_all_pairs,
    looked_at=True,
)
def neighbors(x):
    square = jnp.sum((x[:, None] - x) ** 2, -1)
    senders, receivers = bx.nonzero((square < 0.3) & ~jnp.eye(x.shape[0], dtype=bool))
    return jnp.sum(1 / (jnp.sum((x[senders] - x[receivers]) ** 2, -1) + 0.1))


def _graphs(n: int) -> tuple[Any, ...]:
    nodes = _sizes(n, 4, 40)
    edges = nodes * np.random.default_rng(5).integers(1, 6, n).astype(np.int32)
    drawn = np.random.default_rng(6)
    ends = [drawn.integers(0, np.repeat(nodes, edges)) for _ in range(2)]
    ragged = [bx.Ragged(jnp.asarray(e, jnp.int32), jnp.asarray(edges), 200) for e in ends]
    return _rows(nodes, 16), *ragged, normal(32, 16, seed=1) / 6, normal(32, 16, seed=2) / 6


def _message_passing(x: Any, senders: Any, receivers: Any, edge: Any, node: Any, among: Any) -> Any:
    for _ in range(2):
        messages = jnp.tanh(jnp.concatenate([x[senders], x[receivers]], 1) @ edge)
        messages = jnp.where(among, messages, 0)
        gathered = jnp.zeros_like(x).at[receivers].add(messages)
        x = jnp.tanh(jnp.concatenate([x, gathered], 1) @ node)
    return x


def _padded_graphs(x: Any, lengths: Any, senders: Any, receivers: Any, count: Any, *w: Any) -> Any:
    def one(x, m, senders, receivers, count):
        among = jnp.arange(senders.size)[:, None] < count
        x = _message_passing(x, senders, receivers, *w, among)
        return jnp.sum(jnp.where(m[:, None], x, 0), 0)

    return jax.vmap(one)(x, _mask(x, lengths), senders, receivers, count)


@program(
    "JAX",
    "messages on 200 graphs",
    _graphs,
    200,
    in_axes=(0, bx.ragged("e"), bx.ragged("e"), None, None),
    instead=_padded_graphs,
    before=lambda x, s, r, *w: (*_padded(x), s.to_padded(), r.to_padded(), r.lengths, *w),
)
def graphs(x, senders, receivers, edge, node):
    return _message_passing(x, senders, receivers, edge, node, True).sum(0)


# --- tracks and series


def _tracks(n: int) -> tuple[Any, ...]:
    return (_rows(_sizes(n, 10, 400), 2),)


@program(
    "JAX",
    "differences along 2,000 tracks",
    _tracks,
    2000,
    instead=lambda x, ends: jnp.where(
        (jnp.zeros(x.shape[0], bool).at[ends - 1].set(True))[:-1, None], 0, jnp.diff(x, axis=0)
    ),
    before=lambda x: (x.data, jnp.cumsum(x.lengths)),
    looked_at=True,
)
def tracks(x):
    return jnp.diff(x, axis=0)


@program(
    "JAX",
    "speeds along 2,000 tracks",
    _tracks,
    2000,
    instead=lambda x, lengths: jax.vmap(
        lambda x, n: jnp.max(
            jnp.where(
                jnp.arange(x.shape[0] - 2) < n - 2,
                jnp.sqrt(jnp.sum((x[2:] - x[:-2]) ** 2, 1)),
                0,
            )
        )
    )(x, lengths),
    before=_padded,
)
def speeds(x):
    return jnp.max(jnp.sqrt(jnp.sum((x[2:] - x[:-2]) ** 2, 1)))


def _kalman(y: Any, among: Any) -> Any:
    def step(carry, at):
        mean, variance, total = carry
        y, here = at
        variance = variance + 0.1
        spread = variance + 1.0
        gain, error = variance / spread, y - mean
        new = (
            mean + gain * error,
            (1 - gain) * variance,
            total - 0.5 * (error**2 / spread + jnp.log(spread)),
        )
        return jax.tree.map(lambda a, b: jnp.where(here, a, b), new, carry), None

    start = jnp.float32(0), jnp.float32(1), jnp.float32(0)
    return lax.scan(step, start, (y, among))[0][2]


@program(
    "JAX",
    "Kalman filters of 500 series",
    lambda n: (_rows(_sizes(n, 5, 200)),),
    500,
    instead=lambda y, lengths: jax.vmap(_kalman)(y, _mask(y, lengths)),
    before=_padded,
)
def kalman(y):
    return _kalman(y, jnp.ones_like(y, bool))


def _regressions(n: int) -> tuple[Any, ...]:
    sizes = 8 + _sizes(n, 0, 36)
    return _rows(sizes, 4), bx.Ragged(normal(int(sizes.sum()), seed=1), jnp.asarray(sizes), 44)


def _known(rows: Any) -> Any:
    return bx.Ragged(rows.data, np.asarray(rows.lengths), rows.max_length)


@program(
    "JAX",
    "least squares of 200 tables",
    _regressions,
    200,
    in_axes=bx.ragged("n"),
    instead=lambda x, _, y, lengths: jax.vmap(lambda x, y: jnp.linalg.lstsq(x, y)[0])(x, y),
    before=lambda x, y: (*_padded(x), *_padded(y)),
    looked_at=True,
)
def least_squares(x, y):
    return jnp.linalg.lstsq(x, y)[0]


# --- images


def _images(n: int) -> tuple[Any, ...]:
    heights, widths = _sizes(n, 24, 96), _sizes(n, 24, 96)[::-1].copy()
    data = normal(int((heights * widths).sum()), 3)
    sizes = jnp.asarray(heights), jnp.asarray(widths)
    kernels = normal(3, 3, 3, 8, seed=1) / 5, normal(3, 3, 8, 8, seed=2) / 8
    return bx.Ragged(data, sizes, (96, 96), axis=(0, 1)), kernels


def _convolved(x: Any, kernel: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x[None], kernel, (1, 1), "SAME", dimension_numbers=numbers)[0]


def _padded_images(x: Any, sizes: Any, kernels: Any) -> Any:
    def one(x, height, width):
        rows, columns = jnp.arange(x.shape[0]) < height, jnp.arange(x.shape[1]) < width
        among = (rows[:, None] & columns)[..., None]

        def loss(kernels):
            y = x
            for kernel in kernels:
                y = jnp.where(among, jax.nn.relu(_convolved(y, kernel)), 0)
            return jnp.sum(jnp.sum(y, (0, 1)) ** 2) / (height * width) ** 2

        return jax.grad(loss)(kernels)

    return jax.tree.map(lambda g: g.sum(0), jax.vmap(one)(x, *sizes))


@program(
    "JAX",
    "gradient over 32 images of many sizes",
    _images,
    32,
    in_axes=(0, None),
    options={"out_axes": bx.Reduce("sum")},
    instead=_padded_images,
    before=_padded,
    looked_at=True,
)
def images(x, kernels):
    def loss(kernels):
        y = x
        for kernel in kernels:
            y = jax.nn.relu(_convolved(y, kernel))
        return jnp.sum(jnp.mean(y, (0, 1)) ** 2)

    return jax.grad(loss)(kernels)


# --- libraries of networks


@program(
    "Equinox",
    "a GRU over 128 series",
    lambda n: (_rows(_sizes(n, 5, 120), 4),),
    128,
    instead=lambda x, lengths: jax.vmap(lambda x, n: _gru(x, jnp.arange(x.shape[0]) < n))(
        x, lengths
    ),
    before=_padded,
)
def gru(x):
    return _gru(x, jnp.ones(x.shape[0], bool))


def _gru(x: Any, among: Any) -> Any:
    import equinox as eqx

    cell = eqx.nn.GRUCell(4, 32, key=jax.random.key(0))

    def step(state, at):
        x, here = at
        return jnp.where(here, cell(x, state), state), None

    return lax.scan(step, jnp.zeros(32), (x, among))[0]


@program(
    "Equinox",
    "gradients of an MLP for each of 512 examples",
    lambda n: (normal(n, 32), normal(n, 4, seed=1)),
    512,
    uneven=False,
)
def mlp_gradients(x, y):
    import equinox as eqx

    model = eqx.nn.MLP(32, 4, 64, 2, key=jax.random.key(0))
    return eqx.filter_grad(lambda model: jnp.sum((model(x) - y) ** 2))(model).layers[0].weight


@program(
    "Flax",
    "attention over 64 sets",
    lambda n: (_rows(_sizes(n, 4, 100), 32),),
    64,
    instead=lambda x, lengths: jax.vmap(
        lambda x, m: jnp.sum(jnp.where(m[:, None], _attention(x, m[None, None]), 0), 0)
    )(x, _mask(x, lengths)),
    before=_padded,
)
def attention(x):
    return _attention(x, None).sum(0)


def _attention(x: Any, mask: Any) -> Any:
    from flax import linen as nn

    layer = nn.MultiHeadDotProductAttention(num_heads=4)
    weights = layer.init(jax.random.key(0), jnp.zeros((2, 32)))
    return layer.apply(weights, x, mask=mask)


@program(
    "Flax",
    "dropout and a convolution, 128 images",
    lambda n: (normal(n, 16, 16, 3), jax.random.split(jax.random.key(1), n)),
    128,
    uneven=False,
)
def dropout(x, key):
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(8, (3, 3))(x))
            x = nn.Dropout(0.2, deterministic=False)(x)
            return nn.Dense(10)(x.mean((0, 1)))

    net = Net()
    weights = net.init({"params": jax.random.key(0), "dropout": key}, x)
    return net.apply(weights, x, rngs={"dropout": key})


@program(
    "Haiku",
    "an LSTM over 128 series",
    lambda n: (_rows(_sizes(n, 5, 120), 4),),
    128,
    instead=lambda x, lengths: jax.vmap(lambda x, n: _unrolled(x)[n - 1])(x, lengths),
    before=_padded,
)
def unrolled(x):
    return _unrolled(x)[-1]


def _unrolled(x: Any) -> Any:
    import haiku as hk

    def outputs(x):
        core = hk.LSTM(32)
        return hk.Linear(8)(hk.dynamic_unroll(core, x, core.initial_state(None))[0])

    network = hk.without_apply_rng(hk.transform(outputs))
    return network.apply(network.init(jax.random.key(0), jnp.zeros((2, 4))), x)


@program(
    "Haiku",
    "trained to a loss, 64 tasks",
    lambda n: (jax.random.split(jax.random.key(2), n), uniform(n, low=0.5, high=4)),
    64,
    needs=("haiku", "optax"),
)
def trained(key, frequency):
    import haiku as hk
    import optax

    x = jnp.linspace(-1, 1, 32)[:, None]
    y = jnp.sin(frequency * x)
    outputs = lambda x: hk.nets.MLP([16, 16, 1], activation=jnp.tanh)(x)
    network = hk.without_apply_rng(hk.transform(outputs))
    optimizer = optax.adam(0.01)

    def step(carry):
        weights, state, _, count = carry
        loss = lambda weights: jnp.mean((network.apply(weights, x) - y) ** 2)
        value, gradient = jax.value_and_grad(loss)(weights)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(weights, updates), state, value, count + 1

    weights = network.init(key, x)
    start = weights, optimizer.init(weights), jnp.float32(jnp.inf), 0
    return lax.while_loop(lambda c: (c[2] > 1e-3) & (c[3] < 1000), step, start)[2:]


# --- jraph and e3nn: graphs


def _layers() -> list[Any]:
    shapes = [(32, 16), (48, 16), (32, 8)]
    return [normal(*s, seed=i) / s[0] ** 0.5 for i, s in enumerate(shapes)]


def _graph_network(graph: Any, weights: Any) -> Any:
    import jraph

    edge, node, out = weights
    together = lambda *parts: jnp.concatenate(parts, 1)
    network = jraph.GraphNetwork(
        update_edge_fn=lambda _, sent, received, __: jax.nn.relu(together(sent, received) @ edge),
        update_node_fn=lambda x, sent, received, _: jax.nn.relu(together(x, sent, received) @ node),
        update_global_fn=lambda nodes, edges, _: together(nodes, edges) @ out,
    )
    return network(graph).globals


def _two_graphs(x: Any, nodes: Any, senders: Any, receivers: Any, edges: Any, weights: Any) -> Any:
    """Padded as `jraph.pad_with_graphs` does: what is added is a graph of its own."""
    import jraph

    def one(x, nodes, senders, receivers, edges):
        among = jnp.arange(senders.size) < edges
        counts = lambda n, most: jnp.stack([n, most - n])
        graph = jraph.GraphsTuple(
            nodes=jnp.concatenate([x, jnp.zeros_like(x[:1])]),
            edges=None,
            senders=jnp.where(among, senders, x.shape[0]),
            receivers=jnp.where(among, receivers, x.shape[0]),
            globals=jnp.zeros((2, 1)),
            n_node=counts(nodes, x.shape[0] + 1),
            n_edge=counts(edges, senders.size),
        )
        return _graph_network(graph, weights)[0]

    return jax.vmap(one)(x, nodes, senders, receivers, edges)


def _with_layers(n: int) -> tuple[Any, ...]:
    return *_graphs(n)[:3], _layers()


@program(
    "jraph",
    "a graph network on 200 graphs",
    _with_layers,
    200,
    in_axes=(0, bx.ragged("e"), bx.ragged("e"), None),
    instead=_two_graphs,
    before=lambda x, s, r, w: (*_padded(x), s.to_padded(), r.to_padded(), r.lengths, w),
)
def graph_network(x, senders, receivers, weights):
    import jraph

    graph = jraph.GraphsTuple(
        nodes=x,
        edges=None,
        senders=senders,
        receivers=receivers,
        globals=jnp.zeros((1, 1)),
        n_node=jnp.array([x.shape[0]]),
        n_edge=jnp.array([senders.shape[0]]),
    )
    return _graph_network(graph, weights)[0]


def _equivariant(places: Any, senders: Any, receivers: Any, weights: Any, among: Any) -> Any:
    """Energy of one layer of messages."""
    import e3nn_jax as e3nn

    radial, mixed, out = weights
    away = e3nn.IrrepsArray("1o", places[receivers] - places[senders])
    harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", away, True)
    distance = jnp.sqrt(jnp.sum(away.array**2, 1) + 1e-6)
    basis = jnp.where(among, e3nn.bessel(distance, 8, 6.0), 0)
    messages = harmonics * (jax.nn.silu(basis @ radial) @ mixed)
    gathered = e3nn.scatter_sum(messages, dst=receivers, output_size=places.shape[0])
    return jnp.tanh(e3nn.norm(gathered, squared=True).array @ out)


def _bonds(n: int) -> tuple[Any, ...]:
    atoms, senders, receivers = _graphs(n)[:3]
    weights = normal(8, 32, seed=1) / 3, normal(32, 3, seed=2) / 6, normal(3, 8, seed=3)
    return (
        bx.Ragged(atoms.data[:, :3], atoms.lengths, atoms.max_length),
        senders,
        receivers,
        weights,
    )


@program(
    "e3nn",
    "equivariant messages in 200 molecules",
    _bonds,
    200,
    in_axes=(0, bx.ragged("e"), bx.ragged("e"), None),
    needs=("e3nn_jax",),
    instead=lambda x, n, senders, receivers, edges, weights: jax.vmap(
        lambda x, m, s, r, e: jnp.sum(
            jnp.where(
                m[:, None], _equivariant(x, s, r, weights, jnp.arange(s.size)[:, None] < e), 0
            ),
            0,
        )
    )(x, _mask(x, n), senders, receivers, edges),
    before=lambda x, s, r, w: (*_padded(x), s.to_padded(), r.to_padded(), r.lengths, w),
)
def equivariant(places, senders, receivers, weights):
    return _equivariant(places, senders, receivers, weights, True).sum(0)


# --- jax-md and dynamax: rows of atoms and of times


def _lennard_jones(x: Any) -> Any:
    from jax_md import energy, space

    return jax.value_and_grad(energy.lennard_jones_pair(space.free()[0]))(x)


def _far_away(x: Any, lengths: Any) -> Any:
    """Atoms of the padding are beyond the cutoff of all others."""
    aside = 1e3 * (1 + jnp.arange(x.shape[1]))[:, None]
    value, force = jax.vmap(_lennard_jones)(jnp.where(_mask(x, lengths)[..., None], x, aside))
    return value, force


@program(
    "jax-md",
    "Lennard-Jones forces in 200 drops",
    lambda n: (_drops(n),),
    200,
    needs=("jax_md",),
    instead=_far_away,
    before=_padded,
)
def drops(x):
    return _lennard_jones(x)


def _drops(n: int) -> Any:
    """Of atoms near the points of a grid."""
    sizes = _sizes(n, 5, 60)
    grid = np.stack(np.meshgrid(*[np.arange(4)] * 3), -1).reshape(-1, 3)
    places = 1.2 * np.concatenate([grid[:size] for size in sizes])
    rows = bx.Ragged(jnp.asarray(places, float), jnp.asarray(sizes), 60)
    return bx.Ragged(rows.data + 0.05 * normal(*rows.data.shape), rows.lengths, 60)


def _filtered(emissions: Any) -> Any:
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM

    model = LinearGaussianSSM(state_dim=4, emission_dim=2)
    parameters, _ = model.initialize(
        jax.random.key(0),
        dynamics_weights=jnp.eye(4) + 0.1 * jnp.eye(4, k=2),
        emission_weights=jnp.eye(2, 4),
    )
    return model.filter(parameters, emissions).filtered_means


@program(
    "dynamax",
    "Kalman filters of 128 tracks",
    lambda n: (_rows(_sizes(n, 10, 200), 2),),
    128,
    instead=lambda y, lengths: jax.vmap(lambda y, n: _filtered(y)[n - 1])(y, lengths),
    before=_padded,
)
def last_state(y):
    return _filtered(y)[-1]
