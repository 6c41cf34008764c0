"""What a worker does: units, one at a time, of calls that it finds in files."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from batchax.datasets.addresses import Address, is_url, needed
from batchax.datasets.disk import Place
from batchax.datasets.fingerprint import as_seen_here, but_for_platform, differences
from batchax.datasets.journal import CALLS, JobFiles, Journal
from batchax.datasets.objects import place_of
from batchax.datasets.pipeline import Work
from batchax.datasets.plan import Plan
from batchax.datasets.row_function import RowFunction, staged_batch
from batchax.datasets.sources import as_source
from batchax.datasets.store import reopen_store
from batchax.datasets.units import Policy, not_computed
from batchax.errors import ArgumentTypeError, JobError, UnsupportedError
from batchax.frontend.in_axes import spread_in_axes

_CALL = "call.pickle"


_REPEATED = "repeated"
UNGUARDED = (
    "the script calls bx.map where it is imported, and the processes of executor= import it, so "
    "each makes the same call again. Put the call below `if __name__ == '__main__':`."
)


def refuse_repeated(job: Address) -> None:
    """Raises a JobError in a worker that imports the script which started it, and so makes the call
    again. The attempts of that call, in the folder of the job, are told.
    """
    frames = (frame for frame, _ in traceback.walk_stack(None))
    names = ((frame.f_globals.get("__name__"), frame.f_code.co_name) for frame in frames)
    if ("__mp_main__", "<module>") not in names:
        return
    place = place_of(job)
    for folder in place.folders(job, CALLS):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            place.mark(folder / _REPEATED)
    raise JobError(UNGUARDED)


class EndedError(Exception):
    """A process ended in the middle of an attempt, and did not say why."""


@dataclass(frozen=True)
class Attempts:
    """The attempts of a call.

    Attributes:
      digest: of what is to be done. Others may write to the folder, and what a worker loads is
        code: so it is told by who made the call what to load.
    """

    folder: Address  # of the call. Once it is gone, all of them are over
    digest: str = ""

    @classmethod
    def of_new_call(cls, job: Address, call: bytes) -> Attempts:
        place = place_of(job)
        folder = job / f"{CALLS}{secrets.token_hex(4)}"
        place.put_first(folder / _CALL, call)
        return cls(folder, hashlib.sha256(call).hexdigest())

    @property
    def call(self) -> bytes:
        call = self._place.read(self._call)
        if hashlib.sha256(call).hexdigest() != self.digest:
            raise JobError(
                f"{self._call} was changed after the call was made, and so is not loaded: look who "
                "else may write to that folder."
            )
        return call

    @property
    def is_there(self) -> bool:
        return self._place.exists(self._call)

    @property
    def _call(self) -> Address:
        return self.folder / _CALL

    @property
    def _place(self) -> Place:
        return place_of(self.folder)

    @contextlib.contextmanager
    def running(self, unit: int, attempt: int) -> Iterator[None]:
        with contextlib.suppress(FileNotFoundError):  # the call is over
            try:
                self._place.mark(self._running(unit, attempt))
            except FileExistsError:
                raise EndedError("its worker ended") from None
        try:
            yield
        finally:
            self.forget(unit, attempt)

    def is_running(self, unit: int, attempt: int) -> bool:
        return self._place.exists(self._running(unit, attempt))

    def forget(self, unit: int, attempt: int) -> None:
        self._place.unmark(self._running(unit, attempt))

    @property
    def is_repeated(self) -> bool:
        return self._place.exists(self.folder / _REPEATED)

    def end_all(self) -> None:
        self._place.remove_all(self.folder)

    def _running(self, unit: int, attempt: int) -> Address:
        return self.folder / f"{unit}-{attempt}"


_MOST_BYTES = 64 * 2**20  # of rows in memory that are worth a copy for each worker
_SETTINGS = (  # of JAX that change what a program computes
    "enable_x64",
    "default_matmul_precision",
    "default_prng_impl",
    "numpy_dtype_promotion",
    "threefry_partitionable",
)


@dataclass(frozen=True)
class Call:
    """What a worker has to know."""

    fun: Callable[..., Any]  # the function of one row
    arrays: tuple[Any, ...]  # its arguments: what is on disk as paths
    in_axes: Any  # as for `RowFunction`
    out_axes: Any
    options: dict[str, Any]
    keep: Any
    key: tuple[str, np.ndarray] | None  # what makes the random key, if there is one
    jax: dict[str, Any]  # what JAX is set to
    out: str  # where the output is
    journal_folder: Address  # where journals are
    store: dict[str, Any]  # what it says of itself
    plan: Plan  # which rows are a unit
    policy: Policy  # what becomes of rows that fail
    retries: int  # how many times reading and writing are tried again
    keeps_sums: bool  # as `Work` has it
    platform: str  # of JAX, where the call was made
    seen: dict[str, Any]  # what it computes, and of what, as seen there

    def work(self) -> Work:
        """The work, in the process of a worker."""
        key = None
        if self.key is not None:
            impl, data = self.key
            key = jax.random.wrap_key_data(jax.numpy.asarray(data), impl=impl) if impl else data
        axes = self.in_axes, self.out_axes
        function = RowFunction.of(self.fun, self.arrays, *axes, key, self.options, keep=self.keep)
        here = _seen(function, self.plan.batch_size, self.platform)
        seen, here = [
            x if jax.default_backend() == self.platform else but_for_platform(x)
            for x in (self.seen, here)
        ]
        others = differences(seen, here)
        if others:
            raise JobError(
                f"a worker finds something else than what was asked for: {'; '.join(others)}. Each "
                "worker imports the function and opens the files by itself. Let nothing change "
                "them while a job runs, draw no random numbers where a module is imported, and "
                "make the call again."
            )
        store = reopen_store(self.out, self.store)
        return Work(
            function, self.plan, store, self.policy, self.retries, keeps_sums=self.keeps_sums
        )

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """JAX as it is set where the call was made, in this thread; others may do other calls."""
        with contextlib.ExitStack() as stack:
            for name, value in self.jax.items():
                stack.enter_context(getattr(jax, name)(value))
            yield

    def journal(self, writer: str) -> Journal:
        return Journal(self.journal_folder, writer)


def saved(work: Work, out: Address) -> Attempts:
    """Writes the call down beside the output, in a folder for the attempts at its units."""
    cloudpickle = needed("cloudpickle", "executor, to hand functions to other processes,")
    _check_portable(work.function)
    out = out.absolute() if isinstance(out, Path) else out
    function = work.function
    call = Call(
        function.fun,
        _portable(function),
        function.in_axes,
        function.out_axes,
        function.options,
        _portable_keep(function.keep),
        _parts_of_key(function.key),
        {name: getattr(jax.config, f"jax_{name}") for name in _SETTINGS},
        str(out),
        JobFiles(out).journal,
        work.store.describe(),
        work.plan,
        work.policy,
        work.retries,
        work.keeps_sums,
        jax.default_backend(),
        _seen(function, work.plan.batch_size, jax.default_backend()),
    )
    try:
        content = cloudpickle.dumps(call)
    except Exception as error:
        raise ArgumentTypeError(
            f"executor: {function.name} or its arguments cannot be pickled for other processes: "
            f"{type(error).__name__}: {error} Pass paths in place of open files, and let the "
            "function close over arrays and plain objects only."
        ) from error
    return Attempts.of_new_call(JobFiles(out).folder, content)


def _seen(function: RowFunction, batch_size: int, platform: str) -> dict[str, Any]:
    inputs = function.inputs
    rows = inputs.sources
    shared = list(map(as_source, inputs.shared, inputs.shared_paths))
    staged = staged_batch(function, batch_size), function.of_row
    return as_seen_here(staged, function.staged_row, rows, shared, platform)


def _check_portable(function: RowFunction) -> None:
    mesh = function.options.get("mesh")
    if mesh is not None and mesh != "all":
        raise UnsupportedError(
            "mesh is a mesh of this process's devices, and with executor each worker has its own. "
            'Pass mesh="all": all devices of a worker.'
        )
    for m in function.inputs.mapped:
        size = m.row_bytes * m.rows
        if m.source.in_process and size > _MOST_BYTES:
            raise UnsupportedError(
                f"{m.source.name} has rows in the memory of this process ({size:,} bytes), which "
                "workers cannot read. Save them, numpy.save('x.npy', x), and pass the path."
            )


def _portable(function: RowFunction) -> tuple[Any, ...]:
    """Its arguments, with paths and arrays that mean the same in another process."""
    leaves, rebuild = spread_in_axes(
        function.fun, function.in_axes, function.arrays, {}, objects=False
    )

    values = [
        jax.tree.map(lambda x, mapped=leaf.spec is not None: _from_anywhere(x, mapped), leaf.value)
        for leaf in leaves
    ]
    return rebuild(values)[0]


def _portable_keep(keep: Any) -> Any:
    return {k: _from_anywhere(x, True) for k, x in keep.items()} if isinstance(keep, dict) else keep


def _from_anywhere(x: Any, mapped: bool) -> Any:
    if isinstance(x, Path) or (mapped and isinstance(x, str) and not is_url(x)):
        return type(x)(Path.cwd() / x)
    return np.asarray(x) if isinstance(x, jax.Array) else x


def _parts_of_key(key: Any) -> tuple[str, np.ndarray] | None:
    if key is None:
        return None
    if jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(key)), np.asarray(jax.random.key_data(key))
    return "", np.asarray(key)


_MOST_CALLS = 4  # that a worker keeps compiled


class Done(NamedTuple):
    """What a worker says of a unit that it has written down in its journal."""

    number: int  # of the unit
    rows: int  # how many it has
    bad: int  # how many of them have no result
    seconds: float  # how long it took to read, compute and write


@dataclass(frozen=True)
class _Job:
    """What a worker keeps of a call; `call` is a `Call`, which this module does not import."""

    call: Any
    work: Work
    journal: Any


def run_unit(attempts: Attempts, number: int, attempt: int = 0, given_up: str = "") -> Done:
    """Reads, computes and keeps a unit, and writes that down.

    Args:
      given_up: why none of its rows is to be read and computed, if so.
    """
    _check(attempts)
    with _here(attempts) as job, attempts.running(number, attempt):
        begun, work = time.monotonic(), job.work
        unit = work.plan.unit(number)
        if given_up:
            computed = not_computed(work.function.outputs, unit, given_up)
        else:
            computed = work.begin(unit, work.read(unit))()
        record = work.write(computed)
        job.journal.append(replace(record, attempt=attempt))
        return Done(number, unit.rows, len(record.quarantined), time.monotonic() - begun)


@contextlib.contextmanager
def _here(attempts: Attempts) -> Iterator[_Job]:
    try:
        with _undisturbed():
            job = _job(attempts)
            with job.call.settings():
                _ = job.work.program
                yield job
    except Exception as error:
        raise portable(error) from None


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C in a terminal reaches the processes of a pool, too: what they do is to be kept."""
    in_pool = multiprocessing.parent_process() is not None
    if not in_pool or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def portable(error: Exception) -> Exception:
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    return JobError("".join(traceback.format_exception(error)))


_jobs: OrderedDict[Attempts, _Job] = OrderedDict()
_lock = threading.Lock()


def _job(attempts: Attempts) -> _Job:
    with _lock:
        if attempts not in _jobs:
            call = pickle.loads(attempts.call)
            with call.settings():
                work = replace(call.work(), check=functools.partial(_check, attempts))
                _jobs[attempts] = _Job(call, work, call.journal(_writer()))
            if len(_jobs) > _MOST_CALLS:
                _, old = _jobs.popitem(last=False)
                old.journal.close()
        _jobs.move_to_end(attempts)
        return _jobs[attempts]


def _check(attempts: Attempts) -> None:
    if not attempts.is_there:
        raise JobError(f"the call is over: {attempts.folder} is gone.")


@functools.cache
def _writer() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
