"""Layers within fused modules are called where a call does more than their parameters say.

Each row of PATHS is a module that fuses and the same of plain layers, and each of WRAPPINGS a change of one layer in
them. Whatever the change, both compute the same, with the same gradients, and hooks run alike.
"""

import copy
import functools

import accelerate
import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, GPT2Config

from flash_attn._ops import fused_dense, fusing
from flash_attn.losses.linear_cross_entropy import LinearCrossEntropyLoss
from flash_attn.models.bert import BertForMaskedLM
from flash_attn.models.gpt import GPTLMHeadModel
from flash_attn.models.vit import VisionTransformer
from flash_attn.modules.block import Block, ParallelBlock
from flash_attn.modules.mha import MHA, ParallelMHA
from flash_attn.modules.mlp import FusedMLP, GatedMlp, Mlp, ParallelFusedMLP, ParallelMLP
from flash_attn.ops.fused_dense import FewRowsLinear, FusedDense
from flash_attn.ops.triton.layer_norm import RMSNorm
from flash_attn.ops.triton.mlp import FusedDenseSqreluDense
from flash_attn.utils.generation import InferenceParams

DIM, SEQLEN = 16, 4


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    """A group of this process alone."""
    file = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield dist.group.WORLD
    made.cache_clear()  # modules hold the group, and a process may come back to this file
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# Modules that fuse, and the same of plain layers


def sqrelu(x):
    return F.relu(x).square()


tanh_gelu = functools.partial(F.gelu, approximate="tanh")


def mlp(fused, **options):
    return (FusedMLP if fused else functools.partial(Mlp, activation=tanh_gelu))(DIM, 24, **options)


def mlp_of_sqrelu(fused):
    return FusedDenseSqreluDense(DIM, 24) if fused else Mlp(DIM, 24, activation=sqrelu)


def gated_mlp(fused):
    """Only F.silu itself is fused."""
    return GatedMlp(DIM, 24, activation=F.silu if fused else lambda x: F.silu(x), multiple_of=8)


def parallel_mlp(fused):
    if fused:
        return ParallelFusedMLP(DIM, 24, process_group=dist.group.WORLD, activation="relu")
    return ParallelMLP(DIM, 24, activation=F.relu, process_group=dist.group.WORLD)


def block(fused, cls=Block, norm=nn.LayerNorm, **options):
    mixer = functools.partial(MHA, num_heads=2)
    parts = dict(mixer_cls=mixer, mlp_cls=functools.partial(Mlp, hidden_features=24), norm_cls=norm)
    return cls(DIM, **parts | options, fused_dropout_add_ln=fused)


def attention(fused):
    options = dict(qk_norm=True, causal=True)
    if not fused:
        return MHA(DIM, 2, **options)
    return ParallelMHA(DIM, 2, dist.group.WORLD, sequence_parallel=False, **options)


def gpt(fused, **options):
    flags = dict.fromkeys(("fused_mlp", "fused_bias_fc", "fused_dropout_add_ln"), fused)
    config = GPT2Config(
        n_embd=DIM,
        n_layer=1,
        n_head=2,
        n_positions=SEQLEN,
        vocab_size=11,
        embd_pdrop=0,
        attn_pdrop=0,
        resid_pdrop=0,
        initializer_range=0.3,
        pad_vocab_size_multiple=8,
        **flags,
        **options,
    )
    return GPTLMHeadModel(config)


