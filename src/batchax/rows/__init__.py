"""Ragged batches: rows of different lengths, each computed as if it were alone."""

from batchax.rows import numpy_patches as numpy_patches
from batchax.rows import padded_rules as padded_rules
from batchax.rows import run as run
