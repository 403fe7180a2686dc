"""ImagenetDataModule on small folders and arrays: what batches hold, in which order, and what is refused."""

import math
import pickle
import time
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import over_processes
from torch.utils.data import DistributedSampler

from src.datamodules import gratings, image_datasets, imagenet
from src.datamodules.gratings import GratingsDataModule, write_gratings
from src.datamodules.imagenet import DictDataset, Imagenet21kPDataModule, ImagenetDataModule
from src.datamodules.resumable_loader import Position
from src.metrics.accuracy import AccuracyMine
from training.tests.vision.needs import needs_timm, needs_torchvision, without_torchvision

SIZES = dict(num_train=24, num_val=10, num_classes=4, image_size=16)


def prepare_together(group, folder):
    """All processes find that nothing is there, if none waits for another."""
    calls = []

    def slow(*args, **kwargs):
        calls.append(args)
        time.sleep(0.3)
        write_gratings(*args, **kwargs)

    gratings.write_gratings = slow
    dist.barrier(group)
    GratingsDataModule(folder / "data", **SIZES).prepare_data()
    total = [None] * group.size()
    dist.all_gather_object(total, len(calls))
    assert sum(total) == 1


def test_gratings_are_written_by_one_process(tmp_path):
    over_processes(2, prepare_together, tmp_path)


def add_noise(image):
    """An augmentation that draws from each of the three sources of random numbers."""
    import random

    return image + torch.rand(()) + np.random.rand() + random.random()


@pytest.fixture(scope="module", params=["npy", pytest.param("png", marks=needs_torchvision)])
def folder(request, tmp_path_factory):
    """A folder with train and val, in each of the two formats."""
    path = tmp_path_factory.mktemp("images") / request.param
    write_gratings(path, **SIZES, file_format=request.param)
    return path


@pytest.fixture
def arrays(tmp_path):
    write_gratings(tmp_path / "arrays", **SIZES)
    return tmp_path / "arrays"


def module(folder, **options):
    """A data module that is set up. Images of folders are not cropped, so that they are those of the arrays."""
    options = dict(image_size=16, num_classes=4, batch_size=8) | options
    if not (folder / "train" / "images.npy").exists():
        for name in ("train_transforms", "val_transforms"):
            options.setdefault(name, imagenet.to_normalized_tensor())
    result = ImagenetDataModule(folder, **options)
    result.prepare_data()
    result.setup()
    return result


def images_of(loader):
    """All images of a loader, in its order."""
    return torch.cat([images for images, _ in loader])


# ---------------------------------------------------------------------------------------------------------------------
# What batches hold


def test_batches_have_the_images_and_labels_of_the_split(folder):
    split = np.load(folder / "train/images.npy") if (folder / "train/images.npy").exists() else None
    datamodule = module(folder, shuffle=False)
    batches = list(datamodule.train_dataloader())
    assert [len(images) for images, _ in batches] == [8, 8, 8]
    images, targets = (torch.cat(parts) for parts in zip(*batches))
    assert images.dtype == torch.float32 and targets.dtype == torch.int64
    assert targets.tolist() == sorted(i % 4 for i in range(24))
    if split is not None:
        assert torch.equal(images, torch.from_numpy(split))


@needs_torchvision
def test_both_formats_have_the_same_pixels(tmp_path):
    loaders = []
    for file_format in ("npy", "png"):
        write_gratings(tmp_path / file_format, **SIZES, file_format=file_format)
        loaders.append(module(tmp_path / file_format))
    for name in ("train_dataloader", "val_dataloader"):
        arrays, files = (images_of(getattr(each, name)()) for each in loaders)
        torch.testing.assert_close(files, arrays, atol=1e-6, rtol=0)


def test_validation_and_test_read_val_in_order_and_to_the_end(folder):
    datamodule = module(folder, drop_last=True, batch_size_eval=4)
    for loader in (datamodule.val_dataloader(), datamodule.test_dataloader()):
        targets = [targets.tolist() for _, targets in loader]
        assert [len(each) for each in targets] == [4, 4, 2]
        assert [label for each in targets for label in each] == sorted(i % 4 for i in range(10))


