"""The tasks: losses, what is logged, parameter groups, warm starts, and errors."""

import logging
import math

import lightning as L
import pytest
import torch
from hydra.utils import instantiate

from flash_attn.models.gpt import GPTLMHeadModel
from src.datamodules.datasets.lm_dataset import DocumentCollate
from src.engines import TensorParallelStrategy
from src.tasks.seq import SequenceLMModel, SequenceModel
from src.utils.resolvers import attach_datamodule
from training.tests.standins import VOCABULARY, Data, small

WITHOUT_DROPOUT = tuple(f"+model.config.{kind}_pdrop=0" for kind in ("resid", "embd", "attn"))


def task_of(*overrides):
    torch.manual_seed(0)
    return SequenceLMModel(small(*overrides))


def fitted(*overrides, callbacks=(), **options):
    """(task, trainer) after training without a logger or checkpoints."""
    task = task_of(*overrides)
    options = dict(max_steps=4, log_every_n_steps=1, limit_val_batches=2, val_check_interval=2) | options
    trainer = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(task, datamodule=task._datamodule)
    return task, trainer


class Record(L.Callback):
    """The metrics as they are at the end of each batch."""

    def __init__(self):
        self.metrics = []

    def on_train_batch_end(self, trainer, *_):
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


IN_PLACE = (
    "{_target_: flash_attn.losses.cross_entropy.CrossEntropyLoss, inplace_backward: true, gradient_in_forward: true}"
)


@pytest.mark.parametrize("loss_fn", ["fused", "linear", "torch", IN_PLACE])
def test_losses_are_the_same(loss_fn):
    """From logits and from hidden states: loss, gradients and the metrics of a batch."""
    results = []
    for name in (loss_fn, "null"):
        task = task_of(*WITHOUT_DROPOUT, f"train.loss_fn={name}", "model.config.n_layer=2")
        batch = next(iter(task._datamodule.train_dataloader()))
        loss, output, targets = task.step(batch)
        loss.backward()
        metrics = task.train_metrics(output, targets, loss=loss)
        results.append((loss, metrics["train/ppl"].float(), [p.grad for p in task.model.parameters()]))
        assert (output is None) == (name == "linear") and targets.shape == (32,)
    torch.testing.assert_close(results[0], results[1])
    expected = math.log(task.model(batch[0]).logits.shape[-1])
    assert task.model(batch[0]).logits.shape[-1] == 56 and loss.item() == pytest.approx(expected, rel=0.1)


def test_options_of_a_loss():
    smoothed = "{_target_: flash_attn.losses.linear_cross_entropy.LinearCrossEntropyLoss, label_smoothing: 0.2}"
    task = task_of(*WITHOUT_DROPOUT, f"train.loss_fn={smoothed}", "+train.loss_fn_val=torch")
    x, y = next(iter(task._datamodule.train_dataloader()))
    logits = task.model(x).logits.flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, y.flatten(), label_smoothing=0.2)
    torch.testing.assert_close(task.step((x, y))[0], expected)
    expected = torch.nn.functional.cross_entropy(logits, y.flatten())
    torch.testing.assert_close(task.step((x, y), is_train=False)[0], expected)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("train.loss_fn=linear", "metrics=acc"), "train.loss_fn=linear has no logits, which eval.metrics.acc needs"),
        (("train.loss_fn=linear", "model=gpt2-hf"), "train.loss_fn=linear needs .* found GPT2LMHeadModel"),
        ((f"train.loss_fn={IN_PLACE}", "metrics=acc"), "overwrites the logits, which eval.metrics.acc needs"),
        (("train.loss_fn=mse",), "train.loss_fn must have a _target_ or be one of torch, fused, linear, found 'mse'"),
    ],
)
def test_losses_that_do_not_fit(overrides, says):
    with pytest.raises(ValueError, match=says):
        task_of(*overrides)


