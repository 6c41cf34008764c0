"""Collectives over named axes."""
