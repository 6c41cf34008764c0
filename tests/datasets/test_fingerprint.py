"""What tells a call from another one: the same in any process, another where results may be."""

import textwrap

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest

import batchax as bx
from batchax.datasets.arrays import in_memory
from batchax.datasets.fingerprint import as_seen_here, but_for_platform, differences, fingerprint
from batchax.errors import UnsupportedError

from support.processes import python

ROW = jax.ShapeDtypeStruct((3,), jnp.float32)


class Input:
    def __init__(self, **identity):
        self.name = identity.pop("name", "args[0]")
        self._identity = {"shape": [5, 3], "dtype": "float32", **identity}

    def identity(self):
        return self._identity


def staged(f, *examples):
    return jax.make_jaxpr(f, return_shape=True)(*examples)


def of(f, *examples, version=None, inputs=(), **options):
    return fingerprint(f, staged(f, *(examples or (ROW,))), inputs, options, version)


def program(f, *examples, **more):
    return of(f, *examples, **more)["program"]


def custom_jvp(times):
    f = jax.custom_jvp(times)
    f.defjvp(lambda p, t: (f(*p), t[0]))
    return f


def custom_vjp(times):
    f = jax.custom_vjp(times)
    f.defvjp(lambda x: (times(x), None), lambda _, t: (t,))
    return f


# Of a function and the constant that it multiplies by, one that has the constant there.
PLACES = {
    "": lambda times, c: times,
    "jit": lambda times, c: lambda x: jax.jit(times)(x) + 1,
    "jit in jit": lambda times, c: jax.jit(lambda x: jax.jit(times)(x) + 1),
    "scan": lambda times, c: lambda x: jax.lax.scan(lambda x, _: (times(x), None), x, None, 3)[0],
    "while": lambda times, c: lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, times, x),
    "cond": lambda times, c: lambda x: jax.lax.cond(x[0] > 0, times, jnp.sin, x),
    "custom_jvp": lambda times, c: custom_jvp(times),
    "custom_vjp": lambda times, c: custom_vjp(times),
    "remat": lambda times, c: jax.checkpoint(times),
    "bx.vmap": lambda times, c: lambda x: bx.vmap(lambda x, c: x * c[0])(x, jnp.stack([c] * 3)),
    "bx.vmap, closed over": lambda times, c: bx.vmap(lambda s: (s * c).sum(), batch_size=1),
    "custom_vmap": lambda times, c: bx.custom_vmap(times),
    "bounded_while": lambda times, c: (
        lambda x: bx.bounded_while(lambda x: x.sum() < 9, times, x, max_steps=4)
    ),
}


def with_constant(where, constant):
    constant = jnp.asarray(constant)
    return PLACES[where](lambda x: x * constant[:3], constant)


@pytest.mark.parametrize(("where", "size"), [("", 3), *((where, 3000) for where in PLACES)])
def test_the_value_of_a_constant_counts(where, size):
    values = np.arange(size, dtype=np.float32)
    other = values.copy()
    other[size // 2] += 1e-3
    one, same, another = (with_constant(where, c) for c in (values, values.copy(), other))
    assert of(one) == of(same)
    assert differences(of(one), of(same)) == []
    assert program(one) != program(another)
    assert differences(of(one), of(another)) == ["the function computes something else"]


def test_a_constant_that_is_a_key():
    def with_key(seed):
        key = jax.random.key(seed)
        return lambda x: x + jax.random.normal(key, x.shape)

    assert program(with_key(0)) == program(with_key(0)) != program(with_key(1))


def test_constants_of_equal_bytes_and_other_types():
    def closing_over(c):
        return lambda x: x + c.astype(jnp.float32).sum()

    zeros = [jnp.zeros(8, jnp.int32), jnp.zeros((2, 4), jnp.int32), jnp.zeros(8, jnp.float32)]
    assert len({program(closing_over(c)) for c in zeros}) == 3


def test_shapes_and_types_count():
    rows = [ROW, jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)]
    assert len({program(jnp.cos, row) for row in rows}) == 3
    with jax.enable_x64(True):
        assert program(lambda x: x + jnp.arange(3)) != program(
            lambda x: x + jnp.arange(3, dtype=jnp.int32)
        )


