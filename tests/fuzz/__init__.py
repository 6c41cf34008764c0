"""Random programs against the loop over the examples; ``python -m fuzz`` in `tests/`."""

KINDS = ("dense", "ragged")
