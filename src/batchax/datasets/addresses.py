"""Where files are: a path on a disk, or the name of an object in a store of objects.

Whoever has an address asks `places.place_of` for what can be done there.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from batchax.datasets.masking import masked
from batchax.errors import ArgumentTypeError, UnsupportedError

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
    """The name of an object, or of all whose names begin with it and a slash.

    Attributes:
      scheme: of the kind of store.
      bucket: the bucket, or container.
      key: the name there, without slashes at its ends.
    """

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}"

    def __truediv__(self, more: str | PurePosixPath) -> ObjectPath:
        key = PurePosixPath(self.key) / more
        return ObjectPath(self.scheme, self.bucket, "" if str(key) == "." else str(key))

    @property
    def name(self) -> str:
        """The last part."""
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        """From the last dot in that on."""
        return PurePosixPath(self.key).suffix

    @property
    def parent(self) -> ObjectPath:
        """What it is in; of a whole bucket itself."""
        return self / ".." if not self.key else self._with(PurePosixPath(self.key).parent)

    @property
    def parents(self) -> list[ObjectPath]:
        """All that it is in, the innermost first, without the bucket."""
        above = PurePosixPath(self.key).parents
        return [self._with(path) for path in above if path.name]

    def with_name(self, name: str) -> ObjectPath:
        """The same with another last part."""
        return self._with(PurePosixPath(self.key).with_name(name))

    def _with(self, key: PurePosixPath) -> ObjectPath:
        return ObjectPath(self.scheme, self.bucket, "" if str(key) == "." else str(key))


Address = Path | ObjectPath


def is_url(x: Any) -> bool:
    """Whether it names something by a scheme, be it one that is known or not."""
    return isinstance(x, ObjectPath) or (isinstance(x, str) and _match(x) is not None)


def address(x: str | os.PathLike[str] | ObjectPath, name: str) -> Address:
    """What a path or a URL names.

    Args:
      x: as the user gave it.
      name: of the argument, for messages.

    Raises:
      UnsupportedError: nobody here knows such stores.
      ArgumentTypeError: it is no URL of an object.
    """
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
            f"of its slashes out. Give the string {scheme}://..."
        )
    bucket, _, key = rest.partition("/")
    if "@" in bucket or "?" in rest or "#" in rest:  # and it is not repeated: it may be a secret
        raise ArgumentTypeError(
            f"{name} is a {scheme}:// address with a user, a query or a fragment in it. Give "
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
    """A path with the folder of the user in place of ``~``.

    Raises:
      ArgumentTypeError: there is no such user.
    """
    whole = os.path.expanduser(path)
    first = path.split("/")[0]
    if whole == path and path.startswith("~") and not os.path.lexists(first):
        raise ArgumentTypeError(
            f"{name}={path!r}: there is no user {first[1:]!r} with a home folder. Give the path in "
            f"full, or ./{path} for a file of that name."
        )
    return whole


def _match(text: str) -> re.Match[str] | None:
    """Of one slash only, if the scheme is ours: `Path("s3://x")` has lost the other."""
    match = _URL.fullmatch(text)
    if match is None or (not match[2] and match[1] not in SCHEMES):
        return None
    return match
