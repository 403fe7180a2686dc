"""Speculative decoding: a small model proposes several tokens, which the model accepts or replaces in one step.

output = decode_speculative(prompt, model, model_draft, max_length=200, speculative_lookahead=4)
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn._ops import checks
from flash_attn.utils.generation._steps import Steps, check_prompt, is_one_of, streaming, timed
from flash_attn.utils.generation.decoding import GreedySearchDecoderOnlyOutput, _output_class
from flash_attn.utils.generation.sampling import _check_sampling, _draw, _probabilities, sample


def sample_speculative(
    logits: Tensor,
    logits_draft: Tensor,
    tokens_draft: Tensor,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Accept or replace the tokens that a draft model proposes, so that they are distributed as the model's own.

    Token i is accepted with probability p_i / q_i of the model and the draft model (Leviathan et al.,
    arXiv:2211.17192). The first that is not accepted is replaced by one drawn from max(p - q, 0); if all are accepted,
    one drawn from p is added.

    Arguments:
        logits: (batch, n + 1, vocab), of the model: after the last token and after each of the n proposed ones.
        logits_draft: (batch, n, vocab), of the draft model, from which the proposed tokens were drawn.
        tokens_draft: (batch, n) int32 or int64, the proposed tokens.
        top_k, top_p, temperature: as in `sample`; those with which the proposed tokens were drawn.

    Returns tokens (batch, n + 1) int64, and how many of them count, (batch,) from 1 to n + 1; later tokens have no
    meaning. Raises TypeError or ValueError for arguments that do not fit together.

    >>> from flash_attn.utils.generation import sample_speculative
    >>> logits = torch.tensor([[[0.0, 9.0], [9.0, 0.0], [9.0, 0.0]]])
    >>> sample_speculative(logits, logits[:, :2], torch.tensor([[1, 1]]))
    (tensor([[1, 0, 0]]), tensor([2]))
    """
    top_k, top_p, temperature = _check_sampling(top_k, top_p, temperature)
    checks.tensor("tokens_draft", tokens_draft, dtypes=checks.INTEGER_DTYPES)
    checks.ndim("tokens_draft", tokens_draft, "(batch, n)")
    batch, n = tokens_draft.shape
    checks.tensor("logits", logits, shape=(batch, n + 1, None))
    checks.tensor("logits_draft", logits_draft, shape=(batch, n, logits.shape[-1]))
    tokens_draft = tokens_draft.long()
    p, q = (_probabilities(each, top_k, top_p, temperature) for each in (logits, logits_draft))
    p_draft, q_draft = (each[:, :n].gather(-1, tokens_draft[..., None]).squeeze(-1) for each in (p, q))
    accepted = torch.rand_like(p_draft) * q_draft < p_draft
    count = accepted.long().cumprod(dim=-1).sum(dim=-1)  # how many come before the first token that is not accepted
    at = count[:, None, None].expand(-1, 1, p.shape[-1])
    p_next, q_next = p.gather(1, at).squeeze(1), F.pad(q, (0, 0, 0, 1)).gather(1, at).squeeze(1)
    rest = (p_next - q_next).clamp_(min=0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p_next)  # nothing is left where p equals q
    return F.pad(tokens_draft, (0, 1)).scatter(1, count[:, None], _draw(rest)[:, None]), count + 1


