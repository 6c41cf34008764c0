"""How batchax defines a primitive: all that JAX and batchax need of one, in one call.

Such a primitive exists so that a derivative or a batch axis can treat what it does as one thing. It
stands for ordinary operations of JAX, which determine what is not given: how it is computed and
compiled, what it costs, and that it may hold operations of any kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import (
    bind_with,
    bodies_of,
    describe_bodies,
    held_programs,
    is_rebuilt,
)
from batchax.jaxprs.evaluate import Rewriter, bind_equation, evaluate
from batchax.jaxprs.primitive_facts import enter, operations_of, stands_for
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Params, Value, Values
from batchax.kernel.registry import Rule, serve_own
from batchax.kernel.reverse_rules import with_reverse_rules

T = TypeVar("T")

Flat = Callable[..., list[Any]]
"""A function of arrays that returns a list of arrays."""


def with_values(xs: Values, places: Sequence[int], values: Values) -> list[Any]:
    full = list(xs)
    for i, x in zip(places, values, strict=True):
        full[i] = x
    return full


def tangents_of(
    function: Flat,
    primals: Values,
    moving: Sequence[int],
    tangents: Values,
    of: Sequence[int],
) -> tuple[list[Any], list[Any]]:
    """Returns results of `function`, and tangents of those `of` from those of `moving` operands."""
    some, points = _of_moving(function, primals, moving, of)
    _, dots, outs = jax.jvp(some, points, tuple(tangents), has_aux=True)
    return outs, dots


def pullback_of(
    function: Flat, primals: Values, moving: Sequence[int], of: Sequence[int]
) -> tuple[list[Any], Callable[[Sequence[Any]], Sequence[Any]]]:
    """Returns the results, and a pullback from cotangents `of` results to `moving` operands.

    The pullback is a pytree of residuals.
    """
    some, points = _of_moving(function, primals, moving, of)
    _, pull, outs = jax.vjp(some, *points, has_aux=True)
    return outs, pull


def _of_moving(
    function: Flat, primals: Values, moving: Sequence[int], of: Sequence[int]
) -> tuple[Callable[..., tuple[list[Any], list[Any]]], tuple[Any, ...]]:
    """Restricts `function` to the `moving` operands.

    It returns the results `of`, then all of them.
    """

    def some(*values: Value) -> tuple[list[Any], list[Any]]:
        outs = function(*with_values(primals, moving, values))
        return [outs[k] for k in of], outs

    return some, tuple(primals[i] for i in moving)


def transposed(
    function: Flat,
    others: Sequence[Any],
    linear: Sequence[int],
    types: Sequence[Aval],
    of: Sequence[int],
) -> Callable[[Sequence[Any]], list[Any]]:
    """Transposes a function that is linear in the operands `linear`, whose types are `types`.

    `others` are the values of the other operands, in order, and `of` the results with cotangents.
    """
    rest = iter(others)
    blank = [None if i in linear else next(rest) for i in range(len(others) + len(linear))]

    def of_linear(*values: Value) -> list[Any]:
        outs = function(*with_values(blank, linear, values))
        return [outs[k] for k in of]

    pull = jax.linear_transpose(of_linear, *types)
    return lambda cotangents: list(pull(list(cotangents)))


@dataclass(frozen=True, eq=False)
class Linearized:
    """Holds a program and its derivative, a linear program with a transpose."""

    values: ClosedJaxpr  # results, then residuals
    reads: Sequence[int]  # the inputs that the derivative reads
    residuals: Sequence[Aval]  # their types
    tangents: ClosedJaxpr  # of `reads`, residuals, and tangents of perturbed inputs
    back: Flat  # the transpose: of cotangents in place of tangents
    cotangents: Sequence[Aval]  # their types

    @classmethod
    def of(
        cls,
        program: ClosedJaxpr,
        perturbed: Sequence[int],
        results: Sequence[int],
        saved: Literal["residuals", "nothing"] = "residuals",
    ) -> Linearized:
        """Splits a program.

        "nothing" recomputes it from its inputs, "residuals" saves what JAX saves. Raises JAX's
        ValueError with "residuals" where values and tangents are computed together, as in
        ``lax.reduce_window`` with a function.
        """
        inputs, outputs = program.in_avals, program.out_avals
        dots = [inputs[i].to_tangent_aval() for i in perturbed]
        cotangents = [outputs[k].to_tangent_aval() for k in results]
        names = _compat.names_in_scope()
        reversible = with_reverse_rules(program)
        run = lambda *xs: eval_jaxpr(reversible.jaxpr, reversible.consts, *xs)
        if saved == "nothing":
            n = len(inputs)
            ahead = lambda *xs: tangents_of(run, xs[:n], perturbed, xs[n:], results)[1]
            back = lambda *xs: [*pullback_of(run, xs[:n], perturbed, results)[1]([*xs[n:]])]
            tangents = _compat.stage(ahead, [*inputs, *dots], names)
            return cls(program, range(n), (), tangents, back, cotangents)
        parts: list[tuple[ClosedJaxpr, list[int]]] = []

        def values(*xs: Value) -> list[Any]:
            some, points = _of_moving(run, xs, perturbed, results)
            _, derivative, outs = jax.linearize(some, *points, has_aux=True)
            linear = _compat.stage(derivative, dots, names)
            # Constants of the linear program that are traced are inputs of this one, or residuals.
            # A number is not traced, and stays in the linear program.
            held = zip(linear.jaxpr.constvars, linear.consts, strict=True)
            traced = [(v, x) for v, x in held if isinstance(x, Tracer)]
            places = {id(x): i for i, x in enumerate(xs)}
            read = [(v, places[id(x)]) for v, x in traced if id(x) in places]
            kept = [(v, x) for v, x in traced if id(x) not in places]
            given = [*(v for v, _ in (*read, *kept)), *linear.jaxpr.invars]
            linear = Rewriter(linear, linear.jaxpr.eqns).program(given)
            parts.append((linear, [i for _, i in read]))
            return [*outs, *(x for _, x in kept)]

        # The linear program is available only after `values` is traced.
        whole = _compat.stage(values, inputs, names)
        tangents, reads = parts[-1]
        n = len(tangents.in_avals) - len(dots)

        def back_from_residuals(*xs: Value) -> list[Any]:
            linear = lambda *ys: eval_jaxpr(tangents.jaxpr, tangents.consts, *ys)
            places = range(n, n + len(dots))
            return transposed(linear, xs[:n], places, dots, range(len(results)))(xs[n:])

        residuals = whole.out_avals[len(outputs) :]
        return cls(whole, reads, residuals, tangents, back_from_residuals, cotangents)

    def transpose(self) -> ClosedJaxpr:
        """Traces the transpose, of inputs, residuals, and cotangents of results."""
        n = len(self.reads) + len(self.residuals)
        types = [*self.tangents.in_avals[:n], *self.cotangents]
        return _compat.stage(self.back, types, _compat.names_in_scope())


TangentRule = Callable[[Values, Sequence[int], Values], tuple[list[Any], Sequence[Any]]]
"""Of operands, which of them have tangents, and these: the results and their tangents, or None."""


def with_tangent_rule(function: Flat, rule: TangentRule) -> Flat:
    """Gives `function` the derivative `rule` in forward mode."""
    run = jax.custom_jvp(function)

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def _(primals: Values, tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        outs, dots = rule(primals, moving, [tangents[i] for i in moving])
        none = lambda x: SymbolicZero(jax.typeof(x).to_tangent_aval())
        return outs, [none(x) if t is None else t for x, t in zip(outs, dots, strict=True)]

    return run


def report_errors(
    primitive: _compat.Primitive,
    programs: Sequence[str],
    operations: Callable[..., Any],
) -> None:
    """Has ``checkify`` report errors in the operations that `primitive` stands for.

    `programs` are the parameters that hold jaxprs. Where no error can occur, the primitive stays.
    """
    several = primitive.multiple_results
    bind_all, run_all = (_flat(run, several) for run in (primitive.bind, operations))

    def rule(
        checking: _compat.Checking, operands: Values, params: Params
    ) -> tuple[Any, Sequence[Any]]:
        effects = set().union(*(program.effects for program in held_programs(params, programs)))
        if not checking.needs(effects):
            return checking.error, primitive.bind(*operands, **params)
        types = list(map(jax.typeof, operands))
        stage = lambda params: _compat.stage(lambda *xs: run_all(*xs, **params), types)
        (program,), consts = _compat.hoist_constants(stage(params))
        if all(_compat.checks([effect]) for effect in effects):
            # A derivative is not checked: what has it is the primitive without its checks.
            params = {**params, **{name: _without_checks(params[name]) for name in programs}}
            effects = stage(params).effects if effects else effects
        bind = lambda *xs: bind_all(*xs, **params)
        run, leaves, structure = checking.with_errors(program)
        # With other effects, or constants of a trace around, a `custom_jvp` cannot be built.
        if not effects and not any(isinstance(x, Tracer) for x in consts):
            run = _with_derivative_of(bind, run, len(leaves) + len(consts))
        error, outs = jax.tree.unflatten(structure, run(*leaves, *consts, *operands))
        return error, outs if several else outs[0]

    _compat.set_error_rule(primitive, rule)


def _without_checks(program: T) -> T:
    """Removes runtime checks from a program, a tuple of programs, or None."""
    if isinstance(program, tuple):
        return tuple(map(_without_checks, program))
    if not isinstance(program, ClosedJaxpr) or not _compat.checks(program.effects):
        return program

    def run_equation(eqn: Eqn, xs: Values) -> Sequence[Any]:
        if eqn.primitive.name == "check":
            return []
        opened = is_rebuilt(eqn.primitive) or eqn.primitive.name == "jit"
        if not (_compat.checks(eqn.effects) and opened):
            return bind_equation(eqn, xs)
        inner = [_without_checks(_compat.close(body.program)) for body in bodies_of(eqn)]
        if eqn.primitive.name == "jit":
            return eval_jaxpr(inner[0].jaxpr, inner[0].consts, *xs)
        return bind_with(eqn, xs, inner, [])

    run = lambda *xs: evaluate(program.jaxpr, program.consts, xs, run_equation)
    return _compat.stage(run, program.in_avals)


def _with_derivative_of(
    bind: Callable[..., list[Any]], run: Callable[..., list[Any]], first: int
) -> Callable[..., list[Any]]:
    """Gives `run` the derivative of `bind`.

    `run` has `first` more operands in front, and its last results are those of `bind`.
    """

    def rule(primals: Values, moving: Sequence[int], dots: Values) -> tuple[list[Any], list[Any]]:
        # The errors in front have no tangents. As for a ``jax.custom_jvp`` function, ``checkify``
        # does not check the derivative, and ``checkify`` of the derivative does.
        outs = checked(*primals)
        own = jax.eval_shape(bind, *primals[first:])
        smooth = [k for k, x in enumerate(own) if jnp.issubdtype(x.dtype, jnp.inexact)]
        _, moved = tangents_of(bind, primals[first:], [i - first for i in moving], dots, smooth)
        before = len(outs) - len(own)
        return outs, with_values([None] * len(outs), [before + k for k in smooth], moved)

    checked = with_tangent_rule(run, rule)
    return checked


Derivative = Callable[..., Any]


@dataclass(frozen=True)
class Of:
    """Selects as `jvp` or `transpose` that of other operations that compute the same.

    None selects those that the primitive stands for.
    """

    operations: Callable[..., Any] | None


OF_OPERATIONS: Any = Of(None)
"""As `jvp` or `transpose`: that of the operations which a primitive stands for."""


@dataclass(frozen=True)
class NoDerivative:
    """Marks as `jvp` or `transpose` a derivative that does not exist: a call raises `message`."""

    message: str

    def __call__(self, *args: object, **params: Any) -> NoReturn:
        raise UnsupportedError(self.message)


def declare(name: str, several: bool = True) -> _compat.Primitive:
    """Declares a primitive that `own_primitive` defines in a later module.

    Its derivatives often need the function that binds it. `several`: it returns a list.
    """
    primitive = _compat.Primitive(name)
    primitive.multiple_results = several
    _declared.append(primitive)
    return primitive


def placeholder(name: str, types: Callable[..., Any] | None = None) -> _compat.Primitive:
    """Makes a primitive that is temporarily in a jaxpr. It is not run, batched, or differentiated.

    `types` maps operand types and parameters to result types and effects, for a jaxpr that is
    traced again.
    """
    primitive = _compat.Primitive(name)
    primitive.multiple_results = True
    if types is not None:
        primitive.def_effectful_abstract_eval(types)
    return primitive


_held_p = placeholder("held", lambda *_, held: ([v.aval for v in held.outvars], held.effects))


def held(eqn: Eqn) -> Eqn:
    """Holds an equation as a primitive that JAX does not know, which leaves it as it is."""
    return eqn.replace(primitive=_held_p, params={"held": eqn})


def released(eqn: Eqn) -> Eqn | None:
    """Returns the equation that `held` holds, of the operands that it has now; None for others."""
    if eqn.primitive is not _held_p:
        return None
    was = eqn.params["held"]
    return eqn.replace(primitive=was.primitive, params=was.params, effects=was.effects)


_declared: list[_compat.Primitive] = []


def declared() -> tuple[_compat.Primitive, ...]:
    """Returns all primitives of batchax, which are complete after ``import batchax``."""
    return tuple(_declared)


def own_primitive(
    primitive: _compat.Primitive | str,
    *,
    called: str,
    operations: Callable[..., Any],
    types: Callable[..., Any],
    programs: Sequence[str] = (),
    step: str = "",
    facts: str = "",
    rule: Rule,
    jvp: Derivative | Of = OF_OPERATIONS,
    transpose: Derivative | Of = OF_OPERATIONS,
    compute: Callable[..., Any] | None = None,
    on_cpu: Callable[..., Any] | None = None,
    elsewhere: Callable[..., Callable[..., Any] | None] | None = None,
    checked: Callable[..., Any] | None = None,
    effects: Callable[..., Iterable[Any]] | None = None,
    several: bool = True,
) -> _compat.Primitive:
    """Defines a primitive of batchax.

    Args:
      primitive: its name, or what `declare` returned.
      called: what users call what it does, for messages and listings.
      operations: what it stands for, a function of its operands and parameters made of ordinary
        operations. Compilers, listings, and cost models get these.
      types: the types of its results, from those of its operands and the parameters.
      programs: the parameters that hold programs which it runs, or tuples of them; by default none.
        They say what its effects are, and may hold a collective over an axis that is mapped.
      step: the one of them that holds a step, of a loop that ends on a value; see `ControlFlow`.
      facts: what is true of it, words of `Facts`; by default none.
      rule: how it is batched, by ``jax.vmap`` as well; see `register_rule`.
      jvp: its derivative in forward mode, as JAX wants it, `Of` other operations, or a
        `NoDerivative`; by default that of the operations.
      transpose: its transpose, likewise.
      compute: what it does on arrays outside of a compiled program; the operations one after
        another if not given.
      on_cpu: what a program for a CPU runs in the place of the operations, to the same results.
      elsewhere: from its parameters, what a program for another platform than the default one runs
        in their place, to the same results: they may be what was decided for the default one. None
        for the operations.
      checked: where ``checkify`` looks for errors. If not given, in the operations where there are
        `programs`, and else nowhere: operations may make a NaN that no result has.
      effects: its effects, from its parameters; those of its programs if not given.
      several: whether it has a list of results, and not one.

    Returns:
      The primitive.
    """
    if isinstance(primitive, str):
        primitive = declare(primitive, several)
    compute = operations if compute is None else compute

    def abstract(*avals: Aval, **params: Any) -> tuple[Aval | Sequence[Aval], set[Any]]:
        if effects is not None:
            return types(*avals, **params), set(effects(**params))
        inner = (program.effects for program in held_programs(params, programs))
        return types(*avals, **params), set().union(*inner)

    primitive.def_impl(compute)
    primitive.def_effectful_abstract_eval(abstract)
    stands_for(primitive, operations, called, on_cpu, elsewhere)
    steps = programs if "control" in facts.split() else ()
    _compat.set_key_use(primitive, operations_of, lambda params: held_programs(params, steps))
    if programs:
        held = lambda params: held_programs(params, programs)
        describe_bodies(primitive, programs, step)
        _compat.lower_early(primitive, held, operations, compute)
    if programs or checked:
        report_errors(primitive, programs, checked or operations)
    enter(f"{facts}: {primitive.name}")
    serve_own(primitive, rule, may_name_axis=bool(programs))
    if isinstance(jvp, Of):
        jvp = jvp_of(jvp.operations or operations, primitive)
    ad.primitive_jvps[primitive] = jvp
    if isinstance(transpose, Of):
        flat = _flat(transpose.operations or operations, primitive.multiple_results)
        transpose = functools.partial(_transpose, flat, primitive)
    ad.primitive_transposes[primitive] = transpose
    return primitive


def jvp_of(operations: Callable[..., Any], primitive: _compat.Primitive) -> Derivative:
    """Returns the forward-mode derivative of these operations for a primitive."""
    return functools.partial(_jvp, _flat(operations, primitive.multiple_results), primitive)


def _flat(operations: Callable[..., Any], several: bool) -> Callable[..., list[Any]]:
    return lambda *xs, **how: list(operations(*xs, **how)) if several else [operations(*xs, **how)]


def _jvp(
    operations: Callable[..., list[Any]],
    primitive: _compat.Primitive,
    primals: Values,
    tangents: Values,
    **params: Any,
) -> tuple[Any, Any]:
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    types, _ = primitive.abstract_eval(*map(jax.typeof, primals), **params)
    every = range(len(types) if primitive.multiple_results else 1)
    run = functools.partial(operations, **params)
    # `every` result has a tangent, of type float0 for integers, which JAX wants as `Zero`.
    outs, computed = tangents_of(run, primals, moving, [tangents[i] for i in moving], every)
    dots = [
        ad.Zero(jax.typeof(x).to_tangent_aval()) if t.dtype == jax.dtypes.float0 else t
        for x, t in zip(outs, computed, strict=True)
    ]
    return (outs, dots) if primitive.multiple_results else (outs[0], dots[0])


def _transpose(
    operations: Callable[..., list[Any]],
    primitive: _compat.Primitive,
    cotangents: Value | Values,
    *operands: Value,
    **params: Any,
) -> list[Any]:
    cotangents = cotangents if primitive.multiple_results else [cotangents]
    linear = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]
    types = [operands[i].aval for i in linear]
    of = [k for k, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    results: list[Value] = [ad.Zero(aval) for aval in types]
    if of:
        others = [x for x in operands if not ad.is_undefined_primal(x)]
        run = functools.partial(operations, **params)
        results = transposed(run, others, linear, types, of)([cotangents[k] for k in of])
    return with_values([None] * len(operands), linear, results)
