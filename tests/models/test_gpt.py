"""The decoder: its configuration, parts, dropout, memory and compilation; the families are in test_families.py."""

import copy
import functools
import types
import warnings

import pytest
import torch
import transformers
from torch import nn
from transformers import GPT2Config

from flash_attn.losses.linear_cross_entropy import LinearCrossEntropyLoss
from flash_attn.models import _config
from flash_attn.models._checkpoints import decoder
from flash_attn.models._family import families
from flash_attn.models.gpt import (
    GPTLMHeadModel,
    GPTModel,
    _init_weights,
    create_block,
    create_mixer_cls,
    create_mlp_cls,
)
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import FusedMLP, GatedMlp, Mlp
from flash_attn.ops.triton.layer_norm import RMSNorm
from flash_attn.ops.triton.mlp import FusedDenseSqreluDense
from flash_attn.utils.generation import InferenceParams

SIZES = dict(vocab_size=90, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
LLAMA = dict(
    n_positions=0,
    rotary_emb_fraction=1.0,
    rms_norm=True,
    activation_function="swiglu",
    qkv_proj_bias=False,
    out_proj_bias=False,
    mlp_fc1_bias=False,
    mlp_fc2_bias=False,
    tie_word_embeddings=False,
    n_head_kv=2,
    mlp_multiple_of=8,
)
HEADS = LLAMA | dict(head_dim=24, qk_norm=True)
_LINEAR = dict(rope_type="linear", factor=2.0)
PARALLEL = dict(n_positions=0, rotary_emb_fraction=0.5, parallel_block=True)
MODERN = HEADS | dict(
    activation_function="sqrelu", sliding_window=[4, None], final_logit_softcapping=3.0, use_flash_attn=True
)
FUSED = dict(use_flash_attn=True, fused_bias_fc=True, fused_dropout_add_ln=True)


def config_of(**options):
    return GPT2Config(**SIZES | NO_DROPOUT | options)


def ids(batch=2, seqlen=12, device="cpu"):
    return torch.randint(90, (batch, seqlen), device=device)


# The configuration


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(head_dim=0), r"config.head_dim must be positive or None, found 0"),
        (dict(n_head=5), r"config.n_embd must be a multiple of n_head, 5, without head_dim, found 64"),
        (dict(n_head_kv=3), r"config.n_head_kv must be a divisor of n_head, 4, found 3"),
        (dict(use_alibi=True), r"config.use_alibi must be False without use_flash_attn, found True"),
        (dict(alibi_scaled=True), r"config.alibi_scaled must be False without use_alibi, found True"),
        (dict(sliding_window=4), r"config.sliding_window must be None without use_flash_attn, found 4"),
        (dict(sliding_window=[4], use_flash_attn=True), r"config.sliding_window must be one value, or one for each of"),
        (
            dict(sliding_window=0, use_flash_attn=True),
            r"config.sliding_window must be None or a positive integer in each layer, found 0",
        ),
        (dict(sliding_window=[4, 2.5], use_flash_attn=True), r"config.sliding_window must be None or a positive"),
        (dict(n_layer=-1), r"config.n_layer must be at least 0, found -1"),
        (dict(n_inner=0), r"config.n_inner must be positive or None, found 0"),
        (dict(word_embed_proj_dim=0), r"config.word_embed_proj_dim must be positive or None, found 0"),
        (dict(embd_pdrop=1.5), r"config.embd_pdrop must be from 0 to 1, found 1.5"),
        (dict(initializer_range=-0.1), r"config.initializer_range must be at least 0, found -0.1"),
        (
            dict(rotary_emb_fraction=0.2),
            r"config.rotary_emb_fraction must be such that an even number of the 16 channels rotates, found 0.2",
        ),
        (
            dict(rotary_emb_scaling=dict(rope_type="linear", factor=2.0)),
            r"config.rotary_emb_scaling must be None without rotary_emb_fraction, found {",
        ),
        (
            dict(rotary_emb_fraction=1.0, rotary_emb_scaling=2.0),
            r"config.rotary_emb_scaling must be a dict with 'rope_type', found 2.0",
        ),
        (
            dict(rotary_emb_fraction=1.0, rotary_emb_scaling=dict(factor=2.0)),
            r"config.rotary_emb_scaling must be a dict with 'rope_type', found {'factor': 2.0}",
        ),
        (dict(residual_in_fp32=True, prenorm=False), r"config.residual_in_fp32 must be False without prenorm"),
        (dict(parallel_block=True, prenorm=False), r"config.parallel_block must be False without prenorm"),
        (
            dict(parallel_block_tied_norm=True),
            r"parallel_block_tied_norm must be False without parallel_block, found True",
        ),
        (dict(mlp_checkpoint_lvl=[0, 1]), r"mlp_checkpoint_lvl must be 0 without fused_mlp, found \[0, 1\]"),
        (dict(activation_function="tanh"), r"config.activation_function must be one of 'gelu', .* found 'tanh'"),
        (
            dict(activation_function="gelu", fused_mlp=True),
            r"config.activation_function must be one of .* with config.fused_mlp",
        ),
        (
            dict(fused_mlp=True, fused_dense_sqrelu_dense=True),
            r"config.fused_mlp must be False with fused",
        ),
        (dict(rotary_emb_dim=16), r"config.rotary_emb_dim must be left out, .* found 16"),
        (dict(rotary_emb_fraction=2.0), r"config.rotary_emb_fraction must be from 0 to 1, found 2.0"),
        (dict(add_cross_attention=True), r"config.add_cross_attention must be False or None, .* found True"),
        (dict(quantization_config={"bits": 4}), r"config.quantization_config must be None, .* found {'bits': 4}"),
        (dict(final_logit_softcapping=0.0), r"config.final_logit_softcapping must be positive or None, found 0.0"),
        (
            dict(attn_logit_softcapping=30.0),
            r"config.attn_logit_softcapping must be None without use_flash_attn, found 30.0",
        ),
        (dict(input_norms=False, prenorm=False), r"config.input_norms must be True without prenorm and with parallel"),
        (dict(output_norms=True, parallel_block=True), r"config.output_norms must be False without prenorm and with"),
        (
            dict(output_norms=True, mup_residual_multiplier=0.5),
            r"config.mup_residual_multiplier must be 1 without prenorm, and with parallel_block or output_norms",
        ),
        (dict(qk_norm_over_heads=True), r"config.qk_norm_over_heads must be False without qk_norm, found True"),
        (dict(rotary_emb_fraction=[0.5]), r"config.rotary_emb_fraction must be one value, or one for each of the 2 l"),
        (dict(rotary_emb_fraction=[0.0, 2.0]), r"config.rotary_emb_fraction must be from 0 to 1, found \[0.0, 2.0\]"),
        (dict(rotary_emb_fraction=1.0, rotary_emb_base=[1e4, 0.0]), r"config.rotary_emb_base must be positive, found"),
        (
            dict(norm_bias=False, rms_norm=True),
            r"config.norm_bias must be True with rms_norm, which has no bias in any case",
        ),
    ],
)
def test_refused_configurations(options, says):
    with pytest.raises(ValueError, match=says):
        GPTLMHeadModel(config_of(**options), device="meta")


