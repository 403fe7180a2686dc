"""The decoder: GPT-2, and by its configuration Llama, OPT, GPT-J, GPT-NeoX, Falcon, BigCode, BTLM, Baichuan and others.

    config = GPT2Config(n_embd=768, use_flash_attn=True, fused_mlp=True, fused_bias_fc=True, fused_dropout_add_ln=True)
    model = GPTLMHeadModel(config, device="cuda", dtype=torch.bfloat16)
    logits = model(input_ids).logits                            # (batch, seqlen, vocabulary)
    loss = model(input_ids, labels=input_ids).loss              # without all logits in memory
    tokens = model.generate(input_ids, max_length=100)

    model = GPTLMHeadModel.from_pretrained("path/or/name/of/a/checkpoint")

The configuration is a transformers.GPT2Config with additional fields, which `flash_attn.models._config.Settings` lists
with their defaults. `from_config` also takes the configurations of the other families. Blocks are those of
`flash_attn.modules.block`: each begins with the residual addition, and its dropout, that ends the block before.
"""

import functools
import inspect
import math
import os
from collections.abc import Callable
from typing import Any, Literal, NoReturn, TypeVar, cast, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from flash_attn import _library
from flash_attn._ops import checks, fusing, xentropy
from flash_attn._ops.layers_in_force import layers_in_force
from flash_attn.context_parallel import Plan
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.losses.linear_cross_entropy import (
    LinearCrossEntropyLoss,
    cross_entropy_of_logits,
    linear_cross_entropy,
)
from flash_attn.models._checkpoints import decoder as checkpoints
from flash_attn.models._checkpoints.arguments import refuse_float64
from flash_attn.models._checkpoints.tensor_parallel import check_world_size, combine_state_dicts_tp, shard_state_dict_tp
from flash_attn.models._checkpoints.tied_weights import TiedWeights
from flash_attn.models._config import is_gpt2_config, settings, warn_of_unknown
from flash_attn.models._gpt2 import (
    inv_remap_state_dict_hf_gpt2,
    inv_remap_state_dict_megatron,
    remap_state_dict_hf_gpt2,
    remap_state_dict_megatron,
)
from flash_attn.models._outputs import ModelOutput
from flash_attn.models._rope import depends_on_length, rotary_embedding
from flash_attn.models._trainers import (
    LayerStack,
    TrainerMethods,
    as_asked,
    check_options,
    tokens_of,
    weights_of_items,
)
from flash_attn.models.bigcode import remap_state_dict_hf_bigcode
from flash_attn.models.falcon import remap_state_dict_hf_falcon
from flash_attn.models.gpt_neox import remap_state_dict_hf_gpt_neox
from flash_attn.models.gptj import remap_state_dict_hf_gptj
from flash_attn.models.llama import remap_state_dict_hf_llama
from flash_attn.models.opt import remap_state_dict_hf_opt
from flash_attn.modules.block import Block, ParallelBlock, _add_and_norm, _Branch
from flash_attn.modules.embedding import GPT2Embeddings, ParallelGPT2Embeddings, _check_of_tokens
from flash_attn.modules.mha import MHA, ParallelMHA
from flash_attn.modules.mha._base import shifted
from flash_attn.modules.mha._cache import positions
from flash_attn.modules.mlp import FusedMLP, GatedMlp, Mlp, ParallelFusedMLP, ParallelGatedMlp, ParallelMLP
from flash_attn.ops.fused_dense import PLAIN_LINEAR, ColumnParallelLinear, Linear, fused_dense_func
from flash_attn.ops.triton.layer_norm import RMSNorm
from flash_attn.ops.triton.mlp import FusedDenseSqreluDense
from flash_attn.utils.distributed import all_gather_raw, sync_shared_params
from flash_attn.utils.generation import GenerationMixin

__all__ = [
    "GPTLMHeadModel",
    "GPTModel",
    "GPTPreTrainedModel",
    "combine_state_dicts_tp",
    "create_block",
    "create_mixer_cls",
    "create_mlp_cls",
    "inv_remap_state_dict_hf_gpt2",
    "inv_remap_state_dict_megatron",
    "remap_state_dict_hf_bigcode",
    "remap_state_dict_hf_falcon",
    "remap_state_dict_hf_gpt2",
    "remap_state_dict_hf_gpt_neox",
    "remap_state_dict_hf_gptj",
    "remap_state_dict_hf_llama",
    "remap_state_dict_hf_opt",
    "remap_state_dict_megatron",
    "shard_state_dict_tp",
]


class CausalLMOutput(ModelOutput):
    """logits: (batch, seqlen, vocabulary) of the next tokens."""

    logits: Tensor

    @property
    def loss(self) -> NoReturn:
        """Raises AttributeError: logits were asked for, not a loss."""
        raise AttributeError("loss needs labels or shift_labels, found neither")


class CausalLMLoss(ModelOutput):
    """loss: a float32 scalar."""

    loss: Tensor

    @property
    def logits(self) -> NoReturn:
        """Raises AttributeError: a loss was asked for, which does not need all logits."""
        raise AttributeError("logits are not computed with labels, since those of all tokens would take much memory")


def _sqrelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_gelu_tanh = functools.partial(F.gelu, approximate="tanh")
_TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_approx", "gelu_pytorch_tanh")
_FUSED = {**dict.fromkeys(_TANH_GELUS, "gelu_approx"), "relu": "relu", "sqrelu": "sqrelu"}
_GATES = {"glu": F.sigmoid, "swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": _gelu_tanh}
_PLAIN = {"gelu": F.gelu, **dict.fromkeys(_TANH_GELUS, _gelu_tanh), "relu": F.relu, "sqrelu": _sqrelu}


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


