"""Which equation made a value that is not finite, for each lane: what `find_nonfinite` does.

The function of one example is evaluated equation by equation (`origins.py`). Each value carries the
origin of the first non-finite value that it depends on: a few integers, computed from those of the
operands by one more reduction. So each output has, for each lane, the equation to blame, and the
iteration of the loops around it. `find.py` runs that over the batch, with the options of `vmap`,
and once more for the few lanes whose values are shown.
"""
