"""The encoder layer of the benchmark in PyTorch: of padded rows, and of nested tensors."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.rows.workloads import HEADS, Rows, Weights


def torch_encoders(rows: Rows, weights: Weights) -> dict[str, Callable[[], Any]]:
    """The ways of PyTorch, each given rows in its own form; none where it is missing."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    from torch.nn import functional  # pyright: ignore[reportMissingImports]

    # The cores that XLA has here: PyTorch counts those of the machine.
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    given = lambda x: torch.from_numpy(np.array(x))
    queries, keys, values, out, first, second = map(given, weights)

    def encoded(x: Any, mask: Any = None) -> Any:
        width = x.shape[-1]
        split = lambda y: y.unflatten(-1, (HEADS, width // HEADS)).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(
            split(x @ queries), split(x @ keys), split(x @ values), attn_mask=mask
        )
        x = functional.layer_norm(x + mixed.transpose(1, 2).flatten(-2) @ out, (width,))
        network = functional.gelu(x @ first, approximate="tanh") @ second
        return functional.layer_norm(x + network, (width,))

    nested = torch.nested.nested_tensor(
        [given(row) for row in rows.ragged.rows()], layout=torch.jagged
    )
    padded, mask = given(rows.padded), given(rows.mask)[:, None, None]
    ways = {
        "PyTorch, padded": lambda: encoded(padded, mask),
        "PyTorch, nested": lambda: encoded(nested),
    }

    def without_gradients(way: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with torch.no_grad():
                return way()

        return run

    return {name: without_gradients(way) for name, way in ways.items()}
