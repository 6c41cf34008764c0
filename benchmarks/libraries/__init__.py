"""Programs of other libraries as their users write them: the thresholds were not set by them."""