@pytest.mark.parametrize("stage, there", [("fit", "train val"), ("validate", "val"), ("test", "test")])
def test_setup_opens_what_the_stage_needs_and_once(arrays, stage, there):
    datamodule = ImagenetDataModule(arrays, image_size=16, num_classes=4)
    datamodule.setup(stage)
    names = {name for name in ("train", "val", "test") if getattr(datamodule, f"dataset_{name}") is not None}
    assert names == set(there.split())
    before = [getattr(datamodule, f"dataset_{name}") for name in names]
    datamodule.setup(stage)
    assert all(a is getattr(datamodule, f"dataset_{name}") for a, name in zip(before, names))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_images_are_cast_in_the_end(folder, dtype):
    datamodule, exact = module(folder, img_dtype=dtype), module(folder)
    for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
        images = images_of(getattr(datamodule, name)())
        assert torch.equal(images, images_of(getattr(exact, name)()).to(getattr(torch, dtype)))


@needs_torchvision
def test_default_transforms(tmp_path):
    """Validation takes the centre of the resized image; training takes parts of it, half of them mirrored."""
    from PIL import Image
    from torchvision.transforms import v2

    write_gratings(tmp_path / "png", num_train=2, num_val=2, num_classes=2, image_size=64, file_format="png")
    datamodule = ImagenetDataModule(tmp_path / "png", image_size=32)
    datamodule.setup()
    path = sorted((tmp_path / "png/val").rglob("*.png"))[0]
    resized = np.asarray(Image.open(path).resize((64, 64)))[16:48, 16:48]
    expected = (torch.from_numpy(resized / 255) - torch.tensor(imagenet.IMAGENET_MEAN)) / torch.tensor(
        imagenet.IMAGENET_STD
    )
    torch.testing.assert_close(datamodule.dataset_val[0][0], expected.permute(2, 0, 1).float())
    kinds = [type(step) for step in datamodule.train_transform().transforms[0].transforms[:2]]
    assert kinds == [v2.RandomResizedCrop, v2.RandomHorizontalFlip]
    drawn = torch.stack([datamodule.dataset_train[0][0] for _ in range(4)])
    assert drawn.shape == (4, 3, 32, 32) and len(drawn.unique(dim=0)) == 4


@needs_torchvision
def test_labels_are_those_of_train_where_val_lacks_a_class(tmp_path):
    write_gratings(tmp_path / "png", **SIZES, file_format="png")
    for path in (tmp_path / "png/val/direction_001").iterdir():
        path.unlink()
    (tmp_path / "png/val/direction_001").rmdir()
    targets = torch.cat([targets for _, targets in module(tmp_path / "png").val_dataloader()])
    assert sorted(set(targets.tolist())) == [0, 2, 3]


def test_validation_images_are_read_once_when_cached(folder, monkeypatch):
    datamodule, uncached = module(folder, cache_val_dataset=True), module(folder)
    cached = images_of(datamodule.val_dataloader())
    assert isinstance(datamodule.dataset_val, DictDataset) and len(datamodule.dataset_val) == 10
    monkeypatch.setattr(image_datasets, "_load_image", None)
    assert torch.equal(images_of(datamodule.val_dataloader()), cached)
    assert torch.equal(cached, images_of(uncached.val_dataloader()))


def test_dict_dataset():
    part = DictDataset({1: "a", 4: "b"}, length=6)
    assert (part[4], len(part), len(DictDataset({0: "a"}))) == ("b", 6, 1)
    with pytest.raises(KeyError):
        part[0]


def test_numbers_of_classes(arrays):
    assert ImagenetDataModule(arrays).num_classes == 1000
    assert Imagenet21kPDataModule(arrays).num_classes == 10450
    assert ImagenetDataModule(arrays, num_classes=4).num_classes == 4
    assert ImagenetDataModule(arrays, image_size=96).dims == (3, 96, 96)


# ---------------------------------------------------------------------------------------------------------------------
# Order and augmentation


def test_augmentation_does_not_depend_on_workers_and_leaves_random_numbers_alone(arrays):
    def epoch(**options):
        torch.manual_seed(0)
        images = images_of(module(arrays, train_transforms=add_noise, **options).train_dataloader())
        return images, torch.rand(3)

    (here, after), (by_workers, _) = epoch(), epoch(num_workers=2)
    assert torch.equal(here, by_workers)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(3))
    assert not torch.equal(here, epoch(seed=1)[0])


def test_augmentation_changes_with_the_epoch(arrays):
    loader = module(arrays, train_transforms=add_noise, shuffle=False).train_dataloader()
    first, second = images_of(loader), images_of(loader)
    shift = (second - first).flatten(1)
    assert (shift.std(dim=1) < 1e-5).all()  # the same images in the same order, since noise is a number for each
    assert shift.mean(dim=1).abs().min() > 1e-4


