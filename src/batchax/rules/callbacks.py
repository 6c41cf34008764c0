"""Callbacks to the host: pure, with effects, and for debugging."""
