"""Batches of examples with the batch axis anywhere."""

import itertools

from support.oracle import example

SIZE = 3


def batch(shape, axis, dtype=float, seed=0, size=SIZE, **kwargs):
    """A batch of `size` examples of `shape` along `axis`, or one example for None."""
    if axis is not None:
        shape = (*shape[:axis], size, *shape[axis:])
    return example(shape, dtype, seed, **kwargs)


def on_axes(shape, position, **options):
    """A batch of four examples of `shape`, the batch axis at `position` or absent."""
    return batch(shape, position, size=4, **options)


def positions(*ranks):
    """Every combination of batch axes, or None, for examples of these ranks."""
    choices = [[*range(rank + 1), None] for rank in ranks]
    return [axes for axes in itertools.product(*choices) if any(a is not None for a in axes)]
