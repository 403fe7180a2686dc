"""Sets of images with one label each, and the order in which training takes them.

A split is a folder which holds either a folder of images per class, which torchvision reads, or two arrays, which need
neither torchvision nor decoding:

    val/tench/ILSVRC2012_val_00000293.JPEG              # any format that torchvision's ImageFolder reads
    val/images.npy                                      # (n, 3, image_size, image_size), floating, already normalised
    val/targets.npy                                     # (n,), integers
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from src.datamodules.fault_tolerant_sampler import FaultTolerantDistributedSampler
from src.utils.distributed import get_rank
from src.utils.optional import optional_module

Transform = Callable[[Any], Any]

_IMAGES, _TARGETS = "images.npy", "targets.npy"


class DictDataset(Dataset):
    """Samples that were read before, by their index.

    Arguments:
        dataset_dict: a sample for each index that this process asks for.
        length: samples of the whole data set, of which this process may have a part; len(dataset_dict) if None.
    """

    def __init__(self, dataset_dict: Mapping[int, Any], length: int | None = None) -> None:
        self.dataset_dict = dataset_dict
        self.length = len(dataset_dict) if length is None else length

    def __getitem__(self, index: int) -> Any:
        return self.dataset_dict[index]

    def __len__(self) -> int:
        return self.length


def read_all(dataset: Dataset, indices: Sequence[int], num_threads: int) -> DictDataset:
    """The samples of these indices, in memory."""
    with ThreadPoolExecutor(num_threads) as pool:  # and no processes: their tensors would each keep a file open
        samples = tqdm(pool.map(dataset.__getitem__, indices), "Reading images", len(indices), disable=get_rank() > 0)
        return DictDataset(dict(zip(indices, samples)), length=len(dataset))


class ArrayDataset(Dataset):
    """The images and labels of images.npy and targets.npy, which stay on disk until they are used.

    Arguments:
        folder: where the two files are.
        image_size: height and width that the images must have.
        dtype: of the images that are returned.
        transform: called with an image (3, image_size, image_size), float32, gives another one.

    Raises ValueError for arrays of another shape or kind.
    """

    def __init__(
        self,
        folder: Path,
        image_size: int,
        dtype: torch.dtype = torch.float32,
        transform: Transform | None = None,
    ) -> None:
        self.targets = _load_array(folder / _TARGETS, np.integer, (None,))
        self.images = _load_array(folder / _IMAGES, np.floating, (len(self.targets), 3, image_size, image_size))
        self.dtype, self.transform = dtype, transform

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.images[index].astype(np.float32))
        image = image if self.transform is None else self.transform(image)
        return image.to(self.dtype), int(self.targets[index])

    def __len__(self) -> int:
        return len(self.targets)


def has_arrays(folder: Path) -> bool:
    """Whether a split is in arrays."""
    return (folder / _IMAGES).exists()


def classes_of(folder: Path) -> list[Any]:
    """The classes of a split, sorted: the labels of its arrays, or the names of its folders."""
    if has_arrays(folder):
        return np.unique(_load_array(folder / _TARGETS, np.integer, (None,))).tolist()
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def image_folder(folder: Path, labels: Mapping[str, int], transform: Transform) -> Dataset:
    """torchvision's ImageFolder, with these labels of the classes, so that splits with other classes have the same.

    Raises FileNotFoundError for a class without images. A file that cannot be read raises ValueError when it is used.
    """
    datasets = optional_module("torchvision.datasets")
    label_of = [labels[name] for name in classes_of(folder)]
    try:
        return datasets.ImageFolder(folder, transform, target_transform=label_of.__getitem__, loader=_load_image)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{folder} must have a folder of images per class: {error}") from None


def _load_image(path):
    try:
        return optional_module("torchvision.datasets.folder").pil_loader(path)
    except (OSError, SyntaxError, ValueError) as error:  # the errors of Pillow, whose words often lack the file's name
        raise ValueError(f"{path} cannot be read as an image: {error}") from error


def _load_array(path, kind, shape):
    """The array of a file, mapped; it must be of a kind of numbers, and of this shape, where None fits any size."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing beside the other array")
    array = np.load(path, mmap_mode="r")
    fits = array.ndim == len(shape) and all(want in (None, found) for want, found in zip(shape, array.shape))
    if not fits or not np.issubdtype(array.dtype, kind):
        found = f"{array.dtype} {array.shape}"
        raise ValueError(f"{path} must be {kind.__name__} numbers of shape {shape}, found {found}")
    return array


# ---------------------------------------------------------------------------------------------------------------------
# Order and random augmentation


@contextmanager
def random_state(seed: int) -> Iterator[None]:
    """Within the block, Python's, numpy's and torch's random numbers on the CPU begin at `seed`, in [0, 2**32)."""
    with isolate_rng(include_cuda=False):
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)  # and not torch.manual_seed, which also sets the GPU's
        yield


class SeededDataset(Dataset):
    """Samples of which a seed determines the augmentation: dataset[index, seed] is (image, target, seed).

    The seed of dataset[index] is the index, so that Trainer(overfit_batches=…) sees the same images again and again.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, key: tuple[int, int] | int) -> tuple[Any, int, int]:
        index, seed = key if isinstance(key, tuple) else (key, key)
        with random_state(seed):
            return *self.dataset[index], seed

    def __len__(self) -> int:
        return len(self.dataset)


class AugmentationSampler(FaultTolerantDistributedSampler):
    """A rank's part of an epoch: pairs (index, seed), of which the seed is for the augmentation of that sample.

    Both depend on the place in the epoch, so that a resumed run has the batches of an uninterrupted one, with any
    number of ranks and workers.

    Arguments:
        num_repeats: if positive, an image has this many consecutive places, so that different ranks augment it
            differently; an epoch still has len(dataset) places (Hoffer et al., arXiv:1901.09335).
        dataset, num_replicas, rank, shuffle, seed, drop_last: as in `torch.utils.data.DistributedSampler`.
    """

    def __init__(self, dataset: Dataset, *, shuffle: bool = True, num_repeats: int = 0, **kwargs: Any) -> None:
        super().__init__(dataset, shuffle=False, **kwargs)  # it gives the rank's places, in order
        self.shuffled, self.num_repeats = shuffle, num_repeats

    def __iter__(self) -> Iterator[tuple[int, int]]:
        size = len(self.dataset)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(size, generator=generator) if self.shuffled else torch.arange(size)
        order = order.repeat_interleave(max(self.num_repeats, 1))[:size]
        seeds = torch.randint(2**32, (size,), generator=generator)
        for place in super().__iter__():
            yield order[place].item(), seeds[place].item()
