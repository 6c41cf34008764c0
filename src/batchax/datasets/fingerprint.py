"""Whether a call computes what a call before did, in another process and on another day."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jaxlib
import numpy as np

from batchax.datasets.source import Source
from batchax.errors import UnsupportedError
from batchax.execution.eager import whatever_jit
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Jaxpr, Tree, Value, Values

Staged: TypeAlias = tuple[ClosedJaxpr, Tree]
"""The program of a batch, and the types of the results of a row."""

# Flags of XLA on which no result depends.
_NO_RESULTS = ("--xla_dump_", "--xla_force_host_platform_device_count=")


def fingerprint(
    fun: Callable[..., Any],
    staged: Staged,
    sources: Sequence[Source],
    options: dict[str, Any],
    version: str | None = None,
) -> dict[str, Any]:
    """Identifies a call and its results as JSON. `version` is the user's, for code on the host."""
    program, shapes = staged
    on_host = next(_calls_of_host(program.jaxpr), None)
    if on_host and version is None:
        raise UnsupportedError(
            f"{getattr(fun, '__name__', fun)} calls Python on the host ({on_host}), and batchax "
            "cannot see what that computes, so a later call could resume with other code. "
            'Pass version="1", and another version whenever that code changes.'
        )
    described = {
        **_described(program, shapes, jax.default_backend()),
        "inputs": [{"name": source.name, **source.identity()} for source in sources],
        "options": options,
        "platform": jax.default_backend(),
        "version": version,
    }
    return json.loads(json.dumps(described))


def as_seen_here(
    staged: Staged,
    row: ClosedJaxpr,
    rows: Sequence[Source],
    shared: Sequence[Source],
    platform: str,
) -> dict[str, Any]:
    """Identifies a call in this process: a worker may see an edited module or a changed file."""
    program, shapes = staged
    each = [(s, s.origin() or {}) for s in rows] + [(s, s.content()) for s in shared]
    inputs = [
        {"name": s.name, "shape": s.shape, "dtype": str(s.dtype), **known_by}
        for s, known_by in each
    ]
    described = {**_described(program, shapes, platform), "row": digest(row, platform)}
    return json.loads(json.dumps({**described, "inputs": inputs}))


def but_for_platform(seen: dict[str, Any]) -> dict[str, Any]:
    return {**seen, "program": None, "xla_flags": None}


def _described(program: ClosedJaxpr, shapes: Tree, platform: str) -> dict[str, Any]:
    paths = jax.tree_util.tree_flatten_with_path(shapes)[0]
    flags = os.environ.get("XLA_FLAGS", "").split()
    return {
        "program": digest(program, platform),
        "results": {jax.tree_util.keystr(path): f"{x.dtype}{x.shape}" for path, x in paths},
        "batchax": importlib.import_module("batchax").__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "xla_flags": " ".join(x for x in flags if not x.startswith(_NO_RESULTS)) or None,
    }


def _calls_of_host(jaxpr: Jaxpr) -> Iterator[str]:
    from batchax.jaxprs.bodies import with_inside
    from batchax.jaxprs.error_format import line_of
    from batchax.jaxprs.primitive_facts import facts_of

    for eqn in with_inside(jaxpr.eqns):
        if facts_of(eqn.primitive).on_host and not facts_of(eqn.primitive).shows:
            yield f"{eqn.primitive.name} at {line_of(eqn)}"


