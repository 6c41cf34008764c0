"""A call of `map`, in a file from which other processes take it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from batchax.datasets.addresses import Address, is_url
from batchax.datasets.bad_rows import Policy
from batchax.datasets.engines.attempts import Attempts
from batchax.datasets.failures import needed
from batchax.datasets.fingerprint import as_seen_here, but_for_platform, differences
from batchax.datasets.job_files import JobFiles
from batchax.datasets.journal import Journal
from batchax.datasets.plan import Plan
from batchax.datasets.program import staged_batch
from batchax.datasets.row_function import RowFunction
from batchax.datasets.sources import as_source
from batchax.datasets.stores import reopen_store
from batchax.datasets.work import Work
from batchax.errors import ArgumentTypeError, JobError, UnsupportedError
from batchax.frontend.in_axes import spread_in_axes

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
    """What a worker has to know.

    Attributes:
      fun: the function of one row.
      arrays: its arguments: what is on disk as paths.
      in_axes, out_axes, options: as for `RowFunction`.
      key: what makes the random key, if there is one.
      jax: what JAX is set to.
      out: where the output is.
      journal_folder: where journals are.
      store: what it says of itself.
      plan: which rows are a unit.
      policy: what becomes of rows that fail.
      retries: how many times reading and writing are tried again.
      platform: of JAX, where the call was made.
      seen: what it computes, and of what, as seen there.
    """

    fun: Callable[..., Any]
    arrays: tuple[Any, ...]
    in_axes: Any
    out_axes: Any
    options: dict[str, Any]
    key: tuple[str, np.ndarray] | None
    jax: dict[str, Any]
    out: str
    journal_folder: Address
    store: dict[str, Any]
    plan: Plan
    policy: Policy
    retries: int
    platform: str
    seen: dict[str, Any]

    def work(self) -> Work:
        """The work, in the process of a worker.

        Raises:
          JobError: what is found here, of code and of files, is not what the call was made of.
        """
        key = None
        if self.key is not None:
            impl, data = self.key
            key = jax.random.wrap_key_data(jax.numpy.asarray(data), impl=impl) if impl else data
        function = RowFunction.of(
            self.fun, self.arrays, self.in_axes, self.out_axes, key, self.options
        )
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
        return Work(function, self.plan, store, self.policy, self.retries)

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """JAX as it is set where the call was made, in this thread; others may do other calls."""
        with contextlib.ExitStack() as stack:
            for name, value in self.jax.items():
                stack.enter_context(getattr(jax, name)(value))
            yield

    def journal(self, writer: str) -> Journal:
        """A journal for this writer alone."""
        return Journal(self.journal_folder, writer)


def saved(work: Work, out: Address) -> Attempts:
    """Writes the call down beside the output, in a folder for the attempts at its units.

    Raises:
      UnsupportedError: workers could not do it.
      ImportError: cloudpickle is not installed.
    """
    cloudpickle = needed("cloudpickle", "executor, to hand functions to other processes,")
    _check(work.function)
    out = out.absolute() if isinstance(out, Path) else out
    function = work.function
    call = Call(
        function.fun,
        _portable(function),
        function.in_axes,
        function.out_axes,
        function.options,
        _parts_of_key(function.key),
        {name: getattr(jax.config, f"jax_{name}") for name in _SETTINGS},
        str(out),
        JobFiles(out).journal,
        work.store.describe(),
        work.plan,
        work.policy,
        work.retries,
        jax.default_backend(),
        _seen(function, work.plan.batch_size, jax.default_backend()),
    )
    try:
        content = cloudpickle.dumps(call)
    except Exception as error:
        raise ArgumentTypeError(
            f"executor was given, and {function.name} or its arguments cannot be handed to other "
            f"processes: {type(error).__name__}: {error} Give paths in place of open files, and "
            "let the function close over arrays and plain objects only."
        ) from error
    return Attempts.of_new_call(JobFiles(out).folder, content)


def _seen(function: RowFunction, batch_size: int, platform: str) -> dict[str, Any]:
    """What it computes, and of what, as this process sees it."""
    inputs = function.inputs
    rows = [m.source for m in inputs.mapped]
    shared = list(map(as_source, inputs.shared, inputs.shared_paths))
    staged = staged_batch(function, batch_size), function.of_row
    return as_seen_here(staged, function.staged_row, rows, shared, platform)


def _check(function: RowFunction) -> None:
    mesh = function.options.get("mesh")
    if mesh is not None and mesh != "all":
        raise UnsupportedError(
            "mesh is a mesh of this process's devices, and with executor each worker has its own. "
            'Give mesh="all": all devices of a worker.'
        )
    for m in function.inputs.mapped:
        size = m.row_bytes * m.rows
        if m.source.in_process and size > _MOST_BYTES:
            raise UnsupportedError(
                f"{m.source.name} has rows in the memory of this process ({size:,} bytes), which "
                "workers cannot read. Save them, numpy.save('x.npy', x), and give the path."
            )


def _portable(function: RowFunction) -> tuple[Any, ...]:
    """Its arguments, with paths and arrays that mean the same in another process."""
    leaves, rebuild = spread_in_axes(
        function.fun, function.in_axes, function.arrays, {}, objects=False
    )

    def portable(x: Any, mapped: bool) -> Any:
        if isinstance(x, Path) or (mapped and isinstance(x, str) and not is_url(x)):
            return type(x)(Path.cwd() / x)
        return np.asarray(x) if isinstance(x, jax.Array) else x

    values = [
        jax.tree.map(lambda x, mapped=leaf.spec is not None: portable(x, mapped), leaf.value)
        for leaf in leaves
    ]
    return rebuild(values)[0]


def _parts_of_key(key: Any) -> tuple[str, np.ndarray] | None:
    if key is None:
        return None
    if jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(key)), np.asarray(jax.random.key_data(key))
    return "", np.asarray(key)
