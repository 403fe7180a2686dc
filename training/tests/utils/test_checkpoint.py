"""The folders of checkpoints: what is read is what was written, and there is always a complete one."""

import errno
import io
import logging
import math
import os
import pickle
import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import metadata
from transformers import GPT2Config

from flash_attn.models.gpt import GPTLMHeadModel, shard_state_dict_tp
from src.utils import checkpoint as checkpoints
from src.utils.plain_state import decode, encode

PLAIN = [
    None,
    True,
    3,
    2**70,
    -0.0,
    0.1,
    math.inf,
    "text",
    b"\x00\xff",
    [],
    {},
    (),
    (1, (2.5, "x")),
    [[1], {"a": (None,)}],
    {1: "a", (2, 3): [4], None: True},
    {"!tuple": [1]},
    {1.5, 2.5},
    torch.float16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    random.Random(3).getstate(),
]
TENSORS = [
    torch.tensor(3),
    torch.randn(2, 3),
    torch.randn(4, 4).t(),
    torch.zeros(0, 2),
    torch.tensor([math.nan, -0.0]),
    torch.randn(3).bfloat16(),
    torch.tensor([True, False]),
    torch.randint(2**62, (3,)),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_state_is_exact(value, tmp_path):
    checkpoints.save(tmp_path / "a.ckpt", {"value": value}, own=value)
    checkpoint = checkpoints.Checkpoint(tmp_path / "a.ckpt")
    for found in (checkpoint.state["value"], checkpoint.own[0]):
        assert found == value
        assert type(found) is (tuple if isinstance(value, torch.Size) else type(value))
        assert repr(found) == repr(tuple(value) if isinstance(value, torch.Size) else value)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda x: f"{tuple(x.shape)}{x.dtype}")
def test_tensors_are_exact(tensor, tmp_path):
    checkpoints.save(tmp_path / "a.ckpt", {"nested": [(tensor, {"a.b": tensor.clone()})]}, {"weight": tensor})
    checkpoint = checkpoints.Checkpoint(tmp_path / "a.ckpt")
    target = torch.empty_like(tensor)
    checkpoint.read_into({"weight": target})
    for found in (target, checkpoint.state["nested"][0][0], checkpoint.state["nested"][0][1]["a.b"]):
        torch.testing.assert_close(found, tensor, rtol=0, atol=0, equal_nan=True)
    array = decode(*encode({"x": tensor.float().numpy()}))["x"]
    np.testing.assert_array_equal(array, tensor.float().numpy())


def test_names_that_meet_are_kept_apart():
    state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    assert decode(*encode(state)) == state


@pytest.mark.parametrize(
    ("state", "place"),
    [({"a": [1, {"b": nn.Linear(1, 1)}]}, r"state\.a\.1\.b"), ({"f": print}, r"state\.f"), ({print: 1}, "the key")],
)
def test_what_is_not_plain_is_refused_before_writing(state, place, tmp_path):
    with pytest.raises(TypeError, match=f"{place}.* must be plain data"):
        checkpoints.save(tmp_path / "a.ckpt", state)
    assert not list(tmp_path.iterdir())


def test_own_must_not_have_tensors(tmp_path):
    with pytest.raises(TypeError, match=r"own must have no tensors, found own\.x"):
        checkpoints.save(tmp_path / "a.ckpt", {}, own={"x": torch.zeros(1)})


