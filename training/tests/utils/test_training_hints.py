"""What is said about names that do not exist."""

import pytest

from src.utils import resolvers
from src.utils.hints import hints, nulls
from training.tests.standins import CONFIGS

UNUSED, RESHARD = "trainer.strategy.find_unused_parameters", "trainer.strategy.reshard_after_forward"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["experiment=owt/gpt2s-flsh"], ["experiment=owt/gpt2s-flsh: did you mean owt/gpt2s-flash or "]),
        (["experiment=gpt2s-flash"], ["experiment=gpt2s-flash: did you mean owt/gpt2s-flash"]),
        (["experiment=tiny/text", "logger=[csv,wand]"], ["logger=wand: did you mean wandb?"]),
        (["experiment=tiny/text", "trainer.max_step=3"], ["trainer.max_step: did you mean trainer.max_steps"]),
        (
            ["experiment=tiny/text", "datamodule.dataset_nam=x"],
            ["datamodule.dataset_nam: did you mean datamodule.d"],
        ),
        (["experimnt=tiny/text"], ["experimnt: did you mean experiment"]),
        (["zzz=1"], ["zzz: there is nothing of a similar name."]),
        (["optimizer=adamv", "sceduler=step"], ["optimizer=adamv: did you mean adam"]),
        (["experiment=tiny/text", "+trainer.anything=1", "--cfg", "job", "trainer.max_steps=["], []),
        (  # only what has to exist is blamed
            ["experiment=tiny/text", "trainr.max_steps=1", "++trainer.x=1", "hydra.run.dir=x", "hydra/output=none"],
            ["trainr.max_steps: did you mean trainer or train?"],
        ),
        (
            ["experiment=tiny/text", "trainer.strategy.find_unused_parameters=true"],
            [f"trainer.strategy.find_unused_parameters: there is {UNUSED} with strategy=ddp or strategy=zero1."],
        ),
        (
            ["experiment=tiny/text", "strategy.reshard_after_forward=false"],
            [
                f"strategy.reshard_after_forward: there is {RESHARD} with strategy=fsdp or strategy=fsdp-tp or "
                "strategy=long."
            ],
        ),
        (
            ["experiment=tiny/text", "strategy=fsdp", f"{UNUSED}=true", f"{RESHARD}=true"],
            [f"{UNUSED}: there is {UNUSED} with strategy=ddp or strategy=zero1."],
        ),
        (["strategy=ddp", "strategy.find_unused_parameters=1"], ["strategy.find_unused_parameters: there is trainer."]),
        (
            ["datamodule.max_length=8", "callbacks.ema.decay=0.9"],
            ["datamodule.max_length: there is datamodule.max_length with data", "callbacks.ema.decay: there is"],
        ),
        (["datamodule.max_lengt=8"], ["datamodule.max_lengt: did you mean datamodule.max_length"]),
        (["experiment=tiny/text", "optimizer.lr=1"], ["optimizer.lr: there is train.optimizer.lr."]),
        (["experiment=tiny/text", "trainer.max_steps.x=1"], ["trainer.max_steps.x: there is nothing of a similar"]),
    ],
)
def test_hints(arguments, expected):
    resolvers.register()
    found = hints(CONFIGS, arguments)
    assert len(found) == len(expected)
    for line, beginning in zip(found, expected):
        assert line.startswith(beginning)


def test_groups_that_are_null():
    """Only groups need an option, and a null in quotes is the name of one."""
    arguments = ["experiment=tiny/text", "model=null", "trainer.max_epochs=null", "logger='null'", "~task", "--help"]
    assert nulls(CONFIGS, arguments) == ["model must be the name of an option, found null; ~model leaves the group out"]
    (line,) = nulls(CONFIGS, ["callbacks=null"])  # which recipes override, so that it cannot be deleted
    assert line.endswith("; callbacks=none leaves the group out")
