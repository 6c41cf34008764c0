"""How an axis is run: in chunks, a few lanes at a time.

Importing this package defines the primitives of its loops and sweeps.
"""

from batchax.execution import bounded_batching as bounded_batching
from batchax.execution import chunk_batching as chunk_batching
