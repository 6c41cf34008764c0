"""The kernel: how a primitive gets batched.

To read, in this order:

1. `axis`: the axis being mapped, and where a value carries it.
2. `inner`: a function of one example becomes a program; a program, its batched form.
3. `interpreter`: a program is run for all lanes, equation by equation.
   What has no rule, and callbacks in order, are here, too.
4. `registry`: the table of rules, rules of whole families, and checks of results;
   `own_primitive`: how batchax defines a primitive.
5. `named_axes`: which equations see the axis by its name, or vary over a mesh.
6. `differing`: which values differ between lanes.

What these lean on: `captured` (values that derivative rules closed over), `recording` (notes for
`explain`), `debug_nans` (where `jax.debug_nans` looks).
"""
