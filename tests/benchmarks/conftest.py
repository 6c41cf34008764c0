"""What is measured in tests need not be measured well."""

import gc
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as command
from benchmarks import measure
from benchmarks.chunks import measure as of_chunks
from benchmarks.devices import measure as of_devices
from benchmarks.divergence import measure as of_divergence
from benchmarks.libraries import measure as of_libraries
from benchmarks.nests import measure as of_nests
from benchmarks.ranks import measure as of_ranks
from benchmarks.rows import measure as of_rows
from benchmarks.rules import measure as of_rules
from benchmarks.search import measure as of_search
from benchmarks.slow import measure as of_slow

HURRY = measure.Effort(traces=2, runs=2, seconds_per_run=0.0, most_lanes=4)


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch):
    """Few turns, none of which waits until what all tests have left behind is looked through."""
    for module in (
        command,
        of_chunks,
        of_devices,
        of_divergence,
        of_libraries,
        of_nests,
        of_ranks,
        of_rows,
        of_rules,
        of_search,
        of_slow,
    ):
        monkeypatch.setattr(module, "QUICK", HURRY)
    no_search = SimpleNamespace(collect=lambda: None, disable=gc.disable, enable=gc.enable)
    monkeypatch.setattr(measure, "gc", no_search)