def pixels_sum(images, targets):
    return images + np.random.rand(), targets


def test_mixup_is_for_training_alone_and_depends_on_the_batch(arrays):
    datamodule = module(arrays, mixup=pixels_sum, shuffle=False)
    plain = module(arrays, shuffle=False)
    added = images_of(datamodule.train_dataloader()) - images_of(plain.train_dataloader())
    ratios = added.flatten(1).mean(dim=1).view(3, 8)
    assert (ratios.std(dim=1) < 1e-5).all() and len(set(ratios[:, 0].tolist())) == 3
    assert torch.equal(images_of(datamodule.val_dataloader()), images_of(plain.val_dataloader()))
    again = images_of(datamodule.train_dataloader()) - images_of(plain.train_dataloader())  # loaders of their own
    assert torch.equal(again, added)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rest_of_an_epoch_is_that_of_an_uninterrupted_one(arrays, workers):
    whole = images_of(module(arrays, train_transforms=add_noise, num_workers=workers).train_dataloader())
    loader = module(arrays, train_transforms=add_noise, num_workers=workers).train_dataloader()
    loader.start_at(Position(epoch=0, samples=16))
    assert torch.equal(images_of(loader), whole[16:])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_order_without_repeats_is_that_of_distributed_sampler(world, shuffle):
    seeds = {}
    for rank in range(world):
        options = dict(num_replicas=world, rank=rank, seed=5, shuffle=shuffle)
        sampler = image_datasets.AugmentationSampler(range(20), **options)
        expected = DistributedSampler(range(20), **options)
        sampler.set_epoch(2)
        expected.set_epoch(2)
        pairs = list(sampler)
        assert [index for index, _ in pairs] == list(expected) and len(pairs) == len(sampler) == math.ceil(20 / world)
        seeds |= {rank + world * i: seed for i, (_, seed) in enumerate(pairs)}
    one = image_datasets.AugmentationSampler(range(20), num_replicas=1, rank=0, seed=5, shuffle=shuffle)
    one.set_epoch(2)
    assert [seeds[i] for i in range(20)] == [seed for _, seed in one]
    assert len(set(seeds[i] for i in range(20))) == 20


