"""Vision transformers of timm's kind (Dosovitskiy et al., arXiv:2010.11929), with fused kernels.

    model = VisionTransformer.from_pretrained("timm/vit_base_patch16_224.augreg2_in21k_ft_in1k", use_flash_attn=True)
    logits = model.eval()(torch.randn(8, 3, 224, 224))                         # (8, 1000)
    model.save_pretrained(folder)                           # timm.create_model(f"local-dir:{folder}", pretrained=True)

`VisionTransformer.load_state_dict` takes a state dict of timm's VisionTransformer as well as one of its own;
`inv_remap_state_dict_timm` gives back one that timm loads. The last block projects queries apart from keys and values,
since classification needs the class token's query alone.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from flash_attn.layers.patch_embed import PatchEmbed
from flash_attn.models._checkpoints import vit as checkpoints
from flash_attn.models._checkpoints.vit import inv_remap_state_dict_timm, remap_state_dict_timm
from flash_attn.models._trainers import LayerStack, TrainerMethods
from flash_attn.modules.block import Block, StochasticDepth, _add_and_norm, _Branch
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import FusedMLP, Mlp

__all__ = [
    "VisionTransformer",
    "create_block",
    "create_mixer_cls",
    "create_mlp_cls",
    "init_weights_vit_timm",
    "inv_remap_state_dict_timm",
    "remap_state_dict_timm",
    "vit_base_patch16_224",
    "vit_base_patch32_224",
    "vit_huge_patch14_224",
    "vit_large_patch16_224",
    "vit_small_patch16_224",
    "vit_tiny_patch16_224",
]


# ---------------------------------------------------------------------------------------------------------------------
# Parts


def create_mixer_cls(
    num_heads: int,
    qkv_bias: bool,
    attn_drop: float,
    use_flash_attn: bool,
    fused_bias_fc: bool,
    cross_attn: bool = False,
) -> Callable[[int], nn.Module]:
    """A function from the number of features to the attention of a block.

    Arguments:
        num_heads: heads of attention.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        attn_drop: probability that a weight of attention is dropped, in training.
        use_flash_attn, fused_bias_fc: take the attention and the linear layers of this package.
        cross_attn: queries have a projection of their own.

    Example:
        >>> from flash_attn.models.vit import create_mixer_cls
        >>> create_mixer_cls(4, True, 0.0, use_flash_attn=True, fused_bias_fc=True)(64)(torch.randn(2, 17, 64)).shape
        torch.Size([2, 17, 64])
    """
    return functools.partial(
        MHA,
        num_heads=num_heads,
        cross_attn=cross_attn,
        qkv_proj_bias=qkv_bias,
        dropout=attn_drop,
        fused_bias_fc=fused_bias_fc,
        use_flash_attn=use_flash_attn,
    )


def create_mlp_cls(
    embed_dim: int, mlp_ratio: float, act_layer: Callable[[], nn.Module], fused_mlp: bool
) -> Callable[[int], nn.Module]:
    """A function from the number of features to the MLP of a block, with int(embed_dim * mlp_ratio) hidden features.

    act_layer: called without arguments, gives the activation. With fused_mlp it must give an nn.GELU, which is then
    computed in its tanh form, or an nn.ReLU; others raise ValueError.

    Example:
        >>> from flash_attn.models.vit import create_mlp_cls
        >>> create_mlp_cls(64, 4.0, torch.nn.GELU, fused_mlp=True)(64)(torch.randn(2, 17, 64)).shape
        torch.Size([2, 17, 64])
    """
    activation = act_layer()
    hidden_features = int(embed_dim * mlp_ratio)
    if not fused_mlp:
        return functools.partial(Mlp, hidden_features=hidden_features, activation=activation)
    names = {nn.GELU: "gelu_approx", nn.ReLU: "relu"}
    if type(activation) not in names:
        raise ValueError(f"act_layer must give an nn.GELU or nn.ReLU with fused_mlp, found {activation}")
    return functools.partial(FusedMLP, hidden_features=hidden_features, activation=names[type(activation)])


def create_block(
    embed_dim: int,
    num_heads: int,
    mlp_ratio: float,
    qkv_bias: bool,
    drop_rate: float,
    attn_drop_rate: float,
    drop_path1: float,
    drop_path2: float,
    norm_layer: Callable[[int], nn.Module],
    act_layer: Callable[[], nn.Module],
    use_flash_attn: bool,
    fused_bias_fc: bool,
    fused_mlp: bool,
    fused_dropout_add_ln: bool,
    layer_idx: int | None = None,
    n_layer: int | None = None,
    last_layer_subset: bool = False,
) -> Block:
    """One block with its norms first and its residual stream in float32.

    With last_layer_subset, block n_layer - 1 projects queries apart, so that it can be asked for some tokens only. The
    other arguments are those of `VisionTransformer`, and drop_path1 and drop_path2 those of `Block`.

    Example:
        >>> from flash_attn.models.vit import create_block
        >>> rates, parts = dict.fromkeys(["drop_rate", "attn_drop_rate", "drop_path1", "drop_path2"], 0.0), torch.nn
        >>> fused = dict.fromkeys(["use_flash_attn", "fused_bias_fc", "fused_mlp", "fused_dropout_add_ln"], False)
        >>> block = create_block(64, 4, 4.0, True, **rates, norm_layer=parts.LayerNorm, act_layer=parts.GELU, **fused)
        >>> block(torch.randn(2, 17, 64))[0].shape
        torch.Size([2, 17, 64])
    """
    cross_attn = last_layer_subset and n_layer is not None and layer_idx == n_layer - 1
    return Block(
        embed_dim,
        create_mixer_cls(num_heads, qkv_bias, attn_drop_rate, use_flash_attn, fused_bias_fc, cross_attn),
        create_mlp_cls(embed_dim, mlp_ratio, act_layer, fused_mlp),
        norm_cls=norm_layer,
        prenorm=True,
        resid_dropout1=drop_rate,
        resid_dropout2=drop_rate,
        drop_path1=drop_path1,
        drop_path2=drop_path2,
        fused_dropout_add_ln=fused_dropout_add_ln,
        residual_in_fp32=True,
    )


def init_weights_vit_timm(module: nn.Module, name: str = "") -> None:
    """Draw the weights of a linear layer from a truncated normal distribution (0.02), and set its bias to zero.

    module: the layer; others are left alone. name: not used.

    Example:
        >>> from flash_attn.models.vit import init_weights_vit_timm
        >>> layer = torch.nn.Linear(64, 64).apply(init_weights_vit_timm)
        >>> layer.bias.any()
        tensor(False)
    """
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


# ---------------------------------------------------------------------------------------------------------------------
# The model


class _Embedding(Protocol):
    """What embed_layer gives: a module of which the number of patches is known."""

    num_patches: int

    def __call__(self, x: Tensor) -> Tensor: ...


_Model = TypeVar("_Model", bound="VisionTransformer")


class VisionTransformer(LayerStack, TrainerMethods):
    """A vision transformer with a class token and learned positions, as timm's of the same name.

    Arguments:
        img_size, patch_size, in_chans: as in `PatchEmbed`.
        num_classes: number of logits; 0 for none, the features of the class token being returned.
        embed_dim, depth, num_heads: features, blocks, and heads of each block.
        mlp_ratio: hidden features of an MLP, as a multiple of embed_dim.
        qkv_bias: whether the projections to queries, keys and values have a bias.
        no_embed_class: the class token has no position; else it has the first one.
        drop_rate: probability of dropout behind the positions, each mixer and each MLP, in training.
        attn_drop_rate: probability that an attention weight is dropped, in training.
        drop_path_rate: probability that the last block is skipped for an image, in training; it grows linearly from 0
            for the first block.
        embed_layer: called with img_size, patch_size, in_chans, embed_dim and bias, gives the embedding of patches.
        norm_layer: called with embed_dim, gives a norm; nn.LayerNorm with eps 1e-6 if None.
        act_layer: called without arguments, gives the activation of the MLPs; nn.GELU if None. With fused_mlp, its tanh
            form is computed.
        use_flash_attn: attention by `flash_attn_func`.
        fused_bias_fc: linear layers by `FusedDense`.
        fused_mlp: MLPs by `FusedMLP`.
        fused_dropout_add_ln: dropout, add and norm in one kernel.
        global_pool, init_values, class_token, pre_norm, fc_norm, weight_init: other variants of timm's; ValueError for
            all but the defaults.

    >>> from flash_attn.models.vit import VisionTransformer
    >>> model = VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, num_classes=10)
    >>> model(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    norm: nn.Module  # what norm_layer gives
    _config: dict[str, Any] | None = None  # the checkpoint's config.json

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        init_values: float | None = None,
        class_token: bool = True,
        no_embed_class: bool = False,
        pre_norm: bool = False,
        fc_norm: bool | None = None,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        weight_init: str = "",
        embed_layer: Callable[..., _Embedding] = PatchEmbed,
        norm_layer: Callable[[int], nn.Module] | None = None,
        act_layer: Callable[[], nn.Module] | None = None,
        use_flash_attn: bool = False,
        fused_bias_fc: bool = False,
        fused_mlp: bool = False,
        fused_dropout_add_ln: bool = False,
    ) -> None:
        super().__init__()
        _check_variant(
            global_pool=global_pool,
            init_values=init_values,
            class_token=class_token,
            pre_norm=pre_norm,
            fc_norm=fc_norm,
            weight_init=weight_init,
        )
        if depth < 1:
            raise ValueError(f"depth must be at least 1, found {depth}")
        # What a checkpoint says of the model, and whether its layers are those that it cannot describe otherwise.
        self._described = dict(
            patch_size=patch_size,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            no_embed_class=no_embed_class,
        )
        self._usual = dict(
            embed_layer=embed_layer is PatchEmbed, norm_layer=norm_layer is None, act_layer=act_layer in (None, nn.GELU)
        )
        self._input_size = [in_chans, *(img_size if isinstance(img_size, (list, tuple)) else (img_size, img_size))]
        norm_layer = norm_layer or functools.partial(nn.LayerNorm, eps=1e-6)
        self.num_classes = num_classes
        self.global_pool = global_pool
        self.num_features = self.embed_dim = embed_dim
        self.num_prefix_tokens = 1
        self.no_embed_class = no_embed_class
        self.fused_dropout_add_ln = fused_dropout_add_ln
        fused = {"fused_bias_fc": fused_bias_fc} if embed_layer is PatchEmbed else {}
        self.patch_embed = embed_layer(
            img_size=img_size, patch_size=patch_size, in_chans=in_chans, embed_dim=embed_dim, bias=True, **fused
        )
        positions = self.patch_embed.num_patches + (0 if no_embed_class else 1)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.empty(1, positions, embed_dim))
        rates = [drop_path_rate * i / max(depth - 1, 1) for i in range(depth)]
        self.blocks = nn.ModuleList(
            create_block(
                embed_dim,
                num_heads,
                mlp_ratio,
                qkv_bias,
                drop_rate,
                attn_drop_rate,
                rates[i - 1] if i > 0 else 0.0,
                rates[i],
                norm_layer,
                act_layer or nn.GELU,
                use_flash_attn,
                fused_bias_fc,
                fused_mlp,
                fused_dropout_add_ln,
                layer_idx=i,
                n_layer=depth,
                last_layer_subset=True,
            )
            for i in range(depth)
        )
        self.dropout = nn.Dropout(drop_rate)
        self.drop_path = StochasticDepth(rates[-1])
        self.norm = norm_layer(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes > 0 else nn.Identity()
        self.init_weights(weight_init)

    def init_weights(self, mode: str = "") -> None:
        """Draw all parameters anew. mode: must be "", timm's default way."""
        _check_variant(weight_init=mode)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)
        for name, module in self.named_modules():
            init_weights_vit_timm(module, name)

    def _input_name(self) -> str:
        return "patch_embed"

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer should not decay."""
        return {"pos_embed", "cls_token"}

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, num_classes) of images x (batch, in_chans, height, width)."""
        return self.forward_head(self.forward_features(x, all_tokens=False))

    def forward_features(self, x: Tensor, all_tokens: bool = True) -> Tensor:
        """Normalised features (batch, 1 + patches, embed_dim) of images, or (batch, 1, embed_dim).

        all_tokens: False computes in the last block only what the class token needs.
        """
        hidden_states, residual = self._pos_embed(self.patch_embed(x)), None
        *others, last = self.blocks
        for i, block in enumerate(others):
            hidden_states, residual = self._run_layer(i, block, hidden_states, residual)
        subset = None if all_tokens else slice(0, 1)
        hidden_states, residual = self._run_layer(len(others), last, hidden_states, residual, mixer_subset=subset)
        return self._final_norm(hidden_states, residual)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits (batch, num_classes) of features x (batch, tokens, embed_dim); with pre_logits what they are of."""
        x = x[:, 0]
        return x if pre_logits else self.head(x)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of this model or of timm's; see `torch.nn.Module.load_state_dict`."""
        return super().load_state_dict(remap_state_dict_timm(state_dict, self), strict=strict, assign=assign)

    @classmethod
    def from_pretrained(
        cls: type[_Model],
        model_name: str | os.PathLike[str],
        architecture: str | None = None,
        *,
        strict: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        progress: bool = True,
        **kwargs: Any,
    ) -> _Model:
        """A model with the weights of a checkpoint of timm's, in training mode: call eval() for inference.

            model = VisionTransformer.from_pretrained(folder, use_flash_attn=True, fused_mlp=True)

        Arguments:
            model_name: a folder, a file, or a name on the hub, as "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k".
            architecture: timm's name of the sizes, "vit_" or "deit_" with tiny, small, base, large, huge, giant or
                gigantic, and those of a patch and an image, as "vit_base_patch16_384". By default config.json is read:
                its architecture, num_classes, model_args, and input_size of the pretrained_cfg.
            strict: raise an error for tensors that are missing or not known; else they keep their first, random weights
                or are left out. Tensors of a wrong shape, or of integers, are always an error.
            device, dtype: of the parameters; torch's defaults if None. A dtype may be a name, as "bfloat16"; "auto" is
                that of the checkpoint's tensors.
            progress: show a bar, with the package tqdm, for a checkpoint of several files or a large one.
            kwargs: arguments of the constructor, which override what is read, as use_flash_attn=True; or num_classes=0
                with strict=False, to leave out the head. Also revision, token, cache_dir and local_files_only, for a
                name on the hub.

        The names and shapes in the files are compared with those of the model before anything is loaded.

        Raises OSError if there are no files, or neither config.json nor an architecture; ValueError for an architecture
        or an option that is not covered, and for tensors that do not fit, with their names; TypeError for a keyword
        argument that is not one of the constructor's, with names like it.
        """
        return checkpoints.load(cls, model_name, architecture, kwargs, strict, device, dtype, progress)

    def save_pretrained(self, folder: str | os.PathLike[str], max_shard_size: int | str = 5 * 10**9) -> None:
        """Write a folder that timm loads, as `timm.create_model("local-dir:" + folder)`, and `from_pretrained`.

        Other fields of the config.json that the model was loaded from, such as how images are prepared, are kept.

        Arguments:
            folder: is made if it is not there.
            max_shard_size: bytes of a file, in which a larger checkpoint is divided (which timm does not read); or
                text, as "5GB".

        Raises ValueError for a model with custom layers or another head, which config.json cannot describe.
        """
        checkpoints.save(self, folder, max_shard_size)

    @staticmethod
    def _defaults() -> dict[str, Any]:
        """The defaults of the arguments."""
        return {name: each.default for name, each in inspect.signature(VisionTransformer).parameters.items()}

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Tokens (batch, 1 + patches, embed_dim) of embedded patches: with the class token and positions."""
        first = self.cls_token.expand(x.shape[0], -1, -1)
        if self.no_embed_class:
            return torch.cat([first, x + self.pos_embed], dim=1)
        return torch.cat([first, x], dim=1) + self.pos_embed

    def _final_norm(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        branch = _Branch(hidden_states, self.dropout, self.drop_path)
        (out,), _ = _add_and_norm([self.norm], [branch], residual, fused=self.fused_dropout_add_ln)
        return out


def _check_variant(**given):
    """Check that options which only timm has are left at their defaults."""
    for name, value in given.items():
        if value != checkpoints.TIMM_OPTIONS[name]:
            raise ValueError(
                f"{name} must be {checkpoints.TIMM_OPTIONS[name]!r}, the one supported variant, found {value!r}"
            )


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


def _of_size(name):
    """The function `name`, which makes a model of the sizes that the name stands for."""
    sizes = checkpoints.sizes_of(name)

    def create(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
        if pretrained:
            raise ValueError("pretrained must be False, found True: VisionTransformer.from_pretrained loads weights")
        return VisionTransformer(**sizes | kwargs)

    described = ", ".join(f"{option} {value}" for option, value in sizes.items())
    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"""A `VisionTransformer`: {described}.

    Arguments:
        pretrained: must be False; `VisionTransformer.from_pretrained` loads weights.
        kwargs: more arguments of `VisionTransformer`, which replace these sizes.

    Example:
        >>> from flash_attn.models.vit import {name}
        >>> with torch.device("meta"):  # shapes alone, of a model with one block
        ...     {name}(depth=1)(torch.randn(8, 3, 224, 224)).shape
        torch.Size([8, 1000])
    """
    return create


vit_tiny_patch16_224 = _of_size("vit_tiny_patch16_224")
vit_small_patch16_224 = _of_size("vit_small_patch16_224")
vit_base_patch16_224 = _of_size("vit_base_patch16_224")
vit_base_patch32_224 = _of_size("vit_base_patch32_224")
vit_large_patch16_224 = _of_size("vit_large_patch16_224")
vit_huge_patch14_224 = _of_size("vit_huge_patch14_224")
