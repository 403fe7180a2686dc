"""run.py as it is called: from text to a checkpoint and further, modes, and errors."""

import errno
import functools
import json
import math
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf

import run
from src.utils import checkpoint
from src.utils.checkpoint import Checkpoint
from src.utils.errors import message_alone
from training.tests.standins import DATA, SMALL, composed

ROOT = pathlib.Path(__file__).parents[2]
TEXT = "".join(random.Random(0).choices(["to learn ", "a text, ", "one reads\n", "it again. "], k=12_000))
FOLDERS = {  # of a run, below logs/
    "default": "runs/*/*",
    "exp": "experiments/first",
    "debug": "debug/runs/*/*",
    "smoke": "debug/runs/*/*",
    "profile": "profile/runs/*/*",
}


def in_a_process(folder, *arguments, status=0):
    """The output of `python run.py` started in this folder."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "training" / "run.py"), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stderr[-5000:]
    return done.stdout + done.stderr


@pytest.fixture
def here(tmp_path, monkeypatch):
    """call(*arguments) runs run.main in this process, from an empty folder; a small run, if no others are given."""
    monkeypatch.chdir(tmp_path)
    for name in ("RESULT_DIR", "CHECKPOINT_DIR", "DATA_DIR"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments, of_run=(*SMALL, *DATA)):
        monkeypatch.setattr(sys, "argv", ["run.py", *of_run, "trainer.accelerator=cpu", *arguments])
        GlobalHydra.instance().clear()
        run.main()

    precision = torch.get_float32_matmul_precision()
    yield call
    torch.set_float32_matmul_precision(precision)
    GlobalHydra.instance().clear()
    if torch.distributed.is_initialized():  # by a strategy that divides the model
        torch.distributed.destroy_process_group()


def metrics(folder):
    """The rows of the only metrics.csv below a folder, as dicts of what is there."""
    (file,) = folder.rglob("metrics.csv")
    head, *rows = [line.split(",") for line in file.read_text().splitlines()]
    return [{name: float(x) for name, x in zip(head, row) if x} for row in rows]


def test_a_text_is_learned(tmp_path, here, capfd):
    """Training of seconds to less than the unigram entropy; then resumed to more steps, and evaluated."""
    (tmp_path / "text.txt").write_text(TEXT)
    bytes_ = np.bincount(np.frombuffer(TEXT.encode(), np.uint8)) / len(TEXT.encode())
    unigram = -sum(p * math.log(p) for p in bytes_ if p > 0)
    arguments = [
        "experiment=tiny/text",
        "name=first",
        "datamodule.dataset_name=text.txt",
        "datamodule.max_length=64",
        "datamodule.batch_size=8",
        "train.global_batch_size=8",
    ]

    here("trainer.max_steps=60", "train.scheduler.t_initial=70", of_run=arguments)
    said = "".join(capfd.readouterr())
    losses = [row for row in metrics(tmp_path / "logs") if "val/loss" in row]
    assert losses[-1]["val/loss"] < unigram and "Test metric" in said
    assert losses[-1]["val/ppl"] == pytest.approx(math.exp(losses[-1]["val/loss"]))
    last = tmp_path / "checkpoints" / "first" / "last.ckpt"
    assert Checkpoint(last).state["global_step"] == 60  # also if every_n_train_steps does not divide it

    here("resume=True", "test_after_training=False", "trainer.max_steps=70", of_run=arguments)
    assert f"Resuming from {last}" in "".join(capfd.readouterr())
    state = Checkpoint(last).state
    assert state["global_step"] == 70 and state["hyper_parameters"]["model"]["config"]["vocab_size"] == 257

    here("run=eval", f"eval.ckpt={last.relative_to(tmp_path)}", of_run=arguments)
    said = "".join(capfd.readouterr())
    (file,) = tmp_path.rglob("eval.json")
    results = json.loads(file.read_text())
    assert results["checkpoint"] == str(last) and results["val/loss"] < unigram
    assert re.search(rf"val/ppl +{results['val/ppl']:.6g}", said)


def test_the_data_alone(here, tmp_path, capfd):
    (tmp_path / "text.txt").write_text("a text of a few words\n\n" * 200)
    target = "datamodule._target_=src.datamodules.language_modeling_hf.LMDataModule"
    here(target, "run=prepare", "datamodule.dataset_name=text.txt")
    assert "tokens" in capfd.readouterr().out and any((tmp_path / "data" / "text" / "cache").iterdir())


def test_folders_of_an_unnamed_run(here, tmp_path):
    """A run works in a folder of its own, and has its checkpoints there."""
    here()
    (folder,) = (tmp_path / "logs" / "runs").glob("*/*")
    assert {"checkpoints", "csv", "config_tree.txt", ".hydra"} <= {each.name for each in folder.iterdir()}
    assert (folder / "checkpoints" / "last.ckpt").is_dir() and pathlib.Path.cwd() == tmp_path
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("mode", FOLDERS)
def test_modes(mode, here, tmp_path):
    """Each of them runs, and overrides what the experiment says."""
    here(f"mode={mode}", "name=first")
    (folder,) = (tmp_path / "logs").glob(FOLDERS[mode])
    saves = mode in ("default", "exp")
    assert (tmp_path / "checkpoints" / "first" / "last.ckpt").exists() == saves
    assert (folder / "config_tree.txt").exists() == (mode != "debug")
    assert bool(list(folder.glob("*profile*"))) == (mode == "profile")


def test_run_eval_can_be_a_mode(here, tmp_path):
    here("mode=eval", "eval.run_test=False", "datamodule.batch_size_eval=null")
    (file,) = tmp_path.rglob("eval.json")
    assert set(json.loads(file.read_text())) == {"checkpoint", "val/loss", "val/ppl", "val/num-tokens"}


def test_a_sweep(here, tmp_path):
    """Each run has its own folder and its own data."""
    (tmp_path / "text.txt").write_text("a text of a few words\n\n" * 200)
    targets = "training.tests.standins.Data,src.datamodules.language_modeling_hf.LMDataModule"
    here(f"datamodule._target_={targets}", "datamodule.dataset_name=text.txt", "-m")
    checkpoints = sorted(tmp_path.glob("logs/multiruns/*/*/checkpoints/last.ckpt"))
    models = [Checkpoint(path).state["hyper_parameters"]["model"] for path in checkpoints]
    assert [model["config"]["vocab_size"] for model in models] == [50, 257]


def test_generate_and_export(here, tmp_path, monkeypatch):
    """Both are given the checkpoint and options as their own command lines have them."""
    calls = []
    monkeypatch.setattr("src.generate.main", calls.append)
    monkeypatch.setattr("src.export.main", calls.append)
    (tmp_path / "last.ckpt").mkdir()
    here("run=generate", "eval.ckpt=last.ckpt", "generate.prompt='a b'", "+generate.top_k=4", "+generate.greedy=true")
    here("run=export", "eval.ckpt=last.ckpt", "export.folder=exported")
    checkpoint = str(tmp_path / "last.ckpt")
    assert calls == [
        [checkpoint, "--prompt", "a b", "--top-k", "4", "--greedy"],
        [checkpoint, str(tmp_path / "exported")],
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run=export", "eval.ckpt=x"], "run=export needs export.folder, found none"),
        (["datamodule.batch_size=0"], "datamodule.batch_size must be an integer of at least 1, found 0"),
        (["train.global_batch_size=-1"], "train.global_batch_size must be an integer of at least 1, found -1"),
        (["datamodule.batch_size=two"], "datamodule.batch_size must be an integer of at least 1, found 'two'"),
        (["datamodule.max_length=16.0"], "datamodule.max_length must be an integer of at least 1, found 16.0"),
        (["+datamodule.loader_workers=1.0"], "datamodule.loader_workers must be an integer of at least 0, found 1.0"),
        (
            ["callbacks.model_checkpoint.dirpath=/dev/null/x"],
            "model_checkpoint.dirpath must be a folder that can be written",
        ),
        (["run=tune"], "run must be one of train, eval, prepare, generate, export, found 'tune'"),
        (["datamodule.dataset_name=???"], "these values must be given: .*dataset_name"),
        (["mode=exp"], "mode=exp needs the name of the experiment"),
        (["trainer.accelerator=gpu", "trainer.devices=99"], "trainer.devices must be at most the number of GPUs"),
        (["trainer.devices=0"], "trainer.devices must be an integer of at least 1, a list of .* auto for all, found 0"),
        (["trainer.devices=two"], r"\ntrainer.devices must be an integer of at least 1, .* found 'two'"),
        (["trainer.devices=[0,1]"], r"\ntrainer.devices must be a number or auto on a CPU, found \[0, 1\]"),
        (
            ["strategy=tp", "trainer.strategy.tensor_parallel_size=0"],
            r"\ntrainer\.strategy\.tensor_p.* least 1, found 0",
        ),
        (
            ["strategy=long", "trainer.strategy.dp_replicate=0"],
            r"\ntrainer\.strategy\.dp_replicate .* least 1, found 0",
        ),
        (["strategy=tp", "trainer.strategy.tensor_parallel_size=two"], r"\ntrainer\.strategy\.tensor_p.* found 'two'"),
        (
            ["strategy=ddp", "++trainer.strategy.static_grap=true"],
            r"\ntrainer.strategy.static_grap is no option of DDPStrategy: did you mean trainer.strategy.static_graph",
        ),
        (["trainer.max_steps=ten"], "trainer.max_steps must be an integer of at least -1, found 'ten'"),
        (["trainer.val_check_interval=0"], "trainer.val_check_interval must be more than 0, found 0"),
        (["name=../elsewhere"], r"name must be that of a folder in checkpoint_dir, found '\.\./elsewhere'"),
        (["name=//x"], "name must be that of a folder in checkpoint_dir, found '//x'"),
        (["name=[1]"], r"name must be that of a folder in checkpoint_dir, found \[1\]"),
        (["seed=abc"], "seed must be an integer of at least 0, found 'abc'"),
        (["resume=maybe"], "resume must be True or False, found 'maybe'"),
        (["optimizer=adamw-zero"], "and needs strategy=zero1, found none"),
        (["optimizer=adamw-zero", "strategy=fsdp"], "adamw-zero must not be used with .* found strategy fsdp"),
        (["model.config.vocab_size=40"], "model.config.vocab_size must be at least 50, .*, found 40"),
        (
            ["callbacks.model_checkpoint.monitor=val/los"],
            "monitor of ModelCheckpointMine must be one of val/loss, .*los'",
        ),
        (["model.config.n_head=3"], r"\nconfig.n_embd must be a multiple of n_head"),
        (["run=eval", "~model"], "model must have a _target_, found none"),
        (["+train.warmstart.path=x"], "train.warmstart.path must be a checkpoint, found nothing at x"),
    ],
)
def test_errors(arguments, says, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = composed(*SMALL, *DATA, "trainer.accelerator=cpu", *arguments)
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    with pytest.raises(Exception) as error:
        run.run(config)
    assert re.search(says, "\n" + message_alone(error.value))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["result_dir=/dev/null/x"], r"result_dir must be a folder that can be written to, found /dev/null/x/runs"),
        (
            ["trainer.strategy.find_unused_parameters=true"],
            "Could not override (.|\n)*trainer.strategy.find_unused_parameters with strategy=ddp or strategy=zero1",
        ),
        (["model=null"], "model must be the name of an option, found null; ~model"),
        (["experiment=tiny/txt"], "Could not find 'experiment/tiny/txt'(.|\n)*did you mean tiny/text"),
        (["train.optimizer.lr=3e-3x"], r"\ntrain\.optimizer\.lr must be a number, found '3e-3x'"),
        (["+train.optimizer.betas=[0.9,x]"], r"\ntrain\.optimizer\.betas must be numbers, found \[0\.9, 'x'\]"),
        (["train.scheduler.t_initial=ten"], r"\ntrain\.scheduler\.t_initial must be an integer, found 'ten'"),
        (["++train.scheduler.lr_min=tiny"], r"\ntrain\.scheduler\.lr_min must be a number, found 'tiny'"),
        (["trainer.gradient_clip_val=one"], r"\ntrainer\.gradient_clip_val must be a number, found 'one'"),
        (["++trainer.accumulate_grad_batches=2x"], r"\ntrainer\.accumulate_grad_batches must be an integer, .*'2x'"),
        (["trainer.val_check_interval=often"], r"val_check_interval must be a number or a time DD:HH:MM:SS, .*'often'"),
        (["trainer.max_step=3"], "Could not override 'trainer.max_step'(.|\n)*did you mean trainer.max_steps"),
        (["run=generate"], "run=generate needs eval.ckpt, found none"),
        (["~model"], "model must have a _target_, found none"),
        (["trainer.strategy=abc"], r"\ntrainer.strategy must be one of auto, .*, found 'abc'"),
    ],
)
def test_errors_of_a_command(arguments, says, here, capfd):
    """A message, without a stack: of the run, or of Hydra, followed by similar names."""
    with pytest.raises(SystemExit) as error:
        here(*arguments)
    said = capfd.readouterr().err
    assert error.value.code == 1 and re.search(says, said) and "Traceback" not in said


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("hydra.callbacks.run_folder._target_=for_another_torch.X", r"\nRuntimeError: no operator nms \(.*, line 1\)"),
        ("+callbacks.other._target_=for_another_torch.X", r"RuntimeError\('no operator nms'\)"),
        ("datamodule._target_=for_another_torch.X", r"RuntimeError\('no operator nms'\)"),
        ("train.optimizer._target_=for_another_torch.X", r"RuntimeError\('no operator nms'\)"),
        ("trainer._target_=for_another_torch.X", r"RuntimeError\('no operator nms'\)"),
        ("model._target_=not_there.X", "No module named 'not_there'"),
    ],
)
def test_modules_that_cannot_be_imported(argument, says, here, tmp_path, monkeypatch, capfd):
    """As a torchvision that was built for another PyTorch: the error of the import is told, whoever needs it."""
    (tmp_path / "for_another_torch.py").write_text('raise RuntimeError("no operator nms")')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as error:
        here(argument)
    said = capfd.readouterr().err
    assert error.value.code == 1 and re.search(says, said) and "Traceback" not in said


def test_nothing_is_asked_for(here, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["run.py"])
    with pytest.raises(SystemExit):
        run.main()
    assert "run=train needs model, found none: give experiment=..." in capfd.readouterr().err


def test_the_file_is_a_program(tmp_path):
    """Which says what is wrong before it imports PyTorch, if it can."""
    said = in_a_process(tmp_path, "model=null", status=1)
    assert said.startswith("model must be the name of an option, found null; ~model") and "Traceback" not in said


def test_what_cannot_be_resumed(tmp_path, here, capfd):
    """A message names the checkpoint and what differs, without a stack, and the checkpoint stays as it is."""
    for name, word in (("text", "some words"), ("other", "more texts")):
        (tmp_path / f"{name}.txt").write_text(20 * (f"{word} to be learned " * 20 + "\n\n"))
    text = [
        "datamodule._target_=src.datamodules.language_modeling_hf.LMDataModule",
        "datamodule.dataset_name=text.txt",
        "datamodule.val_ratio=0.1",
        "+datamodule.loader_workers=0",
    ]
    here(*text, "name=first", "test_after_training=False")
    capfd.readouterr()
    for options, says in (
        (["model.config.n_embd=32"], r"has shape \(264, 16\) in the checkpoint and \(264, 32\)"),
        (["model.config.n_embd=32"], r"model.config.n_embd was 16, and is 32"),
        (["optimizer=sgd"], r"the optimizer must be \['AdamW'\], found \['SGD'\]"),
        (["datamodule.dataset_name=other.txt"], r"dataset_name was '.*/text.txt', and is '.*/other.txt'"),
        (["datamodule.max_length=8", "model.config.n_positions=16"], "max_length was 16, and is 8"),
    ):
        with pytest.raises(SystemExit) as error:
            here(*text, "name=first", "resume=True", "trainer.max_steps=6", *options)
        said = capfd.readouterr().err
        assert error.value.code == 1 and re.search(says, said) and "Traceback" not in said
    assert Checkpoint(tmp_path / "checkpoints" / "first" / "last.ckpt").state["global_step"] == 4


ZERO = ["optimizer=adamw-zero", "strategy=zero1"]


@pytest.fixture(scope="module")
def first_runs(tmp_path_factory):
    """The folder of a run with these options, which are none or ZERO: each is trained once."""
    return functools.cache(lambda options: tmp_path_factory.mktemp("first"))


@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        ([], ["train.optimizer.lr=0.5"], r"not those of this run: train\.optimizer\.lr was \S+, and is 0\.5"),
        ([], ["trainer.max_steps=6"], r"not those of this run: train\.scheduler\.t_initial was 4, and is 6"),
        ([], ["+train.optimizer.eps=0.1"], r"not those of this run: train\.optimizer\.eps was None, and is 0\.1"),
        ([], ["trainer.gradient_clip_val=0.5", "seed=7"], None),
        ([], ZERO, None),
        (ZERO, [], None),
        (
            [],
            [*ZERO, "train.optimizer.lr=0.5"],
            r"not those of this run: train\.optimizer\.lr was \S+, and is 0\.5; train\.scheduler\.lr_min .*\n",
        ),
        ([], ["+train.optimizer.betas=[0.9,0.999]", "+train.optimizer.eps=1e-8"], None),
    ],
)
def test_options_that_a_resumed_run_keeps(first, then, says, first_runs, here, tmp_path, capfd):
    """PyTorch restores an optimiser and a schedule with their options: a change of these would go unseen.

    Where another class has the same by default, nothing has changed.
    """
    trained = first_runs(tuple(first)) / "checkpoints"
    if not trained.exists():
        here("name=first", "test_after_training=False", *first)
        shutil.copytree(tmp_path / "checkpoints", trained)
    shutil.copytree(trained, tmp_path / "checkpoints", dirs_exist_ok=True)
    capfd.readouterr()
    here("name=first", "resume=True", "test_after_training=False", *then)
    said = "".join(capfd.readouterr())
    assert re.search(says, said) if says else "whatever they are now" not in said


def test_a_disk_that_is_full(tmp_path, here, capfd, monkeypatch):
    """The message says it, and the checkpoint before is as it was."""
    write, times = checkpoint._write, []

    def fails_later(file, text):
        times.append(file)
        if len(times) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, text)

    monkeypatch.setattr(checkpoint, "_write", fails_later)
    with pytest.raises(SystemExit) as error:
        here("name=first")
    said = capfd.readouterr().err
    assert error.value.code == 1 and "was not saved: no space is left on the disk" in said and "Traceback" not in said
    assert Checkpoint(checkpoint.latest(tmp_path / "checkpoints" / "first")).state["global_step"] == 2


def test_a_disk_that_is_too_full_for_the_log(here, capfd, monkeypatch):
    def no_space(self):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.csv")

    monkeypatch.setattr("lightning.fabric.loggers.csv_logs._ExperimentWriter.save", no_space)
    with pytest.raises(SystemExit):
        here("name=first", "logger=csv")
    said = capfd.readouterr().err
    assert "\nno space is left on the disk: [Errno 28]" in said and "metrics.csv" in said and "Traceback" not in said


def test_the_stack_is_there_if_asked_for(here, capfd, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(CompactHydraException) as error:
        here("trainer.strategy=abc")
    assert isinstance(error.value.__cause__, ValueError) and str(error.value) == str(error.value.__cause__)


def test_environment_file(tmp_path, monkeypatch):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / ".env").write_text("# a comment=1\nexport FIRST_OF_TWO='x=y'\nSECOND_OF_TWO=2\n\n")
    monkeypatch.setenv("FIRST_OF_TWO", "before")
    monkeypatch.delenv("SECOND_OF_TWO", raising=False)
    run.load_env(inner)
    assert (os.environ["FIRST_OF_TWO"], os.environ.pop("SECOND_OF_TWO")) == ("x=y", "2")


@pytest.mark.slow
def test_two_processes(tmp_path):
    """Two ranks with half the batch each learn what one does with the whole."""
    (tmp_path / "text.txt").write_text(TEXT)
    losses = []
    for devices, batch in ((1, 16), (2, 8)):
        in_a_process(
            tmp_path,
            "experiment=tiny/text",
            f"name=on{devices}",
            "datamodule.dataset_name=text.txt",
            "trainer.accelerator=cpu",
            f"trainer.devices={devices}",
            f"datamodule.batch_size={batch}",
            "trainer.max_steps=20",
            "__steps_per_validation=10",
            "test_after_training=False",
            *(f"+model.config.{kind}_pdrop=0" for kind in ("resid", "embd", "attn")),
        )
        (file,) = (tmp_path / "logs").rglob(f"csv/on{devices}/metrics.csv")
        losses.append([row for row in metrics(file.parent) if "train/loss_step" in row])
    for one, two in zip(*losses, strict=True):
        assert two["train/num-tokens_step"] == one["train/num-tokens_step"]
        assert two["train/loss_step"] == pytest.approx(one["train/loss_step"], rel=2e-3)
