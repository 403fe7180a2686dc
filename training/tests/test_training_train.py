"""What training is built from: devices, precision, loggers, and the checkpoint to resume from."""

import importlib.util
import logging
import multiprocessing
import pathlib
import re

import pytest
import torch
from hydra.errors import InstantiationException
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from omegaconf import OmegaConf
from processes import new_process

from src import engines, train
from src.eval import evaluate
from src.utils import checkpoint, folders
from src.utils.errors import message_alone
from training.tests.standins import Data, small


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (16, "16-mixed"),
        ("16", "16-mixed"),
        ("bf16", "bf16-mixed"),
        ("bf16-mixed", "bf16-mixed"),
        (32, "32-true"),
        ("32-true", "32-true"),
        (None, "32-true"),
        ("64", "64-true"),
    ],
)
def test_precision(precision, expected):
    config = small("trainer.accelerator=cpu")
    if precision is not None:
        config.trainer.precision = precision
    found = train.trainer_of(config, train.strategy_of(config), [], [])
    assert found.precision == ("bf16-mixed" if expected == "16-mixed" else expected)  # which the CPU has not


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (dict(devices=1), engines.SingleDeviceStrategy),
        (dict(devices=1, strategy="auto"), engines.SingleDeviceStrategy),
        (dict(devices=2), engines.DDPStrategy),
        (dict(devices="2", strategy="auto"), engines.DDPStrategy),
        (dict(devices=1, num_nodes=2), engines.DDPStrategy),
        (dict(devices=-1), engines.SingleDeviceStrategy),
        (dict(devices=2, strategy="fsdp"), engines.FSDPStrategy),
        (dict(devices=2, strategy={"_target_": "src.utils.ddp_zero1.DDPStrategyZero1"}), engines.DDPStrategyZero1),
    ],
)
def test_strategy(options, kind):
    config = small("trainer.accelerator=cpu")
    config.trainer = {**config.trainer, **options}
    assert type(train.trainer_of(config, train.strategy_of(config), [], []).strategy) is kind


@pytest.mark.parametrize("run", [train.train, evaluate])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trainer.strategy=ddp_spawn"], r"trainer\.strategy must be one of auto, single, ddp.* found 'ddp_spawn'"),
        (["+trainer.strategy.bucket_cap_mb=9"], r"trainer\.strategy must have a _target_, found .*: give strategy=ddp"),
        (
            ["strategy=ddp", "trainer.strategy.ddp_comm_hook=GradBucket"],
            r"trainer\.strategy\.ddp_comm_hook must be one of bfloat16_.*, fp16_compress_hook, found 'GradBucket'",
        ),
        (["strategy=ddp", "trainer.strategy.ddp_comm_hook=3"], r"ddp_comm_hook must be one of .*, found 3"),
        (
            ["strategy=ddp", "++trainer.strategy.static_grap=true"],
            r"trainer\.strategy\.static_grap is no option of DDPStrategy: did you mean trainer\.strategy\.static_graph",
        ),
        (
            ["strategy=fsdp", "+trainer.strategy.reshard_after_forwrd=true"],
            r"forwrd is no option of FSDPStrategy: did you mean trainer\.strategy\.reshard_after_forward",
        ),
        (["strategy=ddp", "+trainer.strategy.module=1"], r"trainer\.strategy\.module is no option of DDPStrategy"),
        (
            ["strategy=fsdp-tp", "trainer.devices=3"],
            r"trainer\.strategy\.tensor_parallel_size must divide the number of processes, 3, found 2",
        ),
        (["trainer.devices=[0,1]"], r"trainer\.devices must be a number or auto on a CPU, found \[0, 1\]"),
        (["trainer.devices='0,'"], r"trainer\.devices must be a number or auto on a CPU, found \[0\]"),
    ],
)
@pytest.mark.cover(1)
def test_what_cannot_run_is_found_before_the_data_is_prepared(run, arguments, says, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Data, "prepare_data", lambda self: pytest.fail("The data was prepared."))
    with pytest.raises((ValueError, InstantiationException)) as error:
        run(small("trainer.accelerator=cpu", *arguments))
    assert re.search(says, message_alone(error.value))


