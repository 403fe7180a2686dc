"""The state that a model and its layers are given while they generate."""

import dataclasses
from collections.abc import Hashable
from typing import Any

from torch import Tensor


@dataclasses.dataclass
class InferenceParams:
    """How far the sequences of a batch have come, and the caches of the layers.

    max_seqlen, max_batch_size: the size that the caches have, or get when a layer makes its own.
    seqlen_offset: how many tokens of each sequence, padding included, the caches hold; 0 for a prompt.
    batch_size_offset: the row of the caches where this batch begins.
    key_value_memory_dict: the cache of each layer, by its layer_idx.
    lengths_per_sample: int32 (max_batch_size,), how many keys each row of the caches holds, or None where that follows
        from seqlen_offset. Layers read it on the device, so that a CUDA graph finds the lengths of its replay.
    leftpad_per_sample: int32 (max_batch_size,), how many tokens of each row of a prompt are padding on its left, or
        None. Layers leave them out of their caches: row b then holds seqlen_offset - leftpad_per_sample[b] keys, the
        first of them at position 0. If lengths_per_sample is given too, it must say the same.
    writers: which layer writes to each cache, by layer_idx, to detect two layers with the same index. A copy of this
        object starts without them, since it may serve a copy of the model.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Hashable, Any] = dataclasses.field(default_factory=dict)
    lengths_per_sample: Tensor | None = None
    leftpad_per_sample: Tensor | None = None
    writers: dict[Hashable, int] = dataclasses.field(default_factory=dict, repr=False, compare=False)

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
