"""Functions with rules of the user: how such a call is differentiated and batched.

Importing this package registers both.
"""

from batchax.custom_rules import batching as batching
