"""The families of decoders as data: tiny configurations, and the models that are their references."""

import dataclasses
from collections.abc import Callable

import torch
import transformers
from references import Baichuan, BaichuanConfig, Btlm, BtlmConfig
from transformers import (
    Cohere2Config,
    CohereConfig,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from flash_attn.models._family import find_family

VOCAB = 96
_IDS = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2)
_SIZES = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3) | _IDS
_SIZES_GPT = dict(n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3) | _IDS
_LLAMA = dict(intermediate_size=96, pad_token_id=0) | _SIZES
_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
_YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
_THETA = dict(rope_type="default", rope_theta=1e4)
_LONGROPE = _THETA | dict(
    rope_type="longrope",
    partial_rotary_factor=0.75,
    short_factor=[1.0, 1.1, 1.2, 1.5, 2.0, 2.5],
    long_factor=[1.0, 1.5, 2.5, 4.0, 8.0, 16.0],
)
_FALCON = dict(alibi=False) | _SIZES


@dataclasses.dataclass(frozen=True)
class Case:
    """A family's configuration, and a function of it that makes the reference model."""

    family: str
    config: Callable
    model: Callable = transformers.AutoModelForCausalLM.from_config

    def ours(self):
        """The GPT2Config of our model."""
        return find_family(name=self.family).to_gpt2_config(self.config())

    def build(self):
        """(configuration, reference with random weights, GPT2Config of ours)."""
        config = self.config()
        reference = self.model(config).eval()
        with torch.no_grad():  # norms and biases, too, which begin with ones and zeros
            for parameter in reference.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        return config, reference, find_family(name=self.family).to_gpt2_config(config)


