"""Log-probabilities, their entropy and their normalizer, of logits and labels. The ops:

    log_probs_fwd(logits, labels, scale, softcap, class_start) -> (own, lse, mean)
    log_probs_bwd_(logits, labels, scale, lse, mean, dlog_probs, dentropy, dlse, softcap, class_start)

logits            (rows, vocab), fp32, fp16 or bf16: columns class_start .. class_start + vocab of all classes
labels            (rows,) int32 or int64: a class, or a negative number for a row that does not count
scale             (rows,) fp32, positive: the inverse of a temperature
softcap           above 0, logits z become softcap tanh(z / softcap)
own, lse, mean    (rows,) fp64, 0 for rows that do not count
dlog_probs, dentropy, dlse    (rows,) fp32: gradients of the log-probability, the entropy and the lse

With s = scale * logits (after softcap), the label y, and sums over these columns,

    lse = log sum_j exp(s_j)     own = s_y, or 0 if y is not among these columns     mean = sum_j exp(s_j - lse) s_j

so that own - lse is the log-probability of the label, and lse - mean the entropy. All three are in fp64, as both are
small differences of numbers that may be large; `joined` makes those of all columns from those of parts. bwd_ takes the
lse and mean of all columns, and replaces the logits by their gradient: with p_j = exp(s_j - lse),

    dlogits_j = scale (dlog_probs [j = y] + p_j (dlse - dlog_probs - dentropy (s_j - mean)))

times 1 - tanh^2 where there is a softcap.
"""

import math

import torch

from flash_attn import _library
from flash_attn._ops import autograd, checks, collectives, triton, xentropy
from flash_attn._reference import log_probs as reference


def of_all_parts(logits, labels, scale, softcap, class_start, group):
    """Returns `fwd` of all classes, of which each process of the group, if there is one, has a part."""
    if autograd.is_transformed(logits):  # in operations that have derivatives
        return reference.fwd(logits, labels, scale, softcap, class_start)
    results = fwd(logits, labels, scale, softcap, class_start)
    if group is None:
        return results
    parts, _ = collectives.gather_rows(torch.stack(results, 1), group)
    return joined(*parts.view(collectives.size(group), len(labels), 3).unbind(2), labels)


def inverse_of(temperature, labels):
    """Check the temperature; return 1 / temperature for each row, in float32."""
    is_tensor = isinstance(temperature, torch.Tensor)
    if not is_tensor or (temperature.dim() == 0 and not _library.is_where_kernels_run(temperature)):
        temperature = checks.as_float("temperature", temperature)
        checks.number("temperature", temperature, 0 < temperature < math.inf, "above 0 and finite")
        return labels.new_full((), 1 / temperature, dtype=torch.float32).expand(labels.numel())
    shape = tuple(labels.shape) if temperature.dim() > 0 else ()
    checks.tensor(
        "temperature",
        temperature,
        dtypes=(*xentropy.DTYPES, torch.float64),
        shape=shape,
        device=labels.device,
    )
    if torch.is_grad_enabled() and temperature.requires_grad:
        raise ValueError("temperature must not require grad, since no gradient is computed for it")
    if _library.can_be_read_at_once(temperature):
        wrong = temperature[~((temperature > 0) & (temperature < math.inf))]
        if wrong.numel() > 0:
            checks.number("temperature", wrong[0].item(), False, "above 0 and finite")
    return temperature.float().reciprocal().flatten().expand(labels.numel())


def cap_in_kernels(x):
    """Whether the ops read logits of x's device in kernels, so that a softcap costs nothing there."""
    return _library.is_where_kernels_run(x)


def joined(own, lse, mean, labels):
    """Returns (own, lse, mean) of all columns, from those (parts, rows) of parts of them."""
    of_all = lse.logsumexp(0)
    share = (lse - of_all).exp()
    mean = torch.where(share > 0, share * mean, 0).sum(0)
    return tuple(torch.where(labels >= 0, x, 0) for x in (own.sum(0), of_all, mean))


def _fwd_fake(logits, labels, *_):
    return tuple(logits.new_empty(labels.shape, dtype=torch.float64) for _ in range(3))


fwd = _library.define(
    "log_probs_fwd(Tensor logits, Tensor labels, Tensor scale, float softcap, SymInt class_start)"
    " -> (Tensor own, Tensor lse, Tensor mean)",
    reference=reference.fwd,
    fake=_fwd_fake,
    triton=triton.launch("log_probs", "fwd"),
)
bwd_ = _library.define(
    "log_probs_bwd_(Tensor(a!) logits, Tensor labels, Tensor scale, Tensor lse, Tensor mean, Tensor dlog_probs, "
    "Tensor dentropy, Tensor dlse, float softcap, SymInt class_start) -> ()",
    reference=reference.bwd_,
    fake=lambda *_: None,
    triton=triton.launch("log_probs", "bwd_"),
)