@pytest.mark.parametrize(
    ("accelerator", "devices", "there", "fits"),
    [
        ("gpu", 8, 8, True),
        ("gpu", 8, 2, False),
        ("gpu", 1, 0, False),
        ("cpu", 4, 0, True),
        ("auto", 4, 0, True),
        ("auto", 4, 2, False),
        ("gpu", [0, 1, 2], 2, False),
        ("gpu", [7], 4, False),
        ("gpu", [3], 4, True),
        (None, "auto", 0, True),
    ],
)
def test_number_of_gpus(accelerator, devices, there, fits, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    config = OmegaConf.create({"trainer": {"accelerator": accelerator, "devices": devices}})
    if fits:
        train.check_devices(config)
    else:
        with pytest.raises(ValueError, match=f"trainer.devices must be at most the number of GPUs here, {there}"):
            train.check_devices(config)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("+trainer.max_epoch=3", r"trainer\.max_epoch is no option .* did you mean trainer\.max_epochs"),
        ("trainer.accelerator=xyz", r"trainer\.accelerator must be one of auto, gpu, cpu, .* found 'xyz'"),
        ("++trainer.precision=fp8", r"trainer\.precision must be one of 16, bf16, 32, 64, found 'fp8'"),
    ],
)
def test_what_lightning_would_refuse_is_refused_before_the_data_is_prepared(override, says):
    with pytest.raises(ValueError, match=says):
        train.train(small("datamodule.dataset_name=nowhere", override))


def test_torchrun_that_srun_has_started(monkeypatch):
    """Slurm then has a task for each machine, and torchrun starts a process for each GPU."""
    variables = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    train.check_devices(OmegaConf.create({"trainer": {"accelerator": "cpu", "devices": 8, "num_nodes": 2}}))


@pytest.mark.parametrize(
    "override", ["+trainer.plugins=[]", "++trainer.precision=transformer-engine", "++trainer.precision=bf16-true"]
)
def test_what_lightning_takes_is_not_refused(override):
    train.check_trainer(small(override))


