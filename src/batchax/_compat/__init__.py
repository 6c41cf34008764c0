"""The only place where batchax touches private JAX or differs by JAX version.

Each name in these modules says why it cannot be had from public JAX. Nothing else in the
package imports from ``jax._src`` or asks which version of JAX is running.

Unless it says otherwise, what is here serves every version from 0.10.2 to 0.12. Where they
differ, it says since when. What is there for the older of two can go when ``pyproject.toml``
asks for the newer: with Python 3.11 at the latest, for which 0.10.2 is the last JAX.
``tests/test_compat.py`` makes an instance of all of it, and says what a new version changed.
"""

from batchax._compat.checkify_rules import *
from batchax._compat.jaxprs import *
from batchax._compat.lines import *
from batchax._compat.numpy_patches import *
from batchax._compat.one_function import *
from batchax._compat.primitives import *
from batchax._compat.row_sizes import *
from batchax._compat.staging import *
