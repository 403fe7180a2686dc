"""Cross entropy of logits and labels. The ops, of which those with a trailing _ write to an argument:

    xentropy_fwd(logits, labels, lse, options) -> (losses, z_losses, lse, kept)
    xentropy_bwd, xentropy_bwd_(dlosses, logits, labels, lse, options) -> dlogits, which bwd_ writes over the logits
    xentropy_fwd_bwd, xentropy_fwd_bwd_(dlosses, logits, labels, options) -> (losses, z_losses, lse, kept, dlogits)
    xentropy_redo_(dlogits, dlosses, expected, logits, labels, lse, options)
    xentropy_scale_(dlogits, dlosses, expected, kept)

logits            (rows, vocab), fp32, fp16 or bf16: columns class_start .. class_start + vocab of total_classes
labels            (rows,) int32 or int64: a class of all total_classes
lse               (rows,) fp64 or None: the log-sum-exp of the rows, if it is known; not with a logit_scale or smoothing
options           label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, total_classes
ignore_index      rows with this label, or with one that is no class, do not count. None: every row counts

With s = logit_scale * logits and the label y, for rows that count (the others give zeros), and sums over these columns:

    lse = log sum_j exp(s_j)        z_losses = lse_square_scale lse^2        kept: whether a row counts
    losses = (1 - label_smoothing) (lse - s_y) + label_smoothing / total_classes sum_j (lse - s_j) + z_losses

If the label is not among these columns, the term with s_y is missing: where they are a part of the classes, losses are
this part's share, with an lse of its own. An lse of 30000 in fp32 would be off by up to 1e-3, and with it softmax and
losses: so it has fp64, and all else is computed in fp32 from differences of logits. The gradient has the dtype of the
logits, and takes the lse of all parts:

    dlogits_j = dlosses logit_scale (exp(s_j - lse) (1 + 2 lse_square_scale lse)
                                     - (1 - label_smoothing) [j = y] - label_smoothing / total_classes)

fwd is differentiable in logits, twice, through losses only.

fwd_bwd computes losses and gradient while a row is on the chip, and so reads the logits once instead of twice. For that
it needs the dlosses before the backward: the forward of a training step passes those that it expects. Where the
backward then gets others, redo_ computes these rows of dlogits again, equal to those of bwd. If dlogits have
overwritten the logits, scale_ multiplies the rows by dlosses / expected instead, which rounds them once more. Both
compare the dlosses on the device, so that nothing waits for them; rows whose dlosses were as expected are neither read
nor written.
"""

import torch
import torch.distributed as dist

from flash_attn import _library, _torch_private
from flash_attn._ops import autograd, checks, collectives, invariance, sharding, triton
from flash_attn._reference import xentropy as reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# By default the forward makes the gradient from these sizes on. Below them a separate backward is as fast or faster,
# because rows are short or the logits are still in the L2 cache. On an H200, 16384 x 8192 and 2048 x 32000 logits of 16
# bits gained, 16384 x 4096 and 1024 x 50304 did not.
LEAST_CLASSES_AT_ONCE, LEAST_BYTES_AT_ONCE = 8192, 120_000_000


