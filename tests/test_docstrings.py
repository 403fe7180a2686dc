"""The examples in docstrings give what they say."""

import doctest
import importlib
import pathlib
import re

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[1]
FILES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.glob("flash_attn/**/*.py"))
    if re.search(r"^ +>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("file", FILES)
def test_examples(file):
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    assert not doctest.testmod(module, extraglobs={"torch": torch}).failed
