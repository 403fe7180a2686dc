"""Text in place of numbers, by the annotations and defaults of what a configuration names."""

import pytest

from src.utils.numeric import check_numbers


class Takes:
    """Parameters of every kind."""

    def __init__(
        self, params, plain=1.0, flag=True, text="x", either: "int | str" = 1, several: "list[float]" = (), **_
    ):
        pass


TAKES = f"{__name__}.Takes"
ZERO = {"optimizer_class": {"path": "torch.optim.AdamW"}}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(_target_="torch.optim.SGD", momentum="much"), "key.momentum must be a number, found 'much'"),
        (
            dict(_target_="torch.optim.lr_scheduler.StepLR", step_size="3"),
            "key.step_size must be an integer, found '3'",
        ),
        (dict(_target_="torch.optim.lr_scheduler.MultiStepLR", milestones=[1, "x"]), "key.milestones must be numbers"),
        (dict(_target_="torch.distributed.optim.ZeroRedundancyOptimizer", **ZERO, lr="x"), "key.lr must be a number"),
        (dict(_target_=TAKES, plain="x"), "key.plain must be a number, found 'x'"),
        (dict(_target_=TAKES, several=["x"]), r"key.several must be numbers, found \['x'\]"),
        (dict(_target_=TAKES, flag="x", text="x", either="x", other="x", plain="${mul:1,2}", several=[1.0]), None),
        (dict(_target_="torch.optim.SGD", lr=1e-3, nesterov=True), None),
        (dict(_target_="not_there.X", lr="x"), None),  # which the one who needs it tells
        (dict(lr="x"), None),
    ],
)
def test_check_numbers(options, says):
    if says is None:
        return check_numbers(options, "key")
    with pytest.raises(ValueError, match=says):
        check_numbers(options, "key")
