"""Runs a model over growing sequences: only on tokens that its caches do not hold yet, with or without CUDA graphs."""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flash_attn import _torch_private
from flash_attn._ops import checks
from flash_attn.utils.generation.graphs import (
    DecodingCGCache,
    empty_block_table,
    new_caches,
    pool_size,
    update_graph_cache,
)
from flash_attn.utils.generation.inference_params import InferenceParams
from flash_attn.utils.generation.pages import OutOfPages, PageAllocator


class Steps:
    """Feeds a model the tokens that its caches do not hold yet.

    Arguments:
        input_ids: (batch, seqlen), the prompts.
        max_length: how many tokens the caches have room for, or more if the prompts are longer.
        vocab_size: how many of the logits count; None means the vocab_size of the model, or all if it has none.
        tensor_parallel: how many processes the model is divided over.
        cg: capture CUDA graphs of the steps after the prompt, and replay them.
        decoding_seqlens: the numbers of tokens that these steps may have.
        kept_as: the attribute of the model that keeps the graphs.
        leftpad: int32 (batch,), how many tokens of each prompt are padding on its left; None means none.
        may_end: sequences may end before they have max_length tokens.
        unread: how many tokens at the end of a sequence of max_length are never fed to the model.
        name: what errors call the model.
        page_size, num_pages: as in `decode`.

    Raises ValueError, before anything is allocated, if the model has too few positions.
    """

    def __init__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        max_length: int,
        vocab_size: int | None,
        tensor_parallel: int,
        cg: bool,
        decoding_seqlens: Iterable[int] = (1,),
        kept_as: str = "_decoding_cache",
        leftpad: Tensor | None = None,
        may_end: bool = False,
        unread: int = 1,
        name: str = "the model",
        page_size: int | None = None,
        num_pages: int | None = None,
    ) -> None:
        batch, seqlen = input_ids.shape
        self.model, self.name, self.batch = model, name, batch
        _warn_of_dropout(model)
        self.max_tokens: int | None = getattr(model, "max_positions", None)
        if self.max_tokens is not None and leftpad is not None:
            self.max_tokens += int(leftpad.min())
        self._check_positions(seqlen)
        if self.max_tokens is not None and not may_end:
            checks.number(
                "max_length",
                max_length,
                max_length <= self.max_tokens + unread,
                "at most {} (padding included) without eos_token_id, as {} has {} positions",
                self.max_tokens + unread,
                name,
                model.max_positions,
            )
        max_seqlen = max(max_length, seqlen)
        self.vocab_size = getattr(model, "vocab_size", None) if vocab_size is None else vocab_size
        pool = pool_size(page_size, num_pages, batch, max_seqlen)
        self.pages = None if pool is None else PageAllocator(*pool)
        self.graphs: DecodingCGCache | None = None
        if cg:
            self.graphs = update_graph_cache(
                model,
                getattr(model, kept_as, None),
                batch,
                seqlen,
                max_seqlen,
                tensor_parallel=tensor_parallel,
                decoding_seqlens=[n for n in decoding_seqlens if n < max_seqlen],  # no step is longer
                page_size=page_size,
                num_pages=num_pages,
            )
            setattr(model, kept_as, self.graphs)
            assert self.graphs.inference_params is not None  # update_graph_cache has set it
            self.params = self.graphs.inference_params
            self.params.reset(max_seqlen, batch)
        else:
            lengths = torch.zeros(batch, dtype=torch.int32, device=input_ids.device)
            table = empty_block_table(batch, max_seqlen, pool, input_ids.device)
            self.params = InferenceParams(max_seqlen, batch, lengths_per_sample=lengths, block_table=table)
        # What graphs of torch.compile return may be overwritten in their next run (mode="reduce-overhead"): caches that
        # one makes, and logits.
        self.is_compiled = any(map(_torch_private.is_compiled, model.modules()))
        makes_caches = self.pages is not None or (self.is_compiled and hasattr(model, "allocate_inference_cache"))
        if makes_caches and self.graphs is None:
            self.params.key_value_memory_dict = new_caches(
                model, batch, max_seqlen, tensor_parallel, input_ids.device, pool=pool
            )
        self.params.leftpad_per_sample = leftpad
        if self.pages is not None:
            for row in range(batch):
                self.pages.allocate(row)

    def _check_positions(self, length: int) -> None:
        """Check that the model has positions for sequences of this length."""
        if self.max_tokens is not None and length > self.max_tokens:
            raise ValueError(
                f"sequences must have at most {self.max_tokens} tokens (padding included) to be continued, because "
                f"{self.name} has no more positions, found {length}"
            )

    def run(self, sequences: Tensor, num_last_tokens: int = 1) -> Tensor:
        """Logits (batch, num_last_tokens, vocab) of sequences (batch, length), which the caches then hold."""
        self._check_positions(sequences.shape[1])
        self._take_pages(sequences.shape[1])
        offset, leftpad = self.params.seqlen_offset, self.params.leftpad_per_sample
        input_ids = sequences[:, offset:]
        held = offset if offset == 0 or leftpad is None else offset - leftpad  # how many keys the caches hold
        position_ids = None
        if offset > 0 or leftpad is not None:
            columns = torch.arange(offset, sequences.shape[1], device=sequences.device).expand_as(input_ids)
            # Padding gets position 0, which every model has.
            position_ids = columns if leftpad is None else (columns - leftpad[:, None]).clamp(min=0)
        if self.graphs is not None and position_ids is not None and offset > 0:
            logits = self.graphs.run(input_ids, position_ids, held)[:, -num_last_tokens:]
        else:
            self.params.set_lengths(len(input_ids), held)
            logits = self.model(
                input_ids,
                position_ids=position_ids,
                inference_params=self.params,
                num_last_tokens=num_last_tokens,
            ).logits
        checks.tensor("the model's logits", logits, shape=(len(sequences), num_last_tokens, None))
        self.rewind(sequences.shape[1])
        logits = logits[..., : self.vocab_size]
        return logits.clone() if self.is_compiled else logits

    def _take_pages(self, length: int) -> None:
        """Give each row pages for `length` tokens, padding included, if the caches have pages."""
        if self.pages is None:
            return
        assert self.params.block_table is not None  # the constructor has set it
        rows, before, page_size = range(self.batch), self.pages.num_free, self.pages.page_size
        needed = self.batch * -(-length // page_size)  # no row shares a page
        if needed > self.pages.num_pages:
            raise OutOfPages(
                f"num_pages must be at least {needed} for {self.batch} sequences of {length} tokens (padding included) "
                f"in pages of {page_size}, found {self.pages.num_pages}: give more, or None for as many as max_length "
                "may need"
            )
        for row in rows:
            self.pages.append(row, length - self.pages.length(row))
        if self.pages.num_free != before:
            table = self.pages.block_table(rows)
            self.params.block_table[: self.batch, : table.shape[1]] = table

    def rewind(self, length: int) -> None:
        """Continue as if the caches held only `length` tokens."""
        self.params.seqlen_offset = length
        if self.pages is not None:
            for row in range(self.batch):
                self.pages.truncate(row, length)


def _warn_of_dropout(model: nn.Module) -> None:
    if any(isinstance(module, nn.Dropout) and module.training and module.p > 0 for module in model.modules()):
        warnings.warn(  # Python shows it once
            "the model is in training mode, as from_pretrained returns it, so it generates with dropout: "
            "call model.eval() first",
            stacklevel=2,
        )


def check_prompt(
    input_ids: Tensor, max_length: int, vocab_size: int | None, eos_token_id: int | Sequence[int] | None
) -> tuple[Tensor, int, int | None, tuple[int, ...]]:
    """Check the arguments that all decoding functions share.

    Returns them as int64, as integers, and the last one as a tuple of the tokens that end a sequence.
    """
    checks.tensor("input_ids", input_ids, dtypes=checks.INTEGER_DTYPES)
    checks.ndim("input_ids", input_ids, "(batch, seqlen)")
    checks.number("input_ids.shape[1]", input_ids.shape[1], input_ids.shape[1] > 0, "at least 1")
    max_length = checks.whole("max_length", max_length)
    if vocab_size is not None:
        vocab_size = checks.whole("vocab_size", vocab_size, "an integer or None")
        checks.number("vocab_size", vocab_size, vocab_size > 0, "positive")
    ends: Any = () if eos_token_id is None else eos_token_id
    if not isinstance(ends, (list, tuple)) and getattr(ends, "ndim", None) != 1:
        ends = (ends,)
    expected = "an integer, several of them, or None"
    return input_ids.long(), max_length, vocab_size, tuple(checks.whole("eos_token_id", end, expected) for end in ends)


def is_one_of(tokens: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Where tokens are one of `ends`: bool, of the shape of tokens. No tensor of `ends` is copied to the device."""
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for end in ends:
        found |= tokens == end
    return found


def check_padding(attention_mask: Tensor | None, input_ids: Tensor) -> Tensor | None:
    """Check the mask (batch, seqlen) of prompts; return the width of their padding, int32 (batch,), None without any.

    This reads the mask, and so waits for the device.
    """
    if attention_mask is None:
        return None
    checks.tensor("attention_mask", attention_mask, shape=tuple(input_ids.shape), device=input_ids.device)
    if attention_mask.numel() == 0:
        return None
    for value in attention_mask.unique().tolist():
        checks.number("attention_mask", value, value in (0, 1), "0 or 1")
    is_token = attention_mask.bool()
    falls = (is_token[:, :-1] & ~is_token[:, 1:]).any(dim=1) | ~is_token[:, -1]
    if falls.any():
        row = int(falls.nonzero()[0])
        raise ValueError(
            "attention_mask must be 0 before the tokens of each prompt only (left padding, as tokenizers make it with "
            f"padding_side='left'), found {is_token[row].int().tolist()} in row {row}"
        )
    leftpad = (~is_token).sum(dim=1, dtype=torch.int32)
    return leftpad if leftpad.any() else None


@contextlib.contextmanager
def streaming(streamer: Any) -> Iterator[Callable[[Tensor], None]]:
    """A function that gives tokens to a streamer, if there is one.

    The streamer is ended even after an error, because another thread may be waiting for its end.
    """

    def put(tokens: Tensor) -> None:
        if streamer is not None:
            streamer.put(tokens.cpu())

    try:
        yield put
    finally:
        if streamer is not None:
            streamer.end()


@contextlib.contextmanager
def timed(enabled: bool, device: torch.device, tensor_parallel: int) -> Iterator[None]:
    """Print how long the code within takes, on the device and in all processes."""

    def now() -> float:
        if tensor_parallel > 1:
            dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = now() if enabled else 0.0
    yield
    if enabled:
        print(f"Prompt processing + decoding time: {1000 * (now() - start):.0f}ms")