CASES = {
    "gpt2": Case("gpt2", lambda: GPT2Config(**_SIZES_GPT)),
    "gpt2, scores by layer": Case(
        "gpt2", lambda: GPT2Config(**_SIZES_GPT, scale_attn_by_inverse_layer_idx=True, n_inner=80)
    ),
    "llama": Case("llama", lambda: LlamaConfig(**_LLAMA)),
    "llama gqa": Case("llama", lambda: LlamaConfig(**_LLAMA, num_key_value_heads=2)),
    "llama theta": Case(
        "llama", lambda: LlamaConfig(**_LLAMA, rope_parameters=dict(rope_type="default", rope_theta=1e6))
    ),
    "llama tied, biases": Case(
        "llama", lambda: LlamaConfig(**_LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "llama gelu_fast": Case("llama", lambda: LlamaConfig(**_LLAMA, hidden_act="gelu_fast")),
    "llama linear": Case(
        "llama", lambda: LlamaConfig(**_LLAMA, rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))
    ),
    "llama 3": Case("llama", lambda: LlamaConfig(**_LLAMA, rope_parameters=_LLAMA3, max_position_embeddings=128)),
    "llama yarn": Case("llama", lambda: LlamaConfig(**_LLAMA, rope_parameters=_YARN, max_position_embeddings=64)),
    "llama yarn, factors": Case(
        "llama",
        lambda: LlamaConfig(**_LLAMA, rope_parameters=_YARN | dict(beta_fast=8.0, beta_slow=2.0, attention_factor=0.8)),
    ),
    "llama yarn, factor of the lengths": Case(
        "llama", lambda: LlamaConfig(**_LLAMA, rope_parameters=_YARN | dict(factor=None), max_position_embeddings=64)
    ),
    "llama yarn, slow pairs kept": Case(
        "llama",
        lambda: LlamaConfig(
            **_LLAMA,
            rope_parameters=_YARN
            | dict(
                beta_fast=1.0,
                beta_slow=32.0,
                original_max_position_embeddings=6400,
            ),
        ),
    ),
    "mistral": Case("llama", lambda: MistralConfig(**_LLAMA, num_key_value_heads=2, sliding_window=5)),
    "mistral with a field of qwen": Case(
        "llama", lambda: MistralConfig(**_LLAMA, num_key_value_heads=2, sliding_window=5, max_window_layers=1)
    ),
    "mistral, no window": Case("llama", lambda: MistralConfig(**_LLAMA, num_key_value_heads=2, sliding_window=None)),
    "qwen2": Case("llama", lambda: Qwen2Config(**_LLAMA, num_key_value_heads=2)),
    "qwen2 windows": Case(
        "llama",
        lambda: Qwen2Config(
            **_LLAMA, num_key_value_heads=4, use_sliding_window=True, sliding_window=6, max_window_layers=1
        ),
    ),
    "llama head_dim": Case("llama", lambda: LlamaConfig(**_LLAMA, num_key_value_heads=2, head_dim=32)),
    "mistral head_dim": Case(
        "llama", lambda: MistralConfig(**_LLAMA | dict(num_attention_heads=3), num_key_value_heads=1, head_dim=8)
    ),
    "qwen3": Case("llama", lambda: Qwen3Config(**_LLAMA, num_key_value_heads=2, head_dim=32)),
    "qwen3 mha, biases": Case(
        "llama", lambda: Qwen3Config(**_LLAMA, num_key_value_heads=4, head_dim=16, attention_bias=True)
    ),
    "qwen3 windows": Case(
        "llama",
        lambda: Qwen3Config(
            **_LLAMA,
            num_key_value_heads=4,
            head_dim=24,
            use_sliding_window=True,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"],
            tie_word_embeddings=True,
        ),
    ),
    "gemma 7B": Case("llama", lambda: GemmaConfig(**_LLAMA, num_key_value_heads=4, head_dim=32)),
    "gemma": Case("llama", lambda: GemmaConfig(**_LLAMA, num_key_value_heads=1, head_dim=16)),
    "gemma untied": Case(
        "llama", lambda: GemmaConfig(**_LLAMA, num_key_value_heads=1, head_dim=16, tie_word_embeddings=False)
    ),
    "granite": Case(
        "llama",
        lambda: GraniteConfig(
            **_LLAMA,
            num_key_value_heads=2,
            embedding_multiplier=3.0,
            attention_multiplier=0.1,
            residual_multiplier=0.4,
            logits_scaling=2.0,
        ),
    ),
    "smollm3": Case(
        "llama",
        lambda: SmolLM3Config(
            **_LLAMA | dict(num_hidden_layers=4),
            num_key_value_heads=2,
            rope_parameters=_THETA,
            use_sliding_window=True,
            sliding_window=6,
            no_rope_layer_interval=2,
        ),
    ),
    "smollm3 without rotary embedding": Case(
        "llama", lambda: SmolLM3Config(**_LLAMA, num_key_value_heads=2, rope_parameters=_YARN, no_rope_layers=[0, 0])
    ),
    "ministral": Case(
        "llama",
        lambda: MinistralConfig(
            **_LLAMA,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=5,
            layer_types=["full_attention", "sliding_attention"],
        ),
    ),
    "seed_oss": Case(
        "llama",
        lambda: SeedOssConfig(
            **_LLAMA, num_key_value_heads=2, head_dim=24, attention_dropout=0.0, residual_dropout=0.0
        ),
    ),
    "llama dynamic": Case(
        "llama",
        lambda: LlamaConfig(
            **_LLAMA, rope_parameters=_THETA | dict(rope_type="dynamic", factor=4.0), max_position_embeddings=16
        ),
    ),
    "gemma2": Case(
        "gemma2",
        lambda: Gemma2Config(
            **_LLAMA,
            num_key_value_heads=2,
            head_dim=24,
            query_pre_attn_scalar=40,
            sliding_window=6,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
        ),
    ),
    "gemma2 without caps": Case(
        "gemma2",
        lambda: Gemma2Config(
            **_LLAMA,
            num_key_value_heads=4,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=6,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
    ),
    "gemma3": Case(
        "gemma2",
        lambda: Gemma3TextConfig(
            **_LLAMA | dict(num_hidden_layers=3),
            num_key_value_heads=2,
            head_dim=24,
            query_pre_attn_scalar=40,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(
                full_attention=_THETA | dict(rope_type="linear", factor=8.0),
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
            ),
        ),
    ),
    "olmo2": Case("olmo2", lambda: Olmo2Config(**_LLAMA, num_key_value_heads=2)),
    "olmo3": Case(
        "olmo2",
        lambda: Olmo3Config(
            **_LLAMA | dict(num_hidden_layers=3),
            num_key_value_heads=4,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(full_attention=_YARN, sliding_attention=_THETA),
        ),
    ),
    "exaone4": Case(
        "olmo2",
        lambda: Exaone4Config(
            **_LLAMA | dict(num_hidden_layers=3), num_key_value_heads=2, sliding_window=6, sliding_window_pattern=2
        ),
    ),
    "exaone4 without windows": Case(
        "olmo2",
        lambda: Exaone4Config(**_LLAMA, num_key_value_heads=2, sliding_window=None, layer_types=["full_attention"] * 2),
    ),
    "exaone4 with windows nowhere": Case(
        "olmo2",
        lambda: Exaone4Config(
            **_LLAMA, num_key_value_heads=2, sliding_window=6, layer_types=["full_attention"] * 2, rope_parameters=_YARN
        ),
    ),
    "cohere": Case("cohere", lambda: CohereConfig(**_LLAMA, num_key_value_heads=2, logit_scale=0.3)),
    "cohere2": Case(
        "cohere",
        lambda: Cohere2Config(
            **_LLAMA,
            num_key_value_heads=2,
            sliding_window=6,
            logit_scale=0.3,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "cohere2 without windows": Case(
        "cohere",
        lambda: Cohere2Config(
            **_LLAMA, num_key_value_heads=2, logit_scale=0.3, layer_types=["full_attention"] * 2, rope_parameters=_YARN
        ),
    ),
    "stablelm": Case("stablelm", lambda: StableLmConfig(**_LLAMA, num_key_value_heads=2)),
    "stablelm parallel": Case(
        "stablelm",
        lambda: StableLmConfig(
            **_LLAMA,
            num_key_value_heads=4,
            use_qkv_bias=True,
            use_parallel_residual=True,
            rope_parameters=_THETA | dict(partial_rotary_factor=0.5),
        ),
    ),
    "phi3": Case("phi3", lambda: Phi3Config(**_LLAMA, num_key_value_heads=2, sliding_window=6)),
    "phi3 long": Case(
        "phi3",
        lambda: Phi3Config(
            **_LLAMA, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=_LONGROPE
        ),
    ),
    "phi3 short": Case(
        "phi3",
        lambda: Phi3Config(
            **_LLAMA, max_position_embeddings=128, original_max_position_embeddings=32, rope_parameters=_LONGROPE
        ),
    ),
    "starcoder2": Case("starcoder2", lambda: Starcoder2Config(**_LLAMA, num_key_value_heads=2, sliding_window=6)),
    "starcoder2 without biases": Case(
        "starcoder2", lambda: Starcoder2Config(**_LLAMA, num_key_value_heads=2, use_bias=False, hidden_act="gelu")
    ),
    "opt": Case(
        "opt",
        lambda: OPTConfig(
            **{k: v for k, v in _SIZES.items() if k != "initializer_range"},
            ffn_dim=96,
            max_position_embeddings=64,
            init_std=0.3,
            pad_token_id=0,
        ),
    ),
    "opt 350m": Case(
        "opt",
        lambda: OPTConfig(
            **{k: v for k, v in _SIZES.items() if k != "initializer_range"},
            ffn_dim=96,
            max_position_embeddings=64,
            init_std=0.3,
            pad_token_id=0,
            do_layer_norm_before=False,
            word_embed_proj_dim=48,
        ),
    ),
    "gptj": Case("gptj", lambda: GPTJConfig(**_SIZES_GPT, rotary_dim=8)),
    "gptj, whole heads": Case("gptj", lambda: GPTJConfig(**_SIZES_GPT, rotary_dim=16)),
    "gpt_neox": Case("gpt_neox", lambda: GPTNeoXConfig(**_SIZES, intermediate_size=96)),
    "gpt_neox yarn": Case(
        "gpt_neox",
        lambda: GPTNeoXConfig(**_SIZES, intermediate_size=96, rope_parameters=_YARN | dict(partial_rotary_factor=0.5)),
    ),
    "gpt_neox sequential": Case(
        "gpt_neox",
        lambda: GPTNeoXConfig(**_SIZES, intermediate_size=96, use_parallel_residual=False, attention_bias=False),
    ),
    "falcon": Case("falcon", lambda: FalconConfig(**_FALCON)),
    "falcon new decoder": Case(
        "falcon", lambda: FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True)
    ),
    "falcon new decoder, one norm": Case(
        "falcon",
        lambda: FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    ),
    "falcon sequential": Case("falcon", lambda: FalconConfig(**_FALCON, parallel_attn=False, multi_query=False)),
    "falcon alibi": Case(
        "falcon", lambda: FalconConfig(**_FALCON | dict(alibi=True), parallel_attn=False, multi_query=False, bias=True)
    ),
    "falcon alibi, multi-query": Case(
        "falcon", lambda: FalconConfig(**_FALCON | dict(alibi=True, hidden_size=96, num_attention_heads=6))
    ),
    "bigcode": Case("bigcode", lambda: GPTBigCodeConfig(**_SIZES_GPT)),
    "btlm": Case("btlm", lambda: BtlmConfig(**_SIZES_GPT, position_embedding_type="alibi"), Btlm),
    "btlm learned": Case("btlm", lambda: BtlmConfig(**_SIZES_GPT, position_embedding_type="learned"), Btlm),
    "baichuan": Case("baichuan", lambda: BaichuanConfig(**_SIZES, intermediate_size=96), Baichuan),
    "baichuan 13B": Case(
        "baichuan",
        lambda: BaichuanConfig(
            **_SIZES | dict(hidden_size=5120, num_attention_heads=40, num_hidden_layers=1, initializer_range=0.02),
            intermediate_size=96,
        ),
        Baichuan,
    ),
    "baichuan 2": Case(
        "baichuan", lambda: BaichuanConfig(**_SIZES | dict(vocab_size=70016), intermediate_size=96), Baichuan
    ),
    "phi": Case("phi", lambda: PhiConfig(**_SIZES, intermediate_size=96)),
    "phi gqa": Case("phi", lambda: PhiConfig(**_SIZES, intermediate_size=96, num_key_value_heads=2)),
}


def ids_of(config, batch=2, seqlen=24, device="cpu"):
    """Random tokens, but for the first few, which some families take for padding."""
    return torch.randint(3, config.vocab_size, (batch, seqlen), device=device)
