"""Loops around loops, whose lanes need different numbers of inner steps at each outer step.

Run ``python -m benchmarks nests`` from the root of the repository. Programs of libraries that are
not installed are left out, with a line that says so. ``FSM_MCMC=<checkout of
HWDance/jax-fsm-mcmc>`` has that peer's own code measured, too.
"""