def test_names_of_functions_and_order_of_jits_do_not_count():
    def relu(x):
        return jax.nn.relu(jnp.where(x > 1, x, 0))

    def another_name(y):
        return jax.nn.relu(jnp.where(y > 1, y, 0))

    def helper(x):
        return jnp.sin(x) * 2

    def other_helper(x):
        return jnp.sin(x) * 2

    assert of(relu) == of(another_name)
    assert of(lambda x: jax.jit(helper)(x)) == of(lambda x: jax.jit(other_helper)(x))
    assert program(jax.jit(relu)) == program(jax.jit(another_name))


def test_names_of_results_count():
    one, other = of(lambda x: {"a": x}), of(lambda x: {"b": x})
    assert differences(one, other) == ["the function returns arrays by other names"]


def test_python_on_the_host_needs_a_version():
    def calls(x, add=1.0):
        return jax.pure_callback(lambda a: a + np.float32(add), ROW, x)

    def inside(x):
        return jax.lax.scan(lambda c, _: (jax.jit(calls)(c), None), x, None, length=2)[0]

    def of_ours(x):
        return bx.host_function(lambda a: a + 1, lambda a: a)(x)

    def effect(x):
        return jax.experimental.io_callback(lambda a: a, ROW, x)

    for f in (calls, inside, of_ours, effect):
        with pytest.raises(UnsupportedError, match=f"{f.__name__} calls Python .* version="):
            of(f)
        assert of(f, version="1") == of(f, version="1")
    with pytest.raises(UnsupportedError, match=r"pure_callback at .*test_fingerprint\.py"):
        of(calls)
    says = ["version was 1, is 2"]
    assert differences(of(calls, version="1"), of(calls, version="2")) == says
    # The address of a callback is none of the program.
    assert of(lambda x: calls(x, 1.0), version="1") == of(lambda x: calls(x, 2.0), version="1")


def test_what_is_printed_needs_no_version():
    def prints(x):
        jax.debug.print("{}", x)
        jax.debug.callback(lambda x: None, x)
        return x + 1

    assert of(prints) == of(prints)


SCRIPT = """
import sys, json
import jax, jax.numpy as jnp, numpy as np
import batchax as bx
from batchax.datasets.fingerprint import fingerprint
big = jnp.arange(5000.0)
table = {name: len(name) for name in {"a", "bb", "ccc"}}

@jax.custom_jvp
def curve(x):
    return x * big[: x.shape[0]]

curve.defjvp(lambda p, t: (curve(*p), t[0]))

@bx.custom_vmap
def ours(x):
    return jnp.linalg.solve(jnp.eye(3) + x, x)

def f(x):
    x = jax.lax.scan(lambda c, y: (jax.nn.softmax(curve(c)) + y * big[1], c), x, x)[0]
    x = bx.vmap(lambda s: bx.bounded_while(lambda c: c < 9, lambda c: c * 2, s, max_steps=4))(x)
    jax.debug.print("{}", x)
    x = jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return {"y": ours(x), "n": jax.random.normal(jax.random.key(table["bb"]), (2,))}

row = jax.ShapeDtypeStruct((3,), jnp.float32)
staged = jax.make_jaxpr(f, return_shape=True)(row)
print(json.dumps(fingerprint(f, staged, [], {"b": 1, "a": (2,)}, "1")))
"""


