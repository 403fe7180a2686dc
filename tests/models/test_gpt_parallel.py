"""The decoder divided over processes is the whole one: logits, loss, every gradient, checkpoints, generation."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from families import CASES
from processes import ON_GPUS, over_processes
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config

from flash_attn.models.gpt import GPTLMHeadModel, GPTModel, combine_state_dicts_tp, shard_state_dict_tp
from flash_attn.utils.distributed import allreduce_sequence_parallel_grad
from flash_attn.utils.generation import decode_speculative

VOCAB, BATCH, SEQLEN = 90, 4, 8
SIZES = dict(
    vocab_size=VOCAB,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_positions=16,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    initializer_range=0.2,
    pad_vocab_size_multiple=8,
    bos_token_id=1,
    eos_token_id=2,
)
GATED = dict(activation_function="swiglu", n_inner=96, mlp_multiple_of=8)
ROTARY = dict(n_positions=0, rotary_emb_fraction=1.0, rms_norm=True, tie_word_embeddings=False)
CONFIGS = {
    "gpt2": dict(),
    "gpt2 fused": dict(use_flash_attn=True, fused_mlp=True, fused_bias_fc=True, fused_dropout_add_ln=True),
    "uneven heads": dict(n_head=6, n_embd=96, use_flash_attn=True, use_alibi=True, n_positions=0),
    "llama": ROTARY | GATED | dict(n_head=8, n_head_kv=4, residual_in_fp32=True),
    "heads with norms": ROTARY | GATED | dict(n_head=8, n_head_kv=4, head_dim=24, qk_norm=True),
    "uneven heads with norms": ROTARY | GATED | dict(n_head=6, head_dim=8, qk_norm=True, use_flash_attn=True),
    "uneven key heads": ROTARY | GATED | dict(n_head=6, n_head_kv=3, n_embd=96, use_flash_attn=True),
    "one key head": dict(n_head=6, n_head_kv=1, head_dim=16, use_flash_attn=True, use_alibi=True, n_positions=0),
    "shared key heads with norms": ROTARY | GATED | dict(n_head=8, n_head_kv=2, qk_norm=True),
    "parallel": ROTARY | dict(rms_norm=False, parallel_block=True, parallel_block_tied_norm=True, lm_head_bias=True),
    "parallel, two norms": ROTARY | dict(rms_norm=False, parallel_block=True, fused_dropout_add_ln=True),
    "normed head": ROTARY | GATED | dict(norm_head=True, mup_output_multiplier=3.0),
    "postnorm": dict(prenorm=False),
    "recomputed": dict(gradient_checkpointing=True),
    "gemma": ROTARY
    | GATED
    | dict(
        n_head=8,
        n_head_kv=4,
        head_dim=24,
        qk_norm=True,
        norm_zero_centered=True,
        output_norms=True,
        use_flash_attn=True,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        sliding_window=[3, None],
        rotary_emb_base=[100.0, 1e4],
        tie_word_embeddings=True,
    ),
    "norms of outputs alone": ROTARY | GATED | dict(input_norms=False, output_norms=True, fused_dropout_add_ln=True),
    "granite": ROTARY | GATED | dict(mup_residual_multiplier=0.3, rotary_emb_fraction=[1.0, 0.0]),
    "modern": ROTARY
    | dict(
        activation_function="sqrelu",
        fused_mlp=True,
        mlp_fc1_bias=False,
        mlp_fc2_bias=False,
        qk_norm=True,
        use_flash_attn=True,
        sliding_window=[3, None],
        final_logit_softcapping=3.0,
    ),
    "cohere": ROTARY | dict(rms_norm=False, norm_bias=False, parallel_block=True, parallel_block_tied_norm=True),
}
SHARED_KEY_HEADS = "uneven key heads", "one key head", "shared key heads with norms"
OF_TWO_LAYERS = "gpt2", "llama", "gemma", "granite", "recomputed", "modern"
OF_FOUR = "gpt2 fused", "uneven heads", "uneven heads with norms", *SHARED_KEY_HEADS  # where 4 processes are not 2


def device_of(group):
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


@functools.cache
def whole_of(group, name):
    torch.manual_seed(0)
    layers = 2 if dist.get_backend(group) == "nccl" or name in OF_TWO_LAYERS else 1  # a CPU takes seconds for each
    whole = GPTLMHeadModel(GPT2Config(**SIZES | CONFIGS[name] | dict(n_layer=layers)), device=device_of(group))
    for parameter in whole.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter)
    return whole


@functools.cache
def pair_of(group, name, sequence_parallel=False):
    """A model and this process's part of it, with the same weights. All checks have the same ones."""
    whole = whole_of(group, name)
    config = copy.deepcopy(whole.config)
    config.sequence_parallel = sequence_parallel
    divided = GPTLMHeadModel(config, process_group=group, device=device_of(group))
    divided.load_state_dict(part(whole.state_dict(), config, group))
    return whole, divided


