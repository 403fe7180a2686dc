"""Decoding: sampling, the loop over tokens, speculative decoding, and decoding with CUDA graphs.

    output = decode(prompt, model, max_length=200, top_k=40, temperature=0.8, eos_token_id=2, cg=True)
    output.sequences                                                            # (batch, at most max_length)

A model here is a module that is called as

    model(input_ids, position_ids=None, inference_params=params, num_last_tokens=1).logits

with input_ids (batch, seqlen), what follows the `params.seqlen_offset` tokens that its caches hold, position_ids None
for a prompt and else (batch, seqlen), and gives logits (batch, num_last_tokens, vocab). If it is tensor parallel, every
process gets all logits, and must draw the same random numbers.
"""

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flash_attn._ops import checks

_CACHE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclasses.dataclass
class InferenceParams:
    """What the layers of a model must know to go on with sequences, and the caches in which they keep them.

    max_seqlen, max_batch_size: what the caches have room for.
    seqlen_offset: how many tokens of each sequence the caches hold; 0 for a prompt.
    batch_size_offset: the row of the caches that the first sequence of a batch has.
    key_value_memory_dict: the cache of each layer, by its layer_idx.
    lengths_per_sample: int32 (max_batch_size,), the same as seqlen_offset for each row of the caches, or None. Layers
        go by it where it is given, so that a CUDA graph finds the positions of its replay, and rows may differ.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict = dataclasses.field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen, max_batch_size):
        """Begin new sequences in the same caches."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


@dataclasses.dataclass
class GreedySearchDecoderOnlyOutput:
    """sequences (batch, length) int64, and of each new token the logits (batch, vocab), or None."""

    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None


class SampleDecoderOnlyOutput(GreedySearchDecoderOnlyOutput):
    """The same, from sampling."""


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


def modify_logits_for_top_k_filtering(logits, top_k):
    """Set all but the top_k greatest of logits (..., vocab) to -inf, in place; equal ones all stay."""
    least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
    logits.masked_fill_(logits < least, float("-inf"))


def modify_logits_for_top_p_filtering(logits, top_p):
    """Set logits (..., vocab) to -inf, in place, but for the likeliest tokens that together have probability top_p.

    The likeliest always stays (nucleus sampling: Holtzman et al., arXiv:1904.09751). Nothing changes for a top_p of 0
    or less, or of 1 or more.
    """
    if top_p <= 0.0 or top_p >= 1.0:
        return
    ascending, indices = logits.sort(dim=-1)
    unlikely = ascending.softmax(dim=-1, dtype=torch.float32).cumsum(dim=-1) <= 1 - top_p
    unlikely[..., -1] = False
    logits.masked_fill_(unlikely.scatter(-1, indices, unlikely), float("-inf"))


def modify_logits_for_repetition_penalty(logits, tokens, repetition_penalty):
    """Make `tokens` (batch, length) less likely in logits (batch, vocab), in place.

    Positive logits are divided, others multiplied by repetition_penalty (Keskar et al., arXiv:1909.05858). Raises
    ValueError, which waits for the device, if a token is not in the vocabulary.
    """
    if repetition_penalty == 1.0:
        return
    _check_in_vocabulary("tokens", tokens, logits.shape[-1])
    _penalise(logits, tokens, repetition_penalty)


def _penalise(logits, tokens, repetition_penalty):
    found = logits.gather(-1, tokens)
    logits.scatter_(-1, tokens, torch.where(found > 0, found / repetition_penalty, found * repetition_penalty))


def _check_in_vocabulary(name, tokens, vocab_size):
    """Check the values of tokens, which waits for the device: kernels would read and write outside of the logits."""
    if tokens.numel() > 0:
        for token in tokens.aminmax():
            checks.number(name, int(token), 0 <= token < vocab_size, "from 0 to {}", vocab_size - 1)


