"""The state that a model and its layers are given while they generate."""

import dataclasses
from collections.abc import Hashable
from typing import Any

from torch import Tensor


@dataclasses.dataclass
class InferenceParams:
    """How far the sequences of a batch have come, and the caches of the layers.

    max_seqlen, max_batch_size: the size that the caches have, or get when a layer makes its own.
    seqlen_offset: how many tokens of each sequence, padding included, the caches hold; 0 for a prompt. Where rows
        differ, the greatest of these numbers: it is compared with the size of the caches. Tokens at offset 0 are a
        prompt, which in caches in one piece sees only itself, so that behind keys of lengths_per_sample 0 is an error
        on the CPU; on a GPU, where reading them would wait for the device, their keys would be overwritten.
    batch_size_offset: the row of the caches where this batch begins.
    key_value_memory_dict: the cache of each layer, by its layer_idx.
    lengths_per_sample: int32 or int64 (max_batch_size,), how many keys each row of the caches holds, or None where that
        follows from seqlen_offset. Layers read it on the device, so that a CUDA graph finds the lengths of its replay.
        After a prompt, a negative number marks a row that only pads the batch: nothing is read or written for it.
    leftpad_per_sample: int32 or int64 (max_batch_size,), how many tokens of each row of a prompt are padding on its
        left, or None. Layers leave them out of their caches: row b then holds seqlen_offset - leftpad_per_sample[b]
        keys, the first of them at position 0. If lengths_per_sample is given too, it must say the same.
    writers: which layer writes to each cache, by layer_idx, to detect two layers with the same index. A copy of this
        object starts without them, since it may serve a copy of the model.
    block_table: int32 (max_batch_size, at least max_seqlen / page_size), or None. If it is given, the cache of a layer
        is a pool of pages (num_pages, page_size, 2, heads_kv, head_dim), which the caller allocates, and position m of
        row b is in page block_table[b, m // page_size]. The caller gives each row pages for the tokens of a step
        before the step, padding included; `PageAllocator` does. Entries behind them are not read, and neither are
        positions behind the length of a row, whatever they hold. Layers read the table on the device, so that a CUDA
        graph finds the pages of its replay.

    Rows of the table may share pages that all of them only read, such as those of a common beginning:

    >>> from flash_attn.utils.generation import InferenceParams
    >>> from flash_attn.modules.mha import MHA
    >>> mha = MHA(64, 1, causal=True, use_flash_attn=True, layer_idx=0)
    >>> pages = mha.allocate_inference_cache(10, 16)                            # 10 pages of 16 tokens
    >>> params = InferenceParams(max_seqlen=32, max_batch_size=1, key_value_memory_dict={0: pages})
    >>> params.block_table = torch.tensor([[7, 2]], dtype=torch.int32)
    >>> prompt, step = torch.randn(1, 16, 64), torch.randn(2, 1, 64)
    >>> with torch.no_grad():
    ...     out = mha(prompt, inference_params=params)
    ...     params.max_batch_size, params.seqlen_offset = 2, 16
    ...     params.block_table = torch.tensor([[7, 2], [7, 3]], dtype=torch.int32)
    ...     out = mha(step, inference_params=params)                            # two rows go on from one prompt
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    lengths_per_sample: Tensor | None = None
    leftpad_per_sample: Tensor | None = None
    writers: dict[Hashable, int] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    block_table: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | dict(writers={})

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Begin new sequences in the same caches: at most max_batch_size of at most max_seqlen tokens."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        self.leftpad_per_sample = None
        self.writers.clear()
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()

    def set_lengths(self, batch_size: int, lengths: int | Tensor) -> None:
        """Write an integer or (batch_size,) into the first rows of lengths_per_sample, where graphs read it."""
        if self.lengths_per_sample is None:
            raise ValueError("lengths_per_sample must be given, found None")
        rows = self.lengths_per_sample[:batch_size]
        if isinstance(lengths, Tensor):
            rows.copy_(lengths)
        else:
            rows.fill_(lengths)
