"""Checkpoints: every kind of file, shards, dtypes, the hub's cache, what is missing."""

import json
import pickle
import sys

import pytest
import torch

from flash_attn.utils.pretrained import load_file, state_dict_from_pretrained

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.full((4,), 0.1, dtype=torch.float16)}
KINDS = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"]


def write(folder, kind, tensors=TENSORS):
    """A checkpoint of this kind; a divided one has a shard for each tensor."""
    name = kind.removesuffix(".index.json")
    save = torch.save
    if name.endswith(".safetensors"):
        save = pytest.importorskip("safetensors.torch").save_file
    if not kind.endswith(".json"):
        return save(tensors, folder / name)
    shards = {key: f"{key}-of-{name}" for key in tensors}
    for key, shard in shards.items():
        save({key: tensors[key]}, folder / shard)
    (folder / kind).write_text(json.dumps({"weight_map": shards}))


def assert_same(found, expected=TENSORS):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].cpu(), tensor)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of", [str, lambda path: path], ids=["str", "Path"])
def test_folder(of, kind, tmp_path, device):
    write(tmp_path, kind)
    assert_same(state_dict_from_pretrained(of(tmp_path)))
    for dtype in (torch.float32, torch.bfloat16):
        found = state_dict_from_pretrained(of(tmp_path), device=device, dtype=dtype)
        assert_same(found, {name: tensor.to(dtype) for name, tensor in TENSORS.items()})
        assert {tensor.device.type for tensor in found.values()} == {device.type}


def test_what_is_no_float_is_not_cast(tmp_path):
    positions = torch.arange(300)
    torch.save({"positions": positions, "weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    found = state_dict_from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same(found, {"positions": positions, "weight": torch.ones(2, dtype=torch.bfloat16)})


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_number_of_a_device(kind, tmp_path):
    write(tmp_path, kind)
    assert state_dict_from_pretrained(tmp_path, device=0)["a"].device == torch.device("cuda", 0)


def test_safetensors_come_first(tmp_path):
    other = {"a": torch.zeros(1)}
    for kind in reversed(KINDS):
        write(tmp_path, kind, TENSORS if kind == KINDS[0] else other)
    assert_same(state_dict_from_pretrained(tmp_path))


def test_hub(tmp_path, monkeypatch):
    """The files are in the cache, and there is no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    repository, commit = tmp_path / "models--owner--name", "0123456789abcdef0123456789abcdef01234567"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for kind in ("pytorch_model.bin.index.json", "model.safetensors"):
        write(folder, kind)
        assert_same(state_dict_from_pretrained("owner/name"))
    with pytest.raises(OSError, match="Model name owner/other was not found: the hub cannot be reached"):
        state_dict_from_pretrained("owner/other")
    assert_same(state_dict_from_pretrained("owner/name", revision="main", local_files_only=True))
    with pytest.raises(TypeError, match="must be revision, token, cache_dir, local_files_only, found 'subfolder'"):
        state_dict_from_pretrained("owner/name", subfolder="a")


def test_missing(tmp_path):
    with pytest.raises(OSError, match=r"Model name .* was not found: none of model.safetensors"):
        state_dict_from_pretrained(tmp_path)
    write(tmp_path, "pytorch_model.bin.index.json")
    (tmp_path / "b-of-pytorch_model.bin").unlink()
    with pytest.raises(OSError, match=r"b-of-pytorch_model.bin must be in .*, found no such file"):
        state_dict_from_pretrained(tmp_path)


def test_a_file_that_is_none_of_safetensors(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match=r"model.safetensors must be a safetensors file, found: .*header"):
        state_dict_from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model.safetensors must be a safetensors file, found: .*header"):
        load_file(tmp_path / "model.safetensors", device="meta")


def test_a_file_that_torch_did_not_write(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"pytorch_model.bin must be a file of torch.save, found: .*central directory"):
        state_dict_from_pretrained(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model.bin must be a file of torch.save, found: "):
        state_dict_from_pretrained(tmp_path)


def test_no_folder_and_no_hub(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"model_name must be a local folder, found '.*absent': .* huggingface_hub"
    ):
        state_dict_from_pretrained(tmp_path / "absent")


class Harmful:
    def __reduce__(self):
        return print, ("loaded",)


def test_nothing_but_weights_is_loaded(tmp_path, capsys):
    torch.save({"a": Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError):
        state_dict_from_pretrained(tmp_path)
    assert not capsys.readouterr().out