def cross_entropy(
    logits,
    labels,
    precomputed_lse,
    label_smoothing,
    logit_scale,
    lse_square_scale,
    ignore_index,
    inplace_backward,
    process_group,
    gradient_in_forward,
    reduction="none",
    expectation=None,
    num_classes=None,
):
    """Check the arguments of `flash_attn.ops.triton.cross_entropy.cross_entropy_loss` and compute it.

    reduction: what the caller will do with the losses; it is not done here. gradient_in_forward: with None, the size of
    the logits decides. expectation: the `Expectation` of the gradient of the caller's loss; None expects 1.
    num_classes: how many columns of all processes are classes; the others, at the end, are padding. Returns
    (losses, z_losses, count), where count is the number of rows that count, or None if the reduction is not "mean".
    """
    label_smoothing = check(logits, labels, label_smoothing)
    if precomputed_lse is not None:
        check_row_values("precomputed_lse", precomputed_lse, logits, (torch.float32, torch.float64))
    logit_scale, lse_square_scale, ignore_index = check_options(logit_scale, lse_square_scale, ignore_index)
    checks.flags(inplace_backward=inplace_backward)
    if gradient_in_forward is not None:
        checks.flags(gradient_in_forward=gradient_in_forward)
    vocab, parts, part = logits.shape[1], 1, 0
    if process_group is not None:
        parts, part = dist.get_world_size(process_group), dist.get_rank(process_group)
    classes, class_start = parts * vocab if num_classes is None else num_classes, part * vocab
    if class_start + vocab > classes:
        logits = logits[:, : max(classes - class_start, 0)]
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        logits = logits.contiguous()
    if invariance.level():
        logits = invariance.with_aligned_rows(logits)
    lse_serves = logit_scale == 1 and label_smoothing == 0
    known_lse = precomputed_lse.double() if precomputed_lse is not None and lse_serves else None
    rest = (labels, known_lse, label_smoothing, logit_scale, lse_square_scale, ignore_index, class_start, classes)
    group = process_group if parts > 1 else None
    check_transform(group, logits)
    if not fwd.wants_derivative((logits,)):
        losses, z_losses, _, kept = forward(logits, rest, group)
        return losses, z_losses, kept.sum() if reduction == "mean" else None
    eager = _is_eager(logits)
    in_place = bool(inplace_backward) and eager
    if in_place:
        checks.own_memory(logits=logits)
    if gradient_in_forward is None and eager:
        gradient_in_forward = reduction != "none" and not in_place and _gains_at_once(logits)
    at_once = gradient_in_forward and eager and group is None and known_lse is None
    at_once = at_once and invariance.level() == 0  # a kernel that adds up a row in another order
    if at_once and _serves_at_once(logits, in_place):
        _, _, *options = rest
        count = is_kept(labels, ignore_index, classes).sum() if reduction == "mean" else None
        dloss = (expectation or Expectation()).dloss(labels)
        expected = dloss.clone() if count is None else dloss / count  # not what a backward will write to
        losses, z_losses = _BothAtOnce.apply(logits, labels, expected.expand(labels.shape), options, in_place)
        return losses, z_losses, count
    if group is None and not in_place:
        losses, z_losses, _, kept = fwd(logits, *rest)
    else:
        losses, z_losses, _, kept = _CrossEntropy.apply(logits, rest, group, in_place)
    return losses, z_losses, kept.sum() if reduction == "mean" else None


class Expectation:
    """The gradient that a loss is expected to get: that of its last backward, or 1 before the first.

    It stays on the device, so that nothing waits for it. A wrong expectation costs time, not correctness. A gradient of
    0, one that is not finite, and one so small or large that its products in 16 bits would lose digits are not expected
    again: dlogits made with them could not be scaled to those of another gradient.
    """

    LEAST, MOST = 2.0**-60, 2.0**60

    def __init__(self):
        self._dloss = None

    @property
    def value(self):
        """What is expected, as a float, so that what is resumed goes on alike; None before it was ever asked for."""
        return None if self._dloss is None else self._dloss.item()

    @value.setter
    def value(self, value):
        self._dloss = None if value is None else torch.tensor(value, dtype=torch.float32)

    def dloss(self, labels):
        """A float32 scalar beside the labels."""
        dloss = self._dloss
        if dloss is None or dloss.device != labels.device or type(dloss) is not type(labels):
            known = dloss is not None and _library.can_be_read_at_once(dloss)
            value = dloss.item() if known else 1.0
            dloss = self._dloss = labels.new_full((), value, dtype=torch.float32)
        return dloss

    def watch(self, loss):
        """Let the backward of the loss record its gradient, if `dloss` has ever been asked for."""
        if self._dloss is not None and loss.requires_grad and _is_eager(loss):
            loss.register_hook(self._note)

    def _note(self, dloss):
        if _is_eager(dloss):
            size = dloss.detach().abs()
            usable = (size >= self.LEAST) & (size <= self.MOST)
            self._dloss.copy_(torch.where(usable, dloss.detach(), self._dloss))


def _is_eager(x):
    """Whether `x` is an ordinary tensor, not compiled, transformed or a batch of gradients: it may be written to."""
    return not (torch.compiler.is_compiling() or autograd.is_transformed(x) or _torch_private.is_legacy_batch(x))


