"""How operations act on padded rows, a module for each family. Importing it registers them."""

from batchax.rows.padded_rules import branches as branches
from batchax.rows.padded_rules import calls as calls
from batchax.rows.padded_rules import contraction as contraction
from batchax.rows.padded_rules import custom_derivatives as custom_derivatives
from batchax.rows.padded_rules import effects as effects
from batchax.rows.padded_rules import elementwise as elementwise
from batchax.rows.padded_rules import finding as finding
from batchax.rows.padded_rules import indexing as indexing
from batchax.rows.padded_rules import linalg as linalg
from batchax.rows.padded_rules import loops as loops
from batchax.rows.padded_rules import positions as positions
from batchax.rows.padded_rules import random as random
from batchax.rows.padded_rules import reduction as reduction
from batchax.rows.padded_rules import scattering as scattering
from batchax.rows.padded_rules import shape as shape
from batchax.rows.padded_rules import sorting as sorting
from batchax.rows.padded_rules import spectra as spectra
from batchax.rows.padded_rules import transforms as transforms
from batchax.rows.padded_rules import windows as windows
