"""Rotary embeddings that are scaled to reach farther than in training: frequencies, and the factor of the tables.

A configuration has them as rotary_emb_scaling, a dict with "rope_type" and the parameters that transformers documents.

With `dynamic` and `longrope` the frequencies depend on the length of a sequence: here that of the longest row of the
batch. With a cache, whose keys cannot be rotated again, it is the length that the cache has room for.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_attn._ops import invariance
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.models._config import Reader, Settings, refuse_unless

_DEFAULT = ("default", "mrope_default")


def rope_fields(
    read: Reader,
    kinds: Sequence[str] | None = None,
    local_base: float | None = None,
    *,
    older: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    usual_fraction: float = 1.0,
) -> dict[str, Any]:
    """Our fields for the rotary embedding of a configuration of transformers, in its older and its present form.

    kinds, local_base: given for models whose layers with a window have a rotary embedding of their own: the kind of
    each layer, and the base of layers with a window in the older form; None means the base of the others.
    older: the names of base and fraction in the older form, which is read where rope_parameters lacks them.
    usual_fraction: the fraction if the configuration does not name one.
    """
    parameters = dict(read("rope_scaling", default={})) | dict(read("rope_parameters", default={}))
    older_base, older_fraction = read(older[0], default=10000.0), read(older[1], default=usual_fraction)
    base = read("rotary_emb_base", default=parameters.get("rope_theta", older_base))
    fraction = parameters.get("partial_rotary_factor", older_fraction)
    longest = read("max_position_embeddings", "n_positions")
    original = read("original_max_position_embeddings", default=longest)
    of_kinds = {kind: value for kind, value in parameters.items() if isinstance(value, dict)}
    if kinds is None:
        if of_kinds:
            raise ValueError(f"config.rope_parameters must be the same for all layers, found {parameters}")
        return _fields(parameters, base, fraction, longest, original)
    if not of_kinds:
        local = {} if local_base is None else {"rope_theta": local_base}
        of_kinds = {"full_attention": parameters, "sliding_attention": local}
    fields = {}
    for kind, value in of_kinds.items():
        own = value.get("rope_theta", base), value.get("partial_rotary_factor", fraction)
        fields[kind] = _fields(value, *own, longest, original)
    for kind in kinds:
        refuse_unless("layer_types", kind, tuple(fields))
    return {name: [fields[kind].get(name) for kind in kinds] for each in fields.values() for name in each}


def _fields(parameters, base, fraction, longest, original):
    """The fields of one rotary embedding."""
    fields: dict[str, Any] = {"rotary_emb_base": float(base), "rotary_emb_fraction": float(fraction)}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _DEFAULT:
        drop = ("rope_theta", "partial_rotary_factor", "type")
        scaling = {name: value for name, value in parameters.items() if name not in drop} | {"rope_type": kind}
        if scaling.get("original_max_position_embeddings") is None:
            scaling["original_max_position_embeddings"] = original
        if kind == "dynamic":  # scales from the length that the configuration names
            scaling["original_max_position_embeddings"] = longest
        if kind in ("longrope", "yarn") and scaling.get("factor") is None and longest is not None:
            scaling["factor"] = longest / scaling["original_max_position_embeddings"]
        _check(scaling, None)
        fields["rotary_emb_scaling"] = scaling
    return fields


def whole_rope_fields(
    read: Reader, kinds: Sequence[str] | None = None, local_base: float | None = None
) -> dict[str, Any]:
    """`rope_fields` for families that rotate whole heads: their models in transformers read no fraction."""
    fields = rope_fields(read, kinds, local_base)
    found = fields["rotary_emb_fraction"]
    for fraction in found if isinstance(found, list) else (found,):
        refuse_unless("partial_rotary_factor", fraction, (1.0,))
    return fields


def same_head_dim(read: Reader) -> dict[str, Any]:
    """No fields: refuses a head_dim that these models in transformers use for the rotary embedding only."""
    width = read.needed("hidden_size") // read.needed("num_attention_heads")
    refuse_unless("head_dim", read("head_dim", default=width), (width,))
    return {}


def turning_in(turns: Sequence[bool], fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a rotary embedding that only the layers have for which `turns` is true."""
    fields = fields | {"rotary_emb_fraction": [float(each) for each in turns]}
    return fields if any(turns) else fields | {"rotary_emb_scaling": None}


def rotary_embedding(
    s: Settings, layer_idx: int | None = None, device: torch.device | str | None = None
) -> RotaryEmbedding:
    """The rotary embedding of a layer; on the CPU if the model is on the meta device, since no checkpoint has it."""
    device = "cpu" if torch.empty(0, device=device).is_meta else device
    dim, base = s.rotary_dim(layer_idx), s.of_layer("rotary_emb_base", layer_idx)
    scaling = s.of_layer("rotary_emb_scaling", layer_idx)
    if scaling is None:
        return RotaryEmbedding(dim, base, s.rotary_emb_interleaved, s.rotary_emb_scale_base, device)
    _check(scaling, dim)
    return _ScaledRotaryEmbedding(scaling, dim, base, s.rotary_emb_interleaved, s.rotary_emb_scale_base, device)


def depends_on_length(s: Settings) -> bool:
    """Whether the angles of some layer depend on the length of a sequence."""
    scalings = (s.of_layer("rotary_emb_scaling", i) for i in range(s.n_layer))
    return any(scaling is not None and scaling["rope_type"] in _REGIMES for scaling in scalings)


