"""Files mapped to memory for as long as nobody writes to them.

What is mapped need not be copied: JAX on a CPU computes from the pages of the file. But who reads a
page of a file that was cut short meanwhile is killed by the system. Linux has a promise against
that, a *lease* (`F_SETLEASE` in fcntl(2)): whoever opens a leased file for writing, or cuts it
short, waits until the lease was given back. A thread looks whether somebody does; then nothing more
of the file is handed out, and the lease is given back once nobody uses what was. After that the
file is read like any other, and its size and time tell what became of it.

Where there are no leases (other systems, most network file systems, files of other users, files
that somebody has open for writing) files are read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import mmap
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from batchax.datasets.npy_layout import Layout

_LOOK = 0.05  # seconds: so long may those wait who open a file for writing
_LEAST = 2**20  # bytes of a file: what takes less is as soon read
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, which Python does not name


class MappedArray:
    """An array in a file, of which parts are handed out as they lie in the system's memory.

    Args:
      path: of the file.
      layout: where in it the array lies.
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self._path, self._layout = path, layout
        self._lock = threading.Lock()
        self._file: MappedFile | None = None
        self._read_it = layout.size < _LEAST

    def __reduce__(self) -> Any:
        return MappedArray, (self._path, self._layout)  # other processes map it by themselves

    def part(self, axis: int, picked: slice) -> np.ndarray | None:
        """The indices that a slice picks along an axis, unchanged for as long as this is there.

        Nobody may write to it. None: they are to be read.
        """
        run = None if self._read_it else self._layout.run(axis, picked)
        if run is None:
            return None
        offset, size, shape = run
        try:
            part = self._open().part(offset, size)
        except (OSError, ValueError):  # whoever reads it instead will say what is wrong
            part = None
        if part is None:
            self._read_it = True
            return None
        part = part.view(self._layout.dtype).reshape(shape)
        return part.T if self._layout.fortran else part

    def release(self) -> None:
        """Lets others write to the file, once nobody uses parts of it."""
        with self._lock:
            if self._file is not None:
                self._file.not_needed()
                self._file.given_back()
                self._file = None

    def _open(self) -> MappedFile:
        with self._lock:
            if self._file is None:
                self._file = MappedFile(self._path)
                weakref.finalize(self, self._file.not_needed)
            return self._file


class MappedFile:
    """A file of which parts are handed out as they lie in the system's memory.

    Raises:
      OSError: there is no lease to be had on it.
    """

    def __init__(self, path: Path) -> None:
        fcntl = _fcntl()
        if not hasattr(fcntl, "F_SETLEASE"):
            raise OSError(errno.ENOTSUP, "there are no leases on this system")
        self._lock = threading.Lock()
        self._wanted = False  # back: by somebody who writes, or as nobody needs it any more
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # We look by ourselves. SIGIO, which would tell us, ends a process; SIGURG does nothing.
            fcntl.fcntl(self._file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            self._map: mmap.mmap | None = mmap.mmap(self._file, 0, prot=mmap.PROT_READ)
            _watch(self)
        except (OSError, ValueError, RuntimeError) as error:
            os.close(self._file)  # and with it the lease
            if isinstance(error, RuntimeError):  # Python ends: no thread begins any more
                raise OSError(errno.EAGAIN, str(error)) from error
            raise

    def part(self, offset: int, size: int) -> np.ndarray | None:
        """So many bytes of it, which nobody can change while this array, or a view of it, is there.

        None if it is not to be mapped any more.

        Raises:
          OSError: they cannot be read.
        """
        with self._lock:
            if self._map is None or self._is_wanted():
                return None
            part = np.frombuffer(self._map, np.uint8, size, offset)
            first = offset // mmap.PAGESIZE * mmap.PAGESIZE
            pages = first, offset + size - first
            # Pages count as this process's memory until they are given back.
            forget = weakref.finalize(part, self._map.madvise, mmap.MADV_DONTNEED, *pages)
            forget.atexit = False
        _populate(part.ctypes.data - (offset - first), offset + size - first)
        return part

    def not_needed(self) -> None:
        """The lease is to be given back soon. Whoever calls this need not wait for anything."""
        self._wanted = True

    def given_back(self) -> bool:
        """Gives the lease back if somebody waits for it, or it is not needed any more.

        Returns:
          whether it is given back; not yet, if somebody still uses a part.
        """
        with self._lock:
            if self._map is None:
                return True
            if not self._is_wanted():
                return False
            gc.collect(0)  # until then, or the next computation, JAX holds what it is done with
            with contextlib.suppress(BufferError):  # somebody uses it
                self._map.close()
                self._map = None
                fcntl = _fcntl()
                with contextlib.suppress(OSError):  # it was taken from us, after 45 seconds
                    fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
                os.close(self._file)
            return self._map is None

    def _is_wanted(self) -> bool:
        fcntl = _fcntl()
        lease = fcntl.fcntl(self._file, fcntl.F_GETLEASE)
        self._wanted = self._wanted or lease != fcntl.F_RDLCK
        return self._wanted


def _fcntl() -> Any:
    """Not all systems have it on which batchax can be imported."""
    try:
        return importlib.import_module("fcntl")
    except ImportError:
        return None


def _populate(address: int, size: int) -> None:
    """Has pages read; unlike Python's `madvise` it lets other threads run meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_READ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_held: set[MappedFile] = set()
_holding = threading.Lock()


def _watch(file: MappedFile) -> None:
    with _holding:
        if not _held:
            threading.Thread(target=_give_back, name="batchax-leases", daemon=True).start()
        _held.add(file)


def _give_back() -> None:
    """Gives leases back that others wait for, until none is held."""
    while True:
        time.sleep(_LOOK)
        with _holding:
            _held.difference_update([file for file in _held if file.given_back()])
            if not _held:
                return
