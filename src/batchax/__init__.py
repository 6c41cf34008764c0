"""batchax: write a function for one example, run it over any batch, in JAX.

Examples in docstrings begin where these have been imported::

    import jax
    import jax.numpy as jnp
    import numpy as np

    import batchax as bx
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

# Rules and ways to run an axis are registered when their modules are imported.
from batchax import custom_rules, execution, rules  # noqa: F401
from batchax.batch_jaxpr import batch_jaxpr
from batchax.bounded_while import bounded_while
from batchax.config import config
from batchax.custom_vmap import custom_vmap
from batchax.divergence.compact import Compact, LaneSteps
from batchax.errors import (
    ArgumentTypeError,
    AxisError,
    BatchaxError,
    JobError,
    MemoryLimitError,
    MismatchError,
    OptionError,
    ProcessesError,
    RowError,
    RuleMismatchError,
    RuleReplacedWarning,
    SequentialFallbackWarning,
    SmallerChunksWarning,
    StorageError,
    UnsupportedError,
)
from batchax.execution.memory import BatchSizeChoice, batch_size_choices
from batchax.frontend.arguments import local, split_key
from batchax.frontend.containers import LANE_INDEX, register_container, unregister_container
from batchax.frontend.outputs import AUTO, Reduce
from batchax.frontend.reductions import Reduction
from batchax.gather import gather
from batchax.host_function import host_function
from batchax.kernel.axis import Axis, axis_to_front, match_axis, move_axis
from batchax.kernel.inner import ZERO_IF_MAPPED
from batchax.kernel.registry import (
    broadcasting,
    reducing,
    register_rule,
    unregister_rule,
    vectorized,
)
from batchax.scan import scan
from batchax.sequential_vmap import sequential_vmap
from batchax.stack import stack, unstack
from batchax.vmap import vmap

if TYPE_CHECKING:
    from batchax.auto_vmap import auto_vmap
    from batchax.check import check
    from batchax.check_rule import check_rule
    from batchax.clipped_grad import ClippedSum, clipped_grad
    from batchax.explain.explain import Explanation, explain
    from batchax.find_nonfinite import find_nonfinite
    from batchax.map import map
    from batchax.map_batches import map_batches
    from batchax.rows.buckets import Buckets, bucket
    from batchax.rows.call import ragged, size
    from batchax.rows.dynamic_sizes import OutputRows, compress, nonzero, unique
    from batchax.rows.ragged import Ragged
    from batchax.same_program import Comparison, same_program
    from batchax.tiles import tiles

__version__ = "0.1.0"

__all__ = [
    "AUTO", "LANE_INDEX", "ZERO_IF_MAPPED", "ArgumentTypeError", "Axis", "AxisError",
    "BatchSizeChoice", "BatchaxError", "Buckets", "ClippedSum", "Compact", "Comparison",
    "Explanation", "JobError", "LaneSteps", "MemoryLimitError", "MismatchError", "OptionError",
    "OutputRows", "ProcessesError", "Ragged", "Reduce", "Reduction", "RowError",
    "RuleMismatchError", "RuleReplacedWarning", "SequentialFallbackWarning", "SmallerChunksWarning",
    "StorageError", "UnsupportedError",
    "auto_vmap", "axis_to_front", "batch_jaxpr", "batch_size_choices", "bounded_while",
    "broadcasting", "bucket", "check", "check_rule", "clipped_grad", "compress", "config",
    "custom_vmap", "explain", "find_nonfinite", "gather", "host_function", "local", "map",
    "map_batches", "match_axis", "move_axis", "nonzero", "ragged", "reducing", "register_container",
    "register_rule", "same_program", "scan", "sequential_vmap", "size", "split_key", "stack",
    "tiles", "unique", "unregister_container", "unregister_rule", "unstack", "vectorized",
    "vmap",
]  # fmt: skip


def __dir__() -> list[str]:
    """What completion shows: the public names, and not the modules they are made in."""
    return __all__


# The module of each name that is imported when it is first used.
_LATER = {
    name: module
    for module, names in {
        "batchax.auto_vmap": "auto_vmap",
        "batchax.check": "check",
        "batchax.check_rule": "check_rule",
        "batchax.clipped_grad": "ClippedSum clipped_grad",
        "batchax.explain.explain": "Explanation explain",
        "batchax.find_nonfinite": "find_nonfinite",
        "batchax.map": "map",
        "batchax.map_batches": "map_batches",
        "batchax.rows.call": "ragged size",
        "batchax.rows.buckets": "Buckets bucket",
        "batchax.rows.dynamic_sizes": "OutputRows compress nonzero unique",
        "batchax.rows.ragged": "Ragged",
        "batchax.same_program": "Comparison same_program",
        "batchax.tiles": "tiles",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value


class _Package(ModuleType):
    """This module, in which `batchax.map` stays the function when the module of it is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _LATER and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle, which sends functions to other processes, knows modules by their exact class.
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
