"""A function of one row over a dataset, from disk to disk: what `batchax.map` does.

A plan (`plan.py`) cuts the rows into units, each of which is committed at once. Sources
(`sources.py`) hand out the rows of a unit, one compiled program (`row_function.py`) computes them,
a store (`store.py`) keeps the results, and the job's `journal.py` says which units it has.
Who runs which unit, and when, is for an engine to say (`pipeline.py`): the plan does not know.

The names here are for packages that add a kind of source or store.
"""

from batchax.datasets.addresses import reading
from batchax.datasets.disk import make_folder, remove_unfinished, replace_file, replacing
from batchax.datasets.plan import Leaf, Rows, Unit
from batchax.datasets.source import Files, Source
from batchax.datasets.store import Store, make_place, part_of, refuse_ragged

__all__ = [
    "Files", "Leaf", "Rows", "Source", "Store", "Unit", "make_folder", "make_place", "part_of",
    "reading", "refuse_ragged", "remove_unfinished", "replace_file", "replacing",
]  # fmt: skip
