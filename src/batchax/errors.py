"""The exceptions batchax raises, one family with `BatchaxError` at its root.

Each derives from the built-in type that ``jax.vmap`` raises for the same
mistake, so code that catches ``ValueError`` or ``TypeError`` keeps working.
"""

from __future__ import annotations


class BatchaxError(Exception):
    """Base class of all exceptions of batchax.

    Example:
      >>> try:
      ...     bx.vmap(jnp.add)(jnp.ones(3), jnp.ones(4))
      ... except bx.BatchaxError as error:
      ...     print(type(error).__name__)
      AxisError
    """


class AxisError(BatchaxError, ValueError):
    """Reports an axis, size, or specification that does not fit; a ``ValueError``.

    Example:
      >>> bx.vmap(lambda x, y: x + y)(jnp.ones(3), jnp.ones(4))
      Traceback (most recent call last):
      batchax.errors.AxisError: the mapped axes must have one size, but they have 3, 4:
        x: shape (3,), axis 0, size 3
        y: shape (4,), axis 0, size 4
      Pass None in in_axes for an argument that is the same ...
    """


class ArgumentTypeError(BatchaxError, TypeError):
    """Reports an argument, option, or output of the wrong type; a ``TypeError``.

    Example:
      >>> bx.vmap(jnp.sin)("three")
      Traceback (most recent call last):
      batchax.errors.ArgumentTypeError: x is to be mapped, but it is of type str, ...
    """


class OptionError(BatchaxError, ValueError):
    """Reports an option with an unknown or out-of-range value; a ``ValueError``.

    Example:
      >>> bx.Reduce("avg")
      Traceback (most recent call last):
      batchax.errors.OptionError: Reduce: kind must be "sum", ... Did you mean "mean"?
    """


class UnsupportedError(BatchaxError, NotImplementedError):
    """Reports a program that batchax does not support; a ``NotImplementedError``.

    The message names the part of the program.

    Example:
      >>> bx.check(lambda x: jax.lax.psum(x, "i"), axis_name="i")(jnp.ones(3))
      Traceback (most recent call last):
      batchax.errors.UnsupportedError: check compares with the function of one lane alone, ...
    """


class MemoryLimitError(BatchaxError, ValueError):
    """Reports that one lane alone exceeds the memory limit; a ``ValueError``.

    Example:
      >>> gram = lambda x: jnp.outer(x, x)
      >>> jax.jit(bx.vmap(gram, batch_size="auto", memory_limit="1kB"))(jnp.ones((10, 100)))
      Traceback (most recent call last):
      batchax.errors.MemoryLimitError: memory_limit is 1000 B, but <lambda> needs ...
    """


class StorageError(BatchaxError, OSError):
    """Reports a file, object, or array that cannot be read or written; an ``OSError``.

    Example:
      >>> bx.map(jnp.sin, "missing.npy")
      Traceback (most recent call last):
      batchax.errors.StorageError: x (missing.npy): there is no such file. ...
    """


class JobError(BatchaxError, RuntimeError):
    """Reports a job that is damaged, in use, or of another call; a ``RuntimeError``.

    The existing output is unchanged.

    Example:
      >>> report = bx.map(jnp.sin, np.arange(4.0), out="y.npy", progress=False)
      >>> bx.map(jnp.cos, np.arange(4.0), out="y.npy", progress=False)
      Traceback (most recent call last):
      batchax.errors.JobError: y.npy holds results of another call: ...
    """


class RowError(BatchaxError, RuntimeError):
    """Reports a row of a dataset for which the function fails; a ``RuntimeError``.

    Committed units are kept, and the same call of `map` resumes.

    Example:
      >>> x = np.array([1.0, -1.0])
      >>> bx.map(jnp.log, x, on_nonfinite="raise", progress=False)
      Traceback (most recent call last):
      batchax.errors.RowError: row 1 ...
    """


class ProcessesError(BatchaxError, RuntimeError):
    """Reports that processes did not all make the same call; a ``RuntimeError``.

    All processes raise it, so that none waits for the others.

    Example:
      >>> try:
      ...     losses = bx.gather(jnp.ones(3))
      ... except bx.ProcessesError as error:  # on every process
      ...     print(error)  # which of them called what
    """


class SequentialFallbackWarning(UserWarning):
    """Warns that a primitive without a batching rule runs sequentially.

    The message names the primitive and the line that uses it.

    Example:
      >>> import warnings
      >>> from jax.extend.core import Primitive
      >>> cube_p = Primitive("cube")
      >>> _ = cube_p.def_abstract_eval(lambda x: x)
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("error", bx.SequentialFallbackWarning)
      ...     bx.vmap(cube_p.bind)(jnp.arange(3))
      Traceback (most recent call last):
      batchax.errors.SequentialFallbackWarning: the primitive `cube` at ... has no batching rule...
    """


class SmallerChunksWarning(UserWarning):
    """Warns that memory ran out, and that the batch continues in smaller chunks.

    Example:
      >>> import warnings
      >>> with warnings.catch_warnings():  # raise an error instead
      ...     warnings.simplefilter("error", bx.SmallerChunksWarning)
      ...     print(bx.vmap(jnp.square, batch_size=2)(jnp.arange(4)))
      [0 1 4 9]
    """


class RuleReplacedWarning(UserWarning):
    """Warns that a batching rule of batchax was replaced, for the whole process.

    Example:
      >>> import warnings
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("error", bx.RuleReplacedWarning)
      ...     bx.register_rule("sin")(lambda axis, args, axes: (args[0], axes[0]))
      Traceback (most recent call last):
      batchax.errors.RuleReplacedWarning: batchax has a batching rule for the primitive `sin` ...
    """


class MismatchError(BatchaxError, AssertionError):
    """Reports that a batched function differs from a loop over the examples.

    `check` raises it; an ``AssertionError``.

    Example:
      >>> double = bx.custom_vmap(lambda x: 2 * x)
      >>> _ = double.def_vmap(lambda axis_size, in_batched, x: (x + 2, True))
      >>> bx.check(double)(jnp.arange(3.0))
      Traceback (most recent call last):
      batchax.errors.MismatchError: <lambda> differs under batching from what it does ...
    """


class RuleMismatchError(MismatchError):
    """Reports that a batching rule differs from a loop over the examples.

    `check_rule` raises it; an ``AssertionError``.

    Example:
      >>> double = bx.custom_vmap(lambda x: 2 * x)
      >>> _ = double.def_vmap(lambda axis_size, in_batched, x: (x + 2, True))
      >>> bx.check_rule(double, jnp.ones(2))
      Traceback (most recent call last):
      batchax.errors.RuleMismatchError: the batching rule of <lambda> differs from a loop ...
    """
