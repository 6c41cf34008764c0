"""`custom_vmap`: a function with a batching rule of the user."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from batchax import _compat
from batchax.custom_rules.call import call, with_captured
from batchax.custom_rules.own_derivatives import DerivativeRules, call_with_derivatives
from batchax.custom_rules.rule import Arguments, UserRule, split_arguments
from batchax.frontend.options import check_callable, wraps
from batchax.frontend.outputs import flatten_arrays
from batchax.jaxprs.error_format import name_of
from batchax.jaxprs.types import Value, Values

P = ParamSpec("P")
R = TypeVar("R")
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


@_compat.api_boundary
class custom_vmap(Generic[P, R]):
    """Attaches a batching rule to `fun`, a function of one example.

    Example:
      >>> @bx.custom_vmap
      ... def solve(a, b):
      ...     return jnp.linalg.solve(a, b)
      >>> @solve.def_vmap
      ... def solve_batch(axis_size, in_batched, a, b):
      ...     a_batched, b_batched = in_batched
      ...     if not a_batched:  # one matrix: factor it once
      ...         return jnp.linalg.solve(a, b.T).T, True
      ...     b = b if b_batched else jnp.broadcast_to(b, (axis_size, *b.shape))
      ...     return jnp.linalg.solve(a, b[..., None])[..., 0], True
      >>> bx.vmap(solve, (None, 0))(jnp.eye(3), jnp.ones((8, 3))).shape
      (8, 3)

    Under `batchax.vmap` and ``jax.vmap``, the rule computes all lanes at once. Derivatives of a
    batch are those of the rule, in every order of `vmap`, ``jvp``, ``grad``, ``linearize``,
    ``jit``, ``checkpoint``, and ``scan``. Under two vmaps, the rule handles the inner one, and the
    outer one batches the operations of the rule.

    The derivative of a call recomputes the function, or the rule, from its arguments. XLA merges
    equal operations; loops and host callbacks run twice.

    Values that are known in the call (Python numbers, strings, functions, NumPy arrays, and arrays
    outside of transformations) reach the function and its rules unchanged. Function and rule may
    close over arrays. If these are batched, or if each lane needs a gradient with respect to them,
    the function is batched without its rule. A per-lane gradient with respect to a shared argument
    runs the rule for one lane, or with that argument batched.

    Args:
      fun: The function. Its arguments and results are pytrees of arrays; other arguments may be any
        Python object.

    Raises:
      ArgumentTypeError: (a TypeError) `fun` or a rule is not callable, a rule does not return a
        pair or flags, or the arguments of a call do not fit.
      AxisError: (a ValueError) A rule returns results of another structure, shape, or dtype than
        the function.
      UnsupportedError: (a NotImplementedError) The function is batched and has no rule, or is
        differentiated and does input or output.

    References:
      JAX issue 9073, the proposal of ``jax.custom_batching.custom_vmap``, which has no reverse
      mode.
    """

    fun: Callable[P, R]

    def __init__(self, fun: Callable[P, R]) -> None:
        check_callable("custom_vmap", "a function of one example", fun)
        functools.update_wrapper(self, fun)
        self.fun = fun
        self._rule: Callable[..., Any] | None = None
        self._for_rows: Callable[..., Any] | None = None
        self._derivatives = DerivativeRules()

    def def_vmap(self, rule: AnyFunction) -> AnyFunction:
        """Sets the batching rule; a decorator.

        Args:
          rule: ``rule(axis_size, in_batched, *args) -> (out, out_batched)``.

            - `in_batched` is a pytree like each argument, True for batched leaves, which have the
              `axis_size` lanes along axis 0, and False for shared ones. At least one is True.
            - `out` is the result of the function for all lanes. `out_batched` marks the leaves with
              lanes along axis 0, by a pytree of bools that may be a prefix of `out`.
            - Arguments are positional, defaults included. Keyword-only arguments that are passed
              are keywords, last in `in_batched`. For the others, the rule repeats the defaults of
              the function.
            - A keyword-only parameter `axis_name` of the rule receives the name of the axis or
              None, and `spmd_axis_name` the names of mesh axes. ``lax.psum(x, axis_name)`` of an
              array with lanes along axis 0 has the result of each lane along axis 0.
            - In chunks, the rule receives the lanes of one chunk; with a parameter `axis_name`, all
              lanes, if the axis has a name.

        Returns:
          `rule`.

        Raises:
          ArgumentTypeError: (a TypeError) `rule` is not callable.

        Example:
          >>> norm = bx.custom_vmap(lambda x: jnp.sqrt(jnp.sum(x**2)))
          >>> @norm.def_vmap
          ... def norms(axis_size, in_batched, x):
          ...     return jnp.sqrt(jnp.sum(x**2, axis=1)), True
          >>> print(bx.vmap(norm)(jnp.array([[3.0, 4.0], [6.0, 8.0]])))
          [ 5. 10.]
        """
        check_callable("def_vmap", "a batching rule", rule)
        self._rule = rule
        return rule

    def def_rows(self, rule: AnyFunction) -> AnyFunction:
        """Sets the rule for variable-length rows, packed one after another; a decorator.

        `batchax.vmap` calls it for the rows of a `batchax.Ragged`, for kernels of your own or of a
        library. Padded rows are packed for it. Derivatives are those of the rule, or the function's
        own. The rule is for arguments and results with one ragged size, at most once each. Others,
        with shapes such as (n, m) or (n + 1,), use the function itself.

        Args:
          rule: ``rule(rows, ragged, *args) -> (out, out_ragged)``.

            - Arguments are those of `def_vmap`. In place of the size of a row, they have the
              elements of all rows, followed by zeros.
            - `ragged` is a pytree like each argument: True for those leaves, False for leaves with
              an entry for each row along axis 0, None for shared ones.
            - ``rows.offsets`` of shape (B + 1,), ``rows.lengths`` of shape (B,), and ``rows.ids``,
              the row of each element (B after the last row), are int32. ``len(rows)`` is B, and
              ``rows.max_length`` an upper bound of the lengths.
            - `out` is the result for all rows, and `out_ragged` a pytree like `ragged` for its
              leaves, which may be a prefix of `out`. Elements after the last row are ignored.

        Returns:
          `rule`.

        Raises:
          ArgumentTypeError: (a TypeError) `rule` is not callable.

        Example:
          >>> @bx.custom_vmap
          ... def norm(x):  # (n,)
          ...     return jnp.sqrt(jnp.sum(x**2))
          >>> @norm.def_rows
          ... def norms(rows, ragged, x):  # (all elements,)
          ...     squares = jax.ops.segment_sum(x**2, rows.ids, len(rows))
          ...     return jnp.sqrt(squares), False
          >>> x = bx.Ragged.from_rows([jnp.array([3.0, 4.0]), jnp.array([5.0])])
          >>> print(bx.vmap(norm)(x))
          [5. 5.]
        """
        check_callable("def_rows", "a rule for packed rows", rule)
        self._for_rows = rule
        return rule

    def def_jvp(self, rule: AnyFunction) -> AnyFunction:
        """Sets the forward-mode derivative; a decorator.

        Args:
          rule: ``rule(primals, tangents) -> (out, out_tangent)``, as for ``jax.custom_jvp``.
            Keyword-only arguments come last. The tangent of an argument that is not an array is
            None. Under vmap, batchax batches the rule, and calls of the function in it use the
            batching rule.

        Returns:
          `rule`.

        Raises:
          ArgumentTypeError: (a TypeError) `rule` is not callable.

        Example:
          >>> softplus = bx.custom_vmap(lambda x: jnp.log1p(jnp.exp(x)))
          >>> @softplus.def_jvp
          ... def _(primals, tangents):
          ...     return softplus(*primals), jax.nn.sigmoid(*primals) * tangents[0]
          >>> print(jax.grad(softplus)(100.0))  # exp(100) is infinite
          1.0
        """
        check_callable("def_jvp", "a rule `rule(primals, tangents)`", rule)
        self._derivatives = self._derivatives.replace(jvp=rule)
        return rule

    def def_vjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Sets the reverse-mode derivative.

        Under vmap, batchax batches both functions, and calls of the function in them use the
        batching rule. With `def_jvp` as well, forward mode uses that and reverse mode these.

        Args:
          fwd: ``fwd(*args) -> (out, residuals)``, as for ``jax.custom_vjp``. Residuals may have
            leaves that are not arrays.
          bwd: ``bwd(residuals, cotangent) -> cotangents``, a tuple with one for each argument, or
            None for zeros.

        Raises:
          ArgumentTypeError: (a TypeError) `fwd` or `bwd` is not callable.

        Example:
          >>> clipped = bx.custom_vmap(lambda x: x)
          >>> clipped.def_vjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))
          >>> print(jax.grad(lambda x: 10 * clipped(x))(2.0))
          1.0
        """
        check_callable("def_vjp", "a rule `fwd(*args)`", fwd)
        check_callable("def_vjp", "a rule `bwd(residuals, cotangent)`", bwd)
        self._derivatives = self._derivatives.replace(fwd=fwd, bwd=bwd)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function; see the class."""
        arguments, operands = split_arguments(self.fun, args, kwargs)
        if not operands and not _compat.tracing():
            return self.fun(*args, **kwargs)
        if self._derivatives.any and operands:
            rules, name = self._derivatives, self._name
            return call_with_derivatives(rules, name, self._bind, arguments, operands)
        return self._bind(arguments, operands)

    def _bind(self, arguments: Arguments, operands: Values) -> R:
        @wraps(self.fun)  # JAX's messages name the user's function
        def one_example(*xs: Value) -> tuple[list[Any], Any]:
            args, kwargs = arguments.rebuild(xs)
            out = self.fun(*args, **kwargs)  # pyright: ignore[reportCallIssue]
            return flatten_arrays(out)

        types = list(map(jax.typeof, operands))
        staged, out_tree = _compat.stage_described(one_example, types, transformation="custom_vmap")
        (jaxpr,), closed = _compat.hoist_constants(staged)
        for rule in (self._rule, self._for_rows):
            jaxpr, closed = with_captured(jaxpr, closed, rule)
        rule = UserRule(
            self._name,
            self._rule,
            self._for_rows,
            arguments,
            out_tree,
            tuple(staged.out_avals),
            tuple(closed),
            _compat.current_source(),
        )
        outs = call(jaxpr, rule, [*closed, *operands])
        return jax.tree.unflatten(out_tree, outs)

    @property
    def _name(self) -> str:
        return name_of(self.fun)

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., R]:
        """As a method: the instance is the first argument."""
        return self if instance is None else functools.partial(self, instance)
