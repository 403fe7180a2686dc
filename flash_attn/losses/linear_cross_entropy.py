"""Cross entropy of a linear layer's outputs, without ever holding the logits of all tokens.

    loss = linear_cross_entropy(hidden, weight, labels)        # cross_entropy(hidden @ weight.T, labels)

Logits are computed for some rows at a time, and turned into gradients of hidden and weight immediately. Only these two
gradients are kept for the backward, not the logits. With 32768 tokens and 50304 classes in 16 bits, the logits take 3.3
GB, and autograd would hold them three times; chunk_bytes says how much of them there may be at a time. With the logits
z of a token (after softcap), its label y, s = logit_scale z and e = label_smoothing over V classes,

    loss = (1 - e) (lse - s_y) + e / V sum_j (lse - s_j) + lse_square_scale lse^2          lse = log sum_j exp(s_j)

and the result is the sum of token_weights * loss, for the mean divided by the sum of the token_weights. For
log-probabilities, entropy, and losses made of these, see `flash_attn.losses.linear_log_probs`.
"""

import dataclasses
import math
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flash_attn._ops import autograd, checks, invariance, log_probs, xentropy
from flash_attn.losses import _linear_head

_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    num_classes: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    return_z_loss: bool = False,
    chunk_size: int | None = None,
    process_group: ProcessGroup | None = None,
    sequence_parallel: bool = True,
    softcap: float = 0.0,
    token_weights: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of the logits hidden weight^T + bias, differentiable in hidden, weight and bias.

    Arguments:
        hidden: (..., features), float32, float16 or bfloat16. Under autocast the product is in its dtype.
        weight: (vocab, features) and bias (vocab,) or None, of the dtype of hidden unless autocast casts them.
        labels: int32 or int64, the shape of hidden without its features. A label that is neither a class nor
            ignore_index is an error on the CPU; on a GPU, where reading it would wait for the device, and in a compiled
            graph, it does not count.
        num_classes: how many rows of the weight are classes; the others, at its end, are padding. All if None.
        ignore_index, label_smoothing, logit_scale, lse_square_scale: as in `CrossEntropyLoss`.
        reduction: "mean" over the labels that count (NaN if there is none, with gradients of 0), "sum", or "none" for
            the loss of each token. With "none" the forward cannot make the gradients, as it does not know what becomes
            of the losses: the backward computes the logits again, a fourth product of the same size. A sum or mean
            with token_weights does without.
        return_z_loss: also return the z-loss, which is part of the loss and has no gradient of its own.
        chunk_size: how many rows of logits are held at a time. By default as many as take an eighth of the GPU's memory
            (1 GiB elsewhere), or what float32 sums of the gradient of the weight would: one chunk needs no such sums
            and is the fastest. Where the weight has no gradient, 512 MiB of logits.
        process_group: a group of processes that divide the rows of the weight among them. num_classes counts the
            classes of all processes. With sequence_parallel the first dimension of hidden is divided too, and is
            gathered; labels are given for all of the gathered hidden.
        softcap: above 0, a logit x becomes softcap * tanh(x / softcap), before logit_scale (as in Gemma 2).
        token_weights: a number for each label, of the shape of labels, by which its loss is multiplied, in float32,
            float16 or bfloat16; it may be 0 or negative, and has no gradient. A mean is divided by the sum of those
            that count. All 1 if None.
        chunk_bytes: instead of chunk_size, how many bytes of logits are held at a time on a GPU, with what is made of
            them; the loss and its gradients are as exact. Gradients come on top: those of hidden and weight, and, if
            there are several chunks, the sums of the latter in float32.

    Returns the loss, a float32 scalar, or of the shape of labels with reduction="none"; or (loss, z_loss).

    Raises TypeError or ValueError for arguments that do not fit together.

    >>> from flash_attn.losses.linear_cross_entropy import linear_cross_entropy
    >>> hidden, weight = torch.randn(2, 5, 64), torch.randn(1000, 64)
    >>> labels = torch.randint(1000, (2, 5))
    >>> linear_cross_entropy(hidden, weight, labels).shape
    torch.Size([])
    >>> linear_cross_entropy(hidden, weight, labels, reduction="none", chunk_bytes=2**14).shape
    torch.Size([2, 5])
    """
    _check_reduction(reduction)
    checks.flags(return_z_loss=return_z_loss, sequence_parallel=sequence_parallel)
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
    logit_scale, lse_square_scale, _ = xentropy.check_options(logit_scale, lse_square_scale, ignore_index)
    label_smoothing = xentropy.check_smoothing(label_smoothing)
    rule: _Rule | _CappedRule = _Rule(label_smoothing, logit_scale, lse_square_scale)
    if head.softcap > 0 and label_smoothing == 0 and log_probs.cap_in_kernels(hidden):
        rule, head = _CappedRule(logit_scale, lse_square_scale, head.softcap), head._replace(softcap=0.0)
        flat = torch.where(kept, flat, -1)
    token_weights = _check_token_weights(token_weights, labels, kept)
    plain = not torch.is_grad_enabled() or autograd.is_transformed(*tensors)
    if plain or reduction == "none":
        if plain:
            losses, z_losses, *_ = _linear_head.of_each_row(tensors, flat, kept, None, head, rule)
        else:
            losses, z_losses = _linear_head.Deferred.apply(*tensors, flat, kept, None, head, rule)
        total = _total(kept, token_weights) if reduction == "mean" else None
        loss, z_loss = (_reduced(x, token_weights, total, reduction, labels.shape) for x in (losses, z_losses))
    else:
        loss, z_loss, _ = _AtOnce.apply(*tensors, flat, kept, token_weights, head, rule, reduction == "mean")
    return (loss, z_loss) if return_z_loss else loss


class LinearCrossEntropyLoss(torch.nn.Module):
    """`linear_cross_entropy` as a module, with its options.

    >>> from flash_attn.losses.linear_cross_entropy import LinearCrossEntropyLoss
    >>> loss_fn = LinearCrossEntropyLoss(label_smoothing=0.1)
    >>> loss_fn(torch.randn(10, 64), torch.randn(1000, 64), torch.randint(1000, (10,))).shape
    torch.Size([])
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        process_group: ProcessGroup | None = None,
        return_z_loss: bool = False,
        num_classes: int | None = None,
        chunk_size: int | None = None,
        sequence_parallel: bool = True,
        chunk_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = dict(
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            logit_scale=logit_scale,
            lse_square_scale=lse_square_scale,
            process_group=process_group,
            return_z_loss=return_z_loss,
            num_classes=num_classes,
            chunk_size=chunk_size,
            sequence_parallel=sequence_parallel,
            chunk_bytes=chunk_bytes,
        )

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None = None,
        *,
        softcap: float = 0.0,
        token_weights: Tensor | None = None,
    ) -> Any:
        """The loss of hidden (..., features), weight (vocab, features), labels (...) and bias (vocab,) or None.

        softcap: as in `linear_cross_entropy`; an argument of the call because it belongs to the model, not to the loss.
        token_weights: as in `linear_cross_entropy`.
        """
        return linear_cross_entropy(
            hidden, weight, labels, bias, softcap=softcap, token_weights=token_weights, **self.options
        )

    def of_logits(
        self, logits: Tensor, labels: Tensor, *, softcap: float = 0.0, token_weights: Tensor | None = None
    ) -> Any:
        """The same loss of logits (..., vocab), by `cross_entropy_of_logits`, for a layer that must be called."""
        of_products = ("chunk_size", "chunk_bytes", "sequence_parallel")  # of which nothing is left to do
        options = {name: value for name, value in self.options.items() if name not in of_products}
        return cross_entropy_of_logits(logits, labels, softcap=softcap, token_weights=token_weights, **options)


