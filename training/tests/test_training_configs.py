"""The configurations: what each experiment selects, by the size of the GPU, and that all options can be built."""

import inspect
import pathlib
import re

import lightning as L
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_object
from omegaconf import OmegaConf

from training.tests.standins import CONFIGS, composed

MEMORIES = (20, 24, 40, 80, 144)  # GB; the last two select the same
ZERO1 = ("torch.distributed.optim.ZeroRedundancyOptimizer", "src.utils.ddp_zero1.DDPStrategyZero1")
ADAM = ("src.optim.adamw.AdamW", None)

# family: (precision, warm-up in percent, scheduler, tokens)
LINEAR, COSINE = "transformers.get_linear_schedule_with_warmup", "src.optim.timm_lr_scheduler.TimmCosineLRScheduler"
SMALL, MEDIUM = (768, 12, 12), (1024, 16, 24)
GPT2 = {"s": SMALL, "m": MEDIUM, "l": (1280, 20, 36), "xl": (1600, 25, 48)}
GPT3 = {"s": SMALL, "m": MEDIUM, "l": (1536, 16, 24), "xl": (2048, 16, 24), "2.7B": (2560, 32, 32)}
HDIM128 = (2560, 20, 32)
RATES = {"s": 6e-4, "m": 3e-4, "l": 2.5e-4, "xl": 2e-4, "2.7B": 1.6e-4}

# name: (device batch of GPUs below 24, 40, 80 GB and others), optimizer and strategy
OWT = {
    "gpt2s-flash": ((16, 32, 64, 64), ADAM),
    "gpt2m-flash": ((8, 16, 32, 64), ADAM),
    "gpt2l-flash": ((4, 8, 16, 32), ZERO1),
    "gpt2xl-flash": ((2, 4, 8, 16), ZERO1),
    "gpt2s": ((4, 8, 16, 16), ADAM),
    "gpt2m": ((8, 8, 8, 8), ADAM),
    "gpt2l": ((4, 4, 4, 4), ZERO1),
    "gpt2xl": ((2, 2, 2, 2), ZERO1),
    "gpt2s-hf": ((8, 8, 8, 8), ADAM),
    "gpt2m-hf": ((4, 4, 4, 4), ADAM),
    "gpt2l-hf": ((2, 2, 2, 2), ZERO1),
    "gpt2xl-hf": ((1, 1, 1, 1), ZERO1),
}
# name: device batch, global batch, sequence length, optimizer, steps, t_initial
PILE = {
    "gpt3s-flash": ((8, 16, 32, 32), 256, 2048, ADAM, 800_000, 600_000),
    "gpt3m-flash": ((4, 8, 16, 32), 256, 2048, ADAM, 800_000, 600_000),
    "gpt3l-flash": ((2, 4, 8, 16), 256, 2048, ZERO1, 800_000, 600_000),
    "gpt3xl-flash": ((1, 2, 4, 8), 512, 2048, ZERO1, 400_000, 300_000),
    "gpt3-2.7B-flash": ((1, 1, 2, 4), 512, 2048, ZERO1, 400_000, 300_000),
    "gpt3-2.7B-flash-hdim128": ((1, 1, 2, 4), 512, 2048, ZERO1, 400_000, 300_000),
    "gpt3s-flash-rotary": ((8, 16, 32, 32), 256, 2048, ADAM, 800_000, 600_000),
    "gpt3m-flash-rotary": ((4, 8, 16, 32), 256, 2048, ADAM, 800_000, 600_000),
    "gpt3l-flash-rotary": ((2, 4, 8, 16), 256, 2048, ZERO1, 800_000, 600_000),
    "gpt3xl-flash-rotary": ((1, 2, 4, 8), 512, 2048, ZERO1, 400_000, 300_000),
    "gpt3-2.7B-flash-rotary": ((4, 8, 16, 32), 512, 2048, ZERO1, 400_000, 300_000),
    "gpt3-2.7B-flash-hdim128-rotary": ((4, 8, 16, 32), 512, 2048, ZERO1, 400_000, 300_000),
    "gpt3s-flash-rotary-30B": ((8, 16, 32, 32), 256, 2048, ADAM, 60_000, 60_000),
    "gpt3m-flash-rotary-30B": ((4, 8, 16, 32), 256, 2048, ADAM, 60_000, 60_000),
    "gpt3l-flash-rotary-30B": ((2, 4, 8, 16), 256, 2048, ZERO1, 60_000, 60_000),
    "gpt3xl-flash-rotary-60B": ((1, 2, 4, 8), 512, 2048, ZERO1, 60_000, 60_000),
    "gpt3s-flash-8k": ((2, 4, 8, 8), 64, 8192, ADAM, 800_000, 600_000),
    "gpt3m-flash-8k": ((2, 4, 8, 8), 64, 8192, ADAM, 800_000, 600_000),
    "gpt3l-flash-8k": ((1, 1, 2, 4), 64, 8192, ZERO1, 800_000, 600_000),
    "gpt3xl-flash-8k": ((1, 1, 2, 4), 128, 8192, ZERO1, 400_000, 300_000),
    "gpt3-2.7B-flash-8k": ((1, 1, 2, 4), 128, 8192, ZERO1, 400_000, 300_000),
    "gpt3s-flash-rotary-8k": ((2, 4, 8, 8), 64, 8192, ADAM, 800_000, 600_000),
    "gpt3m-flash-rotary-8k": ((2, 4, 8, 8), 64, 8192, ADAM, 800_000, 600_000),
    "gpt3l-flash-rotary-8k": ((1, 1, 2, 4), 64, 8192, ZERO1, 800_000, 600_000),
    "gpt3xl-flash-rotary-8k": ((1, 1, 2, 4), 128, 8192, ZERO1, 400_000, 300_000),
    "gpt3-2.7B-flash-rotary-8k": ((1, 2, 4, 8), 128, 8192, ZERO1, 400_000, 300_000),
    "gpt3-2.7B-flash-hdim128-rotary-8k": ((1, 2, 4, 8), 128, 8192, ZERO1, 400_000, 300_000),
    "gpt3s-hf": ((8, 8, 8, 8), 256, 2048, ADAM, 800_000, 600_000),
    "gpt3m-hf": ((4, 4, 4, 4), 256, 2048, ADAM, 800_000, 600_000),
    "gpt3l-hf": ((2, 2, 2, 2), 256, 2048, ADAM, 800_000, 600_000),
    "gpt3xl-hf": ((2, 2, 2, 2), 512, 2048, ZERO1, 400_000, 300_000),
    "gpt3-2.7B-hf": ((1, 1, 1, 1), 512, 2048, ZERO1, 400_000, 300_000),
    "gpt3-2.7B-hf-hdim128": ((1, 1, 1, 1), 512, 2048, ZERO1, 400_000, 300_000),
}
SAVING = ("model_checkpoint", "model_checkpoint_progress")
NAMES = [*(f"owt/{name}" for name in OWT), *(f"pile/{name}" for name in PILE)]
TESTED_APART = ["owt/gpt2s-modern"]  # in test_modern_recipe.py


