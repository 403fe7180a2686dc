"""A small set of images that is made on the spot: noisy gratings, whose class is their direction.

write_gratings("data/gratings", num_train=512, num_val=128, num_classes=4, image_size=32, file_format="png")
"""

from pathlib import Path
from typing import Any

import filelock
import numpy as np

from src.datamodules.imagenet import IMAGENET_MEAN, IMAGENET_STD, ImagenetDataModule, Transform, to_normalized_tensor
from src.utils.optional import optional_module

_FORMATS = ("npy", "png")


class GratingsDataModule(ImagenetDataModule):
    """Images of `write_gratings`, which are written below data_dir at first use.

    Without mirroring and cropping, since a mirror image may be of another class.

    Arguments:
        data_dir: gets a folder for each choice of the next four arguments and of the image size.
        num_classes, num_train, num_val, file_format: as in `write_gratings`.
        image_size, kwargs: as in `ImagenetDataModule`.
    """

    name = "gratings"

    def __init__(
        self,
        data_dir: str | Path,
        num_classes: int = 4,
        num_train: int = 512,
        num_val: int = 128,
        file_format: str = "npy",
        image_size: int = 32,
        **kwargs: Any,
    ) -> None:
        if file_format not in _FORMATS:
            raise ValueError(f"datamodule.file_format must be one of {', '.join(_FORMATS)}, found {file_format!r}")
        self.sizes = dict(num_train=num_train, num_val=num_val, num_classes=num_classes, image_size=image_size)
        for name, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"datamodule.{name} must be at least 1, found {size}")
        self.file_format = file_format
        folder = Path(data_dir, "-".join(f"{name}-{size}" for name, size in self.sizes.items()) + f"-{file_format}")
        super().__init__(folder, image_size=image_size, num_classes=num_classes, **kwargs)

    def prepare_data(self) -> None:
        """Write the images, unless they are there; of several processes, one does it."""
        self.data_dir.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(self.data_dir.with_name(f".{self.data_dir.name}.lock")):
            if not self.data_dir.exists():
                write_gratings(self.data_dir, **self.sizes, file_format=self.file_format)
        super().prepare_data()

    def _default_val(self) -> Transform:
        return to_normalized_tensor()

    _default_train = _default_val


def write_gratings(
    data_dir: str | Path,
    num_train: int = 512,
    num_val: int = 128,
    num_classes: int = 4,
    image_size: int = 32,
    file_format: str = "npy",
) -> None:
    """Write the folder data_dir, which must not be there yet, with train and val as `ImagenetDataModule` reads them.

    Arguments:
        num_train, num_val: images; as many of each class, give or take one.
        num_classes: an image of class c has waves in the direction pi * c / num_classes, give or take a quarter of the
            angle between two classes, with a random period, phase and colour, and with noise.
        image_size: height and width.
        file_format: "png" for a folder of images per class; "npy" for two arrays with the same pixels, normalised.

    The same arguments always give the same images.
    """
    data_dir = Path(data_dir)
    begun = data_dir.with_name(f"{data_dir.name}.begun")  # so that a folder of the right name is complete
    save = {"png": _save_png, "npy": _save_npy}[file_format]
    for seed, (split, number) in enumerate([("train", num_train), ("val", num_val)]):
        rng = np.random.default_rng(seed)
        targets = np.sort(np.arange(number) % num_classes)  # as the folders of classes are read
        images = np.stack([_grating(rng, np.pi * c / num_classes, np.pi / num_classes, image_size) for c in targets])
        (begun / split).mkdir(parents=True, exist_ok=True)
        save(begun / split, images, targets)
    begun.rename(data_dir)


def _grating(rng, angle, distance, size):
    """An image (size, size, 3), uint8, of waves in the direction `angle`, changed at random by up to distance / 4."""
    angle += distance * rng.uniform(-0.25, 0.25)
    y, x = np.mgrid[:size, :size] / rng.uniform(6, 12)  # in periods of 6 to 12 pixels
    wave = np.sin(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle) + rng.uniform()))
    pixels = 128 + 80 * wave[..., None] * rng.uniform(0.5, 1, size=3) + rng.normal(0, 30, (size, size, 3))
    return pixels.clip(0, 255).astype(np.uint8)


def _save_png(folder, images, targets):
    image = optional_module("PIL.Image", "pillow")
    for i, (pixels, target) in enumerate(zip(images, targets)):
        path = folder / f"direction_{target:03d}" / f"{i:05d}.png"
        path.parent.mkdir(exist_ok=True)
        image.fromarray(pixels).save(path)


def _save_npy(folder, images, targets):
    normalised = (images / 255 - IMAGENET_MEAN) / IMAGENET_STD
    np.save(folder / "images.npy", normalised.transpose(0, 3, 1, 2).astype(np.float32))
    np.save(folder / "targets.npy", targets)