def bert(fused):
    flags = dict.fromkeys(("fused_mlp", "fused_bias_fc", "fused_dropout_add_ln"), fused)
    config = BertConfig(
        vocab_size=11,
        hidden_size=DIM,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=SEQLEN,
        hidden_act="gelu_new",
        initializer_range=0.3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    vars(config).update(flags)
    return BertForMaskedLM(config)


def vit(fused, norm=None):
    return VisionTransformer(
        4,
        2,
        embed_dim=DIM,
        depth=1,
        num_heads=2,
        mlp_ratio=1.5,
        num_classes=5,
        fused_bias_fc=fused,
        act_layer=nn.ReLU,
        fused_mlp=fused,
        fused_dropout_add_ln=fused,
        norm_layer=norm,
    )


# What they compute: functions of a model to (results, inputs that get a gradient).


def of_tensors(number, module):
    x = torch.randn(number, 2, SEQLEN, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = module(*x)
    return torch.cat([each.flatten() for each in out]) if isinstance(out, tuple) else out, x


def of_images(model):
    x = torch.linspace(-2, 3, 96).sin().view(2, 3, 4, 4).requires_grad_()
    return model(x), x


TOKENS = torch.tensor([[1, 5, 2, 10], [7, 7, 0, 3]])


def loss(model, **options):
    """The loss of a model that fuses; of the other, that of its logits."""
    if not model.config.fused_mlp:
        logits = model(TOKENS).logits[:, :-1, :11]
        return F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten(), **options), None
    loss_fn = LinearCrossEntropyLoss(num_classes=11, **options) if options else None
    return model(TOKENS, labels=TOKENS, loss_fn=loss_fn).loss, None


def of_masked(model):
    return model(TOKENS, labels=TOKENS).loss, None


def without_gradient(module):
    """As in a step of decoding, with a kernel for few rows."""
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_dense, "is_for_few_rows", lambda x, weight: True)
        return one(module)[0], None


one, two, three = (functools.partial(of_tensors, number) for number in (1, 2, 3))

# name: (module, its results, layers to change)
PATHS = {
    "mlp": (functools.partial(mlp, return_residual=True), one, "fc1 fc2"),
    "mlp of squared relu": (mlp_of_sqrelu, one, "fc1"),
    "gated mlp": (gated_mlp, without_gradient, "fc1"),
    "parallel mlp": (parallel_mlp, one, "fc1 fc2"),
    "block": (block, two, "norm1 drop_path2"),
    "block of rms norms": (functools.partial(block, norm=RMSNorm), two, "norm2"),
    "block with the norm last": (functools.partial(block, prenorm=False), one, "norm1 dropout2"),
    "parallel block": (functools.partial(block, cls=ParallelBlock), three, "norm2 dropout1"),
    "parallel block, one norm": (functools.partial(block, cls=ParallelBlock, tied_norm=True), three, "norm1"),
    "parallel attention": (attention, one, "q_norm"),
    "gpt": (gpt, loss, "transformer.ln_f lm_head"),
    "gpt of rms norms": (functools.partial(gpt, rms_norm=True, residual_in_fp32=True), loss, "transformer.ln_f"),
    "gpt, normed head": (functools.partial(gpt, norm_head=True, tie_word_embeddings=False), loss, "lm_head"),
    "gpt, loss of one's own": (gpt, functools.partial(loss, label_smoothing=0.2), "lm_head"),
    "bert": (bert, of_masked, "bert.emb_ln"),
    "vit": (vit, of_images, "norm drop_path"),
}


# ---------------------------------------------------------------------------------------------------------------------
# What may happen to a layer: functions of (model, name of the layer, calls), which append to calls what the layer does


def replace(model, name, layer):
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, layer)


def replaced_by(wrap):
    return lambda model, name, calls: replace(model, name, wrap(model.get_submodule(name)))


def changed_by(change):
    def wrap(model, name, calls):
        change(model.get_submodule(name))

    return wrap


def forward_hook(model, name, calls):
    model.get_submodule(name).register_forward_hook(lambda layer, args, out: calls.append(1) or 1.5 * out)


def forward_pre_hook(model, name, calls):
    model.get_submodule(name).register_forward_pre_hook(lambda layer, args: calls.append(1) or 1.5 * args[0])


def backward_hook(model, name, calls):
    def hook(layer, grads, _):
        return calls.append(1) or tuple(None if x is None else 1.5 * x for x in grads)

    model.get_submodule(name).register_full_backward_hook(hook)


def backward_pre_hook(model, name, calls):
    model.get_submodule(name).register_full_backward_pre_hook(lambda layer, grads: calls.append(1) or (1.5 * grads[0],))


def global_hook(model, name, calls):
    changed = model.get_submodule(name)

    def hook(layer, args, out):
        return calls.append(1) or 1.5 * out if layer is changed else None

    return nn.modules.module.register_module_forward_hook(hook)


def own_forward(model, name, calls):
    layer = model.get_submodule(name)
    before = layer.forward
    layer.forward = lambda *args: calls.append(1) or 1.5 * before(*args)


def own_class(model, name, calls):
    """One that overrides nothing of torch's, and one that does."""
    layer = model.get_submodule(name)
    layer.__class__ = type("Own", (type(layer),), {})
    before = layer.__class__
    layer.__class__ = type(
        "Other", (before,), {"forward": lambda self, x: calls.append(1) or 1.5 * before.forward(self, x)}
    )


