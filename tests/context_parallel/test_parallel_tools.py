"""Tokens in chunks, attention that is not computed again, meshes, and parameters as DTensors."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from processes import over_processes
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config

from flash_attn._ops import flash_attn
from flash_attn.context_parallel import Plan
from flash_attn.models.gpt import GPTLMHeadModel
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import GatedMlp, Mlp
from flash_attn.parallel import _mesh, build_mesh, chunked, set_mlp_chunks, to_dtensor
from flash_attn.utils.recompute import keep_attention


def gradients(function, x, parameters):
    x = x.clone().requires_grad_()
    out = function(x)
    return out.detach(), *torch.autograd.grad(out.square().sum(), [x, *parameters])


@pytest.mark.parametrize("chunks", [1, 3, 40])
def test_chunks_compute_the_layer(chunks):
    module = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 6, bias=False))
    module[0].bias.requires_grad_(False)
    parameters = [each for each in module.parameters() if each.requires_grad]
    x = torch.randn(2, 11, 8)
    found = gradients(lambda x: chunked(module, x, chunks), x, parameters)
    torch.testing.assert_close(found, gradients(module, x, parameters))
    with torch.no_grad():
        torch.testing.assert_close(chunked(module, x, chunks), module(x))
    assert not chunked(module, x, chunks)._is_view()


def test_chunks_add_gradients_in_float32():
    """In bfloat16, the sum over 64 chunks is as exact as that of one product."""
    module = nn.Linear(8, 8, dtype=torch.bfloat16)
    x = torch.randn(64, 8, dtype=torch.bfloat16)
    (grad,) = torch.autograd.grad(chunked(module, x, 64).sum(), module.bias)
    assert torch.equal(grad, torch.full_like(grad, 64))
    out = chunked(lambda x: module(x) * 1.01, x, 64, [module.bias])
    (grad,) = torch.autograd.grad(out.sum(), module.bias)
    torch.testing.assert_close(grad, torch.full_like(grad, 64.64))


def test_chunks_drop_and_cast_the_same_twice():
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    x = torch.ones(10, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = chunked(module, x, 3)
    assert out.dtype == torch.bfloat16
    torch.rand(3)
    state = torch.get_rng_state()
    (grad,) = torch.autograd.grad(out.float().sum(), module[0].bias)
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(grad, (out != 0).sum(0) * 2.0)


def test_chunks_within_a_checkpoint():
    """Whose recomputed tensors are others than those of the forward; parameters must still get their gradients."""
    module = Mlp(8)
    x = torch.randn(10, 8)
    expected = gradients(module, x, module.parameters())
    set_mlp_chunks(module, 4)
    for context in (torch.autograd.graph.save_on_cpu(), torch.autograd.set_grad_enabled(True)):
        with context:
            found = gradients(lambda x: checkpoint(module, x, use_reentrant=False), x, module.parameters())
        torch.testing.assert_close(found, expected)


def test_a_checkpoint_computes_no_chunk():
    """Each chunk is computed in the forward and once more in the backward, where a checkpoint brings back x alone."""
    calls, layer, before = [], nn.Linear(8, 8), nn.Linear(8, 8)
    layer.register_forward_hook(lambda *args: calls.append(1))
    parameters = [*before.parameters(), *layer.parameters()]
    x = torch.randn(10, 8)
    found = gradients(
        lambda x: checkpoint(lambda x: chunked(layer, before(x).relu(), 5), x, use_reentrant=False), x, parameters
    )
    assert len(calls) == 10
    torch.testing.assert_close(found, gradients(lambda x: layer(before(x).relu()), x, parameters))
    (grad,) = torch.autograd.grad(chunked(layer, x, 5).sum(), layer.bias)  # x gets no gradient
    torch.testing.assert_close(grad, torch.full((8,), 10.0))


def test_chunks_that_use_no_parameter():
    """As where no token of a chunk is for an expert: such chunks add nothing to the gradients of its parameters."""
    layer, x = nn.Linear(8, 8), torch.arange(-2.0, 2.0).repeat_interleave(3)[:, None].expand(12, 8)

    def some(x):
        return layer(x) if x[0, 0] >= 0 else x * 2

    (grad,) = torch.autograd.grad(chunked(some, x, 4, layer.parameters()).sum(), layer.bias)
    torch.testing.assert_close(grad, torch.full((8,), 6.0))


def test_compiled_chunks():
    layer, x = nn.Linear(8, 8), torch.randn(10, 8)

    def whole(x):
        return chunked(layer, (x * 2).sin(), 5).cos()

    compiled = torch.compile(whole, backend="aot_eager")
    expected = gradients(lambda x: layer((x * 2).sin()).cos(), x, layer.parameters())
    torch.testing.assert_close(gradients(compiled, x, layer.parameters()), expected)


def test_mlps_in_chunks():
    model = nn.ModuleList([Mlp(8, return_residual=True), GatedMlp(8, activation=F.silu), nn.Linear(8, 8)])
    x = torch.randn(2, 7, 8)
    expected = model[0](x), model[1](x)
    set_mlp_chunks(model, 3)
    assert model[1].mlp_chunks == 3 and model[0](x)[1] is x
    torch.testing.assert_close((model[0](x), model[1](x)), expected)
    assert "mlp_chunks" not in str(model.state_dict().keys())


def test_what_chunks_refuse():
    with pytest.raises(ValueError, match="chunks must be at least 1, found 0"):
        chunked(nn.Linear(2, 2), torch.ones(3, 2), 0)
    with pytest.raises(TypeError, match="parameters must be given if module is a function"):
        chunked(torch.relu, torch.ones(3, 2), 2)
    with pytest.raises(ValueError, match="the number of MLPs of model must be at least 1"):
        set_mlp_chunks(nn.Linear(2, 2), 2)
    with pytest.raises(ValueError, match="the number of dimensions of x must be at least 2, found 1"):
        chunked(nn.Linear(2, 2), torch.ones(2), 2)
    for function in (lambda x: x[:1], lambda x: x.sum(-1)):
        with pytest.raises(ValueError, match=r"module must return \(3, any\) for x \(3, 2\), found \((1, 2|3,)\)"):
            chunked(function, torch.ones(6, 2), 2, [])
    whole = nn.Sequential(nn.Linear(2, 2))
    whole.forward = lambda x: chunked(whole[0], x, 2)
    others = {name: torch.ones_like(each).requires_grad_() for name, each in whole.named_parameters()}
    out = torch.func.functional_call(whole, others, (torch.ones(4, 2),))
    with pytest.raises(RuntimeError, match="uses none of its parameters"):
        out.sum().backward()


# Attention that is not computed again


class Counted:
    """How often attention is computed."""

    def __init__(self, monkeypatch):
        self.count = 0
        for name in ("fwd", "fwd_features"):
            reference = getattr(flash_attn.reference, name)
            monkeypatch.setattr(flash_attn.reference, name, functools.partial(self.called, reference))

    def called(self, function, *args, **kwargs):
        self.count += 1
        return function(*args, **kwargs)


@pytest.mark.parametrize("offload", [False, True])
def test_attention_is_kept(monkeypatch, offload):
    module = MHA(32, 2, num_heads_kv=1, causal=True, use_flash_attn=True, rotary_emb_dim=16)
    x = torch.randn(2, 9, 32)
    expected = gradients(module, x, module.parameters())
    usual = functools.partial(checkpoint, module, use_reentrant=False)
    for function, calls in (
        (usual, 2),
        (functools.partial(usual, context_fn=functools.partial(keep_attention, offload)), 1),
    ):
        counted = Counted(monkeypatch)
        found = gradients(function, x, module.parameters())
        assert counted.count == calls
        assert all(map(torch.equal, found, expected))


SIZES = dict(
    vocab_size=60,
    n_embd=32,
    n_layer=2,
    n_head=2,
    n_positions=32,
    use_flash_attn=True,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)


def test_models_keep_attention(monkeypatch):
    model = GPTLMHeadModel(GPT2Config(**SIZES))
    ids = torch.randint(60, (2, 12))
    expected = torch.autograd.grad(model(ids, labels=ids).loss, model.parameters())
    for offload in (False, True):
        model.gradient_checkpointing_enable(keep_attention=True, offload=offload)
        counted = Counted(monkeypatch)
        found = torch.autograd.grad(model(ids, labels=ids).loss, model.parameters())
        assert counted.count == 2 and all(map(torch.equal, found, expected))
    for options in (dict(use_reentrant=True), dict(context_fn=keep_attention)):
        with pytest.raises(ValueError, match="keep_attention must be False with use_reentrant or context_fn"):
            model.gradient_checkpointing_enable(options, keep_attention=True)


def test_no_more_attention_than_was_kept():
    x = torch.randn(1, 4, 2, 16, requires_grad=True)

    calls = iter([1, 2])

    def more_later(x):
        for _ in range(next(calls)):
            x = flash_attn.forward(x, x, x, None, True, (-1, -1))[0]
        return x.sin()

    out = checkpoint(more_later, x, use_reentrant=False, context_fn=keep_attention, early_stop=False)
    with pytest.raises(RuntimeError, match="keep_attention has no more results of attention"):
        out.sum().backward()


def check_kept_under_a_plan(group):
    model = GPTLMHeadModel(GPT2Config(**SIZES))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, group_src=0, group=group)
    plan = Plan([9, 20], group, granularity=1)
    ids = torch.arange(29)[None] % 60
    batch = plan.shard_batch(dict(input_ids=ids, labels=ids))
    grads, counts = [], []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable(keep_attention=True, offload=True)
        with pytest.MonkeyPatch.context() as monkeypatch:
            counted = Counted(monkeypatch)
            grads.append(torch.autograd.grad(model(**batch, cp_plan=plan).loss, model.parameters()))
            counts.append(counted.count)
    assert counts[0] == counts[1] > 0
    assert all(map(torch.equal, *grads))


# Meshes and DTensors


def check_mesh(group):
    mesh = build_mesh(cp=2, tp=2)
    rank = dist.get_rank(group)
    assert mesh.whole.mesh_dim_names == ("dp_replicate", "dp_shard", "cp", "tp")
    assert dist.get_process_group_ranks(mesh.tp.get_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(mesh.cp.get_group()) == [rank % 2, rank % 2 + 2]
    assert [each.size() for each in mesh] == [4, 1, 1, 2, 2, 1, 2, 2, 2]
    assert mesh.hsdp is mesh.fsdp
    assert [each.size() for each in build_mesh(dp_replicate=2, dp_shard=2)] == [4, 2, 2, 1, 1, 4, 2, 4, 4]
    plan = Plan(8, mesh.cp, loss_group=mesh.loss)
    assert plan.world_size == 2
    for options, match in [
        (dict(cp=3), "must be a divisor of the number of processes, 4, found 3"),
        (dict(dp_shard=3), "the sizes must make the number of processes, 4, found .* = 3"),
        (dict(tp=0), "tp must be at least 1, found 0"),
    ]:
        with pytest.raises(ValueError, match=match):
            build_mesh(**options)


def test_a_mesh_is_where_the_default_group_exchanges_tensors(monkeypatch):
    """On GPUs also for a group without the name of a backend, and then with streams of high priority for cp."""
    made = []
    monkeypatch.setattr(_mesh, "init_device_mesh", lambda *args, **options: made.append((args, options)) or {})
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(_mesh, "device_of", lambda group: torch.device("cuda"))
    monkeypatch.setattr(_mesh, "backends_of", lambda: dict(cpu="gloo", cuda="nccl"))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    for device, expected in ((None, "cuda"), ("cuda", "cuda"), ("cpu", "cpu")):
        with pytest.raises(KeyError):
            build_mesh(cp=2, device_type=device)
        (found, *_), options = made.pop()
        assert found == expected and ("cp" in (options["backend_override"] or {})) == (expected == "cuda")


def check_dtensors(group, folder):
    """Parts over two processes that FSDP2 divides: the same gradients, and a checkpoint gives each its own part."""
    mesh = build_mesh(tp=2)
    tp, rank = mesh.tp.get_group(), dist.get_rank(mesh.tp.get_group())
    config = GPT2Config(**SIZES | dict(tie_word_embeddings=True), sequence_parallel=False)
    ids = torch.arange(12)[None] % 60
    models = []
    for _ in range(2):
        torch.manual_seed(rank)  # parts differ, what is shared does not
        models.append(GPTLMHeadModel(config, process_group=tp))
    plain, model = models
    expected = plain(ids, labels=ids).loss
    expected.backward()
    dims = {
        f"{path}.{name}": dim
        for path, module in model.named_modules()
        for name, dim in getattr(module, "divided_dims", {}).items()
    }
    assert to_dtensor(model, mesh.tp) is model
    assert model.lm_head.weight is model.transformer.embeddings.word_embeddings.weight
    for layer in model.transformer.layers:
        fully_shard(layer, mesh=mesh.hsdp)
    fully_shard(model, mesh=mesh.hsdp)
    found = model(ids, labels=ids).loss
    torch.testing.assert_close(found, expected)
    found.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = theirs.grad
        if name in dims:
            parts = [torch.empty_like(grad) for _ in range(2)]
            dist.all_gather(parts, grad, group=tp)
            grad = torch.cat(parts, dims[name])
        torch.testing.assert_close(ours.grad.full_tensor(), grad, msg=name)
    before = {name: parameter.to_local().clone() for name, parameter in model.named_parameters()}
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), before[name]), name


def check_copies(group):
    """Two copies, each divided over the two ranks of a sequence: gradients are those of the mean over all tokens."""
    mesh = build_mesh(dp_replicate=2, cp=2)
    assert mesh.hsdp.mesh_dim_names == ("dp_replicate", "fsdp") and mesh.hsdp.mesh.tolist() == [[0, 1], [2, 3]]
    torch.manual_seed(0)
    whole = GPTLMHeadModel(GPT2Config(**SIZES))
    model = copy.deepcopy(whole)
    ids = torch.randint(60, (2, 29))
    labels = ids.clone()
    labels[0, 5:] = -100  # means of the two rows are not those of equally many tokens
    expected = whole(ids, labels=labels).loss
    expected.backward()
    for part in (*model.transformer.layers, model):
        fully_shard(part, mesh=mesh.hsdp)
    plan = Plan(29, mesh.cp, loss_group=mesh.loss, granularity=1)
    row = slice(mesh.batch.get_local_rank(), mesh.batch.get_local_rank() + 1)
    loss = model(**plan.shard_batch(dict(input_ids=ids[row], labels=labels[row])), cp_plan=plan).loss
    loss.backward()
    dist.all_reduce(loss := loss.detach(), group=group)
    torch.testing.assert_close(loss / 4, expected.detach())
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert len(ours.placements) == 2
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("check", [check_mesh, check_kept_under_a_plan, check_copies], ids=lambda check: check.__name__)
def test_over_four(check):
    over_processes(4, check)


def test_checkpoints_of_parts(tmp_path):
    over_processes(4, check_dtensors, str(tmp_path))
