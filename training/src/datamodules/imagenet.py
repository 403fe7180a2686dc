"""ImageNet, or any other images with one label each, for training and validation.

    datamodule = ImagenetDataModule("data/imagenet", batch_size=256, num_workers=16)     # with train/ and val/ in it
    datamodule.prepare_data()
    datamodule.setup()
    images, targets = next(iter(datamodule.train_dataloader()))                          # (256, 3, 224, 224), (256,)

`src.datamodules.image_datasets` says what the folders hold: a folder of images per class, or arrays.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, default_collate

from src.datamodules.corpus import local_path
from src.datamodules.image_datasets import (
    ArrayDataset,
    AugmentationSampler,
    DictDataset,
    SeededDataset,
    Transform,
    classes_of,
    has_arrays,
    image_folder,
    random_state,
    read_all,
)
from src.datamodules.resumable import ResumableDataModule
from src.datamodules.resumable_loader import ResumableLoader, leave_signals_to_the_trainer
from src.utils.optional import optional_module

__all__ = ["DictDataset", "Imagenet21kPDataModule", "ImagenetDataModule", "imagenet_normalization"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)  # red, green, blue, of pixels in [0, 1]
IMAGENET_STD = (0.229, 0.224, 0.225)

_DTYPES = ("float32", "float16", "bfloat16")
_RESIZED = 32  # pixels by which an image is larger than the centre that validation takes

Mix = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def imagenet_normalization() -> Transform:
    """torchvision's Normalize with the mean and standard deviation of ImageNet. Raises ImportError without it."""
    return _v2().Normalize(IMAGENET_MEAN, IMAGENET_STD)


def to_normalized_tensor() -> Transform:
    """From a PIL image to a normalised tensor, float32."""
    v2 = _v2()
    return v2.Compose([v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), imagenet_normalization()])


