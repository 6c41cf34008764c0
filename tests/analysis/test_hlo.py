"""Compiled programs are read from their text."""

import jax
import pytest

from batchax.analysis.hlo import UnreadableProgram, read_module
from batchax.execution.memory import memory_of


class Compiled:
    def __init__(self, text):
        self.as_text = lambda: text


TYPES = """
    bool uint16 bfloat16 complex64 float8_e5m2 float8_e4m3b11fnuz int4 uint2 float4_e2m1fn
""".split()


@pytest.mark.parametrize("dtype", TYPES)
def test_shapes(dtype):
    program = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((3, 8), dtype)).compile()
    (shape,) = {
        instruction.shape
        for computation in read_module(program).computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "parameter"
    }
    assert f" = {shape.text}{{1,0" in program.as_text()
    assert shape.bytes == memory_of(program).arguments


@pytest.mark.parametrize("text", [None, "", "HloModule f", "HloModule f, is_scheduled=true"])
def test_a_program_that_cannot_be_read(text):
    with pytest.raises(UnreadableProgram):
        read_module(Compiled(text))
