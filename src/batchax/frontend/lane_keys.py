"""`split_key`: one random key becomes a key for each lane."""

from __future__ import annotations

import jax

from batchax.errors import ArgumentTypeError
from batchax.frontend.advice import is_key, may_be_key
from batchax.frontend.parts import LANE_INDEX, AxisSpec, Parts
from batchax.jaxprs.spoken import show
from batchax.jaxprs.words import Value


class _SplitKey(AxisSpec):
    """What `in_axes` says for one random key, of which each lane gets a key of its own.

    Lane `i` gets ``jax.random.fold_in(key, i)``, whatever the chunks, the buckets or the mesh that
    it runs in; in nested vmaps, the key of its outer lane folded with its inner index. It draws
    what ``fun`` draws alone with that key, also where the key is one of ``impl="rbg"``, of which
    lanes of ``jax.vmap`` draw other numbers, and take longer.

    A key for which `in_axes` says None is the same in each lane, and so is what is drawn from it:
    that mistake is the reason to have this. Inside a ``shard_map`` of your own, lanes are counted
    in each shard: fold ``jax.lax.axis_index`` of the mesh axis into the key before.

    Example:
      >>> noisy = lambda key, x: x + jax.random.normal(key)
      >>> ys = bx.vmap(noisy, (bx.split_key, 0))(jax.random.key(0), jnp.zeros(1000))
      >>> 0.9 < ys.std() < 1.1
      Array(True, dtype=bool)
    """

    def of_argument(self, value: Value, path: str) -> Parts:
        if not (hasattr(value, "dtype") and (is_key(value) or may_be_key(value))):
            raise ArgumentTypeError(
                f"in_axes gives {self!r} for {path}, which is {show(value)}: it takes one "
                "random key, of jax.random.key(seed). Give 0 for an array of keys, one for each "
                "lane."
            )
        names = [path, path]
        return Parts([value, LANE_INDEX], [None, 0], lambda x: jax.random.fold_in(*x), names)

    def __repr__(self) -> str:
        return "batchax.split_key"


split_key = _SplitKey()
