"""What is around a compiled program: importing, tracing large programs, calls outside of `jit`."""
