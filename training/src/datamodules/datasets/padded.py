"""Data that several ranks can divide evenly, of which nothing counts twice."""

from typing import Any

from torch.utils.data import Dataset


class PaddedDataset(Dataset):
    """A data set of pairs (x, y) that so many ranks can divide evenly. The targets y that are added are all -100.

    Losses and metrics do not count such targets, so each sample counts once, while all ranks have the same number of
    batches, which models need that are divided over the ranks.
    """

    def __init__(self, dataset: Dataset, ranks: int) -> None:
        self.dataset, self.size = dataset, -(-len(dataset) // ranks) * ranks

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index < len(self.dataset):
            return self.dataset[index]
        x, y = self.dataset[0]
        return x, y * 0 - 100  # a tensor or a number, as y is
