"""Running a batching rule of the user's, and checking what it returns."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.core import Tracer, eval_jaxpr

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Axis
from batchax.kernel.captured import closes_over_tracers, program_behind, resolve
from batchax.kernel.rule_results import describe_rule, fitted, noting, split_pair
from batchax.user_rules.arguments import Arguments
from batchax.user_rules.collectives import run_with_collectives

RuleFunction = Callable[..., tuple[Any, Any]]


@_compat.held_weakly
@dataclass(frozen=True)
class UserRule:
    """The batching rule of one call: what the user gave, and how to call it.

    Equal for calls that do the same, so that programs with such calls can be compared.

    Attributes:
      name: what messages call the function the rule is for.
      rule: the user's function; None if there is none.
      arguments: the arguments of the call, of which tracers are operands.
      out_tree: the structure of what the function returns.
      out_types: the types of what it returns for one example.
      closed: what the function and the rule close over, which are the first operands.
      source: where the function is called.
    """

    name: str
    rule: RuleFunction | None
    arguments: Arguments
    out_tree: Any
    out_types: tuple[Any, ...]
    closed: tuple[Hashable, ...] = field(compare=False)
    source: Any = field(compare=False)

    @property
    def called(self) -> str:
        """Where the function is called, if that is known, as part of a message."""
        line = _compat.user_line(self.source)
        return f" (called at {line})" if line else ""

    @property
    def shown(self) -> str:
        """The name of the user's rule."""
        return getattr(self.rule, "__qualname__", self.name)

    @functools.cached_property
    def asks(self) -> tuple[str, ...]:
        """Which of the names of the axis the rule asks for."""
        return _asked_for(self.rule)

    @property
    def told_name(self) -> bool:
        """Whether the rule asks for the name of the axis."""
        return "axis_name" in self.asks

    def run(
        self, axis: Axis, flags: Sequence[bool], closed: Sequence[Any], operands: Sequence[Value]
    ) -> tuple[list[Any], list[bool]]:
        """The results for all lanes, and which of them are batched, at axis 0.

        Args:
          axis: the axis being mapped.
          flags: which operands are batched, at axis 0.
          closed: the values of the tracers that the function closes over.
          operands: the operands of the call.
        """

        def call(*xs: Any) -> tuple[list[Any], list[bool]]:
            return self._call(axis, flags, xs)

        named = self.told_name and axis.name is not None
        if not (named or closes_over_tracers(self.rule)):
            return call(*operands)
        types = list(map(jax.typeof, operands))
        names = [(axis.name, axis.size)] if named else []
        # Tracers may be of a trace that is over, and are then values of the function's, too.
        try:
            with _compat.usable(self.closed):
                staged, out_flags = _compat.stage_described(
                    call, types, axis_env=names, transformation="custom_vmap"
                )
        except jax.errors.UnexpectedTracerError as error:
            raise self._closes_over("of a transformation that is over") from error
        consts = self._resolved(staged.consts, closed)
        if named:
            outs = run_with_collectives(axis, staged.jaxpr, consts, operands, flags)
        else:
            outs = eval_jaxpr(staged.jaxpr, consts, *operands)
        return outs, out_flags

    def _resolved(self, consts: Sequence[Value], closed: Sequence[Any]) -> list[Any]:
        by_id = dict(zip(map(id, self.closed), closed, strict=True))
        values, positions = resolve(program_behind(self.rule), consts)
        for const, x, position in zip(consts, values, positions, strict=True):
            if id(const) in by_id:
                continue
            if position is not None:
                raise self._closes_over("that is batched")
            if isinstance(x, Tracer) and not _compat.is_live(x):
                raise self._closes_over("of a transformation that is over")
        return [by_id.get(id(c), x) for c, x in zip(consts, values, strict=True)]

    def _closes_over(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{describe_rule(self.rule)}, the batching rule of {self.name}{self.called}, uses a "
            f"value {what}. Pass the value as an argument of {self.name}, or let the rule close "
            "over the value itself, not over an object that holds it."
        )

    def _call(
        self, axis: Axis, flags: Sequence[bool], operands: Sequence[Value]
    ) -> tuple[list[Any], list[bool]]:
        if self.rule is None:
            raise UnsupportedError(
                f"{self.name} is a custom_vmap function without a batching rule, and is batched. "
                f"Give it one: @{self.name}.def_vmap, or leave @custom_vmap out."
            )
        args, kwargs = self.arguments.rebuild(operands)
        in_batched = self.arguments.flags(flags)
        spmd = axis.spmd_name
        told = {
            "axis_name": axis.name,
            "spmd_axis_name": spmd[0] if spmd is not None and len(spmd) == 1 else spmd,
        }
        kwargs |= {name: told[name] for name in self.asks}
        with _naming(self):
            result = self.rule(axis.size, in_batched, *args, **kwargs)
        return self._checked(axis, result)

    def _checked(self, axis: Axis, result: Any) -> tuple[list[Any], list[bool]]:
        """What the rule returned, flat, if it is what it has to be."""
        where = f"{describe_rule(self.rule)}, the batching rule of {self.name}{self.called},"
        out, out_batched = split_pair(where, result, "out, out_batched", _WHERE_LANES_ARE)
        if isinstance(out, list) and self.out_tree == jax.tree.structure(0) and len(out) == 1:
            (out,) = out  # the form of the proposal (JAX #9073): lists, of one each
            if isinstance(out_batched, list) and len(out_batched) == 1:
                (out_batched,) = out_batched
        leaves, tree = jax.tree.flatten(out)
        if tree != self.out_tree:
            raise AxisError(
                f"{where} must return `out` of the structure of what {self.name} returns, but "
                f"(each * an array)\n  {_shown(self.out_tree)}\nbecame\n  {_shown(tree)}"
            )
        flags = self._out_flags(where, out, out_batched)
        paths = [jax.tree_util.keystr(k) for k, _ in jax.tree_util.tree_flatten_with_path(out)[0]]
        results = [
            (f"out{path}", leaf, f"out_batched {bool(flag)}", 0 if flag else None, aval)
            for path, leaf, flag, aval in zip(paths, leaves, flags, self.out_types, strict=True)
        ]
        return fitted(axis, where, self.name, results, _WHERE_LANES_ARE), flags

    def _out_flags(self, where: str, out: Any, out_batched: Any) -> list[bool]:
        """A flag for each result, from a tree of flags that is a prefix of the results."""
        wrong = [
            f"  out_batched{jax.tree_util.keystr(keys)}: {flag!r}"
            for keys, flag in jax.tree_util.tree_flatten_with_path(out_batched)[0]
            if not (isinstance(flag, bool) or type(flag).__name__ in ("bool_", "bool"))
        ]
        if wrong:
            raise ArgumentTypeError(
                f"{where} must return True or False for each result in out_batched, but it "
                "returned\n" + "\n".join(wrong)
            )
        try:
            return jax.tree.leaves(jax.tree.broadcast(out_batched, out))
        except ValueError:
            raise AxisError(
                f"{where} must return out_batched of the structure of `out`, or a prefix of it, "
                f"but (each * a leaf) `out` is\n  {_shown(jax.tree.structure(out))}\nand "
                f"out_batched is\n  {_shown(jax.tree.structure(out_batched))}"
            ) from None


_WHERE_LANES_ARE = (
    "A result with out_batched True has the lanes along axis 0; one with False is the same for all "
    "lanes, and has the shape it has for one example."
)


def _asked_for(rule: RuleFunction | None) -> tuple[str, ...]:
    """Which of the names of the axis the rule has keyword-only parameters for."""
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
def _naming(user_rule: UserRule) -> Iterator[None]:
    """Adds to an exception which rule it comes from."""
    rule = describe_rule(user_rule.rule)
    of = f"the batching rule of {user_rule.name}{user_rule.called}"
    try:
        with noting(f"batchax: raised in {rule}, {of}."):
            yield
    except NameError as error:
        if "axis name" in str(error) and not user_rule.told_name:
            error.add_note(
                "A rule may use collectives over the axis being mapped if it has a keyword-only "
                "parameter `axis_name`."
            )
        raise


def _shown(tree: Any) -> str:
    return str(tree).removeprefix("PyTreeDef(").removesuffix(")")