@whatever_jit
def digest(program: ClosedJaxpr, platform: str | None = None) -> str:
    """Hashes a program as StableHLO for a platform, and the constants that it closes over."""
    from batchax.jaxprs.evaluate import bind_equation, evaluate

    # Constants are arguments of the text: written out, large arrays would take many times their
    # memory. Most are the program's; those of inner `jit` calls are hoisted.
    constants = {id(c): c for c in _constants(program)}

    def of_constants(values: Sequence[Any], *args: Value) -> Values:
        by_id = dict(zip(constants, values, strict=True))

        def run(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
            consts = [by_id[id(c)] for c in program.consts]
            return evaluate(program.jaxpr, consts, args, run_equation)

        def run_equation(eqn: Eqn, operands: Sequence[Any]) -> Sequence[Any]:
            if _is_jit(eqn) and any(True for _ in _constants(eqn.params["jaxpr"])):
                return run(eqn.params["jaxpr"], operands)
            return bind_equation(eqn, operands)

        return run(program, args)

    shapes = [jax.ShapeDtypeStruct(c.shape, c.dtype) for c in constants.values()]
    traced = jax.jit(of_constants).trace(shapes, *program.in_avals)
    text = traced.lower(lowering_platforms=(platform or jax.default_backend(),)).as_text()
    digest = hashlib.sha256(_without_names(text).encode())
    for constant in constants.values():
        array = _numbers(constant)
        digest.update(f"{array.dtype.name}{array.shape}".encode())
        digest.update(array.reshape(-1).view("uint8").data)
    return digest.hexdigest()


def _is_jit(eqn: Eqn) -> bool:
    return eqn.primitive.name == "jit"


def _constants(program: ClosedJaxpr) -> Iterator[Any]:
    yield from program.consts
    for eqn in program.jaxpr.eqns:
        if _is_jit(eqn):
            yield from _constants(eqn.params["jaxpr"])


# Names of functions depend on what was traced before.
def _without_names(text: str) -> str:
    names: dict[str, str] = {}
    for name in re.findall(r'^ *func\.func [a-z ]*@("[^"]*"|[\w.$-]+)', text, re.MULTILINE):
        names.setdefault(name, f"f{len(names)}")
    text = re.sub(r"^module @\S+", "module", text)
    return re.sub(r'@("[^"]*"|[\w.$-]+)', lambda m: f"@{names.get(m[1], m[1])}", text)


def _numbers(constant: Value) -> np.ndarray:
    if jax.dtypes.issubdtype(constant.dtype, jax.dtypes.prng_key):
        constant = jax.random.key_data(constant)
    return np.ascontiguousarray(constant)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Describes the differences between two calls, as sentences without a period."""
    changes = [
        *_changed(old.get("options", {}), new.get("options", {})),
        *_inputs(old.get("inputs", []), new.get("inputs", [])),
    ]
    around = _changed(_only(old, _AROUND), _only(new, _AROUND))
    same_arguments = _types(old) == _types(new)
    was, now = old.get("results", {}), new.get("results", {})
    if list(was) != list(now):
        changes.append("the function returns arrays by other names")
    elif was != now and same_arguments:
        changes += [f"the function's result{each}" for each in _changed(was, now)]
    elif _only(old, _PROGRAMS) != _only(new, _PROGRAMS) and same_arguments and not around:
        changes.append("the function computes something else")
    return changes + around


def growth(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Returns differences other than added rows, and the inputs whose rows must be compared."""
    inputs, grown = [*old.get("inputs", [])], list[int]()
    options = new.get("options", {})
    axes = [*options.get("in_axes", []), *[0 for _ in options.get("keep", [])]]
    for i, (axis, was, now) in enumerate(zip(axes, inputs, new.get("inputs", []), strict=False)):
        shape = [*was["shape"]]
        shape[axis : axis + 1] = now["shape"][axis : axis + 1]
        if shape == now["shape"] != was["shape"] and was["dtype"] == now["dtype"]:
            inputs[i] = now
            if not _same_parts(was, now):
                grown.append(i)
    return differences({**old, "inputs": inputs}, new), grown


def _same_parts(was: dict[str, Any], now: dict[str, Any]) -> bool:
    """Returns whether an input has the files that it had, followed by more."""
    for each in ("parts", "files"):
        if isinstance(was.get(each), list):
            pairs = [*zip(was[each], now.get(each, []), strict=False)]
            same = lambda x, y: not list(_inputs([_as_input(x, y)], [_as_input(y, x)]))
            return len(pairs) == len(was[each]) and all(same(*pair) for pair in pairs)
    return False


def _as_input(file: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    same_fields = {k: x for k, x in file.items() if k != "sha256" or k in other}
    return {"name": "", "dtype": "", "shape": [], **same_fields}


_PROGRAMS = {"program": "of a batch", "row": "of a row"}
_AROUND = {
    "batchax": "batchax",
    "jax": "JAX",
    "jaxlib": "jaxlib",
    "xla_flags": "XLA_FLAGS",
    "platform": "the platform of JAX",
    "version": "version",
}


def _only(call: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {said: call.get(name) for name, said in names.items()}


def _types(call: dict[str, Any]) -> list[Any]:
    return [(i.get("shape"), i.get("dtype")) for i in call.get("inputs", [])]


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return [
        f"{name} was {_said(old.get(name))}, is {_said(new.get(name))}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _said(value: object) -> str:
    return "not given" if value is None else str(value)


def _known_by(source: dict[str, Any]) -> str:
    return source.get("path", 'known by what it holds (in memory, or by inputs_by="content")')


def _inputs(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> Iterator[str]:
    if len(old) != len(new):
        yield f"there were {len(old)} arrays of input, now {len(new)}"
        return
    for was, now in zip(old, new, strict=True):
        name = now["name"]
        kinds = [f"{i['dtype']}{i['shape']}" for i in (was, now)]
        if kinds[0] != kinds[1]:
            yield f"{name} was {kinds[0]}, is {kinds[1]}"
        elif "crc32c" in was and "crc32c" in now:
            if was["crc32c"] != now["crc32c"]:
                yield f"{name} has other values"
        elif was.get("path") != now.get("path"):
            yield f"{name} was {_known_by(was)}, is {_known_by(now)}"
        elif "sha256" in was and was["sha256"] == now.get("sha256"):
            pass  # written again, and the same
        elif was.get("size") != now.get("size"):
            yield f"{name} was changed on disk: {was['size']} bytes, now {now['size']}"
        elif any(was.get(time) != now.get(time) for time in ("modified_ns", "changed_ns")):
            yield (
                f"{name} was written again since, on disk, or was moved, or has other permissions "
                '(what it holds counts instead with inputs_by="content")'
            )
        elif {**was, "name": ""} != {**now, "name": ""}:
            yield f"{name} is not what it was"