def test_what_is_logged():
    """The names, and that the values of an epoch are means over its batches."""
    record = Record()
    task, trainer = fitted(callbacks=[record])
    names = [f"train/{name}_{kind}" for name in ("loss", "ppl", "num-tokens") for kind in ("step", "epoch")]
    names += [f"{phase}/{name}" for phase in ("train", "val") for name in ("loss", "ppl", "num-tokens")]
    assert set(trainer.callback_metrics) == set(names)
    losses = [each["train/loss_step"] for each in record.metrics]
    assert len(losses) == 4
    last = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert last["train/loss_epoch"] == last["train/loss"] == pytest.approx(sum(losses) / 4)
    assert last["train/ppl_epoch"] == pytest.approx(math.exp(sum(losses) / 4))
    assert last["train/ppl_step"] == pytest.approx(math.exp(losses[-1]))
    assert [each["train/num-tokens_step"] for each in record.metrics] == [32, 64, 96, 128]
    assert last["val/num-tokens"] == 2 * 2 * 16  # of the last of two validations
    counts = {name: value.item() for name, value in task.state_dict().items() if name.endswith(".count")}
    assert counts == {"train_metrics.num-tokens.count": 128}


def test_without_a_scheduler_its_options_do_not_matter():
    config = small()
    del config.train.scheduler["_target_"]  # as ~scheduler does
    optimizer = SequenceLMModel(config).configure_optimizers()
    assert optimizer.param_groups[0]["lr"] == config.train.optimizer.lr


def test_tokens_of_processes_that_share_a_model_count_once():
    task = task_of()
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=TensorParallelStrategy(tensor_parallel_size=2))
    task.trainer = trainer
    task.setup("fit")
    assert [metrics["num-tokens"].copies for metrics in (task.train_metrics, task.val_metrics)] == [2, 2]


def test_steps_are_logged_only_if_asked_for():
    _, trainer = fitted("eval.log_on_step=false")
    assert "train/loss" in trainer.callback_metrics and "train/loss_step" not in trainer.callback_metrics


@pytest.mark.parametrize("batch_size", [1, 2])
def test_device_batches_do_not_change_training(batch_size):
    """Tokens of each step, rates and, to rounding, losses and weights are those of one batch of 4."""
    overrides = (*WITHOUT_DROPOUT, "train.global_batch_size=4")
    runs = []
    for size in (4, batch_size):
        task, _ = fitted(
            *overrides,
            f"datamodule.batch_size={size}",
            accumulate_grad_batches=4 // size,
            max_steps=5,
            val_check_interval=20,
        )
        scheduler = task.lr_schedulers()
        runs.append((task.state_dict()["train_metrics.num-tokens.count"], scheduler.optimizer.param_groups[0]["lr"]))
        runs[-1] += (list(task.model.parameters()),)
    assert runs[0][:2] == runs[1][:2] and runs[0][0] == 5 * 4 * 16
    for one, other in zip(runs[0][2], runs[1][2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("batch_size", "wanted", "found"), [(2, 4, None), (2, 3, 4), (3, 4, 6)])
def test_a_global_batch_that_cannot_be(batch_size, wanted, found, caplog):
    overrides = (f"datamodule.batch_size={batch_size}", f"train.global_batch_size={wanted}")
    accumulate = small(*overrides).trainer.accumulate_grad_batches
    with caplog.at_level(logging.WARNING, "src.tasks.seq"):
        fitted(*overrides, accumulate_grad_batches=accumulate, max_steps=1)
    said = [each.getMessage() for each in caplog.records if "global batch" in each.getMessage()]
    assert bool(said) == (found is not None)
    if found:
        assert f"The global batch has {found} sequences" in said[0] and f"global_batch_size={wanted}" in said[0]


def test_optimizer_and_schedule():
    """Biases, norms and embeddings are not decayed, linear layers are; the rate changes each step."""
    task, trainer = fitted("train.optimizer.weight_decay=0.25", max_steps=3)
    model, optimizer = task.model, trainer.optimizers[0]
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            is_linear = isinstance(module, torch.nn.Linear) and name == "weight" and p is not model.lm_head.weight
            assert decays[id(p)] == (0.25 if is_linear else 0.0)
    assert len(decays) == len(list(model.parameters()))
    config = trainer.lr_scheduler_configs[0]
    assert (config.interval, config.monitor) == ("step", "val/loss")
    assert optimizer.param_groups[0]["lr"] != pytest.approx(task.cfg.train.optimizer.lr)


def test_without_groups_and_schedule():
    task = task_of()
    del task.cfg.train["optimizer_param_grouping"], task.cfg.train["scheduler"]
    optimizer = task.configure_optimizers()
    assert len(optimizer.param_groups) == 1 and optimizer.param_groups[0]["weight_decay"] == 0.1
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in task.parameters()]


