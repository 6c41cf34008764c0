"""Both sides of each benchmark compute the same; and each command measures and reports."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from benchmarks import __main__ as command
from benchmarks import history, measure
from benchmarks.around.workloads import WORKLOADS as AROUND
from benchmarks.bounded import WORKLOADS as BOUNDED
from benchmarks.chunks.measure import arguments, programs
from benchmarks.chunks.workload import FORWARD
from benchmarks.chunks.workloads import WORKLOADS as CHUNKED
from benchmarks.datasets.ways import NEEDS, WAYS
from benchmarks.datasets.workloads import WORKLOADS as ON_DISK
from benchmarks.devices import measure as of_devices
from benchmarks.devices.workloads import WORKLOADS as ON_DEVICES
from benchmarks.divergence.measure import FEW_STEPS
from benchmarks.divergence.measure import WORKLOADS as DIVERGING
from benchmarks.divergence.workload import BASE
from benchmarks.nests import steps
from benchmarks.nests.measure import WORKLOADS as NESTS
from benchmarks.ranks import measure as of_ranks
from benchmarks.ranks.workloads import WORKLOADS as WITH_RANKS
from benchmarks.rows import measure as of_rows
from benchmarks.rows.workloads import WORKLOADS as WITH_ROWS
from benchmarks.rows.workloads import data
from benchmarks.rules.workloads import USES
from benchmarks.rules.workloads import WORKLOADS as WITH_RULES
from benchmarks.slow.measure import WORKLOADS as SLOW
from benchmarks.slow.workload import HAND, JAX, OURS
from benchmarks.workloads import WORKLOADS

from support.oracle import at_once, same, same_type, together

LANES = 4
TOLERANCE = dict(rtol=1e-3, atol=1e-3)
UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def each(workloads):
    """A case for each of the workloads."""
    return pytest.mark.parametrize("workload", workloads.values(), ids=workloads)


def all_the_same(ways, args):
    found = jax.jit(together(ways))(*args)
    expected = found.pop(BASE)
    for way, got in found.items():
        same(got, expected, TOLERANCE, way)
    return expected


@each(WORKLOADS)
@pytest.mark.each_commit(8)
def test_both_vmaps_give_the_same(workload):
    args = workload.data(3)
    expected, got = at_once(*map(workload.batched_by, (jax.vmap, bx.vmap)))(*args)
    same(got, expected, tolerance=dict(rtol=1e-4, atol=1e-4))
    jax.tree.map(same_type, got, expected)


# Rows of different lengths are compared with a batch of equal ones: those compute other things.
ALIKE = ("jax.vmap", "all lanes at once")


@each({n: w for n, w in AROUND.items() if w.family != "tracing" and w.other in ALIKE})
@pytest.mark.compiles(80)
def test_around_the_program(workload):
    ours, other = (run() for run in workload.make(True))
    same(ours, other, dict(rtol=1e-4, atol=1e-5))


@each(BOUNDED)
@pytest.mark.each_commit(1)
def test_bounded_loops_have_the_same_gradient(workload):
    data, count = workload.data(), np.int32(5)
    ours, *others = (
        jax.jit(jax.value_and_grad(lambda x, p, f=f: (f(count, x, p) ** 2).sum(), (0, 1)))(*data)
        for f in workload.loops().values()
    )
    for found in others:
        same(found, ours, dict(rtol=1e-4, atol=1e-4))


@each(CHUNKED)
@pytest.mark.each_commit(2)
def test_chunks(workload):
    small, use = workload.small(), workload.uses[-1]
    args = arguments(small, use)
    forward = programs(small, FORWARD)
    in_reverse = {} if use == FORWARD else programs(small, use)

    def compute(*args):
        data = args if use == FORWARD else args[1:]
        return small.plain()(*data), together(forward)(*data), together(in_reverse)(*args)

    compiled = jax.jit(compute).lower(*args).compile(UNOPTIMISED)
    expected, found, found_in_reverse = compiled(*args)
    for way, outs in found.items():
        same(outs, expected, TOLERANCE, way)
    if use != FORWARD:
        *_, (_, gradients) = found_in_reverse.values()  # of jax.vmap, or lax.scan
        for way, outs in found_in_reverse.items():
            same(outs, (expected, gradients), TOLERANCE, way)


@pytest.mark.parametrize("name", [way for way in WAYS if way not in NEEDS])
def test_datasets(name, tmp_path):
    import zarr

    work = ON_DISK["products of short rows"]
    work.save(tmp_path / "x.npy", 1500)  # the last slice is shorter
    WAYS[name](work, tmp_path / "x.npy", tmp_path / "y")
    x = np.load(tmp_path / "x.npy")
    (found,) = tmp_path.glob("y.[nz]*[yr]")
    got = np.load(found) if found.suffix == ".npy" else zarr.open_array(found, mode="r")[...]
    np.testing.assert_allclose(got, (x[:, :, None] * x[:, None]).reshape(len(x), -1), rtol=1e-6)


@each(ON_DEVICES)
def test_devices(workload):
    mesh = of_devices.mesh_of(of_devices.DEVICES)
    args = workload.placed(mesh, 8 - workload.lanes % 2)
    same(*at_once(workload.ours(mesh), workload.by_hand(mesh))(*args), TOLERANCE)
    one, four = (of_devices.flops_of_one(workload, n) for n in (1, 4))
    assert one / 4 <= four < one / 4 * 1.01


EXPENSIVE_TO_COMPILE = {"adaptive ODE solver", "NUTS"}
CHEAP = {
    name: w
    for name, w in DIVERGING.items()
    if name not in EXPENSIVE_TO_COMPILE and not name.startswith("in place, ")
}
CHEAP["in place"] = DIVERGING["in place, 10,000 elements"]


@each(CHEAP)
@pytest.mark.each_commit(3)
def test_divergence(workload):
    ways = workload.uses()["values"]
    assert {"auto", "compact"} <= set(ways)
    all_the_same(ways, workload.arguments(LANES, FEW_STEPS))


@pytest.mark.parametrize("lanes", [1, 3, 100])
def test_compaction_and_refill_by_hand(lanes):
    workload = DIVERGING["64x64 products, heavy-tailed counts"]
    args = workload.arguments(lanes, FEW_STEPS)
    all_the_same({**workload.others, BASE: workload.ways()[BASE]}, args)
    counts = np.asarray(args[0])
    compact, masked = workload.utilization(args)
    assert masked == counts.sum() / (lanes * counts.max())
    assert masked <= compact <= 1


@each({name: w for name, w in NESTS.items() if not w.needs})
def test_nested_loops(workload):
    args = workload.data(LANES, FEW_STEPS)
    counts = workload.inner_steps(args, all_the_same(workload.ways(), args))
    assert counts.shape[:2] == (LANES, FEW_STEPS)
    assert 0 <= steps.bound(counts) <= 1


@each(WITH_RANKS)
def test_ranks(workload):
    args, others = workload.data(3), of_ranks.others(workload)
    assert of_ranks.BY_HAND in others
    got, *found = at_once(of_ranks.ours(workload), *others.values())(*args)
    for way, expected in zip(others, found, strict=True):
        same(got, expected, TOLERANCE, way)


@each(WITH_ROWS)
@pytest.mark.each_commit(2)
def test_rows(workload):
    rows, weights = data(workload, 5)
    by_hand = filter(None, (workload.padded, workload.packed))
    got, *found = at_once(of_rows.ours(workload), *by_hand)(rows, weights)
    if isinstance(got, bx.Ragged):
        (padded,) = found
        got, found = got.data, [jnp.asarray(np.asarray(padded)[np.asarray(rows.mask)])]
    for expected in found:
        same(got, expected, tolerance=TOLERANCE)


@each(WITH_RULES)
@pytest.mark.each_commit(2)
def test_rules(workload):
    functions = (workload.with_rule(), workload.fun)
    arguments = {name: workload.arguments(name, 3) for name in USES}

    @jax.jit
    def compute(arguments):
        return {
            name: [USES[name].of(f)(*args) for f in functions] for name, args in arguments.items()
        }

    for name, (got, expected) in compute(arguments).items():
        same(got, expected, TOLERANCE, name)


@each(SLOW)
@pytest.mark.each_commit(3)
def test_where_a_batch_makes_things_slow(workload):
    ways = workload.ways()
    assert set(ways) == ({JAX, HAND, OURS} if workload.batched else {HAND, OURS})
    *others, got = at_once(*ways.values())(*workload.data(3))
    for way, expected in zip(ways, others, strict=False):
        if workload.family == "Random bits" and way == JAX:
            continue  # of rbg keys jax.vmap draws other numbers than each key by itself
        same(got, expected, dict(rtol=2e-3, atol=2e-3), way)


# What each command is to measure, what its page says of it, and the pictures beside the page.
COMMANDS = {
    "vmap": (
        ["softmax and logsumexp", "matvec with own matrix"],
        ["| softmax and logsumexp |", "| matvec with own matrix |"],
        ["vmap.png"],
    ),
    "around": ([], ["s of CPU time more than `import jax` alone"], []),
    "bounded": (["tanh of 256 numbers"], ["| tanh of 256 numbers |", "x the temporaries"], []),
    "chunks": (
        ["per-example gradients", "outer product, chunks of 4"],
        ["**per-example gradients** (8 / 4, axes None, 0, 0 to 0)", "| gradient | 4 |"],
        ["chunks.png"],
    ),
    "cluster": ([], ["**The scheduler** breaks first"], []),
    "datasets": (["products", "memory", "many units"], ["| products of short rows |"], []),
    "devices": (["elem"], ["| elementwise |", "| elementwise, uneven |"], []),
    "divergence": (
        ["heavy-tailed"],
        ["| 64x64 products, heavy-tailed counts |"],
        ["divergence.png"],
    ),
    "programs": (
        ["Adam to a tolerance", "walks until"],
        ["## Looked at", "| optax: Adam to a tolerance, 64 | yes | "],
        [],
    ),
    "nests": (["rejection sampling"], ["| rejection sampling |"], ["nests.png", "nests-use.png"]),
    "ranks": (["all of two dimensions"], [f", {of_ranks.MERGED_BY_HAND} |"], []),
    "rows": (["bag"], [f" {of_rows.PADDED} |", f" {of_rows.LOOP} |"], ["rows.png"]),
    "rules": (["few operations"], [f"| few operations, {use} |" for use in USES], []),
    "search": (
        ["distances by nested vmaps", "cumulative sum"],
        ["Of 2 programs,\n1 compile to the same program", "| running | "],
        [],
    ),
    "slow": (["det, 3 x 3"], ["[benchmarks/slow]", "| det, 3 x 3 |"], []),
}
AT_NIGHT = {"around", "bounded", "chunks", "datasets", "devices", "divergence", "nests", "ranks"}
AT_NIGHT |= {"rules", "cluster"}
NO_RATIOS = {"cluster", "datasets"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n in AT_NIGHT)) for n in COMMANDS]
)
@pytest.mark.compiles(150)
def test_commands_measure_and_report(name, tmp_path, capsys):
    only, said, pictures = COMMANDS[name]
    chosen = [word for one in only for word in ("--only", one)]
    of = [] if name == "vmap" else [name]
    results = command.main([*of, "--quick", *chosen, "--out", str(tmp_path)])
    assert results
    for result in results:
        ratios = history.ratios_in(name, result)
        assert ratios or name in NO_RATIOS
        assert all(0 < r.low <= r.value <= r.high for r in ratios.values())
    page, printed = (tmp_path / f"{name}.md").read_text(), capsys.readouterr().out
    assert [words for words in said if words not in page] == []
    assert [words for words in only if words not in printed] == []
    for picture in pictures:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_the_command_names_what_there_is(capsys):
    with pytest.raises(SystemExit):
        command.main(["--only", "no such workload"])
    assert "softmax and logsumexp" in capsys.readouterr().err


def test_on_another_device_sizes_and_ways_are_those_of_it(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        command.main(["divergence", "--device", "gpu", "--quick"])
    assert "JAX runs programs on cpu here" in capsys.readouterr().err
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    hurry = replace(measure.QUICK, most_lanes=LANES, times_lanes=3)
    monkeypatch.setattr(measure, "ON_A_GPU", hurry)
    only = ["--only", "Newton", "--minutes", "1", "--out", str(tmp_path)]
    (result,) = command.main(["divergence", "--device", "gpu", *only])
    assert result.lanes == 3 * LANES
    assert {"auto", "compact"} <= set(result.ways)
    assert "lax.map" not in result.ways
    assert "on a GPU\n" in (tmp_path / "divergence.md").read_text()