def lora(model, name, calls):
    config = peft.LoraConfig(r=2, target_modules=[name], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)


def saved_by_peft(model, name, calls):
    """A layer that is trained whole beside adapters of others, wrapped in a module of peft's."""
    others = [other for other, layer in model.named_modules() if other.endswith("out_proj")]
    config = peft.LoraConfig(r=2, target_modules=others, modules_to_save=[name], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)


def sharded(model, name, calls):
    fully_shard(model.get_submodule(name), mesh=init_device_mesh("cpu", (1,)))


ANY = {
    "forward hook": forward_hook,
    "forward pre-hook": forward_pre_hook,
    "backward hook": backward_hook,
    "backward pre-hook": backward_pre_hook,
    "global hook": global_hook,
    "forward of its own": own_forward,
    "class of its own": own_class,
    "torch.compile": replaced_by(functools.partial(torch.compile, backend="eager")),
    "checkpoint wrapper": replaced_by(checkpoint_wrapper),
}
HOOKS = [name for name in ANY if "hook" in name or "its own" in name]
WITH_WEIGHT = {
    "pruned": changed_by(lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5)),
    "weight_norm": changed_by(weight_norm),
    "weight_norm, parametrized": changed_by(parametrizations.weight_norm),
    "spectral_norm, parametrized": changed_by(parametrizations.spectral_norm),
    "fully_shard": sharded,
}
OF_LINEAR = {"spectral_norm": changed_by(spectral_norm), "lora": lora}
OF_NORM = {"saved by peft": saved_by_peft}
WRAPPINGS = ANY | WITH_WEIGHT | OF_LINEAR | OF_NORM


def cases():
    for path, (_, _, layers) in PATHS.items():
        for name in layers.split():
            leaf = name.rpartition(".")[2]
            names = ANY
            if "drop" not in leaf:
                names = names | WITH_WEIGHT | (OF_LINEAR if leaf.startswith(("fc", "lm_head")) else OF_NORM)
            if path == "parallel attention":  # has no unfused twin whose out_proj peft could find alike
                names = {each: names[each] for each in names if each != "saved by peft"}
            for wrapping in names:
                yield pytest.param(path, name, wrapping, id=f"{path}-{leaf}-{wrapping}")


@functools.cache
def made(path):
    """The module that fuses and the plain one, with equal parameters."""
    make, _, _ = PATHS[path]
    fused, plain = make(True), make(False)
    for parameter in fused.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    plain.load_state_dict(fused.state_dict())
    return fused, plain


def twins(path):
    """Copies of the two, which take less time than new ones, and what they compute."""
    group = dist.group.WORLD
    return *(copy.deepcopy(model, {id(group): group}) for model in made(path)), PATHS[path][1]


def results(model, run):
    """(results, gradients by name)."""
    out, x = run(model)
    if not out.requires_grad:
        return out, {}
    (out.flatten() * torch.linspace(-1, 2, out.numel())).sum().backward()
    grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    grads = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in grads.items()}
    return out.detach(), grads | ({} if x is None else {"input": x.grad})


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(("path", "name", "wrapping"), list(cases()))
@pytest.mark.cover(2)
def test_changed_layers_are_called(path, name, wrapping):
    fused, plain, run = twins(path)
    layer = fused.get_submodule(name)
    kind, x = type(layer), torch.zeros(1)
    assert fusing.may_fuse(layer, (kind,), x)
    found, calls = [], []
    for model in (fused, plain):
        torch.default_generator.manual_seed(0)  # which is much faster than torch.manual_seed
        calls.append([])
        handle = WRAPPINGS[wrapping](model, name, calls[-1])
        assert not fusing.may_fuse(model.get_submodule(name), (kind,), x)
        with torch.no_grad():  # a weight that was computed before is now another
            for parameter in model.parameters():
                parameter.mul_(0.9).add_(0.02)
        with torch.compiler.set_stance("force_eager"):  # what is compiled is a class of its own, which is what counts
            found.append(results(model, run))
        if handle is not None:
            handle.remove()
    has_gradient = run is not without_gradient
    assert calls[0] == calls[1]
    assert bool(calls[0]) == (wrapping in HOOKS and (has_gradient or "backward" not in wrapping))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    adapters = [grad for key, grad in found[0][1].items() if "lora" in key]
    assert all(grad.abs().max() > 0 for grad in adapters)
    assert bool(adapters) == (has_gradient and wrapping in ("lora", "saved by peft"))