def _gains_at_once(logits):
    large = logits.numel() * logits.element_size() >= LEAST_BYTES_AT_ONCE
    return logits.shape[1] >= LEAST_CLASSES_AT_ONCE and large


def _serves_at_once(logits, in_place):
    """Whether a gradient that is made in the forward can be used in the backward, and is worth it."""
    if _torch_private.saved_tensors_have_hooks():  # an activation checkpoint would make it twice and drop the first
        return False
    if in_place:  # in float16, small gradients would vanish before the backward scales them
        return logits.dtype != torch.float16
    # dlogits are contiguous. Logits whose rows are aligned differently would have to be copied, forward and backward.
    starts = logits.storage_offset(), logits.stride(0) - logits.shape[1]
    return all(start * logits.element_size() % 16 == 0 for start in starts)


def bytes_of_logits(x, share, otherwise):
    """How much of the memory of x's GPU logits may take, one of `share` parts; `otherwise` on other devices."""
    memory = _library.memory_of_device(x)
    return otherwise if memory is None else memory // share


is_kept = reference.is_kept  # (labels, ignore_index, classes): which rows count


def check(logits, labels, label_smoothing):
    """Check the arguments that all cross entropy functions share. Returns label_smoothing as a float."""
    checks.tensor("logits", logits, dtypes=DTYPES)
    checks.ndim("logits", logits, "(rows, vocab)")
    shape, device = logits.shape[:1], logits.device
    checks.tensor("labels", labels, dtypes=checks.INTEGER_DTYPES, shape=shape, device=device)
    return check_smoothing(label_smoothing)


def check_smoothing(label_smoothing):
    """Check label_smoothing and return it as a float."""
    label_smoothing = checks.as_float("label_smoothing", label_smoothing)
    checks.number("label_smoothing", label_smoothing, 0 <= label_smoothing <= 1, "between 0 and 1")
    return label_smoothing


def check_options(logit_scale, lse_square_scale, ignore_index):
    """Check these options and return them as two floats and an int."""
    logit_scale = checks.as_float("logit_scale", logit_scale)
    checks.number("logit_scale", logit_scale, logit_scale > 0, "positive")
    lse_square_scale = checks.as_float("lse_square_scale", lse_square_scale)
    return logit_scale, lse_square_scale, checks.whole("ignore_index", ignore_index)


def check_classes(labels, classes, ignore_index=-100, name="labels"):
    """Check that labels are classes or ignore_index, where they can be read without waiting."""
    if not _library.can_be_read_at_once(labels):
        return
    wrong = labels[(labels != ignore_index) & ((labels < 0) | (labels >= classes))]
    if wrong.numel() > 0:
        found = wrong[0].item()
        checks.number(name, found, False, f"{ignore_index} or from 0 to {{}}", classes - 1)


def check_row_values(name, value, logits, dtypes=(torch.float32,)):
    """Check that `value` has a number of one of these dtypes for each row of the logits."""
    checks.tensor(name, value, dtypes=dtypes, shape=logits.shape[:1], device=logits.device)


def check_transform(group, *tensors):
    """Check that no tangent and no transform of torch.func must pass through the sums over a group of processes."""
    if group is not None and autograd.is_transformed(*tensors):
        raise NotImplementedError(
            "process_group must be None, or of one process, in forward mode and in transforms of torch.func: "
            f"found a group of {dist.get_world_size(group)} processes"
        )


