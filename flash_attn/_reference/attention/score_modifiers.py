"""Operations on scores between the two products: softcap, ALiBi, bias, mask and dropout."""

import functools
import math

import torch

from .bias import Bias
from .dropout import keep_mask
from .head_groups import Group
from .mask import Mask, mask_of
from .options import Features, Options


class Scores:
    """The scores of one group. Methods take a block (pairs, query heads per key head * rows, cols)."""

    def __init__(self, options: Options, features: Features, group: Group, q: torch.Tensor) -> None:
        """q: (batch, seqlen_q, heads, head_dim)."""
        part, (batch, _, heads, _) = group.part, q.shape
        self.options, self.group = options, group
        mask = Mask(part.seqlen_q, part.seqlen_k, options.window_left, options.window_right)
        self.mask = mask_of(mask, features, group, q.device)
        self.sharing = heads // group.heads_k
        self.slopes = self.keep_mask = self.bias = None
        if features.attn_bias is not None:
            self.bias = Bias(features.attn_bias, group, batch, heads)
        if options.alibi_slopes is not None:
            self.slopes = group.per_head(options.alibi_slopes)[..., None, None]
        if options.dropout_p > 0 and options.rng_state is not None:
            numbers = torch.arange(part.entries.stop * heads, device=options.rng_state.device)
            batch_heads = group.per_head(numbers.view(-1, heads))
            self.keep_mask = functools.partial(keep_mask, options.rng_state, options.dropout_p, batch_heads)

    def keys(self, rows: range) -> range:
        """The keys that some row of a block may see."""
        there, _ = self.group.there(rows)
        return self.mask.keys(there)

    def compute(
        self, q: torch.Tensor, k: torch.Tensor, rows: range, cols: range
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the unmasked scores, and their derivative by q k^T: a tensor, or None if it is 1."""
        s, slope = torch.bmm(q, k.mT), None
        if self.options.softcap > 0:
            s.div_(self.options.softcap).tanh_()
            slope = 1 - s.square()
            s.mul_(self.options.softcap)
        part, (rows, cols) = self.group.within(self._by_head(s), rows, cols), self.group.there(rows, cols)
        if self.slopes is not None:
            part.sub_(self.slopes * self.mask.distance(rows, cols, s))
        if self.bias is not None:
            bias = self.bias.block(rows, cols)
            if bias.dtype == torch.bool:
                part.masked_fill_(~bias, -math.inf)
            else:
                part.add_(bias)
        return s, slope

    def add_bias_gradient_(self, total: torch.Tensor, ds: torch.Tensor, rows: range, cols: range) -> None:
        """Add ds, the gradient of a block of scores, to the gradient of the bias."""
        if self.bias is not None:
            self.bias.add_gradient_(total, self._by_head(ds), rows, cols)

    def hide_(self, s: torch.Tensor, rows: range, cols: range, value: float) -> None:
        """Write `value` where a row does not see a key, in place."""
        part, (rows, keys) = self.group.within(self._by_head(s), rows, cols), self.group.there(rows, cols)
        self.mask.hide_(part, rows, keys, value)
        if len(keys) < len(cols):
            s[..., len(keys) :] = value

    def keep(self, rows: range, cols: range, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns Z / (1 - p), the factor of dropout for each element of a block; None without dropout."""
        if self.keep_mask is None:
            return None
        factor = self.keep_mask(*self.group.there(rows, cols)).to(dtype).div_(1 - self.options.dropout_p)
        return self.group.whole(factor, rows, cols).flatten(1, 2)

    def _by_head(self, s: torch.Tensor) -> torch.Tensor:
        return s.unflatten(1, (self.sharing, -1))
