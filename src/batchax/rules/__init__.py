"""The batching rules, a module for each family of primitives.

Importing this package registers them all.
"""

from batchax.rules import branches as branches
from batchax.rules import callbacks as callbacks
from batchax.rules import calls as calls
from batchax.rules import collectives as collectives
from batchax.rules import contraction as contraction
from batchax.rules import convolution as convolution
from batchax.rules import custom_derivatives as custom_derivatives
from batchax.rules import elementwise as elementwise
from batchax.rules import gather_scatter as gather_scatter
from batchax.rules import impl_programs as impl_programs
from batchax.rules import linalg as linalg
from batchax.rules import loops as loops
from batchax.rules import masking as masking
from batchax.rules import random as random
from batchax.rules import reductions as reductions
from batchax.rules import references as references
from batchax.rules import shape as shape
from batchax.rules import sharding as sharding
from batchax.rules import sorting as sorting
