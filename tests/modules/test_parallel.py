"""Modules divided over processes give what they give whole: outputs, gradients, parameters, decoding."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import ON_GPUS, half_of, over_processes
from torch import nn

from flash_attn.modules.block import Block, ParallelBlock
from flash_attn.modules.embedding import (
    ColumnParallelEmbedding,
    GPT2Embeddings,
    ParallelGPT2Embeddings,
    VocabParallelEmbedding,
)
from flash_attn.modules.mha import MHA, ParallelMHA
from flash_attn.modules.mha._heads import heads_of_process
from flash_attn.modules.mlp import FusedMLP, GatedMlp, Mlp, ParallelFusedMLP, ParallelGatedMlp, ParallelMLP
from flash_attn.ops.fused_dense import ColumnParallelLinear, RowParallelLinear
from flash_attn.utils.distributed import (
    allreduce_sequence_parallel_grad,
    get_dim_for_local_rank,
    sync_shared_params,
)
from flash_attn.utils.generation import InferenceParams

BATCH, SEQLEN = 4, 6


def draw(number, *shape, device):
    """Random tensors, the same in all processes, though their modules took different amounts of random numbers."""
    return torch.randn(number, *shape, generator=torch.Generator().manual_seed(2)).to(device).unbind(0)


def device_of(group):
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


class Parts:
    """How parameters and activations are divided: the part of this process."""

    def __init__(self, group):
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)

    def even(self, x, dim=0):
        return x.chunk(self.world, dim=dim)[self.rank]

    def heads(self, x, heads, dim=0):
        """The heads of this process, the first processes having more if they must."""
        shares = [get_dim_for_local_rank(heads, self.world, rank) for rank in range(self.world)]
        return x.split([share * (x.shape[dim] // heads) for share in shares], dim=dim)[self.rank]

    def attention(self, state, heads, heads_kv):
        """Wqkv by heads of queries, keys and values, out_proj by columns."""
        result = {}
        for name, x in state.items():
            if name.startswith("Wqkv"):
                head_dim = len(x) // (heads + 2 * heads_kv)
                q, k, v = x.split([n * head_dim for n in (heads, heads_kv, heads_kv)])
                if heads_kv == 1:  # all processes share it
                    own = (self.even(x[heads * head_dim :]),)
                else:
                    own = self.heads(k, heads_kv), self.heads(v, heads_kv)
                x = torch.cat([self.heads(q, heads), *own])
            result[name] = self.heads(x, heads, dim=1) if name == "out_proj.weight" else x
        return self.with_bias_once(result, "out_proj.bias")

    def mlp(self, state, gated):
        result = {}
        for name, x in state.items():
            if name.startswith("fc1"):
                x = torch.cat([self.even(half) for half in x.chunk(2)]) if gated else self.even(x)
            result[name] = self.even(x, dim=1) if name == "fc2.weight" else x
        return self.with_bias_once(result, "fc2.bias")

    def with_bias_once(self, state, name):
        return {key: x for key, x in state.items() if key != name or self.rank == 0}


def gradients_of(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def compare(group, whole, divided, part_of, sequence_parallel, **kwargs):
    """The divided module against the whole one on (tokens, features), with a state dict divided by part_of."""
    parts, device = Parts(group), device_of(group)
    features = next(iter(whole.parameters())).shape[1]
    x, dout = draw(2, BATCH * SEQLEN, features, device=device)
    divided.load_state_dict(part_of(whole.state_dict()))
    own = parts.even if sequence_parallel else torch.clone
    leaf, part = x.clone().requires_grad_(), own(x).clone().requires_grad_()
    expected = whole(leaf.view(BATCH, SEQLEN, -1)).flatten(0, 1)
    found = divided(part, **kwargs)
    expected.backward(dout)
    found.backward(own(dout))
    assert_close(found, own(expected))
    assert_close(part.grad, own(leaf.grad))
    assert_close(gradients_of(divided), part_of(gradients_of(whole)))


ATTENTION = [
    dict(),
    dict(num_heads=6, use_alibi=True, use_flash_attn=True),  # 2, 2, 1 and 1 of four processes
    dict(num_heads=6, use_flash_attn=True, window_size=(3, 0), rotary_emb_dim=16),
    dict(num_heads=8, num_heads_kv=4, rotary_emb_dim=8, rotary_emb_interleaved=True),
    dict(num_heads=8, num_heads_kv=4, use_alibi=True, use_flash_attn=True, qkv_proj_bias=False, out_proj_bias=False),
    dict(num_heads=6, num_heads_kv=1, use_alibi=True, use_flash_attn=True),
    dict(num_heads=6, num_heads_kv=1, rotary_emb_dim=8),
    dict(checkpointing=True),
]


def check_attention(group):
    for options in ATTENTION:
        for sequence_parallel in (False, True):
            torch.manual_seed(1)
            options = dict(num_heads=4, causal=True, device=device_of(group)) | options
            heads = options["num_heads"]
            embed_dim = 16 * heads
            part_of = functools.partial(
                Parts(group).attention, heads=heads, heads_kv=options.get("num_heads_kv", heads)
            )
            whole = MHA(embed_dim, **options)
            divided = ParallelMHA(embed_dim, process_group=group, sequence_parallel=sequence_parallel, **options)
            compare(group, whole, divided, part_of, sequence_parallel, seqlen=SEQLEN)
    with pytest.raises(ValueError, match=r"num_heads must be at least the number of processes, ., found 1"):
        ParallelMHA(64, 1, group)
    if dist.get_world_size(group) == 4:
        says = r"num_heads_kv must be at least the number of processes, 4, or 2 \* num_heads_kv .* of 4, found 1"
        with pytest.raises(ValueError, match=says):
            ParallelMHA(64, 4, group, num_heads_kv=1, head_dim=5)
    divided = ParallelMHA(64, 4, group, sequence_parallel=False, device=device_of(group))
    with pytest.raises(ValueError, match="the number of tokens must be a multiple of seqlen, 5, found 24"):
        divided(torch.zeros(24, 64, device=device_of(group)), seqlen=5)


def check_packed_attention(group):
    """The longest length may be left out, as in the function."""
    device = device_of(group)
    divided = ParallelMHA(64, 4, group, 2, use_flash_attn=True, sequence_parallel=False, device=device)
    cu_seqlens = torch.tensor([0, 9, 24], dtype=torch.int32, device=device)
    (x,) = draw(1, 24, 64, device=device)
    assert_close(divided(x, cu_seqlens=cu_seqlens), divided(x, cu_seqlens=cu_seqlens, max_seqlen=15))


def check_batch_of_attention(group):
    """Without seqlen, x is (batch, seqlen, features), and the batch is divided."""
    parts, device = Parts(group), device_of(group)
    torch.manual_seed(1)
    whole = MHA(64, 4, causal=True, device=device)
    (x,) = draw(1, BATCH, SEQLEN, 64, device=device)
    for sequence_parallel in (False, True):
        divided = ParallelMHA(64, 4, group, causal=True, sequence_parallel=sequence_parallel, device=device)
        divided.load_state_dict(parts.attention(whole.state_dict(), 4, 4))
        own = parts.even if sequence_parallel else torch.clone
        assert_close(divided(own(x)), own(whole(x)))


def check_decoding(group):
    device = device_of(group)
    for options in (
        dict(use_alibi=True, num_heads=6),
        dict(rotary_emb_dim=16, num_heads_kv=4, num_heads=8),
        dict(num_heads=6),
        dict(rotary_emb_dim=16, num_heads_kv=1, num_heads=6),
    ):
        torch.manual_seed(1)
        heads = options["num_heads"]
        options = dict(causal=True, layer_idx=0, use_flash_attn=True, device=device) | options
        whole = MHA(16 * heads, **options)
        divided = ParallelMHA(16 * heads, process_group=group, sequence_parallel=False, **options)
        state = Parts(group).attention(whole.state_dict(), heads, options.get("num_heads_kv", heads))
        divided.load_state_dict(state)
        (x,) = draw(1, 2, 8, 16 * heads, device=device)
        params = InferenceParams(8, 2, key_value_memory_dict={0: divided.allocate_inference_cache(2, 8)})
        paged = InferenceParams(8, 2, key_value_memory_dict={0: divided.allocate_inference_cache(7, 3)})
        paged.block_table = torch.tensor([[6, 0, 2], [1, 5, 3]], dtype=torch.int32, device=device)
        with torch.no_grad():
            for each in (params, paged):
                found = []
                for chunk in x.split((5, 1, 2), dim=1):
                    found.append(divided(chunk, inference_params=each))
                    each.seqlen_offset += chunk.shape[1]
                assert_close(torch.cat(found, dim=1), whole(x))
            padded = InferenceParams(8, 2, leftpad_per_sample=torch.tensor([0, 3], dtype=torch.int32, device=device))
            found = []
            for chunk in x.split((5, 1, 2), dim=1):
                found.append(divided(chunk, inference_params=padded))
                padded.seqlen_offset += chunk.shape[1]
            found = torch.cat(found, dim=1)
            assert_close(found[0], whole(x[:1])[0])
            assert_close(found[1, 3:], whole(x[1:, 3:])[0])


def check_mlps(group):
    options = dict(device=device_of(group))
    for sequence_parallel in (False, True):
        for whole_cls, divided_cls, activation in (
            (Mlp, ParallelMLP, F.relu),
            (GatedMlp, ParallelGatedMlp, F.silu),
            (GatedMlp, ParallelGatedMlp, F.sigmoid),
            (GatedMlp, ParallelGatedMlp, torch.tanh),
            (FusedMLP, ParallelFusedMLP, "gelu_approx"),
        ):
            torch.manual_seed(1)
            gated = whole_cls is GatedMlp
            rest = options | dict(activation=activation) | (dict(multiple_of=8) if gated else {})
            whole = whole_cls(16, 48, **rest)
            divided = divided_cls(
                16, hidden_features=48, process_group=group, sequence_parallel=sequence_parallel, **rest
            )
            part_of = functools.partial(Parts(group).mlp, gated=gated)
            compare(group, whole, divided, part_of, sequence_parallel)


def check_embeddings(group):
    parts, device = Parts(group), device_of(group)
    ids = torch.randint(32, (BATCH, SEQLEN), generator=torch.Generator().manual_seed(1)).to(device)
    for positions in (0, SEQLEN):
        for sequence_parallel in (False, True):
            for combined in (False, True):
                torch.manual_seed(1)
                whole = GPT2Embeddings(16, 32, positions, device=device)
                divided = ParallelGPT2Embeddings(
                    16, 32, positions, group, sequence_parallel=sequence_parallel, device=device
                )

                def part_of(state):
                    columns = {"position_embeddings.weight"}
                    return {name: parts.even(x, dim=int(name in columns)) for name, x in state.items()}

                divided.load_state_dict(part_of(whole.state_dict()))
                expected = whole(ids)
                (dout,) = draw(1, *expected.shape, device=device)
                expected.backward(dout)
                if combined:
                    expected, dout = expected.flatten(0, 1), dout.flatten(0, 1)
                own = parts.even if sequence_parallel else torch.clone
                found = divided(ids, combine_batch_seqlen_dim=combined)
                found.backward(own(dout))
                assert_close(found, own(expected))
                assert_close(gradients_of(divided), part_of(gradients_of(whole)))
    before = ids.clone()
    words = VocabParallelEmbedding(32, 8, process_group=group, device=device)
    outside = ids // (32 // parts.world) != parts.rank
    assert not words(ids)[outside].any()
    assert torch.equal(ids, before)
    for make, error, message in (
        (lambda: VocabParallelEmbedding(33, 8, process_group=group), ValueError, "num_embeddings must be divisible by"),
        (lambda: VocabParallelEmbedding(32, 8, process_group=group, padding_idx=1), ValueError, "padding_idx must be"),
        (lambda: ColumnParallelEmbedding(32, 9, process_group=group), ValueError, "embedding_dim must be divisible by"),
    ):
        with pytest.raises(error, match=message):
            make()


def check_blocks(group):
    """Two blocks; the norms see only their part of the tokens if sequence parallel, and their gradients are summed."""
    parts, device = Parts(group), device_of(group)

    def blocks(mixer_cls, mlp_cls, **options):
        layers = [
            Block(64, mixer_cls, mlp_cls, functools.partial(nn.LayerNorm, device=device), **options) for _ in range(2)
        ]
        return nn.ModuleList(layers)

    def run(layers, x, **mixer_kwargs):
        residual = None
        for layer in layers:
            x, residual = layer(x, residual, mixer_kwargs=mixer_kwargs)
        return x + residual

    def part_of(state):
        result = {}
        for i in range(2):
            of_mixer, of_mlp = (
                {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}
                for prefix in (f"{i}.mixer.", f"{i}.mlp.")
            )
            result |= {f"{i}.mixer.{name}": x for name, x in parts.attention(of_mixer, 4, 4).items()}
            result |= {f"{i}.mlp.{name}": x for name, x in parts.mlp(of_mlp, gated=False).items()}
        return result | {name: x for name, x in state.items() if ".norm" in name}

    for sequence_parallel in (False, True):
        for fused in (False, True):
            torch.manual_seed(1)
            options = dict(causal=True, rotary_emb_dim=16, device=device)
            whole = blocks(functools.partial(MHA, num_heads=4, **options), functools.partial(FusedMLP, device=device))
            group_options = dict(process_group=group, sequence_parallel=sequence_parallel, device=device)
            divided = blocks(
                functools.partial(ParallelMHA, num_heads=4, **options | group_options),
                functools.partial(ParallelFusedMLP, **group_options),
                sequence_parallel=sequence_parallel,
                mark_shared_params=True,
                fused_dropout_add_ln=fused,
            )
            divided.load_state_dict(part_of(whole.state_dict()))
            if parts.rank > 0:
                nn.init.zeros_(divided[1].norm2.weight)
            sync_shared_params(divided, group)
            x, dout = draw(2, BATCH * SEQLEN, 64, device=device)
            own = parts.even if sequence_parallel else torch.clone
            leaf, part = x.clone().requires_grad_(), own(x).clone().requires_grad_()
            expected = run(whole, leaf.view(BATCH, SEQLEN, -1)).flatten(0, 1)
            found = run(divided, part, seqlen=SEQLEN)
            expected.backward(dout)
            found.backward(own(dout))
            allreduce_sequence_parallel_grad(divided, group)
            assert_close(found, own(expected))
            assert_close(part.grad, own(leaf.grad))
            assert_close(gradients_of(divided), part_of(gradients_of(whole)))


def check_marks(group):
    """Norms keep their marks in copies, and when they get other parameters."""
    world = dist.get_world_size(group)

    def materialised(block):
        with torch.device("meta"):
            return type(block)(64, sequence_parallel=True, mark_shared_params=True).to_empty(device="cpu")

    def assigned(block):
        block.load_state_dict(copy.deepcopy(block.state_dict()), assign=True)
        return block

    for block_cls in (Block, ParallelBlock):
        for change in (copy.deepcopy, materialised, assigned):
            block = change(block_cls(64, sequence_parallel=True, mark_shared_params=True))
            for parameter in block.parameters():
                nn.init.constant_(parameter, dist.get_rank(group))
                parameter.grad = torch.ones_like(parameter)
            sync_shared_params(block, group)
            allreduce_sequence_parallel_grad(block, group)
            for name, parameter in block.named_parameters():
                norm = name.startswith("norm")
                assert (parameter == (0 if norm else dist.get_rank(group))).all()
                assert (parameter.grad == (world if norm else 1)).all()


def check_compiled(group):
    """A graph has the collectives of the gradients, too."""
    device = device_of(group)
    for sequence_parallel in (False, True):
        torch._dynamo.reset()  # which else counts these as one function, compiled again
        options = dict(process_group=group, sequence_parallel=sequence_parallel, device=device)
        modules = [ParallelMHA(64, 4, num_heads_kv=1, use_flash_attn=True, qk_norm=True, **options)]
        if sequence_parallel:
            modules += [ParallelMHA(64, 4, use_flash_attn=True, **options), ParallelFusedMLP(64, **options)]
        for module in modules:
            x, dout = draw(2, BATCH, SEQLEN, 64, device=device)
            results = []
            for function in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
                leaf = x.clone().requires_grad_()
                out = function(leaf)
                results.append((out.detach(), *torch.autograd.grad(out, [leaf, *module.parameters()], dout)))
            assert_close(*results)


def check_questions(group):
    """No call asks torch.distributed for the size of a group, which takes longer than to ask the group."""
    layers = nn.Sequential(ColumnParallelLinear(8, 8, group), RowParallelLinear(8, 8, group))
    mlp = ParallelFusedMLP(8, process_group=group)
    embedding = ParallelGPT2Embeddings(8, 8, -1, group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", None)
        mlp(layers(embedding(torch.zeros(2, 4, dtype=torch.int64), combine_batch_seqlen_dim=True))).sum().backward()


def test_calls_do_not_ask_torch_for_the_size_of_a_group():
    over_processes(2, check_questions)


def check_all(group):
    check_attention(group)
    check_batch_of_attention(group)
    check_decoding(group)
    check_mlps(group)
    check_embeddings(group)
    check_blocks(group)


def check_halves(group):
    half = half_of(group)
    check_attention(half)
    check_embeddings(half)
    check_blocks(half)


def test_groups_of_a_part_of_the_processes():
    """Whose ranks are not those among all processes."""
    over_processes(4, check_halves)


def test_marks():
    over_processes(2, check_marks)


def test_compiled():
    over_processes(2, check_compiled)


def test_packed_attention():
    over_processes(2, check_packed_attention)


@pytest.mark.parametrize("processes", [2, 4])
def test_divided_modules(processes):
    over_processes(processes, check_all)


@pytest.mark.parametrize("processes", ON_GPUS)
def test_divided_modules_on_gpus(processes):
    over_processes(processes, check_all, backend="nccl")


@pytest.mark.parametrize(
    ("num_heads", "num_heads_kv", "expected"),
    [
        (6, 6, [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4], [4]), ([5], [5])]),
        (8, 4, [([0, 1], [0]), ([2, 3], [1]), ([4, 5], [2]), ([6, 7], [3])]),
        (10, 5, [([0, 1, 2, 3], [0, 1]), ([4, 5], [2]), ([6, 7], [3]), ([8, 9], [4])]),
        (6, 1, [([0, 1], [0]), ([2, 3], [0]), ([4], [0]), ([5], [0])]),
        (6, 2, [([0, 1], [0]), ([2], [0]), ([3, 4], [1]), ([5], [1])]),
        (6, 3, [([0], [0]), ([1], [0]), ([2, 3], [1]), ([4, 5], [2])]),
        (8, 2, [([0, 1], [0]), ([2, 3], [0]), ([4, 5], [1]), ([6, 7], [1])]),
    ],
)
def test_heads_of_four_processes(num_heads, num_heads_kv, expected):
    found = [heads_of_process(num_heads, num_heads_kv, 4, rank) for rank in range(4)]
    assert [(list(heads.q), list(heads.kv)) for heads in found] == expected
