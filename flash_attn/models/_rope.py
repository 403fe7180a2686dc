"""Rotary embeddings that reach farther than they were trained: the frequencies of `linear`, `llama3` and `yarn`.

A configuration has them as rotary_emb_scaling, a dict with "rope_type" and the parameters that transformers documents.
"""

import math
from typing import Any

import torch
from torch import Tensor

from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.models._config import Reader, Settings, refuse_unless

_DEFAULT = ("default", "mrope_default")


def rope_fields(read: Reader) -> dict[str, Any]:
    """Our fields for the rotary embedding of a configuration of transformers, in its older and its present form."""
    older, present = read("rope_scaling", default={}), read("rope_parameters", default={})
    parameters = dict(older) | dict(present)
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ValueError(f"config.rope_parameters must be the same for all layers, found {parameters}")
    base = read("rotary_emb_base", "rope_theta", default=parameters.get("rope_theta", 10000.0))
    fraction = read("rotary_pct", "partial_rotary_factor", default=parameters.get("partial_rotary_factor", 1.0))
    fields: dict[str, Any] = {"rotary_emb_base": float(base), "rotary_emb_fraction": float(fraction)}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    longest = read("max_position_embeddings", "n_positions")
    if kind not in _DEFAULT:
        drop = ("rope_theta", "partial_rotary_factor", "type")
        scaling = {name: value for name, value in parameters.items() if name not in drop} | {"rope_type": kind}
        if scaling.get("original_max_position_embeddings") is None:
            scaling["original_max_position_embeddings"] = longest
        _check(scaling, fraction)
        fields["rotary_emb_scaling"] = scaling
    return fields


def whole_rope_fields(read: Reader) -> dict[str, Any]:
    """The same for families that rotate whole heads: their models in transformers do not read a part of them."""
    fields = rope_fields(read)
    refuse_unless("partial_rotary_factor", fields["rotary_emb_fraction"], (1.0,))
    return fields


def rotary_embedding(s: Settings, device: torch.device | str | None = None) -> RotaryEmbedding:
    """The rotary embedding that all layers share; on the CPU if the model is on the meta device, as it is no weight."""
    device = "cpu" if torch.empty(0, device=device).is_meta else device
    if s.rotary_emb_scaling is not None:
        _check(s.rotary_emb_scaling, s.rotary_emb_fraction)
        return _ScaledRotaryEmbedding(s, device)
    return RotaryEmbedding(s.rotary_dim, s.rotary_emb_base, s.rotary_emb_interleaved, s.rotary_emb_scale_base, device)


def attention_factor(s: Settings) -> float:
    """What YaRN multiplies queries and keys by; their scores are multiplied by its square."""
    scaling = s.rotary_emb_scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _magnitude(scaling["factor"], mscale) / _magnitude(scaling["factor"], mscale_all_dim)
    return _magnitude(scaling["factor"], 1.0)


def _magnitude(factor, mscale):
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _check(scaling, fraction):
    kind = scaling["rope_type"]
    if kind not in _SCALED:
        raise ValueError(
            f"config.rope_parameters['rope_type'] must be 'default' or one of {', '.join(map(repr, _SCALED))}, "
            f"since others depend on the length of a sequence; found {kind!r}"
        )
    for name in _NEEDED[kind]:
        if scaling.get(name) is None:
            raise ValueError(f"config.rope_parameters[{name!r}] must be given for rope_type {kind!r}, found None")
    if kind == "yarn" and fraction != 1:
        raise ValueError(f"config.partial_rotary_factor must be 1 with rope_type 'yarn', found {fraction}")


class _ScaledRotaryEmbedding(RotaryEmbedding):
    """A rotary embedding with frequencies of its own."""

    def __init__(self, s, device):
        self._scaling = s.rotary_emb_scaling
        super().__init__(s.rotary_dim, s.rotary_emb_base, s.rotary_emb_interleaved, s.rotary_emb_scale_base, device)

    def _compute_inv_freq(self, device=None):
        return _SCALED[self._scaling["rope_type"]](super()._compute_inv_freq(device), self._scaling, self.base)

    def extra_repr(self):
        return f"{super().extra_repr()}, scaling={self._scaling}"


def _linear(frequencies: Tensor, scaling: dict[str, Any], base: float) -> Tensor:
    """Positions are divided by a factor (Chen et al., arXiv:2306.15595)."""
    return frequencies / scaling["factor"]


def _llama3(frequencies: Tensor, scaling: dict[str, Any], base: float) -> Tensor:
    """Slow pairs are slowed down by a factor, fast ones stay, between them it goes over evenly."""
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # within the trained length
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling["factor"])


def _yarn(frequencies: Tensor, scaling: dict[str, Any], base: float) -> Tensor:
    """The same by the number of a pair instead of its turns (Peng et al., arXiv:2309.00071)."""
    pairs = len(frequencies)

    def pair_that_turns(times):
        return pairs * math.log(scaling["original_max_position_embeddings"] / (times * 2 * math.pi)) / math.log(base)

    low, high = pair_that_turns(scaling.get("beta_fast") or 32), pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    number = torch.arange(pairs, dtype=torch.float32, device=frequencies.device)
    slowed = ((number - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies * (1 - slowed + slowed / scaling["factor"])


_SCALED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
