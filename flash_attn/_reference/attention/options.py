"""The arguments of the attention ops besides queries, keys and values.

The fields of `Options` and `CacheOptions` are, in the same order, the last arguments of the ops' schemas (see
flash_attn/_ops/flash_attn.py) and the members of the structs of these names in csrc/binding/flash_attn/options.h.
Arguments that are often given come first: the dispatcher takes time for every argument up to the last one that is
given.
"""

from typing import NamedTuple

import torch

from flash_attn._errors import ArgumentError


class Options(NamedTuple):
    """Arguments of `fwd`, `probabilities` and `bwd`."""

    softmax_scale: float
    window_left: int  # how many keys before its own key a row sees; negative: all
    window_right: int  # how many keys after its own key; 0 with a causal mask
    cu_seqlens_q: torch.Tensor | None = None  # int32 (batch + 1,), where the entries of packed tokens start
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None  # of the lengths, by which kernels divide work, and which are S_dmask's; 0: unknown
    max_seqlen_k: int | None = None
    block_table: torch.Tensor | None = None  # int32 (batch, pages per entry); has no gradient
    seqused_k: torch.Tensor | None = None  # int32 (batch,), how many keys an entry uses; with pages, its length
    num_splits: int = 0  # the most parts into which the keys are cut; 0: the kernel chooses
    deterministic: bool = False
    exact_gradients: bool = False  # whether the backward uses out as it was before kernels rounded it
    dropout_p: float = 0.0
    rng_state: torch.Tensor | None = None  # int64 (2,), seed and offset of the dropout mask
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None  # float32 (heads,) or (batch, heads)
    leftpad_k: torch.Tensor | None = None  # int32 (batch,), how many of these keys are skipped at the start

    def check(self) -> None:
        """Raise if dropout is wanted without an rng_state."""
        if self.dropout_p > 0 and self.rng_state is None:
            raise ArgumentError(f"rng_state must be given with dropout_p = {self.dropout_p}, found None")

    def bounds(self) -> tuple[int, int]:
        """Returns (max_seqlen_q, max_seqlen_k). Raises if they are not given."""
        if self.max_seqlen_q is None or self.max_seqlen_k is None:
            raise ArgumentError("max_seqlen_q and max_seqlen_k must be given for S_dmask, found None")
        return self.max_seqlen_q, self.max_seqlen_k


class Features(NamedTuple):
    """Arguments of the ops with features, `fwd_features` and so on, besides those of the ops without."""

    learnable_sink: torch.Tensor | None = None  # floating-point (heads,), the score of one more key, whose value is 0
    attn_bias: torch.Tensor | None = None  # (batch1, batch2, heads, rows, keys), each size may be 1; see bias.py
    key_ranges: torch.Tensor | None = None  # int32 (batch, heads, rows, 2 or 4), batch and heads may be 1
    attention_chunk: int = 0  # a row sees keys of its own chunk only; 0: no chunks
    causal: torch.Tensor | None = None  # bool or int32 (batch,), which entries are causal
    seqused_q: torch.Tensor | None = None  # int32 (batch,), how many rows an entry uses
    row_max: bool = False  # whether the largest score of each row is wanted
    k_descale: torch.Tensor | None = None  # float32 (batch, heads_k), what float8 keys are multiplied by; None: 1
    v_descale: torch.Tensor | None = None  # the same for values

    def given(self) -> list[str]:
        """The names of the features that differ from their defaults."""
        fields = zip(Features._fields, self, strict=True)
        return [name for name, value in fields if isinstance(value, torch.Tensor) or value]

    def none(self) -> bool:
        """Whether none of the features is given."""
        return self.learnable_sink is None and self.none_but_sink()

    def none_but_sink(self) -> bool:
        """Whether no feature other than a sink is given. Written for speed, since every call with a sink asks."""
        _, bias, ranges, chunk, causal, seqused_q, row_max, k_descale, v_descale = self
        no_tensors = bias is ranges is causal is seqused_q is k_descale is v_descale is None
        return no_tensors and chunk == 0 and not row_max


class CacheOptions(NamedTuple):
    """Arguments of `fwd_kvcache`."""

    softmax_scale: float
    window_left: int
    window_right: int
    cache_seqlens: torch.Tensor | None = None  # int32 (batch,), how many positions are filled; None: see cache_seqlen
    block_table: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None  # int32 (batch + 1,), where the rows of each entry start in packed queries
    max_seqlen_q: int | None = None  # as in Options
    num_splits: int = 0  # parts into which the keys are cut to occupy the device; 0: the kernel chooses
    k: torch.Tensor | None = None  # new keys, which are appended
    v: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    rotary_interleaved: bool = True
    cache_seqlen: int | None = None  # how many positions are filled in every entry; None: all
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None  # int32 (batch,), the row of the cache that an entry uses
    cache_leftpad: torch.Tensor | None = None  # int32 (batch,), the first position that is used

    def of_scores(self) -> Options:
        """Returns the options that scores depend on."""
        return Options(
            self.softmax_scale,
            self.window_left,
            self.window_right,
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
        )
