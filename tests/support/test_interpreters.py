"""A process for code: it has torch and nothing of the package, and what goes wrong in it is raised here."""

import interpreters
import pytest


def test_each_call_has_a_process_of_its_own():
    code = "import os, sys; assert 'flash_attn' not in sys.modules; print(os.getpid(), os.environ.get('FOR_ONE_CALL'))"
    first, second = interpreters.run(f"{code}\nimport flash_attn", FOR_ONE_CALL="1"), interpreters.run(code)
    (pid, given), (other, none) = first.stdout.split(), second.stdout.split()
    assert pid != other and (given, none) == ("1", "None")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise ValueError('wrong')", "ValueError: wrong"),
        ("import sys; sys.exit(3)", "exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "exit status -9"),
    ],
)
def test_failures_are_raised(code, says):
    with pytest.raises(AssertionError, match=says):
        interpreters.run(code)
