"""`bx.config`, and that nothing asks for a device before a batched function is called."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.analysis.thresholds import TABLE, device_kind

from support import decorated
from support.ports import reserved_port
from support.processes import python


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    # Tests have several devices, over which traced lanes may be spread.
    of_one_device = TABLE["cpu-small"]._replace(max_devices=len(jax.devices()))
    monkeypatch.setitem(TABLE, device_kind(), of_one_device)
    before = {name: getattr(bx.config, name) for name in ("divergence", "single_kernels")}
    yield
    for name, value in before.items():
        bx.config.update(name, value)


def halvings(x):
    halved = lambda s: (s[0] * 0.5 + 0 * jnp.sin(jnp.cos(s[0])), s[1] + 1)
    return lax.while_loop(lambda s: s[0] > 1, halved, (x, 0))[1]


def in_a_process(program, **environment):
    """What Python prints that runs a program, and whether it ends well."""
    done = python("-W", "error", "-c", program, XLA_FLAGS="", **environment)
    return done.returncode, done.stdout + done.stderr


def test_no_decorator_asks_for_a_device():
    # `jax.distributed.initialize` and the number of CPU devices must come before the first use of a
    # device: a module of decorated functions may be imported before them.
    program = """
from support import decorated
import jax
for make in decorated.FACTORIES.values():
    make()
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize("localhost:{port}", num_processes=1, process_id=0)
assert len(jax.local_devices()) == 2
"""
    with reserved_port() as port:
        code, printed = in_a_process(program.format(port=port))
    assert code == 0, printed


def test_every_public_name_is_a_factory_or_is_none():
    classes = {name for name in bx.__all__ if name[0].isupper()}
    assert set(bx.__all__) - classes == {*decorated.FACTORIES, *decorated.OF_ARRAYS}


def test_divergence_is_switched_off():
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 1e6, 4096), "float32")
    count = jax.jit(bx.vmap(halvings))
    scanned = jax.jit(lambda x: bx.scan(lambda c, x: (c, bx.vmap(halvings)(x)))(0, x[None])[1])
    programs = lambda: [str(jax.make_jaxpr(f)(x)) for f in (count, scanned)]
    default, expected = programs(), count(x)
    assert all("small_call" in text for text in default)
    bx.config.update("divergence", "predicate")
    assert all("small_call" not in text for text in programs())
    assert "divergent_loop" in str(jax.make_jaxpr(bx.vmap(halvings, divergence="compact"))(x))
    np.testing.assert_array_equal(count(x), expected)
    bx.config.divergence = "auto"
    assert programs() == default


def test_single_kernels_are_switched_off():
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 1e6, 4096), "float32")
    count = jax.jit(bx.vmap(halvings))
    matrices = jnp.asarray(np.random.default_rng(0).normal(size=(10_000, 3, 3)), "float32")
    inverse = jax.jit(bx.vmap(jnp.linalg.inv))
    calls = lambda: [
        f.lower(at).as_text().count("xla_cpu_small_call")
        for f, at in [(count, x), (inverse, matrices)]
    ]
    default, expected = calls(), (count(x), inverse(matrices))
    assert all(default)
    bx.config.single_kernels = False
    assert calls() == [0, 0]
    np.testing.assert_array_equal(count(x), expected[0])
    np.testing.assert_allclose(inverse(matrices), expected[1], rtol=2e-2)
    bx.config.single_kernels = True
    assert calls() == default


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("divergence", "compact", "divergence is 'compact'. Pass 'auto' or 'predicate'"),
        ("divergence", None, "Pass 'auto' or 'predicate'"),
        ("single_kernels", 0, "single_kernels is 0. Pass True or False"),
        ("divergance", "auto", "no switch 'divergance'. Use one of 'divergence' or"),
        (3, "auto", "no switch 3"),
    ],
)
def test_wrong_switches(name, value, message):
    error = bx.OptionError if value == "compact" else bx.ArgumentTypeError
    with pytest.raises(error, match=message):
        bx.config.update(name, value)


def test_switches_of_the_environment():
    show = "import batchax as bx; print(bx.config.divergence, bx.config.single_kernels)"
    assert in_a_process(show) == (0, "auto True\n")
    given = {"BATCHAX_DIVERGENCE": "predicate", "BATCHAX_SINGLE_KERNELS": "0"}
    assert in_a_process(show, **given) == (0, "predicate False\n")
    code, printed = in_a_process(show, BATCHAX_DIVERGENCE="mask")
    assert code == 1
    assert "BATCHAX_DIVERGENCE is 'mask'. Set it to 'auto' or 'predicate', or unset it" in printed
