"""Which errors are a message alone."""

import errno

import pytest

from src.utils.checkpoint import CheckpointError
from src.utils.errors import message_alone, run_command


def raised(error, name="function"):
    """An error from within a function of this name."""
    names = {"error": error}
    exec(f"def {name}():\n    raise error", names)
    try:
        names[name]()
    except Exception as found:
        return found


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (raised(ValueError("wrong")), "wrong"),
        (raised(ValueError("wrong"), "advance"), None),  # in a batch: it may be of any code
        (raised(KeyError("wrong")), None),
        (raised(CheckpointError("does not fit"), "advance"), "does not fit"),
        (raised(NO_SPACE, "advance"), f"no space is left on the disk: {NO_SPACE}"),
        (raised(OSError("gone"), "advance"), None),
    ],
)
def test_message(error, message):
    assert message_alone(error) == message


def test_a_command():
    def fails(error):
        raise error

    with pytest.raises(SystemExit) as stopped:
        run_command(lambda: fails(ValueError("the value must be another")))
    assert stopped.value.code == "error: the value must be another"  # which Python prints, and ends with status 1
    with pytest.raises(KeyError):
        run_command(lambda: fails(KeyError("a mistake")))
    run_command(print)
