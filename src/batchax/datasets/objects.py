"""Objects of a store: read, put under conditions, listed. What moves bytes is obstore.

A store has no files to append to, to rename or to lock. What it has is that an object is put whole
or not at all, and on a condition: that there is none of that name, or that it is what it was. Every
answer may be lost, so whoever is told that the condition was not met looks who met it before.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from batchax.datasets.addresses import ObjectPath
from batchax.datasets.failures import needed
from batchax.datasets.masking import masked
from batchax.datasets.place import UnreachableError
from batchax.errors import StorageError

T = TypeVar("T")

RETRIES = {  # of a request, by the library
    "max_retries": 4,
    "retry_timeout": datetime.timedelta(seconds=60),
    "backoff": {
        "init_backoff": datetime.timedelta(milliseconds=100),
        "max_backoff": datetime.timedelta(seconds=5),
        "base": 2,
    },
}
TIMEOUTS = {"connect_timeout": "10s", "timeout": "60s"}
_ENDPOINTS = (  # variables of the environment
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "AZURITE_BLOB_STORAGE_URL",
    "GOOGLE_BASE_URL",
)


class Version(NamedTuple):
    """What tells an object from what was, or will be, under its name."""

    e_tag: str | None
    version: str | None

    @property
    def name(self) -> str:
        """The same for each answer: not all say the version, nor have quotes around the tag."""
        return (self.e_tag or self.version or "").strip('"')

    def condition(self) -> dict[str, str]:
        """For obstore: put only if it is this one."""
        return {name: x for name, x in self._asdict().items() if x is not None}


class Meta(NamedTuple):
    """What is known of an object without its content.

    Attributes:
      size: in bytes.
      version: which one it is.
      modified: when it was put, by the clock of the store, in seconds since 1970.
    """

    size: int
    version: Version
    modified: float


def read(path: ObjectPath) -> bytes:
    """An object's content.

    Raises:
      FileNotFoundError: there is none.
    """
    return read_version(path)[0]


def read_version(path: ObjectPath) -> tuple[bytes, Version]:
    """The same, and which one it was."""

    def get() -> tuple[bytes, Version]:
        got = _obstore().get(_bucket(path), path.key)
        return bytes(got.bytes()), _version(got.meta)

    return _asked(path, "read", get)


def read_part(path: ObjectPath, start: int, length: int) -> tuple[bytes, Version]:
    """A part of an object, and which version it is of."""

    def get() -> tuple[bytes, Version]:
        options = {"range": (start, start + length)}
        got = _obstore().get(_bucket(path), path.key, options=options)
        return bytes(got.bytes()), _version(got.meta)

    return _asked(path, "read", get)


def meta(path: ObjectPath) -> Meta:
    """What is known of an object.

    Raises:
      FileNotFoundError: there is none.
    """
    return _meta(_asked(path, "looked at", lambda: _obstore().head(_bucket(path), path.key)))


def put(path: ObjectPath, content: bytes) -> Version:
    """Puts an object, whatever is there."""
    return _put(path, content, "overwrite")


def create(path: ObjectPath, content: bytes) -> Version:
    """Puts an object where there is none.

    Raises:
      FileExistsError: there is one, with another content: one with this content was put by a
        request whose answer was lost, or is as good as that.
    """
    return _unless_lost(path, content, "create")


def replace(path: ObjectPath, content: bytes, unless: Version) -> Version:
    """Puts an object in the place of that version of it.

    Raises:
      FileExistsError: it is another one, or gone.
    """
    return _unless_lost(path, content, unless.condition())


def remove(path: ObjectPath) -> None:
    """Removes an object; that there is none is no error."""
    with contextlib.suppress(FileNotFoundError):
        _asked(path, "removed", lambda: _obstore().delete(_bucket(path), path.key))


def below(path: ObjectPath) -> Iterator[tuple[ObjectPath, Meta]]:
    """All objects whose names begin with this one and a slash, in no order."""

    def listed() -> list[Any]:
        chunks = _obstore().list(_bucket(path), path.key or None)
        return [entry for chunk in chunks for entry in chunk]

    for entry in _asked(path, "listed", listed):
        yield ObjectPath(path.scheme, path.bucket, entry["path"]), _meta(entry)


def exists(path: ObjectPath) -> bool:
    """Whether there is an object of this name, or one below it."""
    try:
        meta(path)
        return True
    except FileNotFoundError:
        pass
    some = lambda: next(iter(_obstore().list(_bucket(path), path.key, chunk_size=1)), [])
    return bool(len(_asked(path, "listed", some)))


def _put(path: ObjectPath, content: bytes, mode: Any) -> Version:
    def ask() -> Version:
        return _version(
            _obstore().put(_bucket(path), path.key, content, mode=mode, use_multipart=False)
        )

    return _asked(path, "written", ask)


def _unless_lost(path: ObjectPath, content: bytes, mode: Any) -> Version:
    try:
        return _put(path, content, mode)
    except (FileExistsError, FileNotFoundError):
        try:
            there, version = read_version(path)
        except FileNotFoundError:
            raise FileExistsError(f"{path} is gone") from None
        if there == content:
            return version
        raise FileExistsError(f"{path} is another one") from None


def _asked(path: ObjectPath, done: str, ask: Callable[[], T]) -> T:
    """What a request returns; its errors become Python's own, or a sentence without secrets."""
    errors = needed("obstore.exceptions", f"{path.scheme}://")
    try:
        return ask()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path}") from None
    except (errors.AlreadyExistsError, errors.PreconditionError):
        raise FileExistsError(f"{path} is another one") from None
    except StorageError:
        raise
    except (errors.BaseError, OSError, ValueError) as error:
        # Without the cause: its text would be in the traceback.
        told = f"{path} could not be {done}: {without_secrets(error)}"
        raise UnreachableError(told) from None


