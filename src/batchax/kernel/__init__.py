"""The kernel: how a primitive gets batched.

To read, in this order:

1. `axis`: the axis being mapped, and where a value carries it.
2. `inner`: a function of one example becomes a program; a program, its batched form.
3. `interpreter`: a program is run for all lanes, equation by equation.
4. `registry`: the table of rules; `rule_makers`: rules made of what a primitive is;
   `own_primitive`: how a primitive of batchax's own is made.
5. `fallback`: what has no rule.
6. `named_axes`: which equations see the axis by its name.

What these lean on: `varying` (types inside `shard_map`), `reference_axes`, `captured` (values that
rules of derivatives closed over), `lost` (those that they must not), `rule_results` (checks of what
rules of users return), `derivatives`, `recording` (notes for `explain`), `divergence` (what ways to
run an axis are asked), `lasting` (how programs are known again), `looking` (where
`jax.debug_nans` looks).
"""
