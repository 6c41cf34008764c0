"""`custom_vmap`: a function with a batching rule of the user."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from batchax import _compat
from batchax.frontend.options import check_callable
from batchax.frontend.outputs import flatten_arrays
from batchax.jaxprs.spoken import name_of
from batchax.user_rules.call import call, with_captured
from batchax.user_rules.own_derivatives import DerivativeRules, call_with_derivatives
from batchax.user_rules.rule import UserRule, split_arguments

P = ParamSpec("P")
R = TypeVar("R")
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


@_compat.api_boundary
class custom_vmap(Generic[P, R]):
    """Gives `fun`, a function of one example, a batching rule.

    Wherever the function meets a batch, of `batchax.vmap` or ``jax.vmap``, the rule
    computes all lanes at once.

    The rule is all there is to write: derivatives of a batch are those of the rule, in
    every order of `vmap`, ``jvp``, ``grad``, ``linearize``, ``jit``, ``checkpoint`` and
    ``scan``. Under two vmaps the rule serves the inner one, and the outer one batches the
    operations of the rule, where it comes to further functions with rules if the rule
    calls any.

    Inside `batchax.vmap` a rule runs once for value and derivative. Where these are not in
    one program (under ``jax.vmap``, in a loop), the derivative computes the function again
    from its arguments, as ``jax.checkpoint`` does. Operations that occur twice under ``jit``
    are compiled once, loops are not.

    Values that are known when the function is called (Python numbers, strings, functions,
    NumPy arrays, and arrays outside of transformations) reach the function and its rules
    as they are.

    Function and rule may close over arrays, differentiated or not. Of a batch of what they
    close over a rule knows nothing: where there is one, and where each lane needs a gradient
    with respect to what is closed over, the function is batched as if it had no rule.
    A gradient of each lane with respect to an argument that all lanes share runs the rule
    for one lane, where that shares expensive work, or with that argument batched.

    Args:
      fun: the function. Its arguments and results are pytrees of arrays; other arguments may be
        any Python objects.

    Raises:
      ArgumentTypeError: (a TypeError) `fun`, or a rule, is not callable, a rule does not
        return a pair or not flags, or the arguments of a call do not fit.
      AxisError: (a ValueError) a rule returns results of another structure, shape or dtype
        than the function implies.
      UnsupportedError: (a NotImplementedError) the function is batched and has no rule, or
        is differentiated and does input or output.

    References:
      JAX #9073, the proposal of ``jax.custom_batching.custom_vmap``, which has no reverse mode.

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
          rule: ``rule(axis_size, in_batched, *args) -> (out, out_batched)``. `in_batched`
            has, for each argument, a tree like it with True for leaves that are batched,
            which have the `axis_size` lanes along axis 0, and False for those that are the
            same for all lanes. At least one is True. `out` is what the function returns,
            for all lanes; `out_batched` says which of its leaves have the lanes along axis
            0, by a tree of bools that may be a prefix of `out`.

            Arguments come by position, defaults included. Those that can only be given by
            keyword come by keyword, if they are given, and last in `in_batched`.

            A keyword-only parameter `axis_name` of the rule receives the name of the axis
            (None if it has none), one `spmd_axis_name` the names of mesh axes that `vmap` was
            given. With the former the rule may use collectives: ``lax.psum(x, axis_name)`` of
            an array with the lanes along axis 0 has each lane's result along axis 0. Where
            `batch_size` runs lanes in chunks a rule receives the lanes of one chunk; one with
            a parameter `axis_name` receives all of them, if the axis has a name.

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
        """Sets the rule for rows of different lengths, packed one after another; a decorator.

        Where `batchax.vmap` comes to the function with rows of a `batchax.Ragged`, the rule
        computes all of them: a kernel of your own, or of a library, finds its way in here. Rows
        that are padded there are packed for it. Without `def_vmap`, lanes of one size are batched
        as those of any function are.

        Derivatives are those of the rule, as for `def_vmap`, or the function's own.

        Args:
          rule: ``rule(rows, ragged, *args) -> (out, out_ragged)``. Arguments come as `def_vmap` has
            them. Those that have the size of a row have, in its place, the elements of all
            rows one after another, and maybe more behind the last, which are zero. `ragged` has,
            for each argument, a tree like it: True for those leaves, False for leaves that have an
            entry for each row, along axis 0, and None for what is the same for all rows.

            `rows` says where they are: ``rows.offsets``, of shape (B + 1,), ``rows.lengths``, of
            shape (B,), ``rows.ids``, the row of each element, B for those behind the last row; all
            are int32. ``len(rows)`` is B, ``rows.max_length`` a bound of the lengths, an int.

            `out` is what the function returns, for all rows; `out_ragged` says the same of its
            leaves, by a tree that may be a prefix of `out`. What is behind the last row may be
            anything.

            The rule is for calls in which arguments and results have one size, at most once each.
            In others, with shapes such as (n, m) or (n + 1,), the function itself is batched.

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
          rule: ``rule(primals, tangents) -> (out, out_tangent)``, as for
            ``jax.custom_jvp``; arguments given by keyword only come last. The tangent of
            an argument that is no array is None. Under vmap the rule is batched by the
            engine, and a call of the function in it by the batching rule.

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

        Both rules are batched by the engine under vmap, and calls of the function in them
        by the batching rule. With `def_jvp` as well, forward mode uses that and reverse
        mode these.

        Args:
          fwd: ``fwd(*args) -> (out, residuals)``, as for ``jax.custom_vjp``; residuals may
            have leaves that are no arrays.
          bwd: ``bwd(residuals, cotangent) -> cotangents``, a tuple with one for each
            argument, or None in place of zeros.

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

    def _bind(self, arguments: Any, operands: Any) -> R:
        @functools.wraps(self.fun)  # JAX's messages name the user's function
        def one_example(*xs: Any) -> tuple[list[Any], Any]:
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

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the instance is the first argument."""
        return self if instance is None else functools.partial(self, instance)
