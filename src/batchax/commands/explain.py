"""``batchax explain``: how a function is batched, and what that costs."""

from __future__ import annotations

import argparse
import re

import jax
import jax.numpy as jnp
import numpy as np

from batchax.commands.words import Commands, Mistake, add_ways, batch_size, function, literal
from batchax.explain.explain import explain
from batchax.frontend.rows import Layout
from batchax.jaxprs.types import Tree, Value

_SHORT = {
    "bool": "bool",
    "bf16": "bfloat16",
    **{f"f{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"i{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"u{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    **{f"c{n}": f"complex{n}" for n in (64, 128)},
}
_DTYPES = _SHORT | {name: name for name in _SHORT.values()}
_VMAP_OPTIONS = (
    *("axis_name", "axis_size", "batch_size", "memory_limit", "divergence", "small_matrices"),
    *("layout", "buckets"),
)
_TYPE = re.compile(r"(\w+)\[([\d,\s]*)\]")


def add_to(commands: Commands) -> None:
    command = commands.add_parser(
        "explain",
        help="show how a function is batched, and what that costs",
        description="Shows how batchax.vmap batches a function, and what that costs.",
        epilog='example: batchax explain model:loss --args "f32[5,3]" "f32[3]" --in-axes 0 None',
    )
    command.add_argument(
        "function", help="the per-example function: module:name, or path/to/file.py:name"
    )
    command.add_argument(
        "--args",
        nargs="*",
        default=[],
        metavar="TYPE",
        help="the type of each argument of the batched function, such as f32[5,3]; a Python "
        'value, such as 3 or True; or a pytree of types: \'{"w": "f32[3]"}\'',
    )
    command.add_argument(
        "--in-axes",
        nargs="*",
        default=["0"],
        metavar="AXIS",
        help="the batch axis of each argument, or one for all (default: 0); None for a shared "
        "argument",
    )
    command.add_argument(
        "--out-axes", default="0", metavar="AXIS", help="the batch axis of results (default: 0)"
    )
    command.add_argument(
        "--axis-name", metavar="NAME", help="the name of the batch axis, for collectives"
    )
    command.add_argument(
        "--axis-size", type=int, metavar="LANES", help="how many lanes, if no argument is mapped"
    )
    command.add_argument(
        "--batch-size",
        metavar="LANES",
        help='how many lanes run at a time: a number, or "auto" (default: all)',
    )
    command.add_argument(
        "--memory-limit", metavar="BYTES", help='the limit of --batch-size "auto", such as 2GiB'
    )
    add_ways(command, "lanes", default=None)
    command.add_argument(
        "--layout",
        choices=[*Layout],
        help="the layout of variable-length rows: packed, padded to one size, grouped by length, "
        "or the one with the least estimated cost (auto, the default)",
    )
    command.add_argument(
        "--buckets",
        type=int,
        metavar="N",
        help="the number of groups of rows of similar length that run together",
    )
    command.add_argument(
        "--details", action="store_true", help="show all equations, not only the most expensive"
    )
    command.add_argument(
        "--html", metavar="FILE", help="also write the explanation to this file, as a page"
    )
    command.add_argument(
        "--measure",
        action="store_true",
        help="also run the function on random numbers, and time several strategies",
    )
    command.add_argument(
        "--time-limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="the time after which --measure starts no more runs (default: 60)",
    )
    command.set_defaults(run=_run, failed=2)


def _run(options: argparse.Namespace) -> int:
    fun = function(options.function)
    args = [_argument(text, options.measure) for text in options.args]
    in_axes = tuple(literal(a, "--in-axes") for a in options.in_axes)
    options.batch_size = batch_size(options.batch_size)
    vmap_options = {name: getattr(options, name) for name in _VMAP_OPTIONS}
    given = {name: value for name, value in vmap_options.items() if value is not None}
    explained = explain(
        fun,
        in_axes[0] if len(in_axes) == 1 else in_axes,
        literal(options.out_axes, "--out-axes"),
        measure=options.measure,
        time_limit=options.time_limit,
        **given,
    )
    explanation = explained(*args)
    if options.html:
        explanation.to_html(options.html)
    print(explanation.details() if options.details else explanation)
    if options.html:
        print(f"\nwritten to {options.html}")
    return 0


def _argument(text: str, with_values: bool) -> Tree:
    value = _type(text)
    if value is None:
        value = jax.tree.map(
            lambda x: _type(x, required=text) if isinstance(x, str) else x,
            literal(text, "--args"),
        )
    return jax.tree.map(_random_values, value) if with_values else value


def _type(text: str, required: str | None = None) -> jax.ShapeDtypeStruct | None:
    match = _TYPE.fullmatch(text.strip())
    if match is None or match[1] not in _DTYPES | {"key": ""}:
        if required is None and match is None:
            return None
        raise Mistake(
            f"--args: {text!r} is not a type{f' (in {required})' if required else ''}. Write a "
            f"dtype and a shape, such as f32[5,3]; dtypes are {', '.join(_SHORT)}, their names in "
            "NumPy, and key."
        )
    sizes = [size.strip() for size in match[2].split(",")]
    shape = tuple(int(size) for size in sizes if size)
    dtype = jax.random.key(0).dtype if match[1] == "key" else jnp.dtype(_DTYPES[match[1]])
    return jax.ShapeDtypeStruct(shape, dtype)


def _random_values(x: Value) -> Value:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), x.shape)
    values = np.random.default_rng(0).standard_normal(x.shape)
    return jnp.asarray(values > 0 if x.dtype == bool else np.abs(values) * 3).astype(x.dtype)
