"""Draws programs of one example, as Python source.

A program is lines of code, with a type for each name that they define. It is drawn forward: an
operation of a family, operands of fitting types among what is there, and the type of the result
by `jax.eval_shape`, once for each expression and types. Loops, branches and transformations hold
functions drawn in the same way, which see the values around them.
"""

import functools
import re
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import batchax as bx

from fuzz import operations

LARGEST = 36  # numbers in one value
HOLE = re.compile(r"\{(=?[a-zA-Z]+)(\d?)\}")

PRELUDE = """\
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh

import batchax as bx

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 4)
"""

HELPERS = {
    "one_by_one": '''\
def one_by_one(fun):
    """`fun`, batched by a loop."""
    return bx.sequential_vmap(fun)
''',
    "ruled": '''\
def ruled(fun):
    """`fun` with a batching rule of the user."""
    with_rule = bx.custom_vmap(fun)

    @with_rule.def_vmap
    def rule(axis_size, in_batched, *args):
        return jax.vmap(fun, [0 if b else None for b in in_batched])(*args), True

    return with_rule
''',
    "with_jvp": '''\
def with_jvp(fun):
    """`fun` with twice its derivative, by a rule of forward mode."""
    doubled = jax.custom_jvp(fun)

    @doubled.defjvp
    def rule(primals, tangents):
        out, dot = jax.jvp(fun, primals, tangents)
        return out, jax.tree.map(lambda t: 2 * t, dot)

    return doubled
''',
    "with_vjp": '''\
def with_vjp(fun):
    """`fun` with twice its derivative, by a rule of reverse mode."""
    doubled = jax.custom_vjp(fun)

    def backward(args, cotangent):
        return jax.tree.map(lambda t: 2 * t, jax.vjp(fun, *args)[1](cotangent))

    doubled.defvjp(lambda *args: (fun(*args), args), backward)
    return doubled
''',
    "tell": '''\
TOLD = []


def tell(place, order=None):
    """A function for callbacks: notes where it is called and with what, and returns the last.

    order: "debug" or "io", for calls that JAX keeps in order among those of the same kind.
    """

    def call(*xs):
        TOLD.append((place, order, *map(np.array, xs)))
        return np.array(xs[-1])

    return call
''',
    "spoil": '''\
def spoil(x, rng):
    """`x`, with zeros, infinities and NaN in it."""
    bad = [np.nan, np.inf, -np.inf, 0.0, 0.0]
    return np.choose(np.minimum(rng.integers(0, 16, x.shape), 5), [*bad, x])
''',
}


@dataclass(frozen=True)
class Type:
    """What is known of a value: its dtype, by NumPy's name or "key", and its shape.

    A size that depends on the length of a row is a text, such as ``"n"`` or ``"2*n - 1"``.
    """

    dtype: str
    shape: tuple[int | str, ...]

    @property
    def struct(self):
        dtype = jax.random.key(0).dtype if self.dtype == "key" else self.dtype
        sizes = [
            d if isinstance(d, int) else jax.export.symbolic_shape(d, scope=SIZES)[0]
            for d in self.shape
        ]
        return jax.ShapeDtypeStruct(tuple(sizes), dtype)

    @property
    def inexact(self):
        return "float" in self.dtype or "complex" in self.dtype

    @property
    def ragged(self):
        """The axes whose size depends on the length of a row."""
        return [a for a, d in enumerate(self.shape) if isinstance(d, str)]

    @property
    def rank(self):
        return len(self.shape)

    @property
    def size(self):
        known = [d if isinstance(d, int) else eval(d, dict(TYPICAL)) for d in self.shape]
        return int(np.prod(known))


SIZES = jax.export.SymbolicScope()
TYPICAL = {
    "n": 4,
    "m": 3,
    "max": max,
    "min": min,
    "mod": lambda a, b: a % b,
    "floordiv": lambda a, b: a // b,
}


def type_of(x):
    key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    shape = tuple(d if isinstance(d, int) else str(d) for d in x.shape)
    return Type("key" if key else str(x.dtype), shape)


SMALL_FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
SMALL_INTEGERS = ("int8", "uint8", "uint32", "int4", "uint4")

