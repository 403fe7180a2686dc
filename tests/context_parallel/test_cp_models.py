"""Modules and models under a plan give what they give in one process: outputs, losses, gradients of parameters."""

import copy

import pytest
import torch
import torch.distributed as dist
from processes import ON_GPUS, over_processes
from transformers import GPT2Config

from flash_attn.context_parallel import Plan
from flash_attn.losses.linear_cross_entropy import LinearCrossEntropyLoss
from flash_attn.models.gpt import GPTLMHeadModel
from flash_attn.modules.mha import MHA, FlashCrossAttention, FlashSelfAttention, ParallelMHA
from flash_attn.utils.distributed import device_of

SEQLENS, VOCAB = [11, 0, 5, 1, 13], 60


def by_documents(function, x):
    """function of each document of x (batch, tokens, ...), one after the other."""
    return torch.cat([function(part) for part in x.split(SEQLENS, 1) if part.shape[1]], 1)


def summed(gradients, group):
    for grad in gradients:
        dist.all_reduce(grad, group=group)
    return gradients


MHAS = {
    "plain": dict(num_heads_kv=None),
    "grouped, rotary": dict(num_heads_kv=2, rotary_emb_dim=16),
    "window, softcap, xpos": dict(window_size=(4, -1), softcap=2.0, rotary_emb_dim=8, rotary_emb_scale_base=512),
    "norms of heads": dict(num_heads_kv=1, rotary_emb_dim=16, qk_norm=True, rotary_emb_interleaved=True),
    "full": dict(causal=False, checkpointing=True),
}


def check_mha(group):
    device = device_of(group)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, sum(SEQLENS), 64, generator=generator).to(device)
    for method in ("gather", "ulysses"):
        plan = Plan(SEQLENS, group, method=method, granularity=1)
        for name, options in MHAS.items():
            torch.manual_seed(0)
            module = MHA(64, 4, use_flash_attn=True, device=device, **dict(causal=True) | options)
            expected = by_documents(module, x)
            wanted = torch.autograd.grad(expected.square().sum(), module.parameters())
            part = module(plan.shard(x), cp_plan=plan)
            found = torch.autograd.grad(part.square().sum(), module.parameters())
            torch.testing.assert_close(plan.unshard(part), expected, rtol=1e-4, atol=1e-4, msg=f"out of {name}")
            torch.testing.assert_close(summed(found, group), wanted, rtol=1e-3, atol=1e-3)


def check_alibi(group):
    plan = Plan(SEQLENS, group, method="ulysses")
    module = MHA(64, 4, use_flash_attn=True, use_alibi=True, causal=True)
    x = torch.randn(2, sum(SEQLENS), 64, generator=torch.Generator().manual_seed(1))
    for parameter in module.parameters():
        dist.broadcast(parameter.data, group_src=0, group=group)
    torch.testing.assert_close(plan.unshard(module(plan.shard(x), cp_plan=plan)), by_documents(module, x))


def check_refused(group):
    plan = Plan(SEQLENS, group)
    x = torch.zeros(1, plan.tokens, 64)
    for options, match in [
        (dict(), "cp_plan can be given only with use_flash_attn"),
        (dict(use_flash_attn=True, cross_attn=True), "cp_plan can be given only without cross_attn"),
        (dict(use_flash_attn=True, dwconv=True), "cp_plan can be given only without dwconv"),
    ]:
        with pytest.raises(ValueError, match=match):
            MHA(64, 4, **options)(x, cp_plan=plan)
    module = MHA(64, 4, use_flash_attn=True, layer_idx=0)
    with pytest.raises(ValueError, match="cp_plan can be given only without inference_params"):
        module(x, cp_plan=plan, inference_params=object())
    with pytest.raises(ValueError, match=r"seqlen must be cp_plan.tokens"):
        module(torch.zeros(1, plan.tokens + 1, 64), cp_plan=plan)
    rotary = MHA(64, 4, use_flash_attn=True, rotary_emb_dim=8)
    rotary.rotary_emb.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="rotary_emb must be a RotaryEmbedding without hooks"):
        rotary(x, cp_plan=plan)
    with pytest.raises(TypeError, match=r"cp_plan must be a flash_attn.context_parallel.Plan, found int"):
        module(x, cp_plan=3)
    lengths = torch.zeros(2, dtype=torch.int32)
    for attention, tensors in ((FlashSelfAttention(), [x[0]]), (FlashCrossAttention(), [x[0], x[0]])):
        with pytest.raises(ValueError, match="cu_seqlens must be None with cp_plan"):
            attention(*tensors, cu_seqlens=lengths, max_seqlen=3, cp_plan=plan)


SIZES = dict(
    vocab_size=VOCAB,
    n_embd=64,
    n_layer=2,
    n_head=4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    use_flash_attn=True,
    initializer_range=0.2,
)
MODELS = {
    "gpt2": dict(n_positions=16),
    "llama": dict(
        n_positions=0,
        rotary_emb_fraction=1.0,
        rms_norm=True,
        n_head_kv=2,
        tie_word_embeddings=False,
        activation_function="swiglu",
        n_inner=96,
        mlp_multiple_of=8,
        sliding_window=[4, None],
    ),
    "postnorm": dict(n_positions=16, prenorm=False, gradient_checkpointing=True),
}


