"""The functions that configurations call."""

import types

import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from src.utils import resolvers


@pytest.fixture(autouse=True)
def registered():
    resolvers.register()
    resolvers.gpu_mem.cache_clear()
    yield
    resolvers.gpu_mem.cache_clear()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("${mul:2,3}", 6),
        ("${mul:0.1,6e-4}", pytest.approx(6e-5)),
        ("${div_up:512,96}", 6),
        ("${div_up:512,64}", 8),
        ("${batch_for_memory:23,1,2,4,8}", 1),
        ("${batch_for_memory:24,1,2,4,8}", 2),
        ("${batch_for_memory:41,1,2,4,8}", 4),
        ("${batch_for_memory:80,1,2,4,8}", 8),
        ("${batch_for_memory:144,1,2,4,8}", 8),
        ("${device_count:4}", 4),
        ("${device_count:[0,2,5]}", 3),
        ("${device_count:'0,2'}", 2),
        ("${device_count:'3'}", 3),
        ("${device_count:auto,cpu}", 1),
        ("${device_count:-1,cpu}", 1),
        ("${device_count:null,cpu}", 1),
        ("${more_than_one:1}", False),
        ("${more_than_one:2}", True),
        ("${run_folder:/a,b,c}", "/a/b"),
        ("${run_folder:/a,null,c}", "c"),
    ],
)
def test_values(text, expected):
    found = OmegaConf.create({"x": text}).x
    assert found == expected and type(found) is type(getattr(expected, "expected", expected))


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (2, 2),
        ("2", 2),
        ([3], [3]),
        ((0, 1), [0, 1]),
        ("0,1", [0, 1]),
        ("3,", [3]),
        (-1, "auto"),
        ("-1", "auto"),
        (None, "auto"),
        ("auto", "auto"),
    ],
)
def test_devices(devices, expected):
    assert resolvers.parsed_devices(devices) == expected


@pytest.mark.parametrize("devices", ["two", "", "0,x", 0, -2, 2.0, True, [], ["a"], [0.5], [-1], [0, 0]])
def test_what_devices_are_not(devices):
    with pytest.raises(ValueError, match=r"trainer\.devices must be an integer of at least 1") as error:
        resolvers.parsed_devices(devices)
    assert str(error.value).endswith(f"found {devices!r}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("${div_up:8,0}", r"div_up\(8, 0\): the divisor must be at least 1"),
        ("${batch_for_memory:8,1,2}", "batch_for_memory takes the memory and 4 batches"),
    ],
)
def test_errors(text, says):
    with pytest.raises(InterpolationResolutionError, match=says):
        OmegaConf.create({"x": text}).x  # noqa: B018


@pytest.mark.parametrize(("mebibytes", "expected"), [(24564, 25), (40960, 41), (81920, 82), (81050, 81), (143771, 144)])
def test_memory_of_a_gpu(mebibytes, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = types.SimpleNamespace(total_memory=mebibytes * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert OmegaConf.create({"x": "${gpu_mem:}"}).x == expected


def test_memory_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert OmegaConf.create({"x": "${gpu_mem:}"}).x == 80


def test_the_data_module_comes_later():
    """Until there is one, the text stays as it is, also through a copy with everything else resolved."""
    config = OmegaConf.create({"x": "${datamodule:vocab_size}", "y": "${mul:2,2}"})
    config = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    assert OmegaConf.to_container(config) == {"x": "${datamodule:vocab_size}", "y": 4}
    resolvers.attach_datamodule(types.SimpleNamespace(vocab_size=257))
    assert config.x == 257