def sample(logits, top_k=1, top_p=0.0, temperature=1.0):
    """Draw a token from each row of logits (batch, vocab), which are not changed.

    Arguments:
        top_k: from among so many likeliest tokens; 1 takes the likeliest, whatever the others say, 0 is all.
        top_p: from among the likeliest that together have this probability; 0 or 1 is all.
        temperature: logits are divided by it.

    Returns int64 (batch,).
    """
    _check_sampling(top_k, top_p, temperature)
    if top_k == 1:
        return logits.argmax(dim=-1)
    if top_k == 0:
        return _draw(_likelihoods(logits, 0, top_p, temperature))
    logits, indices = logits.topk(min(top_k, logits.shape[-1]), dim=-1)  # few, which are soon sorted
    chosen = _draw(_likelihoods(logits, 0, top_p, temperature))
    return indices.gather(-1, chosen[..., None]).squeeze(-1)


def sample_speculative(logits, logits_draft, tokens_draft, top_k=1, top_p=0.0, temperature=1.0):
    """Accept or replace the tokens that a draft model proposes, so that they are distributed as the model's own.

    Token i is accepted with probability p_i / q_i of the model and the draft model; the first that is not is replaced
    by one drawn from max(p - q, 0), or if all are, one drawn from p is added (Leviathan et al., arXiv:2211.17192).

    Arguments:
        logits: (batch, n + 1, vocab), of the model after each of the last token and the n proposed.
        logits_draft: (batch, n, vocab), from which they were drawn.
        tokens_draft: (batch, n) int32 or int64, the proposed.
        top_k, top_p, temperature: as in `sample`, with which they were drawn.

    Returns tokens (batch, n + 1) and how many of them count, (batch,) from 1 to n + 1; what follows has no meaning.
    """
    _check_sampling(top_k, top_p, temperature)
    checks.tensor("tokens_draft", tokens_draft, dtypes=checks.INTEGER_DTYPES)
    checks.ndim("tokens_draft", tokens_draft, "(batch, n)")
    batch, n = tokens_draft.shape
    checks.tensor("logits", logits, shape=(batch, n + 1, None))
    checks.tensor("logits_draft", logits_draft, shape=(batch, n, logits.shape[-1]))
    tokens_draft = tokens_draft.long()
    p, q = (_likelihoods(each, top_k, top_p, temperature) for each in (logits, logits_draft))
    p_draft, q_draft = (each[:, :n].gather(-1, tokens_draft[..., None]).squeeze(-1) for each in (p, q))
    accepted = torch.rand_like(p_draft) * q_draft < p_draft
    count = accepted.long().cumprod(dim=-1).sum(dim=-1)  # accepted in front of the first that is not
    at = count[:, None, None].expand(-1, 1, p.shape[-1])
    p_next, q_next = p.gather(1, at).squeeze(1), F.pad(q, (0, 0, 0, 1)).gather(1, at).squeeze(1)
    rest = (p_next - q_next).clamp_(min=0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p_next)  # equal but for rounding
    return F.pad(tokens_draft, (0, 1)).scatter(1, count[:, None], _draw(rest)[:, None]), count + 1


def _likelihoods(logits, top_k, top_p, temperature):
    """The float32 probabilities (..., vocab) with which `sample` draws tokens, new in memory."""
    if top_k == 1:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
    logits = logits.float()
    # The largest becomes 0, so that no quotient is infinite: the difference of two such would be NaN.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if top_k > 0:  # so many and no more, of equal ones too
        kept = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
        logits = torch.full_like(logits, float("-inf")).scatter_(-1, kept.indices, kept.values)
    modify_logits_for_top_p_filtering(logits, top_p)
    return logits.softmax(dim=-1, dtype=torch.float32)


def _draw(likelihoods):
    return torch.multinomial(likelihoods, num_samples=1).squeeze(-1)


