"""The names of types in `_compat`, which all packages annotate with."""

from batchax._compat import Atom as Atom
from batchax._compat import Aval as Aval
from batchax._compat import AxesTree as AxesTree
from batchax._compat import ClosedJaxpr as ClosedJaxpr
from batchax._compat import Dim as Dim
from batchax._compat import Eqn as Eqn
from batchax._compat import HighOperation as HighOperation
from batchax._compat import Jaxpr as Jaxpr
from batchax._compat import Params as Params
from batchax._compat import Program as Program
from batchax._compat import Tree as Tree
from batchax._compat import Value as Value
from batchax._compat import Values as Values
from batchax._compat import Var as Var
