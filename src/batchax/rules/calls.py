"""Calls: jit, checkpoint and functions with derivatives or batching of their own."""
