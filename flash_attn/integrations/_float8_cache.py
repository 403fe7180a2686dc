"""A cache of transformers that holds keys and values in float8, for the attention function of transformers.py.

What a layer of the cache returns goes through the code of a model to the attention function as it is. So the scales
travel as an attribute of the keys and of the values, and where a model hands on other tensors, their absence tells.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from flash_attn._errors import ArgumentError
from flash_attn._ops import checks
from flash_attn._ops.flash_attn_features import FLOAT8, LARGEST_FLOAT8
from flash_attn.functional import float8_descale, to_float8

_ATTRIBUTE = "flash_attn_descale"


def float8_cache(margin: float = 2.0) -> Any:
    """A cache of transformers in half the memory: it holds keys and values in float8, for models with `attention`.

    A layer takes the scales of each sequence and key head from the keys and values of its first call, and makes them
    larger where later ones need it: then what it holds is encoded anew, and loses up to half of a digit. It waits for
    the GPU in each call to know that. A prompt attends to what the cache holds of it, as all later tokens do. It grows
    like transformers' `DynamicCache`, and keeps all keys, those outside of a window as well; it has no static form, for
    compiled or captured generation. Tokens of padding count in the scales of their sequence.

    Models must be in 16 bits, with this library's attention function, without gradients, and not of MLA. For models
    with an encoder: `transformers.EncoderDecoderCache(float8_cache(), float8_cache())`.

    Arguments:
        margin: a scale has room for numbers so many times as large as the largest of the call that it was taken from.
            Numbers lose digits from 2^-14 of the largest that there is room for on, and are 0 below 2^-18 of it.

    Returns:
        A `transformers.Cache`, for the argument past_key_values of `generate` and of models, or cache as newer versions
        call it. Crop it, or reorder, repeat and select its sequences, as any other.

    Raises:
        ImportError: transformers is not installed, or older than 5.
        ValueError: margin is not at least 1; later, for keys that are not in 16 bits.
        NotImplementedError: later, where gradients are computed.

    Example:
        >>> import transformers
        >>> from flash_attn.integrations.transformers import float8_cache, register
        >>> config = transformers.LlamaConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> config.eos_token_id = None
        >>> model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register()).bfloat16()
        >>> model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, past_key_values=float8_cache()).shape
        torch.Size([1, 5])
    """
    margin = checks.as_float("margin", margin)
    checks.number("margin", margin, margin >= 1, "at least 1")
    try:
        from transformers.cache_utils import Cache
    except ImportError as error:
        raise ImportError("flash_attn.integrations.transformers needs transformers 5 or newer: install it") from error
    return Cache(layer_class_to_replicate=_layer_class(margin))


def refuse_gradients(*tensors: Tensor) -> None:
    """Raise where a derivative of one of these is wanted, which codes would not have."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise NotImplementedError(
            "past_key_values must not be a float8_cache where gradients are computed: it has none. Call the model "
            "under torch.no_grad(), or with another cache"
        )


def scales_of(key: Tensor, value: Tensor) -> dict[str, Any]:
    """The scales of keys and values in float8 as arguments of `flash_attn_with_kvcache`; empty for other keys."""
    if key.dtype != FLOAT8:
        return {}
    scales = {f"{name[0]}_descale": getattr(x, _ATTRIBUTE, None) for name, x in (("key", key), ("value", value))}
    for name, scale in scales.items():
        if scale is None:
            full = "key" if name[0] == "k" else "value"
            raise ArgumentError(
                f"{full} of dtype {FLOAT8} must be what a layer of `float8_cache` returned, which has a scale, found "
                "another tensor: this model changes it on its way to attention"
            )
    return scales


@functools.cache
def _layer_class(margin: float) -> type:
    from transformers.cache_utils import DynamicLayer

    class Float8Layer(DynamicLayer):
        """Keys and values (batch, heads_k, seqlen, head_dim) in float8, and their scales (batch, heads_k)."""

        keys: Any
        values: Any
        is_initialized: bool
        descales: tuple[Tensor, ...]

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            new = key_states, value_states
            if key_states.dtype not in (torch.float16, torch.bfloat16):
                raise ArgumentError(
                    "a float8_cache must have keys of 16 bits, as a model has after model.bfloat16(), found "
                    f"{key_states.dtype}"
                )
            refuse_gradients(*new)
            if not self.is_initialized:
                self.dtype, self.device = key_states.dtype, key_states.device
                self.descales = tuple(_descale(x) * margin for x in new)
            else:
                self._make_room(new)
            codes = [_encoded(x, scale) for x, scale in zip(new, self.descales, strict=True)]
            if self.is_initialized:
                codes = [torch.cat(x, dim=-2) for x in zip((self.keys, self.values), codes, strict=True)]
            self.keys, self.values = codes
            self.is_initialized = True
            for x, scale in zip(codes, self.descales, strict=True):
                setattr(x, _ATTRIBUTE, scale)
            return self.keys, self.values

        def _make_room(self, new: tuple[Tensor, ...]) -> None:
            """Make scales larger that `new` needs larger, and encode with them what is held."""
            held, scales = [self.keys, self.values], list(self.descales)
            for i, x in enumerate(new):
                needed = x.abs().masked_fill(~x.isfinite(), 0).amax((2, 3)).float() / LARGEST_FLOAT8
                grows = needed > scales[i]
                if grows.any():
                    before, scales[i] = scales[i], torch.where(grows, needed * margin, scales[i])
                    anew = _encoded(held[i].float() * before[..., None, None], scales[i])
                    anew, kept = anew.view(torch.uint8), held[i].view(torch.uint8)
                    held[i] = torch.where(grows[..., None, None], anew, kept).view(FLOAT8)  # others keep their bits
            (self.keys, self.values), self.descales = held, tuple(scales)

        def reorder_cache(self, beam_idx: Tensor) -> None:
            self.batch_select_indices(beam_idx)

        def batch_repeat_interleave(self, repeats: int) -> None:
            if self.is_initialized:
                self.batch_select_indices(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

        def batch_select_indices(self, indices: Tensor) -> None:
            if self.is_initialized:
                self.keys, self.values = (x[indices.to(x.device)] for x in (self.keys, self.values))
                self.descales = tuple(x[indices.to(x.device)] for x in self.descales)

    return Float8Layer


def _descale(x: Tensor) -> Tensor:
    """The scales (batch, heads_k) of x (batch, heads_k, seqlen, head_dim)."""
    return float8_descale(x.flatten(0, 1).transpose(0, 1)).view(x.shape[:2])


def _encoded(x: Tensor, scale: Tensor) -> Tensor:
    return to_float8(x.transpose(1, 2), scale).transpose(1, 2)
