"""Blocks: the formula, fused and not, other libraries' blocks, graphs, decoding, options, errors."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flash_attn.modules.block import Block, ParallelBlock, StochasticDepth
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import GatedMlp, Mlp
from flash_attn.ops import rms_norm
from flash_attn.ops.triton.layer_norm import RMSNorm
from flash_attn.utils.generation import InferenceParams

DIM = 32
MIXER = functools.partial(MHA, num_heads=2, causal=True)
MLP = functools.partial(Mlp, hidden_features=48)


def block_of(block_cls=Block, device=None, **options):
    return block_cls(DIM, **dict(mixer_cls=MIXER, mlp_cls=MLP) | options).to(device)


def twins(block_cls, device, **options):
    """A block that is fused and one that is not, with the same parameters."""
    fused, plain = (block_of(block_cls, device, **options, fused_dropout_add_ln=fused) for fused in (True, False))
    for parameter in fused.parameters():
        nn.init.normal_(parameter, std=0.3)
    plain.load_state_dict(fused.state_dict())
    return fused, plain


def with_gradients(function, parameters, *tensors):
    """The results of function(*tensors), and gradients of the tensors and parameters for fixed ones of the results."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    douts = [torch.linspace(-1, 2, out.numel(), device=out.device).view_as(out).to(out.dtype) for out in outs]
    return *(out.detach() for out in outs), *torch.autograd.grad(outs, [*leaves, *parameters], douts)


def draw(number, device, dtype=torch.float32):
    return torch.randn(number, 2, 7, DIM, device=device).to(dtype).unbind(0)


# Numbers.


def prenorm(block, x, residual):
    h = x if residual is None else x + residual
    h2 = h + block.mixer(block.norm1(h))
    return block.mlp(block.norm2(h2)), h2


def postnorm(block, x):
    h = block.norm1(first(block.mixer(x)) + x)
    return block.norm2(first(block.mlp(h)) + h)


def first(result):
    return result[0] if isinstance(result, tuple) else result


ZERO_CENTERED = functools.partial(RMSNorm, zero_centered_weight=True)


@pytest.mark.parametrize("norm_cls", [nn.LayerNorm, RMSNorm, ZERO_CENTERED], ids=["layer", "rms", "zero-centred rms"])
@pytest.mark.parametrize("first", [False, True])
def test_prenorm(first, norm_cls, device):
    tensors = draw(1 if first else 2, device)
    for block in twins(Block, device, norm_cls=norm_cls):
        formula = functools.partial(prenorm, block, **dict(residual=None) if first else {})
        expected = with_gradients(formula, block.parameters(), *tensors)
        found = with_gradients(block, block.parameters(), *tensors)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm_cls", [nn.LayerNorm, nn.Identity], ids=["sandwich", "outputs alone"])
