"""Groups of parameters: the effective decay of each parameter, for models of several kinds."""

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.utils import parametrizations
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from flash_attn.models.gpt import GPTLMHeadModel
from flash_attn.models.vit import VisionTransformer
from src.models.modules.seq_common import PositionalEncoding
from src.optim.param_grouping import group_parameters_for_optimizer

SMALL = dict(n_embd=16, n_head=2, n_layer=2, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
ADAMW = {"_target_": "torch.optim.AdamW", "lr": 1e-3, "weight_decay": 0.1}


class Mixed(nn.Module):
    """Has a parameter for each rule."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.positions = PositionalEncoding(4, max_len=3, initializer={"_target_": "torch.nn.init.ones_"})
        self.linear = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 1)
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.RMSNorm(4)])
        self.tagged = nn.Parameter(torch.ones(4))
        self.tagged._no_weight_decay = True
        self.keyword = nn.Linear(4, 4, bias=False)
        self.named = nn.Parameter(torch.ones(4))
        self.free = nn.Parameter(torch.ones(4, 4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.special = nn.Parameter(torch.ones(4))
        self.special._optim = {"lr": 0.5, "weight_decay": 0.0}
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def no_weight_decay(self):
        return {"named"}

    def no_weight_decay_keywords(self):
        return {"keyword"}


MODELS = {
    "mixed": Mixed,
    "gpt": lambda: GPTLMHeadModel(GPT2Config(**SMALL)),
    "gpt rms": lambda: GPTLMHeadModel(GPT2Config(**SMALL, rms_norm=True, rotary_emb_fraction=0.5)),
    "gpt2 of transformers": lambda: GPT2LMHeadModel(GPT2Config(**SMALL)),
    "llama of transformers": lambda: LlamaForCausalLM(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    ),
    "vit": lambda: VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, num_classes=3),
    "torch": lambda: nn.TransformerEncoderLayer(16, 2, 16),
}


def decays(model, cfg=ADAMW, **options):
    """The decay that an optimizer would use for each parameter, by name."""
    groups = group_parameters_for_optimizer(model, cfg, **options)
    optimizer = torch.optim.AdamW(groups, lr=cfg.get("lr", 1e-3), weight_decay=cfg.get("weight_decay", 0.01))
    decay_of = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    return {name: decay_of[id(p)] for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("bias_weight_decay", [False, True])
@pytest.mark.parametrize("normalization_weight_decay", [False, True])
def test_every_trainable_parameter_is_in_one_group_in_an_order_by_names(
    model, bias_weight_decay, normalization_weight_decay
):
    names_of = []
    for _ in range(2):
        built = model()
        name_of = {id(p): name for name, p in built.named_parameters()}
        groups = group_parameters_for_optimizer(built, ADAMW, bias_weight_decay, normalization_weight_decay)
        names_of.append([[name_of[id(p)] for p in group["params"]] for group in groups])
        trainable = [name for name, p in built.named_parameters() if p.requires_grad]
        assert sorted(name for group in names_of[-1] for name in group) == sorted(trainable)
        assert all(group == sorted(group) for group in names_of[-1])
    assert names_of[0] == names_of[1]


def test_each_rule():
    assert decays(Mixed()) == {
        "embedding.weight": 0.0,  # and the head, which is the same parameter
        "positions.pe": 0.0,
        "linear.weight": 0.1,
        "linear.bias": 0.0,
        "conv.weight": 0.1,
        "conv.bias": 0.0,
        **{f"norms.{i}.{kind}": 0.0 for i in range(3) for kind in ("weight", "bias")},
        "norms.3.weight": 0.0,
        "tagged": 0.0,
        "keyword.weight": 0.0,
        "named": 0.0,
        "free": 0.1,
        "special": 0.0,
    }


@pytest.mark.parametrize(
    "option, changed",
    [
        ("bias_weight_decay", ["linear.bias", "conv.bias"]),  # a norm's bias is exempt as a part of the norm
        ("normalization_weight_decay", [f"norms.{i}.weight" for i in range(4)]),
        ("rms_norm_weight_decay", ["norms.3.weight"]),
    ],
)
def test_options_add_decay(option, changed):
    before, after = decays(Mixed()), decays(Mixed(), **{option: True})
    differing = {name for name in before if before[name] != after[name]}
    assert differing == set(changed)
    assert all(after[name] == 0.1 for name in differing)


def test_layers_that_are_changed_keep_their_rule():
    """Wrapped, adapted or parametrized, a layer is what it was."""
    model, expected = Mixed(), decays(Mixed())
    parametrizations.spectral_norm(model.embedding)
    for name in ("linear", "conv"):
        parametrizations.weight_norm(model.get_submodule(name))
    for i, norm in enumerate(model.norms):
        if i != 2:
            parametrizations.weight_norm(norm)
        model.norms[i] = checkpoint_wrapper(torch.compile(norm, backend="eager"))
    model.head.weight = nn.Parameter(torch.ones(5, 4))
    for name, decay in decays(model).items():
        owner, _, kind = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "").rpartition(".")
        owner, _, of = owner.partition(".parametrizations.")
        assert owner == "head" or decay == expected[".".join(each for each in (owner, of or kind) if each)], name


@pytest.mark.parametrize("name", ["gpt", "gpt2 of transformers"])
def test_language_models_decay_matrices_only(name):
    model = MODELS[name]()
    expected = {
        name: 0.1 if p.dim() == 2 and not name.endswith(("embeddings.weight", "wte.weight", "wpe.weight")) else 0.0
        for name, p in model.named_parameters()
    }
    assert decays(model) == expected
    assert 0.1 in expected.values() and 0.0 in expected.values()


@pytest.mark.parametrize("name", ["gpt rms", "llama of transformers"])
def test_rms_norms_of_all_kinds_are_exempt(name):
    norms = [n for n, _ in MODELS[name]().named_parameters() if "norm" in n and n.endswith("weight")]
    assert norms
    assert {decays(MODELS[name]())[n] for n in norms} == {0.0}
    assert {decays(MODELS[name](), rms_norm_weight_decay=True)[n] for n in norms} == {0.1}


def test_gpt_has_an_empty_first_group_and_multipliers_in_the_last():
    groups = group_parameters_for_optimizer(MODELS["gpt"](), ADAMW)
    assert [len(groups[0]["params"]), groups[0]["weight_decay"], groups[1]["weight_decay"]] == [0, 0.1, 0.0]
    assert "weight_decay" not in groups[2]
    assert groups[2]["lr_multiplier"] == 1.0


def test_multipliers_of_the_learning_rate():
    model = GPTLMHeadModel(GPT2Config(**SMALL, mup_width_scale=0.25))
    assert all("lr" not in group for group in group_parameters_for_optimizer(model, ADAMW))
    *others, last = group_parameters_for_optimizer(model, ADAMW, apply_lr_multiplier=True)
    assert last["lr"] == 0.25e-3
    assert all("lr" not in group for group in others)
    with pytest.raises(ValueError, match=r"train\.optimizer\.lr"):
        group_parameters_for_optimizer(model, {"_target_": "torch.optim.AdamW"}, apply_lr_multiplier=True)


@pytest.mark.parametrize(
    "cfg, expected",
    [
        ({"_target_": "torch.optim.AdamW"}, 0.01),
        ({"_target_": "src.optim.adamw.AdamW"}, 0.01),
        ({"_target_": "torch.optim.AdamW", "weight_decay": 0.3}, 0.3),
        (
            {
                "_target_": "torch.distributed.optim.ZeroRedundancyOptimizer",
                "optimizer_class": {"_target_": "hydra.utils.get_class", "path": "torch.optim.AdamW"},
            },
            0.01,
        ),
    ],
)
def test_decay_is_configured_or_the_default_of_the_optimizer(cfg, expected):
    for config in (cfg, OmegaConf.create(cfg)):
        assert group_parameters_for_optimizer(Mixed(), config)[0]["weight_decay"] == expected


@pytest.mark.parametrize("cfg", [{"_target_": "torch.optim.SGD"}, {"_target_": "torch.optim.AdamW", "weight_decay": 0}])
def test_without_decay(cfg):
    plain = nn.Linear(3, 3)
    assert [id(p) for p in group_parameters_for_optimizer(plain, cfg)] == [id(p) for p in plain.parameters()]
    groups = group_parameters_for_optimizer(Mixed(), cfg)
    assert [group["weight_decay"] for group in groups] == [0, 0.0]  # all the ordinary ones, and the special one


def test_one_group_if_nothing_is_exempt():
    (group,) = group_parameters_for_optimizer(nn.Linear(3, 3, bias=False), ADAMW)
    assert group["weight_decay"] == 0.1


def test_distinct_options_have_groups_of_their_own():
    model = nn.Linear(2, 2)
    model.weight._optim, model.bias._optim = {"lr": 0.2}, {"lr": 0.1}
    groups = group_parameters_for_optimizer(model, ADAMW)
    assert [(len(group["params"]), group.get("lr")) for group in groups] == [(0, None), (1, 0.1), (1, 0.2)]


def test_zero_redundancy_optimizer_takes_the_groups(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        groups = group_parameters_for_optimizer(MODELS["gpt"](), ADAMW)
        optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.1]
    finally:
        torch.distributed.destroy_process_group()
