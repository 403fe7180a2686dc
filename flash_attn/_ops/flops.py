"""How many floating-point operations the ops take, for torch.utils.flop_counter.FlopCounterMode.

    with FlopCounterMode() as counter:
        model(input_ids).loss.backward()

Each op counts what the matrix products that it stands for would count, as with PyTorch's own attention: a product of
(m, k) and (k, n) is 2 m n k. So the forward of a model has the number of the same model without fused ops, and the
backward of attention is that of PyTorch's flash attention, which computes the scores again. Attention counts all the
scores of queries with keys of their own entry, also those that a causal mask, a window, chunks, ranges or a bias hide:
models are compared by this number whatever the kernels skip. Two key ranges of each row count as two calls, as which
kernels compute them, also where there are no kernels. Lengths do count: packed tokens meet the tokens of their
own sequence only, and a cache is as long as it is filled. They are read, which waits for the device; where they have no
values, in fake tensors and on the meta device, each sequence counts as the longest. Elementwise operations and norms
count nothing.

The formulas take the arguments of the ops. `_library.define` registers them when torch.utils.flop_counter is imported.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flash_attn._reference.attention.options import CacheOptions, Features, Options


def attention_fwd(q: Tensor, k: Tensor | None, v: Tensor | None, *arguments: Any) -> int:
    """Q K^T and P V."""
    q, k, v = _separate(q, k, v)
    return _scores(q, k, arguments) * (q.shape[-1] + v.shape[-1])


def attention_fwd_features(q: Tensor, k: Tensor | None, v: Tensor | None, sink: Any, bias: Any, *arguments: Any) -> int:
    """Q K^T and P V."""
    return attention_fwd(q, k, v, *arguments)


def attention_bwd(dout: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, *arguments: Any) -> int:
    """Q K^T again; dP and dV; dQ and dK. `arguments` begin with out, softmax_lse, dlse, out_lo, dq, dk and dv.

    They end with the options and perhaps `accumulate`.
    """
    return _bwd(q, k, v, arguments[7 : 7 + len(Options._fields)])


def attention_bwd_plain(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> int:
    """The same; `arguments` begin with out and softmax_lse."""
    return _bwd(q, k, v, arguments[2:])


def attention_bwd_features(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> int:
    """The same; `arguments` begin with out, softmax_lse, dlse, out_lo, lse_lo, wants_dbias, sink and bias."""
    return _bwd(q, k, v, arguments[8:])


def attention_probabilities(q: Tensor, k: Tensor | None, v: Tensor | None, *arguments: Any) -> int:
    """Q K^T."""
    q, k, _ = _separate(q, k, v)
    return _scores(q, k, arguments) * q.shape[-1]


def attention_weights(q: Tensor, k: Tensor, lse: Tensor, lse_lo: Any, sink: Any, bias: Any, *arguments: Any) -> int:
    """Q K^T."""
    return _scores(q, k, arguments) * q.shape[-1]


def attention_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *arguments: Any) -> int:
    """Q K^T and P V, with the keys that are in the cache and those that are appended."""
    options = CacheOptions(*arguments[: len(CacheOptions._fields)])
    batch = len(q) if options.cu_seqlens_q is None else len(options.cu_seqlens_q) - 1
    rows = [q.shape[-3]] * batch
    if options.cu_seqlens_q is not None:
        rows = _differences(options.cu_seqlens_q, options.max_seqlen_q, q)
    capacity = _capacity(k_cache, options.block_table)
    lengths = _values(options.cache_seqlens)
    if lengths is None:
        lengths = [capacity if options.cache_seqlen is None else options.cache_seqlen] * batch
    new = 0 if options.k is None else options.k.shape[1]
    skipped = _values(options.cache_leftpad) or [0] * batch
    keys = (max(0, min(n + new, capacity) - left) for n, left in zip(lengths, skipped, strict=True))
    pairs = sum(m * n for m, n in zip(rows, keys, strict=True))
    calls = _calls(_feature("key_ranges", arguments, CacheOptions))
    return 2 * calls * pairs * q.shape[-2] * (q.shape[-1] + v_cache.shape[-1])


def attention_kvcache_features(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, sink: Any, bias: Any, *arguments: Any
) -> int:
    """Q K^T and P V."""
    return attention_kvcache(q, k_cache, v_cache, *arguments)


def linear_fwd(x: Tensor, weight: Tensor, *_: Any) -> int:
    """x weight^T."""
    return 2 * x.numel() * weight.shape[0]


def linear_dgrad(dout: Tensor, weight: Tensor, *_: Any) -> int:
    """dout weight."""
    return 2 * dout.numel() * weight.shape[1]


def linear_wgrad(dout: Tensor, x: Tensor, *_: Any) -> int:
    """dout^T x."""
    return 2 * dout.numel() * x.shape[-1]


def _bwd(q, k, v, arguments):
    q, k, v = _separate(q, k, v)
    return _scores(q, k, arguments) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _separate(q, k, v):
    """Views of packed tensors; see the top of flash_attn.py."""
    if k is None:
        return q.unbind(-3)
    return (q, *k.unbind(-3)) if v is None else (q, k, v)


def _scores(q: Tensor, k: Tensor, arguments: Sequence[Any]) -> int:
    """Twice the number of scores in all heads. arguments: those of `Options`, and perhaps features."""
    options = Options(*arguments[: len(Options._fields)])
    seqused_q = _values(_feature("seqused_q", arguments, Options))
    batch = len(q) if options.cu_seqlens_q is None else len(options.cu_seqlens_q) - 1
    if options.cu_seqlens_q is None:
        rows = seqused_q or [q.shape[1]] * batch
    else:
        rows = seqused_q or _differences(options.cu_seqlens_q, options.max_seqlen_q, q)
    keys = _values(options.seqused_k)
    starts = options.cu_seqlens_q if options.cu_seqlens_k is None else options.cu_seqlens_k
    if keys is None and starts is not None and options.block_table is None:
        keys = _differences(starts, options.max_seqlen_k, k)
    keys = keys or [_capacity(k, options.block_table)] * batch
    skipped = _values(options.leftpad_k) or [0] * batch
    pairs = sum(m * max(0, n - left) for m, n, left in zip(rows, keys, skipped, strict=True))
    return 2 * _calls(_feature("key_ranges", arguments, Options)) * pairs * q.shape[-2]


def _feature(name, arguments, kind):
    """A feature that is given after the options, `kind`: any but the first two, the sink and the bias."""
    place = len(kind._fields) + Features._fields.index(name) - 2
    return arguments[place] if len(arguments) > place else None


def _calls(ranges):
    """How many calls of kernels compute these key ranges."""
    return 1 if ranges is None else ranges.shape[-1] // 2


def _capacity(k, block_table):
    """The keys of an entry of a dense batch, or of as many pages as the table has for it."""
    return k.shape[-3] if block_table is None else block_table.shape[1] * k.shape[1]


def _values(x):
    """The numbers in a vector; None if there is none, or if it has no values, as fake tensors."""
    return x.tolist() if type(x) is Tensor and not x.is_meta else None


def _differences(starts, longest, tokens):
    """The lengths of packed sequences; where starts have no values, as long as the longest, or as the tokens allow."""
    values = _values(starts)
    if values is None:
        return [longest or len(tokens)] * (len(starts) - 1)
    return [end - start for start, end in itertools.pairwise(values)]
