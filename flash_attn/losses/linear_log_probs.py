"""Log-probabilities of labels under a linear head, with their entropy, without ever holding the logits of all tokens.

    log_probs, entropy, lse = linear_log_probs(hidden, weight, labels, temperature=0.7)
    ratio = (log_probs - old_log_probs).exp()
    loss = -(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.01 * entropy).mean()
    loss.backward()

It is what reinforcement learning and distillation make their losses of: any function of the three has a gradient. With
the logits z of a token (after softcap), s = z / temperature, and p_j = exp(s_j - lse),

    lse = log sum_j exp(s_j)        log_probs = s_y - lse        entropy = -sum_j p_j log p_j = lse - sum_j p_j s_j

and for gradients a of log_probs, b of entropy and c of lse, the gradient of the logits is

    dz_j = (a [j = y] + p_j (c - a - b (log p_j + entropy))) / temperature

Logits are computed for some rows at a time, in the forward and again in the backward: one product more than for a loss
whose gradient the forward knows. A sum of log-probabilities with weights that do not depend on them is such a loss:
`linear_cross_entropy` with token_weights.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flash_attn._ops import autograd, checks, log_probs
from flash_attn.losses import _linear_head


class LogProbs(NamedTuple):
    """The results of `linear_log_probs`, each of the shape of the labels, in float32, with a gradient.

    Example:
        >>> from flash_attn.losses.linear_log_probs import linear_log_probs
        >>> results = linear_log_probs(torch.randn(5, 64), torch.randn(1000, 64), torch.randint(1000, (5,)))
        >>> results.log_probs.shape, results.entropy.shape, results.lse.shape
        (torch.Size([5]), torch.Size([5]), torch.Size([5]))
    """

    log_probs: Tensor
    entropy: Tensor
    lse: Tensor


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    num_classes: int | None = None,
    ignore_index: int = -100,
    softcap: float = 0.0,
    chunk_size: int | None = None,
    chunk_bytes: int | None = None,
    process_group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
) -> LogProbs:
    """Log-probabilities of the labels, entropy and log-sum-exp of the logits hidden weight^T + bias.

    They are differentiable in hidden, weight and bias, once.

    Arguments:
        hidden: (..., features), float32, float16 or bfloat16. Under autocast the product is in its dtype.
        weight: (vocab, features) and bias (vocab,) or None, of the dtype of hidden unless autocast casts them.
        labels: int32 or int64, the shape of hidden without its features: the tokens that follow. A label that is
            neither a class nor ignore_index is an error on the CPU; on a GPU, where reading it would wait for the
            device, and in a compiled graph, it does not count.
        temperature: a number, or one for each label, of the shape of labels and a floating dtype, without a gradient.
            It must be above 0; one on a GPU is not read to check it.
        num_classes: how many rows of the weight are classes; the others, at its end, are padding. All if None.
        ignore_index: the label of tokens that do not count: all their results and gradients are 0.
        softcap: above 0, a logit x becomes softcap * tanh(x / softcap), before the temperature (as in Gemma 2).
        chunk_size, chunk_bytes: how many rows, or bytes, of logits are held at a time, as in `linear_cross_entropy`.
        process_group, sequence_parallel: as in `linear_cross_entropy`, of processes that divide the rows of the weight.

    Returns `LogProbs`, that is (log_probs, entropy, lse).

    Raises TypeError or ValueError for arguments that do not fit together.

    >>> from flash_attn.losses.linear_log_probs import linear_log_probs
    >>> hidden, weight = torch.randn(2, 5, 64, requires_grad=True), torch.randn(1000, 64, requires_grad=True)
    >>> log_probs, entropy, lse = linear_log_probs(hidden, weight, torch.randint(1000, (2, 5)), temperature=0.7)
    >>> (log_probs.mean() + 0.01 * entropy.mean()).backward()
    >>> log_probs.shape, weight.grad.shape
    (torch.Size([2, 5]), torch.Size([1000, 64]))
    """
    checks.flags(sequence_parallel=sequence_parallel)
    tensors, flat, kept, head = _linear_head.prepare(
        hidden,
        weight,
        labels,
        bias,
        num_classes=num_classes,
        ignore_index=ignore_index,
        softcap=softcap,
        chunk_size=chunk_size,
        chunk_bytes=chunk_bytes,
        process_group=process_group,
        sequence_parallel=sequence_parallel,
    )
    scale = log_probs.inverse_of(temperature, labels)
    flat = torch.where(kept, flat, -1)
    rule, head = _Rule(head.softcap), head._replace(softcap=0.0)
    if not torch.is_grad_enabled() or autograd.is_transformed(*tensors):
        results = _linear_head.of_each_row(tensors, flat, kept, scale, head, rule)[: rule.outputs]
    else:
        results = _linear_head.Deferred.apply(*tensors, flat, kept, scale, head, rule)
    return LogProbs(*(x.view(labels.shape) for x in results))


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The three results of each row, as `_linear_head.Deferred` wants them."""

    softcap: float

    outputs: ClassVar[int] = 3
    differentiable: ClassVar[int] = 3

    def values(self, logits, labels, scale, head):
        return log_probs.of_all_parts(logits, labels, scale, self.softcap, head.class_start, head.group)

    def results(self, own, lse, mean):
        return (own - lse).float(), (lse - mean).float(), lse.float(), lse, mean

    def overwrite(self, logits, labels, scale, stored, incoming, head):
        log_probs.bwd_(logits, labels, scale, *stored, *incoming, self.softcap, head.class_start)
