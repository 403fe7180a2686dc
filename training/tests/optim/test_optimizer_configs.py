"""Each file of configs/optimizer and configs/scheduler makes what it names, and that trains a model."""

import copy
import pathlib
import sys

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.distributed.device_mesh import init_device_mesh

from src.optim.adamw import AdamW, MasterAdamW
from src.optim.lamb import Lamb
from src.optim.param_grouping import group_parameters_for_optimizer

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
OPTIMIZERS = sorted(file.stem for file in (CONFIGS / "optimizer").glob("*.yaml"))
SCHEDULERS = {
    "cosine-warmup-timm": {"t_initial": 20, "warmup_t": 2, "t_in_epochs": "false"},
    "cosine-warmup": {"num_warmup_steps": 2, "num_training_steps": 20},
    "linear-warmup": {"num_warmup_steps": 2, "num_training_steps": 20},
    "poly-warmup": {"num_warmup_steps": 2, "num_training_steps": 20},
    "multi-step": {"milestones": "[3,6]"},
    "step": {"step_size": 3},
    "plateau": {"patience": 1},
    "invsqrt": {"num_warmup_steps": 2},
    "warmdown": {"num_warmup_steps": 2, "num_decay_steps": 4, "num_training_steps": 10},
}


def config(group, name, **values):
    """What the file sets below `train`."""
    overrides = [f"+train.{group}.{key}={value}" for key, value in values.items()]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(f"{group}/{name}", [f"+{o}" for o in overrides]).train


@pytest.fixture
def group_of_one(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def model_and_loss():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
    x = torch.randn(32, 4)
    y = x.sum(dim=1, keepdim=True)
    return model, lambda: (model(x) - y).square().mean()


def test_there_is_a_test_for_each_scheduler():
    assert sorted(SCHEDULERS) == sorted(file.stem for file in (CONFIGS / "scheduler").glob("*.yaml"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name, group_of_one):
    if "lamb" in name:
        pytest.importorskip("timm")
    train = config("optimizer", name, lr=1e-2, weight_decay=0.01)
    model, loss = model_and_loss()
    model.get_output_embeddings = lambda: model[-1]
    groups = group_parameters_for_optimizer(model, train.optimizer, **train.get("optimizer_param_grouping", {}))
    optimizer = instantiate(train.optimizer, groups)
    before = loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < 0.9 * before
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.01, 0.0}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler(name):
    train = config("scheduler", name, **SCHEDULERS[name])
    model, loss = model_and_loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = instantiate(train.scheduler, optimizer)
    rates = []
    for _ in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        loss().backward()
        optimizer.step()
        scheduler.step(*([1.0] if name == "plateau" else []))
    assert len(set(rates)) > 1
    assert 0.09 < max(rates) <= 0.1


def test_plateau_is_stepped_by_epochs():
    train = config("scheduler", "plateau")
    assert train.scheduler_interval == "epoch"
    assert {"factor": 0.2, "patience": 20, "min_lr": 0.0}.items() <= dict(train.scheduler).items()


@pytest.mark.parametrize("name", ["adamw", "adamw-apex", "adamw-zero", "adamw-apex-zero", "adamw-apex-distributed"])
def test_names_of_adamw_are_one_formula(name, group_of_one):
    cfg = config("optimizer", name, lr=1e-2, weight_decay=0.1, betas="[0.9,0.95]").optimizer
    model, loss = model_and_loss()
    reference, loss_of_reference = model_and_loss()
    optimizer = instantiate(cfg, model.parameters())
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), foreach=False)
    for _ in range(5):
        for each, value in ((optimizer, loss()), (plain, loss_of_reference())):
            each.zero_grad()
            value.backward()
            each.step()
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert optimizer.param_groups[0]["fused"]
    assert type(optimizer.param_groups[0]["betas"]) in (list, tuple)


