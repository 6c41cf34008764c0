"""What makes up peak memory, against the compiler's own account."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import batchax as bx
from batchax.execution.memory import needed_bytes
from batchax.programs.hlo import UnreadableProgram, read_module, read_shape
from batchax.programs.peak import peak_of
from benchmarks.workloads import WORKLOADS

from support.oracle import example

X, W = example((240, 8), seed=1), example((8, 300), seed=2)
# The schedule is the same; only machine code is made in a hurry.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def compiled(fun, *args, **options):
    return jax.jit(fun, **options).lower(*args).compile(QUICK)


# --- against the compiler ----------------------------------------------------------------------

BOUNDS, SMALL = (0.8, 1.25), 64 * 1024
PACKING = "the compiler leaves room between values whose times overlap in part"
LODGING = "which temporaries take the memory of an output is the compiler's choice"
EXCEPTIONS = {
    "random normals per lane": ((0.6, 1.25), PACKING),
    "random choices per lane": ((0.6, 1.25), PACKING),
    "running totals": ((0.8, 1.35), LODGING),
    "take along own order": ((0.45, 1.25), LODGING),
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
    found = peak_of(program)
    assert found.values
    assert found.bytes == needed_bytes(program)
    if found.temporaries > SMALL:
        assert bounds[0] <= found.explained <= bounds[1], found.explained
    return found


@pytest.mark.parametrize(
    "name", [n.strip() for n in NAMES.replace("\n", "|").split("|") if n.strip()]
)
def test_workloads(name):
    workload = WORKLOADS[name]
    program = compiled(workload.batched_by(bx.vmap), *workload.data(workload.lanes))
    bounds, _ = EXCEPTIONS.get(name, (BOUNDS, ""))
    agrees(program, bounds)


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
    assert (first.kind, first.shape) == ("temporary", "f32[24,8,300]")
    assert first.bytes == 4 * 24 * 8 * 300
    assert first.op_name is not None
    assert first.op_name.rsplit("/", 1)[-1] in ("sin", "sort", "slice")
    assert first.source is not None
    assert first.source[0] == __file__
    assert [v.bytes for v in found.values] == sorted((v.bytes for v in found.values), reverse=True)
    arguments = [v for v in found.values if v.kind == "argument"]
    assert sum(v.bytes for v in arguments) == found.arguments == W.nbytes + X.nbytes
    (output,) = (v for v in found.values if v.kind == "output")
    assert output.shape == "f32[240]"


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


# --- reading -----------------------------------------------------------------------------------

MODULE = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

ENTRY %main.1 (x.1: f32[4]) -> (f32[4], s32[]) {
  %x.1 = f32[4]{0:T(128)} parameter(0), metadata={op_name="x"}
  %c = s32[] constant(3)
  %sin.1 = f32[4]{0} sine(%x.1), metadata={op_name="sin(%x)" source_file="a.py" source_line=7}
  ROOT %t = (f32[4]{0}, /*index=1*/s32[]) tuple(%sin.1, %c)
}
"""


def test_a_module_is_read():
    module = read_module(MODULE)
    entry = module.computations[module.entry]
    x, c, sin, t = entry.instructions
    assert (x.opcode, x.number, x.shape.bytes) == ("parameter", 0, 16)
    assert (c.opcode, c.operands, c.shape.bytes) == ("constant", (), 4)
    assert (sin.operands, sin.source) == (("x.1",), ("a.py", 7))
    assert sin.op_name == "sin(%x)"
    assert (entry.root, t.operands, t.shape.bytes) == ("t", ("sin.1", "c"), 20)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[8,300]{1,0:T(8,128)}", 9600),
        ("bf16[3]", 6),
        ("pred[]", 1),
        ("c64[2]{0}", 16),
        ("s4[8]", 4),
        ("token[]", 0),
        ("f8e4m3fn[5]", 5),
        ("((s32[], u8[2,3]), f64[<=2])", 26),
        ("()", 0),
    ],
)
def test_shapes(text, size):
    assert read_shape(text).bytes == size


@pytest.mark.parametrize(
    "text", ["", "module @jit_f {}", "HloModule jit_f\n\nENTRY %m () -> s32[] {"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(UnreadableProgram):
        read_module(text)


def test_without_a_text_the_totals_stand():
    program = compiled(jnp.sin, X)

    class Wordless:
        memory_analysis = program.memory_analysis

        def as_text(self):
            return "something else"

    found = peak_of(Wordless())
    assert found.values == ()
    assert found.bytes == needed_bytes(program)