KINDS = {
    "f": lambda t: t.dtype in ("float64", "float32"),
    "s": lambda t: t.dtype == "float64" and not t.shape,
    "v": lambda t: t.dtype == "float64" and t.rank == 1 and t.size,
    "m": lambda t: t.dtype == "float64" and t.rank == 2 and t.size,
    "q": lambda t: t.dtype == "float64" and t.rank == 2 and t.shape[0] == t.shape[1] and t.size,
    "n": lambda t: t.dtype in ("float64", "float32") and t.rank and t.size,
    "i": lambda t: t.dtype in ("int32", "int64") and not t.shape,
    "iv": lambda t: t.dtype in ("int32", "int64") and t.rank == 1 and t.size,
    "I": lambda t: t.dtype in ("int32", "int64"),
    "b": lambda t: t.dtype == "bool",
    "c": lambda t: "complex" in t.dtype,
    "cn": lambda t: "complex" in t.dtype and t.rank and t.size,
    "k": lambda t: t.dtype == "key" and not t.shape,
    "kn": lambda t: t.dtype == "key" and t.rank == 1,
    "h": lambda t: t.dtype in SMALL_FLOATS,
    "u": lambda t: t.dtype in SMALL_INTEGERS,
}

# How often each family is drawn, in parts of their sum.
FAMILIES = {
    "ELEMENTWISE": 16,
    "DISCRETE": 10,
    "REDUCTIONS": 10,
    "CONTRACTIONS": 8,
    "SHAPES": 12,
    "INDEXING": 16,
    "SORTING": 6,
    "CUMULATIVE": 5,
    "LINALG": 5,
    "TRANSFORMS": 5,
    "CONVOLUTIONS": 5,
    "RANDOM": 5,
}
TABLE = [
    expression
    for family, parts in FAMILIES.items()
    for expression in [operations.read(getattr(operations, family))]
    for _ in range(parts)
]
COLLECTIVES = operations.read(operations.COLLECTIVES)
RISKY = operations.read(operations.RISKY)
SMALL = operations.read(operations.SMALL)


@functools.cache
def result_type(expression, types):
    """The type of an expression of operands of these types; None if it has none that serves."""
    names = [f"x{k}" for k in range(len(types))]
    code = eval(f"lambda {', '.join(names)}: {expression}", dict(NAMES))
    try:
        if '"i"' in expression:
            wide = [jax.ShapeDtypeStruct((5, *t.shape), t.struct.dtype) for t in types]
            fun = jax.vmap(code, axis_name="i", axis_size=5)
            out = jax.eval_shape(fun, *wide)
            out = jax.ShapeDtypeStruct(out.shape[1:], out.dtype)
        else:
            out = jax.eval_shape(code, *[t.struct for t in types])
    except Exception:
        return None
    if not hasattr(out, "dtype"):
        return None
    found = type_of(out)
    known = any(accepts(found) for accepts in KINDS.values())
    return found if known and found.size <= LARGEST and found.rank <= 3 else None


NAMES = {"jax": jax, "jnp": jnp, "np": np, "lax": lax, "bx": bx}


@dataclass
class Block:
    """Lines of a function, and what its values are called; those around it come first."""

    lines: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    collectives: bool = False


@dataclass
class Program:
    """A function of one example.

    source: its definition, as ``f``.
    arguments: the types of its arguments.
    helpers: which of `HELPERS` it calls.
    reverse: whether it has derivatives in reverse.
    forward: whether it has derivatives in forward mode.
    """

    source: str
    arguments: list[Type]
    helpers: list[str]
    reverse: bool
    forward: bool
    named: bool
    outputs: list[Type]

    @property
    def loose(self):
        """By how much numbers of few digits may be off; 0 if there are none."""
        text = f"{self.arguments} {self.source}"
        if "float8" in text:
            return 0.3
        if "float16" in text:
            return 0.1
        return 3e-3 if "float32" in text or "complex64" in text else 0

    @property
    def effects(self):
        return "tell" in self.helpers


