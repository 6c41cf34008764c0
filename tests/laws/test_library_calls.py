"""Library calls on a CPU: what is to come in turn does, and programs end on two threads.

A program with two such calls at once stops forever if the CPU has two threads, now and then.
"""

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import batchax as bx
from batchax.analysis.hlo import read_module

X = jnp.linspace(1.0, 2.0, 7)


def factor(x):
    return jnp.linalg.cholesky(jnp.eye(4) * x + 1).sum()


def eigen(x):
    return jnp.linalg.eigvalsh(jnp.eye(4) * x + 1).sum()


def branches(x):
    return lax.cond(x > 1.5, factor, eigen, x)


def gradient(batched):
    return jax.grad(lambda x: batched(x).sum())


def one_after_another(fun):
    """Whether each library call, or loop with such calls in it, waits for the one before it."""
    module = read_module(jax.jit(fun).lower(X).compile())
    calling = set()

    def calls(one):
        return one.opcode == "custom-call" or not calling.isdisjoint(one.called)

    for _ in module.computations:  # which are inside one another
        calling |= {n for n, c in module.computations.items() if any(map(calls, c.instructions))}
    inside = {n for c in module.computations.values() for i in c.instructions for n in i.called}
    (entry,) = module.computations.keys() - inside
    waits_for, found = {}, []
    for one in module.computations[entry].instructions:
        waits_for[one.name] = set(one.operands).union(*(waits_for[o] for o in one.operands))
        found += [one.name] if calls(one) else []
    assert len(found) > 1
    return all(a in waits_for[b] for a, b in itertools.pairwise(found))


def chunked(fun=factor, size=3, **options):
    return bx.vmap(fun, batch_size=size, **options)


def factor_row(row):
    return jnp.linalg.cholesky(row[0] * jnp.eye(row.shape[0]) + 1).sum()


def of_rows(**options):
    """Rows of two lengths, in groups."""
    return lambda x: bx.vmap(factor_row, **options)(bx.Ragged(x, [2, 3, 2]))


PROGRAMS = {
    "a loop and the rest": chunked(),
    "its gradient": gradient(chunked()),
    "the gradient of one chunk and the rest": gradient(chunked(size=4)),
    "its tangents": lambda x: jax.jvp(chunked(), (x,), (x,)),
    "tangents where few values are shared": lambda x: jax.jvp(
        chunked(lambda x, w: factor(x * w), in_axes=(0, None)), (x, x[0]), (x, x[0])
    ),
    "residuals kept": chunked(size=4, residuals="keep"),
    "and their gradient": gradient(chunked(residuals="keep")),
    "under jax.vmap": lambda x: jax.vmap(chunked(size=4, residuals="keep"))(jnp.stack([x, x])),
    "the gradient of branches": gradient(bx.vmap(branches)),
    "rows grouped by length": of_rows(layout="grouped"),
    "the gradient of rows grouped by length": gradient(of_rows(layout="grouped")),
    "rows in buckets": of_rows(buckets=2),
    "branches for those that take them": bx.vmap(branches, divergence=bx.Compact(width=2)),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.each_commit(9)
def test_one_after_another(name):
    assert one_after_another(PROGRAMS[name])


@pytest.mark.parametrize("seconds", [0.1, pytest.param(0.5, marks=pytest.mark.nightly)])
def test_programs_end(seconds):
    """Every library call, chunk by chunk with a rest, on two threads, for so long each."""
    program = f"seconds = {seconds}" + textwrap.dedent("""
        import os, time
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        import jax, jax.numpy as jnp, batchax as bx
        from jax.lax import linalg as ll

        calls = [
            ll.cholesky, ll.lu, ll.qr, ll.eigh, ll.svd, ll.eig, ll.schur, ll.hessenberg,
            lambda m: ll.triangular_solve(m, m, lower=True, left_side=True),
            lambda m: ll.householder_product(m, m[0]), lambda m: ll.tridiagonal(m, lower=True),
            lambda m: ll.tridiagonal_solve(m[0], m[1], m[2], m), jnp.fft.fft2,
        ]
        x = jnp.linspace(1.0, 2.0, 2000)
        for call in calls:
            def f(s):
                outs = call(s * jnp.eye(16) + jnp.ones((16, 16)) / 9)
                return sum(jnp.abs(out).sum() for out in jax.tree.leaves(outs))
            program = jax.jit(bx.vmap(f, batch_size=1200))
            end = time.time() + seconds
            while time.time() < end:
                program(x).block_until_ready()
    """)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(Path(bx.__file__).parents[1])
    subprocess.run([sys.executable, "-c", program], env=environment, timeout=900, check=True)
