"""Kills calls of `map` to stores of objects, each until it ends in spite of it, and compares what
they leave.

The servers are moto's of S3, Azurite, and fake-gcs-server. The oracle is the same call to a disk
that nobody killed: each object has the bytes of the file.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import obstore  # noqa: F401  (imported once, for all that are forked: its threads begin later)

from batchax.datasets import objects
from batchax.datasets.addresses import ObjectPath, address
from batchax.datasets.inspect import status, verify
from kills.disk import AT_ANY_TIME, MOMENTS, Watch, forked_to_do
from kills.jobs import JOBS, STREAMS, UNIT, write_inputs
from kills.tally import Tally

from support import object_servers, steps

PATIENCE = 6  # kills, after which a call may end
SECONDS = 3.0  # in which a call is mostly done
KINDS = [job for job in JOBS + STREAMS if not job.__name__.endswith("npy")]


Attempt = Callable[[Any, Path, str, random.Random, Any, bool], Any]


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


def call(job: Any, inputs: Path, url: str, watch: Watch, **more: Any) -> Any:
    """What a child does: the call, and what is there then."""
    steps.watch(watch)
    report = job(inputs, Root(url), **more)
    out = next(f"{url}/{name}" for name in ("y.zarr", "y.parquet") if below(f"{url}/{name}"))
    assert verify(out)
    assert status(out).finished
    left = {name: x for name, x in below(out).items() if name != "_begun"}
    reduced = jax.tree.map(lambda x: (str(x.dtype), x.shape, x.tobytes()), report.reduced)
    return left, (report.rows, [b.row for b in report.bad], reduced), watch.seen, report.reused


def on_disk(job: Any, inputs: Path, folder: Path) -> Any:
    """What the call leaves on a disk."""
    folder.mkdir()
    watch = Watch()
    steps.watch(watch)
    report = job(inputs, folder)
    (out,) = [path for path in folder.iterdir() if path.suffix != ".job"]
    left = {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    reduced = jax.tree.map(lambda x: (str(x.dtype), x.shape, x.tobytes()), report.reduced)
    return left, (report.rows, [b.row for b in report.bad], reduced), watch.seen, report.reused


def run(count: int, seed: int, root: Path) -> Tally:
    """Kills so many calls, and a few more."""
    with object_servers.s3():
        return outputs(count, seed, root, killed)


def run_google(count: int, seed: int, root: Path) -> Tally:
    """The same of Google's, if there is a server of that: `make fake-gcs`."""
    if object_servers.fake_google() is None:
        return Tally()
    with object_servers.google():
        return outputs(count, seed, root, killed, "gs")


def run_azure(count: int, seed: int, root: Path) -> Tally:
    """The same of Azure's: `make azurite`."""
    if object_servers.azurite() is None:
        return Tally()
    with object_servers.azure():
        return outputs(count, seed, root, killed, "az")


def outputs(count: int, seed: int, root: Path, attempt: Attempt, scheme: str = "s3") -> Tally:
    """Computes outputs by attempts that may fail, of each again and again, and compares them."""
    draw, tally = random.Random(seed), Tally()
    jax.config.update("jax_platforms", "cpu")
    (inputs := root / "inputs").mkdir()
    write_inputs(inputs)
    expected: dict[str, Any] = {}
    kinds = draw.sample(KINDS, len(KINDS))
    while tally.kills < count:
        job = kinds[tally["outputs"] % len(kinds)]
        name = job.__name__
        if name not in expected:
            code, expected[name] = forked_to_do(lambda: on_disk(job, inputs, root / name))
            assert code == 0, f"{name} fails by itself"
        left, told, seen, _ = expected[name]
        url = f"{scheme}://{object_servers.BUCKET}/{seed}-{tally['outputs']}-{name}"
        answer, kills = None, 0
        while answer is None:
            moment, answer = attempt(job, inputs, url, draw, seen, kills < PATIENCE)
            if answer is None:
                tally[moment] += 1
                kills += 1
        now, said, _, reused = answer
        assert now == left, f"{name} leaves {set(now) ^ set(left) or 'other bytes'} at {url}"
        assert said == told, f"{name} reports {said}, and not {told}"
        tally["outputs"] += 1
        tally["reused"] += reused // UNIT
    return tally


def killed(job: Any, inputs: Path, url: str, draw: random.Random, seen: Any, kill: bool) -> Any:
    """A call that is killed, and at which moment; and what it returned, if it was not."""
    moment = draw.choice(MOMENTS) if kill else ""
    watch = Watch(moment, 1 + int(seen[moment] * draw.random() ** 2))
    after = draw.random() * SECONDS if moment == AT_ANY_TIME else None
    code, answer = forked_to_do(lambda: call(job, inputs, url, watch), after)
    assert code in (0, -signal.SIGKILL), f"{job.__name__} at {url}: {code}"
    return moment, answer
