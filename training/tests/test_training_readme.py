"""The commands in README.md are accepted, and its table of experiments is that of the configurations."""

import functools
import importlib
import pathlib
import re
import shlex

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from src.utils import resolvers

FOLDER = pathlib.Path(__file__).resolve().parents[1]
README = (FOLDER / "README.md").read_text()
BLOCKS = "\n".join(re.findall(r"(?:^    .*\n(?:^ *\n)*)+", README, re.MULTILINE))
LINES = BLOCKS.replace("\\\n", " ").splitlines()
COMMANDS = [line.split("  #")[0].strip() for line in LINES if re.search(r"python\b|torchrun|srun", line)]
RUNS = [command for command in COMMANDS if " run.py" in command]
MODULES = [command for command in COMMANDS if re.search(r"python -m src\.", command)]
MEMORIES = (20, 30, 60, 100)  # GB, one of each size of GPU that batches are given for


@functools.cache
def composed(*overrides):
    """The configuration of a command line, before it is resolved."""
    resolvers.register()
    with initialize_config_dir(str(FOLDER / "configs"), version_base="1.3"):
        return compose("config", list(overrides))


def test_every_command_is_tested():
    others = set(COMMANDS) - set(RUNS) - set(MODULES)
    assert all(
        re.match(r"python (first_run\.py|-m pytest|-m tensorboard|-m flash_attn\.context_parallel)", command)
        for command in others
    ), others
    assert len(RUNS) > 20 and len(MODULES) > 5


@pytest.mark.parametrize("command", RUNS)
def test_runs_compose(command):
    arguments = shlex.split(command.split(" run.py ", 1)[1])
    flags = {"--cfg", "job", "--resolve", "--multirun"}
    config = composed(*(argument for argument in arguments if argument not in flags)).copy()
    config.work_dir = "/where/the/command/was/started"
    resolved = OmegaConf.to_container(config, resolve=True)
    assert not OmegaConf.missing_keys(config)
    assert resolved["run"] in ("train", "eval", "prepare", "generate", "export")
    of_images = "experiment=imagenet" in command or "experiment=tiny/vision" in command
    assert resolved["task"]["_target_"] == f"src.tasks.seq.{'SequenceModel' if of_images else 'SequenceLMModel'}"


@pytest.mark.parametrize("command", MODULES)
def test_arguments_of_modules_are_known(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("checkpoints/first").mkdir(parents=True)
    pathlib.Path("some.txt").touch()
    name, *arguments = shlex.split(command.split("python -m ", 1)[1])
    if name == "src.evaluation.lm_harness":
        harness = pytest.importorskip("lm_eval._cli.harness", reason="needs lm_eval: pip install lm_eval")
        args = harness.HarnessCLI()._parser.parse_args(arguments)
        assert args.model == "flash_attn"
    else:
        importlib.import_module(name).parser().parse_args(arguments)


def experiments():
    folder = FOLDER / "configs/experiment"
    names = (file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml"))
    return sorted(name for name in names if not name.endswith("base"))


ROWS = [line for line in README.splitlines() if re.match(r"\| `\w+/", line)]
SUFFIXES = set(re.findall(r"`(-\w+)`", README))


def test_every_experiment_is_in_the_table_or_a_variant_of_one():
    in_table = {re.search(r"`(.*?)`", line)[1] for line in ROWS}
    of_images = {name for name in experiments() if name.startswith("imagenet/") or name == "tiny/vision"}
    assert in_table <= set(experiments())
    assert all(f"`{name}`" in README or f"experiment={name}" in README for name in of_images)
    for name in set(experiments()) - in_table - of_images:
        stem = re.fullmatch(r"(owt/gpt2[a-z]+|pile/gpt3(?:[a-z]+|-2\.7B))((?:-\w+)*)", name)
        assert stem and f"{stem[1]}-flash" in in_table, name
        assert set(re.findall(r"-\w+", stem[2])) - {"-flash"} <= SUFFIXES, name


def row(name):
    """A row of the table, by the composed configuration."""
    config = composed(f"experiment={name}").copy()
    shape = config.model.config
    batches = [config.datamodule.batch_size]
    if "gpu_mem" in config.train:
        batches = []
        for config.train.gpu_mem in MEMORIES:
            batches.append(config.datamodule.batch_size)
    batch = "/".join(map(str, batches if len(set(batches)) > 1 else batches[:1]))
    state = "divided" if "zero" in str(config.trainer.get("strategy")).lower() else ""
    cells = [
        f"`{name}`",
        f"{shape.n_embd}, {shape.n_head}, {shape.n_layer}",
        config.datamodule.max_length,
        batch,
        config.train.get("global_batch_size", batch),
        f"{config.train.optimizer.lr:g}",
        config.trainer.max_steps,
        state,
    ]
    return f"| {' | '.join(map(str, cells))} |"


@pytest.mark.parametrize("line", ROWS, ids=lambda line: re.search(r"`(.*?)`", line)[1])
def test_table_of_experiments(line):
    assert line == row(re.search(r"`(.*?)`", line)[1])


def test_groups():
    table = README.split("| group |")[1].split("\n\n")[0]
    listed = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed == {folder.name for folder in (FOLDER / "configs").iterdir() if folder.is_dir()} - {"recipe"}