def cross_entropy_of_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    num_classes: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    return_z_loss: bool = False,
    process_group: ProcessGroup | None = None,
    softcap: float = 0.0,
    token_weights: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The loss of `linear_cross_entropy`, from logits that a layer has returned: all of them are in memory.

    It is for layers whose logits are more than hidden weight^T + bias, as those with an adapter.

    Arguments:
        logits: (..., vocab), float32, float16 or bfloat16; with a group this process's part of the classes.
        labels: int32 or int64, the shape of logits without the classes.
        num_classes: how many of the logits, of all processes, are classes; the others, at their end, are padding.
        The others are those of `linear_cross_entropy`.

    Returns the loss, a float32 scalar, or of the shape of labels with reduction="none"; or (loss, z_loss). Raises
    TypeError or ValueError for arguments that do not fit.

    >>> from flash_attn.losses.linear_cross_entropy import cross_entropy_of_logits
    >>> cross_entropy_of_logits(torch.randn(2, 5, 1000), torch.randint(1000, (2, 5))).shape
    torch.Size([])
    """
    checks.tensor("logits", logits, dtypes=xentropy.DTYPES)
    checks.number("the number of dimensions of logits", logits.dim(), logits.dim() > 1, "at least 2")
    checks.tensor("labels", labels, dtypes=checks.INTEGER_DTYPES, shape=tuple(logits.shape[:-1]), device=logits.device)
    _check_reduction(reduction)
    limit = logits.shape[-1] * (1 if process_group is None else dist.get_world_size(process_group))
    if num_classes is not None:
        num_classes = checks.whole("num_classes", num_classes)
        checks.number("num_classes", num_classes, 0 < num_classes <= limit, "from 1 to {}, the logits", limit)
    classes = limit if num_classes is None else num_classes
    xentropy.check_classes(labels, classes, checks.whole("ignore_index", ignore_index))
    kept = xentropy.is_kept(labels.flatten(), ignore_index, classes)
    token_weights = _check_token_weights(token_weights, labels, kept)
    softcap = _linear_head.check_softcap(softcap)
    logits = softcap * torch.tanh(logits / softcap) if softcap > 0 else logits
    losses, z_losses, count = xentropy.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten(),
        None,
        label_smoothing,
        logit_scale,
        lse_square_scale,
        ignore_index,
        False,
        process_group,
        None,
        reduction if token_weights is None else "none",
        num_classes=num_classes,
    )
    if token_weights is not None and reduction == "mean":
        count = token_weights.sum()
    loss, z_loss = (_reduced(x, token_weights, count, reduction, labels.shape) for x in (losses, z_losses))
    return (loss, z_loss) if return_z_loss else loss


def _check_reduction(reduction):
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', found {reduction!r}")


def _check_token_weights(token_weights, labels, kept):
    """Check token_weights; return them as (rows,) in float32, 0 where a row does not count, or None."""
    if token_weights is None:
        return None
    checks.tensor(
        "token_weights", token_weights, dtypes=xentropy.DTYPES, shape=tuple(labels.shape), device=labels.device
    )
    if torch.is_grad_enabled() and token_weights.requires_grad:
        raise ValueError(
            "token_weights must not require grad, since no gradient is computed for them: multiply the losses of "
            "reduction='none' instead"
        )
    return torch.where(kept, token_weights.flatten().float(), 0)


def _total(kept, token_weights):
    """What a mean is divided by: the number of rows that count, or the sum of their weights."""
    return kept.sum() if token_weights is None else token_weights.sum()


def _reduced(losses, token_weights, total, reduction, shape):
    """Losses (rows,) to the result, where rows that do not count have losses of 0."""
    losses = losses if token_weights is None else losses * token_weights
    if reduction == "none":
        return losses.view(shape)
    if reduction == "sum":
        return losses.sum()
    # The mean of nothing is no number, but has a gradient of 0.
    return torch.where(total != 0, losses.sum() / torch.where(total != 0, total, 1), torch.nan)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The loss of each row, as `_linear_head.Deferred` wants it."""

    label_smoothing: float
    logit_scale: float
    lse_square_scale: float

    outputs: ClassVar[int] = 2
    differentiable: ClassVar[int] = 1

    def options(self, head):
        own = self.label_smoothing, self.logit_scale, self.lse_square_scale
        return *own, head.ignore_index, head.class_start, head.classes

    def values(self, logits, labels, _, head):
        losses, z_losses, lse, _ = xentropy.forward(logits, (labels, None, *self.options(head)), head.group)
        return losses, z_losses, lse

    def results(self, losses, z_losses, lse):
        return losses, z_losses, lse

    def overwrite(self, logits, labels, _, stored, incoming, head):
        (lse,), (dlosses,) = stored, incoming
        xentropy.bwd_(dlosses, logits, labels, lse, *self.options(head))

    def values_and_overwrite(self, dlosses, logits, labels, head):
        """The losses and z-losses, while the gradient takes the place of the logits."""
        if head.group is None and invariance.level() == 0:  # in one pass over the logits
            return xentropy.fwd_bwd_(dlosses, logits, labels, *self.options(head))[:2]
        losses, z_losses, lse = self.values(logits, labels, None, head)
        xentropy.bwd_(dlosses, logits, labels, lse, *self.options(head))
        return losses, z_losses