def _check_sampling(top_k, top_p, temperature):
    checks.integer("top_k", top_k)
    checks.number("top_k", top_k, top_k >= 0, "at least 0")
    if top_k == 1:
        return
    for name, value in (("top_p", top_p), ("temperature", temperature)):
        checks.real(name, value)
    checks.number("top_p", top_p, 0 <= top_p <= 1, "from 0 to 1")
    checks.number("temperature", temperature, temperature > 0, "positive")


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


@torch.no_grad()
def decode(
    input_ids,
    model,
    max_length,
    top_k=1,
    top_p=0.0,
    temperature=1.0,
    eos_token_id=None,
    teacher_outputs=None,
    vocab_size=None,
    tensor_parallel=1,
    cg=False,
    enable_timing=False,
    repetition_penalty=1.0,
    output_scores=True,
    streamer=None,
):
    """Continue sequences token by token.

    Arguments:
        input_ids: (batch, seqlen) int64, the prompts, on the model's device.
        model: see the top of this module.
        max_length: of a sequence with its prompt. At least one token is added whatever it is.
        top_k, top_p, temperature: as in `sample`; by default, the likeliest token.
        eos_token_id: a sequence ends with this token and is filled up with it until all have ended.
        teacher_outputs: (batch, length), tokens to go on with instead of those drawn, as far as they reach.
        vocab_size: how many of the logits count, if the vocabulary is padded.
        tensor_parallel: how many processes the model is divided over.
        cg: replay CUDA graphs, which are kept in model._decoding_cache. The graphs of a batch size are made at its
            first use; they are made anew if a cache must grow.
        enable_timing: print how long it took.
        repetition_penalty: as in `modify_logits_for_repetition_penalty`, for all tokens of a sequence so far.
        output_scores: keep the logits, (batch, vocab) for every token.
        streamer: an object whose put gets the prompts and then each step's tokens (batch,), on the CPU, and whose end
            is called at the end, like the streamers of transformers.

    Returns a GreedySearchDecoderOnlyOutput, or if top_k is not 1 a SampleDecoderOnlyOutput. The scores are logits as
    the model gives them, before temperature and penalty.

    >>> output = decode(prompt, model, max_length=100)                                      # doctest: +SKIP
    """
    _check_prompt(input_ids, max_length, eos_token_id, vocab_size)
    _check_sampling(top_k, top_p, temperature)
    if teacher_outputs is not None:
        dtypes, shape = checks.INTEGER_DTYPES, (len(input_ids), None)
        checks.tensor("teacher_outputs", teacher_outputs, dtypes=dtypes, shape=shape, device=input_ids.device)
    checks.real("repetition_penalty", repetition_penalty)
    checks.number("repetition_penalty", repetition_penalty, repetition_penalty > 0, "positive")
    steps = _Steps(model, input_ids, max_length, vocab_size, tensor_parallel, cg)
    sequences, scores = input_ids, []
    ended = torch.zeros_like(input_ids[:, 0], dtype=torch.bool)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    with _timed(enable_timing, input_ids.device, tensor_parallel):
        while True:
            (logits,) = steps.run(sequences).unbind(1)
            if repetition_penalty != 1.0 and sequences is input_ids:  # later tokens are drawn from the vocabulary
                _check_in_vocabulary("input_ids", input_ids, logits.shape[-1])
                if teacher_outputs is not None:
                    _check_in_vocabulary("teacher_outputs", teacher_outputs, logits.shape[-1])
            if output_scores:
                scores.append(logits)
            length = sequences.shape[1]
            if teacher_outputs is not None and teacher_outputs.shape[1] > length:
                tokens = teacher_outputs[:, length]
            else:
                if repetition_penalty != 1.0:
                    logits = logits.clone()
                    _penalise(logits, sequences, repetition_penalty)
                tokens = sample(logits, top_k, top_p, temperature)
                tokens = tokens if eos_token_id is None else tokens.masked_fill(ended, eos_token_id)
            sequences = torch.cat([sequences, tokens[:, None]], dim=1)
            if streamer is not None:
                streamer.put(tokens.cpu())
            if eos_token_id is not None:
                ended = tokens == eos_token_id
            if length + 1 >= max_length or (eos_token_id is not None and ended.all()):
                break
    if streamer is not None:
        streamer.end()
    output_cls = GreedySearchDecoderOnlyOutput if top_k == 1 else SampleDecoderOnlyOutput
    return output_cls(sequences=sequences, scores=tuple(scores) if output_scores else None)