def _check(scaling, dim):
    kind = scaling["rope_type"]
    if kind not in _SCALED:
        raise ValueError(
            f"config.rope_parameters['rope_type'] must be 'default' or one of {', '.join(map(repr, _SCALED))}, "
            f"found {kind!r}"
        )
    for name in _NEEDED[kind]:
        if scaling.get(name) is None:
            raise ValueError(f"config.rope_parameters[{name!r}] must be given for rope_type {kind!r}, found None")
    for name in ("short_factor", "long_factor") if kind == "longrope" and dim is not None else ():
        if len(scaling[name]) != dim // 2:
            raise ValueError(
                f"config.rope_parameters[{name!r}] must have a number for each of the {dim // 2} pairs that turn, "
                f"found {len(scaling[name])}"
            )


class _ScaledRotaryEmbedding(RotaryEmbedding):
    """A rotary embedding with scaled frequencies, whose tables may be multiplied by a factor."""

    def __init__(self, scaling, *args):
        self._scaling = scaling
        super().__init__(*args)

    def _compute_inv_freq(self, device=None):
        return self._scaled(1, device)

    def _scaled(self, seqlen, device):
        return _SCALED[self._scaling["rope_type"]](super()._compute_inv_freq(device), self._scaling, self.base, seqlen)

    def _tables(self, seqlen, device, dtype):
        if self._scaling["rope_type"] in _REGIMES:
            invariance.refuse_angles_of_length(f"rope_type={self._scaling['rope_type']!r}")
        return super()._tables(seqlen, device, dtype)

    def _frequencies(self, seqlen, device):
        by_length = self._scaling["rope_type"] in _REGIMES
        return self._scaled(seqlen, device) if by_length else super()._frequencies(seqlen, device)

    def _serves(self, rows, seqlen):
        regime = _REGIMES.get(self._scaling["rope_type"])
        same = regime is None or regime(rows, self._scaling) == regime(seqlen, self._scaling)
        return same and super()._serves(rows, seqlen)

    def _computed_tables(self, seqlen, device, dtype, position=None):
        tables = super()._computed_tables(seqlen, device, torch.promote_types(dtype, torch.float32), position)
        magnitude = _magnitude(self._scaling)
        return tuple(None if table is None else (magnitude * table).to(dtype) for table in tables)

    def extra_repr(self):
        return f"{super().extra_repr()}, scaling={self._scaling}"


def _magnitude(scaling: dict[str, Any]) -> float:
    """The factor by which YaRN and LongRoPE multiply the rotated channels of queries and keys."""
    kind, factor = scaling["rope_type"], scaling.get("factor", 1.0)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    if kind == "longrope":
        return math.sqrt(1 + math.log(max(factor, 1)) / math.log(scaling["original_max_position_embeddings"]))
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _of_yarn(factor, mscale) / _of_yarn(factor, mscale_all_dim)
    return _of_yarn(factor, 1.0)


def _of_yarn(factor, mscale):
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _linear(frequencies: Tensor, scaling: dict[str, Any], base: float, seqlen: int) -> Tensor:
    """Positions are divided by a factor (Chen et al., arXiv:2306.15595)."""
    return frequencies / scaling["factor"]


def _llama3(frequencies: Tensor, scaling: dict[str, Any], base: float, seqlen: int) -> Tensor:
    """Slow pairs are slowed down by a factor, fast ones are not, with a linear transition between them (Llama 3.1)."""
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # within the trained length
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling["factor"])


def _yarn(frequencies: Tensor, scaling: dict[str, Any], base: float, seqlen: int) -> Tensor:
    """As `_llama3`, with the transition linear in the number of the pair, not in its turns (YaRN, arXiv:2309.00071)."""
    pairs = len(frequencies)

    def pair_that_turns(times):
        return pairs * math.log(scaling["original_max_position_embeddings"] / (times * 2 * math.pi)) / math.log(base)

    low, high = pair_that_turns(scaling.get("beta_fast") or 32), pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    number = torch.arange(pairs, dtype=torch.float32, device=frequencies.device)
    slowed = ((number - low) / ((high - low) or 1e-3)).clamp(0, 1)
    return frequencies * (1 - slowed + slowed / scaling["factor"])


def _dynamic(frequencies: Tensor, scaling: dict[str, Any], base: float, seqlen: int) -> Tensor:
    """The base grows with the length of a sequence, once that is greater than in training (NTK-aware scaling)."""
    factor, width = scaling["factor"], 2 * len(frequencies)
    longer = factor * _length(seqlen, scaling) / scaling["original_max_position_embeddings"] - (factor - 1)
    powers = torch.arange(0, width, 2, dtype=torch.float32, device=frequencies.device) / width
    return 1.0 / (base * longer ** (width / (width - 2))) ** powers


def _longrope(frequencies: Tensor, scaling: dict[str, Any], base: float, seqlen: int) -> Tensor:
    """Each pair has a factor of its own, and another one in long sequences (Ding et al., arXiv:2402.13753)."""
    factors = scaling["long_factor" if _is_long(seqlen, scaling) else "short_factor"]
    return frequencies / torch.tensor(factors, dtype=torch.float32, device=frequencies.device)


def _length(seqlen, scaling):
    return max(seqlen, scaling["original_max_position_embeddings"])


def _is_long(seqlen, scaling):
    return seqlen > scaling["original_max_position_embeddings"]


_SCALED = {"linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}
_REGIMES = {"dynamic": _length, "longrope": _is_long}  # lengths for which these are equal have the same frequencies
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
