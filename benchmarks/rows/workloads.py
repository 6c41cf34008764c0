"""Functions of one row, and the same by hand for all rows: padded and masked, or packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import batchax as bx

Weights = Any


@dataclass(frozen=True)
class Rows:
    """One batch of rows in every form that the programs take.

    Attributes:
      ragged: for batchax.
      padded: shape (B, N, ...).
      segments: the row of each element that `ragged` holds.
    """

    ragged: bx.Ragged
    padded: Any
    segments: Any

    @property
    def lengths(self) -> Any:
        """Of the rows."""
        return self.ragged.lengths

    @property
    def mask(self) -> Any:
        """Which elements of `padded` belong to a row."""
        return jnp.arange(self.padded.shape[1]) < self.lengths[:, None]


jax.tree_util.register_dataclass(Rows, ["ragged", "padded", "segments"], [])


@dataclass(frozen=True)
class RowWorkload:
    """A function of one row and of weights that all rows share.

    Attributes:
      name: what it does.
      row: the function of one row.
      padded: the same for all rows, by hand, on padded rows.
      packed: the same on packed rows, where there is such a way.
      width: features of an element of a row; None for scalars, 0 for indices into a table.
      weights: makes the weights from a random generator.
      token_wise: whether nearly all of its work is for each element by itself.
      buckets: in how many size classes batchax runs it, if asked to.
      long_tail: whether rows are of `tailed_lengths`, not of `lengths`.
      published: whether rows are of `published_lengths`.
      images: whether rows are of `image_sizes`, ragged along two axes.
      known: whether these are known while the program is compiled.
      times: how many times as many rows as others it has.
    """

    name: str
    row: Callable[[Any, Weights], Any]
    padded: Callable[[Rows, Weights], Any]
    packed: Callable[[Rows, Weights], Any] | None
    width: int | None
    weights: Callable[[np.random.Generator], Weights]
    token_wise: bool = False
    buckets: int | None = None
    long_tail: bool = False
    published: bool = False
    images: bool = False
    known: bool = False
    times: int = 1


TABLE = 5000


def lengths(count: int, seed: int = 0) -> np.ndarray:
    """Lognormal lengths, whose longest is about four times their mean."""
    drawn = np.random.default_rng(seed).lognormal(3.5, 0.72, count)
    return np.maximum(1, drawn).astype(np.int32)


def tailed_lengths(seed: int = 0) -> np.ndarray:
    """Lengths of 96 rows, mostly much shorter than `TAIL_BOUND`, to which they are padded."""
    drawn = np.random.default_rng(seed).lognormal(3.2, 0.8, 96)
    return np.clip(drawn, 1, TAIL_BOUND).astype(np.int32)


TAIL_BOUND = 256


def published_lengths(seed: int = 0) -> np.ndarray:
    """16 lengths of mean 64, the longest 256: as those of published figures for encoders."""
    drawn = np.random.default_rng(seed).lognormal(0, 0.8, 15)
    others = np.maximum(1, np.round(drawn * (16 * 64 - 256) / drawn.sum()))
    return np.append(np.minimum(others, 256), 256).astype(np.int32)


def image_sizes(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Lognormal heights and widths, from 4 to 64."""
    drawn = np.random.default_rng(seed).lognormal(3, 0.5, (2, count))
    heights, widths = np.clip(drawn, 4, 64).astype(np.int32)
    return heights, widths


def data(workload: RowWorkload, count: int) -> tuple[Rows, Weights]:
    """A batch of `count` rows, or fewer, and weights."""
    generator = np.random.default_rng(1)
    if workload.images:
        sizes = image_sizes(count)
        flat = generator.normal(size=(int(np.prod(sizes, 0).sum()), 3))
        most = tuple(int(n.max()) for n in sizes)
        known = bx.Ragged(jnp.asarray(flat, jnp.float32), sizes, most, axis=(0, 1))
        images = bx.Ragged(known.data, tuple(map(jnp.asarray, sizes)), most, axis=(0, 1))
        return Rows(images, known.to_padded(), None), workload.weights(generator)
    sizes = tailed_lengths()[:count] if workload.long_tail else lengths(count * workload.times)
    sizes = published_lengths()[-count:] if workload.published else sizes
    bound = TAIL_BOUND if workload.long_tail else int(sizes.max())
    total = int(sizes.sum())
    if workload.width == 0:
        flat = jnp.asarray(generator.integers(0, TABLE, total))
    else:
        shape = (total,) if workload.width is None else (total, workload.width)
        flat = jnp.asarray(generator.normal(size=shape), jnp.float32)
    ragged = bx.Ragged(flat, jnp.asarray(sizes), bound)
    segments = jnp.asarray(np.repeat(np.arange(len(sizes)), sizes))
    return Rows(ragged, ragged.to_padded(), segments), workload.weights(generator)


def _dense(*shapes: tuple[int, ...]) -> Callable[[np.random.Generator], list[Any]]:
    def make(generator: np.random.Generator) -> list[Any]:
        return [jnp.asarray(generator.normal(size=s) / np.sqrt(s[0]), jnp.float32) for s in shapes]

    return make