def test_other_configurations_go_through_from_config():
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96, vocab_size=90
    )
    with pytest.raises(ValueError, match="config must be a GPT2Config, found LlamaConfig; from_config takes those"):
        GPTLMHeadModel(config)
    assert GPTLMHeadModel.from_config(config, device="meta").config.rms_norm
    with pytest.raises(NotImplementedError, match=r"model_type must be one of gpt2, llama, .* found 'bert'"):
        GPTLMHeadModel.from_config(transformers.BertConfig())


HALF_ROTARY = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
FalconWithRotary = functools.partial(transformers.FalconConfig, alibi=False)
TINY = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=90)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (lambda: transformers.LlamaConfig(**TINY, hidden_act="relu"), "config.hidden_act must be one of 'silu'"),
        (lambda: transformers.Gemma2Config(hidden_activation="relu"), "config.hidden_activation must be one of 'silu'"),
        (
            lambda: types.SimpleNamespace(**TINY, model_type="llama", rope_parameters=dict(rope_type="su", factor=2.0)),
            r"config.rope_parameters\['rope_type'\] must be 'default' or one of 'linear', .* found 'su'",
        ),
        (
            lambda: types.SimpleNamespace(
                **TINY,
                model_type="phi3",
                max_position_embeddings=64,
                original_max_position_embeddings=16,
                rope_parameters=dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 7),
            ),
            r"config.rope_parameters\['long_factor'\] must have a number for each of the 8 pairs that turn, found 7",
        ),
        (
            lambda: types.SimpleNamespace(
                **TINY, model_type="llama", rope_parameters={"full_attention": dict(rope_theta=1e4)}
            ),
            "config.rope_parameters must be the same for all layers, found {'full_attention'",
        ),
        (
            lambda: types.SimpleNamespace(
                **TINY,
                model_type="olmo3",
                rope_parameters={"full_attention": dict(rope_theta=1e4)},
                layer_types=["full_attention", "sliding_attention"],
            ),
            "config.layer_types must be 'full_attention', .* found 'sliding_attention'",
        ),
        (lambda: transformers.CohereConfig(use_qk_norm=True), "config.use_qk_norm must be False, .* found True"),
        (lambda: transformers.StableLmConfig(qk_layernorm=True), "config.qk_layernorm must be False, .* found True"),
        (
            lambda: transformers.Gemma3TextConfig(use_bidirectional_attention=True),
            "config.use_bidirectional_attention must be None or False, .* found True",
        ),
        (
            lambda: types.SimpleNamespace(
                **TINY, model_type="ministral", sliding_window=4, layer_types=["chunked_attention"] * 2
            ),
            "config.layer_types must be 'full_attention' or 'sliding_attention', .* found 'chunked_attention'",
        ),
        *(
            (
                lambda kind=kind: kind(**TINY, rope_parameters=HALF_ROTARY),
                "config.partial_rotary_factor must be 1.0, .* found 0.5",
            )
            for kind in (transformers.LlamaConfig, transformers.Qwen3Config, FalconWithRotary)
        ),
        (lambda: transformers.OPTConfig(layerdrop=0.1), "config.layerdrop must be 0.0, .* found 0.1"),
        (lambda: transformers.GPTBigCodeConfig(multi_query=False), "config.multi_query must be True, .* found False"),
        (lambda: transformers.PhiConfig(qk_layernorm=True), "config.qk_layernorm must be False, .* found True"),
    ],
)
def test_refused_configurations_of_families(config, says):
    with pytest.raises(ValueError, match=says):
        GPTLMHeadModel.from_config(config(), device="meta")


