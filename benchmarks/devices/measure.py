"""Measuring lanes on several devices: in this process if it has them, in another one if not."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

import batchax as bx
from batchax.analysis.cost import cost_of_program
from benchmarks.devices.workloads import WORKLOADS, DeviceWorkload
from benchmarks.measure import FULL, QUICK, Result, compare

DEVICES = 4


@dataclass(frozen=True)
class DeviceResult:
    """What was measured of a workload.

    Attributes:
      result: on all devices, against `shard_map` by hand.
      same: whether the staged programs are the same.
      flops: what one device computes, by the number of devices.
    """

    result: Result
    same: bool
    flops: dict[int, float]


def measured(workload: DeviceWorkload, quick: bool) -> Iterator[DeviceResult]:
    """One result."""
    if jax.device_count() >= DEVICES:
        yield measured_here(workload, quick)
        return
    # How many devices a CPU is, JAX asks once, when it starts.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    send = f"from benchmarks.devices.measure import send; send({workload.name!r}, {quick})"
    found = subprocess.run(
        [sys.executable, "-c", send],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    yield pickle.loads(found.stdout)


def send(name: str, quick: bool) -> None:
    """Writes a result to where another process reads it."""
    sys.stdout.buffer.write(pickle.dumps(measured_here(WORKLOADS[name], quick)))


def measured_here(workload: DeviceWorkload, quick: bool) -> DeviceResult:
    """A result, with the devices of this process."""
    effort = QUICK if quick else FULL
    lanes = min(workload.lanes, effort.most_lanes or workload.lanes)
    lanes -= quick * (workload.lanes % DEVICES != 0)  # as uneven as it was
    mesh = mesh_of(DEVICES)
    args = workload.placed(mesh, lanes)
    makers = [lambda: workload.ours(mesh), lambda: workload.by_hand(mesh)]
    result = compare(workload.name, workload.name, makers, args, effort)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    same = bx.same_program(*(make() for make in makers), *types)
    return DeviceResult(result, bool(same), {n: flops_of_one(workload, n) for n in (1, 2, 4)})


def mesh_of(count: int) -> Mesh:
    """A mesh of so many devices."""
    return Mesh(np.array(jax.devices()[:count]), ("devices",))


def flops_of_one(workload: DeviceWorkload, devices: int) -> float:
    """What one of so many devices computes, steps of loops counted as often as they run."""
    mesh = mesh_of(devices)
    program = jax.make_jaxpr(workload.ours(mesh))(*workload.placed(mesh, workload.lanes))
    cost = cost_of_program(program)
    return cost.flops + cost.transcendentals
