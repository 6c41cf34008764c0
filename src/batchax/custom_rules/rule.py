"""Runs a user's batching rule, and checks what it returns.

Only tracers are operands. A concrete value cannot be batched or differentiated, and is passed to
the function and its rules as it is: a NumPy array stays one (JAX #14961), and so does a string, a
function or a Python number.

A rule gets whole batches, with the lanes along axis 0. A collective over the mapped axis means
there what it means in the function: of an array with lanes in front each lane contributes its
entry, and gets the result at its own; of an unbatched value each has the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import Literal

from batchax import _compat
from batchax.custom_rules.call import custom_call_p
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.jaxprs.bodies import programs_inside
from batchax.jaxprs.error_format import brief, line_of, name_of, spoken
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.types import Eqn, Jaxpr, Tree, Value, Values
from batchax.kernel.axis import Axis, match_axis
from batchax.kernel.inner import closes_over_tracers, program_behind
from batchax.kernel.interpreter import batch_equation
from batchax.kernel.named_axes import uses_name
from batchax.kernel.registry import describe_rule, fitted, noting, split_pair


@dataclass(frozen=True)
class Arguments:
    """Holds the arguments of a call. Equal if all but the operands are."""

    # The structure of (positional arguments, names, keyword arguments).
    tree: Any
    constants: tuple[Any, ...] = field(compare=False)  # the leaves; None in place of an operand
    operand_leaves: tuple[int, ...]  # which leaves are operands
    constants_key: Hashable

    def rebuild(self, operands: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = list(self.constants)
        for i, x in zip(self.operand_leaves, operands, strict=True):
            filled[i] = x
        args, names, values = jax.tree.unflatten(self.tree, filled)
        return args, dict(zip(names.names, values, strict=True))

    def in_order(self, operands: Values) -> tuple[Any, ...]:
        """Returns the arguments by position, then keyword-only ones."""
        args, kwargs = self.rebuild(operands)
        return (*args, *kwargs.values())

    def with_constants(self, change: Callable[[Any], Any]) -> Arguments:
        constants = tuple(
            x if i in self.operand_leaves else change(x) for i, x in enumerate(self.constants)
        )
        return replace(self, constants=constants)

    @property
    def trees(self) -> list[Any]:
        args, _, kwargs = self.tree.children()
        return [*args.children(), *kwargs.children()]

    def operands_of(self, values: Values) -> list[Any]:
        """Selects the operands' leaves from `values`, each a pytree like its argument or None."""
        leaves = []
        for value, tree in zip(values, self.trees, strict=True):
            full = jax.tree.unflatten(tree, [0] * tree.num_leaves)
            spread = jax.tree.broadcast(value, full, is_leaf=_is_none)
            leaves += jax.tree.leaves(spread, is_leaf=_is_none)
        return [leaves[i] for i in self.operand_leaves]

    def said(self, of_operands: Sequence[Any], of_constants: object) -> list[Any]:
        """Builds the pytrees that a rule gets about its arguments.

        They are in order of definition, keyword-only ones last.
        """
        constants = (of_constants,) * len(self.constants)
        return list(replace(self, constants=constants).in_order(of_operands))


@dataclass(frozen=True)
class _Names:
    """Holds names of keyword arguments, which a dict in a pytree would sort."""

    names: tuple[str, ...]


jax.tree_util.register_static(_Names)


def _is_none(x: Value) -> bool:
    return x is None


def split_arguments(
    fun: Callable[..., Any], args: Values, kwargs: dict[str, Any]
) -> tuple[Arguments, list[Any]]:
    """Splits arguments of a call into constants and operands, by position where possible.

    Raises ArgumentTypeError if `fun` does not accept them.
    """
    args, kwargs = _by_position(fun, args, kwargs)
    leaves, tree = jax.tree.flatten((tuple(args), _Names(tuple(kwargs)), list(kwargs.values())))
    which = tuple(i for i, x in enumerate(leaves) if isinstance(x, Tracer))
    constants = tuple(None if isinstance(x, Tracer) else x for x in leaves)
    key = tuple(map(value_key, constants))
    return Arguments(tree, constants, which, key), [leaves[i] for i in which]