class Drawing:
    """Draws one program, by a function `choose(n)` of a number below `n`."""

    def __init__(self, choose, named=False, more=None):
        self.below = choose
        self.more = {"risky": RISKY, "small": SMALL}.get(more, [])
        self.effects = more == "effects"
        self.types = {}
        self.count = 0
        self.reverse = True
        self.forward = True
        self.named = named

    def choose(self, options):
        return options[self.below(len(options))]

    def chance(self, percent):
        """True that often; shrinks towards False."""
        return self.below(100) >= 100 - percent

    def name(self, kind, letter="v"):
        self.count += 1
        name = f"{letter}{self.count}"
        self.types[name] = kind
        return name

    # Values that are there, the latest first.

    def fitting(self, block, accepts):
        return [n for n in reversed(block.names) if accepts(self.types[n])]

    def operation(self, block):
        """Adds a line with one operation; False where no operands fit."""
        if block.collectives and self.chance(25):
            expression = self.choose(COLLECTIVES)
        elif self.more and self.chance(35):
            expression = self.choose(self.more)
        else:
            expression = self.choose(self.choose(TABLE))
        return self.expression(block, expression) is not None

    def expression(self, block, expression):
        chosen = {}
        for hole in HOLE.finditer(expression):
            kind, _ = hole.groups()
            if hole.group() in chosen:
                continue
            if kind.startswith("="):
                first = self.types[next(iter(chosen.values()))]
                fitting = self.fitting(block, lambda t: t == first)
            else:
                fitting = self.fitting(block, KINDS[kind])
            if not fitting:
                return None
            chosen[hole.group()] = self.choose(fitting[:8])
        holes = {hole: f"x{k}" for k, hole in enumerate(chosen)}
        plain = HOLE.sub(lambda h: holes[h.group()], expression)
        kind = result_type(plain, tuple(self.types[n] for n in chosen.values()))
        if kind is None:
            return None
        text = HOLE.sub(lambda h: chosen[h.group()], expression)
        return self.assign(block, kind, text)

    def assign(self, block, kind, text):
        name = self.name(kind)
        block.lines.append(f"{name} = {text}")
        block.names.append(name)
        return name

    def statements(self, block, depth, most):
        for _ in range(most):
            if not self.chance(85):
                break
            if self.effects and self.chance(30):
                effect(self, block, depth)
            elif depth and self.chance(35):
                self.choose(STRUCTURES)(self, block, depth - 1)
            else:
                self.operation(block)

    # Functions inside the program.

    def function(self, outer, kinds, depth, results, *, closed=True, named=None, most=3):
        """Draws a function of values of these types.

        results: a function of the block, the names of the parameters and of what is new, that
          says what is returned: text.
        closed: whether it may use the values around it.
        named: whether it may hold collectives; None: if what is around it may.
        """
        names = [self.name(kind, "p") for kind in kinds]
        collectives = outer.collectives if named is None else named
        around = list(outer.names) if closed else []
        block = Block(names=around + names, collectives=collectives)
        known = len(block.names)
        self.statements(block, depth, most)
        returned = results(block, names, block.names[known:])
        fun = self.name(None, "f")
        outer.lines.append(f"def {fun}({', '.join(names)}):")
        outer.lines.extend("    " + line for line in [*block.lines, f"return {returned}"])
        return fun

    def like(self, kind, parameter, new):
        """Text of a value of a type, from what is new in a block, or from a parameter of it."""
        exact = [n for n in reversed(new) if self.types[n] == kind]
        if exact:
            return exact[0]
        floats = [n for n in reversed(new) if KINDS["f"](self.types[n])]
        if kind.dtype in ("float64", "float32"):
            if not floats:
                return f"jnp.sin({parameter})"
            return f"jnp.tanh({parameter} + jnp.mean({floats[0]})).astype(jnp.{kind.dtype})"
        if kind.dtype in ("int32", "int64"):
            return f"({parameter} + 1) % 5"
        if kind.dtype in SMALL_FLOATS:
            return f"{parameter} * 0.5"
        return parameter

    def float_of(self, block):
        found = self.fitting(block, lambda t: t.dtype == "float64")
        return self.choose(found[:6]) if found else None

    def predicate(self, block):
        """Text of a truth value."""
        flags = self.fitting(block, lambda t: t == Type("bool", ()))
        numbers = self.fitting(block, KINDS["s"])
        integers = self.fitting(block, KINDS["i"])
        options = [f"{n} > 0" for n in numbers[:2]] + flags[:2]
        options += [f"{n} > 1" for n in integers[:2]]
        options += [f"jnp.any({n} > 0)" for n in self.small(block)[:1]]
        x = self.float_of(block)
        return self.choose(options or [f"jnp.sum({x}) > 0" if x else "jnp.asarray(True)"])

    def small(self, block):
        """Numbers of few bits."""
        return self.fitting(block, lambda t: KINDS["h"](t) or KINDS["u"](t))

    def carried(self, block):
        """One or two values that a loop carries."""
        first = self.choose(block.names[::-1][:6])
        if self.chance(30):
            return [first, self.choose(block.names[::-1][:6])]
        return [first]

    def returns_like(self, kinds):
        """For `function`: a tuple of values of these types."""

        def results(block, names, new):
            texts = [self.like(k, n, new) for k, n in zip(kinds, names[-len(kinds) :], strict=True)]
            return f"({', '.join(texts)},)"

        return results

    def unpack(self, block, kinds, text):
        """Assigns the values of a tuple."""
        names = [self.name(kind) for kind in kinds]
        block.lines.append(f"{', '.join(names)}, = {text}")
        block.names.extend(names)

    def returns_newest(self, kinds, most=2):
        """For `function`: a tuple of the newest values; their types are noted in `kinds`."""

        def results(block, names, new):
            chosen = (new or names)[::-1][: 1 + self.chance(30) * (most - 1)]
            if most > 1 and self.chance(20):
                chosen = [*chosen, self.choose(names)]
            kinds[:] = [self.types[n] for n in chosen]
            return f"({', '.join(chosen)},)"

        return results