@pytest.mark.parametrize("path", PATHS)
def test_parameters_that_are_fetched_for_a_call(path):
    """accelerate keeps them on the meta device, and its hooks put them in place."""
    fused, plain, run = twins(path)
    expected, _ = run(plain.eval())
    accelerate.cpu_offload(fused.eval(), execution_device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(run(fused)[0], expected.detach(), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# The gate itself


def test_what_is_fused():
    """Layers as they were made, whatever the device."""
    x, linear = torch.zeros(1), (nn.Linear, FewRowsLinear)
    for layer in (nn.Linear(2, 3), nn.Linear(2, 3, bias=False), FewRowsLinear(2, 3)):
        assert fusing.may_fuse(layer, linear, x)
        assert not fusing.may_fuse(layer, (nn.LayerNorm,), x)
        assert not fusing.may_fuse(layer, linear, x.to("meta"))
        assert fusing.may_fuse(layer.to("meta"), linear, x.to("meta"))
        assert not fusing.may_fuse(layer, linear, x)
    assert fusing.may_fuse(nn.Dropout(), (nn.Dropout,), x)
    compiled = nn.Linear(2, 3)
    compiled.compile(backend="eager")
    assert not fusing.may_fuse(compiled, linear, x)
    divided = nn.Linear(2, 3)
    divided.weight = nn.Parameter(distribute_tensor(divided.weight, init_device_mesh("cpu", (1,))))
    assert not fusing.may_fuse(divided, linear, x)


def test_functional_calls_are_fused():
    """Parameters that torch.func puts in place of others are plain tensors."""
    module, x = mlp(True), torch.randn(2, DIM)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_dense, "mlp", lambda *args, mlp=fused_dense.mlp: seen.append(1) or mlp(*args))
        parameters = {name: 2 * parameter for name, parameter in module.named_parameters()}
        torch.func.functional_call(module, parameters, (x,))
        with FakeTensorMode():
            mlp(True)(torch.randn(2, DIM))
    assert len(seen) == 2


@pytest.mark.parametrize("hooked", [False, True])
def test_graphs(hooked):
    """One graph without a break, of calls or of what is fused; the same in torch.export."""
    module, x = (
        block(True, norm=RMSNorm, mlp_cls=functools.partial(FusedMLP, hidden_features=24)),
        torch.randn(2, 4, DIM),
    )
    if hooked:
        for name in ("norm1", "mlp.fc1"):
            forward_hook(module, name, [])
    expected = module(x)
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="eager")(x), expected)
    module, x = module.bfloat16(), x.bfloat16()
    for strict in (False, True):
        nodes = torch.export.export(module, (x,), strict=strict).graph_module.print_readable(print_output=False)
        assert nodes.count("flash_attn.layer_norm_fwd.default(") == 2  # a norm that is called is an op, too
        assert ("fused_dense_fwd" in nodes) != hooked


# ---------------------------------------------------------------------------------------------------------------------
# Layers that a kernel would compute otherwise


def different(model):
    """Norms of one residual stream that have not the same eps."""
    model.norm2.eps = 0.5


def without_dropout(model):
    model.dropout1.eval()
    model.drop_path1.eval()


