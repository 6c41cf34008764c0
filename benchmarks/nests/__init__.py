"""Loops around loops, whose lanes need different numbers of inner steps at each outer step.

Run ``python -m benchmarks nests`` from the root of the repository. What is not installed is left
out, with a line that says so. More than the tests need: mctx, jumanji, and for FSM-MCMC
jax_dataclasses and a checkout of HWDance/jax-fsm-mcmc, which ``FSM_MCMC`` names.
"""