def branch(d, block, depth):
    """`lax.cond`."""
    operands = d.carried(block)
    kinds = [d.types[n] for n in operands]
    closed = d.chance(50)
    cases = [
        d.function(block, kinds, depth, d.returns_like(kinds), closed=closed, named=False)
        for _ in range(2)
    ]
    test = d.predicate(block)
    d.unpack(block, kinds, f"lax.cond({test}, {', '.join(cases)}, {', '.join(operands)})")


def switch(d, block, depth):
    integers = d.fitting(block, KINDS["i"])
    if not integers:
        return
    operands = d.carried(block)
    kinds = [d.types[n] for n in operands]
    cases = [
        d.function(block, kinds, depth, d.returns_like(kinds), named=False, most=2)
        for _ in range(2 + d.chance(50))
    ]
    text = f"lax.switch({d.choose(integers)}, [{', '.join(cases)}], {', '.join(operands)})"
    d.unpack(block, kinds, text)


def scan(d, block, depth):
    carry = d.carried(block)
    kinds = [d.types[n] for n in carry]
    rows = d.fitting(block, lambda t: t.rank and t.size)
    xs = d.choose(rows[:5]) if rows and d.chance(70) else None
    ys = []

    def results(inner, names, new):
        new_carry = d.returns_like(kinds)(inner, names[: len(kinds)], new)
        return f"{new_carry}, {d.returns_newest(ys)(inner, names, new)}"

    steps = d.types[xs].shape[0] if xs else 2
    of_step = [Type(d.types[xs].dtype, d.types[xs].shape[1:])] if xs else []
    body = d.function(block, [*kinds, *of_step], depth, results)
    step = f"lambda c, t: {body}(*c, t)" if xs else f"lambda c, t: {body}(*c)"
    options = (", reverse=True" if d.chance(30) else "") + (", unroll=2" if d.chance(15) else "")
    options += "" if xs else ", length=2"
    stacked = [Type(k.dtype, (steps, *k.shape)) for k in ys]
    text = f"lax.scan({step}, ({', '.join(carry)},), {xs}{options})"
    pair = d.name(None, "r")
    block.lines.append(f"{pair} = {text}")
    d.unpack(block, kinds, f"{pair}[0]")
    if all(k.size <= LARGEST and k.rank <= 3 for k in stacked):
        d.unpack(block, stacked, f"{pair}[1]")


def steps(d, block, depth):
    """`bx.scan`."""
    rows = d.fitting(block, lambda t: t.rank and t.size)
    if not rows:
        return
    carry = d.choose(block.names[::-1][:6])
    kind, xs = d.types[carry], d.choose(rows[:5])
    axis, row, ys = d.below(d.types[xs].rank), d.types[xs], []
    part = Type(row.dtype, row.shape[:axis] + row.shape[axis + 1 :])

    def results(inner, names, new):
        newest = d.returns_newest(ys, most=1)(inner, names, new)
        return f"{d.like(kind, names[0], new)}, {newest}"

    body = d.function(block, [kind, part], depth, results, named=False)
    stacked = [Type(k.dtype, (row.shape[axis], *k.shape)) for k in ys]
    options = ", reverse=True" if d.chance(30) else ""
    pair = d.name(None, "r")
    block.lines.append(f"{pair} = bx.scan({body}, {axis}{options})({carry}, {xs})")
    d.assign(block, kind, f"{pair}[0]")
    if all(k.size <= LARGEST and k.rank <= 3 for k in stacked):
        d.unpack(block, stacked, f"{pair}[1]")


