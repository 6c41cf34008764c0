"""What is around a compiled program: importing, tracing, calls outside of `jit`, progress."""