@torch.no_grad()
def decode_speculative(
    input_ids: Tensor,
    model: nn.Module,
    model_draft: nn.Module,
    max_length: int,
    speculative_lookahead: int = 3,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    vocab_size: int | None = None,
    tensor_parallel: int = 1,
    cg: bool = False,
    enable_timing: bool = False,
    debug: bool = False,
    streamer: Any = None,
    *,
    page_size: int | None = None,
    num_pages: int | None = None,
) -> GreedySearchDecoderOnlyOutput:
    """Continue one sequence by tokens that a small model proposes and the model accepts or replaces, several at a time.

    The result has the same distribution as the result of `decode`; with top_k=1 it is the same.

    Arguments:
        input_ids: (1, seqlen) int32 or int64, the prompt.
        model_draft: the model that proposes, with the same vocabulary.
        speculative_lookahead: how many tokens it proposes at a time.
        eos_token_id: the sequence ends with this token, or one of these.
        cg: as in `decode`. The graphs of the draft model are kept in model_draft._draft_decoding_cache, since a model
            may draft for itself.
        enable_timing: print how long it took, how often the model ran and how many proposed tokens were accepted.
        debug: print which tokens are proposed and which accepted.
        streamer: as in `decode`, but put gets all tokens (count,) that a step of the model adds.
        page_size, num_pages: as in `decode`, for each of the two models.
        For the other arguments see `decode`.

    Returns what `decode` returns: sequences (1, at most max_length, but at least one token more than the prompt), and
    scores, a tuple of logits (1, vocab) of the model. Raises TypeError or ValueError as `decode` does, and for a batch
    of several sequences or models with different vocabularies.

    >>> from flash_attn.utils.generation import decode_speculative
    >>> output = decode_speculative(prompt, model, model_draft, max_length=100)             # doctest: +SKIP
    """
    with streaming(streamer) as put:
        input_ids, max_length, vocab_size, ends = check_prompt(input_ids, max_length, vocab_size, eos_token_id)
        checks.number("the batch size of input_ids", len(input_ids), len(input_ids) == 1, "1")
        speculative_lookahead = checks.whole("speculative_lookahead", speculative_lookahead)
        checks.number("speculative_lookahead", speculative_lookahead, speculative_lookahead > 0, "positive")
        top_k, top_p, temperature = _check_sampling(top_k, top_p, temperature)
        options = dict(top_k=top_k, top_p=top_p, temperature=temperature)
        shared = input_ids, max_length, vocab_size, tensor_parallel, cg
        paged: dict[str, Any] = dict(page_size=page_size, num_pages=num_pages)
        # The model is never fed the last token of a sequence, the draft model never the last two.
        steps = Steps(model, *shared, decoding_seqlens=range(1, speculative_lookahead + 2), may_end=bool(ends), **paged)
        steps_draft = Steps(
            model_draft,
            *shared,
            decoding_seqlens=(1, 2),
            kept_as="_draft_decoding_cache",
            may_end=bool(ends),
            unread=2,
            name="model_draft",
            **paged,
        )
        sequence, rounds = input_ids, []
        scores: list[Tensor] = []
        put(input_ids)
        with timed(enable_timing, input_ids.device, tensor_parallel):
            while True:
                length = sequence.shape[1]
                n = max(min(speculative_lookahead, max_length - length - 1), 0)
                proposed, logits_draft = _propose(steps_draft, sequence, n, options)
                logits = steps.run(proposed, num_last_tokens=n + 1)
                tokens = _accept(logits, logits_draft, proposed[:, length:], options)
                rounds.append((n, tokens.shape[1] - 1))
                if debug:
                    print(f"proposed {proposed[0, length:].tolist()}, went on with {tokens[0].tolist()}")
                count = tokens.shape[1]
                tokens = _up_to(ends, tokens)
                sequence = torch.cat([sequence, tokens], dim=1)
                put(tokens[0])
                scores += logits[:, : tokens.shape[1]].unbind(1)
                if sequence.shape[1] >= max_length or (ends and tokens[0, -1].item() in ends):
                    break
                # The caches also hold tokens that were not accepted, which the next step overwrites. The last token is
                # in neither model's caches, and the last proposed one is not in the draft model's.
                steps.rewind(length + count - 1)
                steps_draft.rewind(length + min(count, n) - 1)
    if enable_timing:
        _print_acceptance(rounds)
    return _output_class(top_k)(sequences=sequence, scores=tuple(scores))


def _propose(steps_draft: Steps, sequence: Tensor, n: int, options: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """The sequence with n tokens of the draft model, and the logits (1, 1, vocab) of each."""
    logits = []
    for _ in range(n):
        logits.append(steps_draft.run(sequence))
        sequence = torch.cat([sequence, sample(logits[-1][:, -1], **options)[:, None]], dim=1)
    return sequence, logits


def _accept(logits: Tensor, logits_draft: list[Tensor], proposed: Tensor, options: dict[str, Any]) -> Tensor:
    """The tokens (1, count) that follow: proposed ones that are accepted, and one of the model."""
    if not logits_draft:
        return sample(logits[:, -1], **options)[:, None]
    vocab, expected = logits_draft[0].shape[-1], logits.shape[-1]
    checks.number("the size of model_draft's vocabulary", vocab, vocab == expected, "{}, as model's", expected)
    tokens, count = sample_speculative(logits, torch.cat(logits_draft, dim=1), proposed, **options)
    return tokens[:, : count.item()]


def _up_to(ends: tuple[int, ...], tokens: Tensor) -> Tensor:
    """tokens (1, count) up to the first that ends the sequence."""
    found = is_one_of(tokens[0], ends).nonzero().flatten().tolist() if ends else []
    return tokens[:, : found[0] + 1] if found else tokens


def _print_acceptance(rounds: list[tuple[int, int]]) -> None:
    proposed, accepted = (sum(each) for each in zip(*rounds))
    print(f"Number of calls to main model: {len(rounds)}")
    print(f"Acceptance rate: {100 * accepted / max(proposed, 1):.2f}%")