def _disk_full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["_write_state", "_save_tensors", "_publish", "tensors"])
def test_full_disk(where, tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    checkpoints.save(path, {"step": 1}, {"w": torch.ones(2)})
    if where == "tensors":
        monkeypatch.setattr(torch, "save", _disk_full)
        monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", _disk_full)
    elif where == "_save_tensors":
        monkeypatch.setattr(checkpoints, "_new_folder", _disk_full)
    else:
        monkeypatch.setattr(checkpoints, where, _disk_full)
    with pytest.raises(checkpoints.CheckpointError, match=r"last\.ckpt was not saved: .*[Nn]o space.*is unchanged"):
        checkpoints.save(path, {"step": 2}, {"w": torch.zeros(2)})
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
    assert checkpoints.Checkpoint(path).state == {"step": 1}


@pytest.mark.parametrize("call", range(1, 8))
def test_there_is_a_complete_checkpoint_at_every_moment(call, tmp_path, monkeypatch, caplog):
    """End the process, as it were, before each renaming and deletion of an exchange."""
    path, calls = tmp_path / "last.ckpt", 0
    checkpoints.save(path, {"step": 1}, {"w": torch.ones(2)})

    class Ended(BaseException):
        pass

    def counted(function):
        def call_or_end(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call:
                raise Ended
            return function(*args, **kwargs)

        return call_or_end

    for module, name in ((os, "rename"), (checkpoints, "_delete"), (checkpoints, "_write"), (checkpoints, "_sync")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    try:
        checkpoints.save(path, {"step": 2}, {"w": torch.zeros(2)})
    except (Ended, checkpoints.CheckpointError):
        pass
    monkeypatch.undo()
    found = checkpoints.latest(tmp_path)
    assert checkpoints.Checkpoint(found).state["step"] in (1, 2)
    checkpoints.save(path, {"step": 3}, {"w": torch.zeros(2)})
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
    assert checkpoints.Checkpoint(path).state["step"] == 3


def test_latest(tmp_path, caplog):
    assert checkpoints.latest(tmp_path / "nothing") is None
    for step, name in enumerate(("step_1.ckpt", "last.ckpt", ".pl_auto_save.ckpt", "step_2.ckpt")):
        checkpoints.save(tmp_path / name, {"step": step}, {"w": torch.ones(2)})
    assert checkpoints.latest(tmp_path).name == "step_2.ckpt"
    (tmp_path / "step_2.ckpt" / "manifest.json").unlink()
    (tmp_path / ".pl_auto_save.ckpt" / "state.json").write_text("{}")
    (tmp_path / "other.ckpt").write_text("")
    with caplog.at_level(logging.WARNING):
        assert checkpoints.latest(tmp_path).name == "last.ckpt"
    for expected in (
        "step_2.ckpt is ignored: manifest.json is missing, so writing it was interrupted",
        ".pl_auto_save.ckpt is ignored: state.json must have",
        "other.ckpt is ignored: it is a file",
    ):
        assert expected in caplog.text
    assert not checkpoints.is_complete(tmp_path / "step_2.ckpt")
    assert checkpoints.is_complete(tmp_path / "last.ckpt")


def test_damage_is_found(tmp_path):
    path = tmp_path / "a.ckpt"
    checkpoints.save(path, {"step": 1}, {"w": torch.ones(8)})
    file = next((path / "tensors").glob("*.distcp"))
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)
    with pytest.raises(checkpoints.CheckpointError, match=r"a\.ckpt is damaged: tensors/.*distcp"):
        checkpoints.Checkpoint(path)
    with pytest.raises(checkpoints.CheckpointError, match="not a complete checkpoint: there is no such folder"):
        checkpoints.Checkpoint(tmp_path / "b.ckpt")


def test_no_code_of_a_checkpoint_runs(tmp_path):
    path = tmp_path / "a.ckpt"
    checkpoints.save(path, {}, {"w": torch.ones(2)})
    (path / "tensors" / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(checkpoints.CheckpointError, match=r"builtins\.print"):
        checkpoints._Reader(path / "tensors").read_metadata()


class Reduced:
    def __init__(self, *attribute):
        self.attribute = attribute

    def __reduce__(self):
        return getattr, self.attribute


def test_members_of_enumerations_are_found_by_name():
    """As Python 3.11.0 to 3.11.3 pickles them."""

    def load(*attribute):
        return checkpoints._Unpickler(io.BytesIO(pickle.dumps(Reduced(*attribute)))).load()

    formats = metadata._MEM_FORMAT_ENCODING
    assert load(formats, "TORCH_PRESERVE_FORMAT") is formats.TORCH_PRESERVE_FORMAT
    with pytest.raises(checkpoints.CheckpointError, match=r"found __init__ of .*TensorProperties"):
        load(metadata.TensorProperties, "__init__")


def test_other_shapes_are_refused_before_anything_is_changed(tmp_path):
    checkpoints.save(tmp_path / "a.ckpt", {}, {"v": torch.ones(2), "w": torch.ones(2)})
    targets = {"v": torch.zeros(2), "w": torch.zeros(3), "x": torch.zeros(1)}
    with pytest.raises(
        checkpoints.CheckpointError, match=r"w has shape \(2,\) there, expected \(3,\); x has .* no tensor"
    ):
        checkpoints.Checkpoint(tmp_path / "a.ckpt").read_into(targets)
    assert not any(each.any() for each in targets.values())


def test_remove(tmp_path):
    for name in ("a.ckpt", "b.ckpt"):
        checkpoints.save(tmp_path / name, {})
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    assert checkpoints.is_complete(tmp_path / "last.ckpt")
    checkpoints.remove(tmp_path / "last.ckpt")
    checkpoints.remove(tmp_path / "b.ckpt")
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]


# Weights alone


WEIGHTS = {"layers.0.weight": torch.randn(2, 3), "head.bias": torch.randn(2)}
LIGHTNING = {f"model.{name}": x for name, x in WEIGHTS.items()}


def _ours(folder):
    tensors = {f"state_dict.{name}": x for name, x in (LIGHTNING | {"metric.count": torch.tensor(1)}).items()}
    checkpoints.save(folder / "last.ckpt", {"step": 1}, tensors)
    return folder / "last.ckpt"


def _saved(value, name="weights.pt"):
    def write(folder):
        torch.save(value, folder / name)
        return folder / name

    return write


def _deepspeed(folder):
    (folder / "global_step7").mkdir()
    (folder / "latest").write_text("global_step7\n")
    module = {f"module.model.{name}": x for name, x in WEIGHTS.items()}
    torch.save({"module": module}, folder / "global_step7" / "mp_rank_00_model_states.pt")
    return folder


def _safetensors(folder):
    save_file = pytest.importorskip("safetensors.torch").save_file
    for i, (name, x) in enumerate(WEIGHTS.items()):
        save_file({name: x}, folder / f"model-{i}.safetensors")
    return folder


@pytest.mark.parametrize(
    "write",
    [
        _ours,
        lambda folder: _ours(folder).parent,
        _deepspeed,
        _safetensors,
        _saved(WEIGHTS),
        _saved({"model": WEIGHTS}),
        _saved({"state_dict_ema": WEIGHTS}),
        _saved({"epoch": 1, "state_dict": LIGHTNING}, "last.ckpt"),
        lambda folder: _saved({"state_dict": LIGHTNING}, "last.ckpt")(folder).parent,
    ],
    ids=["ours", "folder of ours", "deepspeed", "safetensors", "plain", "model", "ema", "lightning", "its folder"],
)
def test_load_checkpoint(write, tmp_path):
    found = checkpoints.load_checkpoint(write(tmp_path))
    torch.testing.assert_close(found, WEIGHTS, rtol=0, atol=0)


def test_load_checkpoint_names_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="found nothing at"):
        checkpoints.load_checkpoint(tmp_path / "nothing")
    with pytest.raises(checkpoints.CheckpointError, match="found none that is complete"):
        checkpoints.load_checkpoint(tmp_path)


def test_a_pickled_object_is_not_loaded(tmp_path):
    torch.save({"state_dict": LIGHTNING, "hyper": nn.Linear(1, 1)}, tmp_path / "a.ckpt")
    with pytest.raises(checkpoints.CheckpointError, match="UnpicklingError: Weights only"):
        checkpoints.load_checkpoint(tmp_path / "a.ckpt")


def test_remove_model_prefix():
    state = {"epoch": 3, "state_dict": {"model.a": 1, "model.model.b": 2, "c": 3}}
    assert checkpoints.remove_model_prefix(state) is state
    assert state == {"epoch": 3, "state_dict": {"a": 1, "model.b": 2, "c": 3}}


@pytest.mark.parametrize("lead", [(), (1,)])
def test_interpolate_pos_embedding(lead):
    table = torch.arange(8.0).view(*lead, 4, 2)
    state = {"model.pos_encoder.pe": table, "model.a.inner_attn.layout": torch.ones(1), "model.w": torch.ones(2)}
    tiled = checkpoints.interpolate_pos_embedding(state, 8)
    assert set(tiled) == {"pos_encoder.pe", "w"}
    torch.testing.assert_close(tiled["pos_encoder.pe"], table.repeat(*(1 for _ in lead), 2, 1))
    square = checkpoints.interpolate_pos_embedding(state, 16, interleave=True)["pos_encoder.pe"].view(4, 4, 2)
    for row in range(4):
        for column in range(4):
            assert square[row, column].tolist() == table.view(2, 2, 2)[row // 2, column // 2].tolist()
    with pytest.raises(ValueError, match="multiple of the 4 positions of the table, found 6"):
        checkpoints.interpolate_pos_embedding(state, 6)
    with pytest.raises(ValueError, match="must be squares"):
        checkpoints.interpolate_pos_embedding(state, 8, interleave=True)


def test_uneven_parts_of_layers_are_put_together(tmp_path):
    """Three heads of two processes, whose parts are in any order in the checkpoint."""
    special = dict(bos_token_id=None, eos_token_id=None)
    config = GPT2Config(n_embd=24, n_layer=1, n_head=3, n_positions=8, vocab_size=32, **special)
    whole = GPTLMHeadModel(config).state_dict()
    tensors = {}
    for rank in (1, 0):
        for name, x in shard_state_dict_tp(dict(whole), config, 2, rank).items():
            place = f"model.{name}@tp{rank}"
            tensors |= {f"state_dict.{place}": x.clone(), f"optimizer_states.0.exp_avg.{place}": 2 * x}
            tensors[f"optimizer_states.0.step.{place}"] = torch.tensor(3.0)
    engine = {"tensor_parallel_size": 2, "models": {"model": config.to_dict()}}
    checkpoints.save(tmp_path / "a.ckpt", {"engine": engine}, tensors)
    torch.testing.assert_close(checkpoints.load_checkpoint(tmp_path / "a.ckpt"), dict(whole), rtol=0, atol=0)
    redivided = checkpoints.Redivided(checkpoints.Checkpoint(tmp_path / "a.ckpt"))
    found = redivided.read(redivided.entries)
    for name, x in whole.items():
        torch.testing.assert_close(found[f"optimizer_states.0.exp_avg.model.{name}"], 2 * x, rtol=0, atol=0)
        assert found[f"optimizer_states.0.step.model.{name}"] == 3
    checkpoints.save(tmp_path / "b.ckpt", {"engine": {"tensor_parallel_size": 2}}, tensors)
    with pytest.raises(
        checkpoints.CheckpointError, match="parts of a tensor parallel model, but does not say how it was divided"
    ):
        checkpoints.load_checkpoint(tmp_path / "b.ckpt")


@pytest.mark.parametrize("name", ["last.ckpt", "model.safetensors"])
@pytest.mark.parametrize(
    "contents", [b"", b"a text and no checkpoint", b"PK\x03\x04 cut off"], ids=["empty", "text", "cut"]
)
def test_files_that_are_no_checkpoints(name, contents, tmp_path):
    file = tmp_path / name
    file.write_bytes(contents)
    with pytest.raises(checkpoints.CheckpointError, match=f"{re.escape(str(file))} must be a checkpoint, found a file"):
        checkpoints.load_checkpoint(file)


def test_a_list_is_no_checkpoint(tmp_path):
    torch.save([torch.zeros(2)], tmp_path / "last.ckpt")
    with pytest.raises(
        checkpoints.CheckpointError, match=r"last\.ckpt must be a checkpoint, found a list in place of a dict"
    ):
        checkpoints.load_checkpoint(tmp_path / "last.ckpt")
