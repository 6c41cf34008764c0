"""Ports of this machine, for servers that tests start."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else is given while the block runs.

    Servers say that they reuse addresses, so they may listen where this one is bound, which does
    not. What is merely found to be free another test may have before its server begins.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