@torch.no_grad()
def decode_speculative(
    input_ids,
    model,
    model_draft,
    max_length,
    speculative_lookahead=3,
    top_k=1,
    top_p=0.0,
    temperature=1.0,
    eos_token_id=None,
    vocab_size=None,
    tensor_parallel=1,
    cg=False,
    enable_timing=False,
    debug=False,
):
    """Continue one sequence by tokens that a small model proposes and the model accepts or replaces, several at a time.

    The result is distributed as that of `decode`; with top_k=1 it is the same.

    Arguments:
        input_ids: (1, seqlen) int64, the prompt.
        model_draft: the model that proposes, with the same vocabulary.
        speculative_lookahead: how many tokens it proposes at a time.
        cg: as in `decode`. Those of the draft model are kept in model_draft._draft_decoding_cache, as the model may
            draft for itself.
        debug: print what is proposed and what accepted.
        The others are those of `decode`. eos_token_id: the sequence ends with this token.

    Returns what `decode` does: sequences (1, at most max_length, but at least one token more than the prompt), and
    scores, a tuple of logits (1, vocab) of the model.
    """
    _check_prompt(input_ids, max_length, eos_token_id, vocab_size)
    checks.number("the batch size of input_ids", len(input_ids), len(input_ids) == 1, "1")
    checks.integer("speculative_lookahead", speculative_lookahead)
    checks.number("speculative_lookahead", speculative_lookahead, speculative_lookahead > 0, "positive")
    options = dict(top_k=top_k, top_p=top_p, temperature=temperature)
    chunks = range(1, speculative_lookahead + 2)
    steps = _Steps(model, input_ids, max_length, vocab_size, tensor_parallel, cg, chunks)
    steps_draft = _Steps(
        model_draft, input_ids, max_length, vocab_size, tensor_parallel, cg, (1, 2), kept_as="_draft_decoding_cache"
    )  # fmt: skip
    sequence, scores, rounds = input_ids, [], []
    with _timed(enable_timing, input_ids.device, tensor_parallel):
        while True:
            length = sequence.shape[1]
            proposed, logits_draft = sequence, []
            for _ in range(min(speculative_lookahead, max_length - length - 1)):
                logits_draft.append(steps_draft.run(proposed))
                proposed = torch.cat([proposed, sample(logits_draft[-1][:, -1], **options)[:, None]], dim=1)
            n = len(logits_draft)
            logits = steps.run(proposed, num_last_tokens=n + 1)
            if n == 0:
                tokens, count = sample(logits[:, -1], **options)[:, None], 1
            else:
                vocab, expected = logits_draft[0].shape[-1], logits.shape[-1]
                checks.number("the vocabulary of model_draft", vocab, vocab == expected, "that of model, {}", expected)
                tokens, count = sample_speculative(
                    logits, torch.cat(logits_draft, dim=1), proposed[:, length:], **options
                )
                count = count.item()
            if debug:
                print(f"proposed {proposed[0, length:].tolist()}, went on with {tokens[0, :count].tolist()}")
            tokens = tokens[:, :count]
            if eos_token_id is not None and (ends := (tokens[0] == eos_token_id).nonzero()).numel() > 0:
                tokens = tokens[:, : ends[0, 0] + 1]
            sequence = torch.cat([sequence, tokens], dim=1)
            scores += logits[:, : tokens.shape[1]].unbind(1)
            rounds.append((n, count - 1))
            if sequence.shape[1] >= max_length or (eos_token_id is not None and tokens[0, -1] == eos_token_id):
                break
            # What follows the accepted tokens in the caches is overwritten. The last token is in neither, and the last
            # proposed one is not in the draft model's.
            steps.rewind(length + count - 1)
            steps_draft.rewind(length + min(count, n) - 1)
    if enable_timing:
        proposals, accepted = (sum(each) for each in zip(*rounds))
        print(f"Number of calls to main model: {len(rounds)}")
        print(f"Acceptance rate: {100 * accepted / max(proposals, 1):.2f}%")
    output_cls = GreedySearchDecoderOnlyOutput if top_k == 1 else SampleDecoderOnlyOutput
    return output_cls(sequences=sequence, scores=tuple(scores))


