"""What `explain` finds out: data, which the faces of an `Explanation` show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

Service = Literal["once", "own", "user", "jax", "lanes"]
"""How an equation was batched: done once for all lanes, by a rule of batchax, by a rule of
the user's, by the rule that JAX has, or sequentially."""


@dataclass(frozen=True)
class Value:
    """An array that an equation takes or gives.

    Attributes:
      name: what the listing calls it, such as ``a``; a number for a literal.
      example: its type for one example, such as ``f32[3]``.
      batched: its type for all lanes, such as ``f32[8,3]``; as `example` if it is the same for all.
      axis: where the batch axis is in `batched`; None if it does not depend on the batch.
      bytes: the memory it takes for all lanes.
      literal: whether it is a number in the program, and `name` is that number.
      result: of a result of the function, what it is called among them, such as ``out['loss']``.
    """

    name: str
    example: str
    batched: str
    axis: int | None
    bytes: int
    literal: bool = False
    result: str = ""


@dataclass(frozen=True)
class Source:
    """A line of the user's code, or of a library's that it calls.

    Attributes:
      file: its path.
      line: its number, from 1; 0 if it is not known.
      text: what it says, without indentation; empty if it cannot be read.
      called_from: of a line of an installed library, the user's own line that led there.
    """

    file: str
    line: int
    text: str
    called_from: Source | None = None