def mapped(d, block, depth):
    """`lax.map`."""
    rows = d.fitting(block, lambda t: t.rank and t.size)
    if not rows:
        return
    xs = d.choose(rows[:5])
    kind, out = d.types[xs], []
    body = d.function(
        block, [Type(kind.dtype, kind.shape[1:])], depth, d.returns_newest(out), most=2
    )
    stacked = [Type(k.dtype, (kind.shape[0], *k.shape)) for k in out]
    size = ", batch_size=2" if d.chance(20) and not kind.ragged else ""
    if all(k.size <= LARGEST and k.rank <= 3 for k in stacked):
        d.unpack(block, stacked, f"lax.map({body}, {xs}{size})")


def loop(d, block, depth):
    """`lax.while_loop`, or with a bound and derivatives."""
    carry = d.carried(block)
    kinds = [d.types[n] for n in carry]
    body = d.function(block, kinds, depth, d.returns_like(kinds), named=False, most=2)
    integers = d.fitting(block, KINDS["i"])
    numbers = d.fitting(block, lambda t: t.dtype == "float64")
    limits = ["3"] + [f"{n} % 4" for n in integers[:2]]
    limits += [f"(jnp.sum(jnp.abs({n})) * 2).astype(jnp.int32) % 4" for n in numbers[:2]]
    few_bits = d.small(block)
    limits += [f"jnp.max({n}, initial=0).astype(jnp.int32) % 4" for n in few_bits[:2]]
    test = f"lambda c: c[0] < {d.choose(limits)}"
    if numbers and KINDS["f"](kinds[0]) and d.chance(30):
        test += " + (jnp.sum(c[1]) > 0)"
    if kinds[0].dtype in SMALL_FLOATS + SMALL_INTEGERS and d.chance(60):
        test += " + jnp.min(c[1], initial=1).astype(jnp.int32)"
    init = f"(0, {', '.join(carry)})"
    step = f"lambda c: (c[0] + 1, *{body}(*c[1:]))"
    if d.chance(50):
        text = f"bx.bounded_while({test}, {step}, {init}, 4)[1:]"
    else:
        d.reverse = False
        text = f"lax.while_loop({test}, {step}, {init})[1:]"
    d.unpack(block, kinds, text)


def fori(d, block, depth):
    carry = d.carried(block)
    kinds = [d.types[n] for n in carry]
    body = d.function(
        block, [Type("int32", ()), *kinds], depth, d.returns_like(kinds), named=False, most=2
    )
    integers = d.fitting(block, KINDS["i"])
    most = "3"
    if integers and d.chance(40):
        most = f"{d.choose(integers)} % 4"
        d.reverse = False
    init = f"({', '.join(carry)},)"
    step = f"lambda i, c: {body}(i.astype(jnp.int32), *c)"
    d.unpack(block, kinds, f"lax.fori_loop(0, {most}, {step}, {init})")


def call(d, block, depth):
    """`jit`, `checkpoint`, derivative rules and batching rules of the user."""
    kinds = ["jax.jit", "jax.checkpoint", "ruled", "with_jvp", "with_vjp", "one_by_one"]
    kind = d.choose(kinds)
    own = kind.startswith("with_")
    accepts = (lambda t: t.dtype == "float64") if own else (lambda t: True)
    found = d.fitting(block, accepts)
    if not found:
        return
    operands = [d.choose(found[:5]) for _ in range(1 + d.chance(40))]
    kinds, out = [d.types[n] for n in operands], []
    named = None if kind.startswith("jax.") else False
    body = d.function(
        block, kinds, depth, d.returns_newest(out), closed=kind[:4] == "jax.", named=named
    )
    d.forward = d.forward and kind != "with_vjp"
    d.unpack(block, out, f"{kind}({body})({', '.join(operands)})")


