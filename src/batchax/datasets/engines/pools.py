"""What units are submitted to: an executor of `concurrent.futures`, or a cluster of Dask."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from typing import Any

from batchax.datasets.engines.attempts import EndedError
from batchax.datasets.failures import needed
from batchax.datasets.masking import masked
from batchax.errors import ArgumentTypeError, JobError, UnsupportedError
from batchax.jaxprs.spoken import brief, show

_KNOWN = 5.0  # seconds for which it is known how many workers a cluster has


class Pool:
    """An executor.

    Attributes:
      deaths: the errors of units whose worker ended.
    """

    deaths: tuple[type[BaseException], ...] = (BrokenExecutor, EndedError)

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
        if not self._own:
            return self._executor.submit(fun, *args)
        # It starts processes here, which have the mask of this thread: Ctrl-C is not for them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            return self._executor.submit(fun, *args)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def cancel(self, futures: Sequence[Any]) -> None:
        """Takes units back that were not begun; others may run on."""
        for future in futures:
            future.cancel()

    def make_anew(self) -> None:
        """Makes another one, since a process that ended breaks it for all others, too."""
        if not isinstance(self._executor, ProcessPoolExecutor):
            raise JobError(
                f"the workers of {brief(self._executor)} ended. What was done is kept: the same "
                "call, with another executor, goes on from there."
            )
        workers, self._broken = self.workers, self._broken + 1
        if self._own:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor, self._own = _spawned(workers), True

    def wait_until_there(self) -> None:
        """Returns once it takes units, after it cancelled some that nobody had asked it to."""

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
            for process in processes:
                process.join()


class DaskPool(Pool):
    """The workers of a cluster."""

    def __init__(self, client: Any, own: bool = False) -> None:
        distributed = needed("distributed", "executor, to run units on a cluster,")
        self._client, self._own = client, own
        self.deaths = (distributed.scheduler.KilledWorker, EndedError)
        self._names = 0
        self._counted, self._workers = -_KNOWN, 1

    @property
    def workers(self) -> int:
        if time.monotonic() - self._counted > _KNOWN:
            self._counted = time.monotonic()
            try:
                self._workers = max(1, sum(self._client.nthreads().values()))
            except OSError:  # the connection is lost
                self.wait_until_there()
        return self._workers

    @property
    def generation(self) -> int:
        return 0

    def submit(self, name: str, fun: Callable[..., Any], *args: Any) -> Any:
        self._names += 1  # Dask gives one answer for one name
        key = f"{name}-{self._names}-{id(self):x}"
        if self._client.status != "running":
            self.wait_until_there()
        return self._client.submit(fun, *args, key=key, pure=False)

    def cancel(self, futures: Sequence[Any]) -> None:
        if futures and self._client.status == "running":
            self._client.cancel(list(futures))

    def make_anew(self) -> None:
        """Dask starts workers itself."""

    def wait_until_there(self) -> None:
        while self._client.status == "connecting":
            time.sleep(0.1)
        if self._client.status != "running":
            raise JobError(
                "the scheduler of Dask is gone. What was done is kept: the same call, with another "
                "executor, goes on from there."
            )

    def close(self, hurry: bool = False) -> None:
        """The cluster stays."""
        if self._own:
            self._client.close()


def find_pool(executor: Any) -> Callable[[], Pool]:
    """What makes the pool that the option `executor` names.

    Raises:
      ArgumentTypeError: it is no executor.
      UnsupportedError: its processes are forked.
    """
    if isinstance(executor, str):
        kind, _, where = executor.partition(":")
        if kind == "processes" and re.fullmatch("0*[1-9][0-9]*", where):
            return lambda: Pool(_spawned(int(where)), own=True)
        if kind == "dask" and where:
            distributed = needed("distributed", f"executor={executor!r}")
            return lambda: DaskPool(_client_of(distributed, where), own=True)
        raise ArgumentTypeError(
            f'executor={masked(brief(executor))}: give "processes:4", "dask:tcp://host:8786" or '
            '"shard:3/16".'
        )
    if type(executor).__module__.split(".")[0] == "distributed":
        return functools.partial(DaskPool, executor)
    if not isinstance(executor, Executor):
        raise ArgumentTypeError(
            "executor must be None, an executor of concurrent.futures, a client of Dask, or one of "
            f'"processes:4", "dask:tcp://host:8786", "shard:3/16"; got {show(executor)}.'
        )
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise UnsupportedError(
            "executor forks its processes, and JAX does not survive that. Give it "
            'mp_context=multiprocessing.get_context("spawn"), or pass executor="processes:4".'
        )
    return functools.partial(Pool, executor)


def _client_of(distributed: Any, where: str) -> Any:
    try:
        return distributed.Client(where, set_as_default=False)
    except (OSError, ValueError) as error:
        told = f'executor="dask:{where}": there is no scheduler of Dask ({error}).'
        raise JobError(
            f"{masked(told, where)} Start one, `dask scheduler`, and give the address that it "
            "prints."
        ) from None


def _spawned(workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """Sees to it that this process ends when who made it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
