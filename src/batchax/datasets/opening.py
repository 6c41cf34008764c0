"""How a job is opened: a new one is begun, and one that is there gone on with, by one at a time."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchax.datasets.addresses import Address
from batchax.datasets.durable import own_folder
from batchax.datasets.fingerprint import differences
from batchax.datasets.job import Job
from batchax.datasets.job_files import JOB, Description, JobFiles
from batchax.datasets.lock import LockedError
from batchax.datasets.place import AnyLock, UnreachableError
from batchax.datasets.plan import Plan
from batchax.datasets.stores import reopen_store
from batchax.errors import ArgumentTypeError, JobError, StorageError
from batchax.frontend.options import is_word
from batchax.jaxprs.spoken import brief

if TYPE_CHECKING:
    from batchax.datasets.store import Store  # which needs libraries, and a job does not

Fingerprint = Callable[[Plan], dict[str, Any]]
RESUME = ("auto", "must", "never")
_PATIENCE = 60.0  # seconds that a shard waits for another that begins the job


def open_job(
    out: Address,
    fingerprint: Fingerprint,
    plan: Callable[[], Plan],
    store: Callable[[Plan], Store],
    resume: str = "auto",
    shard: str | None = None,
    retry_quarantined: bool = False,
    overwrite: bool = False,
) -> Job:
    """The job that computes `out`: a new one, or the one that is there.

    A job that is finished is only read, and by anyone; any other is this process's alone, until
    it is closed, or of those who each have a shard of it.

    Args:
      out: the output.
      fingerprint: of the call with such a plan, see `fingerprint`.
      plan: makes a plan, for a new job.
      store: makes a store for a plan; nothing is on disk before its `prepare`.
      resume: "auto"; "must" refuses to begin a job, "never" to go on with one.
      shard: a name for this process's part of the job, if others have the other parts.
      retry_quarantined: whether a job that is finished without some rows is not.
      overwrite: whether the output and the job that are there are removed first.

    Raises:
      JobError: if `out` is the output of something else or of another call, somebody else is
        at work on it, or `resume` says no.
      StorageError: if it cannot be read or written.
    """
    if not is_word(resume, *RESUME):
        raise ArgumentTypeError(f"resume must be one of {RESUME}, and is {brief(resume)}.")
    files = JobFiles(out)
    if overwrite and files.read() is not None:
        plan, fingerprint = functools.cache(plan), functools.cache(fingerprint)
        store(plan())  # before anything is removed, since arguments may be wrong
        fingerprint(plan())
        _remove(files, begin=True)
    end = time.monotonic() + (_PATIENCE if shard else 0)
    while True:
        try:
            if files.place.exists(files.removing):  # by a call that was killed
                _remove(files)
            if files.read() is None:
                job = _begun(files, fingerprint, plan, store, resume)
                if shard is None:
                    return job
                job.close()  # which has it alone
            how = "auto" if shard else resume
            return _opened(files, fingerprint, store, how, shard, retry_quarantined)
        except LockedError:  # by another shard, which begins it
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _opened(
    files: JobFiles,
    fingerprint: Fingerprint,
    store: Callable[[Plan], Store],
    resume: str,
    shard: str | None,
    retry_quarantined: bool = False,
) -> Job:
    description = files.read()
    assert description is not None
    _check(files, description, fingerprint, resume)
    with contextlib.ExitStack() as on_error:
        kept, locks = _checked(files, description, store), []
        end, plan = _end(files, description, kept, retry_quarantined)
        if end is None:
            locks = _locked(files, on_error, shard)
            end, plan = _end(files, description, kept, retry_quarantined)
            if end is None and files.read_end() is not None:
                files.withdraw_end()
        if end is not None:  # perhaps by who had the lock
            on_error.close()
            locks = []
        job = Job(files, plan, kept, shard or "main", locks, end)
        if locks:
            on_error.callback(kept.let_go)
            job.begin(alone=shard is None)
        job.check_kept()
        on_error.pop_all()
        return job


def _remove(files: JobFiles, begin: bool = False) -> None:
    """Removes the output and its job.

    Args:
      begin: whether this call begins with that; else it ends what a killed call has begun.
    """
    with contextlib.ExitStack() as stack:
        _locked(files, stack)
        description = files.read()
        if begin and description is not None:
            _check_own(files, description)
            files.place.replace(files.removing, b"")
        if files.place.exists(files.removing):
            files.remove()


def _check_own(files: JobFiles, description: Description) -> None:
    """Whether the output is what its job made, and nothing else is in it.

    Raises:
      JobError: it is not, so it is not removed.
      StorageError: nobody can tell, since it is damaged.
    """
    if files.here != files.out and files.place.exists(files.out):
        raise JobError(
            f"overwrite=True removes what batchax made, and {files.out} is something else: the "
            f"results are in {files.here}. Move {files.out} away, or use another out=."
        )
    if not files.place.exists(files.here):
        return
    if isinstance(files.here, Path):
        own_folder(files.here)
    store, end = reopen_store(files.out, description.store), files.read_end()
    (store.check if end is None else store.check_ended)()
    plan = description.plan if end is None else description.plan_at_end(end)
    with Job(files, plan, store, "main", finished=end) as job:
        job.check_kept()
    if (foreign := store.foreign()) is not None:
        raise JobError(
            f"overwrite=True removes what batchax made, and batchax did not make {foreign}. Move "
            "it out of the output, or use another out=."
        )


def _begun(
    files: JobFiles,
    fingerprint: Fingerprint,
    plan: Callable[[], Plan],
    store: Callable[[Plan], Store],
    resume: str,
) -> Job:
    if resume == "must":
        raise JobError(
            f'There is no job to go on with: {files.folder} holds none. With resume="auto" '
            "one is begun."
        )
    _check_not_foreign(files)
    new_plan = plan()  # before anything is on disk, since arguments may be wrong
    kept, call = store(new_plan), fingerprint(new_plan)
    if not files.place.exists(files.folder):  # which may be a link, as those in it may not
        files.place.make_folder(files.folder)
    with contextlib.ExitStack() as on_error:
        locks = _locked(files, on_error)
        if files.read() is not None:  # somebody else was faster
            on_error.close()
            return _opened(files, fingerprint, store, resume, None)
        _check_not_foreign(files)
        _prepare(files, kept)
        files.write(Description(new_plan, kept.describe(), call))
        on_error.callback(kept.let_go)
        job = Job(files, new_plan, kept, "main", locks)
        job.begin(alone=True)
        on_error.pop_all()
        return job


def _locked(
    files: JobFiles, on_error: contextlib.ExitStack, shard: str | None = None
) -> list[AnyLock]:
    """Takes the job's lock alone, or with others who have other shards."""
    locks: list[AnyLock] = []
    main = [(files.lock, shard is not None)]
    for path, shared in [*main, *([(files.lock_of(shard), False)] if shard else [])]:
        try:
            locks.append(files.place.lock(path, shared))
        except LockedError as error:
            on_error.close()
            raise LockedError(
                f"Another call is at work on {files.out}: {error} Wait for it, or end it: the same "
                "call goes on with what it has committed."
            ) from None
        on_error.callback(locks[-1].release)
    files.remove_calls()
    if shard is None:
        for path in files.locks_of_shards:
            files.place.remove(path)
        files.place.clean(files.folder, files.partials)
    return locks