def test_versions_and_flags_count(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=a --xla_force_host_platform_device_count=2")
    plain = of(jnp.cos)
    monkeypatch.delenv("XLA_FLAGS")
    assert of(jnp.cos) == plain
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=b --xla_cpu_enable_fast_math=true")
    says = "XLA_FLAGS was not given, is --xla_cpu_enable_fast_math=true"
    assert differences(plain, of(jnp.cos)) == [says]
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(jaxlib, "__version__", "0.0.1")
    monkeypatch.setattr(bx, "__version__", "0.0.2")
    assert differences(of(jnp.cos), plain) == [
        f"batchax was 0.0.2, is {plain['batchax']}",
        f"jaxlib was 0.0.1, is {plain['jaxlib']}",
    ]


def test_a_worker_of_another_platform_compares_one_row():
    """Where rules for a batch may give another program: what it has of its own is not compared."""
    x = in_memory(np.ones((2, 3), np.float32), "x")
    seen = lambda batch, row: as_seen_here(staged(batch, ROW), staged(row, ROW)[0], [x], [], "cpu")
    one, other = seen(jnp.cos, jnp.cos), seen(jnp.sin, jnp.cos)
    another = but_for_platform(seen(jnp.cos, jnp.sin))
    says = ["the function computes something else"]
    assert differences(one, other) == says
    assert differences(but_for_platform(one), but_for_platform(other)) == []
    assert differences(but_for_platform(one), another) == says


def test_it_is_the_same_in_another_process_and_elsewhere(tmp_path):
    found = set()
    for seed, place in [("0", "a/one.py"), ("1", "b/c/another.py")]:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n" * int(seed) + textwrap.dedent(SCRIPT))
        done = python(path, PYTHONHASHSEED=seed, JAX_PLATFORMS="cpu")
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ({}, {"shape": [6, 3]}, "args[0] was float32[5, 3], is float32[6, 3]"),
        ({}, {"dtype": "int32"}, "args[0] was float32[5, 3], is int32[5, 3]"),
        ({"crc32c": 1}, {"crc32c": 2}, "args[0] has other values"),
        ({"crc32c": 1, "path": "a"}, {"crc32c": 1, "path": "b"}, None),
        ({"path": "a"}, {"path": "b"}, "args[0] was a, is b"),
        (
            {"crc32c": 1},
            {"path": "b"},
            'args[0] was known by what it holds (in memory, or by inputs_by="content"), is b',
        ),
        (
            {"path": "a", "size": 80, "name": "args[0] (a)"},
            {"path": "a", "size": 96, "name": "args[0] (a)"},
            "args[0] (a) was changed on disk: 80 bytes, now 96",
        ),
        (
            {"path": "a", "size": 80, "modified_ns": 1},
            {"path": "a", "size": 80, "modified_ns": 2},
            "args[0] was written again since, on disk, or was moved, or has other permissions "
            '(what it holds counts instead with inputs_by="content")',
        ),
        (
            {"path": "a", "size": 80, "modified_ns": 1, "sha256": "a"},
            {"path": "a", "size": 80, "modified_ns": 2, "sha256": "a"},
            None,
        ),
        (
            {"path": "a", "size": 80, "modified_ns": 1, "changed_ns": 1},
            {"path": "a", "size": 80, "modified_ns": 1, "changed_ns": 2},
            "args[0] was written again since, on disk, or was moved, or has other permissions "
            '(what it holds counts instead with inputs_by="content")',
        ),
        ({"path": "a", "member": "x"}, {"path": "a", "member": "y"}, "args[0] is not what it was"),
        ({"name": "args[0]"}, {"name": "x"}, None),
    ],
)
def test_inputs_that_changed(old, new, says):
    one, other = (of(jnp.cos, inputs=[Input(**x)]) for x in (old, new))
    assert differences(one, other) == ([] if says is None else [says])


def test_all_that_changed_is_told_and_what_follows_from_it_is_not():
    one = of(jnp.cos, inputs=[Input()], batch_size=128, in_axes=(0,))
    other = of(
        jnp.cos,
        jax.ShapeDtypeStruct((4,), jnp.float32),
        inputs=[Input(shape=[5, 4])],
        batch_size=64,
        in_axes=[0],
        max_errors=3,
    )
    assert differences(one, other) == [
        "batch_size was 128, is 64",
        "max_errors was not given, is 3",
        "args[0] was float32[5, 3], is float32[5, 4]",
    ]
    newer = {**one, "jax": "0.99", "platform": "gpu", "program": "another"}
    assert differences(one, newer) == [
        f"JAX was {jax.__version__}, is 0.99",
        "the platform of JAX was cpu, is gpu",
    ]
    assert differences(one, of(jnp.cos, inputs=[Input(), Input()], **one["options"])) == [
        "there were 1 arrays of input, now 2"
    ]