def test_refused_families():
    for kind in (transformers.Qwen3MoeConfig, transformers.Gemma3nTextConfig, transformers.NemotronConfig):
        with pytest.raises(NotImplementedError, match=f"model_type must be one of .* found '{kind.model_type}'"):
            GPTLMHeadModel.from_config(kind(), device="meta")


def test_unknown_fields_are_reported():
    config = transformers.LlamaConfig(**TINY, invented=3, switched_off=False, rate=0.0, nothing=None, do_sample=False)
    message = r"LlamaConfig: these fields are not known, .*: \['invented', 'switched_off', 'rate'\]"
    with pytest.warns(UserWarning, match=message):
        GPTLMHeadModel.from_config(config, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GPTLMHeadModel.from_config(transformers.LlamaConfig(**TINY), device="meta")


MODEL_TYPES = sorted({each for family in families() for each in family.model_types} & set(transformers.CONFIG_MAPPING))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_ordinary_configurations_warn_of_nothing(model_type):
    """As classes of transformers, and as what config.json holds where transformers does not know the class."""
    config = transformers.CONFIG_MAPPING[model_type]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (config, types.SimpleNamespace(**config.to_dict())):
            if model_type != "gpt2" or each is config:
                decoder.to_gpt2_config(each)


# What the configurations of checkpoints on the hub have besides, or had before transformers 5.
_OLDER_YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64)
OLDER = {
    "gpt2": dict(n_ctx=1024, task_specific_params={"text-generation": {"max_length": 50}}),
    "gptj": dict(rotary=True, rotary_dim=8, scale_attn_weights=True, gradient_checkpointing=False),
    "opt": dict(prefix="</s>", activation_dropout=0.0),
    "gpt_neox": dict(attention_probs_dropout_prob=0, hidden_dropout_prob=0, rotary_emb_base=1e4, rotary_pct=0.25),
    "gpt_bigcode": dict(inference_runner=0, validate_runner_input=True, pre_allocate_kv_cache=False),
    "llama": dict(rope_theta=5e5, rope_scaling=None, pretraining_tp=1, max_sequence_length=2048),
    "qwen2": dict(rope_theta=1e6, use_sliding_window=False, sliding_window=32, max_window_layers=1),
    "qwen3": dict(rope_theta=1e6, use_sliding_window=False, sliding_window=None, max_window_layers=1),
    "smollm3": dict(
        rope_theta=5e6,
        max_window_layers=28,
        pretraining_tp=2,
        no_rope_layers=[1, 0],
        use_sliding_window=True,
        sliding_window=6,
    ),
    "gemma": dict(rope_theta=1e4, hidden_act="gelu"),
    "gemma2": dict(rope_theta=1e4, cache_implementation="hybrid", hidden_act="gelu_pytorch_tanh"),
    "gemma3_text": dict(
        rope_theta=1e6,
        rope_local_base_freq=1e3,
        cache_implementation="hybrid",
        sliding_window_pattern=2,
        rope_scaling=dict(rope_type="linear", factor=8.0),
    ),
    "olmo3": dict(rope_theta=5e5, rope_scaling=_OLDER_YARN),
    "exaone4": dict(rope_theta=1e6, sliding_window_pattern=2),
    "cohere": dict(rope_theta=8e6, model_max_length=131072, pretraining_tp=1, use_qk_norm=False),
    "cohere2": dict(
        rope_theta=5e4,
        rotary_pct=1.0,
        order_of_interleaved_layers="local_attn_first",
        sliding_window_pattern=2,
        position_embedding_type="rope_gptj",
        use_embedding_sharing=True,
        use_gated_activation=True,
        use_parallel_block=True,
        use_parallel_embedding=False,
        cache_implementation="hybrid",
    ),
    "phi": dict(rope_theta=1e4, partial_rotary_factor=0.5, rope_scaling=None, qk_layernorm=False),
    "phi3": dict(
        rope_theta=1e4,
        full_attn_mod=1,
        interpolate_factor=1,
        lm_head_bias=False,
        partial_rotary_factor=0.75,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_scaling=dict(type="longrope", short_factor=[1.0] * 6, long_factor=[2.0] * 6),
    ),
    "stablelm": dict(rope_theta=1e4, partial_rotary_factor=0.25),
    "starcoder2": dict(rope_theta=1e5, mlp_type="default", norm_type="layer_norm", scale_attn_weights=True),
}


@pytest.mark.parametrize("model_type", OLDER)
def test_configurations_of_checkpoints(model_type):
    """No warning; and without transformers' class, which brings them to their present form, they say the same."""
    kind = transformers.CONFIG_MAPPING[model_type]
    sizes = TINY | dict(num_key_value_heads=2, head_dim=16)
    sizes = {name: size for name, size in sizes.items() if hasattr(kind(), name)}
    config, plain = kind.from_dict(sizes | OLDER[model_type]), kind(**sizes).to_dict()
    for name in ("rope_parameters", "layer_types"):
        plain.pop(name, None)
    plain = types.SimpleNamespace(**plain | OLDER[model_type])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = _config.settings(decoder.to_gpt2_config(config))
        assert model_type == "gpt2" or _config.settings(decoder.to_gpt2_config(plain)) == expected


