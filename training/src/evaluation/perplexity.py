"""Perplexity of a language model on held-out tokens, with windows that may overlap.

    python -m src.evaluation.perplexity CHECKPOINT --data heldout.txt --stride 512
    python -m src.evaluation.perplexity CHECKPOINT              # on the validation data of its run

The tokens are cut into windows of max_length, each `stride` after the one before. Every token but the first is
predicted once: by the first window that reaches it. With stride = max_length (the default) this is the loss that
validation reports, where the first tokens of a window have little context. With a smaller stride every token, but
those of the first window, has at least max_length - stride tokens before it, and the work grows by max_length / stride.
"""

import argparse
import dataclasses
import json
import math
import pathlib

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from flash_attn.losses.cross_entropy import CrossEntropyLoss
from src.datamodules.corpus import decode
from src.datamodules.tokenizer import ByteTokenizer, encode_batch
from src.evaluation.loading import add_model_arguments, existing, longest_input, open_model, validation_tokens
from src.utils.errors import run_command

IGNORED = -100  # the label of tokens that do not count


@dataclasses.dataclass(frozen=True)
class Score:
    """What `perplexity` returns.

    nll: the sum of -log(probability) over the predicted tokens, in nats.
    tokens: how many were predicted.
    num_bytes: how many bytes of text these tokens are; None if that is not known.
    """

    nll: float
    tokens: int
    num_bytes: int | None = None

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss): among how many tokens, equally likely, the model would have had to choose."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers, and with compression; None without num_bytes."""
        return self.nll / math.log(2) / self.num_bytes if self.num_bytes else None

    def as_dict(self) -> dict[str, float | int | None]:
        return dict(
            loss=self.loss,
            perplexity=self.perplexity,
            bits_per_byte=self.bits_per_byte,
            tokens=self.tokens,
            num_bytes=self.num_bytes,
        )


class Windows(Dataset):
    """Windows (inputs, targets) of tokens, each (max_length,) int64; targets that do not count are IGNORED.

    A target is the token after its input. The last window is padded on its right, which no token before sees.
    """

    def __init__(self, tokens: np.ndarray, max_length: int, stride: int) -> None:
        if tokens.ndim != 1 or len(tokens) < 2:
            raise ValueError(f"tokens must be one row of at least 2, found shape {tuple(tokens.shape)}")
        if max_length < 1:
            raise ValueError(f"max_length must be positive, found {max_length}")
        if not 1 <= stride <= max_length:
            raise ValueError(f"stride must be from 1 to max_length, {max_length}, found {stride}")
        self.tokens, self.max_length, self.stride = tokens, max_length, stride

    def __len__(self) -> int:
        beyond_first = len(self.tokens) - 1 - self.max_length
        return 1 + max(0, math.ceil(beyond_first / self.stride))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = index * self.stride
        window = torch.from_numpy(self.tokens[begin : begin + self.max_length + 1].astype(np.int64))
        inputs, targets = torch.zeros(self.max_length, dtype=torch.int64), torch.full((self.max_length,), IGNORED)
        inputs[: len(window) - 1] = window[:-1]
        seen = self.max_length - self.stride if index > 0 else 0  # targets that the window before has predicted
        targets[seen : len(window) - 1] = window[seen + 1 :]
        return inputs, targets


