"""The table of workloads, a module for each family; importing the package fills it."""
# ruff: noqa: I001  # the order of the table: simple workloads first

from benchmarks.workload import WORKLOADS as WORKLOADS
from benchmarks.workloads import arrays as arrays
from benchmarks.workloads import linalg as linalg
from benchmarks.workloads import indexing as indexing
from benchmarks.workloads import networks as networks
from benchmarks.workloads import control_flow as control_flow
from benchmarks.workloads import derivatives as derivatives
from benchmarks.workloads import programs as programs
