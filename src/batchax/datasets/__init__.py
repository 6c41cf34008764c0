"""A function of one row over a dataset, from disk to disk: what `batchax.map` does.

A plan (`plan.py`) cuts the rows into units, each of which is committed at once. Sources
(`sources.py`) hand out the rows of a unit, one compiled program (`row_function.py`) computes them,
a store (`store.py`) keeps the results, and the job's `journal.py` says which units it has.
Who runs which unit, and when, is for an engine to say (`pipeline.py`): the plan does not know.
"""
