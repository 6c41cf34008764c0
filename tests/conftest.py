"""Settings every test runs under."""

import os

# Before JAX is imported: what shards a batch needs several devices to be seen. Programs are
# compiled by the thousand and run once or twice each, so machine code need not be the best.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
)

import jax
import pytest
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


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_go_with_their_file():
    """Thousands of small compiled programs would fill the memory of a small machine."""
    yield
    jax.clear_caches()
