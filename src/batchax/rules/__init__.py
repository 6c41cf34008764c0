"""The batching rules, a module for each family of primitives.

Importing this package registers them all.
"""

from batchax.rules import elementwise as elementwise
