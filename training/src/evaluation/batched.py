"""Scores and continues many sequences of token ids with one model, in batches of like lengths.

    score_continuations(model, [(context, continuation), ...], max_length=1024)    # [(log-probability, greedy), ...]
    continue_prompts(model, [prompt, ...], max_new_tokens=100)                      # [new ids, ...]

The work is done from the longest to the shortest, so that batches have little padding, and a batch that does not fit in
memory is the first one. Results are in the order of the requests.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from src.evaluation.perplexity import IGNORED, real_logits, token_losses


@torch.no_grad()
def score_continuations(
    model: nn.Module,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    max_length: int,
    batch_size: int = 8,
    progress: bool = True,
) -> list[tuple[float, bool]]:
    """For each (context, continuation): log P(continuation | context), and whether greedy decoding would write it.

    Arguments:
        model: in evaluation mode, as `perplexity` takes it.
        requests: pairs of ids; a context has at least one, such as the end-of-text token.
        max_length: how many tokens the model reads. A context that is too long loses its beginning.
        batch_size: how many at a time.
        progress: show a bar.

    The log-probability of an empty continuation is 0. Raises ValueError for an empty context, or a continuation of more
    than max_length tokens.
    """
    for context, continuation in requests:
        if not context:
            raise ValueError("a context must have at least one token, found none")
        if len(continuation) > max_length:
            raise ValueError(
                f"a continuation must have at most {max_length} tokens, which the model reads, "
                f"found {len(continuation)}"
            )
    device = next(model.parameters()).device
    sequences = [[*context, *continuation][-(max_length + 1) :] for context, continuation in requests]
    scores: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
    for rows in _batches(sequences, batch_size, "scoring", progress):
        width = max(len(sequences[row]) for row in rows) - 1
        if width == 0:  # only empty continuations are left
            continue
        inputs = torch.zeros(len(rows), width, dtype=torch.int64)  # padded on the right, which no token sees
        targets = torch.full((len(rows), width), IGNORED)
        for i, row in enumerate(rows):
            ids, counted = torch.tensor(sequences[row]), len(requests[row][1])
            inputs[i, : len(ids) - 1] = ids[:-1]
            targets[i, len(ids) - 1 - counted : len(ids) - 1] = ids[len(ids) - counted :]
        inputs, targets = inputs.to(device), targets.to(device)
        logits = real_logits(model, inputs)
        log_probabilities = -token_losses(logits, targets).double().sum(dim=1)
        greedy = ((logits.argmax(dim=-1) == targets) | (targets == IGNORED)).all(dim=1)
        for row, *score in zip(rows, log_probabilities.tolist(), greedy.tolist()):
            scores[row] = tuple(score)
    return scores


def continue_prompts(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int = 8,
    eos_token_id: int | None = None,
    stopped: Callable[[list[int]], bool] | None = None,
    progress: bool = True,
    **sampling,
) -> list[list[int]]:
    """The ids that the model writes after each prompt, at most max_new_tokens, without the end-of-text token.

    Arguments:
        model: a `GPTLMHeadModel` in evaluation mode.
        prompts: ids, at least one each. Batches are padded on the left, which changes nothing for the others.
        eos_token_id: ends a continuation.
        stopped: called with the new ids of a row after each; true ends the row.
        sampling: top_k, top_p, temperature and others of `GPTLMHeadModel.generate`; by default, the likeliest token.
    """
    device = next(model.parameters()).device
    found: list[list[int]] = [[] for _ in prompts]
    for rows in _batches(prompts, batch_size, "generating", progress):
        width = max(len(prompts[row]) for row in rows)
        input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for i, row in enumerate(rows):
            input_ids[i, width - len(prompts[row]) :] = torch.tensor(prompts[row])
            attention_mask[i, width - len(prompts[row]) :] = 1
        written = _Written(len(rows), eos_token_id, stopped)
        try:
            model.generate(
                input_ids.to(device),
                max_length=width + max_new_tokens,
                attention_mask=attention_mask.to(device),
                eos_token_id=eos_token_id,
                streamer=written,
                **sampling,
            )
        except _AllStopped:
            pass
        for row, ids in zip(rows, written.rows):
            found[row] = ids
    return found


class _AllStopped(Exception):
    pass


class _Written:
    """A streamer that keeps the new tokens of each row up to the end-of-text token, and ends decoding early."""

    def __init__(self, num_rows: int, eos_token_id: int | None, stopped: Callable[[list[int]], bool] | None) -> None:
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.done = [False] * num_rows
        self.eos_token_id, self.stopped = eos_token_id, stopped
        self.has_prompts = False

    def put(self, tokens: Tensor) -> None:
        if not self.has_prompts:
            self.has_prompts = True
            return
        for i, token in enumerate(tokens.tolist()):
            if not self.done[i]:
                if token == self.eos_token_id:
                    self.done[i] = True
                else:
                    self.rows[i].append(token)
                    self.done[i] = self.stopped is not None and self.stopped(self.rows[i])
        if all(self.done):
            raise _AllStopped

    def end(self) -> None:
        pass


def _batches(sequences, batch_size, title, progress):
    """Lists of at most batch_size indices into sequences, from the longest to the shortest, behind a bar."""
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    with tqdm(total=len(order), desc=title, unit="sequence", disable=not progress) as bar:
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            yield rows
            bar.update(len(rows))
