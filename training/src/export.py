"""Writes a trained model as a folder that transformers loads, with its tokenizer.

    python -m src.export CHECKPOINT FOLDER
    transformers.AutoModelForCausalLM.from_pretrained(FOLDER), transformers.AutoTokenizer.from_pretrained(FOLDER)

The format is that of GPT-2, unless the model was made from a checkpoint of another family. A model that transformers'
GPT-2 cannot express, such as one with rotary embeddings, is refused; the error names the field that differs.
"""

import argparse
import pathlib

import torch
from lightning.pytorch.utilities.model_summary import get_human_readable_count

from src.datamodules.tokenizer import ByteTokenizer
from src.evaluation.loading import add_model_arguments, open_model
from src.utils.errors import run_command


def export(model, tokenizer, folder) -> None:
    """Write `folder`: config.json, the weights in safetensors, and the files of the tokenizer.

    model, tokenizer: as `open_model` returns them. Raises ValueError for a model that the format cannot hold.
    """
    model.config.bos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    (byte_tokenizer() if isinstance(tokenizer, ByteTokenizer) else tokenizer).save_pretrained(folder)


def byte_tokenizer():
    """`ByteTokenizer` as a tokenizer of transformers: GPT-2's with no merges, so that a token is a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def parser():
    command = argparse.ArgumentParser(
        prog="python -m src.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(command)
    command.add_argument("folder", type=pathlib.Path, help="what to write")
    return command


def main(argv=None):
    args = parser().parse_args(argv)
    model, tokenizer = open_model(args.checkpoint, args.tokenizer, args.device or "cpu", args.dtype or torch.float32)
    export(model, tokenizer, args.folder)
    count = get_human_readable_count(sum(p.numel() for p in model.parameters())).strip()
    print(f"{count} parameters: {args.folder}")


if __name__ == "__main__":
    run_command(main)