def check_gpt(group):
    device = device_of(group)
    ids = torch.randint(VOCAB, (1, sum(SEQLENS)), generator=torch.Generator().manual_seed(3)).to(device)
    labels = ids.masked_fill(ids % 7 == 0, -100)
    for name, options in MODELS.items():
        torch.manual_seed(0)
        model = GPTLMHeadModel(GPT2Config(**SIZES | options), device=device)
        whole = copy.deepcopy(model)
        count = sum((part[:, 1:] != -100).sum() for part in labels.split(SEQLENS, 1))
        losses = [
            whole(x, labels=y, num_items_in_batch=count).loss
            for x, y in zip(ids.split(SEQLENS, 1), labels.split(SEQLENS, 1), strict=True)
            if x.shape[1] > 1
        ]
        expected = sum(losses)
        expected.backward()
        plan = Plan(SEQLENS, group, granularity=1)
        batch = plan.shard_batch(dict(input_ids=ids, labels=labels))
        if name == "postnorm":
            del batch["position_ids"]  # the plan has them, too
        logits = model(batch["input_ids"], cp_plan=plan).logits
        alone = [whole(x).logits for x in ids.split(SEQLENS, 1) if x.shape[1]]
        torch.testing.assert_close(plan.unshard(logits), torch.cat(alone, 1), rtol=1e-3, atol=1e-3)
        if name == "llama":
            others = dict(batch, position_ids=torch.arange(plan.tokens, device=device)[None])
            with pytest.raises(
                ValueError, match=r"position_ids must be cp_plan.position_ids without learned positions"
            ):
                model(**others, cp_plan=plan)
        loss = model(**batch, cp_plan=plan).loss
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        torch.testing.assert_close(mean / plan.world_size, expected.detach(), msg=f"loss of {name}")
        for (key, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
            dist.all_reduce(ours.grad, group=group)
            torch.testing.assert_close(
                ours.grad / plan.world_size, theirs.grad, rtol=1e-3, atol=1e-4, msg=f"gradient of {key} of {name}"
            )
    losses = LinearCrossEntropyLoss(reduction="sum")
    own = model(**batch, cp_plan=plan, loss_fn=losses).loss
    torch.testing.assert_close(plan.mean_loss(own, (batch["shift_labels"] != -100).sum()), loss)
    ids = batch["input_ids"]
    for arguments, match in [
        (dict(labels=ids), "labels must be None with cp_plan, found a tensor: a rank does not have the token after"),
        (dict(attention_mask=ids), "attention_mask must be None with cp_plan"),
        (dict(inference_params=object()), "inference_params must be None with cp_plan"),
    ]:
        with pytest.raises(ValueError, match=match):
            model(ids, cp_plan=plan, **arguments)


CHECKS = [check_mha, check_alibi, check_refused, check_gpt]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_over_two(check):
    over_processes(2, check)


def check_tensor_parallel(group):
    """Heads over two processes, and tokens over two others."""
    mesh = dist.device_mesh.init_device_mesh(device_of(group).type, (2, 2), mesh_dim_names=("cp", "tp"))
    tp, plan = mesh["tp"].get_group(), Plan(SEQLENS, mesh["cp"], granularity=1)
    torch.manual_seed(0)
    whole = MHA(64, 4, causal=True, use_flash_attn=True, rotary_emb_dim=16, num_heads_kv=2)
    part = ParallelMHA(
        64, 4, tp, causal=True, use_flash_attn=True, rotary_emb_dim=16, num_heads_kv=2, sequence_parallel=False
    )
    rank = dist.get_rank(tp)
    with torch.no_grad():
        for name in ("weight", "bias"):
            q, k, v = getattr(whole.Wqkv, name).split([64, 32, 32])
            getattr(part.Wqkv, name).copy_(torch.cat([each.chunk(2)[rank] for each in (q, k, v)]))
        part.out_proj.weight.copy_(whole.out_proj.weight.chunk(2, dim=1)[rank])
        if rank == 0:
            part.out_proj.bias.copy_(whole.out_proj.bias)
    x = torch.randn(1, sum(SEQLENS), 64, generator=torch.Generator().manual_seed(1))
    found = plan.unshard(part(plan.shard(x), cp_plan=plan))
    torch.testing.assert_close(found, by_documents(whole, x))


def test_with_tensor_parallelism():
    over_processes(4, check_tensor_parallel)


@pytest.mark.parametrize("world_size", ON_GPUS)
def test_models_on_gpus(world_size):
    over_processes(world_size, check_gpt_in_16_bits, backend="nccl")


def check_gpt_in_16_bits(group):
    """Loss in bfloat16 as in one process, on documents of several blocks of keys."""
    seqlens = [700, 1, 2000, 300]
    device = device_of(group)
    torch.manual_seed(0)
    model = GPTLMHeadModel(GPT2Config(**SIZES | MODELS["llama"]), device=device, dtype=torch.bfloat16)
    ids = torch.randint(VOCAB, (1, sum(seqlens)), generator=torch.Generator().manual_seed(3)).to(device)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size(group))][dist.get_rank(group)]
    losses = []
    for each in (group, alone):
        plan = Plan(seqlens, each)
        loss = model(**plan.shard_batch(dict(input_ids=ids, labels=ids)), cp_plan=plan).loss.detach()
        dist.all_reduce(loss, group=each)
        losses.append(loss / plan.world_size)
    torch.testing.assert_close(*losses, rtol=2e-3, atol=2e-3)
