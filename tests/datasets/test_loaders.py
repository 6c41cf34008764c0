"""Rows that loaders make: PyTorch's, Grain's, Hugging Face's own, where they are installed."""

import importlib
import importlib.metadata
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import batchax as bx

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
ROWS = 22
X = np.random.default_rng(0).standard_normal((ROWS, 3)).astype(np.float32)
Y = (np.arange(ROWS) % 3).astype(np.int32)
SIZES = dict(batch_size=2, commit_rows=4)


class Rows:
    """A source for all three: rows by number."""

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return {"x": X[i], "y": Y[i]}


def of_torch(torch):
    class InOrder(torch.utils.data.IterableDataset):
        def __iter__(self):
            return (Rows()[i] for i in range(ROWS))

    class ByNumber(Rows, torch.utils.data.Dataset):
        pass

    data, loader = torch.utils.data, torch.utils.data.DataLoader
    tensors = data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    spawned = dict(num_workers=2, multiprocessing_context="spawn")
    return {
        "a dataset": (tensors, False),
        "a part of one": (data.Subset(ByNumber(), range(ROWS)), False),
        "rows in order": (InOrder(), False),
        "a loader": (loader(ByNumber(), batch_size=5), True),
        "a loader of rows": (loader(ByNumber(), batch_size=None), False),
        "a loader of rows in order": (loader(InOrder(), batch_size=5), True),
        "a loader with workers": (loader(tensors, batch_size=5, **spawned), True),
    }


def of_grain(grain):
    source = grain.MapDataset.source(Rows())
    loader = dict(data_source=Rows(), sampler=grain.samplers.SequentialSampler(ROWS))
    batch = [grain.transforms.Batch(5)]
    return {
        "a dataset": (source.map(lambda row: {"x": row["x"], "y": row["y"]}), False),
        "a dataset of batches": (source.batch(5), True),
        "rows in order": (source.to_iter_dataset(), False),
        "batches in order": (source.to_iter_dataset().batch(5), True),
        "an iterator": (iter(source.to_iter_dataset()), False),
        "a loader": (grain.DataLoader(**loader), False),
        "a loader of batches": (grain.DataLoader(**loader, operations=batch), True),
    }


def of_datasets(datasets):
    rows = datasets.Dataset.from_dict({"x": list(X), "y": Y})
    formats = {name: rows.with_format(name) for name in ("numpy", "torch", "jax")}
    return {
        "a dataset": (rows, False),
        **{f"a dataset for {name}": (x, False) for name, x in formats.items()},
        "a part of one": (rows.select(range(ROWS)), False),
        "rows in order": (rows.to_iterable_dataset(), False),
        "rows in order, for numpy": (rows.to_iterable_dataset().with_format("numpy"), False),
        "batches": (rows.iter(5), True),
        "batches of arrays": (formats["numpy"].iter(5), True),
    }


LIBRARIES = {"torch": of_torch, "grain": of_grain, "datasets": of_datasets}


def fun(row):
    x, y = (row["x"], row["y"]) if isinstance(row, dict) else row
    return {"dot": x @ x, "y": y + 1}


class LeftError(Exception):
    """Raised in the middle of a map."""


def leave(done, total):
    if done >= 8:
        raise LeftError


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_loaders_make(library, monkeypatch):
    """In memory, from a row on, to a disk and resumed: as the map of the arrays."""
    # Behind all else: what batchax is tested with comes first.
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / ".cache" / "loaders")])
    try:
        importlib.metadata.version(library)  # that it can be imported says little: a folder can
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{library} is not installed: make loaders")
    module = importlib.import_module(library)
    whole = bx.map(fun, {"x": X, "y": Y}, out="whole.zarr", progress=False, **SIZES)
    expected = {p.name: p.read_bytes() for p in Path("whole.zarr/dot").iterdir()}
    assert whole.rows == ROWS
    for name in LIBRARIES[library](module):
        make = lambda name=name: LIBRARIES[library](module)[name]
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*copy", DeprecationWarning)  # NumPy's, of tensors
            for start in (0, 5):
                stream, batched = make()
                batches = list(
                    bx.map_batches(fun, stream, batch_size=4, start=start, batched=batched)
                )
                got = jax.tree.map(lambda *x: np.concatenate(x), *batches)
                np.testing.assert_allclose(got["dot"], (X * X).sum(1)[start:], 1e-5, err_msg=name)
                np.testing.assert_array_equal(got["y"], Y[start:] + 1, err_msg=name)
            out = f"{name}.zarr"
            how = dict(out=out, batched=batched, **SIZES)
            with pytest.raises(LeftError):
                bx.map(fun, make()[0], progress=leave, **how)
            report = bx.map(fun, make()[0], progress=False, **how)
            assert report.rows == ROWS, name
            assert report.reused >= 8, name
            assert {p.name: p.read_bytes() for p in Path(out, "dot").iterdir()} == expected, name
