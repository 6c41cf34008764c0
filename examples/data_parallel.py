"""Exact gradients of a batch that is run a few rows at a time, on several devices or processes.

A model with 2,048 random features learns from 6,000 rows. `batchax.vmap` spreads the rows over the
devices (`mesh="all"`), each of which runs 64 of its rows at a time (`batch_size`) and adds up their
losses and gradients. So the memory that a step needs does not grow with the rows, and the gradient
is that of the whole batch, whatever the number of devices and however many rows each process
happens to have. One device alone checks it.

    python examples/data_parallel.py                  four devices of one process
    python examples/data_parallel.py --processes 2    two processes, each with rows of its own
"""

import os
import socket
import subprocess
import sys
import time

if __name__ == "__main__":
    # A CPU is as many devices as one asks for before JAX starts: here four, whatever the processes.
    EACH = 4 // int(sys.argv[2]) if sys.argv[1:2] == ["--processes"] else 4
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={EACH}"
    os.environ["JAX_PLATFORMS"] = "cpu"

try:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import batchax as bx
except ModuleNotFoundError as missing:
    sys.exit(f"This needs {missing.name}; in a checkout of batchax: pip install .")

ROWS = int(os.environ.get("ROWS", 6_000))
FEATURES = int(os.environ.get("FEATURES", 2_048))
STEPS = int(os.environ.get("STEPS", 20))
COLUMNS, CHUNK, RATE = 16, 64, 1e-3


def loss(params, x, y):
    """The squared error of one row: everything here is written for one example."""
    features = jnp.cos(x @ params["directions"] + params["phases"])
    return (features @ params["weights"] - y) ** 2


one_row = jax.value_and_grad(loss)


def over_rows(**options):
    """The mean of the loss over rows and its gradient: one output, reduced over the batch."""
    return bx.vmap(one_row, in_axes=(None, 0, 0), out_axes=bx.Reduce("mean"), **options)


def rows(start, stop):
    """Some of the rows, as a process would read its own from a file."""
    x = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)[start:stop]
    return x, np.sin(x.sum(1)) * np.cos(x[:, 0])


def initial():
    k1, k2 = jax.random.split(jax.random.key(0))
    return {
        "directions": jax.random.normal(k1, (COLUMNS, FEATURES)) / 2,
        "phases": jax.random.uniform(k2, (FEATURES,), maxval=2 * np.pi),
        "weights": jnp.zeros(FEATURES),
    }


def temporaries(options, params, x, y):
    """What one device needs besides arguments and results, by the compiler's account, in MiB."""
    compiled = jax.jit(over_rows(**options)).lower(params, x, y).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


def main():
    index, count = jax.process_index(), jax.process_count()
    say = print if index == 0 else lambda *_, **__: None
    # The last process has fewer rows than the others, the first has the most.
    ends = [round(ROWS * (i / count) ** 0.9) for i in range(count + 1)]
    x, y = rows(ends[index], ends[index + 1])
    say(
        f"{ROWS:,} rows on {jax.device_count()} devices; {len(x):,} of them in process 0 of {count}"
    )
    params = initial()
    if count == 1:
        for name, options in (("all at once", {}), (f"{CHUNK} at a time", {"batch_size": CHUNK})):
            needed = temporaries(dict(options, mesh="all"), params, x, y)
            say(f"  {name:>14}: {needed:8,.1f} MiB of temporaries on each device")

    step = over_rows(mesh="all", batch_size=CHUNK)
    start = time.perf_counter()
    for i in range(STEPS):
        value, gradient = step(params, bx.local(x), bx.local(y))
        if i == 0:
            first = bx.gather(gradient)
            start = time.perf_counter()
        params = jax.tree.map(lambda p, g: p - RATE * g, params, gradient)
        if (i + 1) % 5 == 0:
            say(f"  step {i + 1:3d}   mean loss {bx.gather(value):.4f}", flush=True)
    say(f"  {(time.perf_counter() - start) / max(1, STEPS - 1) * 1e3:.0f} ms for a step")

    if index == 0:
        # One device of this process, with all rows, which is what the others waited for.
        _, alone = over_rows(batch_size=CHUNK)(initial(), *rows(0, ROWS))
        for name, g in alone.items():
            np.testing.assert_allclose(first[name], g, rtol=1e-3, atol=1e-5)
        say("The gradient is that of one device: agreed")


def launch(processes):
    """Runs this file as so many processes, which find each other at a port of this machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--processes", str(processes), str(port)]
    started = [subprocess.Popen([*command, str(i)]) for i in range(processes)]
    try:
        codes = [process.wait(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--processes", processes]:
            launch(int(processes))
        case ["--processes", processes, port, index]:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(f"localhost:{port}", int(processes), int(index))
            main()
        case _:
            main()
