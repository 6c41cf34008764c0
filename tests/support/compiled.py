"""What XLA compiles, and how often."""

import jax


def compiled_bytes(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def compilations(call):
    """What JAX compiles during a call."""
    found = []

    def listen(name, duration, **details):
        if name == "/jax/core/compile/backend_compile_duration":
            found.append(details)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return found
