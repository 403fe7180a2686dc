"""The loop that continues sequences token by token, and `generate` for models.

output = decode(prompt, model, max_length=200, top_k=40, temperature=0.8, eos_token_id=2, cg=True)
output.sequences                                                            # (batch, at most max_length)
"""

import dataclasses
import difflib
import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from flash_attn._ops import checks
from flash_attn.utils.generation._steps import Steps, check_padding, check_prompt, is_one_of, streaming, timed
from flash_attn.utils.generation.sampling import _check_in_vocabulary, _check_sampling, _penalise, sample


@dataclasses.dataclass
class GreedySearchDecoderOnlyOutput:
    """The sequences (batch, length) int64, and the logits (batch, vocab) of each new token, or None.

    Example:
        >>> from flash_attn.models.gpt import GPTLMHeadModel
        >>> from transformers import GPT2Config
        >>> model = GPTLMHeadModel(GPT2Config(vocab_size=100, n_embd=64, n_layer=1, n_head=4)).eval()
        >>> options = dict(return_dict_in_generate=True, output_scores=True)
        >>> output = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, eos_token_id=None, **options)
        >>> output.sequences.shape, len(output.scores)
        (torch.Size([1, 7]), 4)
    """

    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None


class SampleDecoderOnlyOutput(GreedySearchDecoderOnlyOutput):
    """The same fields, for tokens that were drawn at random.

    Example:
        >>> from flash_attn.models.gpt import GPTLMHeadModel
        >>> from flash_attn.utils.generation import SampleDecoderOnlyOutput, decode
        >>> from transformers import GPT2Config
        >>> model = GPTLMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=1, n_head=4)).eval()
        >>> output = decode(torch.tensor([[5, 6, 7]]), model, max_length=4, top_k=10)
        >>> isinstance(output, SampleDecoderOnlyOutput), output.sequences.shape
        (True, torch.Size([1, 4]))
    """


def _output_class(top_k: int) -> type[GreedySearchDecoderOnlyOutput]:
    """The class of the result, which tells greedy decoding from sampling, as in transformers."""
    return GreedySearchDecoderOnlyOutput if top_k == 1 else SampleDecoderOnlyOutput


@torch.no_grad()
def decode(
    input_ids: Tensor,
    model: nn.Module,
    max_length: int,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    teacher_outputs: Tensor | None = None,
    vocab_size: int | None = None,
    tensor_parallel: int = 1,
    cg: bool = False,
    enable_timing: bool = False,
    repetition_penalty: float = 1.0,
    output_scores: bool = True,
    streamer: Any = None,
    attention_mask: Tensor | None = None,
    pad_token_id: int | None = None,
    *,
    page_size: int | None = None,
    num_pages: int | None = None,
) -> GreedySearchDecoderOnlyOutput:
    """Continue sequences token by token.

    Arguments:
        input_ids: (batch, seqlen) int32 or int64, the prompts, on the model's device. Prompts of different lengths are
            padded on the left, and need an attention_mask: padding cannot be told from tokens without it.
        model: see `flash_attn.utils.generation` for how it is called.
        max_length: the most tokens of a sequence, its prompt included. At least one token is always added.
        top_k, top_p, temperature: as in `sample`; by default, the likeliest token.
        eos_token_id: a sequence ends with this token, or one of these, and is then filled with pad_token_id until all
            have ended.
        teacher_outputs: (batch, length), whole sequences. As far as they reach, their tokens are taken instead of drawn
            ones.
        vocab_size: how many of the logits count, if the vocabulary is padded; model.vocab_size if None, or all.
        tensor_parallel: how many processes the model is divided over.
        cg: use CUDA graphs, which are kept in model._decoding_cache. They are captured at the first use of a batch
            size, and again when a cache must grow.
        enable_timing: print how long it took.
        repetition_penalty: as in `modify_logits_for_repetition_penalty`, for all tokens of a sequence so far, without
            padding.
        output_scores: keep the logits, (batch, vocab) for every token.
        streamer: an object with the methods of transformers' streamers: put gets the prompts and then the tokens
            (batch,) of each step, on the CPU; end is called at the end, after an error, too.
        attention_mask: (batch, seqlen) of any dtype, 1 for the tokens of a prompt and 0 for the padding on its left, as
            `generate` of transformers takes it. Each prompt must have a token. A sequence continues as it would alone.
        pad_token_id: what fills up sequences that have ended, less than model.vocab_size; None means the first
            eos_token_id.
        page_size: keep keys and values in pages of so many tokens, which a sequence takes as it grows, instead of in
            caches for max_length tokens. The results are the same.
        num_pages: how many pages there are for the whole batch, with page_size; None means enough for sequences of
            max_length tokens. Fewer save memory where sequences may end before.

    Returns a GreedySearchDecoderOnlyOutput, or if top_k is not 1 a SampleDecoderOnlyOutput. The scores are logits as
    the model gives them, before temperature and penalty. Raises TypeError or ValueError for arguments that do not fit
    together; `OutOfPages` if the sequences need more pages than there are.

    >>> from flash_attn.utils.generation import decode
    >>> output = decode(prompt, model, max_length=100)                                      # doctest: +SKIP
    """
    with streaming(streamer) as put:
        input_ids, max_length, vocab_size, ends = check_prompt(input_ids, max_length, vocab_size, eos_token_id)
        top_k, *_ = sampling = _check_sampling(top_k, top_p, temperature)
        if teacher_outputs is not None:
            dtypes, shape = checks.INTEGER_DTYPES, (len(input_ids), None)
            checks.tensor("teacher_outputs", teacher_outputs, dtypes=dtypes, shape=shape, device=input_ids.device)
        repetition_penalty = checks.as_float("repetition_penalty", repetition_penalty)
        checks.number("repetition_penalty", repetition_penalty, repetition_penalty > 0, "positive")
        if pad_token_id is not None:
            pad_token_id = checks.whole("pad_token_id", pad_token_id, "an integer or None")
            checks.number("pad_token_id", pad_token_id, pad_token_id >= 0, "at least 0")
            size = getattr(model, "vocab_size", None)
            if size is not None:
                checks.number("pad_token_id", pad_token_id, pad_token_id < size, "from 0 to {}", size - 1)
        leftpad = check_padding(attention_mask, input_ids)
        shared = input_ids, max_length, vocab_size, tensor_parallel, cg
        paged: dict[str, Any] = dict(page_size=page_size, num_pages=num_pages)
        steps = Steps(model, *shared, leftpad=leftpad, may_end=bool(ends), **paged)
        rows = _Rows(input_ids, leftpad, sampling, repetition_penalty, ends, pad_token_id, teacher_outputs)
        scores = []
        put(input_ids)
        with timed(enable_timing, input_ids.device, tensor_parallel):
            while True:
                (logits,) = steps.run(rows.sequences).unbind(1)
                if output_scores:
                    scores.append(logits)
                put(rows.extend(logits))
                if rows.sequences.shape[1] >= max_length or rows.have_ended():
                    break
    return _output_class(top_k)(sequences=rows.sequences, scores=tuple(scores) if output_scores else None)