class GenerationMixin:
    """`generate` for models that are called as this module says."""

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, **kwargs):
        """The cache of each layer, by its layer_idx."""
        raise NotImplementedError

    def generate(
        self,
        input_ids,
        max_length,
        top_k=1,
        top_p=0.0,
        temperature=1.0,
        return_dict_in_generate=False,
        output_scores=False,
        **kwargs,
    ):
        """Continue sequences: `decode` with this model; kwargs are more of its arguments.

        Returns the sequences (batch, length), or with return_dict_in_generate all that decode gives; the scores are
        None without output_scores.
        """
        output = decode(
            input_ids, self, max_length, top_k=top_k, top_p=top_p, temperature=temperature,
            output_scores=output_scores and return_dict_in_generate, **kwargs,
        )  # fmt: skip
        return output if return_dict_in_generate else output.sequences


class _Steps:
    """Runs a model over sequences that grow, feeding it what its caches do not hold yet."""

    def __init__(
        self,
        model,
        input_ids,
        max_length,
        vocab_size,
        tensor_parallel,
        cg,
        decoding_seqlens=(1,),
        kept_as="_decoding_cache",
    ):
        batch, seqlen = input_ids.shape
        max_seqlen = max(max_length, seqlen)
        self.model = model
        self.vocab_size = vocab_size
        self.graphs = None
        if cg:
            self.graphs = update_graph_cache(
                model, getattr(model, kept_as, None), batch, seqlen, max_seqlen, tensor_parallel=tensor_parallel,
                decoding_seqlens=[n for n in decoding_seqlens if n < max_seqlen],  # more never follow a prompt
            )  # fmt: skip
            setattr(model, kept_as, self.graphs)
            self.params = self.graphs.inference_params
            self.params.reset(max_seqlen, batch)
        else:
            lengths = torch.zeros(batch, dtype=torch.int32, device=input_ids.device)
            self.params = InferenceParams(max_seqlen, batch, lengths_per_sample=lengths)

    def run(self, sequences, num_last_tokens=1):
        """Logits (batch, num_last_tokens, vocab) of sequences (batch, length), which then are in the caches."""
        offset = self.params.seqlen_offset
        input_ids = sequences[:, offset:]
        position_ids = None
        if offset > 0:
            position_ids = torch.arange(offset, sequences.shape[1], device=sequences.device).expand_as(input_ids)
        if self.graphs is not None and offset > 0:
            logits = self.graphs.run(input_ids, position_ids, offset)[:, -num_last_tokens:]
        else:
            self.params.lengths_per_sample.fill_(offset)
            logits = self.model(
                input_ids,
                position_ids=position_ids,
                inference_params=self.params,
                num_last_tokens=num_last_tokens,
            ).logits
        checks.tensor("the model's logits", logits, shape=(len(sequences), num_last_tokens, None))
        self.rewind(sequences.shape[1])
        return logits[..., : self.vocab_size]

    def rewind(self, length):
        """Go on as if the caches held so many tokens."""
        self.params.seqlen_offset = length