def _network(x: Any, weights: Weights) -> Any:
    first, second = weights
    return jax.nn.gelu(x @ first) @ second


def _pooled_network(x: Any, weights: Weights) -> Any:
    return _network(x, weights).mean(0)


def _pooled_network_padded(rows: Rows, weights: Weights) -> Any:
    y = jnp.where(rows.mask[..., None], _network(rows.padded, weights), 0)
    return y.sum(1) / rows.lengths[:, None]


def _pooled_network_packed(rows: Rows, weights: Weights) -> Any:
    y = _network(rows.ragged.data, weights)
    sums = jax.ops.segment_sum(y, rows.segments, len(rows.ragged), indices_are_sorted=True)
    return sums / rows.lengths[:, None]


def _attention(x: Any, weights: Weights) -> Any:
    queries, keys, values = (x @ w for w in weights)
    scores = queries @ keys.T / np.sqrt(queries.shape[-1])
    return jax.nn.softmax(scores) @ values


def _attention_padded(rows: Rows, weights: Weights) -> Any:
    queries, keys, values = (rows.padded @ w for w in weights)
    scores = jnp.einsum("bid,bjd->bij", queries, keys) / np.sqrt(queries.shape[-1])
    scores = jnp.where(rows.mask[:, None, :], scores, -jnp.inf)
    return jnp.where(rows.mask[..., None], jax.nn.softmax(scores) @ values, 0)


def _recurrence(x: Any, weights: Weights) -> Any:
    inner, outer = weights

    def step(state: Any, x: Any) -> tuple[Any, None]:
        return jnp.tanh(state @ inner + x @ outer), None

    return lax.scan(step, jnp.zeros(inner.shape[0]), x)[0]


def _recurrence_padded(rows: Rows, weights: Weights) -> Any:
    inner, outer = weights

    def step(state: Any, at: Any) -> tuple[Any, None]:
        x, mask = at
        return jnp.where(mask[:, None], jnp.tanh(state @ inner + x @ outer), state), None

    start = jnp.zeros((rows.padded.shape[0], inner.shape[0]))
    return lax.scan(step, start, (rows.padded.swapaxes(0, 1), rows.mask.T))[0]


def _sorted(x: Any, weights: Weights) -> Any:
    return jnp.sort(x)


def _sorted_padded(rows: Rows, weights: Weights) -> Any:
    return jnp.sort(jnp.where(rows.mask, rows.padded, jnp.inf), axis=1)


def _bag(indices: Any, table: Any) -> Any:
    return table[indices].sum(0)


def _bag_padded(rows: Rows, table: Any) -> Any:
    return jnp.where(rows.mask[..., None], table[rows.padded], 0).sum(1)


def _bag_packed(rows: Rows, table: Any) -> Any:
    found = table[rows.ragged.data]
    return jax.ops.segment_sum(found, rows.segments, len(rows.ragged), indices_are_sorted=True)


def _columns(x: Any, weights: Weights) -> Any:
    return jax.nn.softmax(x, 0)


def _columns_padded(rows: Rows, weights: Weights) -> Any:
    return jax.nn.softmax(jnp.where(_inside(rows)[0], rows.padded, -jnp.inf), 1)


def _softplus(x: Any, weights: Weights) -> Any:
    return jax.nn.softplus(x)


def _softplus_padded(rows: Rows, weights: Weights) -> Any:
    return jnp.where(rows.mask, jax.nn.softplus(rows.padded), 0)


def _softplus_packed(rows: Rows, weights: Weights) -> Any:
    return jax.nn.softplus(rows.ragged.data)


def _block(x: Any, weights: Weights) -> Any:
    x = x + _attention(x, weights[:3])
    return x + _network(x, weights[3:])


def _block_padded(rows: Rows, weights: Weights) -> Any:
    x = rows.padded + _attention_padded(rows, weights[:3])
    return jnp.where(rows.mask[..., None], x + _network(x, weights[3:]), 0)


HEADS = 8


def _encoded(x: Any, weights: Weights, mask: Any = None) -> Any:
    """An encoder layer, of one row or, with a mask, of padded rows."""
    queries, keys, values, out, first, second = weights
    split = lambda y: y.reshape(*y.shape[:-1], HEADS, -1)
    scores = jnp.einsum("...ihd,...jhd->...hij", split(x @ queries), split(x @ keys))
    scores = scores / np.sqrt(x.shape[-1] // HEADS)
    if mask is not None:
        scores = jnp.where(mask[:, None, None, :], scores, -jnp.inf)
    mixed = jnp.einsum("...hij,...jhd->...ihd", jax.nn.softmax(scores), split(x @ values))
    x = jax.nn.standardize(x + mixed.reshape(x.shape) @ out)
    return jax.nn.standardize(x + jax.nn.gelu(x @ first) @ second)


def _encoder_padded(rows: Rows, weights: Weights) -> Any:
    return jnp.where(rows.mask[..., None], _encoded(rows.padded, weights, rows.mask), 0)


def _convolved(x: Any, weights: Weights) -> Any:
    """Images, with one in front of another, through two convolutions."""
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, weights, (1, 1), "SAME", dimension_numbers=dims)