class _Rows:
    """The sequences of a batch while they grow.

    sequences: (batch, length), prompts and what follows them.
    ended: (batch,) bool, true for sequences that have ended.
    counted: (batch, length), the tokens that repetition_penalty counts. All are in the vocabulary; in place of padding
        stands another token of the same prompt, which changes nothing.
    """

    def __init__(
        self,
        input_ids: Tensor,
        leftpad: Tensor | None,
        sampling: tuple[int, float, float],
        repetition_penalty: float,
        ends: tuple[int, ...],
        pad_token_id: int | None,
        teacher_outputs: Tensor | None,
    ) -> None:
        self.sequences = self.counted = input_ids
        if leftpad is not None:
            is_padding = torch.arange(input_ids.shape[1], device=input_ids.device) < leftpad[:, None]
            self.counted = torch.where(is_padding, input_ids[:, -1:], input_ids)
        self.ended = torch.zeros_like(input_ids[:, 0], dtype=torch.bool)
        self.sampling = sampling
        self.repetition_penalty = repetition_penalty
        self.ends = ends
        self.pad_token_id = ends[0] if ends and pad_token_id is None else pad_token_id
        self.teacher_outputs = teacher_outputs
        self.is_checked = False

    def extend(self, logits: Tensor) -> Tensor:
        """Add a token to each sequence, by the logits (batch, vocab) after its last one; return the tokens (batch,)."""
        if self.repetition_penalty != 1.0 and not self.is_checked:
            self._check_vocabulary(logits.shape[-1])
        length = self.sequences.shape[1]
        if self.teacher_outputs is not None and self.teacher_outputs.shape[1] > length:
            chosen = tokens = self.teacher_outputs[:, length]
            self.ended = torch.zeros_like(self.ended)  # the teacher may go on after the end
        else:
            chosen = tokens = sample(self._penalised(logits), *self.sampling)
            if self.pad_token_id is not None:
                tokens = chosen.masked_fill(self.ended, self.pad_token_id)
        if self.ends:
            self.ended = self.ended | is_one_of(tokens, self.ends)
        self.sequences = torch.cat([self.sequences, tokens[:, None]], dim=1)
        if self.repetition_penalty != 1.0:
            self.counted = torch.cat([self.counted, chosen[:, None]], dim=1)
        return tokens

    def have_ended(self) -> bool:
        """Returns whether all sequences have ended; waits for the device if sequences can end."""
        return bool(self.ends) and bool(self.ended.all())

    def _penalised(self, logits: Tensor) -> Tensor:
        if self.repetition_penalty == 1.0:
            return logits
        logits = logits.clone()
        _penalise(logits, self.counted, self.repetition_penalty)
        return logits

    def _check_vocabulary(self, vocab_size: int) -> None:
        """Check the tokens that are given; those that follow are drawn from the vocabulary."""
        _check_in_vocabulary("input_ids", self.counted, vocab_size)
        if self.teacher_outputs is not None:
            _check_in_vocabulary("teacher_outputs", self.teacher_outputs, vocab_size)
        self.is_checked = True