def _check_prompt(input_ids, max_length, eos_token_id, vocab_size):
    checks.tensor("input_ids", input_ids, dtypes=(torch.int64,))
    checks.ndim("input_ids", input_ids, "(batch, seqlen)")
    checks.number("input_ids.shape[1]", input_ids.shape[1], input_ids.shape[1] > 0, "at least 1")
    checks.integer("max_length", max_length)
    if eos_token_id is not None:
        checks.integer("eos_token_id", eos_token_id, "an integer or None")
    if vocab_size is not None:
        checks.integer("vocab_size", vocab_size, "an integer or None")
        checks.number("vocab_size", vocab_size, vocab_size > 0, "positive")


@contextlib.contextmanager
def _timed(enabled, device, tensor_parallel):
    """Print how long what is done within takes, on the device and in all processes."""

    def now():
        if tensor_parallel > 1:
            dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = now() if enabled else None
    yield
    if enabled:
        print(f"Prompt processing + decoding time: {1000 * (now() - start):.0f}ms")


# ---------------------------------------------------------------------------------------------------------------------
# CUDA graphs


def allocate_inference_cache(
    max_batch_size,
    max_seqlen,
    nheads,
    headdim,
    layers: int | Sequence,
    device,
    dtype=torch.float16,
):
    """Uninitialised caches (max_batch_size, max_seqlen, 2, nheads, headdim), one for each layer, by its index or key.

    layers: their number, or their keys.
    """
    if dtype not in _CACHE_DTYPES:
        raise TypeError(f"dtype must be one of {_CACHE_DTYPES}, found {dtype}")
    shape = max_batch_size, max_seqlen, 2, nheads, headdim
    keys = range(layers) if isinstance(layers, int) else layers
    return {key: torch.empty(shape, device=device, dtype=dtype) for key in keys}


@dataclasses.dataclass
class DecodingCGCache:
    """The CUDA graphs of a model: callables by (batch size, tokens of a step), and the caches that they write to.

    run: (input_ids, position_ids, seqlen) -> logits, with the graph of this shape; KeyError if there is none.
    addresses: of the model's parameters and buffers, where the graphs read them.
    """

    max_batch_size: int = 0
    max_seqlen: int = 0
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    callables: dict[tuple[int, int], Callable] = dataclasses.field(default_factory=dict)
    mempool: Any = None
    inference_params: InferenceParams | None = None
    run: Callable | None = None
    addresses: list[int] = dataclasses.field(default_factory=list)

    def __reduce__(self):
        """A copy of the model begins without graphs, since these would go on reading the parameters of this one."""
        return DecodingCGCache, ()


@torch.no_grad()
def update_graph_cache(
    model,
    cache,
    batch_size,
    seqlen_og,
    max_seqlen,
    decoding_seqlens=(1,),
    tensor_parallel=1,
    dtype=None,
    n_warmups=2,
):
    """Capture the graphs that `cache`, a DecodingCGCache or None, does not have yet, and return it.

    Arguments:
        batch_size, max_seqlen: of the sequences; caches that are too small are replaced, and their graphs with them,
            as they are if a parameter has moved.
        seqlen_og: how many tokens the caches hold.
        decoding_seqlens: for how many tokens at a time there are to be graphs.
        tensor_parallel: how many processes share the heads that model.config names.
        dtype: of the caches; that of the model's parameters if None.
        n_warmups: how often the model runs before it is captured.
    """
    parameter = next(model.parameters())
    device, dtype = parameter.device, parameter.dtype if dtype is None else dtype
    cache = DecodingCGCache() if cache is None else cache
    fits = batch_size <= cache.max_batch_size and max_seqlen <= cache.max_seqlen
    addresses = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    if (device, dtype, addresses) != (cache.device, cache.dtype, cache.addresses) or not fits:
        mempool = _mempool(device)
        cache.callables, cache.mempool, cache.inference_params = {}, None, None
        gc.collect()  # the graphs are gone before there are new caches
        cache.device, cache.dtype, cache.addresses = device, dtype, addresses
        cache.max_batch_size, cache.max_seqlen = batch_size, max_seqlen
        cache.inference_params = InferenceParams(
            max_seqlen,
            batch_size,
            seqlen_offset=seqlen_og,
            key_value_memory_dict=_caches(model, batch_size, max_seqlen, tensor_parallel, device, dtype),
            lengths_per_sample=torch.full((batch_size,), seqlen_og, dtype=torch.int32, device=device),
        )
        cache.mempool = mempool
    for decoding_seqlen in decoding_seqlens:
        if (batch_size, decoding_seqlen) not in cache.callables:
            cache.callables[batch_size, decoding_seqlen] = capture_graph(
                model, cache.inference_params, batch_size, cache.max_seqlen, decoding_seqlen, cache.mempool, n_warmups
            )
    cache.run = lambda input_ids, position_ids, seqlen: cache.callables[tuple(input_ids.shape)](
        input_ids, position_ids, seqlen
    )
    cache.inference_params.seqlen_offset = 0
    return cache