def create_mixer_cls(
    config: Any,
    layer_idx: int | None = None,
    process_group: ProcessGroup | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[[int], nn.Module]:
    """Returns a function features -> the attention of a layer, an `MHA`, or with a group a `ParallelMHA`.

    Arguments:
        config: a GPT2Config.
        layer_idx: the number of the layer, which names its cache.
        process_group: the processes that its heads are divided over, or None.
        device, dtype: of its parameters.

    Example:
        >>> from flash_attn.models.gpt import create_mixer_cls
        >>> from transformers import GPT2Config
        >>> create_mixer_cls(GPT2Config(n_embd=64, n_head=4), layer_idx=0)(64)(torch.randn(2, 7, 64)).shape
        torch.Size([2, 7, 64])
    """
    s = settings(config)
    scale = 1.0
    if s.scale_attn_weights:
        scale = s.width_of_head ** (-1.0 if s.mup_scale_qk_dot_by_d else -0.5)
    scale *= s.mup_attn_multiplier
    if s.scale_attn_by_inverse_layer_idx:
        if layer_idx is None:
            raise ValueError("layer_idx must be given with config.scale_attn_by_inverse_layer_idx, found None")
        scale /= layer_idx + 1
    window = s.of_layer("sliding_window", layer_idx)
    options: dict[str, Any] = dict(
        num_heads=s.n_head,
        num_heads_kv=s.heads_kv,
        head_dim=s.width_of_head,
        qkv_proj_bias=s.qkv_proj_bias,
        out_proj_bias=s.out_proj_bias,
        dropout=s.attn_pdrop,
        softmax_scale=scale,
        causal=True,
        layer_idx=layer_idx,
        rotary_emb_dim=s.rotary_dim(layer_idx),
        rotary_emb_base=s.of_layer("rotary_emb_base", layer_idx),
        rotary_emb_scale_base=s.rotary_emb_scale_base,
        rotary_emb_interleaved=s.rotary_emb_interleaved,
        use_alibi=s.use_alibi,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        use_flash_attn=s.use_flash_attn,
        qk_norm=s.qk_norm,
        qk_norm_eps=s.layer_norm_epsilon,
        qk_norm_zero_centered=s.qk_norm and s.norm_zero_centered,
        qk_norm_over_heads=s.qk_norm_over_heads,
        softcap=s.attn_logit_softcapping or 0.0,
        device=device,
        dtype=dtype,
    )
    mixer_cls: Callable[..., nn.Module]
    if process_group is None:
        mixer_cls = functools.partial(MHA, dwconv=s.attn_dwconv, fused_bias_fc=s.fused_bias_fc, **options)
    elif s.attn_dwconv:
        raise ValueError("config.attn_dwconv must be False with process_group, found True")
    else:
        parallel: dict[str, Any] = dict(process_group=process_group, sequence_parallel=s.sequence_parallel)
        mixer_cls = functools.partial(ParallelMHA, **parallel, **options)
    if s.alibi_scaled:
        mixer_cls = functools.partial(_with_scaled_alibi, mixer_cls, scale)
    if s.of_layer("rotary_emb_scaling", layer_idx) is not None and s.rotary_dim(layer_idx) > 0:
        mixer_cls = functools.partial(_with_scaled_rotary, mixer_cls, s, layer_idx, device)
    return mixer_cls


def _with_scaled_alibi(mixer_cls, scale, features):
    """ALiBi that is scaled with the scores, as in Falcon."""
    mixer = mixer_cls(features)
    for attention in (mixer.inner_attn, mixer.inner_cross_attn):
        attention.alibi_slopes = attention.alibi_slopes * scale  # not in place: the two may share one
    return mixer


def _with_scaled_rotary(mixer_cls, s, layer_idx, device, features):
    mixer = mixer_cls(features)
    mixer.rotary_emb = rotary_embedding(s, layer_idx, device)
    return mixer


def create_mlp_cls(
    config: Any,
    layer_idx: int | None = None,
    process_group: ProcessGroup | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[[int], nn.Module]:
    """Returns a function features -> the MLP of a layer.

    Arguments:
        config: a GPT2Config.
        layer_idx: the number of the layer, which selects from config.mlp_checkpoint_lvl if that is a list.
        process_group: the processes that the MLP is divided over, or None.
        device, dtype: of its parameters.

    Example:
        >>> from flash_attn.models.gpt import create_mlp_cls
        >>> from transformers import GPT2Config
        >>> create_mlp_cls(GPT2Config(n_embd=64, n_head=4), layer_idx=0)(64)(torch.randn(2, 7, 64)).shape
        torch.Size([2, 7, 64])
    """
    s = settings(config)
    hidden_features = s.inner if s.gated else s.n_inner
    options: dict[str, Any] = dict(hidden_features=hidden_features, bias1=s.mlp_fc1_bias, bias2=s.mlp_fc2_bias)
    options |= dict(device=device, dtype=dtype)
    if process_group is not None:
        options |= dict(process_group=process_group, sequence_parallel=s.sequence_parallel)
    level = s.of_layer("mlp_checkpoint_lvl", layer_idx)
    cls: Callable[..., nn.Module]
    if s.fused_mlp:
        activation = _of(_FUSED, s.activation_function, "with config.fused_mlp")
        cls = FusedMLP if process_group is None else ParallelFusedMLP
        return functools.partial(cls, activation=activation, checkpoint_lvl=level, **options)
    if s.fused_dense_sqrelu_dense:
        _of(("sqrelu",), s.activation_function, "with config.fused_dense_sqrelu_dense")
        if process_group is not None:
            raise ValueError("config.fused_dense_sqrelu_dense must be False with process_group, found True")
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        return functools.partial(
            FusedDenseSqreluDense, hidden_features=hidden_features, checkpoint_lvl=level, **factory
        )
    activation = _of(_PLAIN | _GATES, s.activation_function, "")
    if s.gated:
        cls = GatedMlp if process_group is None else ParallelGatedMlp
        return functools.partial(cls, activation=activation, multiple_of=s.mlp_multiple_of, **options)
    return functools.partial(Mlp if process_group is None else ParallelMLP, activation=activation, **options)


def _of(table, name, where):
    """The entry of this activation in a dict, or in a tuple of names the name itself."""
    if name not in table:
        among = ", ".join(map(repr, table))
        raise ValueError(f"config.activation_function must be one of {among} {where}".rstrip() + f", found {name!r}")
    return table[name] if isinstance(table, dict) else name


def create_block(
    config: Any,
    layer_idx: int | None = None,
    process_group: ProcessGroup | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Block | ParallelBlock:
    """A layer: attention and MLP, one after the other or side by side, with norms, dropout and the residual stream.

    Arguments:
        config: a GPT2Config.
        layer_idx: the number of the layer, which names its cache.
        process_group: the processes that the layer is divided over, or None.
        device, dtype: of its parameters.

    >>> from flash_attn.models.gpt import create_block
    >>> from transformers import GPT2Config
    >>> block = create_block(GPT2Config(n_embd=64, n_head=4), layer_idx=0)
    >>> hidden_states, residual = block(torch.randn(2, 5, 64))
    """
    s = settings(config)
    factory: dict[str, Any] = dict(device=device, dtype=dtype)
    mixer_cls = create_mixer_cls(s, layer_idx, process_group, **factory)
    mlp_cls = create_mlp_cls(s, layer_idx, process_group, **factory)
    norm_cls = functools.partial(_norm, s, **factory)
    options: dict[str, Any] = dict(
        norm_cls=norm_cls if s.input_norms else nn.Identity,
        resid_dropout1=s.embd_pdrop if layer_idx in (None, 0) else s.resid_pdrop,
        resid_dropout2=s.resid_pdrop,
        fused_dropout_add_ln=s.fused_dropout_add_ln and s.input_norms,
        residual_in_fp32=s.residual_in_fp32,
        sequence_parallel=s.sequence_parallel and process_group is not None,
        mark_shared_params=process_group is not None,
    )
    block: Any  # which takes an attribute of any type
    if s.parallel_block:
        block = ParallelBlock(s.n_embd, mixer_cls, mlp_cls, tied_norm=s.parallel_block_tied_norm, **options)
    else:
        output_cls: Callable[[int], nn.Module] | None = norm_cls if s.output_norms else None
        if s.mup_residual_multiplier != 1:
            output_cls = functools.partial(_Factor, s.mup_residual_multiplier)
        block = Block(s.n_embd, mixer_cls, mlp_cls, prenorm=s.prenorm, output_cls=output_cls, **options)
    block.layer_idx = layer_idx
    return block


class _Factor(nn.Module):
    """Multiplies by a number."""

    def __init__(self, factor: float, features: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor}"


def _norm(s, features, device=None, dtype=None):
    if not s.rms_norm:
        return nn.LayerNorm(features, eps=s.layer_norm_epsilon, bias=s.norm_bias, device=device, dtype=dtype)
    return RMSNorm(
        features, eps=s.layer_norm_epsilon, zero_centered_weight=s.norm_zero_centered, device=device, dtype=dtype
    )


def _init_weights(
    module: nn.Module,
    n_layer: int,
    initializer_range: float = 0.02,
    mup_width_scale: float = 1.0,
    rescale_prenorm_residual: bool = True,
) -> None:
    """Give a module its first weights; to be applied to all modules of a model.

    Weights of linear layers and embeddings are drawn from a normal distribution; biases are 0. The last layers before
    the residual additions have a smaller deviation, so that the residual stream does not grow with n_layer (as in
    GPT-2). Linear layers get mup_width_scale as a multiplier of their learning rate (muP, arXiv:2203.03466).
    """
    std = initializer_range * math.sqrt(mup_width_scale)
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=std)
        vars(module.weight)["_optim"] = {"lr_multiplier": mup_width_scale}
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=initializer_range)
    if rescale_prenorm_residual:
        for name, parameter in module.named_parameters():
            if name in ("out_proj.weight", "fc2.weight"):
                nn.init.normal_(parameter, std=std / math.sqrt(2 * n_layer))


# ---------------------------------------------------------------------------------------------------------------------
# Models


_Model = TypeVar("_Model", bound="GPTPreTrainedModel")


class GPTPreTrainedModel(TiedWeights, TrainerMethods):
    """What the models share: their configuration, checkpoints, tied weights, and what trainers call.

    Example:
        >>> import tempfile
        >>> from flash_attn.models.gpt import GPTLMHeadModel, GPTPreTrainedModel
        >>> from transformers import GPT2Config
        >>> model = GPTLMHeadModel.from_config(GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=4))
        >>> folder = tempfile.mkdtemp()
        >>> model.save_pretrained(folder)
        >>> isinstance(model, GPTPreTrainedModel), GPTLMHeadModel.from_pretrained(folder).config.n_embd
        (True, 32)
    """

    main_input_name = "input_ids"
    _generation_config: Any = None  # of the checkpoint: saved with the model, not used

    def __init__(self, config: Any, *inputs: Any, **kwargs: Any) -> None:
        super().__init__()
        if not is_gpt2_config(config):
            raise ValueError(
                f"config must be a GPT2Config, found {type(config).__name__}; from_config takes those of other families"
            )
        self.config = config

    @classmethod
    def from_config(
        cls: type[_Model],
        config: Any,
        *,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        **kwargs: Any,
    ) -> _Model:
        """A model with random weights from a configuration of transformers, of any supported family.

        Arguments:
            config: the configuration, an object such as a transformers.LlamaConfig.
            dtype, torch_dtype: as in `from_pretrained`; "auto" is the dtype of the configuration.
            kwargs: fields of `Settings` that override those of the configuration, such as use_flash_attn=True; and
                arguments of the constructor. The configuration that is given is not changed.

        Raises TypeError for a name that is neither, and suggests similar names.
        """
        return checkpoints.build(cls, config, kwargs, dtype=dtype, torch_dtype=torch_dtype)

    @classmethod
    def from_pretrained(
        cls: type[_Model],
        model_name: str | os.PathLike,
        config: Any = None,
        *args: Any,
        strict: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        world_size: int = 1,
        rank: int = 0,
        family: str | None = None,
        progress: bool = True,
        torch_dtype: torch.dtype | str | None = None,
        **kwargs: Any,
    ) -> _Model:
        """A model with the weights of a checkpoint, in training mode like every new module: call eval() for inference.

            model = GPTLMHeadModel.from_pretrained(folder, dtype="auto", use_flash_attn=True, fused_bias_fc=True)

        Arguments:
            model_name: a folder, a file, or a name on the hub.
            config: a GPT2Config, or the configuration of the family; by default, the checkpoint's own config.json.
            strict: raise an error for missing or unknown tensors. Otherwise missing ones keep their random initial
                weights, and unknown ones are left out. A wrong shape, or integers, are always an error.
            device, dtype: of the parameters; by default the CPU, and torch's default dtype. A dtype may be a name such
                as "bfloat16"; "auto" is the one in config.json, or else that of the checkpoint's tensors.
            world_size, rank: load the part of this process of a tensor parallel model. Together with process_group,
                which must have world_size processes.
            family: the name of a family, such as "llama"; by default the one of config.json's model_type, or else of
                the name on the hub.
            progress: show a progress bar, if the package tqdm is there, for several files or a large one.
            torch_dtype: the older name of dtype in transformers; gives a warning.
            kwargs: fields of `Settings` that override those of the configuration, such as use_flash_attn=True; and
                arguments of the constructor. A configuration that is given is not changed. Also revision, token,
                cache_dir and local_files_only, for a name on the hub.
            args: of the constructor.

        Names and shapes in the files are compared with those of the model before anything is loaded. safetensors files
        are read piece by piece, so that no whole file is held in memory.

        Raises NotImplementedError for an unknown family, OSError if there are no files, ValueError for tensors that do
        not fit, with their names, and TypeError for a keyword argument that is neither a field nor an argument of the
        constructor, with similar names.
        """
        return checkpoints.load(
            cls,
            model_name,
            config,
            args,
            kwargs,
            strict=strict,
            device=device,
            dtype=dtype,
            world_size=world_size,
            rank=rank,
            family=family,
            progress=progress,
            torch_dtype=torch_dtype,
        )

    def save_pretrained(
        self, folder: str | os.PathLike, family: str | None = None, max_shard_size: int | str = 5 * 10**9
    ) -> None:
        """Write a folder that transformers loads, and `from_pretrained`.

        The checkpoint's generation_config.json, if the model comes from one, is written as it was.

        Arguments:
            folder: where to write; created if it does not exist.
            family: the name of the family in whose format it is written; by default that of the checkpoint or
                configuration that the model was made from, else GPT-2's.
            max_shard_size: the most bytes of a file, or text such as "5GB"; a larger checkpoint becomes several files.

        Raises ValueError if that format cannot express the model; if a field that changes what the model computes was
        overridden, as in `from_pretrained(folder, rotary_emb_base=1e6)` (change the family's own configuration and pass
        that as `config` instead); and for one part of a tensor parallel model, which `combine_state_dicts_tp` must put
        together first.
        """
        checkpoints.save(self, folder, family, max_shard_size)

    @property
    def generation_config(self) -> Any:
        """The transformers.GenerationConfig that `save_pretrained` writes. `generate` takes nothing from it."""
        if self._generation_config is None or isinstance(self._generation_config, dict):
            from transformers import GenerationConfig

            names = ("bos_token_id", "eos_token_id", "pad_token_id")
            of_config = {name: getattr(self.config, name, None) for name in names}
            self._generation_config = GenerationConfig.from_dict(of_config | (self._generation_config or {}))
        return self._generation_config

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        """Takes another one, a transformers.GenerationConfig or a dict of its fields; None makes one of `config`."""
        if not (value is None or isinstance(value, dict) or hasattr(value, "to_diff_dict")):
            raise TypeError(
                f"generation_config must be a transformers.GenerationConfig, a dict or None, found {value!r}"
            )
        self._generation_config = value

    def _first_weights(self) -> Callable[[nn.Module], None]:
        """What gives a module of this model its first weights."""
        s = settings(self.config)
        return lambda module: _init_weights(module, s.n_layer, s.initializer_range, s.mup_width_scale)


class GPTModel(GPTPreTrainedModel, LayerStack):
    """The decoder without its head.

    Arguments:
        config: a GPT2Config with what is in `Settings`.
        process_group: divide the model over the processes of this group (tensor parallelism); with
            config.sequence_parallel, also divide the tokens between attention and MLP.
        device, dtype: of the parameters.

    >>> from flash_attn.models.gpt import GPTModel
    >>> from transformers import GPT2Config
    >>> model = GPTModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100))
    >>> model(torch.randint(100, (2, 5))).shape
    torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        config: Any,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config)
        warn_of_unknown(config)
        s = settings(config)
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        needs = ("use_flash_attn", "fused_dropout_add_ln", "rms_norm", "qk_norm")
        refuse_float64(dtype, {name: bool(getattr(s, name)) for name in needs})
        if process_group is not None:
            check_world_size(s, dist.get_world_size(process_group))
        self.process_group = process_group
        self.sequence_parallel = s.sequence_parallel
        self.embeddings_multiplier = s.mup_embeddings_multiplier
        self.residual_in_fp32 = s.residual_in_fp32
        self.prenorm = s.prenorm
        self.parallel_block = s.parallel_block
        self.use_flash_attn = s.use_flash_attn
        self.fused_dropout_add_ln = s.fused_dropout_add_ln
        self.gradient_checkpointing = s.gradient_checkpointing
        self.embeddings = _embeddings(s, process_group, **factory)
        blocks = [create_block(s, i, process_group, **factory) for i in range(s.n_layer)]
        self.layers = nn.ModuleList(blocks)
        tables: dict[str, RotaryEmbedding] = {}  # layers with equal rotary embeddings share one
        for i, block in enumerate(blocks):
            if s.rotary_dim(i) > 0:
                rotary = rotary_embedding(s, i, device)
                block.mixer.rotary_emb = tables.setdefault(repr(rotary), rotary)
        if s.prenorm:
            self.drop_f = nn.Dropout(s.resid_pdrop)
            self.ln_f = _norm(s, s.n_embd, **factory)
            if process_group is not None:
                for marked in (self.ln_f, *self.ln_f.parameters()):
                    marked._shared_params = True
                    if s.sequence_parallel:
                        marked._sequence_parallel = True
        self.apply(self._first_weights())
        self.tie_weights()

    def _input_name(self) -> str:
        return "embeddings.word_embeddings"

    def tie_weights(self) -> None:
        """Copy parameters that all processes of the group share from the first process."""
        if self.process_group is not None and not next(self.parameters()).is_meta:
            sync_shared_params(self, self.process_group)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[int, Tensor]:
        """Uninitialised caches (batch_size, max_seqlen, 2, heads_kv, head_dim), by the number of their layer.

        For a block table give num_pages and page_size in the place of batch_size and max_seqlen.
        """
        layers = cast(list[Block], self.layers)
        return {i: layer.allocate_inference_cache(batch_size, max_seqlen, dtype) for i, layer in enumerate(layers)}

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inference_params: Any = None,
        *,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cp_plan: Plan | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """The normed residual stream after the last layer.

        Arguments:
            input_ids: (batch, seqlen) int64.
            position_ids: (seqlen,) or (batch, seqlen), for learned positions; 0, 1, ... from the first token if None,
                or with inference_params from the number of keys that the caches hold for a row, as layers count.
                Rotary embeddings and ALiBi are relative and ignore them; then they must count up by 1 in each row. They
                do not separate sequences within a row, as cu_seqlens does: learned positions that begin again at 0
                there, or others that do not count up, are an error like that of attention_mask.
            inference_params: see `flash_attn.utils.generation.InferenceParams`.
            attention_mask: (batch, seqlen), 1 for tokens and 0 for padding, which may be on either side of the tokens,
                but not between them. Padding between them is an error on the CPU; on a GPU, where reading the mask
                would wait for the device, and in a compiled graph, the row becomes NaN. Each row gives what it would
                give alone. Not with inference_params, whose leftpad_per_sample says the same.
            inputs_embeds: (batch, seqlen, features of the word embeddings), instead of input_ids: what
                get_input_embeddings()(input_ids) would give. Not with a group.
            cp_plan: a `flash_attn.context_parallel.Plan` of which input_ids are the tokens of this rank, (batch,
                cp_plan.tokens): a row may hold several documents, and positions are those in them. position_ids may
                differ from them for learned positions only: else they are an error on the CPU; on a GPU, where reading
                them would wait for the device, the row becomes NaN. Needs config.use_flash_attn; not with
                attention_mask or inference_params.
            cu_seqlens: (documents + 1,) int32, where documents begin in all tokens, one row after the other, and at the
                end batch * seqlen. Tokens see only those of their document, and positions are those in it. Numbers that
                do not rise from 0 to that, or by more than max_seqlen, are an error on the CPU; on a GPU, where reading
                them would wait for the device, all of the output becomes NaN. Needs config.use_flash_attn; not with
                position_ids, attention_mask, inference_params or cp_plan, and not with config.attn_dwconv.
            max_seqlen: the length of the longest document, or more, for cu_seqlens; if None seqlen, but at most the
                number of learned positions.

        Returns (batch, seqlen, features), with arbitrary values at padding; with a group and sequence_parallel, this
        process's part of (batch * seqlen, features).
        """
        by_tokens = self.process_group is not None and self.sequence_parallel
        tokens = tokens_of(input_ids, inputs_embeds)
        if inputs_embeds is not None and self.process_group is not None:
            raise ValueError("inputs_embeds must be None with process_group, found a tensor: give input_ids")
        leftpad = fits = None
        if cu_seqlens is not None:
            _refuse_with(
                "cu_seqlens",
                position_ids=position_ids,
                attention_mask=attention_mask,
                inference_params=inference_params,
                cp_plan=cp_plan,
            )
            max_seqlen, fits = self._check_documents(cu_seqlens, max_seqlen, tokens)
            if self.embeddings.max_position_embeddings > 0:  # which there must be, even where documents do not fit
                position_ids = _positions_in_documents(cu_seqlens, tokens.shape).clamp(0, max(max_seqlen - 1, 0))
        elif max_seqlen is not None:
            raise ValueError(f"max_seqlen must be None without cu_seqlens, found {max_seqlen}")
        if cp_plan is not None:
            _refuse_with("cp_plan", attention_mask=attention_mask, inference_params=inference_params)
            if position_ids is None:
                position_ids = cp_plan.position_ids.to(tokens.device)
            elif self.embeddings.max_position_embeddings == 0:
                _check_of_tokens("position_ids", position_ids, tokens)
                fits = _as_planned(position_ids.expand_as(tokens), cp_plan)
        if attention_mask is not None:
            if inference_params is not None:
                raise ValueError(
                    "inference_params must be None with attention_mask, found both: give leftpad_per_sample"
                )
            if by_tokens:
                raise ValueError("config.sequence_parallel must be False with attention_mask, found True")
            leftpad, fits = _padding(attention_mask, tokens)
        if position_ids is not None:
            _check_of_tokens("position_ids", position_ids, tokens)
            if inference_params is None and cp_plan is None and cu_seqlens is None:
                is_learned = self.embeddings.max_position_embeddings > 0
                counts = _one_sequence(position_ids.expand_as(tokens), attention_mask, is_learned)
                fits = counts if fits is None else fits & counts
        elif inference_params is not None and self.embeddings.max_position_embeddings > 0:
            position_ids = positions(inference_params, tokens)
            if position_ids.dim() == 1:  # else a sequence may be longer, by its padding
                last, limit = inference_params.seqlen_offset + tokens.shape[1], self.embeddings.max_position_embeddings
                name, expected = "inference_params.seqlen_offset + seqlen", "at most {}, the number of positions"
                checks.number(name, last, last <= limit, expected, limit)
        if leftpad is not None:  # padding moves behind the tokens, where causality hides it
            if position_ids is not None:
                position_ids = shifted(position_ids.expand_as(tokens), leftpad)
            input_ids = None if input_ids is None else shifted(input_ids, leftpad)
            inputs_embeds = None if inputs_embeds is None else shifted(inputs_embeds, leftpad)
        given = dict(input_ids=input_ids) if inputs_embeds is None else dict(inputs_embeds=inputs_embeds)
        with layers_in_force():
            documents = None if cu_seqlens is None else dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
            hidden = self._run(given, tokens.shape[1], position_ids, inference_params, by_tokens, cp_plan, documents)
        if documents is not None:
            hidden = hidden if by_tokens else hidden.unflatten(0, tuple(tokens.shape))
            return hidden if fits is None else hidden.masked_fill(~fits, math.nan)
        if leftpad is not None:
            hidden = shifted(hidden, -leftpad)
        return hidden if fits is None or by_tokens else hidden.masked_fill(~fits[:, None, None], math.nan)

    def _check_documents(self, cu_seqlens, max_seqlen, tokens):
        """(max_seqlen, whether the documents are those of these tokens, or None where that is known to be so)."""
        if not self.use_flash_attn:
            raise ValueError("config.use_flash_attn must be True with cu_seqlens, found False")
        checks.tensor("cu_seqlens", cu_seqlens, dtypes=(torch.int32,), device=tokens.device)
        checks.ndim("cu_seqlens", cu_seqlens, "(documents + 1)")
        checks.number("cu_seqlens' length", len(cu_seqlens), len(cu_seqlens) > 1, "at least 2")
        lengths, total = cu_seqlens.diff(), tokens.numel()
        limit = self.embeddings.max_position_embeddings
        if max_seqlen is None:
            max_seqlen = min(tokens.shape[1], limit or tokens.shape[1])
        else:
            max_seqlen = checks.whole("max_seqlen", max_seqlen)
            has_positions = limit == 0 or max_seqlen <= limit
            checks.number("max_seqlen", max_seqlen, has_positions, "at most {}, the number of positions", limit)
            max_seqlen = min(max_seqlen, total)  # rotary tables have as many rows
        fits = ((lengths >= 0) & (lengths <= max_seqlen)).all() & (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total)
        if not _library.can_be_read_at_once(cu_seqlens):
            return max_seqlen, fits
        if not fits:
            raise ValueError(
                f"cu_seqlens must rise from 0 to the number of tokens, {total}, by at most max_seqlen, {max_seqlen}, "
                f"at a time, found {cu_seqlens.tolist()}"
            )
        return max_seqlen, None

    def _run(self, given, seqlen, position_ids, inference_params, by_tokens, cp_plan, documents):
        """`forward` of rows that begin with a token. given: the input by its name.

        documents: what attention needs to know of them; all tokens are then one sequence, (tokens, features).
        """
        options: dict[str, Any] = dict(combine_batch_seqlen_dim=True) if by_tokens else {}
        hidden = self.embeddings(**given, position_ids=position_ids, **options)
        if self.embeddings_multiplier != 1.0:
            hidden = hidden * self.embeddings_multiplier
        mixer_kwargs: dict[str, Any] = dict(seqlen=seqlen) if by_tokens else {}
        if documents is not None:
            hidden, mixer_kwargs = hidden if by_tokens else hidden.flatten(0, 1), dict(documents)
        if inference_params is not None:
            mixer_kwargs["inference_params"] = inference_params
        if cp_plan is not None:
            mixer_kwargs["cp_plan"] = cp_plan
        stream: tuple[Any, ...] = (
            hidden,
            *(None,) * (2 if self.parallel_block else 1),
        )  # what blocks take and return
        for i, layer in enumerate(self.layers):
            # A layer that appends to a cache is not run twice.
            run = functools.partial(self._run_layer, i, layer) if inference_params is None else layer
            if self.prenorm:
                stream = run(*stream, mixer_kwargs=mixer_kwargs)
            else:
                stream = (run(stream[0], mixer_kwargs=mixer_kwargs),)
        return self._normed(*stream) if self.prenorm else stream[0]

    def _normed(self, hidden, *rest):
        """The last norm, of the sum of all branches."""
        *second, residual = rest
        branches = [_Branch(x, self.drop_f) for x in (hidden, *second) if x is not None]
        (out,), _ = _add_and_norm([self.ln_f], branches, residual, fused=self.fused_dropout_add_ln)
        return out


def _refuse_with(given, **arguments):
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} must be None with {given}, found a {type(value).__name__}")


def _positions_in_documents(cu_seqlens: Tensor, shape: torch.Size) -> Tensor:
    """The position of each token in its document, int64, for `cu_seqlens` of rows of this shape (batch, seqlen)."""
    token = torch.arange(shape.numel(), dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    starts = cu_seqlens[torch.searchsorted(cu_seqlens, token, right=True) - 1]
    return (token - starts).long().view(shape)


def _padding(attention_mask, input_ids):
    """How much padding each row has on its left, (batch,), and whether all of its tokens are adjacent, (batch,)."""
    checks.tensor("attention_mask", attention_mask, shape=tuple(input_ids.shape), device=input_ids.device)
    is_token = attention_mask.bool()
    begins = is_token & ~F.pad(is_token[:, :-1], (1, 0))
    fits = (begins.sum(1) <= 1) & (attention_mask == is_token).all(1)
    if _library.can_be_read_at_once(attention_mask) and not fits.all():
        row = int((~fits).nonzero()[0])
        raise ValueError(
            "attention_mask must be 1 for the tokens of a row and 0 before and after them, "
            f"found {attention_mask[row].tolist()} in row {row}"
        )
    return begins.int().argmax(1), fits


def _one_sequence(position_ids, attention_mask, is_learned):
    """Whether the positions of each row's tokens are those of one sequence, (batch,): they count up by 1, or where they
    are learned and may be any, none but the first is 0."""
    fits = position_ids[:, 1:] != 0 if is_learned else position_ids.diff(dim=1) == 1
    if attention_mask is not None:
        fits |= (attention_mask[:, 1:] == 0) | (attention_mask[:, :-1] == 0)
    fits = fits.all(1)
    if _library.can_be_read_at_once(position_ids) and not fits.all():
        row = int((~fits).nonzero()[0])
        expected = "not begin again at 0 within a row" if is_learned else "count up by 1 in each row"
        raise ValueError(
            f"position_ids must {expected} {'with' if is_learned else 'without'} learned positions, since they do not "
            "separate several sequences in one row: give cu_seqlens in their place, "
            f"found {position_ids[row].tolist()} in row {row}"
        )
    return fits


def _as_planned(position_ids, plan):
    """Whether each row has the positions of a plan, (batch,): rotary embeddings and ALiBi take those, and no others."""
    own = plan.own_tokens
    fits = (position_ids[:, :own] == plan.position_ids[:own].to(position_ids.device)).all(1)
    if _library.can_be_read_at_once(position_ids) and not fits.all():
        row = int((~fits).nonzero()[0])
        raise ValueError(
            "position_ids must be cp_plan.position_ids without learned positions, "
            f"found {position_ids[row].tolist()} in row {row}"
        )
    return fits


def _embeddings(s, process_group, device, dtype):
    factory: dict[str, Any] = dict(device=device, dtype=dtype)
    if process_group is None:
        return GPT2Embeddings(
            s.n_embd, s.padded_vocab_size, s.n_positions, word_embed_proj_dim=s.word_embed_proj_dim, **factory
        )
    if s.word_embed_proj_dim is not None:
        raise ValueError(f"config.word_embed_proj_dim must be None with process_group, found {s.word_embed_proj_dim}")
    return ParallelGPT2Embeddings(
        s.n_embd,
        s.padded_vocab_size,
        s.n_positions,
        process_group=process_group,
        sequence_parallel=s.sequence_parallel,
        **factory,
    )


_NAME_OF_DECODERS = "GPT2LMHeadModel"


class GPTLMHeadModel(GPTPreTrainedModel, GenerationMixin):
    """The decoder with the head that gives logits of the next token.

    The arguments are those of `GPTModel`. With a group, every process has its part of the vocabulary.

    With config.tie_word_embeddings, the weight of `lm_head` is that of the word embeddings, and stays so when the model
    is moved, copied, pickled, put on memory after the meta device, or loaded, with assign or without. A state dict may
    have either of the two keys, or both with equal values. This holds for the two modules that the constructor made:
    a layer in the place of one, as an adapter or an nn.Linear of yours, is left alone, and `save_pretrained` then
    writes two tensors, and tie_word_embeddings as false. Entries of `state_dict` have memory of their own.

    >>> from flash_attn.models.gpt import GPTLMHeadModel
    >>> from transformers import GPT2Config
    >>> model = GPTLMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100))
    >>> tokens = torch.randint(100, (2, 5))
    >>> model(tokens).logits.shape
    torch.Size([2, 5, 100])
    >>> model(tokens, labels=tokens).loss.shape
    torch.Size([])
    >>> model.eval().generate(tokens, max_length=8).shape
    torch.Size([2, 8])
    """

    accepts_loss_kwargs = True  # transformers.Trainer: forward takes num_items_in_batch
    loss_type = "ForCausalLM"  # and compares labels with the logits of the token before

    def __init__(
        self,
        config: Any,
        process_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config)
        s = settings(config)
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.process_group = process_group
        self.transformer = GPTModel(config, process_group=process_group, **factory)
        self.tie_word_embeddings = s.tie_word_embeddings
        self.project_out = None
        features = s.n_embd
        if s.word_embed_proj_dim is not None:
            features = s.word_embed_proj_dim
            self.project_out = nn.Linear(s.n_embd, features, bias=False, **factory)
        if process_group is None:
            head_cls = _NormedHead if s.norm_head else Linear
            self.lm_head = head_cls(features, s.padded_vocab_size, bias=s.lm_head_bias, **factory)
        else:
            parallel_cls = _ParallelNormedHead if s.norm_head else ColumnParallelLinear
            self.lm_head = parallel_cls(
                features,
                s.padded_vocab_size,
                process_group,
                bias=s.lm_head_bias,
                sequence_parallel=s.sequence_parallel,
                **factory,
            )
        self.vocab_size = s.vocab_size  # without padding, so that generation never draws it
        self.depends_on_capacity = depends_on_length(s)
        self.softcap = s.final_logit_softcapping
        self.output_scale = s.mup_output_multiplier * s.mup_width_scale
        self.apply(self._first_weights())
        self._mark_tied()
        self.tie_weights()

    def _input_name(self) -> str:
        return "transformer.embeddings.word_embeddings"

    def _output_name(self) -> str:
        return "lm_head"

    def _tied_modules(self) -> list[tuple[str, str]]:
        is_tied = self.tie_word_embeddings and settings(self.config).tie_word_embeddings
        return [(self._input_name(), self._output_name())] if is_tied else []

    def tie_weights(self) -> None:
        """Use the embedding as the weight of the head, if the configuration ties them, and synchronise what processes
        share. A head or an embedding that has replaced that of the constructor is left alone.
        """
        super().tie_weights()
        self.transformer.tie_weights()

    def _get_name(self) -> str:
        """By which transformers.Trainer tells whether its label smoothing compares a label with the logits before it:
        one of the names that it knows. torch asks for it in `__repr__`, which shows the name of the class.
        """
        return _NAME_OF_DECODERS

    def __repr__(self) -> str:
        return super().__repr__().replace(_NAME_OF_DECODERS, type(self).__name__, 1)

    @property
    def base_model(self) -> "_Backbone":
        """What trl calls in order to multiply by the weight of the head itself: it gives `last_hidden_state`."""
        return _Backbone(self)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The arguments of `forward` for a step of generation without a cache, as peft asks for them.

        Arguments:
            input_ids: (batch, seqlen), all tokens.
            attention_mask: as in `forward`.
            kwargs: more of its arguments.

        `generate` does not call it: it has a cache. Raises TypeError or ValueError for what `forward` would refuse.
        """
        given, rest = _divided_by_name(kwargs, type(self).forward)
        check_options(self, rest)
        return {"input_ids": input_ids, "attention_mask": attention_mask} | given

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[int, Tensor]:
        """Uninitialised caches (batch_size, max_seqlen, 2, heads_kv, head_dim), by the number of their layer.

        For a block table give num_pages and page_size in the place of batch_size and max_seqlen.
        """
        return self.transformer.allocate_inference_cache(batch_size, max_seqlen, dtype, **kwargs)

    @property
    def max_positions(self) -> int | None:
        """How many positions it has an embedding for; None without learned positions."""
        positions = self.transformer.embeddings.max_position_embeddings
        return positions if positions > 0 else None

    @overload
    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        labels: None = None,
        *,
        shift_labels: None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        return_dict: Literal[True] | None = None,
        **options: Any,
    ) -> CausalLMOutput: ...

    @overload
    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        *,
        labels: Tensor,
        shift_labels: None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: Literal[True] | None = None,
        **options: Any,
    ) -> CausalLMLoss: ...

    @overload
    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        labels: None = None,
        *,
        shift_labels: Tensor,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: Literal[True] | None = None,
        **options: Any,
    ) -> CausalLMLoss: ...

    @overload
    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        labels: Tensor | None = None,
        *,
        shift_labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: Literal[False],
        **options: Any,
    ) -> tuple[Tensor]: ...

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
        labels: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        cp_plan: Plan | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **options: Any,  # transformers.Trainer takes every "label" in a signature for one that an evaluation needs
    ) -> CausalLMOutput | CausalLMLoss | tuple[Tensor]:
        """Logits of the next tokens, or with labels their loss.

        Arguments:
            input_ids: (batch, seqlen) int64.
            position_ids: as in `GPTModel.forward`.
            inference_params: see `flash_attn.utils.generation.InferenceParams`.
            num_last_tokens: give logits only for this many tokens at the end of each sequence; 0 means all.
            labels: (batch, seqlen), as transformers takes them: input_ids, with -100 for tokens that do not count.
                Each is compared with the logits of the token before it. Any other label that is not in the vocabulary
                is an error on the CPU; on a GPU, where reading it would wait for the device, and in a compiled graph,
                it does not count, like -100.
            attention_mask: (batch, seqlen), 1 for tokens and 0 for padding, as in `GPTModel.forward`. Padding does not
                count in the loss, neither as a label nor as the position that a label is predicted from.
            inputs_embeds: instead of input_ids, as in `GPTModel.forward`.
            loss_fn: instead of `linear_cross_entropy`, a function of hidden (batch, seqlen, features), the weight of
                the head (padded vocabulary, features), shift_labels, and the bias of the head or None; for example a
                `LinearCrossEntropyLoss` with label smoothing. With a group, it must know the group. With
                config.final_logit_softcapping, it gets this as the keyword softcap. Where the head is more than a
                product with its weight (hooks, an adapter, another class), it is called, and its logits are given to
                loss_fn.of_logits(logits, shift_labels), which a `LinearCrossEntropyLoss` has.
            num_items_in_batch: the loss is the sum over its labels divided by this number instead of their own, so that
                losses of several batches add up to the mean over all of them. It is the number of labels[:, 1:], or of
                shift_labels, that are not -100, as transformers.Trainer counts them: where labels of padding or of the
                token after it are among them, the sum without those is scaled to this number. Not with loss_fn.
            return_dict: False gives a plain tuple with the loss or the logits in it.
            cp_plan: as in `GPTModel.forward`. The labels are then shift_labels, as `cp_plan.shard_batch` makes them,
                and the loss is that of `cp_plan.mean_loss`, whose average over the ranks is the mean over all of their
                labels. With loss_fn or num_items_in_batch it is what they make of this rank's labels.
            cu_seqlens, max_seqlen: as in `GPTModel.forward`. The first token of a document is then no label, as it does
                not follow the token before it; shift_labels are taken as they are.
            options: shift_labels (batch, seqlen), instead of labels: the token that follows each of input_ids, or -100.
                What else transformers' models take may be given where it asks for nothing, as use_cache=False.

        Returns CausalLMOutput(logits) with logits (batch, seqlen or num_last_tokens, padded vocabulary); with a group,
        this process's part of the vocabulary, or all of it with inference_params. With labels or shift_labels, returns
        CausalLMLoss(loss): the mean over the labels that count, without the padding of the vocabulary, computed by
        `linear_cross_entropy`, which never holds all logits, unless the head is called to give them.

        Tokens see only those before them, so padding on the right changes no logits but its own: if its labels are
        -100, no mask is needed.

        Raises TypeError or ValueError for input_ids or labels that are no tensors, or of another dtype or shape, for a
        loss_fn that lacks what the head needs, for arguments of transformers' models that ask for something else (the
        error says what to do instead), and on the CPU for labels that are not in the vocabulary.
        """
        shift_labels = options.pop("shift_labels", None)
        check_options(self, options)
        if isinstance(input_ids, Tensor) and input_ids.dim() != 2:
            raise ValueError(f"input_ids must have shape (batch, seqlen), found {tuple(input_ids.shape)}")
        shape = tokens_of(input_ids, inputs_embeds).shape
        if cp_plan is not None:
            if labels is not None:
                raise ValueError(
                    "labels must be None with cp_plan, found a tensor: a rank does not have the token after its last "
                    "one. Give shift_labels, which cp_plan.shard_batch makes of labels"
                )
        hidden = self.transformer(
            input_ids,
            position_ids=position_ids,
            inference_params=inference_params,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            cp_plan=cp_plan,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )
        if inference_params is not None and hidden.dim() != 3:
            raise ValueError("config.sequence_parallel must be False with inference_params, found True")
        if checks.count("num_last_tokens", num_last_tokens) > 0:
            hidden = hidden[:, -num_last_tokens:]
        with layers_in_force():
            hidden = self._before_head(hidden)
            if labels is not None or shift_labels is not None:
                following = _following(labels, shift_labels, attention_mask, cu_seqlens, shape, num_last_tokens)
                loss = self._loss(hidden, following, loss_fn, num_items_in_batch, cp_plan)
                if num_items_in_batch is not None and (attention_mask is not None or cu_seqlens is not None):
                    loss = loss * _counted_by_trainers(labels, shift_labels, following)
                return as_asked(CausalLMLoss(loss=loss), return_dict)
            logits = self.lm_head(hidden)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.process_group is not None and inference_params is not None:
            parts, _ = all_gather_raw(logits.contiguous(), self.process_group)
            logits = torch.cat(parts.chunk(dist.get_world_size(self.process_group)), dim=-1)
        return as_asked(CausalLMOutput(logits=logits), return_dict)

    def _before_head(self, hidden):
        """What the head multiplies by its weight."""
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        return hidden if self.output_scale == 1.0 else hidden * self.output_scale

    def _loss(self, hidden, following, loss_fn, num_items_in_batch, cp_plan=None):
        if loss_fn is not None and num_items_in_batch is not None:
            raise ValueError("num_items_in_batch must be None with loss_fn, which takes its own mean, found both")
        by_tokens = hidden.dim() == 2
        following = following.flatten() if by_tokens else following
        options: dict[str, Any] = {} if self.softcap is None else dict(softcap=self.softcap)
        classes: dict[str, Any] = dict(num_classes=self.vocab_size, process_group=self.process_group)
        is_sum = cp_plan is not None and loss_fn is None and num_items_in_batch is None
        if loss_fn is None:
            xentropy.check_classes(following, self.vocab_size)
            if num_items_in_batch is not None:
                options |= dict(reduction="sum", token_weights=weights_of_items(following, num_items_in_batch))
            elif is_sum:
                options["reduction"] = "sum"
        head: Any = self.lm_head
        takes_logits = loss_fn is None or _takes_logits(loss_fn)
        if fusing.may_fuse(head, _HEADS, hidden, hooks_of_all=takes_logits):
            if loss_fn is None:
                loss_fn = functools.partial(linear_cross_entropy, sequence_parallel=by_tokens, **classes)
            weight = F.normalize(head.weight) if type(head) in _NORMED_HEADS else head.weight
            loss = loss_fn(hidden, weight, following, head.bias, **options)
        elif loss_fn is None:
            loss = cross_entropy_of_logits(head(hidden), following, **options, **classes)
        elif takes_logits:
            loss = loss_fn.of_logits(head(hidden), following, **options)
        else:
            raise TypeError(
                "loss_fn must have a method of_logits, as LinearCrossEntropyLoss has, where lm_head must be called (it "
                "has hooks or an adapter, or is of another class): it would compute with the weight alone, "
                f"found {loss_fn!r}"
            )
        return cp_plan.mean_loss(loss, (following != -100).sum()) if is_sum else loss

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Also takes state dicts of earlier releases, with `transformer.ln_0`, which are changed in place."""
        if "transformer.ln_0.weight" in state_dict:
            _shift_norms(state_dict, settings(self.config).n_layer)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def _divided_by_name(options, function):
    """Keyword arguments that a function names, and all others."""
    own = inspect.signature(function).parameters
    given = {name: value for name, value in options.items() if name in own}
    return given, {name: value for name, value in options.items() if name not in own}


class _BackboneOutput(ModelOutput):
    last_hidden_state: Tensor


class _Backbone:
    """A GPTLMHeadModel up to its head, called as transformers' models are; with the attributes of its `GPTModel`."""

    def __init__(self, model: GPTLMHeadModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.transformer, name)

    def __call__(self, input_ids: Tensor | None = None, **kwargs: Any) -> _BackboneOutput:
        """`last_hidden_state`, of which logits are the product with the weight of the head.

        Raises ValueError for a head that is more than this product.
        """
        model, s = self._model, settings(self._model.config)
        if s.padded_vocab_size != s.vocab_size or s.norm_head:
            field = "norm_head" if s.padded_vocab_size == s.vocab_size else "pad_vocab_size_multiple"
            raise ValueError(
                f"config.{field} must leave the head a product with its weight for base_model, found "
                f"{getattr(s, field)}: call the model itself with labels, as transformers.Trainer does"
            )
        given, rest = _divided_by_name(kwargs, type(model.transformer).forward)
        rest.pop("return_dict", None)
        check_options(model, rest)
        return _BackboneOutput(last_hidden_state=model._before_head(model.transformer(input_ids, **given)))