IN_TRAINING = dict(resid_dropout1=0.5, drop_path1=0.5)
OTHERWISE = {  # options of a block, what happens to it, whether something is drawn
    "norms without weights": (dict(norm=functools.partial(nn.LayerNorm, elementwise_affine=False)), None, False),
    "norms of two dimensions": (dict(norm=lambda dim: nn.LayerNorm((4, dim))), None, False),
    "norms with dropout": (dict(norm=functools.partial(RMSNorm, dropout_p=0.5)), None, True),
    "dropout in evaluation": (IN_TRAINING, without_dropout, False),
    "everything is dropped": (dict(resid_dropout1=1.0), None, False),
    "norms that differ": (dict(cls=ParallelBlock), different, False),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_a_kernel_would_compute_otherwise(name):
    options, change, draws = OTHERWISE[name]
    found, again = [], []
    for fused in (True, False):
        torch.default_generator.manual_seed(0)
        model = block(fused, **options)
        if change is not None:
            change(model)
        found.append(results(model, two))
        again.append(two(model)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert torch.equal(again[0], found[0][0]) != draws


def test_hooks_of_the_dropout_of_a_norm():
    norm, calls, x = RMSNorm(DIM, dropout_p=0.5).eval(), [], torch.randn(2, DIM)
    expected = norm(x)
    norm.drop.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(norm(x), expected)
    assert calls == [1]


@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_stay_those_of_fused_norms(residual_dtype):
    """With norms in float32 in a model of 16 bits, the layers after a norm that has a hook get 16 bits."""
    model = block(True, residual_in_fp32=True).bfloat16()
    for norm in (model.norm1, model.norm2):
        norm.float()
    x, residual = torch.randn(2, 2, 4, DIM).bfloat16()
    for given in (None, residual.to(residual_dtype)):
        expected = model(x, given)
        handles = [norm.register_forward_hook(lambda *_: None) for norm in (model.norm1, model.norm2)]
        torch.testing.assert_close(model(x, given), expected, rtol=0.03, atol=0.03)  # also of dtypes
        for handle in handles:
            handle.remove()


def test_an_identity_in_place_of_an_mlp_may_be_wrapped():
    model = block(True, mlp_cls=nn.Identity)
    expected, _ = two(model)
    model.mlp = checkpoint_wrapper(model.mlp)
    assert torch.equal(two(model)[0], expected)


def test_hooks_of_rotary_embeddings_run_while_decoding():
    """The kernel of decoding rotates by itself, unless the module has more to do."""
    mha = MHA(64, 2, rotary_emb_dim=32, causal=True, use_flash_attn=True, layer_idx=0).eval()
    x, found, calls = torch.randn(2, 6, 64), [], []

    def decode():
        params, outs = InferenceParams(8, 2), []
        for start, end in ((0, 4), (4, 5), (5, 6)):
            outs.append(mha(x[:, start:end], inference_params=params))
            params.seqlen_offset = end
        return torch.cat(outs, 1)

    with torch.no_grad():
        found.append(decode())
        mha.rotary_emb.register_forward_hook(lambda *_: calls.append(1))
        found.append(decode())
        found.append(mha(x))
    assert len(calls) == 4
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=1e-4, atol=1e-5)


def test_weights_that_are_no_plain_tensors():
    """A linear layer is computed by torch then, and a cache for its heads is a plain tensor."""
    mesh, layer, x = init_device_mesh("cpu", (1,)), FusedDense(DIM, 5, return_residual=True), torch.randn(2, DIM)
    expected = layer(x)
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(distribute_tensor(parameter, mesh)))
    found = layer(distribute_tensor(x, mesh))
    torch.testing.assert_close([each.full_tensor() for each in found], list(expected))
    mha = MHA(DIM, 2)
    fully_shard(mha, mesh=mesh)
    assert type(mha.allocate_inference_cache(1, 3)) is torch.Tensor


# ---------------------------------------------------------------------------------------------------------------------
# The loss of logits


def test_a_loss_of_hidden_states_is_refused_where_the_head_must_be_called():
    model = gpt(True)

    def own(hidden, weight, labels, bias):
        return hidden.sum()

    assert model(TOKENS, labels=TOKENS, loss_fn=own).loss.requires_grad
    with FlopCounterMode(display=False):  # observes all modules: the head, which the user's function replaces, too
        assert model(TOKENS, labels=TOKENS, loss_fn=own).loss.requires_grad
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match=r"loss_fn must have a method of_logits, .*found <function"):
        model(TOKENS, labels=TOKENS, loss_fn=own)


def test_a_loss_that_derives_from_ours_is_itself_where_the_head_must_be_called():
    class Doubled(LinearCrossEntropyLoss):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    class OfLogits(Doubled):
        def of_logits(self, *args, **kwargs):
            return 2 * super().of_logits(*args, **kwargs)

    model = gpt(True)
    expected = model(TOKENS, labels=TOKENS, loss_fn=Doubled()).loss
    model.lm_head.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(model(TOKENS, labels=TOKENS, loss_fn=OfLogits()).loss, expected)
    with pytest.raises(TypeError, match=r"loss_fn must have a method of_logits, .*found Doubled"):
        model(TOKENS, labels=TOKENS, loss_fn=Doubled())
