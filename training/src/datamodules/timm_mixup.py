"""Mixup and CutMix of a batch, by timm: TimmMixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10)(x, target)."""

from typing import Any

from torch import Tensor

from src.utils.optional import optional_module

_MODES = ("batch", "pair", "elem")


class TimmMixup:
    """timm's Mixup, which asks for an even batch in mode "pair" only.

    In the other modes an image is mixed with the one that is as far from the batch's end as it is from the beginning,
    so the middle one of an odd batch with itself. Random numbers are numpy's, as in timm.

    Arguments: those of `timm.data.Mixup`, which is kept as the attribute `mixup`; `mixup.mixup_enabled = False`
    switches it off. Raises ImportError without timm, and ValueError for an unknown mode.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.mixup = optional_module("timm.data.mixup", "timm torchvision").Mixup(*args, **kwargs)
        if self.mode not in _MODES:
            raise ValueError(f"mixup.mode must be one of {', '.join(_MODES)}, found {self.mode!r}")

    @property
    def mode(self) -> str:
        """What has a ratio of its own: the whole "batch", each "pair" of images, or each image ("elem")."""
        return self.mixup.mode

    def __call__(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Mixed images, and targets (batch, num_classes) that sum to 1.

        Arguments:
            x: images (batch, channels, height, width), changed in place.
            target: labels (batch,), int64.

        An image with the share r of itself and the label a, mixed with one of label b, has the target
        (1 - s) (r onehot(a) + (1 - r) onehot(b)) + s / num_classes, with s = label_smoothing. With CutMix, r is its
        share of the area. Raises ValueError for an odd batch in mode "pair".
        """
        mixup = self.mixup
        if self.mode == "pair" and len(x) % 2:
            raise ValueError(f'mixup in mode "pair" needs an even batch, found {len(x)} images')
        mix = {"batch": mixup._mix_batch, "pair": mixup._mix_pair, "elem": mixup._mix_elem}[self.mode]
        ratio = mix(x)
        more = {"multi_label": True} if getattr(mixup, "multi_label", False) else {}
        mixup_target = optional_module("timm.data.mixup").mixup_target
        return x, mixup_target(target, mixup.num_classes, lam=ratio, smoothing=mixup.label_smoothing, **more)