@dataclasses.dataclass(frozen=True)
class _CappedRule:
    """The same of logits after a softcap and without smoothing, made of the ops of log-probabilities.

    They read logits before the softcap, so that it takes no pass of its own. Labels that do not count are negative.
    """

    logit_scale: float
    lse_square_scale: float
    softcap: float

    outputs: ClassVar[int] = 2
    differentiable: ClassVar[int] = 1

    def scale(self, labels):
        return labels.new_full((), self.logit_scale, dtype=torch.float32).expand(labels.shape)

    def values(self, logits, labels, _, head):
        return log_probs.of_all_parts(logits, labels, self.scale(labels), self.softcap, head.class_start, head.group)

    def results(self, own, lse, mean):
        z_losses = self.lse_square_scale * lse.square()
        return (lse - own + z_losses).float(), z_losses.float(), lse, mean

    def overwrite(self, logits, labels, _, stored, incoming, head):
        (lse, mean), (dlosses,) = stored, incoming
        dlse = 2 * self.lse_square_scale * lse.float() * dlosses
        gradients = -dlosses, torch.zeros_like(dlse), dlse
        log_probs.bwd_(logits, labels, self.scale(labels), lse, mean, *gradients, self.softcap, head.class_start)

    def values_and_overwrite(self, dlosses, logits, labels, head):
        losses, z_losses, *stored = self.results(*self.values(logits, labels, None, head))
        self.overwrite(logits, labels, None, stored, (dlosses,), head)
        return losses, z_losses