def part(state_dict, config, group):
    state_dict = {name: tensor.clone() for name, tensor in state_dict.items()}
    return shard_state_dict_tp(state_dict, config, dist.get_world_size(group), dist.get_rank(group))


def ids_for(group):
    ids = torch.randint(VOCAB, (BATCH, SEQLEN), generator=torch.Generator().manual_seed(1))
    return ids.to(device_of(group))


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(found, expected, **kwargs):
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4, **kwargs)


def documents_for(group):
    """Two of which go over the end of a row."""
    ends = torch.tensor([0, 3, 10, 10, 22, BATCH * SEQLEN], dtype=torch.int32)
    return dict(cu_seqlens=ends.to(device_of(group)), max_seqlen=12)


def check_training(group, names, in_turn):
    """in_turn: every second configuration has sequence_parallel, instead of all with and without it."""
    ids, rank = ids_for(group), dist.get_rank(group)
    labels = ids.masked_fill(ids % 5 == 0, -100)
    mask = (torch.arange(SEQLEN, device=ids.device) >= ids[:, :1] % 3).long()
    for i, name in enumerate(names):
        whole = whole_of(group, name)
        own = whole(ids).logits.chunk(dist.get_world_size(group), dim=-1)[rank]
        expected = whole(ids, labels=labels).loss
        expected.backward()
        gradients = part(gradients_of(whole), whole.config, group)
        for sequence_parallel in [i % 2 == 1] if in_turn else (False, True):
            _, divided = pair_of(group, name, sequence_parallel)
            assert_close(divided(ids).logits, own.flatten(0, 1) if sequence_parallel else own)
            found = divided(ids, labels=labels).loss
            assert_close(found, expected)
            if not sequence_parallel:
                masked = (model(ids, labels=labels, attention_mask=mask).loss for model in (whole, divided))
                assert_close(*masked)
            if whole.transformer.use_flash_attn:
                apart = [model(ids, labels=labels, **documents_for(group)).loss for model in (whole, divided)]
                assert_close(*apart)
                assert (apart[0] - expected).abs() > 1e-3
            found.backward()
            if sequence_parallel:
                allreduce_sequence_parallel_grad(divided, group)
            for key, gradient in gradients_of(divided).items():
                assert_close(gradient, gradients[key], msg=lambda text, key=key, name=name: f"{name}, {key}: {text}")


def check_parameters(group, names):
    """The parameters of all processes are those of the whole model, and each process has the shared ones too."""
    for name in names:
        whole, divided = pair_of(group, name, True)
        parts = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, {key: x.cpu() for key, x in divided.state_dict().items()}, group=group)
        again, expected = combine_state_dicts_tp(parts, whole.config), whole.state_dict()
        assert again.keys() == expected.keys()
        assert all(torch.equal(again[key], tensor.cpu()) for key, tensor in expected.items())
        own, of_all = (sum(x.numel() for x in model.parameters()) for model in (divided, whole))
        assert own < 0.6 * of_all


