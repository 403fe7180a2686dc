"""What is said about names that do not exist."""

import pytest

from src.utils import resolvers
from src.utils.hints import hints, nulls
from training.tests.standins import CONFIGS


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
