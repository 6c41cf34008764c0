"""The batching rules, a module for each family of primitives.

Importing this package registers them all.
"""

from batchax.rules import callbacks as callbacks
from batchax.rules import calls as calls
from batchax.rules import collectives as collectives
from batchax.rules import contraction as contraction
from batchax.rules import control_flow as control_flow
from batchax.rules import elementwise as elementwise
from batchax.rules import indexing as indexing
from batchax.rules import linalg as linalg
from batchax.rules import random as random
from batchax.rules import reduction as reduction
from batchax.rules import references as references
from batchax.rules import shape as shape
from batchax.rules import sharding as sharding
from batchax.rules import sorting as sorting