def expected(name):
    """What must be the same for GPUs of all sizes."""
    family, short = name.split("/")
    size = short.split("-")[1] if short.startswith("gpt3-") else short.split("-")[0][4:]
    if family == "owt":
        (_, optimizer), steps, batch, seqlen = OWT[short], 400_000, 512, 1024
        shape, rate, precision, scheduler = GPT2[size], 6e-4 if size == "s" else 1.5e-4, 16, LINEAR
        schedule = dict(num_warmup_steps=4000, num_training_steps=400_000)
        validation, progress, fault_tolerant = 1000, 50_000, True
    else:
        _, batch, seqlen, optimizer, steps, t_initial = PILE[short]
        shape, rate = HDIM128 if "hdim128" in short else GPT3[size], RATES[size]
        precision, scheduler, fault_tolerant = "bf16", COSINE, False
        schedule = dict(t_in_epochs=False, t_initial=t_initial, warmup_lr_init=1e-6, warmup_t=steps // 100)
        schedule |= dict(lr_min=pytest.approx(rate / 10))
        large = size in ("xl", "2.7B")
        validation, progress = (1000, 12_500) if large else (2000, 50_000)
    hf, rotary = short.endswith("-hf") or "-hf-" in short, "rotary" in short
    return {
        "shape": shape,
        "positions": 0 if rotary else seqlen,
        "rotary": 0.5 if rotary else None,
        "flash": True if "flash" in short else None,
        "hf": hf,
        "seqlen": seqlen,
        "global": batch,
        "rate": rate,
        "decay": 0.1,
        "betas": None,
        "optimizer": optimizer[0],
        "strategy": optimizer[1],
        "steps": steps,
        "scheduler": {"_target_": scheduler} | schedule,
        "precision": precision,
        "seed": 1111,
        "clip": 1.0,
        "validation": validation,
        "progress": progress,
        "fault_tolerant": fault_tolerant,
        "loss": None if hf else "flash_attn.losses.cross_entropy.CrossEntropyLoss",
        "init": 0.0125 if size == "2.7B" else None,
    }


def found(config):
    model, train, trainer = config.model.config, config.train, config.trainer
    progress = config.callbacks.model_checkpoint_progress
    return {
        "shape": (model.n_embd, model.n_head, model.n_layer),
        "positions": model.n_positions,
        "rotary": model.get("rotary_emb_fraction"),
        "flash": model.get("use_flash_attn"),
        "hf": config.model._target_.startswith("transformers"),
        "seqlen": config.datamodule.max_length,
        "global": train.global_batch_size,
        "rate": train.optimizer.lr,
        "decay": train.optimizer.weight_decay,
        "betas": train.optimizer.get("betas"),
        "optimizer": train.optimizer._target_,
        "strategy": trainer.strategy and trainer.strategy._target_,
        "steps": trainer.max_steps,
        "scheduler": OmegaConf.to_container(train.scheduler, resolve=True),
        "precision": trainer.precision,
        "seed": config.seed,
        "clip": trainer.gradient_clip_val,
        "validation": trainer.val_check_interval / trainer.accumulate_grad_batches,
        "progress": progress.every_n_train_steps,
        "fault_tolerant": progress.fault_tolerant,
        "loss": train.loss_fn and train.loss_fn._target_,
        "init": model.get("initializer_range"),
    }


@pytest.mark.parametrize(
    "name",
    [  # each kind of model, in its least and its largest size
        pytest.param(name, marks=() if re.search(r"/gpt(2s|2xl|3s|3-2.7B)\b", name) else pytest.mark.slow)
        for name in NAMES
    ],
)
def test_experiment(name):
    """Sizes, rates, batches and schedules of each experiment, on 8 GPUs of every size."""
    config = composed(f"experiment={name}")
    family, short = name.split("/")
    batches = (OWT if family == "owt" else PILE)[short][0]
    values = expected(name)
    for memory, batch in zip(MEMORIES, (*batches, batches[-1]), strict=True):
        config.train.gpu_mem = memory
        if memory in (MEMORIES[0], MEMORIES[-1]):
            assert found(config) == values
        assert (config.datamodule.batch_size, config.datamodule.batch_size_eval) == (batch, batch)
        assert config.trainer.accumulate_grad_batches == -(-values["global"] // (8 * batch))
    assert config.datamodule.ddp and config.datamodule.fault_tolerant and config.trainer.devices == 8
    assert config.callbacks.early_stopping is None and config.callbacks.model_checkpoint.monitor == "val/loss"
    assert config.callbacks.norm_monitor is not None and set(config.eval.metrics) == {"ppl", "num-tokens"}
    assert ("flop_count" in config.callbacks) == (family == "owt" and short.endswith("hf"))


def test_there_are_45_experiments():
    files = [file for family in ("owt", "pile") for file in (CONFIGS / "experiment" / family).glob("*.yaml")]
    assert sorted(f"{file.parent.name}/{file.stem}" for file in files if file.stem != "base") == sorted(
        NAMES + TESTED_APART
    )
    assert len(NAMES) == 45


@pytest.mark.parametrize(
    ("overrides", "accumulation", "batch"),
    [
        ((), 1, 64),
        (("datamodule.batch_size=16",), 4, 16),
        (("trainer.num_nodes=2", "datamodule.batch_size=8"), 4, 8),
        (("trainer.devices=[0,3]",), 4, 64),
        (("trainer.devices=1", "datamodule.batch_size=48"), 11, 48),  # 528 sequences, of which a warning tells
        (("strategy=fsdp-tp", "trainer.precision=bf16"), 2, 64),  # two GPUs read the same samples
        (("strategy=tp", "trainer.precision=bf16"), 8, 64),
        (("strategy=long", "trainer.precision=bf16"), 8, 64),  # all read parts of the same samples
    ],
)
def test_the_global_batch_stays(overrides, accumulation, batch):
    config = composed("experiment=owt/gpt2s-flash", "train.gpu_mem=80", *overrides)
    assert (config.trainer.accumulate_grad_batches, config.datamodule.batch_size) == (accumulation, batch)
    assert config.trainer.val_check_interval == 1000 * accumulation


def options():
    """The options of each group, which are all files that are no experiments."""
    groups = {}
    for file in sorted(CONFIGS.glob("*/**/*.yaml")):
        group, option = file.parent.relative_to(CONFIGS).as_posix(), file.stem
        if group.split("/")[0] not in ("experiment", "recipe"):
            groups.setdefault(group, []).append(option)
    return groups


@pytest.mark.parametrize("group", options())
@pytest.mark.filterwarnings("ignore:.*Defaults list is missing:UserWarning")  # which is so for a whole configuration
def test_options(group):
    """Every option of every group composes, and what it would build can be imported. The first: into a whole."""
    first, *others = options()[group]
    if group == "model/vit":
        configs = [composed(f"model=vit/{option}") for option in (first, *others)]
    else:
        below = ["model=gpt2"] if group == "model/gpt2model" else []  # a group of its own within this option
        configs = [composed(*below, f"{group}={first}")]
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            configs += [compose(f"{group}/{option}") for option in others]
    for config in configs:
        for target in targets(OmegaConf.to_container(config, resolve=False)):
            assert callable(get_object(target)), target


def targets(config):
    if isinstance(config, dict):
        if isinstance(config.get("_target_"), str):
            yield config["_target_"]
        config = list(config.values())
    for each in config if isinstance(config, list) else ():
        yield from targets(each)


def test_all_parameters_of_the_trainer_are_listed():
    listed = set(composed("trainer=all_params").trainer) - {"_target_"}
    assert set(inspect.signature(L.Trainer.__init__).parameters) - {"self", "logger", "callbacks"} == listed


@pytest.mark.parametrize(
    ("overrides", "folder"),
    [
        (("name=first",), "/start/checkpoints/first"),
        ((), "checkpoints"),  # of the run's own folder, in which it works
        (("experiment=owt/gpt2s-flash",), "checkpoints"),
        (("experiment=owt/gpt2s-flash", "name=first"), "/start/checkpoints/first"),
    ],
)
def test_folder_of_checkpoints(overrides, folder, monkeypatch):
    monkeypatch.delenv("CHECKPOINT_DIR", raising=False)
    callbacks = composed(*overrides).callbacks
    assert callbacks.model_checkpoint.dirpath == folder
    if "model_checkpoint_progress" in callbacks:
        assert callbacks.model_checkpoint_progress.dirpath == folder


@pytest.mark.parametrize(
    ("mode", "expected", "folder"),
    [
        ("default", {"trainer.max_steps": 400_000, "default_mode": True}, "/start/logs/runs/"),
        ("exp", {"experiment_mode": True}, "/start/logs/experiments/first"),
        ("debug", {"trainer.fast_dev_run": True, "print_config": False, "debug_mode": True}, "/start/logs/debug/runs/"),
        (
            "smoke",
            {"callbacks.model_checkpoint": None, "callbacks.model_checkpoint_progress": None},
            "/start/logs/debug/",
        ),
        (
            "profile",
            {"trainer.max_steps": 20, "callbacks.model_checkpoint_progress": None},
            "/start/logs/profile/runs/",
        ),
        ("eval", {"run": "eval"}, "/start/logs/runs/"),
        ("train", {"run": "train"}, "/start/logs/runs/"),
    ],
)
def test_a_mode_wins_over_the_experiment(mode, expected, folder, monkeypatch):
    monkeypatch.delenv("RESULT_DIR", raising=False)
    config = composed("experiment=owt/gpt2s-flash", "logger=wandb", f"mode={mode}", "name=first")
    assert {key: OmegaConf.select(config, key) for key in expected} == expected
    assert config.hydra.run.dir.startswith(folder) and config.hydra.job.chdir
    assert (config.logger.wandb.mode == "disabled") == (mode in ("smoke", "profile"))
    assert composed(f"mode={mode}", "name=first", "++trainer.max_steps=7").trainer.max_steps == 7


def test_numbers_of_a_recipe_can_be_added_on_the_command_line():
    config = composed("experiment=owt/gpt2s-flash", "+recipe=rotary", "train.loss_fn=linear", "optimizer=adamw")
    assert (config.model.config.n_positions, config.model.config.rotary_emb_fraction) == (0, 0.5)
    assert config.train.loss_fn == "linear" and pathlib.Path(CONFIGS, "recipe", "rotary.yaml").exists()
