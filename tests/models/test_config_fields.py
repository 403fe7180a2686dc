"""No field of a configuration is ignored in silence.

Each does what it does in transformers' model of the same model_type, nothing included, or is refused by an error that
names it.
"""

import contextlib
import warnings

import pytest
import torch
import transformers
from families import CASES, ids_of

from flash_attn.models import _config
from flash_attn.models._family import families, find_family
from flash_attn.models.gpt import GPTLMHeadModel

# A configuration of each model_type of transformers.
PLAIN = {
    "gpt2": "gpt2",
    "llama": "llama gqa",
    "mistral": "mistral, no window",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "granite": "granite",
    "smollm3": "smollm3 without rotary embedding",
    "ministral": "ministral",
    "seed_oss": "seed_oss",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "exaone4": "exaone4 without windows",
    "cohere": "cohere",
    "cohere2": "cohere2",
    "stablelm": "stablelm",
    "phi3": "phi3",
    "phi": "phi",
    "starcoder2": "starcoder2",
    "opt": "opt",
    "gptj": "gptj",
    "gpt_neox": "gpt_neox",
    "falcon": "falcon",
    "gpt_bigcode": "bigcode",
}


def test_all_model_types_are_here():
    covered = {each for family in families() for each in family.model_types}
    assert set(PLAIN) == covered & set(transformers.CONFIG_MAPPING)
    assert all(CASES[name].config().model_type == model_type for model_type, name in PLAIN.items())


def with_fields(model_type, fields):
    """The plain configuration of a model_type with these fields, as config.json would hold it."""
    config = CASES[PLAIN[model_type]].config()
    plain = {name: value for name, value in config.to_dict().items() if name not in ("model_type", "architectures")}
    if "rope_theta" in fields:
        plain.pop("rope_parameters", None)
    for name in fields.keys() & {"layer_types", "no_rope_layers"}:
        fields = fields | {name: fields[name][: config.num_hidden_layers]}
    if fields.get("tie_word_embeddings") == "the other":
        fields = fields | {"tie_word_embeddings": not getattr(config, "tie_word_embeddings", True)}
    return type(config)(**plain | fields)


def logits_of_transformers(config, ids):
    """None where transformers itself has no model for a configuration."""
    torch.manual_seed(0)
    with contextlib.suppress(Exception), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        reference = transformers.AutoModelForCausalLM.from_config(config).eval()
        return dict(reference.state_dict()), reference(ids).logits
    return None


def assert_same_logits_or_refused(model_type, fields):
    if model_type == "gpt2" and fields.keys() & _config.FIELDS:
        pytest.skip("a field of ours")
    try:
        config = with_fields(model_type, fields)
    except Exception:
        pytest.skip("transformers refuses these fields")
    family = find_family(model_type=model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ours = GPTLMHeadModel(family.to_gpt2_config(config)).eval()
        except ValueError as error:
            assert any(name in str(error) for name in fields), error
            return
    ids = ids_of(config, batch=1, seqlen=12)
    reference = logits_of_transformers(config, ids)
    if reference is None:
        pytest.skip("transformers has no model with these fields")
    state_dict, expected = reference
    ours.load_state_dict(family.keys.remap(state_dict, ours.config))
    with torch.no_grad():
        difference = (ours(ids).logits - expected).abs().max().item()
    assert difference < 1e-3


_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
# Fields that several model_types have, each with another meaning or none in some of them.
FIELDS = [
    dict(is_causal=False),
    dict(sliding_window=5),
    dict(sliding_window=5, use_sliding_window=False),
    dict(sliding_window=5, layer_types=_LAYERS),
    dict(attention_bias=True),
    dict(head_dim=8),
    dict(hidden_activation="gelu"),
    dict(rope_theta=500.0),
    dict(rotary_pct=0.5),
    dict(partial_rotary_factor=0.5),
    dict(attn_logit_softcapping=2.0),
]
MORE_FIELDS = [
    dict(sliding_window=5, use_sliding_window=True),
    dict(max_window_layers=1),
    dict(sliding_window_pattern=2),
    dict(no_rope_layers=[1, 0, 1]),
    dict(mlp_bias=True),
    dict(attention_out_bias=True),
    dict(use_bias=False),
    dict(use_qkv_bias=True),
    dict(enable_bias=False),
    dict(bias=True),
    dict(hidden_act="gelu"),
    dict(activation_function="relu"),
    dict(activation="relu"),
    dict(tie_word_embeddings="the other"),
    dict(rotary_dim=4),
    dict(scale_attn_weights=False),
    dict(scale_attn_by_inverse_layer_idx=True),
    dict(layer_norm_elementwise_affine=False),
    dict(_remove_final_layer_norm=True),
    dict(apply_residual_connection_post_layernorm=True),
    dict(use_parallel_residual=False),
    dict(parallel_attn=False),
    dict(multi_query=False),
    dict(num_key_value_heads=1),
    dict(num_ln_in_parallel_attn=2),
    dict(n_inner=80),
    dict(ffn_hidden_size=80),
    dict(final_logit_softcapping=2.0),
    dict(logit_scale=0.3),
    dict(norm_type="rms_norm"),
    dict(residual_multiplier=0.3),
    dict(embedding_multiplier=0.3),
    dict(attention_multiplier=0.3),
    dict(logits_scaling=3.0),
    dict(query_pre_attn_scalar=7),
    dict(rms_norm_eps=0.1),
    dict(layer_norm_eps=0.1),
    dict(layer_norm_epsilon=0.1),
    dict(pretraining_tp=2),
    dict(clip_qkv=0.5),
    dict(use_cache=False),
]


def _named(cases):
    return [pytest.param(fields, id=", ".join(f"{name}={value}" for name, value in fields.items())) for fields in cases]


@pytest.mark.parametrize("fields", _named(FIELDS))
@pytest.mark.parametrize("model_type", PLAIN)
def test_fields_of_several_model_types(model_type, fields):
    assert_same_logits_or_refused(model_type, fields)


@pytest.mark.slow
@pytest.mark.parametrize("fields", _named(MORE_FIELDS))
@pytest.mark.parametrize("model_type", PLAIN)
def test_other_fields(model_type, fields):
    assert_same_logits_or_refused(model_type, fields)
