"""What JAX says of traced values that outlive their function, made short.

Under ``jax.checking_leaks`` it lists every tracer that is still alive, with all that refers to it:
of a function that was staged those are also the operands of the one that leaked, held by the
program that made it.
"""

from __future__ import annotations

import gc
import re

from batchax import _compat
from batchax.kernel.lost import of_what_is_around

_ALIVE = re.compile(r"^<(\w+) (\d+)> is referred to by (.*)$", re.MULTILINE)
_NAMELESS = re.compile(r"<(?:list|tuple|dict|set|cell) \d+>")
_FIRST = re.compile(r"JitTracer\((.*)\)")


_TRACED = re.compile(r"when the value leaked was (.*) traced for")
_MADE = re.compile(r"value was created on line (\S.*)\. ?$", re.MULTILINE)
_DERIVED = re.compile(r"wrapped in a (Linearize|JVP|Grad)Tracer")
_TYPE = re.compile(r"with type (\S+)")


def escaped(name: str, message: str, place: str | None) -> str:
    """What a function uses that another one left behind, by JAX's message; "" if it says nothing.

    Args:
      name: of the function that uses it.
      message: of JAX's ``UnexpectedTracerError``.
      place: where it is used, if that is known.
    """
    traced, made, type_of = (x.search(message) for x in (_TRACED, _MADE, _TYPE))
    if type_of and _DERIVED.search(message):
        says = of_what_is_around(place or name, type_of[1])
        return f"{says}\nJAX says: Encountered an unexpected tracer."
    if not (traced and type_of):
        return ""
    return (
        f"{name} uses a traced value ({type_of[1]}) of another call, which is over: of "
        f"{traced[1]}{f', made at {made[1]}' if made else ''}. Return it there as an output, and "
        f"give it to {name} as an argument.\nJAX says: Encountered an unexpected tracer."
    )


def leaked(name: str, message: str) -> str:
    """What a function called `name` left behind, by JAX's message; "" if that is of other things.

    Args:
      name: of the function.
      message: what JAX raised.
    """
    if not message.startswith("Leaked trace "):
        return ""
    lines = []
    for told in message.split("\n\n")[1:]:
        type_of, alive = _FIRST.match(told), _ALIVE.findall(told)
        if type_of is None or not alive or "TracingEqn" in told:
            continue
        at = _compat.made_at(_object(int(alive[0][1])))
        holders = [held for _, _, held in alive]
        holder = next((held for held in holders if not _NAMELESS.match(held)), holders[-1])
        holder = re.sub(r"<(\w+) \d+>", r"a \1", holder)
        lines.append(f"  {type_of[1]}{f' of {at}' if at else ''}, held by {holder}")
    if not lines:
        return ""
    return (
        f"{name} leaves a traced value behind, which is none once {name} has returned:\n"
        + "\n".join(lines)
        + "\nReturn it as an output; jax.debug.callback hands out values while they are computed."
        + "\nJAX says: "
        + message.split(" Leaked tracer(s)")[0]
    )


def _object(number: int) -> object:
    """The object with that ``id``, as JAX names it; it is alive, for that is what is wrong."""
    return next((x for x in gc.get_objects() if id(x) == number), None)
