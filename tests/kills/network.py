"""Cuts the network between calls of `map` and S3, each until it ends in spite of it.

Of a request at which it is cut the server has seen nothing, or has done it and its answer is lost.
It stays cut until the call has ended, or for some requests. The oracle is that of `objects.py`.
"""

from __future__ import annotations

import datetime
import os
import random
import threading
from pathlib import Path
from typing import Any

from batchax.datasets import objects as batchax_objects
from batchax.errors import BatchaxError
from kills.disk import Watch, forked_to_do
from kills.objects import call, outputs
from kills.tally import Tally

from support import object_servers

REQUESTS = 70  # of a call, about
SHORT = 6  # requests, in which it may come back


class Network:
    """Says what becomes of a request."""

    def __init__(self, draw: random.Random, cut: bool) -> None:
        self._first = draw.randrange(REQUESTS) if cut else 10**9
        self._lost = draw.random() < 0.5
        self._last = self._first + (draw.randrange(1, SHORT) if draw.random() < 0.3 else 10**9)
        self._lock, self._count = threading.Lock(), -1

    def __call__(self, method: str, path: str) -> str:
        with self._lock:
            self._count += 1
            if self._count == self._first and self._lost:
                return "lose"
            return "cut" if self._first <= self._count < self._last else "pass"


def run(count: int, seed: int, root: Path) -> Tally:
    """Cuts it so many times, and a few more."""
    with object_servers.s3() as server:
        return outputs(count, seed, root, lambda *args: cut(server, *args))


def cut(
    server: str, job: Any, inputs: Path, url: str, draw: random.Random, seen: Any, cuts: bool
) -> Any:
    """A call whose network is cut: how it ended, and what it returned, if it did."""
    network = Network(draw, cuts)

    def do() -> Any:
        batchax_objects.RETRIES.update(
            max_retries=2, backoff={"init_backoff": datetime.timedelta(milliseconds=5)}
        )
        with object_servers.proxy(server, network) as address:
            os.environ["AWS_ENDPOINT_URL"] = address
            try:
                return call(job, inputs, url, Watch(), retries=0)
            except BatchaxError as error:
                return str(error)

    code, answer = forked_to_do(do)
    assert code == 0, f"{job.__name__} at {url} ends with {code}"
    if isinstance(answer, str):
        assert cuts, f"{job.__name__} at {url} ends with {answer}"
        return "told by an error", None
    return "", answer
