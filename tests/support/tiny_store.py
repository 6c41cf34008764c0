"""A store for tests of jobs: a folder with a file for each unit. It needs no library."""

import json

import numpy as np

from batchax.datasets import disk
from batchax.errors import JobError, StorageError


class TinyStore:
    def __init__(self, out, plan):
        self.out, self.plan = out, plan

    def prepare(self):
        if self.out.exists():
            raise JobError(f"{self.out} is there already")
        disk.make_folder(self.out.parent)
        disk.remove_unfinished(self.out.parent, self.out.name)
        with disk.replacing(self.out) as beside:
            beside.mkdir()
            disk.replace_file(beside / "meta", json.dumps(self.describe()).encode())

    def clean(self):
        pass

    guard = release = clean

    def missing(self, units):
        return {}

    def verify_unchanged(self, at_end=False):
        pass

    def check(self):
        try:
            content = (self.out / "meta").read_text()
        except OSError as error:
            raise StorageError(f"{self.out} has no meta") from error
        if json.loads(content) != self.describe():
            raise JobError(f"{self.out} has another meta")

    check_ended = check

    def end(self, rows):
        pass

    def write(self, unit, results):
        disk.replace_file(self.file(unit), b"".join(r.tobytes() for r in results))

    def read(self, unit):
        try:
            return [np.frombuffer(self.file(unit).read_bytes(), np.int64)]
        except FileNotFoundError as error:
            raise StorageError(f"{self.file(unit)} is missing") from error

    def result(self):
        return self.out

    def describe(self):
        return {"kind": "tiny", "rows": self.plan.rows}

    def file(self, unit):
        return self.out / str(unit.number)