def forward(logits, rest, group):
    """Returns the results of `fwd` for all classes; each process of the group has one part of them."""
    if group is None:
        return fwd(logits, *rest)
    labels, lse, label_smoothing, logit_scale, lse_square_scale, *others, class_start, total_classes = rest
    losses, _, lse, kept = fwd(
        logits, labels, lse, label_smoothing, logit_scale, 0.0, *others, class_start, total_classes
    )
    of_parts, _ = collectives.gather_rows(lse, group)
    of_all = of_parts.view(collectives.size(group), len(lse)).logsumexp(dim=0)
    # The share of this part, which has its own lse so far, gets that of all.
    vocab = logits.shape[1]
    is_own = (labels >= class_start) & (labels < class_start + vocab)
    weight = (1 - label_smoothing) * is_own.double() + label_smoothing * vocab / max(total_classes, 1)
    losses = losses + torch.where(weight > 0, weight * (of_all - lse), 0).float()
    # If all logits of this part are -inf, so is its lse, and its share of the loss is +inf: not the sum of both.
    losses = torch.where((weight > 0) & lse.isneginf(), (of_all - lse).float(), losses)
    if label_smoothing:  # else one process has a loss, and the others 0
        invariance.refuse_sums_of_many(collectives.size(group), least=1)
    losses, _ = collectives.reduce(losses, group)
    z_losses = lse_square_scale * of_all.square().float() if lse_square_scale else torch.zeros_like(losses)
    losses, z_losses, lse = (torch.where(kept, x, 0) for x in (losses + z_losses, z_losses, of_all))
    return losses, z_losses, lse, kept


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, rest, group=None, inplace_backward=False):
        losses, z_losses, lse, kept = forward(logits, rest, group)
        labels, _, *ctx.options = rest
        ctx.group, ctx.inplace_backward = group, inplace_backward
        ctx.save_for_backward(logits, labels, lse)
        ctx.mark_non_differentiable(z_losses, lse, kept)
        ctx.set_materialize_grads(False)  # gradients of the last three would be zeros, and cost a kernel each
        return losses, z_losses, lse, kept

    @staticmethod
    def backward(ctx, dlosses, *_):
        if dlosses is None:
            return None, None, None, None
        logits, labels, lse = ctx.saved_tensors
        options, group = ctx.options, ctx.group
        if ctx.inplace_backward and not torch.is_grad_enabled():
            bwd_(dlosses, logits, labels, lse, *options)
            return logits.detach(), None, None, None

        def first(dlosses, logits):
            return (bwd(dlosses, logits, labels, lse, *options),)

        def again(dlosses, logits):
            if group is not None:
                raise RuntimeError("trying to differentiate twice a cross entropy that is divided among processes")
            return (_bwd_composite(dlosses, logits, labels, *options),)

        return *autograd.first_or_second(first, again, dlosses, logits), None, None, None


@autograd.in_plain_torch
def _fwd_composite(logits, labels, lse, *options):
    """The same as `fwd`. A given lse is computed again, since it depends on the logits."""
    losses, z_losses, lse, kept = reference.fwd(logits, labels, None, *options)
    return losses, z_losses.detach(), lse.detach(), kept


@autograd.in_plain_torch
def _bwd_composite(dlosses, logits, labels, *options):
    """The same as `bwd`. The lse is computed here, since it depends on the logits."""
    _, _, lse, _ = reference.fwd(logits, labels, None, *options)
    return reference.bwd(dlosses, logits, labels, lse, *options)


class _BothAtOnce(torch.autograd.Function):
    """Makes dlogits in the forward, for the dlosses that are expected. Its backward corrects rows where others came.

    With in_place, forward and backward overwrite the logits. Each advances their version, so that autograd notices if
    somebody else still needs them.
    """

    @staticmethod
    def forward(ctx, logits, labels, expected, options, in_place):
        op = fwd_bwd_ if in_place else fwd_bwd
        losses, z_losses, lse, kept, *dlogits = op(expected, logits, labels, *options)
        ctx.options = options
        ctx.in_place = in_place
        ctx.dlogits = dlogits  # for the first backward, which returns it; a second one computes its own
        ctx.save_for_backward(logits, labels, lse, kept, expected)
        ctx.mark_non_differentiable(z_losses)
        ctx.set_materialize_grads(False)
        return losses, z_losses

    @staticmethod
    def backward(ctx, dlosses, _):
        if dlosses is None:
            return (None,) * 5
        logits, labels, lse, kept, expected = ctx.saved_tensors
        options, in_place, made = ctx.options, ctx.in_place, ctx.dlogits

        def first(dlosses, logits):
            if in_place:
                scale_(logits, dlosses, expected, kept)
                return (logits.detach(),)
            if not made or not _is_eager(dlosses):
                return (bwd(dlosses, logits, labels, lse, *options),)
            dlogits = made.pop()
            redo_(dlogits, dlosses, expected, logits, labels, lse, *options)
            return (dlogits,)

        def again(dlosses, logits):
            if in_place:
                raise RuntimeError(
                    "trying to differentiate twice a cross entropy whose gradient has overwritten the logits in the "
                    "forward: set inplace_backward or gradient_in_forward to False"
                )
            return (_bwd_composite(dlosses, logits, labels, *options),)

        return *autograd.first_or_second(first, again, dlosses, logits), *(None,) * 4


