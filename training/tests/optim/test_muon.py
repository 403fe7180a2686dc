"""Muon: orthogonalised steps against their formula and torch.optim.Muon, and which parameters get them."""

import copy
import datetime

import pytest
import torch
from hydra.utils import instantiate
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

from flash_attn.models.gpt import GPTLMHeadModel
from flash_attn.models.vit import VisionTransformer
from src.optim.adamw import AdamW, MasterAdamW
from src.optim.muon import Muon, orthogonalized
from src.optim.param_grouping import group_parameters_for_optimizer
from training.tests.optim.test_optimizer_configs import config

# Tolerances are those of bf16, of which five steps make up to 0.03: also between torch's own and float64.
SHAPES = [(6, 6), (6, 16), (16, 6), (6, 6), (1, 5), (7, 3)]


def matrices(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def polynomial(matrix, steps):
    """What the iteration makes of the singular values of a matrix, in float64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


def relative(found, expected):
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_newton_schulz(steps):
    given = matrices(*SHAPES)
    for matrix, result in zip(given, orthogonalized(given, steps), strict=True):
        assert result.shape == matrix.shape and relative(result, polynomial(matrix, steps)) < 0.04


def test_singular_values_become_about_one():
    (matrix,) = matrices((16, 40))
    matrix = matrix * torch.logspace(-1, 1, 16)[:, None]  # far from orthogonal
    (result,) = orthogonalized([matrix])
    values = torch.linalg.svdvals(result.float())
    assert 0.5 < values.min() and values.max() < 1.3


def trained(optimizer, weights, steps=4):
    for step in range(steps):
        for i, p in enumerate(weights):
            generator = torch.Generator().manual_seed(100 * step + i)
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("nesterov", [False, True])
def test_is_that_of_torch(nesterov):
    """And one whose gradient is None stays as it is."""
    weights = [torch.nn.Parameter(x) for x in (*matrices(*SHAPES), torch.ones(2, 2))]
    twins = copy.deepcopy(weights)
    options = dict(lr=0.05, weight_decay=0.1, momentum=0.9, nesterov=nesterov)
    trained(Muon([{"params": weights, "orthogonalize": True}], **options), weights[:-1])
    trained(torch.optim.Muon(twins, **options, adjust_lr_fn="match_rms_adamw"), twins[:-1])
    for p, q, before in zip(weights, twins, matrices(*SHAPES)):
        assert relative(p - before, q - before) < 0.04
    assert torch.equal(weights[-1], torch.ones(2, 2))


def test_all_else_is_adamw():
    weights, others = [torch.nn.Parameter(torch.eye(4))], [torch.nn.Parameter(torch.randn(5))]
    twins = copy.deepcopy(others)
    groups = [{"params": weights, "orthogonalize": True}, {"params": others, "weight_decay": 0.0}]
    trained(Muon(groups, lr=0.01, weight_decay=0.1), others)
    trained(torch.optim.AdamW(twins, lr=0.01, weight_decay=0.0, betas=(0.9, 0.95)), twins)
    torch.testing.assert_close(others, twins, rtol=1e-5, atol=1e-6)


def test_stacked_matrices_are_orthogonalised_one_by_one():
    parts = matrices((4, 6), (2, 6), (2, 6))
    weight, apart = torch.nn.Parameter(torch.cat(parts)), [torch.nn.Parameter(each) for each in parts]
    stacked = Muon([{"params": [weight], "orthogonalize": True, "stacked": [4, 2, 2]}], lr=0.1)
    single = Muon([{"params": apart, "orthogonalize": True}], lr=0.1)
    weight.grad = torch.randn(8, 6)
    for p, gradient in zip(apart, weight.grad.split([4, 2, 2])):
        p.grad = gradient.clone()
    stacked.step()
    single.step()
    torch.testing.assert_close(weight, torch.cat(apart), rtol=0.01, atol=1e-3)


def test_masters_of_weights_in_16_bits_and_a_state_that_goes_on():
    weights = [torch.nn.Parameter(x.bfloat16()) for x in matrices((6, 8), (8, 6))]
    plain = [torch.nn.Parameter(p.detach().float()) for p in weights]
    optimizer = Muon([{"params": weights, "orthogonalize": True}], lr=1e-3)
    trained(optimizer, weights, 2)
    state, twins = copy.deepcopy((optimizer.state_dict(), weights))
    resumed = Muon([{"params": twins, "orthogonalize": True}], lr=1.0)
    resumed.load_state_dict(state)
    for each, of in ((optimizer, weights), (resumed, twins)):
        trained(each, of)
    assert all(torch.equal(p, q) for p, q in zip(weights, twins))
    reference = Muon([{"params": plain, "orthogonalize": True}], lr=1e-3)
    trained(reference, plain, 2)
    trained(reference, plain)
    for p, q in zip(weights, plain):
        assert torch.equal(optimizer.state[p]["master"], q) and torch.equal(p, q.bfloat16())


@pytest.fixture
def group_of_one(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1, timeout=datetime.timedelta(seconds=60)
    )
    yield
    torch.distributed.destroy_process_group()


def test_parts_of_matrices(group_of_one):
    """Weights that FSDP divides are DTensors."""
    layer, twin = (torch.nn.Linear(8, 6, bias=False) for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    layer = torch.distributed.fsdp.fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    for each in (layer, twin):
        optimizer = Muon([{"params": [each.weight], "orthogonalize": True, "stacked": [2, 4]}])
        each(torch.eye(8)).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(layer.weight.to_local(), twin.weight.detach())


SMALL = dict(n_embd=16, n_head=4, n_layer=2, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
QKV, GATED = [16, 16, 16], [128, 128]
MODELS = {  # fields, and the options of each matrix of a layer
    "tied": ({}, {"Wqkv": QKV, "out_proj": None, "fc1": None, "fc2": None}),
    "untied": (dict(tie_word_embeddings=False), {"Wqkv": QKV, "out_proj": None, "fc1": None, "fc2": None}),
    "few key heads": (dict(n_head_kv=2), {"Wqkv": [16, 8, 8], "out_proj": None, "fc1": None, "fc2": None}),
    "gated": (dict(activation_function="swiglu"), {"Wqkv": QKV, "out_proj": None, "fc1": GATED, "fc2": None}),
}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("fields", "of_layer"), MODELS.values(), ids=MODELS)
def test_matrices_of_the_layers_are_orthogonalised(fields, of_layer, weight_decay):
    model = GPTLMHeadModel(GPT2Config(**SMALL, **fields))
    found = grouped(model, weight_decay)
    expected = {
        f"transformer.layers.{i}.{'mixer' if name in ('Wqkv', 'out_proj') else 'mlp'}.{name}.weight": stacked
        for i in range(2)
        for name, stacked in of_layer.items()
    }
    assert {name: group["stacked"] for name, group in found.items() if group["orthogonalize"]} == expected
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())
    decayed = {name for name, group in found.items() if group["weight_decay"] > 0}
    assert decayed == (set(expected) | ({"lm_head.weight"} & set(found)) if weight_decay else set())


def test_the_head_of_transformers_is_not():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    found = grouped(LlamaForCausalLM(LlamaConfig(**sizes)), 0.1)
    assert not found["lm_head.weight"]["orthogonalize"] and not found["model.embed_tokens.weight"]["orthogonalize"]
    assert sum(group["orthogonalize"] for group in found.values()) == 7


def test_projections_beside_the_embeddings_are_not():
    found = grouped(GPTLMHeadModel(GPT2Config(**SMALL, word_embed_proj_dim=8)), 0.1)
    outside = [name for name, group in found.items() if not group["orthogonalize"]]
    assert {"transformer.embeddings.project_in.weight", "project_out.weight"} <= set(outside)
    assert sum(group["orthogonalize"] for group in found.values()) == 8


def vit():
    return VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=3)


@pytest.mark.parametrize("model", [vit, lambda: torch.nn.Linear(4, 4)], ids=["VisionTransformer", "Linear"])
def test_models_that_do_not_say_which_their_output_layer_is(model, request):
    says = rf"orthogonalize \(optimizer=muon\) must be False for a model .* found True for {request.node.callspec.id}"
    with pytest.raises(ValueError, match=says):
        grouped(model(), 0.1)


def grouped(model, weight_decay):
    """{parameter: its group}"""
    train = config("optimizer", "muon", lr=1e-2, weight_decay=weight_decay)
    groups = group_parameters_for_optimizer(model, train.optimizer, **train.optimizer_param_grouping)
    optimizer = instantiate(train.optimizer, groups, _convert_="all")
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}


VECTOR, MATRIX = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, 2))
WRONG = {
    "no group": ([VECTOR], {}, "a group of params must have orthogonalize=True, found none"),
    "a vector": ([{"params": [VECTOR], "orthogonalize": True}], {}, r"must be a matrix, found shape \(3,\)"),
    "rows": (
        [{"params": [MATRIX], "orthogonalize": True, "stacked": [1, 1]}],
        {},
        r"stacked must add up to the 3 rows of a parameter, found \[1, 1\]",
    ),
    "momentum": ([MATRIX], dict(momentum=1.0), "momentum must be at least 0 and less than 1, found 1.0"),
    "steps": ([MATRIX], dict(ns_steps=0), "ns_steps must be at least 1, found 0"),
    "amsgrad": ([MATRIX], dict(amsgrad=True), "amsgrad must be False, found True"),
}


@pytest.mark.parametrize(("params", "options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(params, options, message):
    with pytest.raises(ValueError, match=message):
        Muon(params, **options)


def of(optimizer, *options):
    return optimizer([{"params": [torch.nn.Parameter(torch.ones(3, 2))], **each} for each in options])


ORTHOGONALIZED, PLAIN = {"orthogonalize": True}, {}
STATES = {  # an optimizer, one whose state it must not take, and what that has
    "of AdamW": (of(Muon, ORTHOGONALIZED), of(torch.optim.AdamW, PLAIN), "group 0 without orthogonalize"),
    "of SGD": (of(MasterAdamW, PLAIN), of(torch.optim.SGD, PLAIN), "group 0 without betas, eps"),
    "of Muon": (of(AdamW, PLAIN), of(Muon, ORTHOGONALIZED), "group 0 with orthogonalize=True"),
    "other matrices": (
        of(Muon, ORTHOGONALIZED, PLAIN),
        of(Muon, PLAIN, ORTHOGONALIZED),
        "group 0 with orthogonalize=False",
    ),
    "other groups": (of(Muon, ORTHOGONALIZED), of(torch.optim.AdamW, PLAIN, PLAIN), r"groups of \[1, 1\] parameters"),
}


@pytest.mark.parametrize(("optimizer", "other", "found"), STATES.values(), ids=STATES)
def test_states_of_other_optimizers(optimizer, other, found):
    with pytest.raises(ValueError, match=rf"optimizer must be the one that the state is of, .* found {found}"):
        optimizer.load_state_dict(other.state_dict())


def test_layers_that_are_no_linear_layers_say_what_is_missing():
    model = GPT2LMHeadModel(GPT2Config(**SMALL))  # of Conv1D layers
    groups = group_parameters_for_optimizer(model, {"weight_decay": 0.1}, orthogonalize=True)
    with pytest.raises(ValueError, match=r"weights of torch\.nn\.Linear get one"):
        Muon(groups)
