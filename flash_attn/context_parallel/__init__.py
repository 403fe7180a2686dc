"""Sequences that are too long for one GPU: each rank of a group holds some of the tokens, and attention is exact.

    plan = Plan(seqlens, group)                        # once for each batch: which rank has which tokens
    batch = plan.shard_batch(batch)                    # this rank's part of input_ids, shifted labels and the like
    out = cp_attn_func(q, k, v, causal=True, plan=plan)
    loss = plan.mean_loss(loss_sum, count)

docs/guides/context_parallel.md says when to use it and what is refused.
"""

from flash_attn.context_parallel._attention import (
    cp_attn_func,
    cp_attn_kvpacked_func,
    cp_attn_qkvpacked_func,
    merge_attention,
)
from flash_attn.context_parallel._decode import cp_attn_with_kvcache
from flash_attn.context_parallel._plan import Plan
from flash_attn.context_parallel._seq_heads import heads_to_seq, seq_to_heads

__all__ = [
    "Plan",
    "cp_attn_func",
    "cp_attn_kvpacked_func",
    "cp_attn_qkvpacked_func",
    "cp_attn_with_kvcache",
    "heads_to_seq",
    "merge_attention",
    "seq_to_heads",
]
