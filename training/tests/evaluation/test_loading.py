"""Models are opened from checkpoints of training."""

import pytest
import torch

from flash_attn.models.gpt import GPTLMHeadModel
from src.datamodules.tokenizer import ByteTokenizer
from src.evaluation.loading import longest_input, open_model, text_ids
from src.utils import checkpoint as checkpoints

CONFIG = {"_target_": "transformers.GPT2Config", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
CONFIG |= {"vocab_size": 257, "pad_vocab_size_multiple": 8}
RUN = {
    "model": {"_target_": "flash_attn.models.gpt.GPTLMHeadModel", "_recursive_": True, "config": CONFIG},
    "datamodule": {"tokenizer_name": "byte"},
}


@pytest.fixture(scope="module")
def model():
    import transformers

    torch.manual_seed(0)
    fields = {name: value for name, value in CONFIG.items() if name != "_target_"}
    return GPTLMHeadModel(transformers.GPT2Config(**fields)).eval()


def save(model, path, **state):
    """A checkpoint with what a run saves, as far as it matters here."""
    tensors = {f"{checkpoints.WEIGHTS}model.{name}": x for name, x in model.state_dict().items()}
    checkpoints.save(path, {"hyper_parameters": RUN} | state, tensors)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(10)[None]).logits


def test_a_training_checkpoint(model, tmp_path):
    save(model, tmp_path / "run" / "last.ckpt")
    for path in (tmp_path / "run" / "last.ckpt", tmp_path / "run"):
        found, tokenizer = open_model(path, device="cpu")
        assert torch.equal(logits(found), logits(model)) and not found.training
        assert isinstance(tokenizer, ByteTokenizer) and longest_input(found) == 16
    assert open_model(path, dtype="bfloat16", device="cpu")[0].lm_head.weight.dtype == torch.bfloat16


def test_averaged_weights(model, tmp_path):
    averaged = {f"model.{name}": 0.5 * x for name, x in model.state_dict().items()}
    averaged["train_metrics.count"] = torch.ones(1)
    save(model, tmp_path / "last.ckpt", state_dict_ema=averaged)
    found, _ = open_model(tmp_path, device="cpu")
    for name, x in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], 0.5 * x), name


def test_the_latest_of_a_run(model, tmp_path):
    save(model, tmp_path / "step_1.ckpt")
    with torch.no_grad():
        model.transformer.ln_f.bias += 1
    save(model, tmp_path / "step_2.ckpt")
    assert torch.equal(logits(open_model(tmp_path, device="cpu")[0]), logits(model))


def test_neither_a_checkpoint_nor_a_folder_of_one(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must be one of training or have a config\.json, found neither"):
        open_model(tmp_path)


def test_text_ids():
    assert text_ids(ByteTokenizer(), "a\u00e9") == [97, 195, 169]


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_devices_that_are_not_there(device, tmp_path):
    with pytest.raises(ValueError, match=f"device must be one that PyTorch can use here, found {device}"):
        open_model(tmp_path, device=device)
