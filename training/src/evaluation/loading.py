"""Opens a trained model and its tokenizer, from a training checkpoint or from a folder of `save_pretrained`.

    model, tokenizer = open_model("checkpoints/my-run/last.ckpt")

All that evaluates a model, writes with it or exports it begins here.
"""

import argparse
import pathlib

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from flash_attn.models.gpt import GPTLMHeadModel
from src.datamodules.tokenizer import encode_batch, load_tokenizer
from src.utils.checkpoint import Checkpoint, is_complete, latest, load_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FUSED = ("use_flash_attn", "fused_bias_fc", "fused_dropout_add_ln")  # what all families can have


def add_model_arguments(parser) -> None:
    """The arguments of commands that open a model: checkpoint, --tokenizer, --device, --dtype."""
    parser.add_argument(
        "checkpoint", type=existing, help="a training checkpoint, or a folder with config.json and model.safetensors"
    )
    parser.add_argument("--tokenizer", help="'byte', a folder, or a name on the hub (default: that of the checkpoint)")
    parser.add_argument("--device", help="such as cuda:1 (default: the GPU if there is one)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: bfloat16 on a GPU, else float32)")


def existing(path: str) -> str:
    """The path of a file or a folder, as a type for argparse, which reports a path that does not exist."""
    if not pathlib.Path(path).exists():
        raise argparse.ArgumentTypeError(f"must be a file or a folder, found nothing at {path}")
    return path


def open_model(checkpoint, tokenizer=None, device=None, dtype=None):
    """(model, tokenizer), the model in evaluation mode.

    Arguments:
        checkpoint: a training checkpoint; a folder of them, for the latest; or a folder of `save_pretrained`, or of
            transformers.
        tokenizer: "byte", or what AutoTokenizer takes; by default the one that the checkpoint names or brings.
        device: by default the GPU if there is one.
        dtype: of the weights and the computation, or its name; by default bfloat16 on a GPU and float32 elsewhere.

    For a run with EMACallback, the weights are the averaged ones, as in run=eval.

    Raises FileNotFoundError if there is nothing of that name, ValueError if no tokenizer is known, or no such device.
    """
    device = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = DTYPES.get(dtype, dtype) or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    path = pathlib.Path(checkpoint)
    if not path.exists():
        raise FileNotFoundError(f"checkpoint must be a file or a folder, found nothing at {path}")
    open_one = _open_folder if (path / "config.json").exists() else _open_training_checkpoint
    model, tokenizer = open_one(path, tokenizer, device, dtype)
    return model.eval(), tokenizer


def validation_tokens(checkpoint) -> np.ndarray:
    """The token ids (n,) of the validation data of the run that a training checkpoint belongs to."""
    _, _, config = _run_of(pathlib.Path(checkpoint))
    datamodule = instantiate(config.datamodule, _convert_="all")
    datamodule.setup()  # prepares the data if they are not
    return datamodule.dataset_val.tokens


def text_ids(tokenizer, text: str) -> list[int]:
    """The ids of a text, without special tokens."""
    return list(map(int, encode_batch(tokenizer, [text])[0]))


def longest_input(model: nn.Module) -> int | None:
    """How many tokens the model can read at once; None if nothing in it sets a limit."""
    if hasattr(model, "max_positions"):
        return model.max_positions
    return getattr(model.config, "n_positions", None)


def _device(name):
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # the latter where PyTorch is a build for the CPU
        found = str(error).partition("\n")[0]
        raise ValueError(f"device must be one that PyTorch can use here, found {name} ({found})") from error


def _open_folder(path, tokenizer, device, dtype):
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    config = GPTLMHeadModel.from_config(config, device="meta").config  # the meta device takes no memory
    for field in _FUSED:
        setattr(config, field, device.type == "cuda" and dtype != torch.float32)
    model = GPTLMHeadModel.from_pretrained(path, config, device=device, dtype=dtype)
    return model, load_tokenizer(path if tokenizer is None else tokenizer)


def _run_of(path):
    """(checkpoint, its state, the configuration of its run), of a training checkpoint or the latest in a folder."""
    found = path if is_complete(path) else latest(path)
    if found is None:
        raise FileNotFoundError(f"checkpoint must be one of training or have a config.json, found neither in {path}")
    state = Checkpoint(found, verify=False).state
    return found, state, OmegaConf.create(state["hyper_parameters"])


def _open_training_checkpoint(path, tokenizer, device, dtype):
    path, state, config = _run_of(path)
    model = instantiate(config.model, _convert_="all")
    averaged = state.get("state_dict_ema", {})
    averaged = {name.removeprefix("model."): x for name, x in averaged.items() if name.startswith("model.")}
    model.load_state_dict(averaged or load_checkpoint(path))
    model.to(device, dtype)
    return model, load_tokenizer(config.datamodule.tokenizer_name if tokenizer is None else tokenizer)