class _NormedHead(nn.Linear):
    """A head whose rows are normalised to a length of 1 in each call, as Baichuan 2 has it."""

    def forward(self, input: Tensor) -> Tensor:
        """Logits (..., vocabulary) of an input (..., features)."""
        return F.linear(input, F.normalize(self.weight), self.bias)


class _ParallelNormedHead(ColumnParallelLinear):
    """`_NormedHead` with its part of the vocabulary."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) to (..., vocabulary of this process)."""
        return fused_dense_func(
            x,
            F.normalize(self.weight),
            self.bias,
            process_group=self.process_group,
            sequence_parallel=self.sequence_parallel,
        )


# Heads that a loss of hidden states can stand for, and those of them whose weight it gets normalised.
_NORMED_HEADS = _NormedHead, _ParallelNormedHead
_HEADS = *PLAIN_LINEAR, ColumnParallelLinear, *_NORMED_HEADS


def _takes_logits(loss_fn):
    """Whether loss_fn.of_logits is the loss that calling loss_fn gives, also of a class that derives from ours."""
    cls = type(loss_fn)
    if getattr(cls, "of_logits", None) is LinearCrossEntropyLoss.of_logits:
        return cls.forward is LinearCrossEntropyLoss.forward
    return hasattr(loss_fn, "of_logits")