@pytest.mark.parametrize("repeats, world", [(1, 2), (3, 1), (3, 4), (5, 2)])
def test_repeated_augmentation(repeats, world):
    """An image is taken `repeats` times in a row, with other seeds, and an epoch is as long as without."""
    samplers = [
        image_datasets.AugmentationSampler(range(24), num_replicas=world, rank=rank, num_repeats=repeats)
        for rank in range(world)
    ]
    ranks = [list(sampler) for sampler in samplers]
    order = [rank[i] for i in range(24 // world) for rank in ranks]
    permutation = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    assert [index for index, _ in order] == [index for index in permutation for _ in range(repeats)][:24]
    assert max(Counter(order).values()) == 1


@needs_timm
@pytest.mark.parametrize("world", [1, 4])
def test_repeated_augmentation_has_the_order_of_timm(world):
    from timm.data.distributed_sampler import RepeatAugSampler

    for rank in range(world):
        options = dict(num_replicas=world, rank=rank, num_repeats=3)
        ours = image_datasets.AugmentationSampler(range(300), **options)
        theirs = RepeatAugSampler(range(300), **options)
        for each in (ours, theirs):
            each.set_epoch(3)
        theirs = list(theirs)  # of 256 images: timm rounds down to a multiple
        assert [index for index, _ in ours][: len(theirs)] == theirs and len(theirs) == 256 // world


def sees_its_part(group, folder, cached):
    datamodule = module(folder, batch_size=4, batch_size_eval=4, cache_val_dataset=cached, shuffle=False)
    whole = np.load(folder / "train/images.npy"), np.load(folder / "val/images.npy")
    rank, world = group.rank(), group.size()
    for loader, images in zip((datamodule.train_dataloader(), datamodule.val_dataloader()), whole):
        part = images[rank::world]
        assert isinstance(loader.sampler, DistributedSampler)  # so that Lightning does not put another in its place
        assert torch.equal(images_of(loader)[: len(part)], torch.from_numpy(part))
        assert len(images_of(loader)) == math.ceil(len(images) / world)
    if cached:
        assert len(datamodule.dataset_val.dataset_dict) == 5 and len(datamodule.dataset_val) == 10


@pytest.mark.parametrize("cached", [False, True])
def test_each_rank_reads_its_part(arrays, cached):
    over_processes(2, sees_its_part, arrays, cached)


@pytest.mark.parametrize("cached", [False, True])
def test_each_image_of_val_counts_once_on_ranks_that_cannot_divide_them(folder, cached, monkeypatch):
    """All ranks have as many batches, and what is added to them has no part in the accuracy."""
    whole, accuracy, sizes = module(folder), AccuracyMine(), set()
    for rank in range(3):
        ranks = {"num_replicas": 3, "rank": rank}
        monkeypatch.setattr(ImagenetDataModule, "ranks", lambda _, ranks=ranks: ranks)
        datamodule = module(folder, cache_val_dataset=cached, batch_size_eval=3)
        for loader in (datamodule.val_dataloader(), datamodule.test_dataloader()):
            batches = list(loader)
            sizes.add(tuple(len(targets) for _, targets in batches))
            for _, targets in batches:
                accuracy.update(torch.eye(4)[torch.zeros_like(targets)], targets)
    assert sizes == {(3, 1)} and accuracy.totals == (2 * 3, 2 * len(whole.dataset_val))


def test_workers_stay_and_take_what_a_loader_has(arrays):
    datamodule = module(arrays, num_workers=1)
    loaders = datamodule.train_dataloader(), datamodule.val_dataloader()
    assert all(loader.persistent_workers for loader in loaders)
    for loader in loaders:  # what goes to workers that are not forks
        assert len(pickle.loads(pickle.dumps(loader.dataset))) == len(loader.dataset)
    assert not module(arrays, num_workers=1, cache_val_dataset=True).val_dataloader().num_workers


@needs_torchvision
def test_image_folders_go_to_workers_that_are_not_forks(tmp_path):
    write_gratings(tmp_path / "png", **SIZES, file_format="png")
    dataset = module(tmp_path / "png").dataset_train
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[3][0], dataset[3][0])


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


class InPairs:
    mode = "pair"


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(batch_size=0), "datamodule.batch_size must be at least 1, found 0"),
        (dict(batch_size_eval=0), "datamodule.batch_size_eval must be at least 1, found 0"),
        (dict(image_size=0), "datamodule.image_size must be at least 1, found 0"),
        (dict(num_classes=0), "datamodule.num_classes must be at least 1, found 0"),
        (dict(num_workers=-1), "datamodule.num_workers must be at least 0, found -1"),
        (dict(num_aug_repeats=-3), "datamodule.num_aug_repeats must be at least 0, found -3"),
        (dict(img_dtype="float64"), "datamodule.img_dtype must be one of float32, float16, bfloat16, found 'float64'"),
        (dict(mixup=InPairs(), batch_size=7, drop_last=True), "even batch_size and drop_last=True, found 7 and True"),
        (dict(mixup=InPairs(), batch_size=8), "even batch_size and drop_last=True, found 8 and False"),
    ],
)
def test_arguments_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        ImagenetDataModule("nowhere", **options)


@pytest.mark.parametrize("missing", ["train", "val"])
def test_a_folder_that_is_missing(tmp_path, missing):
    (tmp_path / {"train": "val", "val": "train"}[missing]).mkdir()
    with pytest.raises(FileNotFoundError, match=f"datamodule.data_dir must have a folder {missing}, found none in"):
        ImagenetDataModule(tmp_path).prepare_data()


