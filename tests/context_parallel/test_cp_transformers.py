"""Models of transformers under a plan: logits and gradients of one process, with windows and sinks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from processes import over_processes

from flash_attn.context_parallel import Plan
from flash_attn.integrations.transformers import attention, register

SEQLENS, VOCAB = [9, 1, 14], 40
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
MODELS = {
    "LlamaConfig": dict(),
    "MistralConfig": dict(sliding_window=5),
    "GptOssConfig": dict(
        sliding_window=4, num_local_experts=2, num_experts_per_tok=1, initializer_range=0.5, rope_parameters=None
    ),
}


def check(group, name):
    options = {key: value for key, value in (SIZES | MODELS[name]).items() if value is not None}
    torch.manual_seed(0)
    config = getattr(transformers, name)(**options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register()).float()
    ids = torch.randint(VOCAB, (1, sum(SEQLENS)), generator=torch.Generator().manual_seed(1))
    expected = torch.cat([model(part).logits for part in ids.split(SEQLENS, 1)], 1)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    parameters = [each for each in model.parameters() if each.requires_grad]
    grads = torch.autograd.grad((expected * weight).sum(), parameters, allow_unused=True)
    plan = Plan(SEQLENS, group, granularity=1)
    logits = model(**plan.shard_batch(dict(input_ids=ids)), cp_plan=plan, use_cache=False).logits
    torch.testing.assert_close(plan.unshard(logits), expected, rtol=1e-3, atol=1e-4)
    found = torch.autograd.grad((logits * plan.shard(weight)).sum(), parameters, allow_unused=True)
    for ours, theirs in zip(found, grads, strict=True):
        ours = torch.zeros_like(theirs) if ours is None else ours
        dist.all_reduce(ours, group=group)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    over_processes(2, check, name)


def check_refused(group):
    plan = Plan(8, group)
    q = torch.zeros(1, 2, plan.tokens, 16)
    module = torch.nn.Module()
    for options, match in [
        (dict(attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool)), "attention_mask must be None with cp_plan"),
        (dict(attention_mask=None, sinks=torch.ones(1, 2, plan.tokens, 1)), "sinks must be None with cp_plan"),
    ]:
        with pytest.raises(ValueError, match=match):
            attention(module, q, q, q, cp_plan=plan, **options)
    module.config = transformers.LlamaConfig(attention_chunk_size=4)
    with pytest.raises(ValueError, match=r"config.attention_chunk_size must be None with cp_plan, found 4"):
        attention(module, q, q, q, None, cp_plan=plan)
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    factors = dict(rope, rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    factors["original_max_position_embeddings"] = 8
    nested = SimpleNamespace(rope_parameters=dict(sliding_attention=dict(rope_type="default"), full_attention=factors))
    for config, match in [
        (transformers.LlamaConfig(**SIZES, rope_parameters=rope), "must have another rope_type .*, found 'dynamic'"),
        (transformers.LlamaConfig(**SIZES, rope_parameters=factors), "must have another rope_type .* 'longrope'"),
        (nested, r"config.rope_parameters must have another rope_type with cp_plan, found 'longrope'"),
        (SimpleNamespace(rope_scaling=dict(type="dynamic")), r"config.rope_scaling must have another rope_type"),
        (
            transformers.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
            r"config.layer_types must be .* \['conv'\]",
        ),
        (SimpleNamespace(layers_block_type=["mamba", "attention"]), r"config.layers_block_type .* \['mamba'\]"),
    ]:
        module.config = config
        with pytest.raises(ValueError, match=match):
            attention(module, q, q, q, None, cp_plan=plan)


def test_what_is_refused():
    over_processes(2, check_refused)
