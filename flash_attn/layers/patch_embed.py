"""Images as sequences of patches, each embedded by one linear layer (ViT: Dosovitskiy et al., arXiv:2010.11929).

tokens = PatchEmbed(img_size=224, patch_size=16)(torch.randn(2, 3, 224, 224))      # (2, 196, 768)
"""

from collections.abc import Callable

from einops import rearrange
from torch import Tensor, nn

from flash_attn._ops import checks
from flash_attn.ops.fused_dense import FusedDense


class PatchEmbed(nn.Module):
    """Embeds non-overlapping patches of an image.

    Arguments:
        img_size, patch_size: in pixels, an integer or a pair (height, width); whole patches must fill the image.
        in_chans: channels of an image.
        embed_dim: features of a token.
        norm_layer: called with embed_dim, gives the norm of the tokens; None for none.
        flatten: return a sequence of tokens instead of a grid.
        bias: whether the linear layer has one.
        fused_bias_fc: use `FusedDense` for it, if it has a bias.

    A patch is the vector of its pixels in the order (channel, row, column), so the kernel of the equivalent convolution
    is proj.weight, (embed_dim, in_chans * patch height * patch width), reshaped.

    >>> from flash_attn.layers.patch_embed import PatchEmbed
    >>> PatchEmbed(img_size=32, patch_size=8)(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 16, 768])
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        norm_layer: Callable[[int], nn.Module] | None = None,
        flatten: bool = True,
        bias: bool = True,
        fused_bias_fc: bool = False,
    ) -> None:
        super().__init__()
        self.img_size = _pair("img_size", img_size)
        self.patch_size = _pair("patch_size", patch_size)
        for size, patch in zip(self.img_size, self.patch_size, strict=True):
            checks.number("img_size", size, size % patch == 0, "a multiple of patch_size, {}", patch)
        self.grid_size = tuple(size // patch for size, patch in zip(self.img_size, self.patch_size, strict=True))
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.in_chans = in_chans
        self.flatten = flatten
        linear_cls = FusedDense if fused_bias_fc and bias else nn.Linear
        self.proj = linear_cls(in_chans * self.patch_size[0] * self.patch_size[1], embed_dim, bias=bias)
        self.norm = nn.Identity() if norm_layer is None else norm_layer(embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens (batch, num_patches, embed_dim) of images (batch, in_chans, height, width), row by row.

        Without flatten, (batch, rows, columns, embed_dim). Raises ValueError for images of another size.
        """
        checks.tensor("x", x)
        checks.ndim("x", x, "(batch, channels, height, width)")
        rows, columns = self.patch_size
        checks.has_shape("x", x, (None, self.in_chans, *self.img_size))
        x = self.proj(rearrange(x, "b c (h p) (w q) -> b h w (c p q)", p=rows, q=columns))
        return self.norm(x.flatten(1, 2) if self.flatten else x)


def _pair(name, value):
    """Returns (height, width) from an integer or a pair of integers."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    checks.number(f"the length of {name}", len(pair), len(pair) == 2, "2")
    for size in pair:
        checks.integer(name, size)
        checks.number(name, size, size > 0, "positive")
    return pair