def _by_position(
    fun: Callable[..., Any], args: Values, kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # some callables written in C
        return args, kwargs
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        name = name_of(fun)
        raise ArgumentTypeError(f"{name}(): {error}") from None
    # A rule finds its arguments by position, so none may be left out. It need not have
    # parameters for keywords that are not given.
    by_keyword = bound.kwargs
    bound.apply_defaults()
    return bound.args, by_keyword


def run_with_collectives(
    axis: Axis, jaxpr: Jaxpr, consts: Values, args: Values, batched: Sequence[bool]
) -> list[Any]:
    """Runs the program of a rule whose collectives over `axis` are among its lanes.

    `batched` operands have the lanes along axis 0. Raises UnsupportedError for a collective in a
    loop or branch, or one with a different result for each lane.
    """
    by_lane = {v for v, b in zip(jaxpr.invars, batched, strict=True) if b}

    def run_equation(eqn: Eqn, operands: list[Value]) -> Sequence[Any]:
        dependent = [not isinstance(v, Literal) and v in by_lane for v in eqn.invars]
        if any(dependent):
            by_lane.update(eqn.outvars)
        if not _is_collective(axis, eqn):
            return bind_equation(eqn, operands)
        if eqn.primitive.name == "jit":
            body = eqn.params["jaxpr"]
            return run_with_collectives(axis, body.jaxpr, body.consts, operands, dependent)
        return _of_lanes(axis, eqn, operands, dependent)

    return evaluate(jaxpr, consts, args, run_equation)


def _is_collective(axis: Axis, eqn: Eqn) -> bool:
    # A call with a custom rule is not batched here.
    return eqn.primitive is not custom_call_p and uses_name(eqn, axis.name)


def _of_lanes(axis: Axis, eqn: Eqn, operands: list[Value], dependent: Sequence[bool]) -> list[Any]:
    """Evaluates a collective, with the lanes along axis 0 if an operand has them."""
    positions = [
        0 if d and np.shape(x)[:1] == (axis.size,) else None
        for x, d in zip(operands, dependent, strict=True)
    ]
    hint = f"Map a function in the rule: batchax.vmap(..., axis_name={axis.name!r})."
    where = f"{line_of(eqn)}: {spoken(eqn)} over {axis.name!r}"
    if programs_inside(eqn):
        raise UnsupportedError(f"{where} contains a collective over the lanes of a rule. {hint}")
    outs, out_axes = batch_equation(axis, eqn, operands, positions)
    in_front = any(a is not None for a in positions)
    placed = [
        match_axis(axis, x, a, 0) if in_front else x for x, a in zip(outs, out_axes, strict=True)
    ]
    for x, v, a in zip(placed, eqn.outvars, out_axes, strict=True):
        if np.shape(x) != v.aval.shape or (a is not None and not in_front):
            raise UnsupportedError(
                f"{where} has another result for each lane, which in a rule has no place. {hint}"
            )
    return placed


RuleFunction = Callable[..., tuple[Any, Any]]


@dataclass(frozen=True)
class Form:
    """Describes how a kind of rule reports the placement of its results."""

    flags: str  # the name of the second thing that it returns
    allowed: tuple[bool | None, ...]  # the values that it may have for a result
    meaning: str  # their meaning, for messages

    @property
    def choices(self) -> str:
        *others, last = map(str, self.allowed)
        return f"{', '.join(others)} or {last}"


@_compat.held_weakly
@dataclass(frozen=True)
class UserRule:
    """Describes the batching rule of one call.

    Equal for calls that do the same, so that programs with such calls can be compared.
    """

    name: str  # of the function, in messages
    rule: RuleFunction | None  # the user's function, if any
    for_rows: RuleFunction | None  # that for packed rows, if any
    arguments: Arguments
    out_tree: Any  # the structure of the results
    out_types: tuple[Any, ...]  # their types for one example
    # what function and rule close over: the first operands
    closed: tuple[Hashable, ...] = field(compare=False)
    source: Any = field(compare=False)  # where the function is called

    @property
    def called(self) -> str:
        line = _compat.user_line(self.source)
        return f" (called at {line})" if line else ""

    @property
    def shown(self) -> str:
        return getattr(self.rule, "__qualname__", self.name)

    @functools.cached_property
    def asks(self) -> tuple[str, ...]:
        """Returns which names of the axis the rule takes."""
        return _names_taken(self.rule)

    @property
    def takes_axis_name(self) -> bool:
        return "axis_name" in self.asks

    def run(
        self, axis: Axis, flags: Sequence[bool], closed: Sequence[Any], operands: Values
    ) -> tuple[list[Any], list[bool]]:
        """Runs the rule, and returns the results and which of them are batched, at axis 0.

        `flags` marks the batched operands, and `closed` holds values of the tracers that the
        function closes over.
        """

        def call(*xs: Value) -> tuple[list[Any], list[bool]]:
            return self._call(axis, flags, xs)

        names = (axis.name, axis.size) if self.takes_axis_name and axis.name is not None else None
        if names is None:
            return self.with_closed(self.rule, call, closed, operands)
        staged, consts, out_flags = self._staged(self.rule, call, closed, operands, [names])
        return run_with_collectives(axis, staged.jaxpr, consts, operands, flags), out_flags

    def with_closed(
        self,
        rule: RuleFunction | None,
        call: Callable[..., tuple[list[Any], Any]],
        closed: Sequence[Any],
        operands: Values,
    ) -> tuple[list[Any], Any]:
        """Runs `call`, which calls `rule`, with values `closed` for what that closes over.

        `call` maps operands to arrays and something that is not an array.
        """
        if not closes_over_tracers(rule):
            return call(*operands)
        # Tracing shows which closed-over tracers the rule uses, as constants of the program.
        staged, consts, said = self._staged(rule, call, closed, operands)
        return eval_jaxpr(staged.jaxpr, consts, *operands), said

    def _staged(
        self,
        rule: RuleFunction | None,
        call: Callable[..., tuple[list[Any], Any]],
        closed: Sequence[Any],
        operands: Values,
        names: Sequence[Any] = (),
    ) -> tuple[Any, list[Any], Any]:
        types = list(map(jax.typeof, operands))
        # Tracers may be of a trace that is over, and are then values of the function's, too.
        try:
            with _compat.usable(self.closed):
                staged, said = _compat.stage_described(
                    call, types, axis_env=list(names), transformation="custom_vmap"
                )
        except jax.errors.UnexpectedTracerError as error:
            raise self._closes_over(rule, "of a transformation that is over") from error
        return staged, self._resolved(rule, staged.consts, closed), said

    def _resolved(
        self, rule: RuleFunction | None, consts: Values, closed: Sequence[Any]
    ) -> list[Any]:
        by_id = dict(zip(map(id, self.closed), closed, strict=True))
        program, positions = program_behind(rule), [None] * len(consts)
        values, positions = (consts, positions) if program is None else program.resolve(consts)
        for const, x, position in zip(consts, values, positions, strict=True):
            if id(const) in by_id:
                continue
            if position is not None:
                raise self._closes_over(rule, "that is batched")
            if isinstance(x, Tracer) and not _compat.is_live(x):
                raise self._closes_over(rule, "of a transformation that is over")
        return [by_id.get(id(c), x) for c, x in zip(consts, values, strict=True)]

    def _closes_over(self, rule: RuleFunction | None, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{describe_rule(rule)}, the batching rule of {self.name}{self.called}, uses a "
            f"value {what}. Pass the value as an argument of {self.name}, or let the rule close "
            "over the value itself, not over an object that holds it."
        )

    def _call(
        self, axis: Axis, flags: Sequence[bool], operands: Values
    ) -> tuple[list[Any], list[bool]]:
        if self.rule is None:
            raise UnsupportedError(
                f"{self.name} is a custom_vmap function without a batching rule, and is batched. "
                f"Define one with @{self.name}.def_vmap, or remove @custom_vmap."
            )
        args, kwargs = self.arguments.rebuild(operands)
        in_batched = self.arguments.said(flags, False)
        spmd = axis.spmd_name
        names_of_axis = {
            "axis_name": axis.name,
            "spmd_axis_name": spmd[0] if spmd is not None and len(spmd) == 1 else spmd,
        }
        kwargs |= {name: names_of_axis[name] for name in self.asks}
        with self.naming(self.rule):
            result = self.rule(axis.size, in_batched, *args, **kwargs)
        where = self.where(self.rule)
        leaves, paths, out_flags = self.returned(where, result, _LANES)
        results = [
            (f"out{path}", leaf, f"out_batched {flag}", 0 if flag else None, aval)
            for path, leaf, flag, aval in zip(paths, leaves, out_flags, self.out_types, strict=True)
        ]
        return fitted(axis.size, where, self.name, results, _LANES.meaning), out_flags

    def where(self, rule: RuleFunction | None) -> str:
        return f"{describe_rule(rule)}, the batching rule of {self.name}{self.called},"

    def naming(self, rule: RuleFunction | None) -> AbstractContextManager[None]:
        return _naming(self, rule)

    def returned(
        self, where: str, result: object, form: Form
    ) -> tuple[list[Any], list[str], list[Any]]:
        """Flattens what a rule returned, or raises if the form is wrong.

        Returns results, their paths in `out`, and the placement of each.
        """
        out, flags = split_pair(where, result, f"out, {form.flags}", form.meaning)
        if isinstance(out, list) and self.out_tree == jax.tree.structure(0) and len(out) == 1:
            (out,) = out  # the form of the proposal (JAX #9073): lists, of one each
            if isinstance(flags, list) and len(flags) == 1:
                (flags,) = flags
        leaves, tree = jax.tree.flatten(out)
        if tree != self.out_tree:
            raise AxisError(
                f"{where} must return `out` of the structure of what {self.name} returns, but "
                f"(each * an array)\n  {_shown(self.out_tree)}\nbecame\n  {_shown(tree)}"
            )
        paths = [jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_flatten_with_path(out)[0]]
        return leaves, paths, _out_flags(where, out, flags, form)


def _out_flags(where: str, out: Tree, flags: Tree, form: Form) -> list[Any]:
    """Broadcasts a prefix pytree to one entry for each result."""
    may_be_none = None in form.allowed
    is_leaf = _is_none if may_be_none else None
    wrong = [
        f"  {form.flags}{jax.tree_util.keystr(keys)}: {brief(flag)}"
        for keys, flag in jax.tree_util.tree_flatten_with_path(flags, is_leaf)[0]
        if not (
            isinstance(flag, bool)
            or type(flag).__name__ in ("bool_", "bool")
            or (flag is None and may_be_none)
        )
    ]
    if wrong:
        raise ArgumentTypeError(
            f"{where} must return {form.choices} for each result in {form.flags}, but it "
            "returned\n" + "\n".join(wrong)
        )
    try:
        spread = jax.tree.broadcast(flags, out, is_leaf)
    except ValueError:
        raise AxisError(
            f"{where} must return {form.flags} of the structure of `out`, or a prefix of it, "
            f"but (each * a leaf) `out` is\n  {_shown(jax.tree.structure(out))}\nand "
            f"{form.flags} is\n  {_shown(jax.tree.structure(flags))}"
        ) from None
    return [None if f is None else bool(f) for f in jax.tree.leaves(spread, is_leaf)]


_LANES = Form(
    "out_batched",
    (True, False),
    "A result with out_batched True has the lanes along axis 0; one with False has the shape "
    "it has for one example.",
)


def _names_taken(rule: RuleFunction | None) -> tuple[str, ...]:
    """Returns which names of the axis the rule has keyword-only parameters for."""
    if rule is None:
        return ()
    try:
        parameters = inspect.signature(rule).parameters
    except (TypeError, ValueError):  # some callables written in C
        return ()
    names = ("axis_name", "spmd_axis_name")
    return tuple(
        n for n in names if n in parameters and parameters[n].kind is inspect.Parameter.KEYWORD_ONLY
    )


@contextmanager
def _naming(user_rule: UserRule, rule: RuleFunction | None) -> Iterator[None]:
    of = f"the batching rule of {user_rule.name}{user_rule.called}"
    try:
        with noting(f"batchax: raised in {describe_rule(rule)}, {of}."):
            yield
    except TypeError as error:
        lacking = f"{getattr(rule, '__qualname__', None)}() missing"
        if str(error).startswith(lacking) and "keyword-only" in str(error):
            error.add_note(
                "A rule receives the keyword-only arguments that a call passes. Repeat the "
                f"defaults of {user_rule.name} in the rule."
            )
        raise
    except NameError as error:
        if "axis name" in str(error) and "axis_name" not in _names_taken(rule):
            error.add_note(
                "A rule may use collectives over the axis being mapped if it has a keyword-only "
                "parameter `axis_name`."
            )
        raise


def _shown(tree: Tree) -> str:
    return str(tree).removeprefix("PyTreeDef(").removesuffix(")")
