"""The store of keys and values that the processes of one program share."""

from __future__ import annotations

from typing import Any

from jax._src.distributed import global_state


def shared_store() -> Any:
    """The client of that store; None where ``jax.distributed.initialize`` was not called.

    It is what processes find each other by, and works while their devices are busy or programs are
    lowered. Public JAX starts it, and has no name for it.
    """
    return global_state.client
