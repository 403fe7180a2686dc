"""TimmMixup: mixed images and targets by the formula, and batches of odd size."""

import numpy as np
import pytest
import torch

from src.datamodules.timm_mixup import TimmMixup
from training.tests.vision.needs import needs_timm, without_timm

CLASSES, SMOOTHING = 5, 0.1


@needs_timm
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize("alphas", [(0.8, 0.0), (0.0, 1.0)], ids=["mixup", "cutmix"])
@pytest.mark.parametrize("size", [6, 7])
def test_images_and_targets_by_the_formula(mode, alphas, size):
    """Image i is the constant i, so that its mean after mixing tells the share of itself."""
    if mode == "pair" and size % 2:
        pytest.skip("not for odd batches")
    np.random.seed(size)
    mixup = TimmMixup(*alphas, mode=mode, label_smoothing=SMOOTHING, num_classes=CLASSES)
    x = torch.arange(size).float()[:, None, None, None].repeat(1, 3, 16, 16)
    labels = torch.arange(size) % CLASSES
    images, targets = mixup(x.clone(), labels)
    other = torch.arange(size).flip(0).float()
    means = images.mean(dim=(1, 2, 3)).double()
    own = torch.arange(size).double()
    differs = own != other
    share = torch.where(differs, (means - other) / torch.where(differs, own - other, 1), 1.0)
    onehot = torch.nn.functional.one_hot(labels, CLASSES).double()
    mixed = share[:, None] * onehot + (1 - share[:, None]) * onehot.flip(0)
    expected = (1 - SMOOTHING) * mixed + SMOOTHING / CLASSES
    torch.testing.assert_close(targets[differs].double(), expected[differs], atol=1e-5, rtol=0)
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(size))
    assert targets.dtype == torch.float32 and share[differs].min() < 0.99
    if size % 2:
        torch.testing.assert_close(targets[size // 2].double(), expected[size // 2], atol=1e-5, rtol=0)
    if alphas[1]:  # with CutMix a pixel is of one of the two images
        assert (torch.isclose(images, x) | torch.isclose(images, x.flip(0))).all()


@needs_timm
def test_even_batches_are_those_of_timm():
    from timm.data import Mixup

    options = dict(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=CLASSES, mode="elem")
    x, labels = torch.rand(8, 3, 12, 12), torch.randint(CLASSES, (8,))
    results = []
    for cls in (TimmMixup, Mixup):
        np.random.seed(3)
        results.append(cls(**options)(x.clone(), labels))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results))


@needs_timm
def test_it_can_be_switched_off():
    mixup = TimmMixup(num_classes=CLASSES, label_smoothing=0.0)
    mixup.mixup.mixup_enabled = False
    x = torch.rand(3, 3, 4, 4)
    images, targets = mixup(x.clone(), torch.tensor([0, 3, 1]))
    assert torch.equal(images, x) and torch.equal(targets, torch.eye(CLASSES)[[0, 3, 1]])


@needs_timm
def test_an_odd_batch_in_pairs():
    mixup = TimmMixup(mode="pair", num_classes=CLASSES)
    with pytest.raises(ValueError, match='mode "pair" needs an even batch, found 3 images'):
        mixup(torch.rand(3, 3, 4, 4), torch.tensor([0, 3, 1]))


@needs_timm
def test_an_unknown_mode():
    with pytest.raises(ValueError, match=r"mixup\.mode must be one of batch, pair, elem, found 'pairs'"):
        TimmMixup(mode="pairs")


@without_timm
def test_without_timm_it_says_what_to_install():
    with pytest.raises(ImportError, match=r"needs timm\.data\.mixup: pip install timm torchvision"):
        TimmMixup(mixup_alpha=0.8)
