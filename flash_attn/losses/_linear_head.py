"""The logits of a linear head, some rows at a time, and the gradients of hidden, weight and bias that follow from them.

`linear_cross_entropy` and `linear_log_probs` share it: each says what becomes of some rows of logits, and `run` does
the rest. Logits are held by as many rows as `rows_at_a_time` allows.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from flash_attn._ops import autograd, checks, fused_dense, invariance, linear, xentropy
from flash_attn.utils.distributed import all_gather

# Bytes of logits that are held at a time where no argument says otherwise and the weight has no gradient. With one,
# they may take the SHARE-th part of a GPU's memory, elsewhere ON_CPU bytes: several products need sums in float32 and
# are slower, and all the logits at once are still a third of what autograd holds without this module.
BYTES, SHARE, ON_CPU = 2**29, 8, 2**30
_MULTIPLE = 128  # rows, of which the tiles of a product are made
_PARTS = 8  # of some rows of logits, of which one is in float32 at a time, while they are capped
_PIECE = 2**24  # elements that are in float32 at a time, while they are scaled and rounded


class Head(NamedTuple):
    """All that decides about logits but the tensors."""

    dtype: torch.dtype  # of the products
    classes: int  # in all parts of the vocabulary
    class_start: int  # the class of the first row of the weight
    ignore_index: int
    softcap: float  # that `run` applies
    rows: int  # that are held at a time
    group: dist.ProcessGroup | None  # of several processes that divide the vocabulary
    sums_hidden: bool  # whether each process needs the whole gradient of hidden


def prepare(
    hidden,
    weight,
    labels,
    bias,
    *,
    num_classes,
    ignore_index,
    softcap,
    chunk_size,
    chunk_bytes,
    process_group,
    sequence_parallel,
):
    """Check the arguments that all functions of a head share.

    Returns ((hidden, weight, bias), labels, kept, head), where hidden is gathered, (rows, features), and labels are
    (rows,), as is kept: whether each counts.
    """
    world_size, rank = 1, 0
    if process_group is not None:
        world_size, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    group = process_group if world_size > 1 else None
    xentropy.check_transform(group, hidden, weight, bias)
    if process_group is not None and sequence_parallel:
        hidden = all_gather(hidden, process_group)
    autocast = fused_dense.check_layer(hidden, weight, bias, ("hidden", "weight", "bias"))
    dtype = hidden.dtype if autocast is None else autocast
    checks.tensor("hidden", hidden, dtypes=xentropy.DTYPES)
    checks.number("the number of dimensions of hidden", hidden.dim(), hidden.dim() > 1, "at least 2")
    shape = tuple(hidden.shape[:-1])
    checks.tensor("labels", labels, dtypes=checks.INTEGER_DTYPES, shape=shape, device=hidden.device)
    limit = world_size * len(weight)
    classes = limit if num_classes is None else checks.whole("num_classes", num_classes)
    checks.number("num_classes", classes, 0 < classes <= limit, "from 1 to {}, the rows of the weight", limit)
    softcap = check_softcap(softcap)
    rows = rows_at_a_time(hidden, weight, dtype, softcap, chunk_size, chunk_bytes, is_divided=group is not None)
    ignore_index = checks.whole("ignore_index", ignore_index)
    head = Head(dtype, classes, rank * len(weight), ignore_index, softcap, rows, group, not sequence_parallel)
    labels = labels.flatten()
    xentropy.check_classes(labels, classes, ignore_index)
    return (hidden.flatten(0, -2), weight, bias), labels, xentropy.is_kept(labels, ignore_index, classes), head


def check_softcap(softcap):
    """Check softcap and return it as a float."""
    softcap = checks.as_float("softcap", softcap)
    checks.number("softcap", softcap, softcap >= 0, "at least 0")
    return softcap


def rows_at_a_time(hidden, weight, dtype, softcap, chunk_size, chunk_bytes, is_divided=False):
    """Check chunk_size and chunk_bytes; return how many rows of logits are held at a time.

    is_divided: among processes, which must hold equally many, whatever memory their GPUs have.
    """
    if chunk_size is not None and chunk_bytes is not None:
        raise ValueError(f"chunk_size must be None with chunk_bytes, found {chunk_size!r} and {chunk_bytes!r}")
    if chunk_size is not None:
        chunk_size = checks.whole("chunk_size", chunk_size)
        checks.number("chunk_size", chunk_size, chunk_size > 0, "positive")
        return chunk_size
    vocab = max(len(weight), 1)
    # At a level of batch invariance, a copy with aligned rows is made. What a softcap needs beside the logits is a part
    # of them in float32, twice; see `_capped`.
    of_row = vocab * dtype.itemsize * (2 if invariance.level() else 1)
    besides = 8 * vocab if softcap > 0 else 0
    of_row += besides // _PARTS
    tokens = max(hidden.numel() // max(hidden.shape[-1], 1), 1)
    if chunk_bytes is not None:
        chunk_bytes = checks.whole("chunk_bytes", chunk_bytes)
        what = "at least {}, the logits of a token"
        checks.number("chunk_bytes", chunk_bytes, chunk_bytes >= of_row + besides, what, of_row + besides)
        most = (chunk_bytes - besides) // of_row
        most = most // _MULTIPLE * _MULTIPLE or most
    else:
        limit = BYTES
        if torch.is_grad_enabled() and weight.requires_grad:
            # Several products need sums of the gradient in float32 beside it; logits may take as much in their place.
            own = ON_CPU if is_divided else xentropy.bytes_of_logits(hidden, SHARE, ON_CPU)
            limit = max(weight.numel() * 4, own)
        most = max(limit // of_row // _MULTIPLE, 1) * _MULTIPLE
    chunks = -(-tokens // most)
    # Chunks are of equal sizes, rather than a small one at the end.
    return min(-(-tokens // chunks // _MULTIPLE) * _MULTIPLE, most)


def run(hidden, weight, bias, labels, kept, head, of_logits, gradients=None):
    """Returns what of_logits(logits, labels, rows) gives for some rows after the other: float32 of each row, joined.

    Where gradients are wanted, of_logits overwrites the logits by theirs, and those of hidden, weight and bias are
    added to `gradients`. Logits are without padding of the vocabulary.
    """
    own = max(min(head.classes - head.class_start, len(weight)), 0)  # rows of the weight without padding
    weight, bias = weight.to(head.dtype), None if bias is None else bias.to(head.dtype)
    results = []
    for start in range(0, max(len(hidden), 1), head.rows):
        rows = slice(start, start + head.rows)
        # Zeros in rows that do not count: a NaN there must not reach any gradient.
        x = torch.where(kept[rows, None], hidden[rows].to(head.dtype), 0)
        logits = linear.product(x, weight, bias)
        if invariance.level():
            logits = invariance.with_aligned_rows(logits)
        real = logits[:, :own]
        if head.softcap > 0:
            step = max(min(head.rows, len(hidden)) // _PARTS, 1)
            for at in range(0, max(len(real), 1), step):
                part = slice(start + at, min(start + at + step, rows.stop))
                results.append(_capped(real[at : at + step], labels, part, head.softcap, of_logits, gradients))
        else:
            results.append(of_logits(real, labels[rows], rows))
        if gradients is not None:
            if own < len(weight):
                logits[:, own:] = 0
            gradients.add(rows, logits, x, weight)
        del logits, real  # before there are those of the next rows
    if len(results) == 1 or results[0] is None:
        return results[0]
    return tuple(map(torch.cat, zip(*results)))


def _capped(logits, labels, rows, softcap, of_logits, gradients):
    """What of_logits gives for softcap * tanh(logits / softcap), in float32; then their gradient is that of logits."""
    if gradients is None:
        return of_logits(softcap * torch.tanh(logits.float() / softcap), labels[rows], rows)
    tanh = torch.tanh(logits.float() / softcap)
    capped = softcap * tanh
    results = of_logits(capped, labels[rows], rows)
    torch.ops.aten.tanh_backward.grad_input(capped, tanh, grad_input=logits)  # in one pass, rounded once
    return results


class Gradients:
    """The gradients of hidden, weight and bias: sums over all rows, to which some rows are added at a time.

    Sums of several products, and those for a weight in float32, are in float32. So is all in float16, where the
    backward still has to scale what would be too large or too small.
    """

    def __init__(self, hidden, weight, bias, wanted, head):
        self.wanted = wanted
        self.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        self.one = len(hidden) <= head.rows
        self.rounds_late = head.dtype == torch.float16
        self.sums_in_float32 = not self.one or self.rounds_late or weight.dtype != head.dtype
        self.group = head.group if head.sums_hidden else None
        self.hidden = self.weight = self.bias = None
        if wanted[0] and not self.one:
            self.hidden = hidden.new_empty(hidden.shape, dtype=torch.float32 if self.rounds_late else head.dtype)

    def add(self, rows, dlogits, hidden, weight):
        if self.wanted[0]:
            if self.rounds_late:
                product = linear.add_product(None, dlogits, weight)
            elif self.one or torch.compiler.is_compiling():
                product = dlogits @ weight
            else:
                product = torch.mm(dlogits, weight, out=self.hidden[rows])
            if self.one:
                self.hidden = product
            elif self.rounds_late or torch.compiler.is_compiling():
                self.hidden[rows] = product
        if self.wanted[1] and self.sums_in_float32:
            self.weight = linear.add_product(self.weight, dlogits.t(), hidden)
        elif self.wanted[1]:
            self.weight = dlogits.t() @ hidden
        if self.wanted[2]:
            bias = dlogits.sum(0, dtype=torch.float32)
            self.bias = bias if self.bias is None else self.bias.add_(bias)

    def finish(self):
        """Returns the three gradients, None where they are not wanted, in the dtypes of hidden, weight and bias; but of
        float16 the sums, in float32."""
        if self.group is not None and self.hidden is not None:
            dist.all_reduce(self.hidden, group=self.group)
        found = [self.hidden, self.weight, self.bias]
        self.hidden = self.weight = self.bias = None
        return found if self.rounds_late else rounded(found, self.dtypes)


def rounded(gradients, dtypes):
    """Each gradient in its dtype; None for None."""
    for i, dtype in enumerate(dtypes):
        gradients[i] = None if gradients[i] is None else gradients[i].to(dtype)  # which frees the one before
    return gradients


def scaled(gradients, factor, dtypes, overwrites):
    """Each gradient times a float32 number, rounded once to its dtype; None for None.

    overwrites: they may be overwritten. On a GPU, one in its dtype is then neither read nor written if the number is 1.
    """
    one, counts = factor.new_ones(()), factor.new_ones((), dtype=torch.bool)
    results = []
    for x, dtype in zip(gradients, dtypes):
        if x is None:
            results.append(None)
        elif overwrites and x.dtype == dtype and x.is_contiguous() and type(x) is torch.Tensor:
            _scale_(x, factor, one, counts)
            results.append(x)
        else:
            results.append(_scaled(x, factor, dtype))
    return results


def _scale_(x, *numbers):
    """Multiply x by a number, by the kernel that compares it on the device with what was expected, and may end there.

    A few thousand thread blocks are enough to fill a GPU, and take no time if all that they do is to compare.
    """
    flat, blocks = x.view(-1), 4096
    even = x.numel() // blocks * blocks
    for part, rows in ((flat[:even], blocks), (flat[even:], 1)):
        if part.numel() > 0:
            xentropy.scale_(part.view(rows, -1), *(number.expand(rows) for number in numbers))


def _scaled(x, factor, dtype):
    if x.dtype == dtype == torch.float32 or x.numel() <= _PIECE or torch.compiler.is_compiling():
        return (x.float() * factor).to(dtype)
    out, rows = torch.empty_like(x, dtype=dtype), max(_PIECE // max(x[:1].numel(), 1), 1)
    for source, target in zip(x.split(rows), out.split(rows)):
        target.copy_(source.float() * factor)
    return out


class Deferred(torch.autograd.Function):
    """Values of each row whose gradient comes only with the backward, which computes the logits again.

    rule: an object with three methods. values(logits, labels, scale, head) gives float tensors (rows,) of some rows.
        results(*values of all rows) gives those that are returned, of which there are `outputs`, the first
        `differentiable` with a gradient, and then those that are stored for the backward. overwrite(logits, labels,
        scale, stored, incoming, head) replaces logits by their gradient. scale is the part of `scale` (all rows,) for
        these rows, or None.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, kept, scale, head, rule):
        values = of_each_row((hidden, weight, bias), labels, kept, scale, head, rule)
        ctx.save_for_backward(hidden, weight, bias, labels, kept, scale, *values[rule.outputs :])
        ctx.head, ctx.rule = head, rule
        ctx.set_materialize_grads(False)
        outputs = values[: rule.outputs]
        ctx.mark_non_differentiable(*outputs[rule.differentiable :])
        return outputs

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx, *incoming):
        if all(x is None for x in incoming):
            return (None,) * 8
        hidden, weight, bias, labels, kept, scale, *stored = ctx.saved_tensors
        head, rule = ctx.head, ctx.rule
        incoming = [
            labels.new_zeros(labels.shape, dtype=torch.float32) if x is None else x
            for x in incoming[: rule.differentiable]
        ]
        gradients = Gradients(hidden, weight, bias, ctx.needs_input_grad[:3], head)

        def overwrite(logits, y, rows):
            each = None if scale is None else scale[rows]
            rule.overwrite(logits, y, each, [x[rows] for x in stored], [x[rows] for x in incoming], head)

        with fused_dense.without_autocast(hidden):  # as in the forward, which has cast what it multiplies
            run(hidden, weight, bias, labels, kept, head, overwrite, gradients)
        return *rounded(gradients.finish(), gradients.dtypes), *(None,) * 5


def of_each_row(tensors, labels, kept, scale, head, rule):
    """The values of `rule` for all rows, without a gradient of this module's."""
    values = run(
        *tensors,
        labels,
        kept,
        head,
        lambda logits, y, rows: rule.values(logits, y, None if scale is None else scale[rows], head),
    )
    return rule.results(*values)
