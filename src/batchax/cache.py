"""What outlives a call: all of it is kept in `Cache`s, which all threads share.

Whatever else is mutable belongs to one call or to one thread (a context variable), or is a table
that is filled from outside: of rules, say.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from batchax import _compat

F = TypeVar("F", bound=Callable[..., Any])

# One lock for all caches, so that no two threads wait for each other's. It may be taken twice:
# comparing keys, or a finalizer that runs meanwhile, may come here again.
_lock = threading.RLock()

_all: weakref.WeakSet[Cache] = weakref.WeakSet()


class Cache:
    """Results by key, of which those that were not asked for longest are forgotten first.

    No lock is held while something is built, which may run the user's code. Two threads that ask
    for the same at once may both build it, and get the same one. ``jax.clear_caches()`` empties
    every cache.

    A key says all that the result depends on, JAX's options included where they matter
    (`_compat.trace_context`). Neither keys nor results hold tracers; arrays in them live until
    they are forgotten.

    Attributes:
      of: what is kept, for people.
      most: how many results there may be.
    """

    def __init__(self, of: str, most: int) -> None:
        self.of, self.most = of, most
        self._known: dict[int, dict[Hashable, _Kept]] = {}  # by the `id` of the owner, and key
        self._owners: dict[int, weakref.ref[Any]] = {}
        self._count = 0
        self._lock = _lock  # when Python ends, owners may outlive the names of this module
        with _lock:
            _all.add(self)
        _compat.empty_with_caches(self)

    def get(self, key: Hashable, build: Callable[[], Any], owner: object = None) -> Any:
        """What `build` returns, built only if there is nothing for `key` yet.

        Args:
          key: what the result depends on.
          build: builds it.
          owner: an object that it is remembered for, such as a program, and forgotten with. It is
            known by identity, and not kept alive, unless the result does so.
        """
        # An owner's entries are gone before there can be another object of its `id`.
        entry = self._find(id(owner), key)
        if entry is None:
            built = build()
            with _lock:
                entry = self._find(id(owner), key)  # another thread may have been faster
                if entry is None:
                    entry = self._of(owner)[key] = _Kept(built)
                    self._count += 1
                    self._forget_oldest()
        return entry.value

    def find(self, key: Hashable, owner: object = None) -> Any:
        """What there is for `key`; None if there is nothing."""
        entry = self._find(id(owner), key)
        return None if entry is None else entry.value

    def values(self) -> list[Any]:
        """Returns the cached values, the last read last."""
        with _lock:
            return [kept.value for _, _, kept in self._in_order()]

    def _find(self, number: int, key: Hashable) -> _Kept | None:
        with _lock:
            entry = self._known.get(number, {}).get(key)
            if entry is not None:
                entry.last_used = next(_times)
            return entry

    def cache_clear(self) -> None:
        """Forgets everything. JAX calls it by this name."""
        with _lock:  # what is forgotten is freed once no lookup runs
            self._known, self._owners, self._count, old = {}, {}, 0, self._known
        del old

    def __len__(self) -> int:
        return self._count

    def _of(self, owner: object) -> dict[Hashable, _Kept]:
        number = id(owner)
        if owner is not None and number not in self._owners:
            gone = functools.partial(self._owner_is_gone, number)
            self._owners[number] = weakref.ref(owner, gone)
        return self._known.setdefault(number, {})

    def _owner_is_gone(self, number: int, _: object) -> None:
        # This runs anywhere, also when Python ends: nothing here compares keys, which may fail.
        with self._lock:
            freed = self._owners.pop(number, None), self._known.pop(number, {})
            self._count -= len(freed[1])
        del freed

    def _in_order(self) -> list[tuple[int, Hashable, _Kept]]:
        """Lists all entries, by when they were last read."""
        entries = [
            (number, key, entry)
            for number, kept in self._known.copy().items()
            for key, entry in kept.copy().items()
        ]
        return sorted(entries, key=lambda entry: entry[2].last_used)

    def _forget_oldest(self) -> None:
        if self._count <= self.most:
            return
        # To look for them takes time, so it is done for several at once.
        for number, key, _ in self._in_order()[: max(1, self.most // 8)]:
            kept = self._known.get(number, {})
            self._count -= kept.pop(key, None) is not None
            if not kept:
                self._known.pop(number, None)
                self._owners.pop(number, None)


class _Kept:
    """A result, and when it was last read: no dict changes while keys in it are compared."""

    __slots__ = "last_used", "value"

    def __init__(self, value: object) -> None:
        self.value, self.last_used = value, next(_times)


_times = itertools.count()


def cached(of: str, most: int) -> Callable[[F], F]:
    """Decorator: the results of a function of hashable arguments are kept in a `Cache`.

    They may depend on JAX's options, too.
    """

    def decorate(fun: F) -> F:
        cache = Cache(of, most)

        @functools.wraps(fun)
        def kept(*args: Hashable) -> Any:
            return cache.get((args, _compat.trace_context()), lambda: fun(*args))

        return cast(F, kept)

    return decorate


def cached_on(of: str) -> Callable[[F], F]:
    """Decorator: what a function makes of an object, and of hashables, is kept with the object."""

    def decorate(fun: F) -> F:
        cache = Cache(of, most=4096)

        @functools.wraps(fun)
        def kept(owner: object, *args: Hashable) -> Any:
            return cache.get(args, lambda: fun(owner, *args), owner)

        return cast(F, kept)

    return decorate


def caches() -> list[Cache]:
    with _lock:
        return sorted(_all, key=lambda cache: cache.of)
