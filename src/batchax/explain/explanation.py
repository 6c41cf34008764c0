"""What `explain` returns: an account of what batching did, and its faces."""

from __future__ import annotations

from typing import Any

from batchax.explain.account import Account
from batchax.explain.page.document import as_embedded_page, as_page
from batchax.explain.text import as_text, for_terminal
from batchax.frontend.in_axes import count


class Explanation(Account):
    """How a function was batched, and what that costs: what `explain` returns.

    ``str()`` is a listing, which ``rich.print`` prints in colours; `to_html` writes a page, which a
    notebook shows.

    Attributes:
      name: of the per-example function.
      lanes: the size of the batch.
      arguments: the function's arguments, under the names a call would use.
      outputs: its results.
      equations: the per-example program, an entry for each equation; `Equation.parts` has those
        of loops and branches.
      findings: what costs more than it would have to, most expensive first.
      memory: what the compiled program holds; None where it could not be compiled.
      outside: what is done beside the equations: to place outputs, to cut chunks.
      compiled: FLOPs and bytes of the compiled program by XLA's count, in which fused operations
        write nothing and a loop counts as one step; None where XLA says nothing.
      options: the options that `vmap` was given.
      timings: what was measured, if it was asked for.
      unmeasured: what there was no time to measure: batch sizes, as in a `Timing`, and options
        that were advised, such as "divergence='compact'".
      devices: what lanes are spread over, if they are; then `memory` and `compiled` are those of
        one device.
      steps: with `measure`, what each loop and branch did: a `StepCount` for each.

    Example:
      >>> def f(m, x):
      ...     return jax.lax.cond(x > 0, jnp.linalg.inv, lambda m: m, m)
      >>> explanation = bx.explain(f, (None, 0))(jnp.eye(30), jnp.arange(8.0))
      >>> explanation
      <Explanation of f: 8 lanes, ... equations, 1 finding; print it, or .to_html(path)>
      >>> for finding in explanation.findings:
      ...     print(finding.message)
      `cond` runs each of its 2 branches for all 8 lanes: ...
    """

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        parts = (
            count(n, what)
            for n, what in (
                (self.lanes, "lane"),
                (sum(1 for _ in self.walk()), "equation"),
                (len(self.findings), "finding"),
            )
        )
        return f"<Explanation of {self.name}: {', '.join(parts)}; print it, or .to_html(path)>"

    def __rich__(self) -> Any:
        return for_terminal(self)

    def _repr_html_(self) -> str:
        return as_embedded_page(self)

    def to_html(self, path: Any) -> None:
        """Writes a page that shows everything, needs nothing else and opens offline.

        Args:
          path: the file to write, a str or a path.

        Example:
          >>> bx.explain(jnp.sin)(jnp.ones(8)).to_html("sin.html")
        """
        with open(path, "w", encoding="utf-8") as file:
            file.write(as_page(self))
