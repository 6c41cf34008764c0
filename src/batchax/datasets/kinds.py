"""Kinds of sources and of stores, by name: our own, and those that other packages add."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from batchax.jaxprs.spoken import brief

T = TypeVar("T")


class Kinds(Generic[T]):
    """Classes by name, each imported when it is asked for, and no earlier.

    Of our own names nobody else's are looked for: what is installed beside batchax changes nothing
    that it can do by itself, and costs it nothing.

    Args:
      group: of the entry points by which other packages add theirs.
      base: of which all are subclasses.
      own: ``"module:Class"`` for each of our own.
    """

    def __init__(self, group: str, base: type[T], own: Mapping[str, str]) -> None:
        self._group, self._base = group, base
        self._own = {name: EntryPoint(name, value, group) for name, value in own.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._own or (name != "" and bool(self._added(name)))

    def listed(self) -> str:
        """All names as suffixes, for messages."""
        added = sorted({entry.name for entry in entry_points(group=self._group)} - set(self._own))
        *most, last = [f".{name}" for name in (*self._own, *added)]
        return f"{', '.join(most)} and {last}"

    def load(self, name: str) -> type[T]:
        """The class with this name.

        Raises:
          ImportError: it cannot be imported, is none, or there are several; it names the packages.
        """
        entries = [self._own[name]] if name in self._own else self._added(name)
        if not entries:
            raise ImportError(
                f"{self._base.__name__} {name!r}: no package that is installed adds an entry point "
                f"with this name to the group {self._group}. Install the one that did."
            )
        if len(entries) > 1:
            packages = " and ".join(sorted(map(_package, entries)))
            raise ImportError(
                f"{self._base.__name__} {name!r}: the packages {packages} each add an entry point "
                f"with this name to the group {self._group}. Uninstall all but one."
            )
        (entry,) = entries
        where = f"{_package(entry)}: the entry point {name} = {entry.value} of {self._group}"
        try:
            loaded = entry.load()
        except Exception as error:
            raise ImportError(
                f"{where} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        if not (isinstance(loaded, type) and issubclass(loaded, self._base)):
            raise ImportError(
                f"{where} must be a subclass of batchax.datasets.{self._base.__name__}, and is "
                f"{brief(loaded)}."
            )
        return loaded

    def _added(self, name: str) -> list[EntryPoint]:
        return list(entry_points(group=self._group, name=name))


def _package(entry: EntryPoint) -> str:
    return "batchax" if entry.dist is None else entry.dist.name
