"""How operations act on padded rows, a module for each topic. Importing it registers them."""

from batchax.rows.padded_rules import calls as calls
from batchax.rows.padded_rules import linalg as linalg
from batchax.rows.padded_rules import operations as operations
from batchax.rows.padded_rules import positions as positions
