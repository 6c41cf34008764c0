"""Attention over sentences of different lengths, by a Pallas kernel that is a rule for packed rows.

The function is of one sentence. Its rule for rows gives the kernel the tokens of all sentences one
after another: no token is padding, and a block of queries looks at the blocks of keys that hold its
own sentences, and at no others. It keeps a running maximum and sum, as FlashAttention does (Dao,
Fu, Ermon, Rudra and Re, 2022), and so does its derivative, another kernel.

On a CPU Pallas interprets the kernels, which shows that they are right, and not how fast they are.

    python examples/packed_attention.py
"""

import functools
import sys

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import pallas as pl

    import batchax as bx
except ModuleNotFoundError as missing:
    sys.exit(f"This needs {missing.name}; in a checkout of batchax: pip install '.[demo]'")

SENTENCES, LONGEST = 24, 60
BLOCK = 16  # tokens
INTERPRET = jax.default_backend() == "cpu"
NOTHING = -1e30  # a logit of which nothing is left after `exp`


@bx.custom_vmap
def attention(q, k, v):
    """What each token of one sentence sees of it, from arrays of shape (n, features)."""
    return jax.nn.softmax(q @ k.T / q.shape[1] ** 0.5) @ v


@attention.def_rows
def attention_of_rows(rows, ragged, q, k, v):
    """The same for sentences one after another, of which `rows` tells where they are."""
    tokens, features = q.shape
    more = -tokens % BLOCK
    q, k, v = (jnp.pad(x, ((0, more), (0, 0))) for x in (q / features**0.5, k, v))
    ids = jnp.pad(rows.ids, (0, more), constant_values=len(rows))
    # A block of tokens needs those from where its first sentence begins to where its last ends.
    ends = jnp.append(rows.offsets, ids.size)
    blocks = ids.reshape(-1, BLOCK)
    first = ends[blocks[:, 0]] // BLOCK
    last = (ends[jnp.minimum(blocks[:, -1] + 1, len(rows) + 1)] + BLOCK - 1) // BLOCK
    return packed(q, k, v, ids[:, None], first, last)[:tokens], True


@jax.custom_vjp
def packed(q, k, v, ids, first, last):
    """Attention within segments: `ids` says of each token to which it belongs."""
    return forward(q, k, v, ids, first, last)[0]


def forward(q, k, v, ids, first, last):
    """The result, and the logarithm of the sum of each token's weights, for the way back."""
    shapes = [jax.ShapeDtypeStruct(s, q.dtype) for s in (v.shape, ids.shape)]
    return call(forward_kernel, [q, ids], [k, v, ids], first, last, shapes)


def forward_kernel(q, ids, k, v, all_ids, first, last, out, log_sum):
    """A block of queries, from the blocks of keys that its sentences are in."""
    n = pl.program_id(0)

    def step(j, state):
        most, total, summed = state
        keys = pl.ds(j * BLOCK, BLOCK)
        logits = jnp.where(ids[:] == all_ids[keys, :].T, q[:] @ k[keys, :].T, NOTHING)
        new = jnp.maximum(most, logits.max(1, keepdims=True))
        weights, scale = jnp.exp(logits - new), jnp.exp(most - new)
        total = total * scale + weights.sum(1, keepdims=True)
        return new, total, summed * scale + weights @ v[keys, :]

    zeros = jnp.zeros((BLOCK, 1), q.dtype)
    start = zeros + NOTHING, zeros, jnp.zeros((BLOCK, v.shape[1]), q.dtype)
    most, total, summed = jax.lax.fori_loop(first[n], last[n], step, start)
    out[:] = summed / total
    log_sum[:] = most + jnp.log(total)


def forward_and_residuals(q, k, v, ids, first, last):
    out, log_sum = forward(q, k, v, ids, first, last)
    return out, (q, k, v, ids, first, last, out, log_sum)


def backward(residuals, cotangent):
    q, k, v, ids, first, last, out, log_sum = residuals
    dot = jnp.sum(out * cotangent, 1, keepdims=True)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]
    every = [q, k, v, ids, cotangent, log_sum, dot]
    return *call(backward_kernel, every, every, first, last, shapes), None, None, None


def backward_kernel(*refs):
    """The cotangents of a block of queries, and of the same block as keys and values."""
    own, (every, (first, last, dq, dk, dv)) = refs[:7], (refs[7:14], refs[14:])
    q, k, v, ids, cotangent, log_sum, dot = (ref[:] for ref in own)
    n = pl.program_id(0)

    def step(j, state):
        of_q, of_k, of_v = state
        others = pl.ds(j * BLOCK, BLOCK)
        q_, k_, v_, ids_, cotangent_, log_sum_, dot_ = (ref[others, :] for ref in every)
        same = ids == ids_.T
        # As queries of the others' keys, and as keys of the others' queries.
        weights = jnp.where(same, jnp.exp(q @ k_.T - log_sum), 0)
        back = jnp.where(same.T, jnp.exp(q_ @ k.T - log_sum_), 0)
        of_q += (weights * (cotangent @ v_.T - dot)) @ k_
        of_k += (back * (cotangent_ @ v.T - dot_)).T @ q_
        return of_q, of_k, of_v + back.T @ cotangent_

    start = tuple(jnp.zeros_like(x) for x in (q, k, v))
    dq[:], dk[:], dv[:] = jax.lax.fori_loop(first[n], last[n], step, start)


packed.defvjp(forward_and_residuals, backward)


def call(kernel, in_blocks, whole, first, last, shapes):
    """The kernel, run for each block: of some arrays it is given that block, of others all."""
    block = lambda x: pl.BlockSpec((BLOCK, x.shape[1]), lambda n: (n, 0))
    return pl.pallas_call(
        kernel,
        grid=len(first),
        in_specs=[*map(block, in_blocks), *[pl.BlockSpec()] * (len(whole) + 2)],
        out_specs=list(map(block, shapes)),
        out_shape=shapes,
        interpret=INTERPRET,
    )(*in_blocks, *whole, first, last)


def main():
    """Compares sentences with each alone, and says what there was to compute."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, LONGEST, SENTENCES)
    sentences = [rng.normal(size=(3, n, 8)).astype("f") for n in lengths]
    batch = [bx.Ragged.from_rows([s[k] for s in sentences]) for k in range(3)]

    def loss(fun, *args):
        return jnp.sum(jnp.sin(fun(*args)))

    step = jax.value_and_grad(functools.partial(loss, attention), (0, 1, 2))
    values, gradients = jax.jit(bx.vmap(step, bx.ragged("n")))(*batch)
    alone = jax.jit(jax.value_and_grad(functools.partial(loss, attention.fun), (0, 1, 2)))
    worst = 0.0
    for i, s in enumerate(sentences):
        value, expected = alone(*s)
        np.testing.assert_allclose(values[i], value, rtol=1e-4, atol=1e-4)
        for g, e in zip(gradients, expected, strict=True):
            worst = max(worst, float(jnp.abs(g[i] - e).max()))
    padded = len(lengths) * lengths.max() ** 2
    pairs = int((lengths**2).sum())
    print(
        f"{len(lengths)} sentences of {lengths.min()} to {lengths.max()} tokens: {pairs:,} pairs of"
    )
    print(f"a query and a key, where padding has {padded:,}. Gradients differ by {worst:.0e} from")
    print("those of each sentence alone.")
    return worst


if __name__ == "__main__":
    main()