def test_outputs(norm_cls, device):
    """What mixer and MLP give goes through a norm of its own, also where there is none before them."""

    def formula(x, residual):
        h = x + residual
        h2 = h + block.output1(block.mixer(block.norm1(h)))
        return block.output2(block.mlp(block.norm2(h2))), h2

    options, x = dict(norm_cls=norm_cls, output_cls=ZERO_CENTERED), draw(2, device)
    blocks = twins(Block, device, **options) if norm_cls is nn.LayerNorm else [block_of(device=device, **options)]
    for block in blocks:
        expected = with_gradients(formula, block.parameters(), *x)
        found = with_gradients(block, block.parameters(), *x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    (y,) = draw(1, device, torch.bfloat16)
    _, residual = block.to(torch.bfloat16)(y, y)
    assert residual.dtype == torch.bfloat16
    wide = block_of(device=device, **options, residual_in_fp32=True).to(torch.bfloat16)
    out, residual = wide(y, y.float())
    assert (out.dtype, residual.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("block_cls", [Block, ParallelBlock])
def test_norms_without_weight(block_cls, device):
    block = block_of(block_cls, device, norm_cls=functools.partial(nn.LayerNorm, elementwise_affine=False))
    affine = block_of(block_cls, device)
    affine.load_state_dict(block.state_dict(), strict=False)
    (x,) = draw(1, device)
    torch.testing.assert_close(block(x), affine(x))


@pytest.mark.parametrize("return_residual", [False, True])
def test_postnorm(return_residual, device):
    options = dict(
        mixer_cls=functools.partial(MIXER, return_residual=return_residual),
        mlp_cls=functools.partial(MLP, return_residual=return_residual),
    )
    for block in twins(Block, device, **options, prenorm=False, return_residual=return_residual):
        x = draw(1, device)
        found = with_gradients(block, block.parameters(), *x)
        expected = with_gradients(functools.partial(postnorm, block), block.parameters(), *x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_parallel(number, tied, device):
    def formula(block, *tensors):
        h = sum(tensors)
        normed = block.norm1(h)
        return block.mixer(normed), block.mlp(normed if tied else block.norm2(h)), h

    for block in twins(ParallelBlock, device, tied_norm=tied):
        tensors = draw(number, device)
        expected = with_gradients(functools.partial(formula, block), block.parameters(), *tensors)
        found = with_gradients(block, block.parameters(), *tensors)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prenorm", [False, True])
def test_without_an_mlp(prenorm, device):
    fused, plain = twins(Block, device, mlp_cls=nn.Identity, prenorm=prenorm)
    (x,) = draw(1, device)
    assert not hasattr(fused, "norm2")
    torch.testing.assert_close(fused(x), plain(x))
    if prenorm:
        torch.testing.assert_close(plain(x), (plain.mixer(plain.norm1(x)), x))
    else:
        torch.testing.assert_close(plain(x), plain.norm1(plain.mixer(x) + x))


def test_default_parts():
    block = Block(128)
    assert (block.mixer.num_heads, block.mixer.causal, block.mlp.fc1.out_features) == (2, False, 512)
    assert {name.split(".")[0] for name in block.state_dict()} == {"mixer", "norm1", "mlp", "norm2"}
    assert {name.split(".")[0] for name in ParallelBlock(128, tied_norm=True).state_dict()} == {"mixer", "norm1", "mlp"}


@pytest.mark.parametrize("block_cls", [Block, ParallelBlock])
@pytest.mark.parametrize("dim", [0, 32, 100])
def test_a_mixer_must_be_given_where_heads_of_64_do_not_fit(block_cls, dim):
    message = rf"dim must be a multiple of 64.* unless mixer_cls is given, found {dim}: give .*MHA, num_heads="
    with pytest.raises(ValueError, match=message):
        block_cls(dim)


@pytest.mark.parametrize("block_cls", [Block, ParallelBlock])
@pytest.mark.parametrize("name", ["mixer_cls", "mlp_cls", "norm_cls", "dropout_cls"])
def test_a_module_in_place_of_its_class_is_refused(block_cls, name):
    with pytest.raises(TypeError, match=f"{name} must be a class or function .*, found a module, Linear"):
        block_of(block_cls, **{name: nn.Linear(DIM, DIM)})


@pytest.mark.parametrize("block_cls", [Block, ParallelBlock])
def test_outputs_of_a_block_in_one_argument_are_refused(block_cls):
    """In nn.Sequential the next block gets them as a tuple."""
    outputs = (block := block_of(block_cls))(torch.randn(2, 3, DIM))
    assert len(block(*outputs)) == len(outputs)
    with pytest.raises(TypeError, match=r"hidden_states1? must be a tensor, found a tuple: .* block\(\*outputs\)"):
        block(outputs)


@pytest.mark.parametrize("block_cls", [Block, ParallelBlock])
def test_dtypes(block_cls, device):
    """Fused, the norm's output has the dtype of the hidden states, and only a missing residual becomes float32."""
    fused, plain = twins(block_cls, device, residual_in_fp32=True)
    fused, plain = fused.bfloat16(), plain.bfloat16()
    x, residual = draw(2, device, torch.bfloat16)
    for block in (fused, plain):
        *hidden, h = block(x)
        assert all(each is None or each.dtype == torch.bfloat16 for each in hidden)
        assert h.dtype == torch.float32
    assert fused(x, residual=residual)[-1].dtype == torch.bfloat16
    assert plain(x, residual=residual)[-1].dtype == torch.float32
    mixed = block_of(block_cls, device, fused_dropout_add_ln=True)
    mixed.mixer.bfloat16(), mixed.mlp.bfloat16()
    assert mixed(x)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 16])
def test_autocast(rotary_dim, fused, device):
    """Parameters and the residual stream stay float32; the rest is as exact as 16 bits are."""
    mixer_cls = functools.partial(
        MIXER, num_heads_kv=1, rotary_emb_dim=rotary_dim, use_flash_attn=fused, fused_bias_fc=fused
    )
    block = block_of(device=device, mixer_cls=mixer_cls, fused_dropout_add_ln=fused, residual_in_fp32=True)
    tensors = draw(2, device)
    expected = with_gradients(block, block.parameters(), *tensors)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        hidden, residual = block(*tensors)
        found = with_gradients(
            lambda *tensors: tuple(out.float() for out in block(*tensors)), block.parameters(), *tensors
        )
    assert (hidden.dtype, residual.dtype) == (torch.bfloat16, torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * other.abs().max().item())


# Dropout and drop path.


def test_stochastic_depth(device):
    module = StochasticDepth(0.25).to(device)
    x = torch.ones(4000, 2, 3, device=device)
    out = module(x)
    assert set(out.flatten().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (out == out[:, :1, :1]).all()
    assert abs((out[:, 0, 0] == 0).float().mean().item() - 0.25) < 0.04
    assert module.eval()(x) is x
    assert not StochasticDepth(1.0)(x).any()
    with pytest.raises(ValueError, match=r"p must be from 0 to 1, found 1\.5"):
        StochasticDepth(1.5)


@pytest.mark.parametrize("fused", [False, True])
def test_drop_path_of_a_block(fused, device):
    """Where the path is dropped, the residual stream goes on alone."""
    block = block_of(device=device, drop_path1=1.0, drop_path2=1.0, fused_dropout_add_ln=fused)
    x, residual = draw(2, device)
    assert torch.equal(block(x, residual)[1], residual)
    block.eval()
    torch.testing.assert_close(block(x, residual)[1], prenorm(block, x, residual)[1])
    block = block_of(device=device, drop_path1=0.5, fused_dropout_add_ln=fused, mlp_cls=nn.Identity).train()
    added = torch.stack([block(x, residual)[1] - residual for _ in range(20)])
    kept = added.abs().amax(dim=(2, 3)) if not fused else added.abs().amax(dim=3)
    assert 0 < (kept == 0).float().mean() < 1
    torch.testing.assert_close(added, torch.where(added == 0, 0, 2 * x.expand_as(added)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("prenorm", [False, True])
def test_dropout_of_a_block(prenorm, fused, device):
    block = block_of(device=device, resid_dropout1=0.3, resid_dropout2=0.3, fused_dropout_add_ln=fused, prenorm=prenorm)
    x = torch.randn(8, 64, DIM, device=device)
    one, other = block(x), block(x)
    assert not torch.equal(*(each[0] if prenorm else each for each in (one, other)))
    if prenorm:
        h = block_of(device=device, resid_dropout1=0.3, fused_dropout_add_ln=fused, mlp_cls=nn.Identity)(x)[1]
        assert abs((h == 0).float().mean().item() - 0.3) < 0.03
        torch.testing.assert_close(h, torch.where(h == 0, 0, x / 0.7))
    block.eval()
    torch.testing.assert_close(block(x), block(x), rtol=0, atol=0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("probabilities", [(0.0, 0.5), (0.5, 0.0), (0.25, 0.5), (0.5, 0.5)])
def test_each_branch_of_a_parallel_block_has_its_dropout(probabilities, fused, device):
    block = block_of(
        ParallelBlock,
        device,
        resid_dropout1=probabilities[0],
        resid_dropout2=probabilities[1],
        fused_dropout_add_ln=fused,
    )
    x = torch.ones(64, 32, DIM, device=device)
    for tensors, p in (((x, torch.zeros_like(x)), probabilities[0]), ((torch.zeros_like(x), x), probabilities[1])):
        h = block(*tensors)[2]
        assert abs((h == 0).float().mean().item() - p) < 0.02
        torch.testing.assert_close(h, torch.where(h == 0, 0, x / (1 - p)))


# Options.


@pytest.mark.parametrize("fused", [False, True])
def test_subset(fused, device):
    mixer_cls = functools.partial(MHA, num_heads=2, cross_attn=True)
    block = block_of(device=device, mixer_cls=mixer_cls, fused_dropout_add_ln=fused)
    x, residual = draw(2, device)
    mixer_kwargs = {"x_kv": None}
    found = block(x, residual, mixer_subset=slice(0, 1), mixer_kwargs=mixer_kwargs)
    torch.testing.assert_close(found, tuple(each[:, :1] for each in block(x, residual)))
    assert mixer_kwargs == {"x_kv": None}


@pytest.mark.parametrize("block_cls", [Block, ParallelBlock])
def test_marks_of_norms(block_cls):
    def marked(tag, **options):
        parameters = block_of(block_cls, **options).named_parameters()
        return {name for name, parameter in parameters if getattr(parameter, tag, False)}

    norms = {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}
    assert marked("_sequence_parallel", sequence_parallel=True) == norms
    assert marked("_shared_params", mark_shared_params=True) == norms
    assert not marked("_sequence_parallel", mark_shared_params=True) | marked("_shared_params", sequence_parallel=True)
    if block_cls is Block:
        outputs = {"output1.weight", "output2.weight"}
        assert marked("_sequence_parallel", sequence_parallel=True, output_cls=RMSNorm) == norms | outputs


# Other libraries' blocks at random weights: they return the residual stream with the last branch added.


def causal_mask(seqlen, device):
    return torch.full((1, 1, seqlen, seqlen), torch.finfo(torch.float32).min, device=device).triu(1)


@pytest.mark.parametrize("fused", [False, True])
def test_gpt2_of_transformers(fused, device):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    config = transformers.GPT2Config(n_embd=64, n_head=4, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager")
    other = modeling.GPT2Block(config, layer_idx=0).to(device)
    ours = Block(
        64,
        functools.partial(MHA, num_heads=4, causal=True, use_flash_attn=fused),
        functools.partial(Mlp, activation=functools.partial(F.gelu, approximate="tanh")),
        fused_dropout_add_ln=fused,
    ).to(device)
    names = {
        "ln_1": "norm1",
        "ln_2": "norm2",
        "attn.c_attn": "mixer.Wqkv",
        "attn.c_proj": "mixer.out_proj",
        "mlp.c_fc": "mlp.fc1",
        "mlp.c_proj": "mlp.fc2",
    }
    for theirs, own in names.items():
        source, target = other.get_submodule(theirs), ours.get_submodule(own)
        nn.init.normal_(source.bias)
        with torch.no_grad():
            target.weight.copy_(source.weight.t())
            target.bias.copy_(source.bias)
    x = torch.randn(1, 2, 9, 64, device=device).unbind(0)
    expected = with_gradients(lambda x: first(other(x, attention_mask=causal_mask(9, device))), [], *x)
    found = with_gradients(lambda x: sum(ours(x)), [], *x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_llama_of_transformers(fused, device):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=192,
        attn_implementation="eager",
        rms_norm_eps=1e-5,
    )
    other = modeling.LlamaDecoderLayer(config, layer_idx=0).to(device)
    bias = dict(qkv_proj_bias=False, out_proj_bias=False)
    ours = Block(
        128,
        functools.partial(
            MHA, num_heads=4, num_heads_kv=2, causal=True, rotary_emb_dim=32, **bias, use_flash_attn=fused
        ),
        functools.partial(GatedMlp, hidden_features=192, multiple_of=64, activation=F.silu, bias1=False, bias2=False),
        RMSNorm,
        fused_dropout_add_ln=fused,
    ).to(device)
    state = other.state_dict()
    ours.load_state_dict(
        {
            "mixer.Wqkv.weight": torch.cat([state[f"self_attn.{name}_proj.weight"] for name in "qkv"]),
            "mixer.out_proj.weight": state["self_attn.o_proj.weight"],
            "mlp.fc1.weight": torch.cat([state["mlp.up_proj.weight"], state["mlp.gate_proj.weight"]]),
            "mlp.fc2.weight": state["mlp.down_proj.weight"],
            "norm1.weight": state["input_layernorm.weight"],
            "norm2.weight": state["post_attention_layernorm.weight"],
        }
    )
    x = torch.randn(1, 2, 9, 128, device=device).unbind(0)
    tables = modeling.LlamaRotaryEmbedding(config).to(device)(x[0], torch.arange(9, device=device)[None])
    mask = causal_mask(9, device)

    def run(x):
        return first(other(x, attention_mask=mask, position_embeddings=tables))

    expected = with_gradients(run, [], *x)
    found = with_gradients(lambda x: sum(ours(x)), [], *x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_falcon_of_transformers(fused, device):
    """Attention and MLP side by side on one norm, one key head."""
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.falcon.modeling_falcon")
    config = transformers.FalconConfig(
        hidden_size=128,
        num_attention_heads=4,
        multi_query=True,
        new_decoder_architecture=False,
        bias=False,
        parallel_attn=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        attn_implementation="eager",
    )
    other = modeling.FalconDecoderLayer(config, layer_idx=0).to(device)
    ours = ParallelBlock(
        128,
        functools.partial(
            MHA,
            num_heads=4,
            num_heads_kv=1,
            causal=True,
            rotary_emb_dim=32,
            qkv_proj_bias=False,
            out_proj_bias=False,
            use_flash_attn=fused,
        ),
        functools.partial(Mlp, bias1=False, bias2=False),
        tied_norm=True,
        fused_dropout_add_ln=fused,
    ).to(device)
    state = other.state_dict()
    ours.load_state_dict(
        {
            "mixer.Wqkv.weight": state["self_attention.query_key_value.weight"],
            "mixer.out_proj.weight": state["self_attention.dense.weight"],
            "mlp.fc1.weight": state["mlp.dense_h_to_4h.weight"],
            "mlp.fc2.weight": state["mlp.dense_4h_to_h.weight"],
            "norm1.weight": state["input_layernorm.weight"],
            "norm1.bias": state["input_layernorm.bias"],
        }
    )
    x = torch.randn(1, 2, 9, 128, device=device).unbind(0)
    tables = modeling.FalconRotaryEmbedding(config).to(device)(x[0], torch.arange(9, device=device)[None])
    mask = causal_mask(9, device)

    def run(x):
        return first(other(x, alibi=None, attention_mask=mask, position_embeddings=tables))

    expected = with_gradients(run, [], *x)
    found = with_gradients(lambda x: sum(ours(x)), [], *x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# Graphs.


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("block_cls", [Block, ParallelBlock])
@pytest.mark.parametrize(
    "options",
    [pytest.param(dict(), marks=pytest.mark.slow), dict(num_heads_kv=1, rotary_emb_dim=16), dict(use_alibi=True)],
    ids=str,
)
@pytest.mark.same_on_cpu("fused")
def test_compiled_training(options, block_cls, fused, backend, device):
    mixer_cls = functools.partial(MIXER, use_flash_attn=fused or "use_alibi" in options, **options)
    block = block_of(block_cls, device, mixer_cls=mixer_cls, fused_dropout_add_ln=fused)
    tensors = draw(2, device)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    expected = with_gradients(block, block.parameters(), *tensors)
    found = with_gradients(compiled, block.parameters(), *tensors)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rotary_dim", [0, 8, 16])
def test_compiled_decoding(rotary_dim, device):
    """The positions are in a tensor, so that all steps are one graph."""
    mixer_cls = functools.partial(MIXER, num_heads_kv=1, use_flash_attn=True, layer_idx=0, rotary_emb_dim=rotary_dim)
    block = block_of(device=device, mixer_cls=mixer_cls, fused_dropout_add_ln=True)
    x = torch.randn(2, 9, DIM, device=device)
    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    with torch.no_grad():
        expected = block(x)[0]
        params = InferenceParams(9, 2, lengths_per_sample=torch.zeros(2, dtype=torch.int32, device=device))
        block(x[:, :4], mixer_kwargs={"inference_params": params})
        params.seqlen_offset = 8  # only says that there was a prompt
        for i in range(4, 9):
            params.lengths_per_sample.fill_(i)
            out, _ = compiled(x[:, i, None], mixer_kwargs={"inference_params": params})
            torch.testing.assert_close(out, expected[:, i, None], rtol=1e-4, atol=1e-5)
    assert len(compilations) == 1


# Errors and signatures.


class NoNorm(nn.Identity):
    pass


ERRORS = {
    "norms of outputs, norm last": (
        Block,
        dict(output_cls=RMSNorm, prenorm=False),
        ValueError,
        "output_cls must be None without prenorm",
    ),
    "float32 residual, norm last": (
        Block,
        dict(residual_in_fp32=True, prenorm=False),
        ValueError,
        "residual_in_fp32 must be False without",
    ),
    "fused norm": (
        Block,
        dict(norm_cls=lambda dim: NoNorm()),
        TypeError,
        "norm1 must be .*, found .*test_block.NoNorm",
    ),
    "fused norm of that name": (
        Block,
        dict(norm_cls=rms_norm.RMSNorm),
        TypeError,
        "norm1 must be nn.LayerNorm or flash_attn.ops.triton.layer_norm.RMSNorm with fused_dropout_add_ln, "
        "found flash_attn.ops.rms_norm.RMSNorm",
    ),
    "fused dropout": (
        ParallelBlock,
        dict(dropout_cls=nn.Dropout1d),
        TypeError,
        "dropout1 must be nn.Dropout with fused_dropout_add_ln, found torch.nn.modules.dropout.Dropout1d",
    ),
    "drop path": (Block, dict(drop_path1=-0.1), ValueError, "p must be from 0 to 1"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_error(what):
    block_cls, options, error, message = ERRORS[what]
    with pytest.raises(error, match=message):
        block_of(block_cls, fused_dropout_add_ln=True, **options)


def test_no_residual_with_the_norm_last():
    x = torch.zeros(2, 5, DIM)
    with pytest.raises(ValueError, match="residual must be None without prenorm"):
        block_of(prenorm=False)(x, x)
