"""The benchmarks of chunks and steps compare ways that compute the same, and say so."""

import jax
import pytest

from benchmarks import __main__ as command
from benchmarks.chunks.measure import arguments, programs
from benchmarks.chunks.workload import BOTH, FORWARD, GRADIENT
from benchmarks.chunks.workloads import EXAMPLE, WORKLOADS

from support.oracle import same, together

UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
TOLERANCE = dict(rtol=1e-3, atol=1e-4)


def computed(fun, *args):
    """What `fun` returns, compiled in a hurry."""
    return jax.jit(fun).lower(*args).compile(UNOPTIMISED)(*args)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.each_commit(2)
def test_all_ways_give_the_same(workload):
    small = workload.small()
    use = workload.uses[-1]
    args = arguments(small, use)
    forward = programs(small, FORWARD)
    in_reverse = {} if use == FORWARD else programs(small, use)

    def compute(*args):
        data = args if use == FORWARD else args[1:]
        return small.plain()(*data), together(forward)(*data), together(in_reverse)(*args)

    expected, found, found_in_reverse = computed(compute, *args)
    for way, outs in found.items():
        same(outs, expected, TOLERANCE, way)
    if use != FORWARD:
        *_, (_, gradients) = found_in_reverse.values()  # of jax.vmap, or lax.scan
        for way, outs in found_in_reverse.items():
            same(outs, (expected, gradients), TOLERANCE, way)


def test_gradients_alone_are_those_with_the_value():
    small = EXAMPLE.small()
    args = arguments(small, GRADIENT)
    uses = [together(programs(small, use)) for use in (BOTH, GRADIENT)]
    both, alone = computed(lambda *xs: [use(*xs) for use in uses], *args)
    assert alone.keys() == both.keys()
    for name, (_, gradients) in both.items():
        same(alone[name], gradients, tolerance=TOLERANCE)


def test_every_way_takes_part_where_it_can():
    ways = {"bx.vmap", "lax.map", "optax", "jax.vmap"}
    in_reverse = {'bx.vmap, residuals="keep"', "lax.map, checkpoint"}
    assert ways <= programs(EXAMPLE.small(), FORWARD).keys()
    assert ways | in_reverse <= programs(EXAMPLE.small(), GRADIENT).keys()
    assert "optax" not in programs(WORKLOADS["remainder of 40 lanes"].small(), FORWARD)
    assert "optax" not in programs(WORKLOADS["columns"].small(), GRADIENT)


def test_small_workloads_keep_their_remainder():
    small = WORKLOADS["remainder of 40 lanes"].small()
    assert 0 < small.lanes % small.chunk < small.lanes
    assert EXAMPLE.small().lanes % EXAMPLE.small().chunk == 0


@pytest.mark.nightly
def test_the_command_measures_and_reports(tmp_path, capsys):
    chosen = ["per-example gradients", "outer product, chunks of 4"]
    only = [word for name in chosen for word in ("--only", name)]
    results = command.main(["chunks", "--quick", *only, "--out", str(tmp_path)])
    assert [r.workload.name for r in results] == [chosen[0], chosen[1], chosen[1]]
    for r in results:
        assert r.ours.ratio.value == 1
        for way in r.ways.values():
            assert way.seconds > 0
            assert 0 < way.ratio.low <= way.ratio.value <= way.ratio.high
    page = (tmp_path / "chunks.md").read_text()
    assert "**per-example gradients** (8 / 4, axes None, 0, 0 to 0)" in page
    assert "| gradient | 4 |" in page
    assert capsys.readouterr().out.count("over lax.map") == len(results)
    assert (tmp_path / "chunks.png").read_bytes().startswith(b"\x89PNG")
