"""Decoders at level 2 of batch invariance: generated tokens have the logits of the training forward, bit for bit."""

import functools

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, LlamaConfig

from flash_attn import batch_invariant, get_batch_invariant
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.losses.linear_cross_entropy import linear_cross_entropy
from flash_attn.models.gpt import GPTLMHeadModel
from flash_attn.models.llama import llama_config_to_gpt2_config
from flash_attn.ops.linear import batch_invariant_layers
from flash_attn.utils.generation import InferenceParams
from flash_attn.utils.generation.speculative import decode_speculative

VOCAB, LENGTH, PROMPT = 101, 68, 58
_FUSED = dict(fused_mlp=True, fused_bias_fc=True, fused_dropout_add_ln=True)
_GPT2 = dict(n_embd=48, n_layer=2, n_head=3, n_positions=128, vocab_size=VOCAB, initializer_range=0.3)
_DROPOUT = dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)


def _gpt2(**options):
    return GPT2Config(**_GPT2, **_DROPOUT, use_flash_attn=True, **options)


def _llama(**options):
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config = llama_config_to_gpt2_config(
        LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCAB, initializer_range=0.3)
    )
    for name, value in dict(use_flash_attn=True, **options).items():
        setattr(config, name, value)
    return config


CONFIGS = {
    "gpt2": functools.partial(_gpt2, **_FUSED),
    "gpt2 unfused": _gpt2,
    "gpt2 gated": functools.partial(_gpt2, activation_function="glu", residual_in_fp32=True, fused_dropout_add_ln=True),
    "llama": functools.partial(_llama, fused_bias_fc=True, fused_dropout_add_ln=True),
    "llama unfused": _llama,
}


@pytest.fixture(params=list(CONFIGS))
def model(request, device):
    is_fp32 = device.type == "cpu" and request.param != "llama"  # bf16 rounds many differences away
    torch.manual_seed(0)
    return GPTLMHeadModel(CONFIGS[request.param](), device=device, dtype=torch.float32 if is_fp32 else torch.bfloat16)


@pytest.fixture(autouse=True)
def level():
    with batch_invariant(2):
        yield


@pytest.fixture
def tokens(device):
    return torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)


def trained(model, tokens):
    """The logits of a training forward."""
    logits = model.train()(tokens).logits
    assert logits.requires_grad
    return logits.detach()


def test_the_training_forward_depends_on_no_neighbour(model, tokens):
    expected = trained(model, tokens)
    for i in range(len(tokens)):
        assert torch.equal(trained(model, tokens[i : i + 1])[0], expected[i])
    assert torch.equal(trained(model, tokens[:, :40]), expected[:, :40])
    padded = F.pad(tokens[:, :50], (7, 3))
    mask = F.pad(torch.ones_like(tokens[:, :50]), (7, 3))
    found = model.eval()(padded, attention_mask=mask).logits.detach()
    assert torch.equal(found[:, 7:-3], expected[:, :50])


@pytest.mark.parametrize("page_size", [None, 16])
def test_generated_tokens_have_the_logits_of_training(model, tokens, page_size):
    prompts = tokens[:, :PROMPT]
    output = model.eval().generate(
        prompts, max_length=LENGTH, return_dict_in_generate=True, output_scores=True, page_size=page_size
    )
    scores = torch.stack(output.scores, 1)
    expected = trained(model, output.sequences)[:, PROMPT - 1 : -1]
    assert torch.equal(scores, expected)
    alone = model.eval().generate(
        prompts[1:2], max_length=LENGTH, return_dict_in_generate=True, output_scores=True, page_size=page_size
    )
    assert torch.equal(torch.stack(alone.scores, 1)[0], expected[1])


@pytest.mark.parametrize("paged", [False, True])
def test_a_prompt_in_chunks(model, tokens, paged):
    expected = trained(model, tokens)
    params = InferenceParams(max_seqlen=96, max_batch_size=3)
    if paged:
        params.key_value_memory_dict = model.allocate_inference_cache(20, 16)
        params.block_table = torch.randperm(18, device=tokens.device).int().view(3, 6)
        params.lengths_per_sample = torch.zeros(3, dtype=torch.int32, device=tokens.device)
    found, start = [], 0
    with torch.no_grad():
        for size in (33, 20, 1, 1, 13):
            params.seqlen_offset = start
            if paged:
                params.set_lengths(3, start)
            found.append(model.eval()(tokens[:, start : start + size], inference_params=params).logits)
            start += size
    assert torch.equal(torch.cat(found, 1), expected)


def test_prompts_of_different_lengths(model, tokens):
    prompts = tokens[:, :PROMPT]
    mask = torch.ones_like(prompts)
    mask[1, :9] = 0
    output = model.eval().generate(
        prompts, max_length=LENGTH, attention_mask=mask, return_dict_in_generate=True, output_scores=True
    )
    expected = trained(model, output.sequences[1:2, 9:])[0, PROMPT - 10 : -1]
    assert torch.equal(torch.stack(output.scores, 1)[1], expected)


