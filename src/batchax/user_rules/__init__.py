"""Functions with rules of the user: how such a call is differentiated and batched.

Importing this package registers both.
"""

from batchax.user_rules import batching as batching
