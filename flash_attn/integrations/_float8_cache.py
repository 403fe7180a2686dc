"""A cache of transformers that holds keys and values in float8, for the attention function of transformers.py.

What a layer of the cache returns goes through the code of a model to the attention function as it is: `Codes`, which
refuse all else that a model might do with them. The scales travel as an attribute of the keys and of the values. Some
models take these from the layer itself, and where one hands on other tensors, the absence of the attribute tells.
"""

import functools
from collections.abc import Callable
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
        call it. Crop, copy and pickle it, or reorder, repeat and select its sequences, as any other.

    Raises:
        ImportError: transformers is not installed, or older than 5.
        ValueError: margin is not at least 1; later, for keys that are not in 16 bits, and for models that do not hand
            keys and values to `attention`.
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
    return Cache(layer_class_to_replicate=functools.partial(_layer_class(), margin))


def refuse_gradients(*tensors: Tensor) -> None:
    """Raise where a derivative of one of these is wanted, which codes would not have."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise NotImplementedError(
            "past_key_values must not be a float8_cache where gradients are computed: it has none. Call the model "
            "under torch.no_grad(), or with another cache"
        )


class Codes(Tensor):
    """Keys or values in float8 on their way to attention, which takes `codes` instead.

    They may be asked for what they are, as Dynamo does. What would compute with them is refused: it would see numbers
    without their scale, in a dtype that few functions take.
    """

    codes: Tensor

    @classmethod
    def of(cls, codes: Tensor, descale: Tensor) -> "Codes":
        """Codes that have this scale; `codes` gets it as an attribute."""
        setattr(codes, _ATTRIBUTE, descale)
        self = codes.as_subclass(cls)
        self.codes = codes
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cause = None
        try:
            found = super().__torch_function__(func, types, args, kwargs)
            if func.__name__ == "__get__" or not isinstance(found, Tensor):
                return found
        except (RuntimeError, TypeError) as error:
            cause = error
        raise ArgumentError(
            "past_key_values must not be a float8_cache unless keys and values go as they are to "
            "flash_attn.integrations.transformers.attention, found a call of "
            f"{torch.overrides.resolve_name(func) or func.__name__}: load the model with attn_implementation="
            "register(), or use another cache where a model computes with cached keys itself, as those of MLA do"
        ) from cause


def codes_of(x: Tensor) -> Tensor:
    """The tensor in what a `float8_cache` hands to a model; other tensors as they are."""
    return getattr(x, "codes", x)


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


def __getattr__(name: str) -> Any:
    if name == "Float8Layer":
        return _layer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _layer_class() -> type:
    """The class of layers: made where transformers is at hand, once, and found as an attribute of this module."""
    from transformers.cache_utils import DynamicLayer

    class Float8Layer(DynamicLayer):
        """Keys and values (batch, heads_k, seqlen, head_dim) in float8, and their scales (batch, heads_k)."""

        __qualname__ = "Float8Layer"  # by which pickle finds it
        keys: Any
        values: Any
        is_initialized: bool
        descales: list[Tensor]

        def __init__(self, margin: float) -> None:
            super().__init__()
            self.margin = margin

        def __getstate__(self) -> dict[str, Any]:
            """The state, with codes as bytes, since pickle of PyTorch 2.13 refuses float8."""
            state = self.__dict__.copy()
            if self.is_initialized:
                state.update(keys=self.keys.view(torch.uint8), values=self.values.view(torch.uint8))
            return state

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.__dict__.update(state)
            if self.is_initialized:
                self._hold(self.keys.view(FLOAT8), self.values.view(FLOAT8))

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
                self.descales = [_descale(x) * self.margin for x in new]
            else:
                self._make_room(new)
            codes = [_encoded(x, scale) for x, scale in zip(new, self.descales, strict=True)]
            if self.is_initialized:
                codes = [torch.cat(x, dim=-2) for x in zip((self.keys, self.values), codes, strict=True)]
            self.is_initialized = True
            return self._hold(*codes)

        def _hold(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            """Hold these codes; return them as they go to attention."""
            self.keys, self.values = keys, values
            return Codes.of(keys, self.descales[0]), Codes.of(values, self.descales[1])

        def _make_room(self, new: tuple[Tensor, ...]) -> None:
            """Make scales larger that `new` needs larger, and encode with them what is held."""
            held, scales = [self.keys, self.values], list(self.descales)
            for i, x in enumerate(new):
                needed = x.abs().masked_fill(~x.isfinite(), 0).amax((2, 3)).float() / LARGEST_FLOAT8
                grows = needed > scales[i]
                if grows.any():
                    before, scales[i] = scales[i], torch.where(grows, needed * self.margin, scales[i])
                    anew = _encoded(held[i].float() * before[..., None, None], scales[i])
                    anew, kept = anew.view(torch.uint8), held[i].view(torch.uint8)
                    held[i] = torch.where(grows[..., None, None], anew, kept).view(FLOAT8)  # others keep their bits
            (self.keys, self.values), self.descales = held, scales

        def reorder_cache(self, beam_idx: Tensor) -> None:
            self.batch_select_indices(beam_idx)

        def batch_repeat_interleave(self, repeats: int) -> None:
            if self.is_initialized:
                self.batch_select_indices(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

        def batch_select_indices(self, indices: Tensor) -> None:
            if self.is_initialized:
                held = (x[indices.to(x.device)] for x in (self.keys, self.values, *self.descales))
                keys, values, *self.descales = held
                self._hold(keys, values)

    return Float8Layer


def _descale(x: Tensor) -> Tensor:
    """The scales (batch, heads_k) of x (batch, heads_k, seqlen, head_dim)."""
    return float8_descale(x.flatten(0, 1).transpose(0, 1)).view(x.shape[:2])


def _encoded(x: Tensor, scale: Tensor) -> Tensor:
    return to_float8(x.transpose(1, 2), scale).transpose(1, 2)
