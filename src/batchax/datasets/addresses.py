"""Where files are, what formats they have, and which libraries read them."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType

from batchax.errors import ArgumentTypeError, BatchaxError, StorageError, UnsupportedError

_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SIGNATURE|SAS|CONNECTION_STRING", re.I)
_SIGNED = re.compile(
    r"((?:sig|signature|token|x-amz-[a-z-]+|key|secret)\s*[=:]\s*)[^&\s\"']+", re.I
)
_USER = re.compile(r"(:/+)[^\s/?#\"']*@")  # of one slash, too, as pathlib.Path leaves it


def masked(text: str, *addresses: str) -> str:
    """Replaces each secret in a text by dots.

    These are signatures, user info of addresses (in the text, in the environment, in `addresses`),
    and values of variables named like secrets.
    """
    # The text may hold only part of an address, as addresses may be malformed.
    for name, value in [*os.environ.items(), *(("", address) for address in addresses)]:
        if _SECRET.search(name) and len(value) > 3:
            text = text.replace(value, "...")
        user, at, _ = value.partition("://")[2].rpartition("@")
        if at:
            text = text.replace(f"{user}@", "...@")
            password = user.partition(":")[2]
            text = text.replace(password, "...") if len(password) > 3 else text
    return _SIGNED.sub(r"\1...", _USER.sub(r"\1...@", text))


SCHEMES = {
    "s3": "Amazon S3, and what speaks its protocol",
    "gs": "Google Cloud Storage",
    "az": "Azure Blob Storage",
    "memory": "memory of this process",
}

PARTIAL = ".partial"  # after the name of an output that is renamed once it is whole

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(/?)(.*)", re.DOTALL)


@dataclass(frozen=True, order=True)
class ObjectPath:
    """Names an object, or all objects whose names begin with it and a slash."""

    scheme: str  # of the kind of store
    bucket: str  # the bucket, or container
    key: str  # the name there, without slashes at its ends

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    def __truediv__(self, more: str | PurePosixPath) -> ObjectPath:
        return self._with(PurePosixPath(self.key) / more)

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.key).suffix

    @property
    def parent(self) -> ObjectPath:
        return self / ".." if not self.key else self._with(PurePosixPath(self.key).parent)

    @property
    def parents(self) -> list[ObjectPath]:
        above = PurePosixPath(self.key).parents
        return [self._with(path) for path in above if path.name]

    def with_name(self, name: str) -> ObjectPath:
        return self._with(PurePosixPath(self.key).with_name(name))

    def _with(self, key: PurePosixPath) -> ObjectPath:
        return ObjectPath(self.scheme, self.bucket, "" if str(key) == "." else str(key))


Address = Path | ObjectPath


def is_url(x: object) -> bool:
    return isinstance(x, ObjectPath) or (isinstance(x, str) and _match(x) is not None)


def address(x: str | os.PathLike[str] | ObjectPath, name: str) -> Address:
    if isinstance(x, ObjectPath):
        return x
    text = at_home(os.fspath(x), name)
    match = _match(text)
    if match is None:
        return Path(text)
    scheme, slash, rest = match.groups()
    if scheme not in SCHEMES:
        ours = ", ".join(f"{s}:// ({what})" for s, what in SCHEMES.items())
        raise UnsupportedError(
            f"{name} is a {scheme}:// address, and data are read from and written to a local disk, "
            f"or {ours}."
        )
    if not slash:
        raise ArgumentTypeError(
            f"{name}={masked(text)!r} is an address that was made a pathlib.Path, which leaves one "
            f"of its slashes out. Pass the string {scheme}://..."
        )
    bucket, _, key = rest.partition("/")
    if "@" in bucket or "?" in rest or "#" in rest:  # and it is not repeated: it may be a secret
        raise ArgumentTypeError(
            f"{name} is a {scheme}:// address with a user, a query or a fragment in it. Pass "
            f"{scheme}://bucket/key alone; keys and tokens are taken from the environment."
        )
    key = key.strip("/")
    parts = key.split("/")
    if not bucket or not key or any(part in ("", ".", "..") for part in parts):
        raise ArgumentTypeError(
            f"{name}={masked(text)!r} must name a bucket and what is in it, as in {scheme}://bucket/key."
        )
    return ObjectPath(scheme, bucket, key)


def at_home(path: str, name: str) -> str:
    whole = os.path.expanduser(path)
    first = path.split("/")[0]
    if whole == path and path.startswith("~") and not os.path.lexists(first):
        raise ArgumentTypeError(
            f"{name}={path!r}: there is no user {first[1:]!r} with a home folder. Pass the path in "
            f"full, or ./{path} for a file of that name."
        )
    return whole


def _match(text: str) -> re.Match[str] | None:
    """Splits a URL. One slash is enough for known schemes, as `Path("s3://x")` loses one."""
    match = _URL.fullmatch(text)
    if match is None or (not match[2] and match[1] not in SCHEMES):
        return None
    return match


_INSTALLED_BY = {
    "cloudpickle": ("cloudpickle", "'batchax[cluster]'"),
    "distributed": ("Dask", "'batchax[cluster]'"),
    "google_crc32c": ("google-crc32c", "'batchax[data]'"),
    "h5py": ("h5py", "h5py"),
    "obstore": ("obstore", "'batchax[objects]'"),
    "pandas": ("pandas", "pandas"),
    "pyarrow": ("PyArrow", "'batchax[parquet]'"),
    "tensorstore": ("TensorStore", "'batchax[data]'"),
    "xarray": ("xarray", "xarray"),
}


def needed(module: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library, package = _INSTALLED_BY[module.split(".")[0]]
        raise ImportError(f"{what} needs {library}: pip install {package}") from error


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns errors in this block into a StorageError that begins with `what`."""
    try:
        yield
    except (BatchaxError, ImportError, MemoryError):
        raise
    except Exception as error:
        raise StorageError(f"{what} cannot be read: {reason(error)}") from error


def listed(kinds: Iterable[str]) -> str:
    *most, last = [f".{kind}" for kind in kinds]
    return f"{', '.join(most)} and {last}"


def reason(error: Exception) -> str:
    said = re.split(r" \[(?:tensorstore_spec|source locations)=", str(error))[0]
    return f"{said or type(error).__name__}.".replace("..", ".")
