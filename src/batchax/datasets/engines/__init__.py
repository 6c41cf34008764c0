"""Engines run the units of a plan: pools of processes, Dask, or the shards of an array of jobs.

A worker (`worker.py`) gets the path of a file that says what is to be done and the number of a
unit. It reads the rows, computes them, writes the results and says in a journal of its own that
they are durable: nothing large goes through an engine. Who submits units keeps a few in flight
(`engine.py`), and gives those up that end their workers.
"""