BAD_ARRAYS = {  # file, what is done to its array, the error, its message
    "shape": ("train/images.npy", lambda a: a[:, :, :8], ValueError, r"train/images.npy must be floating numbers of"),
    "bytes": ("train/images.npy", lambda a: a.astype(np.uint8), ValueError, "must be floating numbers .* found uint8"),
    "lengths": ("val/targets.npy", lambda a: a[:-1], ValueError, r"of shape \(9, 3, 16, 16\), found .* \(10, 3"),
    "one-hot": ("train/targets.npy", lambda a: np.eye(4)[a], ValueError, "must be integer numbers"),
    "class": ("train/targets.npy", lambda a: a + 1, ValueError, r"num_classes is 4, but .*train has 4, too"),
    "negative": ("train/targets.npy", lambda a: a - 1, ValueError, r"num_classes is 4, but .*train has -1, too"),
    "unknown": (
        "train/targets.npy",
        lambda a: a * 0,
        ValueError,
        r"classes that train does not have: 1, 2, 3$",
    ),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_arrays_that_cannot_be(arrays, case):
    file, change, error, message = BAD_ARRAYS[case]
    np.save(arrays / file, change(np.load(arrays / file)))
    with pytest.raises(error, match=message):
        module(arrays)


def test_images_without_targets(arrays):
    (arrays / "val/targets.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"val/targets\.npy is missing beside"):
        module(arrays)


def test_a_batch_that_is_larger_than_the_epoch(arrays):
    with pytest.raises(ValueError, match="found 24 samples for batch_size 25 on 1 ranks"):
        module(arrays, batch_size=25, drop_last=True).train_dataloader()


@without_torchvision
def test_without_torchvision_an_image_folder_says_what_to_install(tmp_path):
    write_gratings(tmp_path / "png", **SIZES, file_format="png")
    with pytest.raises(ImportError, match=r"torchvision\S*: pip install torchvision, as fits your PyTorch"):
        ImagenetDataModule(tmp_path / "png").setup()


@needs_torchvision
class TestImageFolders:
    @pytest.fixture
    def files(self, tmp_path):
        write_gratings(tmp_path / "png", **SIZES, file_format="png")
        return tmp_path / "png"

    def test_no_classes(self, tmp_path):
        for split in ("train", "val"):
            (tmp_path / split).mkdir()
        with pytest.raises(FileNotFoundError, match="train must have a folder of images per class"):
            module(tmp_path)

    def test_a_class_without_images(self, files):
        (files / "train/direction_009").mkdir()
        with pytest.raises(FileNotFoundError, match=r"train must have .* no valid file for the classes direction_009"):
            module(files, num_classes=5)

    def test_a_class_that_only_val_has(self, files):
        (files / "val/direction_001").rename(files / "val/other")
        with pytest.raises(ValueError, match=r"val has classes that train does not have: other$"):
            module(files)

    def test_more_classes_than_the_model_has(self, files):
        with pytest.raises(ValueError, match=r"num_classes is 3, but .*train has direction_003, too"):
            module(files, num_classes=3)

    @pytest.mark.parametrize("content", [b"", b"no image", "half of it"])
    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_corrupt_image_is_named(self, files, content, workers):
        path = sorted((files / "train").rglob("*.png"))[5]
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == "half of it" else content)
        with pytest.raises(ValueError, match=f"{path.name} cannot be read as an image"):
            list(module(files, num_workers=workers).train_dataloader())


# ---------------------------------------------------------------------------------------------------------------------
# Gratings


def test_gratings_are_made_once_in_a_folder_of_their_sizes(tmp_path, monkeypatch):
    first = GratingsDataModule(tmp_path, num_train=8, num_val=4)
    first.prepare_data()
    monkeypatch.setattr(gratings, "write_gratings", None)
    GratingsDataModule(tmp_path, num_train=8, num_val=4).prepare_data()
    assert GratingsDataModule(tmp_path, num_train=9, num_val=4).data_dir != first.data_dir
    assert [path.name for path in tmp_path.glob("[!.]*")] == [first.data_dir.name]


def test_gratings_have_the_direction_of_their_class(tmp_path):
    """The largest Fourier coefficient of an image lies in the direction of its class, within half the distance."""
    write_gratings(tmp_path / "arrays", num_train=60, num_val=1, num_classes=6, image_size=64)
    images, targets = (np.load(tmp_path / f"arrays/train/{name}.npy") for name in ("images", "targets"))
    power = np.abs(np.fft.fft2(images.mean(axis=1) - images.mean(axis=(1, 2, 3))[:, None, None])) ** 2
    y, x = np.unravel_index(power.reshape(60, -1).argmax(axis=1), (64, 64))
    angles = np.arctan2((y + 32) % 64 - 32, (x + 32) % 64 - 32)
    off = (angles - np.pi * targets / 6 + np.pi / 2) % np.pi - np.pi / 2
    assert np.abs(off).max() < np.pi / 12
    assert Counter(targets.tolist()) == {c: 10 for c in range(6)}


@pytest.mark.parametrize("options", [dict(num_train=0), dict(num_classes=-1), dict(file_format="jpg")])
def test_gratings_that_cannot_be(tmp_path, options):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"datamodule.{name} must be .*found {value!r}"):
        GratingsDataModule(tmp_path, **options)