def test_gradients_of_adamw_can_be_clipped_under_a_loss_scale():
    model, loss = model_and_loss()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trained = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_steps=1,
        gradient_clip_val=0.5,
        plugins=MixedPrecision("16-mixed", "cpu", scaler),
    )
    reference, loss_of_reference = model_and_loss()
    trained.fit(OneStep(model, loss), torch.utils.data.DataLoader([0]))
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    with torch.autocast("cpu", torch.float16):
        value = loss_of_reference()
    value.backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    plain.step()
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


class OneStep(L.LightningModule):
    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def training_step(self, batch, batch_idx):
        return self.loss()

    def configure_optimizers(self):
        return AdamW(self.model.parameters(), lr=1e-2)


def test_lamb_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    with pytest.raises(ImportError, match="pip install timm"):
        Lamb([torch.nn.Parameter(torch.ones(1))])


def test_masters_of_weights_in_16_bits():
    """Steps that a weight in 16 bits cannot show add up, as they do in float32 with the same gradients."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(7, 5).bfloat16()), torch.nn.Parameter(torch.randn(3).bfloat16())]
    plain = [torch.nn.Parameter(p.detach().float()) for p in weights]
    own = torch.nn.Parameter(torch.randn(4))  # in float32: it is its own master
    options = dict(lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95))
    optimizer = MasterAdamW([{"params": weights}, {"params": [own], "weight_decay": 0.0}], **options)
    reference = torch.optim.AdamW(plain, **options, foreach=False)
    before = weights[0].detach().clone()
    for step in range(40):
        for p, q in zip(weights, plain):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).add(0.5).bfloat16()
            q.grad = p.grad.float()
        own.grad = torch.ones(4)
        optimizer.step()
        reference.step()
        if step == 20:  # resumed
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = MasterAdamW([{"params": weights}, {"params": [own], "weight_decay": 0.0}], **options)
            optimizer.load_state_dict(state)
    for p, q in zip(weights, plain):
        master = optimizer.state[p]["master"]
        assert master.dtype == optimizer.state[p]["exp_avg_sq"].dtype == torch.float32
        torch.testing.assert_close(master, q.detach(), rtol=1e-6, atol=1e-6)
        assert torch.equal(p, master.bfloat16())
    assert (weights[0] - before).abs().max() > 0 and "master" not in optimizer.state[own]
    with pytest.raises(ValueError, match="amsgrad must be False, found True"):
        MasterAdamW([own], amsgrad=True)


@pytest.mark.parametrize("fused", [False, True])
def test_masters_after_a_state_without(fused):
    """A run that had weights in float32 goes on with weights in bf16 and the same state."""
    weight = torch.nn.Parameter(torch.randn(8))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    weight.grad = torch.ones(8)
    optimizer.step()
    narrow = torch.nn.Parameter(weight.detach().bfloat16())
    masters = MasterAdamW([narrow], lr=1e-3, fused=fused)
    masters.load_state_dict(optimizer.state_dict())
    narrow.grad = torch.ones(8).bfloat16()
    masters.step()
    assert torch.equal(narrow, masters.state[narrow]["master"].bfloat16())


def test_masters_of_parts(group_of_one):
    """Weights that FSDP divides are DTensors."""
    mesh = init_device_mesh("cpu", (1,))
    layer = torch.distributed.fsdp.fully_shard(torch.nn.Linear(8, 8).bfloat16(), mesh=mesh)
    optimizer = MasterAdamW(layer.parameters(), lr=1e-2)
    layer(torch.ones(2, 8).bfloat16()).sum().backward()
    before = layer.weight.to_local().clone()
    optimizer.step()
    assert not torch.equal(layer.weight.to_local(), before)
    assert torch.equal(layer.weight.to_local(), optimizer.state[layer.weight]["master"].to_local().bfloat16())


def test_masters_in_a_run():
    cfg = config("optimizer", "adamw-master", lr=1e-2).optimizer
    model, loss = model_and_loss()
    optimizer = instantiate(cfg, model.parameters())
    assert type(optimizer) is MasterAdamW and optimizer.param_groups[0]["fused"]
    first = loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
    assert value.item() < first
