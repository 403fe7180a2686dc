"""When the tests marked slow run, and what they find in new memory."""

import pytest
import torch
from conftest import asks_for_slow


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
def test_slow_tests_run_if_they_are_asked_for(markexpr, expected):
    assert asks_for_slow(markexpr) == expected


def test_new_memory_holds_nan(device):
    assert torch.empty(100, device=device).isnan().all() and torch.zeros(5, device=device).new_empty(9).isnan().all()
