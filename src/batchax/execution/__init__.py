"""How an axis is run: in chunks, a few lanes at a time.

Importing this package registers the derivatives of loops and sweeps, and how they are batched.
"""

from batchax.execution import bounded_batching as bounded_batching
from batchax.execution import bounded_derivatives as bounded_derivatives
from batchax.execution import chunk_batching as chunk_batching
from batchax.execution import chunk_derivatives as chunk_derivatives
from batchax.execution import sweep_derivatives as sweep_derivatives
