"""What ``jax.checking_leaks`` says of a function that is batched, made short.

JAX lists every tracer that is still alive, with all that refers to it: of a function that was
staged those are also the operands of the one that leaked, held by the program that made it.
"""

from __future__ import annotations

import gc
import re

from batchax import _compat

_ALIVE = re.compile(r"^<(\w+) (\d+)> is referred to by (.*)$", re.MULTILINE)
_NAMELESS = re.compile(r"<(?:list|tuple|dict|set|cell) \d+>")
_FIRST = re.compile(r"JitTracer\((.*)\)")


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
