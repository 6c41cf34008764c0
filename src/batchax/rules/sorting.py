"""Sorting and selecting the largest."""