def test_speculative_verification(model, tokens):
    """All tokens of a draft are verified in one step."""
    with torch.no_grad():
        draft = GPTLMHeadModel(_gpt2(), device=tokens.device, dtype=next(model.parameters()).dtype).eval()
        prompt = tokens[:1, :PROMPT]
        output = decode_speculative(prompt, model.eval(), draft, max_length=LENGTH)
    assert torch.equal(output.sequences, model.generate(prompt, max_length=LENGTH))


def test_log_probabilities(model, tokens):
    """Of a head that gives logits, one that gives the loss alone, and single tokens."""
    labels = tokens[:, 1:]
    logits = trained(model, tokens)[:, :-1]
    each = CrossEntropyLoss(reduction="none")
    expected = each(logits.flatten(0, 1).requires_grad_(), labels.flatten()).detach().view(labels.shape)
    for i, t in ((0, 0), (2, 50)):
        assert each(logits[i, t : t + 1], labels[i, t : t + 1]) == expected[i, t]
    with batch_invariant_layers():
        hidden = model.transformer(tokens)[:, :-1]
    head = model.lm_head
    for i, t in ((0, 0), (1, 33), (2, 66)):
        for row in (hidden[i, t : t + 1], hidden[i, t : t + 1].detach()):
            loss = linear_cross_entropy(row, head.weight, labels[i, t : t + 1], head.bias, num_classes=VOCAB)
            assert loss == expected[i, t]


def test_layers_computed_again(tokens):
    """By an activation checkpoint: the backward finds the same activations."""
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = GPTLMHeadModel(_llama(gradient_checkpointing=checkpointing), device=tokens.device)
        model(tokens, labels=tokens).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for x, y in zip(*gradients, strict=True):
        assert torch.equal(x, y)


def test_layers_computed_again_after_the_context(tokens):
    """At the level of their forward."""
    with batch_invariant(0):
        with batch_invariant(2):
            model = GPTLMHeadModel(_llama(gradient_checkpointing=True), device=tokens.device)
            levels = []
            model.transformer.layers[1].mlp.register_forward_pre_hook(lambda *_: levels.append(get_batch_invariant()))
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        assert levels == [2, 2] and get_batch_invariant() == 0


def test_adapters_and_hooks_run(model, tokens):
    peft = pytest.importorskip("peft")
    plain = trained(model, tokens)
    config = peft.LoraConfig(r=4, target_modules=["Wqkv", "fc1", "out_proj"], init_lora_weights=False)
    adapted, calls = peft.get_peft_model(model, config), []
    model.transformer.layers[0].mlp.fc2.register_forward_hook(lambda *_: calls.append(1))
    expected = trained(adapted, tokens)
    assert calls and not torch.equal(expected, plain)
    params = InferenceParams(max_seqlen=LENGTH, max_batch_size=1)
    with torch.no_grad():
        prefilled = adapted.eval()(tokens[:1, :-1], inference_params=params).logits
        params.seqlen_offset = LENGTH - 1
        decoded = adapted(tokens[:1, -1:], inference_params=params).logits
    assert torch.equal(torch.cat([prefilled, decoded], 1), expected[:1])


def test_compiled_training_is_one_graph(tokens):
    config = _llama()
    config.n_layer = 1
    model = GPTLMHeadModel(config, device=tokens.device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(tokens, labels=tokens).loss
    loss.backward()
    assert torch.equal(loss, model(tokens, labels=tokens).loss)


@pytest.mark.slow
def test_compiled(tokens):
    config = _llama()
    config.n_layer = 1
    model = GPTLMHeadModel(config, device=tokens.device)
    compiled = torch.compile(model, backend="eager")
    for level in (2, 0, 2):
        with batch_invariant(level), torch.no_grad():
            assert torch.equal(compiled(tokens).logits, model(tokens).logits)


def test_what_cannot_be_kept_is_refused(tokens):
    config = _gpt2()
    config.use_flash_attn = False
    with pytest.raises(NotImplementedError, match=r"use_flash_attn must be True where the level .* is 2, found False"):
        GPTLMHeadModel(config, device=tokens.device)(tokens)
    dynamic = dict(rope_type="dynamic", factor=2.0, original_max_position_embeddings=16)
    for options, found in (
        (dict(rotary_emb_scaling=dynamic), "found rope_type='dynamic'"),
        (dict(rotary_emb_scale_base=64.0), r"found scale_base=64\.0"),
    ):
        scaled = GPTLMHeadModel(_llama(**options), device=tokens.device)
        params = InferenceParams(max_seqlen=LENGTH, max_batch_size=3)
        for given in ({}, dict(inference_params=params)):
            message = f"must have angles and scales that do not depend on the length of a sequence .* is 2, {found}"
            with pytest.raises(NotImplementedError, match=message):
                scaled(tokens, **given)
    with pytest.raises(NotImplementedError, match=r"dwconv must be False where the level .* is 2, found True"):
        GPTLMHeadModel(_gpt2(attn_dwconv=True), device=tokens.device)(tokens)
    model = GPTLMHeadModel(_gpt2(), device=tokens.device).train()
    model.transformer.layers[0].mixer.inner_attn.drop.p = 0.1
    with pytest.raises(ValueError, match=r"dropout_p must be 0 where the level of batch invariance is 2, found 0.1"):
        model(tokens)
