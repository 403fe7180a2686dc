"""Drawing tokens from logits: top-k and top-p filters, temperature, repetition penalty.

tokens = sample(logits, top_k=40, top_p=0.9, temperature=0.8)               # (batch, vocab) -> (batch,)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn._ops import checks


def modify_logits_for_top_k_filtering(logits: Tensor, top_k: int) -> None:
    """Set logits (..., vocab) to -inf, in place, except the top_k greatest; logits equal to the last of these stay.

    >>> from flash_attn.utils.generation import modify_logits_for_top_k_filtering
    >>> logits = torch.tensor([1.0, 3.0, 2.0])
    >>> modify_logits_for_top_k_filtering(logits, 2)
    >>> logits
    tensor([-inf, 3., 2.])
    """
    least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
    logits.masked_fill_(logits < least, float("-inf"))


def modify_logits_for_top_p_filtering(logits: Tensor, top_p: float) -> None:
    """Keep the likeliest tokens that together have probability top_p; set the other logits (..., vocab) to -inf.

    The change is in place (nucleus sampling: Holtzman et al., arXiv:1904.09751). The likeliest token always stays.
    Nothing changes for a top_p of 0 or less, or of 1 or more.

    >>> from flash_attn.utils.generation import modify_logits_for_top_p_filtering
    >>> logits = torch.tensor([1.0, 3.0, 2.0])
    >>> modify_logits_for_top_p_filtering(logits, 0.5)
    >>> logits
    tensor([-inf, 3., -inf])
    """
    if top_p <= 0.0 or top_p >= 1.0:
        return
    ascending, indices = logits.sort(dim=-1)
    unlikely = ascending.softmax(dim=-1, dtype=torch.float32).cumsum(dim=-1) <= 1 - top_p
    unlikely[..., -1] = False
    logits.masked_fill_(unlikely.scatter(-1, indices, unlikely), float("-inf"))


def modify_logits_for_repetition_penalty(logits: Tensor, tokens: Tensor, repetition_penalty: float) -> None:
    """Make `tokens` (batch, length) less likely in logits (batch, vocab), in place.

    Positive logits are divided by repetition_penalty, others multiplied by it (Keskar et al., arXiv:1909.05858).
    Raises ValueError, which waits for the device, if a token is not in the vocabulary.

    >>> from flash_attn.utils.generation import modify_logits_for_repetition_penalty
    >>> logits = torch.tensor([[1.0, 3.0, -2.0]])
    >>> modify_logits_for_repetition_penalty(logits, torch.tensor([[1, 2]]), 2.0)
    >>> logits
    tensor([[ 1.0000,  1.5000, -4.0000]])
    """
    if repetition_penalty == 1.0:
        return
    _check_in_vocabulary("tokens", tokens, logits.shape[-1])
    _penalise(logits, tokens, repetition_penalty)


def sample(logits: Tensor, top_k: int = 1, top_p: float = 0.0, temperature: float = 1.0) -> Tensor:
    """Draw a token from each row of logits (batch, vocab), which are not changed.

    Arguments:
        top_k: draw from the top_k likeliest tokens; 1 takes the likeliest and ignores the other options, 0 means all.
        top_p: draw from the likeliest tokens that together have this probability; 0 or 1 means all.
        temperature: logits are divided by it.

    Returns int64 (batch,). Raises TypeError or ValueError for options that are out of range.

    >>> from flash_attn.utils.generation import sample
    >>> sample(torch.tensor([[1.0, 3.0, 2.0], [5.0, 3.0, 2.0]]))
    tensor([1, 0])
    """
    top_k, top_p, temperature = _check_sampling(top_k, top_p, temperature)
    if top_k == 1:
        return logits.argmax(dim=-1)
    if top_k == 0:
        return _draw(_probabilities(logits, 0, top_p, temperature))
    logits, indices = logits.topk(min(top_k, logits.shape[-1]), dim=-1)  # top_p sorts these few instead of all
    chosen = _draw(_probabilities(logits, 0, top_p, temperature))
    return indices.gather(-1, chosen[..., None]).squeeze(-1)


def _probabilities(logits: Tensor, top_k: int, top_p: float, temperature: float) -> Tensor:
    """The probabilities with which `sample` draws tokens, float32 (..., vocab), as a new tensor."""
    if top_k == 1:
        return F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
    logits = logits.float()
    # The largest becomes 0, so that no quotient is infinite: the difference of two infinities would be NaN.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    if top_k > 0:  # exactly top_k, even if further logits are equal to the last one
        kept = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
        logits = torch.full_like(logits, float("-inf")).scatter_(-1, kept.indices, kept.values)
    modify_logits_for_top_p_filtering(logits, top_p)
    return logits.softmax(dim=-1, dtype=torch.float32)


def _draw(likelihoods: Tensor) -> Tensor:
    """An index for each row of probabilities (batch, vocab)."""
    return torch.multinomial(likelihoods, num_samples=1).squeeze(-1)


def _penalise(logits: Tensor, tokens: Tensor, repetition_penalty: float) -> None:
    """`modify_logits_for_repetition_penalty` without checks."""
    found = logits.gather(-1, tokens)
    logits.scatter_(-1, tokens, torch.where(found > 0, found / repetition_penalty, found * repetition_penalty))


def _check_in_vocabulary(name: str, tokens: Tensor, vocab_size: int) -> None:
    """Check the values of tokens, which waits for the device: kernels would read and write outside of the logits."""
    if tokens.numel() > 0:
        for token in map(int, tokens.aminmax()):
            checks.number(name, token, 0 <= token < vocab_size, "from 0 to {}", vocab_size - 1)


def _check_sampling(top_k: int, top_p: float, temperature: float) -> tuple[int, float, float]:
    """Check the options of `sample`. Returns them as an int and two floats."""
    top_k = checks.whole("top_k", top_k)
    checks.number("top_k", top_k, top_k >= 0, "at least 0")
    if top_k == 1:  # which ignores the others
        return 1, 0.0, 1.0
    top_p, temperature = checks.as_float("top_p", top_p), checks.as_float("temperature", temperature)
    checks.number("top_p", top_p, 0 <= top_p <= 1, "from 0 to 1")
    checks.number("temperature", temperature, temperature > 0, "positive (top_k=1 takes the likeliest token)")
    return top_k, top_p, temperature