def without_secrets(error: BaseException) -> str:
    """What an error of the library's says in its first lines, without what lets others in."""
    said = str(error).split("\n\nDebug source")[0].strip()
    said = masked(said)
    return f"{' '.join(said.split())[:400] or type(error).__name__}."


def _version(entry: Any) -> Version:
    return Version(entry["e_tag"], entry["version"])


def _meta(entry: Any) -> Meta:
    return Meta(entry["size"], _version(entry), entry["last_modified"].timestamp())


def _obstore() -> Any:
    return needed("obstore", "an address such as s3://bucket/key")


def _bucket(path: ObjectPath) -> Any:
    try:
        return _opened(path.scheme, path.bucket, os.getpid())
    except (ImportError, StorageError):
        raise
    except Exception as error:
        raise UnreachableError(
            f"{path.scheme}://{path.bucket} cannot be opened: {without_secrets(error)} Keys, "
            "regions and addresses of servers are taken from the environment."
        ) from None


@functools.cache
def _opened(scheme: str, bucket: str, process: int) -> Any:
    """A client of the library's, with whatever the environment says. Threads may share it.

    A process that is forked makes its own: the threads of its parent's are not in it.
    """
    stores = needed("obstore.store", f"{scheme}://")
    if scheme == "memory":
        return stores.MemoryStore()
    return stores.from_url(
        f"{scheme}://{bucket}", retry_config=RETRIES, client_options=_client_options()
    )


def _client_options() -> dict[str, Any]:
    """Timeouts; and servers without encryption where the environment names one."""
    plain = False
    for name in _ENDPOINTS:
        plain |= _checked(name, os.environ.get(name)) == "http"
    return {**TIMEOUTS, **({"allow_http": True} if plain else {})}


def _checked(name: str, address: str | None) -> str | None:
    """The scheme of the address of a server, which is not repeated if it is none.

    The library ends the thread, or repeats the address with the password in it.
    """
    if not address:
        return None
    try:
        parts = urllib.parse.urlsplit(address)
        scheme = parts.scheme if parts.hostname and parts.port != 0 else ""
    except ValueError:  # it is no port
        scheme = ""
    if scheme not in ("http", "https") or any(map(str.isspace, address)):
        raise UnreachableError(
            f"{name} in the environment is not the address of a server, and is not repeated, since "
            "it may hold a password. Set it to an address such as https://host:9000, with letters "
            "such as / and @ in a password percent-encoded."
        )
    return scheme
