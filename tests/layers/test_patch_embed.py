"""Patches of images: the equivalent convolution, shapes, parameters, errors."""

import pytest
import torch
from torch import nn

from flash_attn.layers.patch_embed import PatchEmbed


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_same_as_a_convolution(bias, fused, flatten, device):
    options = dict(in_chans=2, embed_dim=16, bias=bias, flatten=flatten, fused_bias_fc=fused, norm_layer=nn.LayerNorm)
    module = PatchEmbed(img_size=(8, 12), patch_size=(4, 2), **options).to(device)
    assert (module.grid_size, module.num_patches) == ((2, 6), 12)
    images = torch.randn(3, 2, 8, 12, device=device)
    weight = module.proj.weight.view(16, 2, 4, 2)
    expected = nn.functional.conv2d(images, weight, module.proj.bias, stride=(4, 2)).permute(0, 2, 3, 1)
    found = module(images)
    assert found.shape == ((3, 12, 16) if flatten else (3, 2, 6, 16))
    torch.testing.assert_close(found, module.norm(expected.flatten(1, 2) if flatten else expected))


def test_state_dict():
    shapes = {name: tuple(value.shape) for name, value in PatchEmbed(norm_layer=nn.LayerNorm).state_dict().items()}
    expected = {"proj.weight": (768, 768), "proj.bias": (768,), "norm.weight": (768,), "norm.bias": (768,)}
    assert shapes == expected
    assert list(PatchEmbed(bias=False).state_dict()) == ["proj.weight"]


def test_errors():
    for arguments, error, message in (
        (dict(img_size=30), ValueError, "img_size must be a multiple of patch_size, 16, found 30"),
        (dict(patch_size=0), ValueError, "patch_size must be positive, found 0"),
        (dict(patch_size=(1, 2, 3)), ValueError, "the length of patch_size must be 2, found 3"),
        (dict(img_size=32.0), TypeError, "img_size must be an integer, found float"),
    ):
        with pytest.raises(error, match=message):
            PatchEmbed(**dict(img_size=32) | arguments)
    module = PatchEmbed(img_size=32)
    for shape in ((2, 3, 32, 48), (2, 1, 32, 32), (2, 3, 48, 32)):
        with pytest.raises(ValueError, match=r"x must have shape \(\*, 3, 32, 32\), found"):
            module(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"x must have 4 dimensions \(batch, channels, height, width\)"):
        module(torch.zeros(3, 32, 32))