@pytest.mark.parametrize("model_type", [each for each in MODEL_TYPES if each != "gpt2"])
def test_heads_that_are_usually_tied(model_type):
    """A config.json that does not say whether they are means what transformers' class does."""
    config = transformers.CONFIG_MAPPING[model_type]()
    fields = config.to_dict()
    del fields["tie_word_embeddings"]
    found = _config.settings(decoder.to_gpt2_config(types.SimpleNamespace(**fields)))
    assert found.tie_word_embeddings == config.tie_word_embeddings


@pytest.mark.parametrize("model_type", ["gpt_neox", "llama", "phi", "phi3", "stablelm"])
def test_part_of_a_head_that_usually_turns(model_type):
    """A config.json that does not say how much of a head turns means what transformers' class does."""
    config = transformers.CONFIG_MAPPING[model_type]()
    fields = config.to_dict()
    del fields["rope_parameters"]
    found = _config.settings(decoder.to_gpt2_config(types.SimpleNamespace(**fields)))
    assert found.rotary_emb_fraction == config.rope_parameters.get("partial_rotary_factor", 1.0)


def test_rope_parameters_come_before_older_fields():
    """Of transformers' classes, which have read those already."""
    for config, older in (
        (transformers.PhiConfig(**TINY), dict(partial_rotary_factor=1.0, rope_theta=500.0)),
        (transformers.GPTNeoXConfig(**TINY), dict(rotary_pct=1.0, rope_theta=500.0)),
    ):
        expected = decoder.to_gpt2_config(config)
        for name, value in older.items():
            setattr(config, name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = decoder.to_gpt2_config(config)
        assert found.rotary_emb_fraction == expected.rotary_emb_fraction < 1.0
        assert found.rotary_emb_base == expected.rotary_emb_base == 1e4


def test_false_is_reported_where_true_is_usual():
    class Config(transformers.LlamaConfig):
        invented: bool = True
        other: bool = False

    with pytest.warns(UserWarning, match=r"Config: these fields are not known, .*: \['invented'\]"):
        GPTLMHeadModel.from_config(Config(**TINY, invented=False), device="meta")


def test_falcon_40b_in_its_first_form():
    """Which has no new_decoder_architecture, but says how many key heads there are."""
    fields = dict(vocab_size=90, hidden_size=64, alibi=False, bias=False, parallel_attn=True)
    first = types.SimpleNamespace(**fields, model_type="RefinedWeb", n_layer=2, n_head=4, n_head_kv=2)
    today = transformers.FalconConfig(
        **fields, num_hidden_layers=2, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, today = (_config.settings(decoder.to_gpt2_config(each)) for each in (first, today))
    assert (first.parallel_block, first.parallel_block_tied_norm, first.n_head_kv) == (True, False, 2)
    assert (today.parallel_block, today.parallel_block_tied_norm, today.n_head_kv) == (True, False, 2)


def test_unknown_fields_of_gpt2_are_reported():
    with pytest.warns(UserWarning, match=r"GPT2Config: these fields are not known, .*: \['invented'\]"):
        GPTLMHeadModel(config_of(invented=3, n_ctx=32), device="meta")


def test_gptj_without_rotary_dim():
    """All of a head turns."""
    fields = transformers.GPTJConfig(n_embd=64, n_head=4, n_layer=1).to_dict()
    found = [decoder.to_gpt2_config(types.SimpleNamespace(**fields | dict(rotary_dim=each))) for each in (None, 16)]
    assert found[0].rotary_emb_fraction == found[1].rotary_emb_fraction == 1.0


def test_rope_in_its_older_form():
    """As configurations of earlier releases have it."""
    config = transformers.LlamaConfig(**TINY)
    del config.rope_parameters
    config.rope_theta, config.rope_scaling = 5e5, {"type": "linear", "factor": 4.0}
    found = GPTLMHeadModel.from_config(config, device="meta").config
    assert found.rotary_emb_base == 5e5 and found.rotary_emb_scaling["factor"] == 4.0
    config.rotary_emb_base = 7.0
    assert GPTLMHeadModel.from_config(config, device="meta").config.rotary_emb_base == 7.0


def test_without_transformers(monkeypatch):
    """An object with the same names stands for its configuration."""
    monkeypatch.setattr(_config.importlib.util, "find_spec", lambda name: None)
    config = _config.gpt2_config(**SIZES | NO_DROPOUT)
    assert isinstance(config, _config.GPT2ConfigLike) and config.hidden_size == 64
    torch.manual_seed(0)
    found = GPTLMHeadModel(copy.deepcopy(config))
    monkeypatch.undo()
    torch.manual_seed(0)
    expected = GPTLMHeadModel(config_of())
    x = ids()
    assert torch.equal(found(x).logits, expected(x).logits)


# The parts


def test_parts():
    assert isinstance(create_mixer_cls(config_of(), layer_idx=1)(64), MHA)
    for options, kind in (
        (dict(), Mlp),
        (dict(activation_function="geglu"), GatedMlp),
        (dict(fused_mlp=True), FusedMLP),
        (dict(fused_dense_sqrelu_dense=True, activation_function="sqrelu"), FusedDenseSqreluDense),
    ):
        assert type(create_mlp_cls(config_of(**options))(64)) is kind
    block = create_block(config_of(**LLAMA), layer_idx=1)
    assert block.layer_idx == block.mixer.layer_idx == 1 and isinstance(block.norm1, RMSNorm)


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        (dict(), 0.25),
        (dict(scale_attn_weights=False), 1.0),
        (dict(scale_attn_by_inverse_layer_idx=True), 0.25 / 2),
        (dict(mup_scale_qk_dot_by_d=True, mup_attn_multiplier=3.0), 3 / 16),
    ],
)
def test_softmax_scale(options, scale):
    mixer = create_block(config_of(**options), layer_idx=1).mixer
    assert mixer.inner_attn.softmax_scale == mixer.inner_cross_attn.softmax_scale == pytest.approx(scale)


