"""Which equation made a value that is not finite, for each lane: what `find_nonfinite` does.

The function of one example is evaluated equation by equation (`origins.py`). Beside each value goes
where the first value that is not finite on the way to it came from: a handful of integers, made of
the operands' by one more reduction. So at the end each output knows, for each lane, the equation to
blame, and the iteration of the loops around it. `find.py` runs that over the batch, in any way that
`vmap` runs functions, and once more for the few lanes of which values are shown.
"""