def check_generation(group, names):
    ids = ids_for(group)[:, :3]
    generating = "gpt2", "uneven heads", "llama", "heads with norms", "normed head", "gemma", *SHARED_KEY_HEADS
    for name in [name for name in generating if name in names]:
        whole, divided = (model.eval() for model in pair_of(group, name))
        options = dict(max_length=7, vocab_size=VOCAB, return_dict_in_generate=True, output_scores=True)
        expected = whole.generate(ids, **options)
        found = divided.generate(ids, tensor_parallel=dist.get_world_size(group), **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert_close(found.scores, expected.scores)
    _, divided = pair_of(group, "gpt2", True)
    with pytest.raises(ValueError, match=r"config.sequence_parallel must be False with inference_params, found True"):
        divided.generate(ids, max_length=12)


def check_checkpoints(group, path):
    """Each process reads its part."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    whole, divided = pair_of(group, "gpt2")
    if rank == 0:
        whole.save_pretrained(path, max_shard_size=50_000)
    dist.barrier(group)
    config = copy.deepcopy(whole.config)
    model = GPTLMHeadModel.from_pretrained(
        path, config, process_group=group, world_size=world, rank=rank, device=device_of(group), progress=False
    )
    for (key, one), (_, other) in zip(model.state_dict().items(), divided.state_dict().items(), strict=True):
        rows = slice(None, max(VOCAB - rank * len(one), 0)) if "word_emb" in key or "lm_head" in key else slice(None)
        assert torch.equal(one[rows], other[rows]), key
    assert model.transformer.ln_f.weight._shared_params and model.transformer.layers[0].norm1.weight._shared_params
    with pytest.raises(ValueError, match="process_group must be None to save a model"):
        divided.save_pretrained(path)


def check_family(group, path, path_of_draft):
    """Each process reads its part; prompts with padding and with a draft model go on as they do in one process."""
    world, rank, device = dist.get_world_size(group), dist.get_rank(group), device_of(group)
    options = dict(device=device, progress=False, sequence_parallel=False)
    whole, draft = (GPTLMHeadModel.from_pretrained(each, **options).eval() for each in (path, path_of_draft))
    divided = GPTLMHeadModel.from_pretrained(path, process_group=group, world_size=world, rank=rank, **options).eval()
    ids = ids_for(group)
    mask = (torch.arange(SEQLEN, device=device) >= torch.tensor([3, 0, 1, 7], device=device)[:, None]).long()
    with torch.no_grad():
        assert_close(divided(ids).logits, whole(ids).logits.chunk(world, dim=-1)[rank])
    scores = dict(max_new_tokens=8, return_dict_in_generate=True, output_scores=True)
    expected, found = (
        model.generate(ids, attention_mask=mask, tensor_parallel=processes, **scores)
        for model, processes in ((whole, 1), (divided, world))
    )
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(found.scores, expected.scores)
    expected = whole.generate(ids[:1], max_new_tokens=12)
    for each in (draft, whole, divided):
        found = decode_speculative(ids[:1], divided, each, SEQLEN + 12, tensor_parallel=world).sequences
        assert torch.equal(found, expected)


def check_errors(group):
    world = dist.get_world_size(group)
    _, divided = pair_of(group, "gpt2", True)
    ids = ids_for(group)
    with pytest.raises(ValueError, match=r"config.sequence_parallel must be False with attention_mask, found True"):
        divided(ids, attention_mask=torch.ones_like(ids))
    for options, says in (
        (dict(word_embed_proj_dim=32), "config.word_embed_proj_dim must be None with process_group, found 32"),
        (dict(attn_dwconv=True), "config.attn_dwconv must be False with process_group, found True"),
        (
            dict(qk_norm=True, qk_norm_over_heads=True),
            "config.qk_norm_over_heads must be False with several processes, found True",
        ),
        (
            dict(vocab_size=89, pad_vocab_size_multiple=1),
            rf"config.vocab_size \(rounded .*\) must be a multiple of the {world}",
        ),
    ):
        with pytest.raises(ValueError, match=says):
            GPTModel(GPT2Config(**SIZES | options), process_group=group, device="meta")


def check_ties(group):
    """The head of each process stays its part of the embedding: on memory after meta, loaded, and under FSDP."""
    config = GPT2Config(**SIZES)
    whole, divided = pair_of(group, "gpt2")
    state = part(whole.state_dict(), config, group)
    for without in ("", "lm_head.weight", "transformer.embeddings.word_embeddings.weight"):
        for assign in (False, True):
            model = GPTLMHeadModel(config, process_group=group, device="meta").to_empty(device=device_of(group))
            model.load_state_dict({name: x.clone() for name, x in state.items() if name != without}, assign=assign)
            assert model.is_tied and torch.equal(model.lm_head.weight, divided.lm_head.weight)
    with pytest.raises(ValueError, match=r"word_embeddings\.weight and lm_head\.weight must be equal"):
        divided.load_state_dict(state | {"lm_head.weight": state["lm_head.weight"] + 1})
    holder = torch.nn.Module()  # as training/ has it: the model is within a module that is divided, too
    holder.model = GPTLMHeadModel(config, device="meta")
    mesh = DeviceMesh.from_group(group, device_of(group).type)
    for each in (*holder.model.transformer.layers, holder):
        fully_shard(each, mesh=mesh)
    holder.model.to_empty(device=device_of(group))
    assert holder.model.is_tied
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(holder, {f"model.{name}": x for name, x in whole.state_dict().items()}, options=options)
    found = get_model_state_dict(holder, options=options)
    assert holder.model.is_tied and torch.equal(found["model.lm_head.weight"], whole.lm_head.weight)


def check_all(group, names, path, in_turn=False):
    check_training(group, names, in_turn)
    check_parameters(group, names)
    check_generation(group, names)
    check_ties(group)
    check_checkpoints(group, path)
    check_errors(group)
    pair_of.cache_clear()
    whole_of.cache_clear()


@pytest.mark.parametrize(
    ("processes", "names"),
    [(2, [*CONFIGS]), (4, OF_FOUR), pytest.param(4, [*CONFIGS], marks=pytest.mark.slow)],
    ids=["2", "4", "4, all"],
)
def test_divided_model(processes, names, tmp_path):
    over_processes(processes, check_all, names, tmp_path, names is OF_FOUR)


@pytest.mark.parametrize("processes", ON_GPUS)
def test_divided_model_on_gpus(processes, tmp_path):
    over_processes(processes, check_all, [*CONFIGS], tmp_path, backend="nccl")


@pytest.mark.parametrize(
    "name",
    [
        "llama gqa",
        "falcon alibi, multi-query",
        "bigcode",
        "qwen3",
        "gemma2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("falcon alibi", "falcon")),
    ],
)
def test_divided_families(name, tmp_path):
    for each in ("gpt2", name):
        torch.manual_seed(0)
        _, reference, _ = CASES[each].build()
        reference.save_pretrained(tmp_path / each)
    over_processes(2, check_family, tmp_path / name, tmp_path / "gpt2")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(vocab_size=89, pad_vocab_size_multiple=1), r"config.vocab_size .*\) must be a multiple of the 4"),
        (dict(n_inner=95), "config.n_inner must be a multiple of the 4 processes, found 95"),
        (dict(n_head_kv=1, head_dim=5), "config.n_head_kv must be at least the number of processes, 4, or .* found 1"),
        (dict(n_head=2), "config.n_head must be at least the number of processes, 4, found 2"),
    ],
)
def test_what_cannot_be_divided(options, says):
    config = GPT2Config(**SIZES | options)
    shard = functools.partial(shard_state_dict_tp, {}, config, 4, 0)
    for function in (shard, functools.partial(combine_state_dicts_tp, [{}] * 4, config)):
        with pytest.raises(ValueError, match=says):
            function()


@pytest.mark.parametrize("name", ["gpt2", "llama", "uneven heads"])
def test_a_part_does_not_keep_the_whole(name):
    """What torch.save writes of a part, and what stays in memory with it, is the part; tied weights stay one."""
    config = GPT2Config(**SIZES | CONFIGS[name])
    for rank in range(2):
        part = shard_state_dict_tp(GPTLMHeadModel(config).state_dict(), config, 2, rank)
        for key, tensor in part.items():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous(), key
        embedding, head = part["transformer.embeddings.word_embeddings.weight"], part["lm_head.weight"]
        assert (embedding.data_ptr() == head.data_ptr()) == (name != "llama")


def test_processes_that_there_are_not():
    config = GPT2Config(**SIZES)
    for world_size, rank, says in (
        (2, 2, "rank must be from 0 to 1, found 2"),
        (2, -1, "rank must be from 0 to 1, found -1"),
        (0, 0, "the number of processes must be positive, found 0"),
    ):
        with pytest.raises(ValueError, match=says):
            shard_state_dict_tp({}, config, world_size, rank)
    with pytest.raises(ValueError, match="the number of processes must be positive, found 0"):
        combine_state_dicts_tp([], config)


@pytest.mark.parametrize(
    ("name", "rank"),
    [("transformer.layers.0.mixer.Wqkv.weight", 0), ("transformer.layers.1.mlp.fc2.weight", 1), ("lm_head.weight", 1)],
)
def test_parts_that_lack_a_tensor(name, rank):
    config = GPT2Config(**SIZES)
    whole = GPTLMHeadModel(config).state_dict()
    parts = [shard_state_dict_tp(dict(whole), config, 2, each) for each in range(2)]
    assert "transformer.layers.0.mixer.out_proj.bias" not in parts[1]  # what only the first process has
    assert combine_state_dicts_tp(parts, config).keys() == whole.keys()
    del parts[rank][name]
    with pytest.raises(ValueError, match=rf"state_dicts must have the parts of all 2 processes, found 1 of {name}"):
        combine_state_dicts_tp(parts, config)


def test_parts_with_other_rows_of_heads():
    """As Meta's files have them: the whole key head in each process that shares it. Or parts in another order."""
    config = GPT2Config(**SIZES | dict(n_head_kv=2))
    parts = [{"layers.0.mixer.Wqkv.weight": torch.zeros(48, 64)} for _ in range(4)]
    with pytest.raises(ValueError, match="Wqkv of process 0 of 4 must have 32 rows, found 48"):
        combine_state_dicts_tp(parts, config)
    config = GPT2Config(**SIZES | CONFIGS["uneven heads"])
    whole = GPTLMHeadModel(config).state_dict()
    parts = [shard_state_dict_tp(dict(whole), config, 4, rank) for rank in range(4)]
    with pytest.raises(ValueError, match="Wqkv of process 0 of 4 must have 96 rows, found 48"):
        combine_state_dicts_tp(parts[::-1], config)
