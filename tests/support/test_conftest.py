"""When the tests marked slow run, and what they find in new memory."""

import pathlib

import pytest
import torch


@pytest.fixture
def conftest(request):
    """The conftest.py of all tests: there may be others, and only one can be imported by that name."""
    return request.config.pluginmanager.get_plugin(str(pathlib.Path(__file__).parents[2] / "conftest.py"))


@pytest.mark.parametrize(
    ("markexpr", "expected"),
    [
        ("", False),
        ("slow", True),
        ("slow and not cuda", True),
        ("not cuda and slow", True),
        ("(slow or sm90)", True),
        ("not slow", False),
        ("cuda and not slow", False),
        ("not slow or cuda", False),
        ("slower", False),
    ],
)
def test_slow_tests_run_if_they_are_asked_for(markexpr, expected, conftest):
    assert conftest.asks_for_slow(markexpr) == expected


def test_new_memory_holds_nan(device):
    assert torch.empty(100, device=device).isnan().all() and torch.zeros(5, device=device).new_empty(9).isnan().all()