def test_dropout_moves_with_the_sums():
    model = GPTModel(config_of(embd_pdrop=0.1, resid_pdrop=0.2))
    found = [(layer.dropout1.p, layer.dropout2.p) for layer in model.layers]
    assert found == [(0.1, 0.2), (0.2, 0.2)] and model.drop_f.p == 0.2


def test_scaled_rotary_embedding():
    """A layer by itself has it, too; its parameters are checked."""
    scaling = dict(rope_type="linear", factor=2.0)
    options = dict(n_positions=0, rotary_emb_fraction=1.0)
    plain, scaled = (
        create_block(config_of(**options, rotary_emb_scaling=each), layer_idx=0).mixer.rotary_emb
        for each in (None, scaling)
    )
    assert torch.equal(scaled.inv_freq, plain.inv_freq / 2)
    for wrong, says in (
        (dict(rope_type="linear"), r"config.rope_parameters\['factor'\] must be given for rope_type 'linear'"),
        (dict(rope_type="su"), r"must be 'default' or one of 'linear', 'dynamic', 'llama3', 'yarn', .* found 'su'"),
    ):
        with pytest.raises(ValueError, match=says):
            GPTLMHeadModel(config_of(**options, rotary_emb_scaling=wrong))


def test_layers_share_one_rotary_embedding():
    model = GPTModel(config_of(**LLAMA))
    assert len({id(layer.mixer.rotary_emb) for layer in model.layers}) == 1
    options = LLAMA | dict(n_layer=5, rotary_emb_fraction=[1.0, 0.0, 1.0, 0.5, 1.0])
    model = GPTModel(config_of(**options, rotary_emb_base=[1e4, 1e4, 1e4, 1e4, 5.0]))
    assert not hasattr(model.layers[1].mixer, "rotary_emb")
    first, *others = (model.layers[i].mixer.rotary_emb for i in (0, 2, 3, 4))
    assert [each is first for each in others] == [True, False, False]


@pytest.mark.parametrize(
    "options", [dict(), LLAMA, HEADS, PARALLEL, dict(prenorm=False), dict(word_embed_proj_dim=48)], ids=str
)
def test_names_and_shapes(options):
    model = GPTLMHeadModel(config_of(**options, pad_vocab_size_multiple=8))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    s = _config.settings(model.config)
    width = s.word_embed_proj_dim or 64
    assert shapes["lm_head.weight"] == shapes["transformer.embeddings.word_embeddings.weight"] == (96, width)
    assert ("transformer.embeddings.position_embeddings.weight" in shapes) == (s.n_positions > 0)
    assert shapes["transformer.layers.1.mixer.Wqkv.weight"] == ((4 + 2 * s.heads_kv) * s.width_of_head, 64)
    assert shapes["transformer.layers.1.mixer.out_proj.weight"] == (64, 4 * s.width_of_head)
    assert shapes.get("transformer.layers.1.mixer.q_norm.weight") == ((s.width_of_head,) if s.qk_norm else None)
    assert ("transformer.ln_f.weight" in shapes) == s.prenorm
    assert ("transformer.layers.0.norm1.bias" in shapes) != s.rms_norm
    assert not any("rotary" in name for name in shapes)
    tied = model.lm_head.weight is model.transformer.embeddings.word_embeddings.weight
    assert tied == s.tie_word_embeddings


def test_first_weights():
    torch.manual_seed(0)
    model = GPTLMHeadModel(config_of(n_embd=256, n_inner=1024, mup_width_scale=0.25, initializer_range=0.1))
    layer = model.transformer.layers[0]
    for weight, std in (
        (layer.mixer.Wqkv.weight, 0.05),
        (layer.mixer.out_proj.weight, 0.05 / 2),
        (layer.mlp.fc2.weight, 0.05 / 2),
        (model.transformer.embeddings.word_embeddings.weight, 0.1),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.03)
    assert (layer.mixer.Wqkv.bias == 0).all()
    assert layer.mixer.Wqkv.weight._optim == {"lr_multiplier": 0.25}
    plain = nn.Sequential(nn.Linear(256, 256))
    _init_weights(plain[0], n_layer=1, initializer_range=1.0)
    assert plain[0].weight.std().item() == pytest.approx(1.0, rel=0.03)


def test_norms_of_earlier_releases():
    """There each norm belonged to the block before it."""
    model = GPTLMHeadModel(config_of())
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    state = model.state_dict()
    older, moves = (
        {},
        {"transformer.layers.0.norm1": "transformer.ln_0", "transformer.ln_f": "transformer.layers.1.norm2"},
    )
    moves |= {f"transformer.layers.{i}.norm2": f"transformer.layers.{i}.norm1" for i in range(2)}
    moves |= {"transformer.layers.1.norm1": "transformer.layers.0.norm2"}
    for name, tensor in state.items():
        owner, kind = name.rsplit(".", 1)
        older[f"{moves.get(owner, owner)}.{kind}"] = tensor
    other = GPTLMHeadModel(config_of())
    other.load_state_dict(older)
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in state.items())


