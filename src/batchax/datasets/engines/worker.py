"""What a worker does: units, one at a time, of calls that it finds in files."""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from batchax.datasets.addresses import Address, is_url, needed
from batchax.datasets.fingerprint import as_seen_here, but_for_platform, differences
from batchax.datasets.journal import CALLS, JobFiles, Journal
from batchax.datasets.objects import place_of
from batchax.datasets.pipeline import Work
from batchax.datasets.row_function import RowFunction, staged_batch
from batchax.datasets.sources import as_source
from batchax.datasets.stores import reopen_store
from batchax.datasets.units import not_computed
from batchax.errors import ArgumentTypeError, JobError, UnsupportedError
from batchax.frontend.in_axes import spread_in_axes

_CALL = "call.pickle"


REPEATED = "repeated"
UNGUARDED = (
    "the script calls bx.map where it is imported, and the processes of executor= import it, so "
    "each makes the same call again. Put the call below `if __name__ == '__main__':`."
)


def reject_repeated(job: Address) -> None:
    """Raises a JobError in a worker that imports the unguarded script that started it."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    names = ((frame.f_globals.get("__name__"), frame.f_code.co_name) for frame in frames)
    if ("__mp_main__", "<module>") not in names:
        return
    place = place_of(job)
    for folder in place.folders(job, CALLS):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            place.mark(folder / REPEATED)
    raise JobError(UNGUARDED)


class EndedError(Exception):
    """Signals that a process ended during an attempt, without an error."""


@dataclass(frozen=True)
class Attempts:
    """Locates the attempts at units of a call."""

    folder: Address  # of the call. Once it is gone, all of them are over
    digest: str = ""

    @classmethod
    def of_new_call(cls, job: Address, call: bytes) -> Attempts:
        folder = job / f"{CALLS}{secrets.token_hex(4)}"
        place_of(job).put_first(folder / _CALL, call)
        return cls(folder, hashlib.sha256(call).hexdigest())

    @property
    def call(self) -> bytes:
        # A worker runs the code that it loads here, so it compares the digest that the caller
        # passed.
        call = place_of(self.folder).read(self.folder / _CALL)
        if hashlib.sha256(call).hexdigest() != self.digest:
            raise JobError(
                f"{self.folder / _CALL} was changed after the call was made, so it is not loaded. "
                "Check who else may write to that folder."
            )
        return call

    def check(self) -> None:
        if not self.has(_CALL):
            raise JobError(f"the call has ended: {self.folder} no longer exists.")

    def has(self, name: str) -> bool:
        return place_of(self.folder).exists(self.folder / name)

    @contextlib.contextmanager
    def running(self, unit: int, attempt: int) -> Iterator[None]:
        place, mark = place_of(self.folder), self.folder / f"{unit}-{attempt}"
        with contextlib.suppress(FileNotFoundError):  # the call is over
            try:
                # The mark exists while an attempt runs. If it exists already, an earlier process
                # ended.
                place.mark(mark)
            except FileExistsError:
                raise EndedError("its worker ended") from None
        try:
            yield
        finally:
            place.unmark(mark)

    def is_running(self, unit: int, attempt: int) -> bool:
        return self.has(f"{unit}-{attempt}")

    def end_all(self) -> None:
        place_of(self.folder).remove_all(self.folder)


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
    function: tuple[Any, ...]  # its `fun`, `arrays` with paths for files, axes, and options
    key: tuple[str, np.ndarray] | None  # the kind and data of the random key, if there is one
    keep: Any
    jax: dict[str, Any]  # settings
    out: str
    journal_folder: Address
    store: dict[str, Any]  # as the store describes itself
    work: tuple[Any, ...]  # the plan, policy, retries, and whether checksums of rows are kept
    platform: str  # of JAX, where the call was made
    seen: dict[str, Any]  # the call's fingerprint there

    def to_work(self, check: Callable[[], None]) -> Work:
        key = None
        if self.key is not None:
            impl, data = self.key
            data = jax.numpy.asarray(data)
            key = jax.random.wrap_key_data(data, impl=impl) if impl else data
        fun, arrays, *axes, options = self.function
        function = RowFunction.of(fun, arrays, axes[0], axes[1], key, options, keep=self.keep)
        plan, policy, retries, keeps_sums = self.work
        both = self.seen, _seen(function, plan.batch_size, self.platform)
        if jax.default_backend() != self.platform:
            both = map(but_for_platform, both)
        others = differences(*both)
        if others:
            raise JobError(
                f"a worker found something else than the caller: {'; '.join(others)}. Each worker "
                "imports the function and opens the files itself. Let nothing change them while a "
                "job runs, draw no random numbers where a module is imported, and make the call "
                "again."
            )
        store = reopen_store(self.out, self.store)
        return Work(function, plan, store, policy, retries, check=check, keeps_sums=keeps_sums)

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, value in self.jax.items():
                stack.enter_context(getattr(jax, name)(value))
            yield


def saved(work: Work, out: Address) -> Attempts:
    cloudpickle = needed("cloudpickle", "executor, to hand functions to other processes,")
    function, platform, keep = work.function, jax.default_backend(), work.function.keep
    _check_portable(function)
    out = out.absolute() if isinstance(out, Path) else out
    if isinstance(keep, dict):
        keep = {name: _from_anywhere(x, True) for name, x in keep.items()}
    axes = function.in_axes, function.out_axes
    call = Call(
        (function.fun, _portable(function), *axes, function.options),
        _parts_of_key(function.key),
        keep,
        {name: getattr(jax.config, f"jax_{name}") for name in _SETTINGS},
        str(out),
        JobFiles(out).journal,
        work.store.describe(),
        (work.plan, work.policy, work.retries, work.keeps_sums),
        platform,
        _seen(function, work.plan.batch_size, platform),
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
    """Returns the arguments with paths and arrays that are valid in another process."""
    leaves, rebuild = spread_in_axes(
        function.fun, function.in_axes, function.arrays, {}, objects=False
    )

    values = [
        jax.tree.map(lambda x, mapped=leaf.spec is not None: _from_anywhere(x, mapped), leaf.value)
        for leaf in leaves
    ]
    return rebuild(values)[0]


def _from_anywhere(x: object, mapped: bool) -> object:
    if isinstance(x, Path) or (mapped and isinstance(x, str) and not is_url(x)):
        return type(x)(Path.cwd() / x)
    return np.asarray(x) if isinstance(x, jax.Array) else x


def _parts_of_key(key: jax.Array | None) -> tuple[str, np.ndarray] | None:
    if key is None:
        return None
    if jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(key)), np.asarray(jax.random.key_data(key))
    return "", np.asarray(key)


_MOST_CALLS = 4  # that a worker keeps compiled


class Done(NamedTuple):
    number: int  # of the unit
    rows: int  # how many it has
    bad: int  # how many of them have no result
    seconds: float  # how long it took to read, compute and write


def run_unit(attempts: Attempts, number: int, attempt: int = 0, given_up: str = "") -> Done:
    """Reads, computes, writes, and journals a unit, or the reason that it is `given_up`."""
    try:
        with _undisturbed(), contextlib.ExitStack() as stack:
            attempts.check()
            call, work, journal = _opened(attempts)
            stack.enter_context(call.settings())
            # The program is compiled before the attempt is marked as running: a death in the
            # compiler is not the unit's fault.
            _ = work.program
            stack.enter_context(attempts.running(number, attempt))
            begun, unit = time.monotonic(), work.plan.unit(number)
            if given_up:
                computed = not_computed(work.function.outputs, unit, given_up)
            else:
                computed = work.begin(unit, work.read(unit))()
            record = work.write(computed)
            if record.quarantined:
                attempts.check()  # a call that an outage ended has withdrawn such rows by then
            journal.append(replace(record, attempt=attempt))
            return Done(number, unit.rows, len(record.quarantined), time.monotonic() - begun)
    except Exception as error:
        raise portable(error) from None


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignores Ctrl-C, which reaches the processes of a pool, too."""
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
    # An error whose class cannot be pickled would break the pool.
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    return JobError("".join(traceback.format_exception(error)))


_jobs: dict[Attempts, tuple[Call, Work, Journal]] = {}
_lock = threading.Lock()


def _opened(attempts: Attempts) -> tuple[Call, Work, Journal]:
    """Returns the cached call of these attempts; the oldest calls are closed."""
    with _lock:
        job = _jobs.pop(attempts, None)
        if job is None:
            call: Call = pickle.loads(attempts.call)
            with call.settings():
                work = call.to_work(attempts.check)
            writer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
            job = call, work, Journal(call.journal_folder, writer)
        _jobs[attempts] = job  # the latest is last
        if len(_jobs) > _MOST_CALLS:
            _jobs.pop(next(iter(_jobs)))[2].close()
        return job