@dataclass(frozen=True)
class Work:
    """What something costs, by the count of `programs.cost`.

    Attributes:
      flops: floating-point operations, transcendental functions counted as one each.
      bytes: read and written, as if each operation ran by itself.
    """

    flops: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Equation:
    """An equation of the per-example function, and what became of it.

    Attributes:
      number: its place in the listing: "3", or "3.2" for the second one of a loop's body.
      primitive: the name of its primitive.
      source: the user's line that made it.
      inputs: what it takes.
      outputs: what it gives.
      service: how it was batched.
      rule: what served it: a module of batchax, the name of the user's rule, "jax", or "" for
        what is done once.
      emitted: the names of the operations it became, in order, those of its parts left out.
      moves: bytes of operands whose axes were transposed for it.
      broadcasts: bytes written to repeat, for each lane, operands that lanes share.
      work: what it costs for all lanes, its parts included, as often as they run.
      lanes: how many lanes that work is for. In chunks, types show fewer: those of one chunk.
      times: how often it runs, within a loop that goes so many steps, chunks included; None if
        that is known only when it runs. What runs once per call: 1.
      role: of a part: what it is of its loop or branch: "body", "condition", "branch 0".
      enters: of loops, what they carry or take apart: its name inside, and that of what it is
        at first.
      parts: the equations inside, of loops and branches.
      notes: what its rule says of how it is run, such as ``{"divergence": "masked"}``.
    """

    number: str
    primitive: str
    source: Source
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    service: Service
    rule: str = ""
    emitted: tuple[str, ...] = ()
    moves: int = 0
    broadcasts: int = 0
    work: Work = field(default_factory=Work)
    lanes: int = 1
    times: int | None = 1
    role: str = ""
    enters: tuple[tuple[str, str], ...] = ()
    parts: tuple[Equation, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def per_lane(self) -> Work:
        """Its work for one lane; all of it if it is done once."""
        if self.service == "once":
            return self.work
        lanes = max(self.lanes, 1)
        return Work(self.work.flops / lanes, self.work.bytes / lanes)

    def walk(self) -> Iterator[Equation]:
        """This equation and all inside it, in order."""
        yield self
        for part in self.parts:
            yield from part.walk()


@dataclass(frozen=True)
class Finding:
    """Something that costs more than it would have to, or that one would not expect.

    Attributes:
      kind: which: a name of `findings`, such as ``"branch runs for all lanes"``.
      message: what it is, with figures.
      remedy: what to do about it.
      equation: the `number` of the equation it is about, or "".
      cost: its price, for the order of findings: nanoseconds, roughly.
      advice: the options that the remedy says to give `vmap`, which can be measured.
      otherwise: the remedy if those do not pay; if empty, there is nothing to say then.
    """

    kind: str
    message: str
    remedy: str
    equation: str
    cost: float
    advice: dict[str, Any] = field(default_factory=dict)
    otherwise: str = ""


@dataclass(frozen=True)
class Memory:
    """The memory of the compiled program, by XLA's memory analysis, in bytes.

    Attributes:
      peak: all of it at the worst moment.
      arguments: of which arguments.
      outputs: results.
      temporaries: what is neither.
    """

    peak: int
    arguments: int
    outputs: int
    temporaries: int


@dataclass(frozen=True)
class Collective:
    """An exchange between devices, in the compiled program.

    Attributes:
      kind: such as ``"all-reduce"``.
      bytes: its result on one device; where it is in a loop, of one step.
      equation: the `number` of the equation it is of, or "": what is reduced over the batch, or
        moved where it is wanted, is of none.
    """

    kind: str
    bytes: int
    equation: str


@dataclass(frozen=True)
class Devices:
    """What lanes are spread over, with `mesh` or because the batch is sharded.

    Attributes:
      axes: the axes of the mesh.
      count: how many devices, or groups of devices along other axes, have different lanes.
      each: the lanes that each of them runs.
      repeated: how many of all those repeat another lane, where lanes do not divide evenly.
      replicated: unbatched (shared) arguments, of which each device has a copy.
      collectives: in the order of the compiled program; None where there is none to read.
    """

    axes: tuple[str, ...]
    count: int
    each: int
    repeated: int
    replicated: tuple[Value, ...] = ()
    collectives: tuple[Collective, ...] | None = None

    @property
    def imbalance(self) -> float:
        """The share of the work that is done for lanes that repeat another one."""
        return self.repeated / (self.count * self.each)


@dataclass(frozen=True)
class Timing:
    """The batched program as it ran.

    Attributes:
      batch_size: how many lanes at a time; None for all at once; "loop" for a Python loop over
        compiled examples.
      seconds: of one call: the median of several.
      spread: the fastest and the slowest of these.
      peak: bytes, by XLA's memory analysis; None for the loop.
      compiling: seconds that it took to stage, batch and compile it; None if that is not known.
      advice: the options that were given because a finding advised it; empty for other ways.
    """

    batch_size: int | Literal["auto", "loop"] | None
    seconds: float
    spread: tuple[float, float]
    peak: int | None
    compiling: float | None = None
    advice: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Account:
    """What an `Explanation` holds; its attributes are described there."""

    name: str
    lanes: int
    arguments: tuple[Value, ...]
    outputs: tuple[Value, ...]
    equations: tuple[Equation, ...]
    findings: tuple[Finding, ...] = ()
    memory: Memory | None = None
    outside: Work = field(default_factory=Work)
    compiled: Work | None = None
    options: dict[str, Any] = field(default_factory=dict)
    timings: tuple[Timing, ...] = ()
    unmeasured: tuple[int | str | None, ...] = ()
    devices: Devices | None = None

    @property
    def work(self) -> Work:
        """The cost of one call for all lanes: `flops`, and `bytes` read and written."""
        return sum((eqn.work for eqn in self.equations), self.outside)

    def walk(self) -> Iterator[Equation]:
        """Iterates over all equations, including those inside of loops and branches, in order.

        Yields:
          Each `Equation` once, an equation before those inside it.

        Example:
          >>> def grow(x):
          ...     return jax.lax.while_loop(lambda x: x < 9, lambda x: 2 * x, x)
          >>> [equation.primitive for equation in bx.explain(grow)(jnp.ones(8)).walk()]
          ['while', 'mul', 'lt']
        """
        for eqn in self.equations:
            yield from eqn.walk()

    def to_dict(self) -> dict[str, Any]:
        """Converts the explanation to plain data for `json.dumps`.

        Returns:
          A dict of ``"version"``, now 1, which grows when a name is renamed or removed, and of each
          attribute by its name. A `Work`, an `Equation`, and so on are dicts of their fields and
          properties, tuples are lists, and other objects are their ``repr``.

        Example:
          >>> data = bx.explain(jnp.sin)(jnp.ones(8)).to_dict()
          >>> data["version"], data["equations"][0]["primitive"]
          (1, 'sin')
        """
        return {"version": 1, **as_plain(self)}


def as_plain(x: object) -> Any:
    """Converts data to what JSON has: objects to their fields and properties, by name.

    Tuples become lists, numbers that are not finite None, and all else its repr.
    """
    if is_dataclass(x):
        # Properties of base classes, too: those of `Account`, for an `Explanation`.
        properties = (n for c in type(x).__mro__ for n, p in vars(c).items() if type(p) is property)
        return {
            name: as_plain(getattr(x, name)) for name in [*(f.name for f in fields(x)), *properties]
        }
    if isinstance(x, Mapping):
        return {str(key): as_plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return list(map(as_plain, x))
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    return x if x is None or isinstance(x, (bool, int, str)) else repr(x)