def _check(
    files: JobFiles, description: Description, fingerprint: Fingerprint, resume: str
) -> None:
    if resume == "never":
        raise JobError(
            f'{files.folder} holds a job already, and resume="never" says not to go on with one. '
            f"Use another out=, or delete {files.here} and {files.folder} to begin again."
        )
    changed = differences(description.call, fingerprint(description.plan))
    if changed:
        raise JobError(
            f"{files.out} holds results of another call: {'; '.join(changed)}. Results of both are "
            f"never mixed. Use another out=, or delete {files.here} and {files.folder} to compute "
            "it again."
        )


def _end(
    files: JobFiles, description: Description, kept: Store, retry_quarantined: bool
) -> tuple[dict[str, Any] | None, Plan]:
    """What was said at the end, if nothing is to be computed again; and the plan, then."""
    end = files.read_end()
    if end is None or (retry_quarantined and end["bad"]):
        return None, description.plan
    plan = description.plan_at_end(end)
    return (None, description.plan) if kept.missing(plan.units) else (end, plan)


def _checked(files: JobFiles, description: Description, store: Callable[[Plan], Store]) -> Store:
    ended = files.read_end() is not None
    # In a store of objects there is no folder, so until something is written there is nothing.
    if (ended or isinstance(files.out, Path)) and not files.place.exists(files.here):
        raise JobError(
            f"{files.out} is gone, and {files.folder} says what was in it. Put it back, or delete "
            "that folder, too, to compute it again."
        )
    kept = store(description.plan)
    (kept.check_ended if ended else kept.check)()
    return kept


def _check_not_foreign(files: JobFiles) -> None:
    if files.place.exists(files.journal):
        raise JobError(
            f"{files.folder} has a journal, but job.json is gone, and so nobody knows of what. Put "
            f"it back, or delete {files.here} and {files.folder} to compute it again."
        )
    if files.place.exists(files.here) and not files.place.exists(files.preparing):
        raise JobError(
            f"{files.here} is there already, and is the output of something else: there is no job "
            f"in {files.folder}. Use another out=, or delete it."
        )
    out = files.out.resolve() if isinstance(files.out, Path) else files.out
    for folder in out.parents:
        name = folder.name.removesuffix(JOB)
        if name and JobFiles(folder.with_name(name)).is_described:
            raise JobError(
                f"{files.out} lies in {folder}, which is of another call of map, and holds what "
                "that one writes alone. Give an out= beside it."
            )


def _prepare(files: JobFiles, store: Store) -> None:
    """Makes the output. Who was killed in the middle of it may have left a part."""
    files.place.replace(files.preparing, b"")
    if files.place.exists(files.here):
        try:
            return store.check()
        except UnreachableError:
            raise
        except (JobError, StorageError):
            # Nothing is ever deleted: whoever has a use for it finds it here.
            files.place.set_aside(files.here, files.folder)
    try:
        store.prepare()
    except BaseException:
        if not files.place.exists(files.here):
            files.place.remove(files.preparing)
        raise
