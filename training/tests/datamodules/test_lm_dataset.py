"""LMDataset against its definition, on small arrays."""

import math
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from src.datamodules.datasets.lm_dataset import LMDataset


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("seq_len", [1, 2, 5, 16])
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 6, 16, 17, 33, 40])
def test_windows(tokens, seq_len, drop_last):
    ids = np.random.default_rng(0).integers(0, 1 << 16, tokens).astype(np.uint16)
    dataset = LMDataset(ids, seq_len, drop_last)
    kept = (max(tokens - 1, 0) // seq_len) * seq_len + 1 if drop_last else tokens
    assert len(dataset) == max(math.ceil((kept - 1) / seq_len), 0)
    inputs, targets = [], []
    for index in range(len(dataset)):
        x, y = dataset[index]
        assert x.dtype == y.dtype == torch.int64
        assert x.tolist() == ids[index * seq_len : min(index * seq_len + seq_len, kept - 1)].tolist()
        assert x.data_ptr() != y.data_ptr()
        assert torch.equal(x[1:], y[:-1])
        inputs += x.tolist()
        targets += y.tolist()
    assert inputs == ids[: max(kept - 1, 0)].tolist() and targets == ids[1:kept].tolist()  # each token once


def test_batch_equals_items():
    dataset = LMDataset(np.arange(50, dtype=np.int32), 8, drop_last=False)
    for indices in ([3, 0, 5], [6, 1], [2], [-1, 0]):  # 6 is the shorter last one
        for (x, y), index in zip(dataset.__getitems__(indices), indices):
            assert torch.equal(x, dataset[index][0]) and torch.equal(y, dataset[index][1])


@pytest.mark.parametrize("workers", [0, 1])
def test_loader(workers):
    loader = DataLoader(LMDataset(np.arange(65, dtype=np.uint16), 8), batch_size=3, num_workers=workers)
    batches = list(loader)
    assert [x.shape for x, _ in batches] == [(3, 8), (3, 8), (2, 8)]
    assert all(x.is_contiguous() and y.is_contiguous() for x, y in batches)
    assert torch.equal(torch.cat([x for x, _ in batches]).flatten(), torch.arange(64))
    assert torch.equal(torch.cat([y for _, y in batches]).flatten(), torch.arange(1, 65))


def test_memory_map_is_not_copied_to_workers(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(100_001, dtype=np.uint16) % 500)
    dataset = LMDataset(np.load(tmp_path / "ids.npy", mmap_mode="r"), 100)
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 2000
    copy = pickle.loads(pickled)
    assert isinstance(copy.tokens, np.memmap) and len(copy) == 1000
    assert torch.equal(copy[999][1], dataset[999][1])


@pytest.mark.parametrize("tokens", [np.arange(9), np.load])
def test_other_arrays_are_pickled_whole(tmp_path, tokens):
    if callable(tokens):  # a part of a memory map, whose offset numpy does not tell
        np.save(tmp_path / "ids.npy", np.arange(20))
        tokens = np.load(tmp_path / "ids.npy", mmap_mode="r")[5:14]
    copy = pickle.loads(pickle.dumps(LMDataset(tokens, 2)))
    assert [x.tolist() for x, _ in copy] == [tokens[i : i + 2].tolist() for i in range(0, 8, 2)]


def test_errors():
    with pytest.raises(ValueError, match="seq_len must be at least 1, found 0"):
        LMDataset(np.arange(9), 0)
    with pytest.raises(ValueError, match=r"one dimension, found shape \(3, 3\)"):
        LMDataset(np.zeros((3, 3), int), 2)
    with pytest.raises(IndexError, match="number of sequences, 4, found 4"):
        LMDataset(np.arange(9), 2)[4]