def test_torchrun_with_other_processes_on_a_machine(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    config = OmegaConf.create({"trainer": {"accelerator": "cpu", "devices": 2, "num_nodes": 2}})
    with pytest.raises(ValueError, match=r"trainer\.devices .* on each machine, 4, found 2"):
        train.check_devices(config)


@pytest.mark.parametrize(("devices", "nodes", "fits"), [(2, 2, True), (4, None, True), (1, 1, False), (2, 1, False)])
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_number_of_processes_of_a_launcher(launcher, devices, nodes, fits, monkeypatch):
    """Four processes with trainer.devices=1 would be four runs that write the same checkpoints."""
    variables = {
        "torchrun": {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": str(devices)},
        "srun": {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train"},
    }
    for name, value in variables[launcher].items():
        monkeypatch.setenv(name, value)
    config = OmegaConf.create({"trainer": {"accelerator": "cpu", "devices": devices, "num_nodes": nodes}})
    if fits:
        train.check_devices(config)
    else:
        with pytest.raises(ValueError, match=f"processes that {launcher} has started, 4, found {devices} x {nodes}"):
            train.check_devices(config)


def config_with(folder, name=None):
    callbacks = {"model_checkpoint": {"dirpath": str(folder)}}
    return OmegaConf.create({"callbacks": callbacks, "checkpoint_dir": "elsewhere", "name": name})


def stay_in(folder, connection):
    """What another run does, from when it says so until it is killed."""
    with folders.only_run_in(str(folder), "dirpath"):
        connection.send("in")
        connection.recv()


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    ours, theirs = multiprocessing.Pipe()
    other = new_process(stay_in, tmp_path, theirs)
    other.start()
    assert ours.recv() == "in"
    for path in (tmp_path, link):
        expected = f"callbacks.model_checkpoint.dirpath must be a folder of one run at a time, found {path},"
        with pytest.raises(ValueError, match=expected), train.checkpoint_folder(config_with(path)):
            pass
    other.kill()
    other.join()
    with train.checkpoint_folder(config_with(tmp_path)):
        pass


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({}, True),
        ({"NODE_RANK": "0"}, True),
        ({"NODE_RANK": "1"}, False),
        ({"OMPI_COMM_WORLD_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_RANK": "1"}, False),
        ({"PMI_RANK": "3"}, False),
        ({"PMIX_RANK": "1"}, False),
        ({"MV2_COMM_WORLD_RANK": "2"}, False),
        ({"PMI_RANK": "1", "RANK": "0"}, True),
    ],
)
def test_the_first_process_of_a_run_locks_its_folder(variables, is_first, tmp_path, monkeypatch):
    """RANK=0 beside another number: torchrun, which mpirun has started on each machine."""
    for name in ("NODE_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "run"
    with folders.only_run_in(str(folder), "dirpath"):
        assert (tmp_path / ".run.lock").exists() == is_first


def test_nothing_to_resume(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "src.train"):
        assert train.checkpoint_to_resume(config_with(tmp_path / "none")) is None
    assert "no complete checkpoint" in caplog.text and "name=..." in caplog.text


def test_the_latest_complete_checkpoint_is_resumed(tmp_path):
    for name in ("last.ckpt", ".pl_auto_save.ckpt"):
        checkpoint.save(tmp_path / name, {"step": 1})
    assert train.checkpoint_to_resume(config_with(tmp_path)) == str(tmp_path / ".pl_auto_save.ckpt")
    (tmp_path / ".pl_auto_save.ckpt" / "manifest.json").unlink()
    assert train.checkpoint_to_resume(config_with(tmp_path)) == str(tmp_path / "last.ckpt")
    config = config_with(tmp_path)
    config.callbacks.model_checkpoint, config.checkpoint_dir = None, str(tmp_path)
    assert train.checkpoint_to_resume(config) == str(tmp_path / "last.ckpt")


def test_loggers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loggers = train.loggers_of(small("logger=[csv,tensorboard]"))
    assert [type(each) for each in loggers] == [CSVLogger, TensorBoardLogger]
    assert train.loggers_of(small("logger=none")) == []


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="needs a machine without wandb")
@pytest.mark.parametrize(("choice", "loggers"), [("wandb", 1), ("many_loggers", 1), ("[tensorboard,wandb]", 2)])
def test_without_wandb(choice, loggers, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING, "src.train"):
        found = train.loggers_of(small(f"logger={choice}", "name=first"))
    assert len(found) == loggers and isinstance(found[-1], CSVLogger)
    assert pathlib.Path(found[-1].log_dir).resolve() == tmp_path / "csv" / "first"
    assert caplog.text.count("pip install wandb") == 1


def test_metrics_of_a_resumed_run_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in range(2):
        (logger,) = train.loggers_of(small("logger=csv", "name=first"))
        logger.log_metrics({"loss": float(step)}, step=step)
        logger.save()
    files = sorted(file.name for file in (tmp_path / "csv" / "first").glob("metrics*.csv"))
    assert len(files) == 2 and files[0] == "metrics.csv" and files[1].startswith("metrics_until_")
    assert [(tmp_path / "csv" / "first" / file).read_text().split()[1] for file in files] == ["1.0,1", "0.0,0"]


def test_training_returns_the_optimized_metric(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small("trainer.accelerator=cpu", "logger=none", "+optimized_metric=val/loss", "trainer.max_steps=2")
    loss = train.train(config)
    assert isinstance(loss, float) and 3 < loss < 5
    config.optimized_metric = "val/los"
    with pytest.raises(ValueError, match=r"optimized_metric must be one of .*val/loss.*, found 'val/los'"):
        train.train(config)
    assert (tmp_path / "checkpoints").is_dir()
