"""Cross entropy of a linear layer's outputs, without ever holding the logits of all tokens.

    loss = linear_cross_entropy(hidden, weight, labels)        # cross_entropy(hidden @ weight.T, labels)

Logits are computed for some rows at a time, and turned into gradients of hidden and weight immediately. Only these two
gradients are kept for the backward, not the logits. With 32768 tokens and 50304 classes in 16 bits, the logits would
take 3.3 GB, and their gradient the same.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flash_attn._ops import autograd, checks, fused_dense, invariance, linear, xentropy
from flash_attn.utils.distributed import all_gather

_LOGITS = 2**28  # elements that are held at a time, unless chunk_size says otherwise
_REDUCTIONS = ("mean", "sum")


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of the logits hidden weight^T + bias, differentiable in hidden, weight and bias.

    Arguments:
        hidden: (..., features), float32, float16 or bfloat16. Under autocast the product is in its dtype.
        weight: (vocab, features) and bias (vocab,) or None, of the dtype of hidden unless autocast casts them.
        labels: int32 or int64, the shape of hidden without its features.
        num_classes: how many rows of the weight are classes; the others, at its end, are padding. All if None.
        ignore_index, label_smoothing, logit_scale, lse_square_scale: as in `CrossEntropyLoss`.
        reduction: "mean" over the labels that count (NaN if there is none, with gradients of 0) or "sum".
        return_z_loss: also return the z-loss, which is part of the loss and has no gradient of its own.
        chunk_size: how many rows of logits are held at a time; by default as many as have 2^28 elements.
        process_group: a group of processes that divide the rows of the weight among them. num_classes counts the
            classes of all processes. With sequence_parallel the first dimension of hidden is divided too, and is
            gathered; labels are given for all of the gathered hidden.
        softcap: above 0, a logit x becomes softcap * tanh(x / softcap), before logit_scale (as in Gemma 2).

    Returns the loss, a float32 scalar, or (loss, z_loss).

    Raises TypeError or ValueError for arguments that do not fit together.

    >>> hidden, weight = torch.randn(2, 5, 64), torch.randn(1000, 64)
    >>> linear_cross_entropy(hidden, weight, torch.randint(1000, (2, 5))).shape
    torch.Size([])
    """
    world_size, rank = 1, 0
    if process_group is not None:
        world_size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    group = process_group if world_size > 1 else None
    xentropy.check_transform(group, hidden, weight, bias)
    if process_group is not None and sequence_parallel:
        hidden = all_gather(hidden, process_group)
    classes = world_size * len(weight) if num_classes is None else checks.whole("num_classes", num_classes)
    dtype = _check(hidden, weight, labels, bias, classes, world_size, reduction)
    options = xentropy.check_options(logit_scale, lse_square_scale, ignore_index)
    rest = (xentropy.check_smoothing(label_smoothing), *options, rank * len(weight), classes)
    softcap = checks.as_float("softcap", softcap)
    checks.number("softcap", softcap, softcap >= 0, "at least 0")
    tensors, labels = (hidden.flatten(0, -2), weight, bias), labels.flatten()
    options = labels, dtype, rest, reduction == "mean", _rows_at_a_time(chunk_size, weight), group, softcap
    if not torch.is_grad_enabled() or autograd.is_transformed(*tensors):
        loss, z_loss, _ = _run(*tensors, None, *options)
    else:
        loss, z_loss = _LinearCrossEntropy.apply(*tensors, *options, not sequence_parallel)
    return (loss, z_loss) if return_z_loss else loss