def inner_vmap(d, block, depth):
    """A `vmap` inside the program, of the kind that runs it."""
    rows = d.fitting(block, lambda t: t.rank and t.size)
    if not rows:
        return
    xs = d.choose(rows[:5])
    kind = d.types[xs]
    axis = d.below(kind.rank)
    size = kind.shape[axis]
    others = d.fitting(block, lambda t: t.rank and t.shape[0] == size)
    operands, axes, out = [xs], [axis], []
    kinds = [Type(kind.dtype, kind.shape[:axis] + kind.shape[axis + 1 :])]
    if others and d.chance(40):
        other = d.choose(others[:5])
        operands.append(other)
        axes.append(0)
        kinds.append(Type(d.types[other].dtype, d.types[other].shape[1:]))
    elif d.chance(30):
        other = d.choose(block.names[::-1][:5])
        operands.append(other)
        axes.append(None)
        kinds.append(d.types[other])
    body = d.function(block, kinds, depth, d.returns_newest(out), most=3)
    at = [d.below(k.rank + 1) if d.chance(30) and k.dtype != "key" else 0 for k in out]
    pairs = list(zip(out, at, strict=True))
    stacked = [Type(k.dtype, (*k.shape[:a], size, *k.shape[a:])) for k, a in pairs]
    if all(k.size <= LARGEST and k.rank <= 3 for k in stacked):
        axes = f"({', '.join(map(str, axes))},), ({', '.join(map(str, at))},)"
        d.unpack(block, stacked, f"vmap({body}, {axes})({', '.join(operands)})")


def derivative(d, block, depth):
    """A derivative inside the program."""
    x = d.float_of(block)
    if x is None:
        return
    kind = d.types[x]
    before = d.reverse, d.forward
    d.reverse = d.forward = True

    def results(inner, names, new):
        floats = [n for n in reversed(new) if KINDS["f"](d.types[n])]
        found = floats[0] if floats else names[0]
        return f"jnp.sum(jnp.sin({found}) * {found})"

    body = d.function(block, [kind], depth, results, named=False)
    direction = f"jnp.ones_like({x})"
    scalar, texts = Type("float64", ()), []
    if d.reverse:
        texts += [
            (f"jax.grad({body})({x})", kind),
            (f"jax.vjp({body}, {x})[1](jnp.ones(()))[0]", kind),
            (f"jax.grad(jax.checkpoint({body}))({x})", kind),
            (f"jax.value_and_grad({body})({x})[1]", kind),
        ]
    if d.forward:
        texts += [
            (f"jax.jvp({body}, ({x},), ({direction},))[1]", scalar),
            (f"jax.jvp({body}, ({x},), (jnp.cos({x}),))[0]", scalar),
            (f"jax.linearize({body}, {x})[1]({direction})", scalar),
        ]
        if kind.size <= 3 and not kind.ragged:
            texts.append((f"jax.jacfwd({body})({x})", kind))
    if d.forward and d.reverse:
        texts.append((f"jax.jvp(jax.grad({body}), ({x},), ({direction},))[1]", kind))
        if kind.rank == 1 and not kind.ragged:
            texts.append((f"jax.hessian({body})({x})", Type("float64", kind.shape * 2)))
    d.reverse, d.forward = d.reverse and before[0], d.forward and before[1]
    if texts:
        text, out = d.choose(texts)
        d.assign(block, out, text)


def reference(d, block, depth):
    """A mutable array, read and written."""
    found = d.fitting(block, lambda t: t.dtype == "float64" and t.rank == 1 and t.size)
    integers = d.fitting(block, KINDS["i"])
    if not found or not integers:
        return
    x, i = d.choose(found[:4]), d.choose(integers)
    ref = d.name(None, "r")
    block.lines.append(f"{ref} = jax.new_ref({x} * 1.0)")
    value = d.choose(["2.0", f"jnp.sum({x})", f"jnp.cos({x}[0])"])
    place = d.choose(["0", f"{i} % {x}.shape[0]"])
    block.lines.append(f"{ref}[{place}] = {value}")
    d.assign(block, d.types[x], f"{ref}[...]")


