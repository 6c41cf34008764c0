"""`auto_vmap`: declare ranks, and batch dimensions are found and broadcast."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, cast, overload

import jax
import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.divergence.compact import Compact
from batchax.divergence.runner import check_divergence, lanes_at_a_time
from batchax.errors import ArgumentTypeError, AxisError
from batchax.execution.chunked import find_chunking
from batchax.frontend.arguments import array_inside
from batchax.frontend.batched import Batched
from batchax.frontend.containers import check_by_position, is_container
from batchax.frontend.in_axes import SpecifiedLeaf, anew, spread_specs
from batchax.frontend.options import OF_RANKS, check_small_matrices, wraps
from batchax.frontend.outputs import flatten_arrays, is_array
from batchax.jaxprs.error_format import name_of, show
from batchax.jaxprs.types import Tree, Value, Values
from batchax.ranks.declared import (
    Core,
    CoreSizes,
    RankTree,
    annotated_ranks,
    as_cores,
    is_rank,
    parse_signature,
)
from batchax.ranks.dimensions import Argument, check_cores, run
from batchax.rows.ragged import Ragged

P = ParamSpec("P")
Out = TypeVar("Out")

_CHUNKS = {"batch_size": None, "memory_limit": None, "residuals": "recompute"}
_OPTIONS = (*_CHUNKS, "divergence", "small_matrices")


class _Decorator(Protocol):
    """Is what `auto_vmap` returns where ranks are declared."""

    def __call__(self, fun: Callable[P, Out], /) -> Batched[P, Out, Any]: ...


@overload
def auto_vmap(fun: Callable[P, Out], /) -> Batched[P, Out, Any]: ...
@overload
def auto_vmap(  # pyright: ignore[reportOverlappingOverload] - a rank may be of many types
    *ranks: RankTree,
    batch_size: int | Literal["auto"] | None = None,
    memory_limit: int | str | None = None,
    residuals: Literal["recompute", "keep"] = "recompute",
    divergence: Literal["auto", "predicate", "compact", "serial"] | Compact = "auto",
    small_matrices: Literal["auto", "library", "vectorized"] = "auto",
    **named: Any,
) -> _Decorator: ...
@_compat.api_boundary
def auto_vmap(*ranks: RankTree, **named: Any) -> Callable[..., Any]:
    """Maps a function of known ranks over all leading batch dimensions, as NumPy does.

    Example:
      >>> @bx.auto_vmap(s=0, v=1, m=2)
      ... def f(s, v, m):  # a scalar, a vector, a matrix
      ...     return v @ m @ v + s * v.size
      >>> f(2.0, jnp.ones((5, 3)), jnp.ones((5, 3, 3))).shape  # five of them
      (5,)
      >>> f(jnp.ones((4, 1)), jnp.ones((5, 3)), jnp.eye(3)).shape  # 4 x 5, with one matrix
      (4, 5)

    The dimensions in front of the declared ones are the batch shape of an argument. Batch shapes
    broadcast as in NumPy, without copies: the function is mapped over each dimension for the
    arguments that have it. Outputs have the batch shape in front.

    Args:
      ranks: The ranks of the positional parameters, in order (on a method: after `self`). Or one
        signature, such as ``"(n),(n,m)->(m)"``. Or only the function, as in a bare
        ``@bx.auto_vmap``, whose jaxtyping annotations (``x: Float[Array, "n m"]``) declare them.
        A rank is

        - an int: the number of dimensions of one example, for all leaves of a pytree.
        - a pytree of ints that is a prefix of the argument.
        - None: the argument is not batched.
      named: Ranks by parameter name. Parameters without a rank are not batched, and may be any
        Python object. `batch_size`, `memory_limit`, `residuals`, `divergence`, and `small_matrices`
        are the options of `vmap`, unless the function has such a parameter. `batch_size` counts
        lanes of all batch dimensions together.

    Returns:
      A decorator; or the decorated function, if only a function was passed. Arguments with a rank
      take any dimensions in front. A list of numbers is an array, and a tuple a pytree.

    Raises:
      AxisError: (a ValueError) In a call: too few dimensions, batch dimensions that do not
        broadcast, or core dimensions that disagree.
      ArgumentTypeError: (a TypeError) A rank, signature, or annotation is invalid, a parameter is
        unknown, or there are too many ranks. In a call: an argument with a rank is not an array.
    """
    if len(ranks) == 1 and not named and callable(ranks[0]):
        return _decorate(ranks[0], _Declared(annotated_ranks(ranks[0])))
    if ranks and callable(ranks[0]) and jax.tree_util.all_leaves(ranks[:1]):  # no tree of ranks
        name = name_of(ranks[0])
        raise ArgumentTypeError(
            f"auto_vmap got {name} and its ranks or options in one call. Pass ranks and "
            f"options first, and then the function: batchax.auto_vmap(ranks)({name})(...)."
        )

    if not ranks and not named:
        raise ArgumentTypeError(f"auto_vmap() got no rank. {_GIVE_RANKS}")

    @_compat.api_boundary
    def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(fun):
            raise ArgumentTypeError(f"auto_vmap(...) decorates a function, got {show(fun)}.")
        return _decorate(fun, _declared(fun, ranks, named))

    return decorate


_GIVE_RANKS = (
    "Pass ranks, such as @batchax.auto_vmap(1, 2) or @batchax.auto_vmap(x=1); or write "
    "@batchax.auto_vmap, without parentheses, on a function whose parameters are annotated by "
    "jaxtyping."
)


@dataclass(frozen=True)
class _Declared:
    """What was declared of a function.

    Attributes:
      specs: ranks by the name of the parameter.
      extra: ranks of positional arguments without a parameter.
      outputs: the cores of the outputs, if they were declared.
      options: those of `vmap`.
    """

    specs: Mapping[str, Any]
    extra: Sequence[Any] = ()
    outputs: Sequence[Core] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _declared(fun: Callable[..., Any], ranks: Sequence[Any], named: Mapping[str, Any]) -> _Declared:
    signature, outputs = _signature(fun), None
    options = {k: named[k] for k in _OPTIONS if k in named and k not in signature.parameters}
    divergence = options.get("divergence", "auto")
    check_divergence(divergence)
    lanes = lanes_at_a_time(divergence, options.get("batch_size"))
    options |= {} if lanes is None else {"batch_size": lanes}
    find_chunking(fun, *(options.get(k, default) for k, default in _CHUNKS.items()))  # checks
    check_small_matrices(options.get("small_matrices", "auto"))
    if len(ranks) == 1 and isinstance(ranks[0], str):
        ranks, outputs = parse_signature(ranks[0])
    specs, extra = _by_parameter(name_of(fun), signature, ranks)
    rest = {k: v for k, v in named.items() if k not in options}
    specs |= _by_name(name_of(fun), signature, rest, specs)
    if not specs and not extra:
        raise ArgumentTypeError(
            f"auto_vmap got options, but no rank of a parameter of {name_of(fun)}. " + _GIVE_RANKS
        )
    return _Declared(specs, extra, outputs, options)


def _decorate(fun: Callable[..., Any], declared: _Declared) -> Callable[..., Any]:
    signature, name = _signature(fun), name_of(fun)

    @wraps(fun)
    @_compat.api_boundary
    def batched(*args: Tree, **kwargs: Tree) -> Tree:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentTypeError(f"{name}(): {error}") from None
        call = _Call(bound, declared)
        sizes = CoreSizes()
        check_cores(call.arguments, sizes)

        def of_all(apart: bool) -> Tree:
            @wraps(fun)
            def one_example(*values: Value) -> tuple[list[Any], Any]:
                args, kwargs = call.rebuild(values)
                out = fun(*args, **kwargs)
                leaves, structure = flatten_arrays(out, containers=True)
                if not apart and any(map(is_container, leaves)):
                    raise _ReturnsContainers
                if declared.outputs is not None:
                    _check_outputs(name, out, declared.outputs, sizes)
                return leaves, structure

            outs, structure = _compat.described(
                one_example, lambda arrays: run(arrays, call.arguments, declared.options, apart)
            )
            return jax.tree.unflatten(structure, outs)

        try:
            return of_all(any(a.is_container for a in call.arguments))
        except _ReturnsContainers:
            return of_all(True)

    return batched


class _ReturnsContainers(Exception):
    """A function returned a container, so that each batch dimension needs a separate vmap."""


def _signature(fun: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):  # some callables written in C
        any_number = inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)
        by_name = inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)
        return inspect.Signature([any_number, by_name])


def _by_parameter(
    name: str, signature: inspect.Signature, ranks: Sequence[Any]
) -> tuple[dict[str, Any], list[Any]]:
    """Ranks by the name of the parameter, and those for further positional arguments."""
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in signature.parameters.values() if p.kind in by_position]
    own = ""
    if names[:1] in (["self"], ["cls"]):
        own = f" ({names[0]} is not counted)"
        names = names[1:]
    extra = list(ranks[len(names) :])
    kinds = [p.kind for p in signature.parameters.values()]
    if extra and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise ArgumentTypeError(
            f"auto_vmap got {len(ranks)} ranks by position, but {name} has {len(names)} "
            f"positional parameters: {', '.join(names) or 'none'}{own}."
        )
    specs = {p: as_cores(p, spec) for p, spec in zip(names, ranks, strict=False)}
    return specs, [as_cores(f"args[{len(names) + i}]", spec) for i, spec in enumerate(extra)]


def _by_name(
    name: str, signature: inspect.Signature, named: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    parameters = signature.parameters
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [n for n in named if n not in parameters]
    theirs = [n for n in unknown if n in OF_RANKS]
    if unknown and not any_name:
        raise ArgumentTypeError(
            f"auto_vmap got ranks for {', '.join(unknown)}, but {name} has the parameters "
            f"{', '.join(parameters) or '(none)'}."
            + "".join(f" For {n} of jnp.vectorize, pass {OF_RANKS[n]}." for n in theirs)
        )
    twice = [n for n in named if n in given]
    if twice:
        raise ArgumentTypeError(
            f"auto_vmap got two ranks for {', '.join(twice)}: one by position, one by name."
        )
    return {n: as_cores(n, spec) for n, spec in named.items()}


class _Call:
    """The arrays of one call that have a core, and how to rebuild its arguments."""

    def __init__(self, bound: inspect.BoundArguments, declared: _Declared) -> None:
        specs, extra = declared.specs, declared.extra
        self.bound = bound
        self.arguments: list[Argument] = []
        self._rebuilds: dict[str, Callable[[Iterator[Any]], Any]] = {}
        kinds = {n: p.kind for n, p in bound.signature.parameters.items()}
        for name, value in bound.arguments.items():
            if kinds[name] is inspect.Parameter.VAR_POSITIONAL:
                own = specs.get(name, extra)
                each = own if type(own) in (tuple, list) else [own] * len(value)
                spec = [*each, *[None] * (len(value) - len(each))][: len(value)]
                parts = [self._add(f"{name}[{i}]", x, spec[i]) for i, x in enumerate(value)]
                self._rebuilds[name] = lambda it, p=parts: tuple(part(it) for part in p)
            elif kinds[name] is inspect.Parameter.VAR_KEYWORD:
                every = specs.get(name)
                named = {k: self._add(k, x, specs.get(k, every)) for k, x in value.items()}
                self._rebuilds[name] = lambda it, p=named: {k: part(it) for k, part in p.items()}
            else:
                self._rebuilds[name] = self._add(name, value, specs.get(name))

    def _add(self, path: str, value: Value, spec: RankTree) -> Callable[[Iterator[Any]], Any]:
        if spec is None or value is None:
            return lambda _: anew(value)
        what = "a tree of ranks"
        leaves, rebuild = spread_specs(spec, value, path, what, is_rank, True, "rank", _is_leaf)
        parts: list[Callable[[Iterator[Any]], Any]] = []
        for leaf in leaves:
            if leaf.spec is None:
                parts.append(lambda _, v=leaf.value: v)
                continue
            self.arguments.append(Argument(leaf.path, _as_array(leaf), leaf.spec))
            parts.append(next)
        return lambda it: rebuild(iter([part(it) for part in parts]))

    def rebuild(self, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        it = iter(values)
        full = {name: rebuild(it) for name, rebuild in self._rebuilds.items()}
        bound = inspect.BoundArguments(self.bound.signature, cast(Any, full))
        return bound.args, bound.kwargs


def _is_leaf(x: Value) -> bool:
    return is_container(x) or _is_numbers(x)


def _is_numbers(x: Value) -> bool:
    if not isinstance(x, list) or not x:
        return False
    return all(isinstance(e, (bool, int, float, complex, np.generic)) or _is_numbers(e) for e in x)


def _as_array(leaf: SpecifiedLeaf) -> Value:
    path, value = leaf.path, leaf.value
    if isinstance(value, Ragged):
        return value
    if is_container(value):
        check_by_position(value, path)
        return value
    if isinstance(value, list):
        try:
            return jnp.asarray(value)
        except ValueError:
            raise AxisError(
                f"{path} is a list of lists of different lengths, which is not an array. Rows of "
                "different lengths are a batch as Ragged.from_rows([...])."
            ) from None
    if not is_array(value):
        raise ArgumentTypeError(
            f"{path} is of type {type(value).__name__}, which is not an array, but a rank was "
            f"declared for it. {array_inside(value, path)}Declare None for what is not batched."
        )
    return value


def _check_outputs(name: str, out: Tree, declared: Sequence[Core], sizes: CoreSizes) -> None:
    """Raises an error for outputs of one example that differ from the signature."""
    outs = [out] if len(declared) == 1 and not isinstance(out, (tuple, list)) else out
    if not isinstance(outs, (tuple, list)) or len(outs) != len(declared):
        count = len(outs) if isinstance(outs, (tuple, list)) else 1
        raise AxisError(
            f"the signature declares {len(declared)} outputs of {name}, but it returned {count}."
        )
    for i, (x, core) in enumerate(zip(outs, declared, strict=True)):
        path = f"out[{i}]" if len(declared) > 1 else "out"
        for leaf in jax.tree.leaves(x):
            problem = f"its rank is {np.ndim(leaf)}"
            if np.ndim(leaf) == core.rank:
                problem = sizes.problem(path, core, np.shape(leaf))
            if problem:
                raise AxisError(
                    f"the signature declares {core} for {path} of {name}, but it has shape "
                    f"{np.shape(leaf)} for one example: {problem}."
                )
