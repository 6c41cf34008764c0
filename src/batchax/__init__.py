"""batchax: write a function for one example, run it over any batch, in JAX."""

from batchax import execution as execution
from batchax import rows as rows
from batchax import rules as rules
from batchax import user_rules as user_rules
from batchax.auto_vmap import auto_vmap as auto_vmap
from batchax.batch_jaxpr import batch_jaxpr as batch_jaxpr
from batchax.bounded_while import bounded_while as bounded_while
from batchax.check_rule import check_rule as check_rule
from batchax.custom_vmap import custom_vmap as custom_vmap
from batchax.divergence.compact import Compact as Compact
from batchax.divergence.lane_steps import LaneSteps as LaneSteps
from batchax.engine.axis import Axis as Axis
from batchax.engine.axis import axis_to_front as axis_to_front
from batchax.engine.axis import match_axis as match_axis
from batchax.engine.axis import move_axis as move_axis
from batchax.engine.containers import register_container as register_container
from batchax.engine.outputs import AUTO as AUTO
from batchax.engine.outputs import Reduce as Reduce
from batchax.engine.registry import register_rule as register_rule
from batchax.engine.rule_makers import broadcasting as broadcasting
from batchax.engine.rule_makers import reducing as reducing
from batchax.engine.rule_makers import vectorized as vectorized
from batchax.errors import ArgumentTypeError as ArgumentTypeError
from batchax.errors import AxisError as AxisError
from batchax.errors import BatchaxError as BatchaxError
from batchax.errors import MemoryLimitError as MemoryLimitError
from batchax.errors import RuleMismatchError as RuleMismatchError
from batchax.errors import SequentialFallbackWarning as SequentialFallbackWarning
from batchax.errors import SmallerChunksWarning as SmallerChunksWarning
from batchax.errors import UnsupportedError as UnsupportedError
from batchax.execution.memory import BatchSizeChoice as BatchSizeChoice
from batchax.execution.memory import batch_size_choices as batch_size_choices
from batchax.explain.explain import explain as explain
from batchax.explain.explanation import Explanation as Explanation
from batchax.host_function import host_function as host_function
from batchax.rows.buckets import Buckets as Buckets
from batchax.rows.buckets import bucket as bucket
from batchax.rows.ragged import Ragged as Ragged
from batchax.rows.ragged import ragged as ragged
from batchax.same_program import Comparison as Comparison
from batchax.same_program import same_program as same_program
from batchax.scan import scan as scan
from batchax.sequential_vmap import sequential_vmap as sequential_vmap
from batchax.vmap import vmap as vmap

__version__ = "0.1.0"
