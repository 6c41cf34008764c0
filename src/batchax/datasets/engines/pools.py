"""What units are submitted to: an executor of `concurrent.futures`, or a cluster of Dask."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from typing import Any

from batchax.datasets.failures import needed
from batchax.errors import ArgumentTypeError, JobError, UnsupportedError


class Pool:
    """An executor.

    Attributes:
      deaths: the errors of units whose worker ended.
    """

    deaths: tuple[type[BaseException], ...] = (BrokenExecutor,)

    def __init__(self, executor: Executor, own: bool = False) -> None:
        self._executor, self._own, self._broken = executor, own, 0

    @property
    def workers(self) -> int:
        """How many units run at a time."""
        return getattr(self._executor, "_max_workers", None) or os.cpu_count() or 1

    @property
    def generation(self) -> int:
        """How often it was made anew."""
        return self._broken

    def submit(self, name: str, fun: Callable[..., Any], *args: Any) -> Any:
        """A future of ``fun(*args)``; `name` is what people see."""
        return self._executor.submit(fun, *args)

    def make_anew(self) -> None:
        """Makes another one, since a process that ended breaks it for all others, too."""
        if not isinstance(self._executor, ProcessPoolExecutor):
            raise JobError(
                f"the workers of {self._executor!r} ended. What was done is kept: the same call, "
                "with another executor, goes on from there."
            )
        workers, self._broken = self.workers, self._broken + 1
        if self._own:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor, self._own = _spawned(workers), True

    def close(self, hurry: bool = False) -> None:
        """Ends what was made here; in a `hurry` what still runs there, too."""
        if not self._own:
            return
        # There is no public way to end processes that are at work before Python 3.14.
        processes = list((getattr(self._executor, "_processes", None) or {}).values())
        self._executor.shutdown(wait=not hurry, cancel_futures=True)
        if hurry:
            for process in processes:
                process.kill()


class DaskPool(Pool):
    """The workers of a cluster."""

    def __init__(self, client: Any) -> None:
        distributed = needed("distributed", "executor, to run units on a cluster,")
        self._client = client
        self.deaths = (distributed.scheduler.KilledWorker,)
        self._names = 0

    @property
    def workers(self) -> int:
        return max(1, sum(self._client.nthreads().values()))

    @property
    def generation(self) -> int:
        return 0

    def submit(self, name: str, fun: Callable[..., Any], *args: Any) -> Any:
        self._names += 1  # Dask gives one answer for one name
        key = f"{name}-{self._names}-{id(self):x}"
        return self._client.submit(fun, *args, key=key, pure=False)

    def make_anew(self) -> None:
        """Dask starts workers itself."""

    def close(self, hurry: bool = False) -> None:
        """The cluster stays."""


def find_pool(executor: Any) -> Pool:
    """What the option `executor` names.

    Raises:
      ArgumentTypeError: it is no executor.
      UnsupportedError: its processes are forked.
    """
    if isinstance(executor, str):
        kind, _, where = executor.partition(":")
        if kind == "processes" and where.isdigit() and int(where) > 0:
            return Pool(_spawned(int(where)), own=True)
        if kind == "dask" and where:
            distributed = needed("distributed", f"executor={executor!r}")
            return DaskPool(distributed.Client(where))
        raise ArgumentTypeError(
            f'executor={executor!r}: give "processes:4", "dask:tcp://host:8786" or "shard:3/16".'
        )
    if type(executor).__module__.split(".")[0] == "distributed":
        return DaskPool(executor)
    if not isinstance(executor, Executor):
        raise ArgumentTypeError(
            "executor must be None, an executor of concurrent.futures, a client of Dask, or one of "
            f'"processes:4", "dask:tcp://host:8786", "shard:3/16"; got {executor!r} of type '
            f"{type(executor).__name__}."
        )
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise UnsupportedError(
            "executor forks its processes, and JAX does not survive that. Give it "
            'mp_context=multiprocessing.get_context("spawn"), or pass executor="processes:4".'
        )
    return Pool(executor)


def _spawned(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