class LinearCrossEntropyLoss(torch.nn.Module):
    """`linear_cross_entropy` as a module, with its options.

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
        )

    def forward(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, softcap: float = 0.0
    ) -> Any:
        """The loss of hidden (..., features), weight (vocab, features), labels (...) and bias (vocab,) or None.

        softcap: as in `linear_cross_entropy`; an argument of the call because it belongs to the model, not to the loss.
        """
        return linear_cross_entropy(hidden, weight, labels, bias, softcap=softcap, **self.options)

    def of_logits(self, logits: Tensor, labels: Tensor, *, softcap: float = 0.0) -> Any:
        """The same loss of logits (..., vocab), by `cross_entropy_of_logits`, for a layer that must be called."""
        of_products = ("chunk_size", "sequence_parallel")  # of which nothing is left to do
        options = {name: value for name, value in self.options.items() if name not in of_products}
        return cross_entropy_of_logits(logits, labels, softcap=softcap, **options)


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
) -> Tensor | tuple[Tensor, Tensor]:
    """The loss of `linear_cross_entropy`, from logits that a layer has returned: all of them are in memory.

    It is for layers whose logits are more than hidden weight^T + bias, as those with an adapter.

    Arguments:
        logits: (..., vocab), float32, float16 or bfloat16; with a group this process's part of the classes.
        labels: int32 or int64, the shape of logits without the classes.
        num_classes: how many of the logits, of all processes, are classes; the others, at their end, are padding.
        The others are those of `linear_cross_entropy`.

    Returns the loss, a float32 scalar, or (loss, z_loss). Raises TypeError or ValueError for arguments that do not fit.

    >>> cross_entropy_of_logits(torch.randn(2, 5, 1000), torch.randint(1000, (2, 5))).shape
    torch.Size([])
    """
    checks.tensor("logits", logits, dtypes=xentropy.DTYPES)
    checks.number("the number of dimensions of logits", logits.dim(), logits.dim() > 1, "at least 2")
    checks.tensor("labels", labels, dtypes=checks.INTEGER_DTYPES, shape=tuple(logits.shape[:-1]), device=logits.device)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be 'mean' or 'sum', found {reduction!r}")
    if num_classes is not None:
        num_classes = checks.whole("num_classes", num_classes)
        limit = logits.shape[-1] * (1 if process_group is None else dist.get_world_size(process_group))
        checks.number("num_classes", num_classes, 0 < num_classes <= limit, "from 1 to {}, the logits", limit)
    softcap = checks.as_float("softcap", softcap)
    checks.number("softcap", softcap, softcap >= 0, "at least 0")
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
        reduction,
        num_classes=num_classes,
    )
    loss, z_loss = (x.sum() if reduction == "sum" else x.sum() / count for x in (losses, z_losses))
    return (loss, z_loss) if return_z_loss else loss


def _check(hidden, weight, labels, bias, classes, world_size, reduction):
    """Check the arguments; return the dtype of the logits."""
    autocast = fused_dense.check_layer(hidden, weight, bias, ("hidden", "weight", "bias"))
    dtype = hidden.dtype if autocast is None else autocast
    checks.tensor("hidden", hidden, dtypes=xentropy.DTYPES)
    checks.number("the number of dimensions of hidden", hidden.dim(), hidden.dim() > 1, "at least 2")
    integers, shape = checks.INTEGER_DTYPES, tuple(hidden.shape[:-1])
    checks.tensor("labels", labels, dtypes=integers, shape=shape, device=hidden.device)
    limit = world_size * len(weight)
    checks.number("num_classes", classes, 0 < classes <= limit, "from 1 to {}, the rows of the weight", limit)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be 'mean' or 'sum', found {reduction!r}")
    return dtype


def _rows_at_a_time(chunk_size, weight):
    """Check chunk_size; return how many rows of logits are held at a time."""
    if chunk_size is None:
        return max(_LOGITS // max(len(weight), 1) // 128 * 128, 128)
    chunk_size = checks.whole("chunk_size", chunk_size)
    checks.number("chunk_size", chunk_size, chunk_size > 0, "positive")
    return chunk_size


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients of the sum of the losses; the backward scales them, in float32.

    It has no second derivative, since the inputs are not saved. The loss is, so that a second derivative finds their
    history and raises.

    For a mean over many rows, gradients in float16 would underflow before the scaling; those of a sum do not.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, dtype, rest, mean, chunk_size, group, softcap, sum_over_group):
        ctx.set_materialize_grads(False)
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], dtype)
        loss, z_loss, count = _run(
            hidden, weight, bias, gradients, labels, dtype, rest, mean, chunk_size, group, softcap
        )
        if group is not None and sum_over_group and gradients.hidden is not None:
            dist.all_reduce(gradients.hidden, group=group)
        ctx.save_for_backward(loss, count, gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.unit = gradients.unit
        ctx.mark_non_differentiable(z_loss)
        return loss, z_loss

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx, dloss, _):
        if dloss is None:
            return (None,) * 11
        _, count, *gradients = ctx.saved_tensors
        scale = torch.where(count > 0, dloss.float() / count / ctx.unit, 0)  # the mean of no losses has a gradient of 0
        return *(_scaled(x, scale, dtype) for x, dtype in zip(gradients, ctx.dtypes)), *(None,) * 8


class _Gradients:
    """The sums of the wanted gradients, to which each chunk of rows is added."""

    def __init__(self, hidden, weight, bias, wanted, dtype):
        self.unit = 2.0**-4 if dtype == torch.float16 else 1.0  # so that sums over many rows do not overflow
        self.hidden = hidden.new_empty(hidden.shape, dtype=dtype) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        self.bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None
        self.any = any(wanted)

    def add(self, rows, dlogits, hidden, weight):
        if self.hidden is not None:
            self.hidden[rows] = dlogits @ weight
        if self.weight is not None:
            self.weight += dlogits.t() @ hidden
        if self.bias is not None:
            self.bias += dlogits.sum(0, dtype=torch.float32)


def _run(hidden, weight, bias, gradients, labels, dtype, rest, mean, chunk_size, group, softcap):
    """Returns the loss, the z-loss and the number that their sums were divided by; adds to `gradients` unless None."""
    *_, ignore_index, class_start, classes = rest
    own = max(min(classes - class_start, len(weight)), 0)  # rows of the weight without padding
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    results = []
    for start in range(0, len(hidden), chunk_size):
        rows = slice(start, start + chunk_size)
        y = labels[rows]
        x = xentropy.without_others(hidden[rows].to(dtype), y, ignore_index, classes)
        logits = linear.product(x, weight, bias)
        if invariance.level():
            logits = invariance.with_aligned_rows(logits)
        real, slope = logits[:, :own], None
        if softcap > 0 and gradients is None:
            real = softcap * torch.tanh(real / softcap)
        elif softcap > 0:
            real.div_(softcap).tanh_()
            slope = 1 - real.square() if gradients.any else None  # the derivative of tanh, from its value
            real.mul_(softcap)
        makes_gradients = gradients is not None and gradients.any
        if makes_gradients:
            unit = x.new_full((), gradients.unit, dtype=torch.float32).expand(len(x))
        if makes_gradients and group is None and invariance.level() == 0:  # in one pass over the logits
            losses, z_losses, _, kept = xentropy.fwd_bwd_(unit, real, y, *rest)
        else:
            losses, z_losses, lse, kept = xentropy.forward(real, (y, None, *rest), group)
            if makes_gradients:
                xentropy.bwd_(unit, real, y, lse, *rest)
        results.append((losses, z_losses, kept))
        if makes_gradients:
            if slope is not None:
                real.mul_(slope)
            logits[:, own:] = 0
            gradients.add(rows, logits, x, weight)
    losses, z_losses, kept = map(torch.cat, zip(*results)) if results else hidden.new_empty(3, 0, dtype=torch.float32)
    count = kept.sum() if mean else losses.new_ones(())
    return losses.sum() / count, z_losses.sum() / count, count


def _scaled(x, scale, dtype):
    """x times a float32 number, rounded once."""
    if x is None:
        return None
    if x.dtype == torch.float32:
        return (x * scale).to(dtype)
    out = torch.empty_like(x, dtype=dtype)
    for source, target in zip(x.split(8192), out.split(8192)):
        target.copy_(source.float().mul_(scale))
    return out
