"""Which files the values of an HDF5 dataset lie in: behind links, virtual datasets, raw storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchax.datasets.failures import needed
from batchax.errors import StorageError

_MOST_LINKS = 16  # one behind another: as many as HDF5 itself follows


def linked_files(file: Any, member: str, name: str) -> list[Path]:
    """The files besides the first that a dataset is read from.

    HDF5 gives fill values, or the data of another run, in the place of a file that is not there or
    is another one now: so each must be there, and is watched.

    Args:
      file: the first file, open in h5py.
      member: path of the dataset in it.
      name: of the argument, for messages.

    Raises:
      StorageError: one of them is missing, or cannot be known.
    """
    own = Path(file.filename).resolve()
    return [path for path in dict.fromkeys(_behind(file, member, name, 0)) if path != own]


def _behind(file: Any, member: str, name: str, links: int) -> Iterator[Path]:
    h5py = needed("h5py", f"{name}: HDF5")
    if links > _MOST_LINKS:
        raise StorageError(f"{name}: {member} in {file.filename} is a link to a link, and so on.")
    at, parts = file, [part for part in member.split("/") if part not in ("", ".")]
    for i, part in enumerate(parts):
        link, rest = at.get(part, getlink=True), parts[i + 1 :]
        if isinstance(link, h5py.ExternalLink):
            target = "/".join([link.path, *rest])
            yield from _of_other(file, link.filename, target, name, links)
            return
        if isinstance(link, h5py.SoftLink):
            base = "" if link.path.startswith("/") else at.name
            yield from _behind(file, "/".join([base, link.path, *rest]), name, links + 1)
            return
        if link is None and links == 0:  # the caller says what there is
            return
        if link is None:
            raise StorageError(f"{name}: there is no {member} in {file.filename}.")
        at = at[part]
    for raw, *_ in getattr(at, "external", None) or ():
        if not Path(raw).is_absolute():
            raise StorageError(
                f"{name}: the values of {member} in {file.filename} are in the file {raw!r}, in "
                "the folder of whichever process reads them. Copy the dataset, or write an "
                "absolute path."
            )
        yield _there(file, raw, name)
    for source in at.virtual_sources() if getattr(at, "is_virtual", False) else ():
        if source.file_name == ".":
            yield from _behind(file, source.dset_name, name, links + 1)
        else:
            yield from _of_other(file, source.file_name, source.dset_name, name, links)


def _of_other(file: Any, path: str, member: str, name: str, links: int) -> Iterator[Path]:
    there = _there(file, path, name)
    yield there
    with needed("h5py", f"{name}: HDF5").File(there, "r") as other:
        yield from _behind(other, member, name, links + 1)


def _there(file: Any, path: str, name: str) -> Path:
    """A file that another one names, by a path from the folder of that one."""
    there = Path(file.filename).resolve().parent / path
    if not there.is_file():
        raise StorageError(
            f"{name}: {file.filename} has rows in {there}, which is not there: they would count as "
            "fill values. Restore it, or copy the dataset to one file."
        )
    return there.resolve()
