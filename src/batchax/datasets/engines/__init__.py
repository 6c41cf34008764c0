"""Engines run the units of a plan: `engine` submits units, and `worker` runs them elsewhere."""
