"""Calls of `batchax.map` that are killed at chosen moments, and resumed until they end.

`python -m kills --count 300 --seed 0` kills so many.
"""