def test_the_data_is_prepared_first():
    Data.prepared = 0
    task = task_of()
    assert Data.prepared == 1 and task.model.config.vocab_size == VOCABULARY
    assert task.hparams["model"]["config"]["vocab_size"] == VOCABULARY and type(task.hparams["model"]) is dict
    attach_datamodule(task._datamodule)


def without_head(weights, name):
    return {key: x for key, x in weights.items() if name not in key}


WITHOUT_POSITIONS = (
    "+train.warmstart.post_process={_target_: training.tests.tasks.test_training_seq.without_head, name: position}"
)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_warm_start(prefix, tmp_path, caplog):
    source = task_of().model
    file = tmp_path / "weights.pt"
    weights = {prefix + name: x + 1 for name, x in source.state_dict().items()}
    torch.save({"state_dict": weights} if prefix else weights, file)
    task = task_of(f"+train.warmstart.path={file}")
    for name, x in task.model.state_dict().items():
        torch.testing.assert_close(x, weights[prefix + name])
    with pytest.raises(
        ValueError, match=f"train.warmstart.path={file} must have weights that fit.*position_embeddings"
    ):
        task_of(f"+train.warmstart.path={file}", WITHOUT_POSITIONS)
    with caplog.at_level(logging.WARNING, "src.tasks.seq"):
        task = task_of(f"+train.warmstart.path={file}", WITHOUT_POSITIONS, "+train.warmstart.strict=false")
    assert "position_embeddings" in caplog.text
    torch.testing.assert_close(task.model.lm_head.weight, weights[prefix + "lm_head.weight"])


def test_another_model():
    """model_cfg takes the place of cfg.model."""
    config = small()
    other = config.model.copy()
    other.config.n_layer = 3
    task = SequenceLMModel(config, model_cfg=other)
    assert isinstance(task.model, GPTLMHeadModel) and len(task.model.transformer.layers) == 3


def test_compiled(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: calls.append((type(self), options)))
    task_of()
    task_of("train.compile=true")
    task_of("train.compile={mode: max-autotune}")
    assert calls == [(GPTLMHeadModel, {}), (GPTLMHeadModel, {"mode": "max-autotune"})]


class Pooled(torch.nn.Module):
    """Scores of two classes for sequences of numbers, of which `lengths` count."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 2)

    def forward(self, x, lengths=None):
        x = x.float()
        if lengths is not None:
            x = x * (torch.arange(16) < lengths[:, None])
        return self.linear(x)


def test_classification_with_lengths():
    config = small()
    del config.eval["metrics"]
    config.model = {"_target_": "training.tests.tasks.test_training_seq.Pooled"}
    task = SequenceModel(config)
    assert set(task.val_metrics.keys()) == {"val/loss", "val/acc"}
    x, y = torch.randn(5, 16), torch.randint(2, (5,))
    lengths = torch.tensor([1, 16, 4, 5, 6])
    loss, output, targets = task.step((x, y, lengths))
    torch.testing.assert_close(output, task.model(x, lengths=lengths))
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(output, y))
    assert targets is y and not torch.equal(task.step((x, y))[1], output)


class WithDocuments(torch.utils.data.Dataset):
    """Batches of pairs with cu_seqlens."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data) // 2

    def __getitem__(self, index):
        return DocumentCollate(7)([self.data[2 * index], self.data[2 * index + 1]])


@pytest.mark.cuda
@pytest.mark.parametrize("loss_fn", ["fused", "linear", "modern"])
def test_steps_do_not_wait_for_the_gpu(loss_fn):
    """modern: with Muon, and documents that do not see each other."""

    class Forbid(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            torch.cuda.set_sync_debug_mode("error" if 2 <= batch_idx < 8 else "default")

    modern = loss_fn == "modern"
    task = task_of(
        f"train.loss_fn={'linear' if modern else loss_fn}",
        f"optimizer={'muon' if modern else 'adamw-apex'}",
        *(["+model.config.use_flash_attn=true"] if modern else []),
    )
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=10,
        log_every_n_steps=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        callbacks=[Forbid(), *map(instantiate, [{"_target_": "src.callbacks.speed_monitor.SpeedMonitor"}])],
    )
    data = task._datamodule.data
    loader = torch.utils.data.DataLoader(
        WithDocuments(data) if modern else data, None if modern else 2, pin_memory=True
    )
    try:
        trainer.fit(task, loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.global_step == 10
