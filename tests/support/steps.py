"""The steps of writing: what is done to files and objects, as tests see it from outside.

`watch` puts itself in the place of what the package calls: to write, sync and rename files, and to
put objects.
"""

import os
import stat
from collections.abc import Callable
from typing import Any

from batchax.datasets import disk, file_stores, objects

BEFORE_WRITE = "before a write"
IN_WRITE = "in the middle of a write"
AFTER_WRITE = "after a write is durable"
IN_JOURNAL = "in the middle of a journal line"
BEFORE_RENAME = "before a file gets its name"
BEFORE_END = "before the completion mark"

STEPS = (BEFORE_WRITE, IN_WRITE, AFTER_WRITE, IN_JOURNAL, BEFORE_RENAME, BEFORE_END)

_put = objects.put


class _System:
    """The module `os`, with steps."""

    def __init__(self, at_step: Callable[[str], Any]) -> None:
        self._at_step = at_step

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, file: int, content: bytes) -> int:
        half = len(content) // 2
        if os.readlink(f"/proc/self/fd/{file}").endswith(".jsonl"):
            done = os.write(file, content[:half])
            self._at_step(IN_JOURNAL)
            return done + os.write(file, content[half:])
        self._at_step(BEFORE_WRITE)
        done = os.write(file, content[:half])
        self._at_step(IN_WRITE)
        return done + os.write(file, content[half:])

    def pwrite(self, file: int, content: bytes, offset: int) -> int:
        half = len(content) // 2
        self._at_step(BEFORE_WRITE)
        done = os.pwrite(file, content[:half], offset)
        self._at_step(IN_WRITE)
        return done + os.pwrite(file, content[half:], offset + half)

    def fsync(self, file: int) -> None:
        os.fsync(file)
        unnamed = os.readlink(f"/proc/self/fd/{file}").endswith(".unfinished")
        if stat.S_ISDIR(os.fstat(file).st_mode) or not unnamed:
            self._at_step(AFTER_WRITE)

    def replace(self, path: Any, to: Any) -> None:
        self._at_step(BEFORE_END if str(to).endswith("done.json") else BEFORE_RENAME)
        os.replace(path, to)

    def rename(self, path: Any, to: Any) -> None:
        self._at_step(BEFORE_RENAME)
        os.rename(path, to)


def watch(at_step: Callable[[str], Any] | None = None) -> None:
    """Calls `at_step` with the name of each step from now on; nothing, if it is left out."""

    def put(path: Any, content: bytes, *mode: Any) -> Any:
        assert at_step is not None
        if path.name.startswith(("lock", "time-")):
            return _put(path, content, *mode)
        if path.name.endswith(".jsonl"):
            if not content.endswith(disk.TORN):
                at_step(IN_JOURNAL)
            return _put(path, content, *mode)
        at_step(BEFORE_WRITE)
        at_step(BEFORE_END if path.name == "done.json" else BEFORE_RENAME)
        version = _put(path, content, *mode)
        at_step(IN_WRITE)  # another object of the unit may follow
        at_step(AFTER_WRITE)
        return version

    system: Any = os if at_step is None else _System(at_step)
    disk.os = file_stores.os = system
    objects.put = _put if at_step is None else put
