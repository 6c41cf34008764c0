"""The exceptions batchax raises, one family with `BatchaxError` at its root.

Each derives from the built-in type that ``jax.vmap`` raises for the same
mistake, so code that catches ``ValueError`` or ``TypeError`` keeps working.
"""

from __future__ import annotations


class BatchaxError(Exception):
    """Root of every exception that batchax raises on purpose."""


class AxisError(BatchaxError, ValueError):
    """An axis, an axis size or an axis specification that does not fit."""


class ArgumentTypeError(BatchaxError, TypeError):
    """An argument, option or output of the wrong type."""


class UnsupportedError(BatchaxError, NotImplementedError):
    """A program that batchax cannot run correctly and therefore refuses."""


class MemoryLimitError(BatchaxError, ValueError):
    """Not even one lane at a time fits the memory allowed."""


class StorageError(BatchaxError, OSError):
    """A file or an array on disk that cannot be read or written."""


class JobError(BatchaxError, RuntimeError):
    """A job on disk that is another one, is held by somebody else, or is damaged."""


class RowError(BatchaxError, RuntimeError):
    """A row of a dataset for which the function fails."""


class ProcessesError(BatchaxError, RuntimeError):
    """The processes that run one program did not all make the same call."""


class SequentialFallbackWarning(UserWarning):
    """A primitive without a batching rule runs one lane after another."""


class SmallerChunksWarning(UserWarning):
    """Memory ran out and a batch goes on in chunks smaller than asked for."""


class RuleReplacedWarning(UserWarning):
    """A batching rule of batchax's own was replaced, for the whole process."""


class MismatchError(BatchaxError, AssertionError):
    """A batched function does not compute what a loop over the examples computes."""


class RuleMismatchError(MismatchError):
    """A batching rule does not compute what a loop over the examples computes."""