class GenerationMixin:
    """`generate` for models that are called as `flash_attn.utils.generation` says.

    Example:
        >>> from flash_attn.models.gpt import GPTLMHeadModel
        >>> from flash_attn.utils.generation import GenerationMixin
        >>> issubclass(GPTLMHeadModel, GenerationMixin)
        True
    """

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> dict[Any, Any]:
        """Returns caches for CUDA graphs and for pages: one for each layer, by its layer_idx. Models must override it.

        Each has shape (batch_size, max_seqlen, 2, heads_kv, head_dim), with pages (num_pages, page_size, 2, heads_kv,
        head_dim), in dtype, or in the parameters' dtype if None.
        """
        raise NotImplementedError(f"{type(self).__name__} must have a method allocate_inference_cache, found none")

    def generate(
        self,
        input_ids: Tensor,
        max_length: int | None = None,
        top_k: int = 1,
        top_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        *,
        max_new_tokens: int | None = None,
        **kwargs: Any,
    ) -> Tensor | GreedySearchDecoderOnlyOutput:
        """Continue sequences: `decode` with this model; kwargs are more of its arguments.

        max_new_tokens may be given instead of max_length: how many tokens follow a prompt at most.

        Differences from transformers' generate: nothing is taken from a configuration, so without eos_token_id no token
        ends a sequence; and with "dynamic" or "longrope" rotary scaling, the angles are those of the length that a
        sequence may reach from the start, while transformers changes them on the way.

        Returns the sequences (batch, length), or with return_dict_in_generate the whole result of decode, with scores
        None unless output_scores is true. Raises TypeError for a name that decode does not have, and says what to use;
        NotImplementedError under an adapter of peft that learns a prompt, which would be left out.

        >>> sequences = model.generate(prompt, max_length=100, eos_token_id=2)              # doctest: +SKIP
        """
        _check_names(kwargs)
        _refuse_learned_prompt(self)
        max_length = _length(input_ids, max_length, max_new_tokens)
        output = decode(
            input_ids,
            cast(nn.Module, self),
            max_length,
            top_k=top_k,
            top_p=top_p,
            temperature=temperature,
            output_scores=output_scores and return_dict_in_generate,
            **kwargs,
        )
        return output if return_dict_in_generate else output.sequences


# Arguments of transformers' generate, and what there is instead.
_INSTEAD = {
    "assistant_model": "decode_speculative(input_ids, model, assistant_model, max_length) takes one",
    "do_sample": "top_k=1 takes the likeliest token, and any other top_k draws",
    "num_beams": "there is no beam search",
    "use_cache": "keys and values are always kept",
    "generation_config": "give its fields by name, as eos_token_id=2",
}


def _check_names(options: dict[str, Any]) -> None:
    """Check that keyword arguments are those of `decode`."""
    own = list(inspect.signature(decode).parameters)
    for name in options:
        if name not in own:
            instead = _INSTEAD.get(name, f"names like it: {', '.join(difflib.get_close_matches(name, own)) or 'none'}")
            raise TypeError(f"keyword arguments must be those of decode, found {name!r}; {instead}")


def _refuse_learned_prompt(model: GenerationMixin) -> None:
    """Raise NotImplementedError within generate of peft's prompt tuning, which calls that of the model."""
    # For the time of such a call, peft puts its own method in the place of the model's.
    adapted = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    config = getattr(adapted, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise NotImplementedError(
            f"generate must be called without a learned prompt, found {type(config).__name__}: its prompt would be "
            "left out; call the model itself for logits after it"
        )


def _length(input_ids: Tensor, max_length: int | None, max_new_tokens: int | None) -> int:
    """Check that one of the two is given; return max_length."""
    if (max_length is None) == (max_new_tokens is None):
        raise ValueError(
            f"either max_length or max_new_tokens must be given, found max_length={max_length} and "
            f"max_new_tokens={max_new_tokens}"
        )
    if max_new_tokens is None:
        return cast(int, max_length)
    max_new_tokens = checks.whole("max_new_tokens", max_new_tokens)
    checks.number("max_new_tokens", max_new_tokens, max_new_tokens > 0, "positive")
    checks.tensor("input_ids", input_ids)
    checks.ndim("input_ids", input_ids, "(batch, seqlen)")
    return input_ids.shape[1] + max_new_tokens