def capture_graph(
    model,
    inference_params,
    batch_size,
    max_seqlen,
    decoding_seqlen=1,
    mempool=None,
    n_warmups=2,
):
    """Capture one step of a model as a CUDA graph.

    Arguments:
        inference_params: whose caches the graph writes to; lengths_per_sample must be given.
        batch_size, decoding_seqlen: the shape of the step's input; it follows a prompt, so is shorter than max_seqlen.
        max_seqlen: how many tokens the caches have room for.
        mempool: memory that graphs share which do not run at the same time, or None.
        n_warmups: how often the model runs before.

    Returns run(input_ids, position_ids, seqlen) -> logits (batch_size, decoding_seqlen, vocab), where the caches hold
    seqlen tokens.
    """
    checks.integer("decoding_seqlen", decoding_seqlen)
    fits = 0 < decoding_seqlen < max_seqlen
    checks.number("decoding_seqlen", decoding_seqlen, fits, "at least 1 and less than max_seqlen, {}", max_seqlen)
    device = next(model.parameters()).device
    input_ids, position_ids = torch.zeros(2, batch_size, decoding_seqlen, dtype=torch.int64, device=device)
    before = inference_params.seqlen_offset
    inference_params.seqlen_offset = max_seqlen - decoding_seqlen
    inference_params.lengths_per_sample.fill_(inference_params.seqlen_offset)

    def step():
        return model(
            input_ids, position_ids=position_ids, inference_params=inference_params, num_last_tokens=decoding_seqlen
        ).logits

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(n_warmups):
                step()
            stream.synchronize()
            if dist.is_initialized():  # or one process may capture while another still sends
                dist.barrier()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=mempool):
            logits = step()
    inference_params.seqlen_offset = before
    # Tables that modules replace when they must grow, as the rotary embedding does: the graph goes on reading these.
    tables = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]

    def run(new_input_ids, new_position_ids, seqlen, tables=tables):
        inference_params.lengths_per_sample.fill_(seqlen)
        input_ids.copy_(new_input_ids)
        position_ids.copy_(new_position_ids)
        graph.replay()
        return logits.clone()

    return run


def _mempool(device):
    checks.number("the model's device", device, device.type == "cuda", "a GPU for CUDA graphs")
    return torch.cuda.graphs.graph_pool_handle()


def _caches(model, batch_size, max_seqlen, tensor_parallel, device, dtype):
    if hasattr(model, "allocate_inference_cache"):
        return model.allocate_inference_cache(batch_size, max_seqlen, dtype)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return allocate_inference_cache(
        batch_size,
        max_seqlen,
        config.num_attention_heads // tensor_parallel,
        head_dim,
        config.num_hidden_layers,
        device,
        dtype,
    )