class _AtOnce(torch.autograd.Function):
    """Computes the gradients of the loss in the forward; the backward multiplies them by that of the loss.

    So gradients are final where this is 1, and the backward only looks. In float16, though, those of a mean over many
    rows would underflow before a scale of the loss makes up for it: there the forward computes the gradients of a sum,
    and the backward divides.

    It has no second derivative, since the inputs are not saved. The third result is: an empty tensor with the history
    of the loss, so that a second derivative reaches the backward, which refuses it. The loss may be overwritten.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, kept, token_weights, head, rule, mean):
        ctx.set_materialize_grads(False)
        wanted = ctx.needs_input_grad[:3]
        total = _total(kept, token_weights) if mean else None
        gradients = _linear_head.Gradients(hidden, weight, bias, wanted, head) if any(wanted) else None
        if gradients is None:
            losses, z_losses, *_ = _linear_head.of_each_row((hidden, weight, bias), labels, kept, None, head, rule)
            found, left = [None] * 3, None
        else:
            dlosses, left = _expected(labels, token_weights, total, head.dtype, rule)
            losses, z_losses = _linear_head.run(
                hidden,
                weight,
                bias,
                labels,
                kept,
                head,
                lambda logits, y, rows: rule.values_and_overwrite(dlosses[rows], logits, y, head),
                gradients,
            )
            found = gradients.finish()
            ctx.dtypes = gradients.dtypes
        reduction = "mean" if mean else "sum"
        loss = _reduced(losses, token_weights, total, reduction, None)
        z_loss = torch.zeros_like(loss)
        if rule.lse_square_scale:
            z_loss = _reduced(z_losses, token_weights, total, reduction, None)
        origin = loss.new_empty(0)
        ctx.save_for_backward(origin, left, *found)
        ctx.saved_alone = autograd.is_saved_alone()
        ctx.mark_non_differentiable(z_loss)
        return loss, z_loss, origin

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx, dloss, *_):
        if dloss is None:
            return (None,) * 9
        _, left, *found = ctx.saved_tensors
        overwrites = ctx.saved_alone and autograd.may_overwrite_saved(dloss)
        if overwrites:
            ctx.maybe_clear_saved_tensors()  # else autograd would copy what it is given
        factor = dloss.float() if left is None else dloss.float() * left
        return *_linear_head.scaled(found, factor, ctx.dtypes, overwrites), *(None,) * 6


def _expected(labels, token_weights, total, dtype, rule):
    """Returns the gradients (rows,) of the losses that the forward computes with, and what is left to multiply by."""
    ones = labels.new_ones((), dtype=torch.float32)
    if dtype != torch.float16:
        one = ones if total is None else torch.where(total != 0, ones / total, 0)  # 0: of the mean of no losses
        return one.expand(labels.shape) if token_weights is None else one * token_weights, None
    # Gradients of rare classes are to be normal numbers. In a graph, products are rounded to float16 before they are
    # added, and must not overflow.
    unit = 2.0**-4 if torch.compiler.is_compiling() else 2.0**8
    steepest = rule.logit_scale * (1 + 64 * rule.lse_square_scale)  # of the loss over a logit, with an lse of up to 32
    unit /= 2.0 ** max(0, math.ceil(math.log2(steepest))) if steepest > 0 else 1
    if token_weights is None:
        dlosses, left = (ones * unit).expand(labels.shape), ones / unit
    else:
        largest = token_weights.abs().amax().clamp(min=torch.finfo(torch.float32).tiny) if len(labels) else ones
        dlosses, left = token_weights / largest * unit, largest / unit
    # The mean of no losses has a gradient of 0.
    return dlosses, left if total is None else torch.where(total != 0, left / total, 0)
