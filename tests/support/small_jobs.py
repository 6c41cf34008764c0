"""A job of 20 rows in five units, taken from step to step by hand."""

import numpy as np

from batchax.datasets.job import open_job
from batchax.datasets.plan import Leaf, Plan, Record, checksum
from batchax.datasets.stores import open_store

PLAN = Plan(20, 2, 4)
LEAF = Leaf("", (20,), np.dtype(np.int64))
CALL = {"program": "p", "inputs": [], "options": {"batch_size": 2}, "jax": "1", "version": None}


def opened(out, call=CALL, plan=PLAN, store=lambda out, plan: open_store(out, [LEAF], plan), **how):
    return open_job(out, lambda _: call, lambda: plan, lambda plan: store(out, plan), **how)


def computed(job, numbers, **more):
    for number in numbers:
        unit = job.plan.unit(number)
        result = np.arange(unit.start, unit.stop)
        job.store.write(unit, [result])
        job.record([Record(unit, [checksum(result)], **more)])
