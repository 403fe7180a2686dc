"""What the configurations and the checkpoints of Llama and its many relatives have in common."""

from collections.abc import Iterable, Sequence
from typing import Any

from flash_attn.models._checkpoints.key_map import (
    EMBEDDINGS,
    FINAL_NORM,
    HEAD,
    KeyMap,
    Rule,
    each_layer,
    padded,
    queries_keys_values,
    stacked,
)
from flash_attn.models._config import Reader, refuse_unless

# For the `copied` and the `constant` of a ConfigMap.
COPIED: dict[str, str | tuple[str, ...]] = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_key_value_heads",
    "n_inner": "intermediate_size",
    "head_dim": "head_dim",
    "attn_pdrop": "attention_dropout",
    "layer_norm_epsilon": "rms_norm_eps",
    "pad_token_id": "pad_token_id",
    "tie_word_embeddings": "tie_word_embeddings",
}
CONSTANT: dict[str, Any] = {
    "n_positions": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "rms_norm": True,
    "tie_word_embeddings": False,
    "qkv_proj_bias": False,
    "out_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "mlp_multiple_of": 1,
}

_GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "geglu_tanh"),
}


def gated_activation(read: Reader, field: str = "hidden_act", default: str = "silu") -> dict[str, Any]:
    """The gated activation that a field names; which field depends on the model_type."""
    name = read(field, default=default)
    if name not in _GATED:
        raise ValueError(f"config.{field} must be one of {', '.join(map(repr, _GATED))}, found {name!r}")
    return {"activation_function": _GATED[name]}


def biases(read: Reader) -> dict[str, Any]:
    """Whether attention has biases, for the model_types that read attention_bias."""
    return dict.fromkeys(("qkv_proj_bias", "out_proj_bias"), read("attention_bias", default=False))


def windows(read: Reader, kinds: Sequence[str] | None = None) -> dict[str, Any]:
    """The window of each layer, for the model_types that have windows.

    kinds: the kind of each layer, if only some have the window; None if all have.
    """
    for kind in kinds or ():
        refuse_unless("layer_types", kind, ("full_attention", "sliding_attention"))
    window = read("sliding_window")
    if window is None:
        return {}
    if kinds is not None:
        window = [window if kind == "sliding_attention" else None for kind in kinds]
    if isinstance(window, list) and not any(window):
        return {}
    return {"sliding_window": window, "use_flash_attn": True}


def kinds_of_layers(read: Reader, every: int) -> list[str]:
    """layer_types; for older configurations without it, every layer has a window but each `every`-th."""
    pattern = read("sliding_window_pattern", default=every)  # a number, or letters such as "LLLG"
    every = len(pattern) if isinstance(pattern, str) else pattern
    layers = range(read("num_hidden_layers"))
    return read("layer_types") or kinds_by(every != 0 and (i + 1) % every != 0 for i in layers)


def kinds_by(have_windows: Iterable[bool]) -> list[str]:
    """layer_types of layers with and without a window."""
    return ["sliding_attention" if each else "full_attention" for each in have_windows]


def llama_like_keys(layer: dict[str, str | Rule]) -> KeyMap:
    """The table of names that these families share, with what a layer of one has in addition or names differently."""
    usual: dict[str, str | Rule] = {
        "mixer.Wqkv": queries_keys_values("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mixer.out_proj": "self_attn.o_proj",
        "mlp.fc1": stacked("mlp.up_proj", "mlp.gate_proj"),
        "mlp.fc2": "mlp.down_proj",
    }
    return KeyMap(
        {
            EMBEDDINGS: padded("model.embed_tokens", from_rows=True),
            FINAL_NORM: "model.norm",
            HEAD: padded("lm_head", from_rows=True),
            **each_layer("model.layers.{i}.", usual | layer),
        },
        spellings=[(r"^(embed_tokens|norm|layers)\.", r"model.\1.")],
    )
