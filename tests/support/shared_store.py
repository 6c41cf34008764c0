"""The store that processes share, with several clients in this one."""

import contextlib
import threading

from jax._src.lib import _jax

from support.ports import reserved_port


def on_all(functions):
    """Runs each function in a thread of its own; what they returned, or raised."""
    found = [None] * len(functions)

    def run(i):
        try:
            found[i] = functions[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@contextlib.contextmanager
def clients(count):
    """As many clients of one store, as processes have one each."""
    with reserved_port() as port:
        service = _jax.get_distributed_runtime_service(f"[::]:{port}", count)
        started = [
            _jax.get_distributed_runtime_client(f"localhost:{port}", i, init_timeout=120)
            for i in range(count)
        ]
        on_all([client.connect for client in started])
        try:
            yield started
        finally:
            on_all([client.shutdown for client in started])
            service.shutdown()