@torch.no_grad()
def perplexity(
    model: nn.Module,
    tokens: np.ndarray,
    max_length: int,
    stride: int | None = None,
    batch_size: int = 8,
    num_bytes: int | None = None,
    progress: bool = True,
) -> Score:
    """Score `tokens` with a model whose call gives `.logits`, as `GPTLMHeadModel` and transformers' models do.

    Arguments:
        model: on the device and in the dtype in which it is to run. Its mode is left as it was found.
        tokens: (n,) of any integer dtype, at least 2; may be a memory map. The first one is only context.
        max_length: how many tokens the model reads at a time, at most as many as it has positions for.
        stride: how many tokens further the next window begins; max_length if None.
        batch_size: windows at a time. It changes the result by rounding only.
        num_bytes: how many bytes of text tokens[1:] are; goes into the result.
        progress: show a bar.

    Probabilities are over the vocabulary without its padding. Logits stay in the model's dtype; only the loss of each
    token is float32, and their sum float64.

    Raises ValueError for tokens, a max_length or a stride that do not fit.

    >>> score = perplexity(model, np.load("validation.npy", mmap_mode="r"), 1024, stride=512)   # doctest: +SKIP
    >>> score.perplexity, score.bits_per_byte                                                   # doctest: +SKIP
    """
    limit = longest_input(model)
    if limit is not None and max_length > limit:
        raise ValueError(f"max_length must be at most {limit}, the model's positions, found {max_length}")
    max_length = min(max_length, max(len(tokens) - 1, 1))
    windows = Windows(tokens, max_length, max_length if stride is None else min(stride, max_length))
    device = next(model.parameters()).device
    was_training, total = model.training, 0.0
    model.eval()
    try:
        loader = DataLoader(windows, batch_size, pin_memory=device.type == "cuda")
        for inputs, targets in tqdm(loader, desc="perplexity", unit="batch", disable=not progress):
            logits = real_logits(model, inputs.to(device, non_blocking=True))
            total += token_losses(logits, targets.to(device, non_blocking=True)).double().sum().item()
    finally:
        model.train(was_training)
    return Score(total, len(tokens) - 1, num_bytes)


def real_logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's logits after each of inputs (batch, seqlen), without the padding of its vocabulary."""
    return model(inputs).logits[..., : model.config.vocab_size]


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """-log(probability) of each target by its logits, (batch, seqlen) float32; 0 for targets that are IGNORED.

    logits: (batch, seqlen, vocabulary), read in their own dtype; targets: (batch, seqlen) int64.
    """
    losses = CrossEntropyLoss(ignore_index=IGNORED, reduction="none")(logits.flatten(0, 1), targets.flatten())
    return losses.view_as(targets)


def read_tokens(path, tokenizer) -> np.ndarray:
    """The token ids (n,) of a file.

    .npy is an array of ids. Any other file is text, to be tokenised as one document: the end-of-text token comes before
    it, so that its first token is predicted like the others. Raises ValueError for a file that is empty or no text.
    """
    path = pathlib.Path(path)
    if path.suffix == ".npy":
        return np.load(path, mmap_mode="r")
    (ids,) = encode_batch(tokenizer, [decode(path.read_bytes(), path, 0)])
    if not len(ids):
        raise ValueError(f"the data must have text, found none in {path}")
    return np.concatenate([[tokenizer.eos_token_id], ids])


def count_bytes(path, tokens, tokenizer) -> int | None:
    """How many bytes of text tokens[1:] are, if the tokens are bytes or a text file is known; else None."""
    if isinstance(tokenizer, ByteTokenizer):
        return int((tokens[1:] < 256).sum())
    return None if path is None or pathlib.Path(path).suffix == ".npy" else pathlib.Path(path).stat().st_size


def parser():
    command = argparse.ArgumentParser(
        prog="python -m src.evaluation.perplexity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_arguments(command)
    command.add_argument(
        "--data",
        type=existing,
        help="a .npy file of token ids, or a text file (default: the validation data of the checkpoint's run)",
    )
    command.add_argument("--max-length", type=int, help="tokens of a window (default: the model's positions)")
    command.add_argument("--stride", type=int, help="tokens from one window to the next (default: max-length)")
    command.add_argument("--batch-size", type=int, default=8, help="windows at a time (default %(default)s)")
    command.add_argument(
        "--bytes", type=int, help="how many bytes of text the tokens are, for the bits per byte, if it cannot be known"
    )
    command.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    return command


def main(argv=None):
    args = parser().parse_args(argv)

    model, tokenizer = open_model(args.checkpoint, args.tokenizer, args.device, args.dtype)
    tokens = read_tokens(args.data, tokenizer) if args.data else validation_tokens(args.checkpoint)
    num_bytes = args.bytes or count_bytes(args.data, tokens, tokenizer)
    max_length = (longest_input(model) or 2048) if args.max_length is None else args.max_length
    score = perplexity(model, tokens, max_length, args.stride, args.batch_size, num_bytes)
    if args.json:
        print(json.dumps(score.as_dict()))
        return score
    print(f"tokens         {score.tokens}")
    print(f"loss           {score.loss:.4f} nats per token")
    print(f"perplexity     {score.perplexity:.3f}")
    if score.bits_per_byte is not None:
        print(f"bits per byte  {score.bits_per_byte:.4f}")
    return score


if __name__ == "__main__":
    run_command(main)
