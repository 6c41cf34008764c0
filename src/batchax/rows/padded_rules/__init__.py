"""How operations act on padded rows, a module for each family. Importing it registers them."""

from batchax.rows.padded_rules import calls as calls
from batchax.rows.padded_rules import contraction as contraction
from batchax.rows.padded_rules import elementwise as elementwise
from batchax.rows.padded_rules import reduction as reduction
from batchax.rows.padded_rules import shape as shape