def _fwd_fake(logits, labels, *_):
    losses = logits.new_empty(labels.shape, dtype=torch.float32)
    lse, kept = (torch.empty_like(losses, dtype=dtype) for dtype in (torch.float64, torch.bool))
    return losses, torch.empty_like(losses), lse, kept


def _bwd_fake(dlosses, logits, *_):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_OPTIONS = (
    "float label_smoothing, float logit_scale, float lse_square_scale, int? ignore_index, SymInt class_start, "
    "SymInt total_classes"
)

fwd = _library.define(
    f"xentropy_fwd(Tensor logits, Tensor labels, Tensor? lse, {_OPTIONS})"
    " -> (Tensor losses, Tensor z_losses, Tensor lse, Tensor kept)",
    reference=reference.fwd,
    fake=_fwd_fake,
    autograd=_CrossEntropy,
    differentiable=1,
    composite=invariance.refusing(_fwd_composite),
    triton=triton.launch("xentropy", "fwd"),
    sharding=sharding.xentropy_fwd,
)
bwd = _library.define(
    f"xentropy_bwd(Tensor dlosses, Tensor logits, Tensor labels, Tensor lse, {_OPTIONS}) -> Tensor",
    reference=reference.bwd,
    fake=_bwd_fake,
    triton=triton.launch("xentropy", "bwd"),
    sharding=sharding.xentropy_bwd,
)
bwd_ = _library.define(
    f"xentropy_bwd_(Tensor dlosses, Tensor(a!) logits, Tensor labels, Tensor lse, {_OPTIONS}) -> ()",
    reference=reference.bwd_,
    fake=lambda *_: None,
    triton=triton.launch("xentropy", "bwd_"),
    sharding=sharding.xentropy_bwd_,
)
fwd_bwd = _library.define(
    f"xentropy_fwd_bwd(Tensor dlosses, Tensor logits, Tensor labels, {_OPTIONS})"
    " -> (Tensor losses, Tensor z_losses, Tensor lse, Tensor kept, Tensor dlogits)",
    reference=reference.fwd_bwd,
    fake=lambda dlosses, *args: (*_fwd_fake(*args), _bwd_fake(dlosses, *args)),
    triton=triton.launch("xentropy", "fwd_bwd"),
    sharding=sharding.xentropy_fwd_bwd,
)
fwd_bwd_ = _library.define(
    f"xentropy_fwd_bwd_(Tensor dlosses, Tensor(a!) logits, Tensor labels, {_OPTIONS})"
    " -> (Tensor losses, Tensor z_losses, Tensor lse, Tensor kept)",
    reference=reference.fwd_bwd_,
    fake=lambda _, *args: _fwd_fake(*args),
    triton=triton.launch("xentropy", "fwd_bwd_"),
    sharding=sharding.xentropy_fwd_bwd_,
)
redo_ = _library.define(
    "xentropy_redo_(Tensor(a!) dlogits, Tensor dlosses, Tensor expected, Tensor logits, Tensor labels, Tensor lse, "
    f"{_OPTIONS}) -> ()",
    reference=reference.redo_,
    fake=lambda *_: None,
    triton=triton.launch("xentropy", "redo_"),
    sharding=sharding.xentropy_redo_,
)
scale_ = _library.define(
    "xentropy_scale_(Tensor(a!) dlogits, Tensor dlosses, Tensor expected, Tensor kept) -> ()",
    reference=reference.scale_,
    fake=lambda *_: None,
    triton=triton.launch("xentropy", "scale_"),
    sharding=sharding.xentropy_scale_,
)