_NOT_OF_NUMPY = ("key", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4")


def effect(d, block, depth):
    """A callback, which is given the first argument, so that it knows the lane."""
    found = d.fitting(block, lambda t: t.dtype not in _NOT_OF_NUMPY and not t.ragged)
    if not found or "x1" not in block.names:
        return
    x = d.choose(found[:5])
    place = f'"{d.name(None, "c")}"'
    ordered = d.chance(50)
    given = f"lax.stop_gradient(x1), lax.stop_gradient({x})"
    like = f"jax.ShapeDtypeStruct({x}.shape, {x}.dtype)"
    kind = d.choose(["debug", "debug", "io", "io", "pure"])
    tell = f'tell({place}, "{kind}")' if ordered else f"tell({place})"
    if kind == "debug":
        block.lines.append(f"jax.debug.callback({tell}, {given}, ordered={ordered})")
    elif kind == "io":
        d.assign(block, d.types[x], f"io_callback({tell}, {like}, {given}, ordered={ordered})")
    elif d.types[x].dtype == "float64":
        method = d.choose(["sequential", "expand_dims", "broadcast_all"])
        text = f"jax.pure_callback(np.tanh, {like}, lax.stop_gradient({x}), "
        d.assign(block, d.types[x], f'{text}vmap_method="{method}")')


STRUCTURES = [
    branch,
    branch,
    switch,
    scan,
    scan,
    mapped,
    loop,
    loop,
    fori,
    call,
    call,
    call,
    inner_vmap,
    inner_vmap,
    steps,
    derivative,
    derivative,
    reference,
]

ARGUMENTS = [
    Type("float64", (3,)),
    Type("float64", ()),
    Type("float64", (2, 3)),
    Type("float64", (3, 3)),
    Type("int32", ()),
    Type("int32", (3,)),
    Type("bool", ()),
    Type("key", ()),
    Type("float32", (3,)),
    Type("complex128", (2,)),
    Type("bool", (3,)),
    Type("int64", (2,)),
]

SMALL_ARGUMENTS = [
    Type("float16", (3,)),
    Type("bfloat16", (2, 3)),
    Type("complex64", (2,)),
    Type("bfloat16", ()),
    Type("complex128", (2, 2)),
    Type("float16", ()),
    Type("complex64", ()),
    Type("float8_e4m3fn", ()),
    Type("float8_e5m2", (3,)),
    Type("int8", (3,)),
    Type("uint8", ()),
    Type("int4", ()),
    Type("uint4", (3,)),
]

ROWS = [
    Type("float64", ("n",)),
    Type("float64", ("n", 3)),
    Type("float64", (2, "n")),
    Type("int32", ("n",)),
    Type("float64", ("m",)),
    Type("bool", ("n",)),
    Type("float64", ("m", 3)),
]


def draw_program(choose, named=False, ragged=False, most=6, depth=2, more=None):
    """Draws a program; see `Drawing`.

    more: "risky" for operations that give NaN, "small" for small floats and complex numbers,
      "effects" for callbacks.
    """
    d = Drawing(choose, named, more)
    arguments = ARGUMENTS + (SMALL_ARGUMENTS * 2 if more == "small" else [])
    if ragged:
        kinds = [d.choose(ROWS[:3])] + [d.choose(ROWS) for _ in range(d.below(2))]
        kinds += [d.choose(arguments) for _ in range(d.below(3))]
    else:
        kinds = [ARGUMENTS[0]] + [d.choose(arguments) for _ in range(1 + d.below(3))]
    names = [d.name(kind, "x") for kind in kinds]
    block = Block(names=list(names), collectives=named)
    for _ in range(most):
        if not d.chance(93):
            break
        d.statements(block, depth, 1)
    new = block.names[len(names) :] or names
    new = [n for n in new if len(d.types[n].ragged) < 2] or names
    outputs = new[::-1][: 1 + d.below(3)]
    lines = used(block.lines, outputs)
    source = f"def f({', '.join(names)}):\n"
    source += "\n".join("    " + line for line in [*lines, f"return {', '.join(outputs)},"]) + "\n"
    helpers = [h for h in HELPERS if re.search(rf"\b{h}\(", source)]
    return Program(
        source, kinds, helpers, d.reverse, d.forward, named, [d.types[n] for n in outputs]
    )


def used(lines, outputs):
    """The lines that outputs depend on, or have effects; a function inside is one statement."""
    statements = []
    for line in lines:
        if line.startswith(" "):
            statements[-1].append(line)
        else:
            statements.append([line])
    needed, kept = set(outputs), []
    loud = {"tell"}  # functions with effects
    for statement in statements:
        found = re.match(r"def (\w+)", statement[0])
        if found and loud & set(re.findall(r"\w+", " ".join(statement))):
            loud.add(found[1])
    for statement in reversed(statements):
        head = statement[0]
        found = re.match(r"def (\w+)", head)
        defined = [found[1]] if found else re.findall(r"\w+", head.split(" = ")[0])
        effects = not found and loud & set(re.findall(r"\w+", head))
        if needed & set(defined) or effects:
            kept.append(statement)
            needed |= set(re.findall(r"\b[a-z]\d+\b", " ".join(statement)))
    return [line for statement in reversed(kept) for line in statement]
