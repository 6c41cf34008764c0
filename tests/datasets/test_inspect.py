"""How far a job is, while it runs and after; damage on disk, found and fixed."""

import pytest

from batchax.datasets import inspect
from batchax.datasets.disk import Holder
from batchax.datasets.inspect import Damaged, Status, Verified, status, verify
from batchax.datasets.plan import Bad, Record, Unit
from batchax.errors import JobError

from support.small_jobs import computed, opened


@pytest.fixture
def out(tmp_path):
    return tmp_path / "y.npy"


def test_how_far_it_is(out):
    with pytest.raises(JobError, match=r"There is no job of .*y\.npy: .* does not exist"):
        status(out)
    with opened(out) as job:
        computed(job, [0, 4], quarantined=[Bad(3, "ValueError")])
        found = status(str(out))
        assert (found.rows, found.done, found.to_do, found.quarantined) == (20, 8, 12, 2)
        assert not found.finished
        assert "running in this process, since 20" in str(found)
        assert " left" in str(found)
        assert found.rate > 0
    assert "stopped; the same call continues with it" in str(status(out))
    with opened(out) as job:
        assert status(out).rate is None  # of this run nothing is known yet
        computed(job, [1, 2, 3])
        job.finish({})
    found = status(out)
    assert found.finished
    assert (found.done, found.to_do, found.holder) == (20, 0, None)
    assert str(found).splitlines()[:2] == [
        f"{out}: finished",
        "  done         20 of 20 rows (100.0%)",
    ]


def test_what_is_printed(out):
    holder = Holder(7, "elsewhere", 0.0)
    text = str(Status(out, 10**6, 250_000, 3, False, holder, 123.4))
    assert f"{out}: running in process 7 on elsewhere, since " in text
    assert text.splitlines()[1:] == [
        "  done         250,000 of 1,000,000 rows (25.0%)",
        "  to do        750,000",
        "  quarantined  3",
        "  rate         123 rows a second, 1 h 41 min left",
    ]
    assert "rate         43,300 rows a second" in str(Status(out, 9, 9, 0, True, None, 43300.4))
    assert " left" not in str(Status(out, 10, 5, 0, False, None, 1.0))
    assert "5 of 5 rows" in str(Status(out, 5, 5, 0, True, None, None))
    assert "0 of 0 rows" in str(Status(out, 0, 0, 0, True, None, None))


def test_the_rate_is_that_of_the_last_units_of_the_last_run():
    def records(times):
        return [Record(Unit(i, 4 * i, 4 * i + 4), [], ended=t) for i, t in enumerate(times)]

    assert inspect._rate(records([5.0, 12.0, 14.0]), since=10.0) == 2.0
    assert inspect._rate(records([5.0]), since=10.0) is None
    slow_then_fast = [10.0 * i for i in range(1, 101)] + [1000.0 + i for i in range(1, 302)]
    assert inspect._rate(records(slow_then_fast), since=0.0) == 4.0
    at_once = records([3.0] * 1000)
    assert inspect._rate(at_once, since=1.0) == 2000.0


def test_shards_that_are_at_work(out):
    with opened(out, shard="shard-0-of-3") as first:
        computed(first, [0, 3])
        with opened(out, shard="shard-1-of-3") as second:
            computed(second, [1])
            assert not verify(out).withdrawn
            text = str(status(out))
            assert "running in 2 shards" in text
        assert "running in 1 shard\n" in str(status(out))
    assert "stopped" in str(status(out))
    opened(out).close()
    assert not list(out.with_name("y.npy.job").glob("lock-*"))


def test_of_many_units_some_are_shown(out):
    damaged = [Damaged(Unit(i, 4 * i, 4 * i + 4), "gone") for i in range(30)]
    lines = str(Verified(out, 400, damaged)).splitlines()
    assert lines[0] == f"{out}: of 400 rows, 120 are not what was written:"
    assert lines[20] == "  rows 76 to 80: gone"
    assert lines[21] == "  and 10 more such units"
