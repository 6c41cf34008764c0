"""Rows that are quarantined: what finding them costs, when they are tried again, and what stops."""

import collections
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.map_calls import values

ROWS = 40
OUTS = ["y.zarr", "y.npy", "y.parquet"]
I = np.arange(ROWS, dtype=np.int32)


class Service:
    """What a callback asks: it fails for some rows, or for all while it is away."""

    def __init__(self, bad=(), error=ValueError):
        self.bad, self.error, self.calls = set(bad), error, collections.Counter()

    def __call__(self, i):
        self.calls[int(i)] += 1
        if int(i) in self.bad:
            raise self.error(f"row {int(i)}")
        return i * 2

    def fun(self, i):
        return jax.pure_callback(self, i, i, vmap_method="sequential")


def quiet(service, out="y.npy", **options):
    how = dict(batch_size=8, commit_rows=8, on_error="quarantine", version="1", progress=False)
    return bx.map(service.fun, I, out=out, **{**how, **options})


@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize("shards", [1, 2])
def test_quarantined_rows_are_computed_again_where_it_is_asked_for(out, shards):
    service = Service(bad={3, 4, 17, 39})
    assert quiet(service, out).quarantined == 4
    service.bad, service.calls = {17}, collections.Counter()
    assert quiet(service, out).quarantined == 4  # not asked for
    assert not service.calls
    for k in range(shards):
        shard = {} if shards == 1 else {"executor": f"shard:{k}/{shards}"}
        report = quiet(service, out, retry_quarantined=True, **shard)
    assert [b.row for b in report.bad] == [17]
    assert set(range(8, 16)).isdisjoint(service.calls)  # a unit without such rows
    assert quiet(service, out).quarantined == 1
    service.bad = set()
    assert quiet(service, out, retry_quarantined=True).quarantined == 0
    np.testing.assert_array_equal(values(out), I * 2)
    assert Path(f"{out}.job/quarantine.jsonl").read_text() == ""
    assert np.load(f"{out}.job/ok.npy").all()


def test_streams_try_quarantined_rows_again():
    service = Service(bad={3, 30})
    how = dict(out="y.zarr", version="1", batch_size=8, commit_rows=8, on_error="quarantine")
    call = lambda **more: bx.map(service.fun, iter(I), progress=False, **how, **more)
    assert call().quarantined == 2
    service.bad = set()
    report = call(retry_quarantined=True)
    assert (report.quarantined, report.reused) == (0, ROWS - 16)
    np.testing.assert_array_equal(values("y.zarr"), I * 2)


@pytest.mark.parametrize("batch", [dict(batch_size=8), dict(batch_size=40, commit_rows=40)])
def test_an_outage_stops_the_job_and_quarantines_none_of_its_rows(batch):
    service = Service(bad=set(range(5, ROWS)), error=MemoryError)
    with pytest.raises(bx.RowError, match="21 rows of i fail in succession with MemoryError"):
        quiet(service, **batch)
    service.bad = set()
    report = quiet(service, **batch)
    assert report.quarantined == 0
    np.testing.assert_array_equal(np.load("y.npy"), I * 2)


def test_rows_that_are_bad_in_succession_may_be_many():
    service = Service(bad=set(range(5, 35)))
    with pytest.raises(bx.RowError, match="pass max_consecutive_errors"):
        quiet(service)
    with pytest.raises(bx.RowError, match="4 rows of i fail in succession"):
        quiet(service, out="z.npy", max_consecutive_errors=3)
    assert quiet(service, max_consecutive_errors=None).quarantined == 30
    for wrong in (-1, 1.5, "x"):
        error = bx.OptionError if wrong == -1 else bx.ArgumentTypeError
        with pytest.raises(error, match="max_consecutive_errors must be"):
            quiet(service, max_consecutive_errors=wrong)


