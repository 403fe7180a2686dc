"""Data padded so that ranks can divide them evenly, without counting a sample twice."""

from typing import Any

from torch.utils.data import Dataset


class PaddedDataset(Dataset):
    """A data set of pairs (x, y), padded to a multiple of `ranks` samples, whose added targets y are all -100.

    Losses and metrics ignore such targets, so each sample counts once. All ranks have the same number of batches, as a
    model that is split over the ranks needs.
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