# What it computes


VARIANTS = {
    "gpt2": dict(),
    "llama": LLAMA,
    "heads with norms": HEADS,
    "parallel": PARALLEL,
    "parallel, tied norm": PARALLEL | dict(parallel_block_tied_norm=True),
    "postnorm": dict(prenorm=False),
    "window": LLAMA | dict(sliding_window=[None, 4], use_flash_attn=True),
    "normed head, muP": dict(norm_head=True, mup_output_multiplier=2.0, mup_embeddings_multiplier=3.0),
    "dwconv": dict(attn_dwconv=True, attn_pdrop=0.0),
    "projected": dict(word_embed_proj_dim=48),
    "norms of outputs": HEADS | dict(output_norms=True, norm_zero_centered=True),
    "norms of outputs alone": LLAMA | dict(output_norms=True, input_norms=False, residual_in_fp32=True),
    "norms over heads": HEADS | dict(qk_norm_over_heads=True),
    "norms without bias": PARALLEL | dict(norm_bias=False),
    "residual factor": LLAMA | dict(mup_residual_multiplier=0.3),
    "soft caps": LLAMA | dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0, use_flash_attn=True),
    "modern": MODERN,
    "positions by layer": LLAMA
    | dict(rotary_emb_fraction=[0.5, 1.0], rotary_emb_base=[1e2, 1e5], rotary_emb_scaling=[None, _LINEAR]),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_fused_layers_are_the_plain_ones(name, device):
    """Forward, loss and gradients, in float32."""
    torch.manual_seed(0)
    plain = GPTLMHeadModel(config_of(**VARIANTS[name], lm_head_bias=True, initializer_range=0.2), device=device)
    for parameter in plain.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    options = VARIANTS[name] | FUSED | dict(lm_head_bias=True)
    fused = GPTLMHeadModel(config_of(**options), device=device)
    fused.load_state_dict(plain.state_dict())
    x = ids(device=device)
    torch.testing.assert_close(fused(x).logits, plain(x).logits, rtol=1e-4, atol=1e-4)
    for model in (plain, fused):
        model(x, labels=x).loss.backward()
    for (key, one), other in zip(fused.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


def rope_model(**options):
    torch.manual_seed(0)
    config = config_of(
        **LLAMA | FUSED | dict(n_head_kv=4, n_layer=1), rotary_emb_scaling=options, initializer_range=0.3
    )
    return GPTLMHeadModel(config).eval()


LONGROPE = dict(
    rope_type="longrope",
    factor=4.0,
    original_max_position_embeddings=12,
    short_factor=[1.0] * 8,
    long_factor=[1.0 + i for i in range(8)],
)
BY_LENGTH = [LONGROPE, dict(rope_type="dynamic", factor=3.0, original_max_position_embeddings=12)]


@pytest.mark.parametrize("scaling", BY_LENGTH, ids=lambda scaling: scaling["rope_type"])
@torch.no_grad()  # which leaves the graphs without a backward
def test_frequencies_by_length(scaling):
    """They do not depend on the calls before, compiled or not; a cache has those of the length that it has room for."""
    model, x = rope_model(**scaling), ids(seqlen=20)
    assert model.depends_on_capacity and not rope_model(**_LINEAR).depends_on_capacity
    expected = {n: rope_model(**scaling)(x[:, :n]).logits for n in (8, 12, 13, 20)}
    assert not torch.allclose(expected[20][:, :12], expected[12], atol=1e-2)
    compiled = torch.compile(rope_model(**scaling), fullgraph=True, backend="aot_eager")
    for function, lengths in ((model, (20, 8, 13, 12, 20)), (compiled, (20, 8, 20))):
        for n in lengths:
            torch.testing.assert_close(function(x[:, :n]).logits, expected[n])
    for n, capacity in ((7, 12), (7, 20), (16, 20), (13, 20), (7, 12)):
        output = model.generate(
            x[:, :n], max_length=capacity, teacher_outputs=x, return_dict_in_generate=True, output_scores=True
        )
        scores = torch.stack(list(output.scores), dim=1)
        torch.testing.assert_close(scores, expected[capacity][:, n - 1 : capacity - 1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("padding", [1, 64])
def test_loss_is_that_of_the_logits(padding, cap, device):
    """Of real classes, from each token for the one after it."""
    options = dict(pad_vocab_size_multiple=padding, initializer_range=0.2, final_logit_softcapping=cap)
    model = GPTLMHeadModel(config_of(**options), device=device)
    x = ids(device=device)
    labels = x.masked_fill(torch.rand(x.shape, device=device) < 0.3, -100)
    logits = model(x).logits[..., :90]
    expected = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(model(x, labels=labels).loss, expected)
    with pytest.raises(ValueError, match=r"labels must have the shape \(2, 12\) of input_ids"):
        model(x, labels=labels[:, 1:])


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_loss_with_labels_that_are_shifted_already(cap, device):
    options = dict(pad_vocab_size_multiple=64, initializer_range=0.2, final_logit_softcapping=cap)
    model = GPTLMHeadModel(config_of(**options), device=device)
    x, y = ids(device=device), ids(device=device)
    y[0, 3] = -100
    logits = model(x).logits.flatten(0, 1)
    expected = nn.functional.cross_entropy(logits[:, :90], y.flatten())
    torch.testing.assert_close(model(x, shift_labels=y).loss, expected)
    smoothed = LinearCrossEntropyLoss(label_smoothing=0.1)  # of all columns: the loss alone does not know of padding
    expected = nn.functional.cross_entropy(logits, y.flatten(), label_smoothing=0.1)
    torch.testing.assert_close(model(x, shift_labels=y, loss_fn=smoothed).loss, expected)
    with pytest.raises(ValueError, match=r"shift_labels must have the shape \(2, 12\) of input_ids"):
        model(x, shift_labels=y[:, 1:])
    with pytest.raises(ValueError, match="labels and shift_labels must not be given together"):
        model(x, labels=x, shift_labels=y)
    with pytest.raises(TypeError, match=r"labels must be a torch.Tensor, found list"):
        model(x, labels=x.tolist())


def test_what_a_call_does_not_return():
    model, x = GPTLMHeadModel(config_of()), ids()
    with pytest.raises(AttributeError, match="loss needs labels or shift_labels, found neither"):
        _ = model(x).loss
    with pytest.raises(AttributeError, match="logits are not computed with labels"):
        _ = model(x, labels=x).logits


@pytest.mark.parametrize("wrong", [-1, -101, 90, 95])
def test_labels_that_are_no_class(wrong, device):
    """An error where they can be read without waiting for a device; there, they do not count."""
    model = GPTLMHeadModel(config_of(pad_vocab_size_multiple=64), device=device)
    x = ids(device=device)
    labels, ignored = x.clone(), x.clone()
    labels[1, 5], ignored[1, 5] = wrong, -100
    if device.type == "cpu":
        with pytest.raises(ValueError, match=f"labels must be -100 or from 0 to 89, found {wrong}"):
            model(x, labels=labels)
    else:
        assert torch.equal(model(x, labels=labels).loss, model(x, labels=ignored).loss)
    assert model(x, labels=ignored).loss.isfinite()


@pytest.mark.parametrize(
    "options",
    [
        dict(use_flash_attn=True),
        dict(fused_dropout_add_ln=True),
        dict(rms_norm=True),
        dict(qk_norm=True),
    ],
    ids=str,
)
def test_float64_is_refused_where_operations_lack_it(options):
    (name,) = options
    says = f"dtype must be float32, float16 or bfloat16 with config.{name}, .* found torch.float64"
    with pytest.raises(ValueError, match=says):
        GPTLMHeadModel(config_of(**options), dtype=torch.float64)


@pytest.mark.parametrize("options", [dict(fused_mlp=True), PARALLEL, PARALLEL | dict(rope_scaling=_LINEAR)], ids=str)
def test_float64(options):
    x, model = ids(), GPTLMHeadModel(config_of(**options), dtype=torch.float64)
    logits = model(x).logits
    assert logits.dtype == torch.float64
    torch.testing.assert_close(model.float()(x).logits, logits.float())


def test_last_tokens(device):
    model = GPTLMHeadModel(config_of(), device=device)
    x = ids(device=device)
    torch.testing.assert_close(model(x, num_last_tokens=3).logits, model(x).logits[:, -3:])
    with pytest.raises(ValueError, match="num_last_tokens must be at least 0, found -1"):
        model(x, num_last_tokens=-1)
    with pytest.raises(ValueError, match=r"input_ids must have shape \(batch, seqlen\), found \(12,\)"):
        model(x[0])
    with pytest.raises(ValueError, match=r"input_ids.shape\[1\] must be at most 32, the number of positions, found 33"):
        model(ids(seqlen=33, device=device))


@pytest.mark.parametrize("name", ["gpt2", "llama", "window", "postnorm", "dwconv"])
def test_padding_changes_nothing(name, device):
    """Each row is what it is alone, whatever stands in the padding; with the positions that are given, too."""
    model = GPTLMHeadModel(config_of(**VARIANTS[name], initializer_range=0.2), device=device)
    x, mask = ids(batch=3, device=device), torch.zeros(3, 12, dtype=torch.int64, device=device)
    parts = slice(3, 12), slice(0, 7), slice(2, 9)
    for row, part in enumerate(parts):
        mask[row, part] = 1
    positions = (7 + mask.cumsum(1)).clamp(max=31)
    for options in (dict(), dict(position_ids=positions)):
        for each in (mask, mask.bool(), mask.float()):
            logits = model(x, attention_mask=each, **options).logits
            for row, part in enumerate(parts):
                alone = {key: value[row : row + 1, part] for key, value in options.items()}
                torch.testing.assert_close(logits[row, part], model(x[row : row + 1, part], **alone).logits[0])
    losses = [
        (nn.functional.cross_entropy(logits[row, part][:-1], x[row, part][1:], reduction="sum"))
        for row, part in enumerate(parts)
    ]
    expected = sum(losses) / sum(part.stop - part.start - 1 for part in parts)
    torch.testing.assert_close(model(x, attention_mask=mask, labels=x, position_ids=positions).loss, expected)
    shifted = nn.functional.pad(x[:, 1:], (0, 1)).masked_fill(nn.functional.pad(mask[:, 1:], (0, 1)) == 0, -100)
    found = model(x, attention_mask=mask, shift_labels=shifted, position_ids=positions).loss
    torch.testing.assert_close(found, expected)


def test_masks_that_are_refused(device):
    """An error where they can be read without waiting for a device; there, NaN."""
    model = GPTLMHeadModel(config_of(n_layer=1), device=device)
    compiled = torch.compile(model, backend="eager", fullgraph=True) if device.type == "cpu" else model
    x = ids(device=device)
    for wrong in (0, -1, 3):
        mask = torch.ones_like(x)
        mask[1, 4] = wrong
        if device.type == "cpu":
            says = rf"1 for the tokens of a row and 0 before and after them, found \[1, 1, 1, 1, {wrong}, .*\] in row 1"
            with pytest.raises(ValueError, match=says):
                model(x, attention_mask=mask)
        logits = compiled(x, attention_mask=mask).logits
        assert logits[0].isfinite().all() and logits[1].isnan().all()


@pytest.mark.parametrize("is_learned", [False, True])
def test_positions_of_several_sequences_in_a_row(is_learned, device):
    """Which a model would take for one: an error, or where they cannot be read, NaN."""
    config = config_of(**{} if is_learned else LLAMA, n_layer=1)
    model, x = GPTLMHeadModel(config, device=device), ids(device=device)
    expected, positions = model(x).logits, torch.arange(12, device=device)
    for given in (positions, positions + 3, positions.expand(2, -1)):
        assert torch.equal(model(x, position_ids=given).logits, expected) or (is_learned and given[..., 0].any())
    packed = torch.stack([positions, positions % 5])
    mask = torch.ones_like(x)
    mask[1, :5] = mask[1, 10:] = 0
    assert model(x, position_ids=packed, attention_mask=mask).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"position_ids must have shape \(12,\) or \(2, 12\), found \(11,\)"):
        model(x, position_ids=positions[1:], attention_mask=mask)
    if device.type == "cpu":
        rule = "not begin again at 0 within a row with" if is_learned else "count up by 1 in each row without"
        says = rf"position_ids must {rule} learned .*, found \[0, 1, 2, 3, 4, 0, 1, .*\] in row 1"
        with pytest.raises(ValueError, match=says):
            model(x, position_ids=packed)
        model = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():  # which leaves the graph without a backward
        logits = model(x, position_ids=packed).logits
    assert logits[0].isfinite().all() and logits[1].isnan().all()


def test_masks_that_do_not_fit(device):
    model, x = GPTLMHeadModel(config_of(), device=device), ids(device=device)
    mask = torch.ones_like(x)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(2, 12\), found \(2, 11\)"):
        model(x, attention_mask=mask[:, 1:])
    with pytest.raises(ValueError, match="inference_params must be None with attention_mask"):
        model(x, attention_mask=mask, inference_params=InferenceParams(12, 2))


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "heads with norms",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "parallel, tied norm")),
    ],
)  # a llama is what has heads with norms, without these
def test_compiled_training(name, device):
    """The whole model and its loss as one graph; and the logits alone, of one model."""
    layers = 2 if name == "heads with norms" or device.type == "cuda" else 1
    model = GPTLMHeadModel(config_of(**VARIANTS[name], **FUSED, n_layer=layers), device=device)
    x = ids(device=device)
    results = []
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        loss = function(x, labels=x).loss
        loss.backward()
        logits = [function(x).logits.detach()] if name == "gpt2" else []
        results.append((loss.detach(), logits, [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # a compiler of C++ runs for each kernel, which takes minutes on few cores
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_compiled_with_inductor(name, device):
    """As users compile: a step of training, and one of decoding behind a cache."""
    model = GPTLMHeadModel(config_of(**VARIANTS[name], **FUSED, n_layer=1), device=device)
    x, results = ids(device=device), []
    for function in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        loss = function(x, labels=x).loss
        loss.backward()
        lengths = torch.zeros(2, dtype=torch.int32, device=device)
        params = InferenceParams(12, 2, lengths_per_sample=lengths)
        with torch.no_grad():
            model(x[:, :11], inference_params=params)
            params.seqlen_offset = 11
            lengths.fill_(11)
            positions = torch.full_like(x[:, 11:], 11)
            logits = function(x[:, 11:], position_ids=positions, inference_params=params).logits
            torch.testing.assert_close(logits, model(x).logits[:, 11:], rtol=1e-4, atol=1e-5)
        results.append((loss.detach(), logits, [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, device):
    """Parameters and their gradients stay in float32."""
    model = GPTLMHeadModel(config_of(**LLAMA, **FUSED, initializer_range=0.1), device=device)
    x = ids(device=device)
    expected = model(x).logits
    with torch.autocast(device.type, dtype):
        logits = model(x).logits
        loss = model(x, labels=x).loss
    assert logits.dtype == dtype and loss.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.1 * expected.abs().max()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_meta_device(name, device):
    """A model without memory, which then gets some, and weights."""
    model = GPTLMHeadModel(config_of(**VARIANTS[name]), device=device)
    with torch.device("meta"):
        other = GPTLMHeadModel(config_of(**VARIANTS[name]))
    assert all(parameter.is_meta for parameter in other.parameters())
    other.to_empty(device=device)
    other.tie_weights()
    other.load_state_dict(model.state_dict())
    x = ids(device=device)
    assert torch.equal(model(x).logits, other(x).logits)


def test_a_model_learns(device):
    torch.manual_seed(0)
    model = GPTLMHeadModel(config_of(**LLAMA, **FUSED), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.arange(16, device=device).expand(4, -1) * 3
    for _ in range(30):
        loss = model(x, labels=x).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert torch.equal(model.eval().generate(x[:1, :4], max_length=16), x[:1])
