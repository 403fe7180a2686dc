"""Exact attention for PyTorch, in memory linear in the sequence, with the interface of flash-attn 2.8.

    import torch
    from flash_attn import flash_attn_func

    q, k, v = (torch.randn(2, 1024, 8, 64, dtype=torch.bfloat16) for _ in range(3))  # (batch, seqlen, heads, head_dim)
    out = flash_attn_func(q, k, v, causal=True)

What is here; `help(flash_attn.flash_attn_func)` has the formula, the shapes and an example, and so have the others:

    flash_attn_func             dense batches; windows, GQA, ALiBi, softcap, dropout, sinks, biases, ranges of keys
    flash_attn_varlen_func      packed sequences of different lengths, and queries over pages, as servers have them
    flash_attn_with_kvcache     decoding: rotates, appends to a cache in place, attends; caches in 16 bits or float8
    flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func    the same with k and v, or q, k and v in one tensor
    set_batch_invariant, batch_invariant, get_batch_invariant    the same bits in training and serving

And in modules:

    flash_attn.masks, .bert_padding, .functional    key ranges; padding; statistics, merging of results, float8
    flash_attn.layers.rotary, .ops, .losses         rotary embedding; norms, linear layers, MLPs; cross entropies
    flash_attn.modules, .models                     multi-head attention, blocks; GPT and families like it, BERT, ViT
    flash_attn.utils.generation                     sampling, speculative decoding, pages
    flash_attn.context_parallel, .parallel          one sequence over several GPUs; meshes
    flash_attn.integrations, .precision             transformers (and its float8_cache), diffusers, PyTorch; exact
                                                    gradients

CUDA kernels run where the kernel library was built; everywhere else the same functions run in plain PyTorch.
`python -m flash_attn` tells which, and checks a few results.
"""

__version__ = "2.8.3.post101"

# Another distribution's flash_attn.cute may be installed beside this package.
__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from flash_attn import _removed
from flash_attn.batch_invariance import batch_invariant, get_batch_invariant, set_batch_invariant
from flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "batch_invariant",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_batch_invariant",
    "set_batch_invariant",
]

__getattr__ = _removed.getattr_of(__name__, _removed.UNPADDED)
