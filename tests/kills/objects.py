"""Kills calls of `map` to S3, each until it ends in spite of it, and compares what they leave.

`python -m kills.objects --count 30 --seed 0` kills so many. The server is moto's. The oracle is the
same call to a disk that nobody killed: each object has the bytes of the file.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import obstore  # noqa: F401  (imported once, for all that are forked: its threads begin later)

from batchax.datasets import objects, steps
from batchax.datasets.addresses import ObjectPath, address
from batchax.datasets.inspect import status, verify
from kills.__main__ import AT_ANY_TIME, MOMENTS, Watch, forked_to_do
from kills.jobs import JOBS, STREAMS, write_inputs

from support import object_servers

PATIENCE = 6  # kills, after which a call may end
SECONDS = 3.0  # in which a call is mostly done
KINDS = [job for job in JOBS + STREAMS if not job.__name__.endswith("npy")]


class Root:
    """A place in a store, joined as a folder is."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __truediv__(self, name: str) -> Any:
        return f"{self.url}/{name}"


def below(url: str) -> dict[str, bytes]:
    path = address(url, "out")
    assert isinstance(path, ObjectPath)
    names = [p for p, _ in objects.below(path)]
    return {p.key[len(path.key) + 1 :]: objects.read(p) for p in names}


def call(job: Any, inputs: Path, url: str, watch: Watch) -> Any:
    """What a child does: the call, and what is there then."""
    steps.watch(watch)
    report = job(inputs, Root(url))
    out = next(f"{url}/{name}" for name in ("y.zarr", "y.parquet") if below(f"{url}/{name}"))
    assert verify(out)
    assert status(out).finished
    left = {name: x for name, x in below(out).items() if name != "_begun"}
    reduced = jax.tree.map(lambda x: (str(x.dtype), x.shape, x.tobytes()), report.reduced)
    return left, (report.rows, [b.row for b in report.bad], reduced), watch.seen


def on_disk(job: Any, inputs: Path, folder: Path) -> Any:
    """What the call leaves on a disk."""
    folder.mkdir()
    watch = Watch()
    steps.watch(watch)
    report = job(inputs, folder)
    (out,) = [path for path in folder.iterdir() if path.suffix != ".job"]
    left = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    reduced = jax.tree.map(lambda x: (str(x.dtype), x.shape, x.tobytes()), report.reduced)
    return left, (report.rows, [b.row for b in report.bad], reduced), watch.seen


def run(count: int, seed: int, root: Path) -> int:
    """Kills so many calls, and a few more; returns how many."""
    draw, kills, outputs = random.Random(seed), 0, 0
    (inputs := root / "inputs").mkdir()
    write_inputs(inputs)
    expected: dict[str, Any] = {}
    kinds = draw.sample(KINDS, len(KINDS))
    while kills < count:
        job = kinds[outputs % len(kinds)]
        name = job.__name__
        if name not in expected:
            code, expected[name] = forked_to_do(lambda: on_disk(job, inputs, root / name))
            assert code == 0, f"{name} fails by itself"
        left, told, seen = expected[name]
        url = f"s3://{object_servers.BUCKET}/{seed}-{outputs}-{name}"
        code, answer, killed = -1, None, 0
        while code:
            moment = draw.choice(MOMENTS) if killed < PATIENCE else ""
            watch = Watch(moment, 1 + int(seen[moment] * draw.random() ** 2))
            after = draw.random() * SECONDS if moment == AT_ANY_TIME else None
            code, answer = forked_to_do(lambda: call(job, inputs, url, watch), after)
            assert code in (0, -signal.SIGKILL), f"{name}, killed {killed} times: {code}"
            killed += code != 0
        now, said, _ = answer
        assert now == left, f"{name} leaves {set(now) ^ set(left) or 'other bytes'} at {url}"
        assert said == told, f"{name} reports {said}, and not {told}"
        kills, outputs = kills + killed, outputs + 1
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(prog="kills.objects", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=30, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    logging.getLogger("jax").setLevel(logging.CRITICAL)  # rows that fail are meant to
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as root, object_servers.s3():
        kills = run(options.count, options.seed, Path(root))
    print(f"{kills} kills of calls to S3, {time.perf_counter() - begin:.0f} s: the bytes of a disk")


if __name__ == "__main__":
    main()
