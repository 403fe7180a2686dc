"""Writes text with a trained model, printed while it is written.

    python -m src.generate CHECKPOINT --prompt "import os"
    python -m src.generate CHECKPOINT --prompt "def " --temperature 0.7 --top-k 40 --max-new-tokens 500
    python -m src.generate CHECKPOINT --prompt "def " --greedy

CHECKPOINT is a training checkpoint, the folder of a run, or a folder of `save_pretrained`.
"""

import argparse

import torch
from torch import nn

from flash_attn.utils.generation import GenerationMixin
from src.evaluation.loading import add_model_arguments, longest_input, open_model, text_ids
from src.utils.errors import run_command


def generate(
    model: nn.Module,
    tokenizer,
    prompt: str = "",
    max_new_tokens: int = 200,
    greedy: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stream: bool = False,
) -> str:
    """The text that the model writes after `prompt`, without it.

    Arguments:
        model, tokenizer: as `open_model` returns them.
        prompt: may be empty; the model then begins a new document.
        max_new_tokens: the most tokens to write. The text ends earlier at an end-of-text token, or where the model has
            no more positions.
        greedy: take the likeliest token each time, and ignore the next three arguments.
        temperature, top_k, top_p: as in `flash_attn.utils.generation.sampling.sample`; 0 means all tokens.
        repetition_penalty: above 1, makes tokens less likely that have occurred before.
        seed: makes the result repeatable.
        stream: print the prompt and the text, word by word.

    Raises ValueError if max_new_tokens is less than 1, or the prompt leaves no room for a token.
    """
    from transformers import TextStreamer

    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, found {max_new_tokens}")
    if seed is not None:
        torch.manual_seed(seed)
    ids = text_ids(tokenizer, prompt) or [tokenizer.eos_token_id]
    limit = longest_input(model)
    max_length = len(ids) + max_new_tokens if limit is None else min(len(ids) + max_new_tokens, limit)
    if max_length <= len(ids):
        raise ValueError(f"prompt must have less than {limit} tokens, the model's positions, found {len(ids)}")
    device = next(model.parameters()).device
    options = dict(
        max_length=max_length,
        eos_token_id=tokenizer.eos_token_id,
        repetition_penalty=repetition_penalty,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True) if stream else None,
    )
    sampling = dict(top_k=top_k, top_p=top_p, temperature=temperature)
    if isinstance(model, GenerationMixin):  # which leaves out ids that the tokenizer lacks
        options |= dict(vocab_size=len(tokenizer), cg=device.type == "cuda", **(dict(top_k=1) if greedy else sampling))
    else:  # a model of transformers
        lacking = list(range(len(tokenizer), model.config.vocab_size))
        options |= dict(do_sample=not greedy, suppress_tokens=lacking, pad_token_id=tokenizer.eos_token_id)
        options |= {} if greedy else sampling | dict(top_p=top_p or 1.0)
    sequences = model.generate(torch.tensor([ids], device=device), **options)
    return tokenizer.decode(sequences[0, len(ids) :].tolist(), skip_special_tokens=True)


def parser():
    command = argparse.ArgumentParser(
        prog="python -m src.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(command)
    command.add_argument("--prompt", default="", help="what the text begins with (default: nothing)")
    command.add_argument("--max-new-tokens", type=int, default=200, help="(default %(default)s)")
    command.add_argument("--greedy", action="store_true", help="take the likeliest token each time")
    command.add_argument("--temperature", type=float, default=1.0, help="lower is less random (default %(default)s)")
    command.add_argument("--top-k", type=int, default=0, help="draw from this many likeliest tokens (default: all)")
    command.add_argument("--top-p", type=float, default=0.0, help="likeliest tokens of this probability (default: all)")
    command.add_argument("--repetition-penalty", type=float, default=1.0, help="(default %(default)s, none)")
    command.add_argument("--seed", type=int, help="the same seed, the same text")
    return command


def main(argv=None):
    options = vars(parser().parse_args(argv))
    model, tokenizer = open_model(*(options.pop(name) for name in ("checkpoint", "tokenizer", "device", "dtype")))
    generate(model, tokenizer, **options, stream=True)


if __name__ == "__main__":
    run_command(main)