class ImagenetDataModule(ResumableDataModule):
    """Images for classification: batches (images, targets), (batch, 3, image_size, image_size) and (batch,) int64.

    Arguments:
        data_dir: a folder with the folders train and val; `src.datamodules.image_datasets` says what they hold.
        image_size: height and width of what the model gets.
        train_transforms, val_transforms, test_transforms: called with a PIL image, or with a tensor where the images
            are arrays, give a tensor. If None: in training a random part of the image, mirrored or not; in validation
            its centre, of the image resized to image_size + 32; both normalised. Arrays are left as they are. Tests
            do as validation does.
        img_dtype: "float32", "float16" or "bfloat16": what images are cast to in the end.
        cache_val_dataset: keep the rank's validation images in memory after reading them once.
        mixup: a function (images, targets) -> (images, targets) for training batches, such as `TimmMixup`.
        num_aug_repeats: if positive, see `AugmentationSampler`.
        num_workers: processes of each loader; 0 to read in the process that trains.
        batch_size, batch_size_eval: of one device, in training, and in validation and tests; by default the same.
        shuffle: take the training images in another order in each epoch.
        pin_memory: put batches into pinned memory, if there is a GPU.
        drop_last: leave out the last training batch of an epoch if it is smaller. Validation never does so.
        num_classes: of the model, 1000 if None; data_dir may have fewer.
        seed: of the order and the augmentation of the training images; by default as in `ResumableDataModule`.

    Tests read val, too: the labels of ImageNet's test images are not public. On several ranks, each image of val counts
    once: where their number cannot be divided by that of the ranks, images with the label -100 are added.
    Augmentation depends on the seed and the place in the epoch, and mixup on what is in the batch, but neither on the
    workers: a run that goes on from a checkpoint gets the batches that it would have got.
    Raises ValueError for arguments out of range.
    """

    name = "imagenet"
    same_data = "data_dir"
    _default_num_classes = 1000

    def __init__(
        self,
        data_dir: str | Path,
        image_size: int = 224,
        train_transforms: Transform | None = None,
        val_transforms: Transform | None = None,
        test_transforms: Transform | None = None,
        img_dtype: str = "float32",
        cache_val_dataset: bool = False,
        mixup: Mix | None = None,
        num_aug_repeats: int = 0,
        num_workers: int = 0,
        batch_size: int = 32,
        batch_size_eval: int | None = None,
        shuffle: bool = True,
        pin_memory: bool = True,
        drop_last: bool = False,
        num_classes: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        self.data_dir, self.image_size = local_path(data_dir), image_size
        self.train_transforms, self.val_transforms = train_transforms, val_transforms
        self.test_transforms = test_transforms or val_transforms
        self.img_dtype, self.cache_val_dataset, self.mixup = img_dtype, cache_val_dataset, mixup
        self.num_aug_repeats, self.num_workers, self.shuffle = num_aug_repeats, num_workers, shuffle
        self.batch_size, self.batch_size_eval = batch_size, batch_size if batch_size_eval is None else batch_size_eval
        self.pin_memory, self.drop_last = pin_memory, drop_last
        self._num_classes = self._default_num_classes if num_classes is None else num_classes
        self._check_arguments()
        self.dims = (3, image_size, image_size)
        self.dataset_train: Dataset | None = None
        self.dataset_val: Dataset | None = None
        self.dataset_test: Dataset | None = None

    def _check_arguments(self):
        least = dict(image_size=1, batch_size=1, batch_size_eval=1, num_classes=1, num_workers=0, num_aug_repeats=0)
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"datamodule.{name} must be at least {bound}, found {getattr(self, name)}")
        if self.img_dtype not in _DTYPES:
            raise ValueError(f"datamodule.img_dtype must be one of {', '.join(_DTYPES)}, found {self.img_dtype!r}")
        if getattr(self.mixup, "mode", None) == "pair" and (self.batch_size % 2 or not self.drop_last):
            raise ValueError(
                'datamodule.mixup in mode "pair" needs even batches: an even batch_size and drop_last=True, '
                f"found {self.batch_size} and {self.drop_last}"
            )

    @property
    def num_classes(self) -> int:
        """How many classes the model distinguishes."""
        return self._num_classes

    def prepare_data(self) -> None:
        """Check that data_dir has train and val. Raises FileNotFoundError."""
        for split in ("train", "val"):
            self._verify_splits(self.data_dir, split)

    def _verify_splits(self, data_dir: Path, split: str) -> None:
        if not (data_dir / split).is_dir():
            raise FileNotFoundError(f"datamodule.data_dir must have a folder {split}, found none in {data_dir}")

    def setup(self, stage: str | None = None) -> None:
        """Open the sets of images that `stage` needs: "fit", "validate", "test", or None for all.

        Raises FileNotFoundError for a class without images, and ValueError for an unknown one.
        """
        labels = self._labels()
        if self.dataset_train is None and stage in (None, "fit"):
            self.dataset_train = self._dataset("train", labels, self.train_transforms, self.train_transform)
        if self.dataset_val is None and stage in (None, "fit", "validate"):
            self.dataset_val = self._dataset("val", labels, self.val_transforms, self.val_transform)
        if self.dataset_test is None and stage in (None, "test"):
            self.dataset_test = self._dataset("val", labels, self.test_transforms, self.test_transform)

    def _labels(self):
        """The label of each class: its place among the classes of train, or itself in arrays."""
        train, val = (classes_of(self.data_dir / split) for split in ("train", "val"))
        labels = {c: c for c in train} if has_arrays(self.data_dir / "train") else {c: i for i, c in enumerate(train)}
        outside = [c for c, label in labels.items() if not 0 <= label < self.num_classes]
        if outside:
            found = f"{self.data_dir / 'train'} has {_some(outside)}, too"
            raise ValueError(f"datamodule.num_classes is {self.num_classes}, but {found}")
        unknown = [c for c in val if c not in labels]
        if unknown:
            raise ValueError(f"{self.data_dir / 'val'} has classes that train does not have: {_some(unknown)}")
        return labels

    def _dataset(self, split, labels, given, transform):
        """The images of a split: arrays with the transform that is given, if any; others with that or the default."""
        folder = self.data_dir / split
        if has_arrays(folder):
            return ArrayDataset(folder, self.image_size, getattr(torch, self.img_dtype), given)
        return image_folder(folder, labels, transform())

    def train_transform(self) -> Transform:
        """From a PIL image to a tensor, in training."""
        return self._in_dtype(self.train_transforms or self._default_train())

    def val_transform(self) -> Transform:
        """From a PIL image to a tensor, in validation."""
        return self._in_dtype(self.val_transforms or self._default_val())

    def test_transform(self) -> Transform:
        """From a PIL image to a tensor, in tests."""
        return self._in_dtype(self.test_transforms or self._default_val())

    def _default_train(self):
        v2 = _v2()
        crop = [v2.RandomResizedCrop(self.image_size), v2.RandomHorizontalFlip()]
        return v2.Compose([*crop, to_normalized_tensor()])

    def _default_val(self):
        v2 = _v2()
        crop = [v2.Resize(self.image_size + _RESIZED), v2.CenterCrop(self.image_size)]
        return v2.Compose([*crop, to_normalized_tensor()])

    def _in_dtype(self, transform):
        v2 = _v2()
        return v2.Compose([transform, v2.ToDtype(getattr(torch, self.img_dtype))])

    def train_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """The rank's training batches, from where training is. Raises ValueError if there are none."""
        options = dict(shuffle=self.shuffle, seed=self.seed, num_repeats=self.num_aug_repeats)
        sampler = AugmentationSampler(self.dataset_train, **options, **self.ranks())
        dataset = SeededDataset(self.dataset_train)
        return self.begin(self._data_loader(dataset, self.batch_size, mixup=self.mixup, sampler=sampler))

    def val_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """The rank's validation batches."""
        if self.cache_val_dataset and not isinstance(self.dataset_val, DictDataset):
            dataset = self.for_all_ranks(self.dataset_val)
            self.dataset_val = read_all(dataset, list(self._in_order(dataset)), max(self.num_workers, 1))
        return self._eval_loader(self.dataset_val)

    def test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """The rank's batches of the images of val, as a test takes them."""
        return self._eval_loader(self.dataset_test)

    def _eval_loader(self, dataset):
        dataset = self.for_all_ranks(dataset)
        return self._data_loader(dataset, self.batch_size_eval, sampler=self._in_order(dataset))

    def _in_order(self, dataset):
        return DistributedSampler(dataset, shuffle=False, **self.ranks())

    def _data_loader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        mixup: Mix | None = None,
        sampler: Sampler | None = None,
    ) -> DataLoader:
        training = isinstance(dataset, SeededDataset)
        num_workers = 0 if isinstance(dataset, DictDataset) else self.num_workers  # it is in memory already
        return (ResumableLoader if training else DataLoader)(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            collate_fn=partial(_collate_seeded, mixup) if training else default_collate,
            pin_memory=self.pin_memory and torch.cuda.is_available(),
            drop_last=self.drop_last and training,
            worker_init_fn=leave_signals_to_the_trainer,
            generator=torch.Generator(),  # without one, each iteration would take a number from the global generator
        )


class Imagenet21kPDataModule(ImagenetDataModule):
    """ImageNet-21K-P (Ridnik et al., arXiv:2104.10972): 10450 classes, else as `ImagenetDataModule`."""

    name = "imagenet21kP"
    _default_num_classes = 10450


def _some(classes):
    return ", ".join(map(str, classes[:5])) + (f" and {len(classes) - 5} more" if len(classes) > 5 else "")


def _collate_seeded(mixup, samples):
    images, targets, seeds = default_collate(samples)
    if mixup is None:
        return images, targets
    with random_state(seeds.sum().item() % 2**32):
        return mixup(images, targets)


def _v2():
    return optional_module("torchvision.transforms.v2")
