"""Calls of `map` in processes of their own, killed in every way."""

import re

import pytest

from kills.__main__ import KINDS

from support import object_servers
from support.processes import python

COUNTS = {"disk": 28, "again": 8, "losing": 10, "network": 5, "s3": 6, "azure": 6, "google": 6} | {
    "processes": 4,
    "dask": 3,
    "scheduler": 2,
}
OFTEN = {"disk", "network"}


def test_every_kind_is_killed_and_all_shares_are_one():
    assert list(COUNTS) == list(dict.fromkeys([*COUNTS, *KINDS]))
    assert sum(kind.share for kind in KINDS.values()) == pytest.approx(1)


@pytest.mark.only_in_whole_runs
@pytest.mark.parametrize(
    "kind",
    [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.nightly) for kind in COUNTS],
)
def test_a_map_that_is_killed_leaves_what_one_leaves_that_is_not(kind, request):
    """By one seed, the same each time; `make kills` has others."""
    if kind == "google" and object_servers.fake_google() is None:
        pytest.skip("fake-gcs-server is not installed: make fake-gcs")
    if kind == "azure" and object_servers.azurite() is None:
        pytest.skip("Azurite is not installed: make azurite")
    done = python("-m", "kills", "--only", kind, "--count", COUNTS[kind], "--seed", 0)
    assert done.returncode == 0, done.stdout + done.stderr
    kills, outputs, reused = map(
        int, re.findall(r"(\d+) (?:kills|outputs|units reused)", done.stdout)
    )
    print(done.stdout)
    assert kills >= COUNTS[kind]
    assert outputs >= 1
    if kind == "disk":
        assert reused > kills
        missed = re.findall(r"^ +0 .*", done.stdout, re.MULTILINE)
        assert len(missed) <= 1, "at some moments nothing was killed"
