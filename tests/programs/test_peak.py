"""What makes up peak memory, against the compiler's own account."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import batchax as bx
from batchax.programs.hlo import (
    Computation,
    Instruction,
    Module,
    Shape,
    UnreadableProgram,
    integer,
    integers,
    read_message,
    read_module,
    text,
)
from batchax.programs.liveness import held_at_worst, memory_of, peak_of
from benchmarks.workloads import WORKLOADS

from support.oracle import example

X, W = example((240, 8), seed=1), example((8, 300), seed=2)
# The schedule is the same; only machine code is made in a hurry.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def compiled(fun, *args, **options):
    return jax.jit(fun, **options).lower(*args).compile(QUICK)


# --- against the compiler ----------------------------------------------------------------------

# Below, what is lost between values and in tables of tuples counts.
BOUNDS, SMALL = (0.95, 1.0), 4 * 1024
# Programs whose values are made in other places: fusions, calls, loops, branches, updates.
NAMES = """
image patches | reductions | running totals | sort and argsort | top k and median | spectral filter
random normals per lane | random choices per lane | contrast with all lanes
bilinear form with inner axes
tensor contraction | cholesky solve | general solve | symmetric eigenvalues
qr and singular values | triangular solve with own matrix | take along own order | histogram
scatter into shared array | slice and update where the lane says | interpolation in a shared table
mlp forward | attention block | convolution of images with own kernels | recurrent network
while with vector state | power iteration with fori loop | associative scan
per example gradients | clipped per example gradients | gradients of attention
gradients with checkpoint | hessians | jacobians forward and reverse | gradients through scan
many small operations | gradients of a transformer | mixture density
"""


def agrees(program):
    found = peak_of(program)
    assert found.values
    assert found.bytes == memory_of(program).bytes
    if found.temporaries > SMALL:
        assert BOUNDS[0] <= found.explained <= BOUNDS[1], found.explained
    return found


@pytest.mark.parametrize(
    "name", [n.strip() for n in NAMES.replace("\n", "|").split("|") if n.strip()]
)
@pytest.mark.each_commit(6)
def test_workloads(name):
    workload = WORKLOADS[name]
    agrees(compiled(workload.batched_by(bx.vmap), *workload.data(workload.lanes)))


def wide(w, x):
    return jnp.sum(jnp.sort(jnp.sin(x[:, None] * w), axis=0)[::2])


def chunks(batch_size):
    return bx.vmap(wide, (None, 0), batch_size=batch_size)


def chunked_loss(w, x):
    return jnp.mean(chunks(24)(w, x) ** 2)


def layers(x):
    return lax.scan(lambda h, _: (jnp.tanh(h @ h.T @ h), h.sum(0)), x, None, length=20)


def until_small(x):
    grow = lambda s: (s[0] + 1, jnp.tanh(s[1] @ s[1].T @ s[1]))
    return lax.while_loop(lambda s: s[0] < s[1][0, 0], grow, (0, x))


def updated(x):
    return lax.fori_loop(0, 50, lambda i, y: y.at[i].set(y[i - 1] * 2), x * 2).sum()


def branches(x, p):
    return lax.cond(p, lambda x: jnp.sin(x) @ x, lambda x: jnp.linalg.svd(x @ x)[0], x)


SQUARE = jnp.ones((200, 200))
LOOPS = {
    "chunks": (chunks(24), W, X),
    "chunks and a rest": (chunks(50), W, X),
    "gradient of chunks": (jax.grad(chunked_loss, (0, 1)), W, X),
    "scan": (layers, SQUARE),
    "gradient of a scan": (jax.grad(lambda x: layers(x)[0].sum()), SQUARE),
    "while": (until_small, SQUARE),
    "updates in place": (updated, jnp.ones((1000, 200))),
    "updates in place in chunks": (bx.vmap(updated, batch_size=4), jnp.ones((16, 1000, 20))),
    "branches": (branches, SQUARE, True),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name):
    fun, *args = LOOPS[name]
    agrees(compiled(fun, *args))


# --- what the values are -----------------------------------------------------------------------


def test_values_say_what_made_them():
    found = agrees(compiled(chunks(24), W, X))
    first, *_ = found.values
    real = f"f{8 * W.itemsize}"
    assert (first.kind, first.shape) == ("temporary", f"{real}[24,8,300]")
    assert first.bytes == W.itemsize * 24 * 8 * 300
    assert first.op_name is not None
    assert first.op_name.rsplit("/", 1)[-1] in ("sin", "sort", "slice")
    assert first.source is not None
    assert first.source[0] == __file__
    assert [v.bytes for v in found.values] == sorted((v.bytes for v in found.values), reverse=True)
    arguments = [v for v in found.values if v.kind == "argument"]
    assert sum(v.bytes for v in arguments) == found.arguments == W.nbytes + X.nbytes
    (output,) = (v for v in found.values if v.kind == "output")
    assert output.shape == f"{real}[240]"


def test_an_argument_given_up_holds_the_output():
    program = compiled(lambda x: x * 2, SQUARE, donate_argnums=0)
    found = peak_of(program)
    assert found.aliased == SQUARE.nbytes
    assert found.bytes == SQUARE.nbytes
    (value,) = found.values
    assert (value.kind, value.bytes) == ("argument", SQUARE.nbytes)


def test_a_loop_works_in_place():
    found = agrees(compiled(updated, jnp.ones((1000, 200))))
    large = [v for v in found.values if v.bytes >= 800_000]
    assert sorted(v.kind for v in large) == ["argument", "temporary"]


def test_a_copy_says_what_it_copies_and_a_carry_what_a_step_makes():
    found = agrees(compiled(LOOPS["gradient of a scan"][0], SQUARE))
    large = [v for v in found.values if v.bytes >= SQUARE.nbytes and v.kind != "argument"]
    assert all("while/body" in v.op_name for v in large)


F32 = Shape("f32[4]", 16)


def one(number, opcode, *operands, called=()):
    return Instruction(number, f"v{number}", F32, opcode, operands, called, 0, 0, None, None)


def allocation(values, *fields):
    """A field of an assignment: memory for values, each with the number of its instruction."""
    places = (message((1, n), (2, 16 * k), (3, 16)) for k, n in enumerate(values))
    return 3, message(*fields, *((9, place) for place in places))


def test_what_runs_beside_others_is_held_until_it_is_done():
    entry = [
        one(1, "parameter"),
        one(2, "async-start", "v1", called=("sine",)),
        one(3, "cosine", "v1"),
        one(4, "async-done", "v2"),
        one(5, "add", "v3", "v4"),
    ]
    sine = [one(6, "parameter"), one(7, "sine", "v6")]
    module = Module({"main": Computation(entry, "v5"), "sine": Computation(sine, "v7")}, "main")
    assignment = message(
        *((1, message((1, n), (3, message((4, n))))) for n in (1, 3, 5, 7)),
        allocation([1], (5, 1)),
        allocation([5], (1, 1), (7, 1)),
        allocation([3, 7], (1, 2)),
    )
    held = held_at_worst(module, assignment)
    assert {(v.made.opcode, v.place.kind) for v in held} == {
        ("parameter", "argument"),
        ("add", "output"),
        ("sine", "temporary"),
        ("cosine", "temporary"),
    }


# --- reading -----------------------------------------------------------------------------------


def message(*fields):
    """The bytes of a message: of integers below 128 and short messages."""
    parts = [
        bytes([number << 3, value]) if isinstance(value, int)
        else bytes([number << 3 | 2, len(value)]) + value
        for number, value in fields
    ]  # fmt: skip
    return b"".join(parts)


def test_messages_are_read():
    data = b"\x08\x96\x01" + message((2, b"testing"), (4, b"\x03\x8e\x02\x9e\xa7\x05"), (4, 7))
    found = read_message(data + b"\x2d\x00\x00\x80\x3f")
    assert (integer(found[1]), text(found[2]), integer(found[3])) == (150, "testing", 0)
    assert integers(found[4]) == (3, 270, 86942, 7)
    assert found[5] == [b"\x00\x00\x80\x3f"]
    for broken in (b"\x08", b"\x0a\x02x", b"\x0b"):
        with pytest.raises(ValueError, match="message"):
            read_message(broken)


@pytest.mark.parametrize("name", ["gradient of chunks", "branches"])
def test_a_program_is_read_as_its_text_says(name):
    fun, *args = LOOPS[name]
    program = compiled(fun, *args)
    lines = program.as_text().splitlines()
    made = {m[1]: m[2] for line in lines if (m := re.match(r" +(?:ROOT )?%(\S+) = (.*)", line))}
    module = read_module(program)
    found = [i for c in module.computations.values() for i in c.instructions]
    assert sorted(i.name for i in found) == sorted(made)
    entry = [i.name for i in module.computations[module.entry].instructions]
    assert entry == [name for name in made if name in entry]
    for i in found:
        line = made[i.name]
        assert line.startswith(i.shape.text)
        assert f" {i.opcode}(" in line
        assert all(f"%{name}" in line for name in (*i.operands, *i.called))
        assert i.op_name is None or i.op_name in line
    assert {i.source[0] for i in found if i.source} >= {__file__}


TYPES = """
    bool int8 uint16 int32 float16 bfloat16 float32 complex64 float8_e5m2 float8_e4m3fn int4 uint4
    float8_e4m3b11fnuz float8_e5m2fnuz float8_e4m3fnuz int2 uint2 float8_e4m3 float8_e3m4
    float4_e2m1fn float8_e8m0fnu
""".split()


@pytest.mark.parametrize("dtype", TYPES)
def test_shapes(dtype):
    program = compiled(lambda x: x, jax.ShapeDtypeStruct((3, 8), dtype))
    (argument,) = (v for v in peak_of(program).values if v.kind == "argument")
    assert f" = {argument.shape}{{1,0" in program.as_text()
    module = read_module(program)
    assert module.computations[module.entry].instructions[0].shape.bytes == argument.bytes


def test_where_the_compiler_does_not_say_the_totals_stand():
    program = compiled(jnp.sin, X)

    class Silent:
        memory_analysis = program.memory_analysis

        def runtime_executable(self):
            return None

    with pytest.raises(UnreadableProgram):
        read_module(Silent())
    found = peak_of(Silent())
    assert found.values == ()
    assert found.bytes == memory_of(program).bytes
    with pytest.raises(UnreadableProgram):
        held_at_worst(read_module(program), b"")
