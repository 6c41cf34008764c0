"""Reductions, cumulative operations and windows."""
