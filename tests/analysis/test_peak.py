"""What makes up peak memory, against the compiler's own account."""

import jax
import jax.numpy as jnp
import pytest

import batchax as bx
from batchax.analysis.hlo import UnreadableProgram, read_module
from batchax.analysis.liveness import values_at_peak
from batchax.execution.memory import memory_of
from benchmarks.workloads import WORKLOADS

from support.oracle import example

X, W = example((240, 8), seed=1), example((8, 300), seed=2)
# The schedule is the same; only machine code is made in a hurry.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def compiled(fun, *args, **options):
    return jax.jit(fun, **options).lower(*args).compile(QUICK)


# --- against the compiler ----------------------------------------------------------------------

# The share of the compiler's temporaries that the values found account for. What is missing is lost
# between values and in tables of tuples; below `SMALL` that counts.
BOUNDS, SMALL = (0.95, 1.005), 4 * 1024
# Where the compiler puts temporaries into the memory of other outputs, or writes in place of
# others; or where a temporary is dead before an output is made, and has memory of its own.
OTHER_BOUNDS = {
    "running totals": (1.2, 1.3),
    "take along own order": (0.45, 0.55),
    "interpolation in a shared table": (0.8, 0.9),
    "jacobians forward and reverse": (0.7, 0.8),
    "many small operations": (0.95, 1.05),
}
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


def agrees(program, bounds=BOUNDS):
    found, account = values_at_peak(program), memory_of(program)
    assert found
    temporaries = sum(v.bytes for v in found if v.kind == "temporary")
    if account.temporaries > SMALL:
        assert bounds[0] <= temporaries / account.temporaries <= bounds[1]
    return found


@pytest.mark.parametrize(
    "name", [n.strip() for n in NAMES.replace("\n", "|").split("|") if n.strip()]
)
@pytest.mark.each_commit(6)
def test_workloads(name):
    workload = WORKLOADS[name]
    program = compiled(workload.batched_by(bx.vmap), *workload.data(workload.lanes))
    agrees(program, OTHER_BOUNDS.get(name, BOUNDS))


def wide(w, x):
    return jnp.sum(jnp.sort(jnp.sin(x[:, None] * w), axis=0)[::2])


def chunks(batch_size):
    return bx.vmap(wide, (None, 0), batch_size=batch_size)


SQUARE = jnp.ones((200, 200))


# --- what the values are -----------------------------------------------------------------------


def test_values_say_what_made_them():
    found = agrees(compiled(chunks(24), W, X))
    first, *_ = found
    real = f"f{8 * W.itemsize}"
    assert (first.kind, first.shape) == ("temporary", f"{real}[24,8,300]")
    assert first.bytes == W.itemsize * 24 * 8 * 300
    assert first.op_name is not None
    assert first.op_name.rsplit("/", 1)[-1] in ("sin", "sort", "slice")
    assert [v.bytes for v in found] == sorted((v.bytes for v in found), reverse=True)
    arguments = [v for v in found if v.kind == "argument"]
    assert sum(v.bytes for v in arguments) == W.nbytes + X.nbytes
    (output,) = (v for v in found if v.kind == "output")
    assert output.shape == f"{real}[240]"


def test_an_argument_given_up_holds_the_output():
    program = compiled(lambda x: x * 2, SQUARE, donate_argnums=0)
    account = memory_of(program)
    assert account.aliased == account.bytes == SQUARE.nbytes
    (value,) = values_at_peak(program)
    assert (value.kind, value.bytes) == ("argument", SQUARE.nbytes)


# --- reading -----------------------------------------------------------------------------------


class Compiled:
    def __init__(self, text):
        self.as_text = lambda: text


TYPES = """
    bool uint16 bfloat16 complex64 float8_e5m2 float8_e4m3b11fnuz int4 uint2 float4_e2m1fn
""".split()


@pytest.mark.parametrize("dtype", TYPES)
def test_shapes(dtype):
    program = compiled(lambda x: x, jax.ShapeDtypeStruct((3, 8), dtype))
    (argument,) = (v for v in values_at_peak(program) if v.kind == "argument")
    assert f" = {argument.shape}{{1,0" in program.as_text()
    module = read_module(program)
    assert module.computations[module.entry].instructions[0].shape.bytes == argument.bytes
    assert argument.bytes == memory_of(program).arguments


@pytest.mark.parametrize("text", [None, "", "HloModule f", "HloModule f, is_scheduled=true"])
def test_a_program_that_cannot_be_read(text):
    with pytest.raises(UnreadableProgram):
        read_module(Compiled(text))
    assert values_at_peak(Compiled(text)) == ()