def _following(labels, shift_labels, attention_mask, cu_seqlens, shape, num_last_tokens):
    """The label of each position: the token after it, or -100."""
    if labels is not None and shift_labels is not None:
        raise ValueError("labels and shift_labels must not be given together")
    name, given = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    checks.tensor(name, given)
    if given.shape != shape or num_last_tokens > 0:
        raise ValueError(
            f"{name} must have the shape {tuple(shape)} of input_ids, without num_last_tokens, "
            f"found {tuple(given.shape)} and {num_last_tokens}"
        )
    is_padding = None if attention_mask is None else ~attention_mask.bool()
    if labels is not None:
        given = labels if is_padding is None else labels.masked_fill(is_padding, -100)
        if cu_seqlens is not None:
            given = given.masked_fill(_positions_in_documents(cu_seqlens, shape) == 0, -100)
        given = F.pad(given[:, 1:], (0, 1), value=-100)
    return given if is_padding is None else given.masked_fill(is_padding, -100)


def _counted_by_trainers(labels, shift_labels, following):
    """How many labels there are for transformers.Trainer, which knows no padding, divided by how many have a loss."""
    counted = (labels[:, 1:] if shift_labels is None else shift_labels) != -100
    return counted.sum() / (following != -100).sum().clamp(min=1)


def _shift_norms(state_dict, n_layer):
    """In earlier releases a block ended with the norm of the next one: move each norm to the block it now begins."""

    def move(source, target):
        for kind in ("weight", "bias"):
            if f"transformer.{source}.{kind}" in state_dict:
                state_dict[f"transformer.{target}.{kind}"] = state_dict.pop(f"transformer.{source}.{kind}")

    move(f"layers.{n_layer - 1}.norm2", "ln_f")
    for i in reversed(range(n_layer)):
        move(f"layers.{i}.norm1", f"layers.{i}.norm2")
        if i > 0:
            move(f"layers.{i - 1}.norm2", f"layers.{i}.norm1")
    move("ln_0", "layers.0.norm1")