def test_an_error_that_is_gone_quarantines_nothing():
    service = Service(bad={3})

    def once(i):
        y = service(i) if int(i) != 3 or service.calls[3] else None
        service.calls[3] += int(i) == 3
        if y is None:
            raise ConnectionError("away")
        return y

    service.bad = set()
    fun = lambda i: jax.pure_callback(once, i, i, vmap_method="sequential")
    report = bx.map(fun, I, batch_size=8, on_error="quarantine", progress=False)
    assert report.quarantined == 0
    np.testing.assert_array_equal(report.outputs, I * 2)


@pytest.mark.parametrize("method", ["sequential", "broadcast_all"])
def test_finding_a_row_that_fails_computes_few_others_again(method):
    rows, calls, lanes = 4000, collections.Counter(), 0

    def on_host(i):
        nonlocal lanes
        lanes += np.size(i)
        calls.update(np.ravel(i).tolist())
        if (np.ravel(i) == 1234).any():
            raise ValueError("bad")
        return i

    fun = lambda i: jax.pure_callback(on_host, i, i, vmap_method=method)
    i = np.arange(rows, dtype=np.int32)
    report = bx.map(fun, i, batch_size=512, on_error="quarantine", progress=False)
    assert [b.row for b in report.bad] == [1234]
    assert lanes < rows + 96 + 512 * 1.2  # 96: that fill the last batch
    assert max(n for row, n in calls.items() if row not in (1234, rows - 1)) <= 5
    np.testing.assert_array_equal(report.outputs, np.where(i == 1234, 0, i))


def test_parts_of_a_batch_that_fails_add_up():
    """To what the rows that do not fail come to, with reductions and rows of any length."""
    service, x = Service(bad={3, 17}), np.linspace(-1, 1, ROWS)
    x[20] = np.nan

    def fun(i, x, row):
        return service.fun(i) * jnp.sin(x), {"total": x, "most": i}, row * 2

    lengths = np.arange(ROWS) % 4
    rows = bx.Ragged.from_rows([np.full(n, float(k)) for k, n in enumerate(lengths)])
    out_axes = (0, {"total": bx.Reduce("sum"), "most": bx.Reduce("max")}, 0)
    report = bx.map(
        fun,
        I,
        x,
        rows,
        in_axes=0,
        out_axes=out_axes,
        batch_size=32,
        on_error="quarantine",
        on_nonfinite="quarantine",
        progress=False,
    )
    assert [b.row for b in report.bad] == [3, 17, 20]
    good = ~np.isin(I, [3, 17, 20])
    values, _, doubled = report.outputs
    sums = report.reduced[1]
    np.testing.assert_allclose(values[good], (I * 2 * np.sin(x))[good], rtol=1e-6)
    assert np.isnan(values[~good]).all()
    np.testing.assert_allclose(sums["total"], x[good].sum(), rtol=1e-5)
    assert sums["most"] == I[good].max()
    assert np.asarray(doubled.lengths).tolist() == np.where(good, lengths, 0).tolist()
    np.testing.assert_array_equal(doubled.data, np.repeat(I, doubled.lengths) * 2.0)


def test_what_a_finished_job_is_asked_for_holds():
    x = np.ones(ROWS)
    x[7] = np.nan
    how = dict(out="y.npy", batch_size=8, progress=False)
    assert bx.map(jnp.sin, x, on_nonfinite="quarantine", **how).quarantined == 1
    with pytest.raises(bx.RowError, match="1 rows have no result, and max_errors is 0"):
        bx.map(jnp.sin, x, on_nonfinite="quarantine", max_errors=0, **how)
    with pytest.raises(bx.RowError, match=r"(?s)row 7 of x.*retry_quarantined=True"):
        bx.map(jnp.sin, x, on_nonfinite="raise", **how)
    with pytest.raises(bx.RowError, match="row 7 of x"):
        bx.map(jnp.sin, x, on_nonfinite="raise", retry_quarantined=True, **how)
    assert bx.map(jnp.sin, x, on_nonfinite="quarantine", max_errors=1, **how).quarantined == 1
