"""Settings every test runs under."""

import jax
from hypothesis import HealthCheck, settings

settings.register_profile(
    "batchax",
    deadline=None,  # the first example of a shape compiles
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("batchax")
jax.config.update("jax_platforms", "cpu")