def _image(x: Any, weights: Weights) -> Any:
    for kernel in weights:
        x = jax.nn.relu(_convolved(x[None], kernel)[0])
    return x.mean((0, 1))


def _inside(rows: Rows) -> Any:
    """Which pixels belong to an image, and how many each has."""
    heights, widths = rows.lengths
    _, most, widest, _ = rows.padded.shape
    inside = jnp.arange(most)[:, None] < heights[:, None, None]
    inside &= jnp.arange(widest) < widths[:, None, None]
    return inside[..., None], (heights * widths)[:, None]


def _images_padded(rows: Rows, weights: Weights) -> Any:
    (inside, pixels), x = _inside(rows), rows.padded
    for kernel in weights:
        x = jnp.where(inside, jax.nn.relu(_convolved(x, kernel)), 0)
    return x.sum((1, 2)) / pixels


def _pixels(x: Any, weights: Weights) -> Any:
    return _network(x, weights).mean((0, 1))


def _pixels_padded(rows: Rows, weights: Weights) -> Any:
    inside, pixels = _inside(rows)
    return jnp.where(inside, _network(rows.padded, weights), 0).sum((1, 2)) / pixels


def _channels(x: Any, weights: Weights) -> Any:
    return x.mean((0, 1)), x.max((0, 1))


def _channels_padded(rows: Rows, weights: Weights) -> Any:
    (inside, pixels), x = _inside(rows), rows.padded
    mean = jnp.where(inside, x, 0).sum((1, 2)) / pixels
    return mean, jnp.where(inside, x, -jnp.inf).max((1, 2))


_RECURRENCE = RowWorkload(
    "recurrence", _recurrence, _recurrence_padded, None, 64, _dense((64, 64), (64, 64))
)

_ATTENTION = RowWorkload(
    "attention",
    _attention,
    _attention_padded,
    None,
    32,
    _dense((32, 32), (32, 32), (32, 32)),
)

_IMAGES = RowWorkload(
    "images, two convolutions",
    _image,
    _images_padded,
    None,
    3,
    _dense((3, 3, 3, 8), (3, 3, 8, 8)),
    images=True,
    known=True,
)

_WORKLOADS = [
    RowWorkload(
        "network for each element, mean",
        _pooled_network,
        _pooled_network_padded,
        _pooled_network_packed,
        64,
        _dense((64, 256), (256, 64)),
        token_wise=True,
    ),
    RowWorkload(
        "points through two matrices of 3, mean",
        _pooled_network,
        _pooled_network_padded,
        _pooled_network_packed,
        3,
        _dense((3, 3), (3, 3)),
        token_wise=True,
    ),
    _ATTENTION,
    replace(_ATTENTION, name="attention, buckets=4", buckets=4),
    replace(_ATTENTION, name="attention, longer tail", long_tail=True),
    replace(_ATTENTION, name="attention, longer tail, buckets=4", buckets=4, long_tail=True),
    RowWorkload(
        "attention, then a network",
        _block,
        _block_padded,
        None,
        32,
        _dense((32, 32), (32, 32), (32, 32), (32, 128), (128, 32)),
    ),
    RowWorkload(
        "transformer encoder, 16 rows",
        _encoded,
        _encoder_padded,
        None,
        256,
        _dense(*[(256, 256)] * 4, (256, 1024), (1024, 256)),
        published=True,
    ),
    _RECURRENCE,
    # A scan takes as many steps as its longest row: rows are put in classes by the price of all.
    replace(_RECURRENCE, name="recurrence, longer tail", long_tail=True),
    # 127,019 elements, an odd number: XLA for CPUs does not vectorize them as they are.
    RowWorkload(
        "softplus, 3,072 rows",
        _softplus,
        _softplus_padded,
        _softplus_packed,
        None,
        _dense(),
        token_wise=True,
        times=24,
    ),
    RowWorkload("sort", _sorted, _sorted_padded, None, None, _dense()),
    RowWorkload(
        "embedding bag",
        _bag,
        _bag_padded,
        _bag_packed,
        0,
        lambda generator: _dense((TABLE, 64))(generator)[0],
        token_wise=True,
    ),
    RowWorkload(
        "images, softmax of columns", _columns, _columns_padded, None, 3, _dense(), images=True
    ),
    _IMAGES,
    replace(_IMAGES, name="images, two convolutions, buckets=4", buckets=4),
    replace(
        _IMAGES,
        name="images, two convolutions, 32 channels",
        weights=_dense((3, 3, 3, 32), (3, 3, 32, 32)),
        known=False,
    ),
    # Packed along two axes. Padded, in size buckets, values take 9x the time, gradients 20x.
    RowWorkload(
        "images, network for each pixel, mean",
        _pixels,
        _pixels_padded,
        None,
        3,
        _dense((3, 16), (16, 8)),
        token_wise=True,
        images=True,
    ),
    RowWorkload(
        "images, mean and maximum of each channel",
        _channels,
        _channels_padded,
        None,
        3,
        _dense(),
        images=True,
    ),
]

WORKLOADS = {w.name: w for w in _WORKLOADS}
