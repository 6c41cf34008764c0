"""Primitives that arrange elements without computing on them."""
