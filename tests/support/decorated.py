"""Every public function that makes a function, called at the top of a module with each option."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import batchax as bx

OPTIONS = [
    {},
    {"divergence": "compact"},
    {"divergence": "predicate"},
    {"divergence": bx.Compact(width=8, threshold=0.5, steps=bx.LaneSteps())},
    {"batch_size": 4, "progress": True},
    {"batch_size": "auto"},
    {"batch_size": "auto", "memory_limit": "1MiB", "residuals": "keep"},
    {"small_matrices": "library"},
    {"mesh": "all"},
    {"layout": "packed"},
    {"layout": "padded", "buckets": 3},
    {"axis_name": "i", "axis_size": 3, "spmd_axis_name": "d"},
    {"out_axes": bx.AUTO},
    {"out_axes": bx.Reduce("mean")},
    {"in_axes": bx.tiles(size=2), "out_axes": bx.tiles()},
    {"in_axes": bx.ragged("n")},
    {"in_axes": bx.split_key},
    {"in_axes": bx.size("n", max_size=4)},
]


def f(x):
    return jnp.tanh(x)


def g(carry, x):
    return carry, x


def _custom():
    @bx.custom_vmap
    def custom(x):
        return jnp.sin(x)

    @custom.def_vmap
    def rule(axis_size, in_batched, x):
        return jnp.sin(x), in_batched[0]

    @custom.def_rows
    def rows(rows, ragged, x):
        return jnp.sin(x), ragged[0]


def _auto_vmap():
    for options in OPTIONS:
        kept = {k: v for k, v in options.items() if k not in _OF_VMAP_ALONE}
        bx.auto_vmap(0, **kept)(f)
    bx.auto_vmap("(n)->(n)")(f)


_OF_VMAP_ALONE = (
    "mesh progress layout buckets axis_name axis_size spmd_axis_name in_axes out_axes"
).split()


class _Container:
    pass


def _container():
    ways = dict.fromkeys(("to_arrays", "to_example", "from_example", "to_batch"), lambda *xs: xs)
    bx.register_container(_Container, **ways)
    bx.unregister_container(_Container)


def _rule():
    primitive = jax.extend.core.Primitive("of_a_module")
    bx.register_rule(primitive)(lambda axis, args, axes: (args[0], axes[0]))
    bx.unregister_rule(primitive)
    bx.broadcasting(primitive)
    bx.reducing(primitive)
    bx.vectorized(primitive)
    bx.unregister_rule(primitive)


def _all_of(factory):
    return lambda: [factory(f, **options) for options in OPTIONS]


FACTORIES = {
    "vmap": _all_of(bx.vmap),
    "explain": _all_of(bx.explain),
    "find_nonfinite": lambda: bx.find_nonfinite(f),
    "check": lambda: bx.check(f),
    "auto_vmap": _auto_vmap,
    "clipped_grad": lambda: [
        bx.clipped_grad(f, 1.0, **options) for options in ({}, {"batch_size": "auto"})
    ],
    "custom_vmap": _custom,
    "sequential_vmap": lambda: bx.sequential_vmap(f),
    "host_function": lambda: bx.host_function(np.sin, jax.ShapeDtypeStruct((), np.float32)),
    "register_rule": _rule,
    "unregister_rule": _rule,
    "broadcasting": _rule,
    "reducing": _rule,
    "vectorized": _rule,
    "register_container": _container,
    "unregister_container": _container,
    "scan": lambda: bx.scan(g),
    "tiles": lambda: bx.tiles(size=3),
    "size": lambda: bx.size("n", max_size=3),
    "ragged": lambda: bx.ragged("n", "m"),
    "config": lambda: bx.config.update("divergence", "auto"),
}
"""What is made by each, when it is called."""

OF_ARRAYS = """
    axis_to_front batch_jaxpr batch_size_choices bounded_while bucket check_rule compress gather
    local map map_batches match_axis move_axis nonzero same_program split_key stack unique unstack
""".split()
"""What works at once on what it is given."""
