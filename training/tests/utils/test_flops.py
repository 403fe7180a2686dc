"""Counted FLOPs against formulas, and those of our operations against those of PyTorch's."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from flash_attn.models.gpt import GPTLMHeadModel
from src.utils.flops import peak_tflops, profile_deepspeed, profile_fvcore, train_flops_per_token

LAYERS, WIDTH, VOCAB, SEQLEN = 2, 32, 64, 16
SMALL = dict(
    n_embd=WIDTH, n_head=2, n_layer=LAYERS, vocab_size=VOCAB, n_positions=SEQLEN, bos_token_id=0, eos_token_id=0
)
FUSED = dict(use_flash_attn=True, fused_bias_fc=True, fused_mlp=True, fused_dropout_add_ln=True, residual_in_fp32=True)
MODELS = {
    "plain": lambda: GPTLMHeadModel(GPT2Config(**SMALL)),
    "fused": lambda: GPTLMHeadModel(GPT2Config(**SMALL, **FUSED)),
    "transformers": lambda: GPT2LMHeadModel(GPT2Config(**SMALL)),
}
# Megatron's formula for a token in forward: 24 l h^2 (1 + s / 6h) in the layers, and 2 h V in the head.
FORWARD = 24 * LAYERS * WIDTH**2 + 4 * LAYERS * SEQLEN * WIDTH + 2 * WIDTH * VOCAB


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_gpt(model):
    model = model()
    counter, macs, activations, total = profile_fvcore(model, (SEQLEN,), torch.int64, batch_size=3)
    assert 2 * macs == counter.get_total_flops() == 3 * SEQLEN * FORWARD
    assert total == activations.total() == 3 * SEQLEN * (LAYERS * (3 + 1 + 1 + 4 + 1) * WIDTH + VOCAB)
    assert profile_deepspeed(model, (SEQLEN,), torch.int64) == (macs // 3, sum(p.numel() for p in model.parameters()))
    assert train_flops_per_token(model, SEQLEN) == 3 * FORWARD


@pytest.mark.parametrize(("window", "keys"), [(None, 32), (4, 16), (12, 32), ([4, None], 24), ([None, 3], 22)])
def test_windows(window, keys):
    """Keys of both layers together."""
    model = GPTLMHeadModel(GPT2Config(**SMALL, sliding_window=window, use_flash_attn=True))
    attention = 4 * LAYERS * SEQLEN * WIDTH
    assert train_flops_per_token(model, SEQLEN) == 3 * (FORWARD - attention + 4 * keys * WIDTH)


def test_weights_of_wrapped_layers_count_once():
    """So that a change of layers does not change what a step is said to take."""
    model = MODELS["fused"]()
    block = model.transformer.layers[0]
    block.mlp.fc1 = checkpoint_wrapper(torch.compile(block.mlp.fc1, backend="eager"))
    parametrizations.weight_norm(block.mlp.fc2)
    prune.l1_unstructured(model.lm_head, "weight", amount=0.5)
    table = model.transformer.embeddings
    table.word_embeddings = torch.compile(table.word_embeddings, backend="eager")
    assert train_flops_per_token(model, SEQLEN) == 3 * FORWARD


def test_convolution():
    model = nn.Conv2d(3, 8, kernel_size=4, stride=4)
    _, macs, _, activations = profile_fvcore(model, (3, 16, 16))
    assert (macs, activations) == (4 * 4 * 8 * 3 * 4 * 4, 8 * 4 * 4)


def test_a_compiled_model_is_still_compiled_afterwards():
    graphs = []
    model = MODELS["plain"]()
    model.compile(backend=lambda graph, inputs: graphs.append(graph) or graph)
    counter, *_ = profile_fvcore(model, (SEQLEN,), torch.int64)
    assert counter.get_total_flops() == SEQLEN * FORWARD and not graphs
    model(torch.zeros(1, SEQLEN, dtype=torch.int64))
    assert graphs


def counted(function, *args, **kwargs):
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return counter.get_total_flops()


def test_attention_packed_grouped_and_of_unequal_lengths():
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8)
    assert counted(flash_attn_func, q, k, k) == 4 * 2 * 4 * 5 * 7 * 8
    assert counted(flash_attn_func, q, k, k, causal=True) == 4 * 2 * 4 * 5 * 7 * 8
    assert counted(flash_attn_qkvpacked_func, torch.randn(2, 5, 3, 4, 8)) == 4 * 2 * 4 * 5 * 5 * 8
    starts_q, starts_k = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 4, 10], dtype=torch.int32)
    packed = q[0], k[0].repeat(2, 1, 1)[:10], k[0].repeat(2, 1, 1)[:10]
    flops = counted(flash_attn_varlen_func, *packed, starts_q, starts_k, 3, 6)
    assert flops == 4 * (2 * 4 + 3 * 6) * 4 * 8


def test_backward_of_attention_computes_the_scores_again():
    q = torch.randn(2, 5, 4, 8, requires_grad=True)
    once = 2 * 2 * 4 * 5 * 5 * 8
    assert counted(lambda: flash_attn_func(q, q, q).sum().backward()) == (2 + 5) * once
    sink = torch.randn(4, requires_grad=True)
    assert counted(lambda: flash_attn_func(q, q, q, learnable_sink=sink).sum().backward()) == (2 + 5) * once


def test_profiling_leaves_no_trace():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4))
    model[2].eval()
    state = torch.get_rng_state()
    profile_fvcore(model, (4,), batch_size=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert model[2].num_batches_tracked == 0
    assert model[0].weight.grad is None


def test_a_model_without_config_is_refused():
    with pytest.raises(ValueError, match="model must have a config"):
        train_flops_per_token(nn.Linear(2, 2), 8)


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA L40S", 362),
        ("NVIDIA GH200 480GB", 989),
        ("Quadro of another age", None),
    ],
)
def test_peaks(name, peak):
    assert peak_tflops(name) == peak
