"""Bad input: each row is a change to a good call, and what the error must say: the argument, and what was found.

Wrong types and dtypes raise TypeError; wrong shapes, devices and values raise ValueError; and all are RuntimeErrors, as
flash-attn's are. Nothing is written before.
"""

import warnings

import numpy as np
import pytest
import torch

import flash_attn
from flash_attn import _library
from flash_attn import flash_attn_interface as interface


def tokens(*shape, device):
    return torch.randn(*shape, 16, device=device, dtype=torch.bfloat16)


def lengths(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


# ---------------------------------------------------------------------------------------------------------------------
# Good calls


def dense(device):
    return dict(q=tokens(2, 5, 4, device=device), k=tokens(2, 7, 2, device=device), v=tokens(2, 7, 2, device=device))


def kvpacked(device):
    return dict(q=tokens(2, 5, 4, device=device), kv=tokens(2, 7, 2, 2, device=device))


def qkvpacked(device):
    return dict(qkv=tokens(2, 5, 3, 4, device=device))


def bounds(device):
    cu_seqlens = dict(cu_seqlens_q=lengths(0, 5, 10, device=device), cu_seqlens_k=lengths(0, 7, 14, device=device))
    return dict(cu_seqlens, max_seqlen_q=5, max_seqlen_k=7)


def varlen(device):
    kv = dict(k=tokens(14, 2, device=device), v=tokens(14, 2, device=device))
    return dict(q=tokens(10, 4, device=device), **kv, **bounds(device))


def varlen_kvpacked(device):
    return dict(q=tokens(10, 4, device=device), kv=tokens(14, 2, 2, device=device), **bounds(device))


def varlen_qkvpacked(device):
    return dict(qkv=tokens(10, 3, 4, device=device), cu_seqlens=lengths(0, 5, 10, device=device), max_seqlen=5)


def block_table(device):
    return lengths(0, 5, 3, 4, device=device).reshape(2, 2)


def varlen_paged(device):
    pages = dict(k=tokens(6, 4, 2, device=device), v=tokens(6, 4, 2, device=device))
    return dict(varlen(device), **pages, block_table=block_table(device))


def cache(device):
    caches = dict(k_cache=tokens(2, 8, 2, device=device), v_cache=tokens(2, 8, 2, device=device))
    return dict(q=tokens(2, 3, 4, device=device), **caches, cache_seqlens=lengths(4, 5, device=device))


def appending(device):
    new = dict(k=tokens(2, 3, 2, device=device), v=tokens(2, 3, 2, device=device))
    return dict(cache(device), **new, **rotary_tables(device, 8))


def rotary_tables(device, columns, rows=8):
    return {
        name: torch.ones(rows, columns, dtype=torch.bfloat16, device=device) for name in ("rotary_cos", "rotary_sin")
    }


def paged(device):
    pages = dict(k_cache=tokens(6, 4, 2, device=device), v_cache=tokens(6, 4, 2, device=device))
    new = dict(k=tokens(2, 3, 2, device=device), v=tokens(2, 3, 2, device=device))
    return dict(cache(device), **pages, **new, block_table=block_table(device))


SCORES = dict(dropout_p=0.0, softmax_scale=0.25, causal=False)
WINDOW = dict(window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None)


def forward(device):
    return dict(dense(device), **SCORES, **WINDOW, return_softmax=False)


def varlen_forward(device):
    return dict(varlen(device), **SCORES)


def backward(device):
    return with_gradients(flash_attn.flash_attn_func, dense(device))


def varlen_backward(device):
    return with_gradients(flash_attn.flash_attn_varlen_func, varlen(device))


def with_gradients(function, good):
    out, lse, _ = function(**good, return_attn_probs=True)
    grads = {f"d{name}": torch.zeros_like(good[name]) for name in "qkv"}
    results = dict(dout=torch.ones_like(out), out=out, softmax_lse=lse)
    return dict(good, **results, **grads, **SCORES, **WINDOW, deterministic=False)


CALLS = {  # name -> (function, its good arguments on a device)
    "func": (flash_attn.flash_attn_func, dense),
    "kvpacked": (flash_attn.flash_attn_kvpacked_func, kvpacked),
    "qkvpacked": (flash_attn.flash_attn_qkvpacked_func, qkvpacked),
    "varlen": (flash_attn.flash_attn_varlen_func, varlen),
    "varlen paged": (flash_attn.flash_attn_varlen_func, varlen_paged),
    "varlen_kvpacked": (flash_attn.flash_attn_varlen_kvpacked_func, varlen_kvpacked),
    "varlen_qkvpacked": (flash_attn.flash_attn_varlen_qkvpacked_func, varlen_qkvpacked),
    "kvcache": (flash_attn.flash_attn_with_kvcache, cache),
    "kvcache appending": (flash_attn.flash_attn_with_kvcache, appending),
    "kvcache paged": (flash_attn.flash_attn_with_kvcache, paged),
    "_forward": (interface._flash_attn_forward, forward),
    "_varlen_forward": (interface._flash_attn_varlen_forward, varlen_forward),
    "_backward": (interface._flash_attn_backward, backward),
    "_varlen_backward": (interface._flash_attn_varlen_backward, varlen_backward),
}


# ---------------------------------------------------------------------------------------------------------------------
# Bad calls: function -> (what is bad, arguments to replace or a function of the good ones, what the error says)


def replaced(names, change):
    """The arguments of these names put through `change`."""
    return lambda good: {name: change(good[name]) for name in names.split()}


def expanded(x):
    """x with gaps between its elements."""
    return torch.stack([x, x], dim=-1)[..., 0]


def splits_of_pages(good):
    """Keys in pages, and a number of splits, which only decoding looks at."""
    device = good["q"].device
    pages = tokens(6, 4, 2, device=device)
    return dict(k=pages, v=pages, block_table=block_table(device), num_splits=2)


def one_key_at_the_end(good):
    """Three queries from position 7 on are rotated by rows 7 to 9, although one key is appended."""
    return dict(k=good["k"][:, :1], v=good["v"][:, :1], cache_seqlens=lengths(7, 7), causal=True)


S_DMASK = dict(dropout_p=0.5, return_attn_probs=True)
# fmt: off
TYPE_ERRORS = {
    "func": [
        ("k and v are None", dict(k=None, v=None), r"v must be a torch.Tensor, found NoneType"),
        ("k of another type", replaced("k", torch.Tensor.half), r"k must .*bfloat16, found torch.float16"),
        ("v of another type", replaced("v", torch.Tensor.half), r"v must .*bfloat16, found torch.float16"),
    ],
    "kvpacked": [
        ("kv of another type", replaced("kv", torch.Tensor.half), r"bfloat16, found torch.float16"),
    ],
    "varlen": [
        ("cu_seqlens_q: a list", dict(cu_seqlens_q=[0, 5, 10]), r"cu_seqlens_q must .*found list"),
        ("cu_seqlens_k is None", dict(cu_seqlens_k=None), r"cu_seqlens_k must .*found NoneType"),
        ("cu_seqlens_q is None", dict(cu_seqlens_q=None), r"cu_seqlens_q must .*found NoneType"),
        ("cu_seqlens: int64", replaced("cu_seqlens_q", torch.Tensor.long), r"cu_seqlens_q must .*found torch.int64"),
        ("cu_seqlens_k: float32", replaced("cu_seqlens_k", torch.Tensor.float), r"cu_seqlens_k must .*torch.float32"),
        ("max_seqlen_q is 1-D", dict(max_seqlen_q=torch.tensor([5])), r"max_seqlen_q must .*found .*\(1,\)"),
        ("max_seqlen_k is real", dict(max_seqlen_k=torch.tensor(5.0)), r"max_seqlen_k must .*float32"),
    ],
    "varlen_qkvpacked": [
        ("cu_seqlens: int64", replaced("cu_seqlens", torch.Tensor.long), r"^cu_seqlens must .*torch.int64"),
        ("cu_seqlens: a list", dict(cu_seqlens=[0, 5, 10]), r"^cu_seqlens must .*found list"),
    ],
    "varlen_kvpacked": [
        ("cu_seqlens: int64", replaced("cu_seqlens_k", torch.Tensor.long), r"cu_seqlens_k must .*int64"),
    ],
    "varlen paged": [
        ("block_table: int64", replaced("block_table", torch.Tensor.long), r"block_table must .*torch.int64"),
    ],
    "_varlen_forward": [
        ("seqused_k: int64", dict(seqused_k=torch.ones(2).long()), r"seqused_k must .*torch.int64"),
    ],
    "kvcache": [
        ("cache of another type", replaced("k_cache", torch.Tensor.half), r"k_cache must .*found torch.float16"),
        ("v_cache of another type", replaced("v_cache", torch.Tensor.half), r"v_cache must .*torch.float16"),
        ("cache_seqlens: a list", dict(cache_seqlens=[4, 5]), r"cache_seqlens must .*integer tensor .*found list"),
        (
            "cache_seqlens: of floats",
            replaced("cache_seqlens", torch.Tensor.float),
            r"cache_seqlens must have dtype torch.int32 or torch.int64, found torch.float32",
        ),
        ("cache_batch_idx: int64", dict(cache_batch_idx=torch.tensor([0, 1])), r"cache_batch_idx .*int64"),
        ("cache_batch_idx: a list", dict(cache_batch_idx=[0, 1]), r"cache_batch_idx must .*found list"),
        ("cache_leftpad: int64", dict(cache_leftpad=torch.tensor([0, 1])), r"cache_leftpad must .*int64"),
    ],
    "kvcache appending": [
        ("k of another type", replaced("k", torch.Tensor.half), r"k must .*found torch.float16"),
        ("v of another type", replaced("v", torch.Tensor.half), r"v must .*found torch.float16"),
        ("int cos", replaced("rotary_cos", torch.Tensor.int), r"rotary_cos must .*torch.int32"),
        ("other sin type", replaced("rotary_sin", torch.Tensor.half), r"rotary_sin .*torch.float16"),
    ],
    "kvcache paged": [
        ("block_table: int64", replaced("block_table", torch.Tensor.long), r"block_table must .*torch.int64"),
        ("block_table: a list", dict(block_table=[[0, 1], [2, 3]]), r"block_table must .*found list"),
    ],
    "_backward": [
        ("dv of another type", replaced("dv", torch.Tensor.float), r"dv must .*found torch.float32"),
        ("dout of another type", replaced("dout", torch.Tensor.float), r"dout must .*found torch.float32"),
        ("lse in 16 bits", replaced("softmax_lse", torch.Tensor.half), r"softmax_lse must .*torch.float16"),
    ],
    "_varlen_backward": [
        ("cu_seqlens: int64", replaced("cu_seqlens_q", torch.Tensor.long), r"cu_seqlens_q must .*int64"),
    ],
}
VALUE_ERRORS = {
    "func": [
        ("k elsewhere", replaced("k", lambda x: x.to("meta")), r"k must be on .*found it on meta"),
        ("v elsewhere", replaced("v", lambda x: x.to("meta")), r"v must be on .*found it on meta"),
        ("k of another batch", replaced("k", lambda x: x[:1]), r"k.s batch size must be q.s, 2, found 1"),
        ("v of another batch", replaced("v", lambda x: x[:1]), r"v must .*\(2, .*found \(1, 7, 2, 16\)"),
        ("v of another length", replaced("v", lambda x: x[:, :6]), r"v must .*found \(2, 6, 2, 16\)"),
        ("v of other heads", replaced("v", lambda x: x[:, :, :1]), r"v must .*found \(2, 7, 1, 16\)"),
        ("k of another head_dim", replaced("k", lambda x: x[..., :8]), r"k.s head_dim must be q.s, 16, found 8"),
        ("v of head_dim 577", replaced("v", lambda x: x[..., :1].repeat(1, 1, 1, 577)), r"v.s head_dim.*576.*577"),
        ("3 key heads of 4", replaced("k v", lambda x: x.repeat(1, 1, 2, 1)[:, :, :3]), r"heads.*4.*found 3"),
        ("more key heads", replaced("k v", lambda x: x.repeat(1, 1, 4, 1)), r"heads.*4.*found 8"),
        ("heads before seqlen", replaced("q k v", lambda x: x.transpose(1, 2)),
         r"a divisor of q.s, 5, found 7, in shapes \(2, 4, 5, 16\) and .*seqlen, head_dim.*transpose\(1, 2\)$"),
        ("one query, heads before seqlen",
         lambda good: dict(replaced("q k v", lambda x: x.transpose(1, 2))(good), q=good["q"][:, :1].transpose(1, 2)),
         r"a divisor of q.s, 1, found 7, in shapes .*transpose\(1, 2\)$"),
        ("no key heads", replaced("k v", lambda x: x[:, :, :0]), r"heads.*4.*found 0"),
        ("head_dim 577", replaced("q k v", lambda x: x[..., :1].repeat(1, 1, 1, 577)), r"head_dim.*576.*found 577"),
        ("head_dim 0", replaced("q k v", lambda x: x[..., :0]), r"head_dim.*found 0"),
    ],
    "varlen": [
        ("head_dim 577", replaced("q k v", lambda x: x[..., :1].repeat(1, 1, 577)), r"head_dim.*found 577"),
        ("v of another length", replaced("v", lambda x: x[:9]), r"v must .*found \(9, 2, 16\)"),
        ("3 key heads of 4", replaced("k v", lambda x: x.repeat(1, 2, 1)[:, :3]), r"heads.*4.*found 3"),
        ("cu_seqlens_q: 2-D", replaced("cu_seqlens_q", lambda x: x[None]), r"cu_seqlens_q must .*found shape \(1, 3\)"),
        ("cu_seqlens_q: without entries", replaced("cu_seqlens_q", lambda x: x[:0]), r"cu_seqlens_q.* must .*found 0"),
        ("cu_seqlens_k: other batch", replaced("cu_seqlens_k", lambda x: x[:2]), r"cu_seqlens_k .*\(3,\), .*\(2,\)"),
        ("cu_seqlens_q: strided", replaced("cu_seqlens_q", expanded), r"cu_seqlens_q must be contiguous"),
        ("cu_seqlens_q: elsewhere", replaced("cu_seqlens_q", lambda x: x.to("meta")), r"cu_seqlens_q .*on meta"),
        ("max_seqlen_q is no integer", dict(max_seqlen_q=3.5), r"max_seqlen_q must be a whole number, found 3\.5"),
        ("max_seqlen_k is negative", dict(max_seqlen_k=-1), r"max_seqlen_k must .*found -1"),
        ("S_dmask of unknown shape", dict(max_seqlen_q=None, **S_DMASK), r"max_seqlen_q must .*found None"),
    ],
    "kvpacked": [
        ("three in kv", replaced("kv", lambda x: x[:, :, [0, 1, 1]]), r"kv.* must be 2 .*found 3"),
    ],
    "qkvpacked": [
        ("two in qkv", replaced("qkv", lambda x: x[:, :, :2]), r"qkv.* must be 3 .*found 2"),
    ],
    "varlen_kvpacked": [
        ("one in kv", replaced("kv", lambda x: x[:, :1]), r"kv.* must be 2 .*found 1"),
    ],
    "varlen_qkvpacked": [
        ("four in qkv", replaced("qkv", lambda x: x[:, [0, 1, 2, 2]]), r"qkv.*3 .*found 4"),
        ("cu_seqlens: 2-D", replaced("cu_seqlens", lambda x: x[None]), r"^cu_seqlens must .*found shape \(1, 3\)"),
        ("max_seqlen is no integer", dict(max_seqlen=3.5), r"^max_seqlen must be a whole number, found 3\.5"),
        ("max_seqlen is negative", dict(max_seqlen=-1), r"^max_seqlen must .*found -1"),
        ("S_dmask of unknown shape", dict(max_seqlen=None, **S_DMASK), r"^max_seqlen must .*found None"),
    ],
    "varlen paged": [
        ("block_table: 1-D", replaced("block_table", lambda x: x[0]), r"block_table must .*found \(2,\)"),
        ("block_table: other batch", replaced("block_table", lambda x: x[:1]), r"block_table must .*\(1, 2\)"),
        ("3-D pages", replaced("k v", lambda x: x[0]), r"k must have 4 dimensions .*\(4, 2, 16\)"),
        ("pages of 0", replaced("k v", lambda x: x[:, :0]), r"page_size must .*found 0"),
    ],
    "_varlen_forward": [
        ("seqused_k: shape", dict(seqused_k=torch.ones(3).int()), r"seqused_k must .*\(2,\), found \(3,\)"),
        ("leftpad_k: shape", dict(leftpad_k=torch.ones(1).int()), r"leftpad_k must .*\(2,\), found \(1,\)"),
        ("splits of pages", splits_of_pages, r"num_splits > 1 is not supported"),
    ],
    "kvcache": [
        ("strided k_cache", replaced("k_cache", expanded), r"k_cache must .*contiguous.*found strides"),
        ("strided v_cache", replaced("v_cache", expanded), r"v_cache must .*contiguous.*found strides"),
        ("v_cache of other shape", replaced("v_cache", lambda x: x[:, :7]), r"v_cache .*found \(2, 7, 2, 16\)"),
        ("other batch", replaced("k_cache v_cache", lambda x: x[:1]), r"k_cache must .*2.*found 1"),
        ("other head_dim", replaced("k_cache v_cache", lambda x: x[..., :8]), r"k_cache.s head_dim .*16, found 8"),
        ("3 key heads of 4", replaced("k_cache v_cache", lambda x: x[:, :, [0, 0, 0]]), r"heads.*found 3"),
        ("cache_seqlens: other batch", replaced("cache_seqlens", lambda x: x[:1]), r"cache_seqlens .*\(2,\), .*\(1,\)"),
        ("cache_seqlens is no integer", dict(cache_seqlens=4.5), r"cache_seqlens must be a whole number, found 4\.5"),
        ("num_splits is no integer", dict(num_splits=1.5), r"num_splits must be a whole number, found 1\.5"),
        ("cache_seqlens: negative", dict(cache_seqlens=-1), r"cache_seqlens must .*found -1"),
        ("cache_seqlens: beyond the capacity", dict(cache_seqlens=9), r"cache_seqlens must .*8.*found 9"),
        ("cache_batch_idx: shape", dict(cache_batch_idx=torch.zeros(3).int()), r"cache_batch_idx .*\(3,\)"),
        ("cache_leftpad: shape", dict(cache_leftpad=torch.zeros(3).int()), r"cache_leftpad .*found \(3,\)"),
        ("num_splits=129", dict(num_splits=129), r"num_splits must .*128.*found 129"),
        ("rotary without k", lambda good: rotary_tables(good["q"].device, 8), r"k must be given .*rotary.*found None"),
        ("v without k", lambda good: dict(v=good["q"][:, :, :2]), r"\bk must .* v.*found None"),
        ("k without v", lambda good: dict(k=good["q"][:, :, :2]), r"\bv must .* k.*found None"),
    ],
    "kvcache appending": [
        ("cache_seqlens: no cache_seqlens", dict(cache_seqlens=None), r"cache_seqlens must .*found None"),
        ("k_cache requires grad", replaced("k_cache", lambda x: x.requires_grad_()), r"k_cache must not require grad"),
        ("v_cache requires grad", replaced("v_cache", lambda x: x.requires_grad_()), r"v_cache must not require grad"),
        ("one cache", lambda good: dict(v_cache=good["k_cache"]), r"v_cache must have .*found the memory of k_cache"),
        ("expanded cache", replaced("k_cache", lambda x: x[:1].expand(2, -1, -1, -1)), r"k_cache must not be expanded"),
        ("k of another batch", replaced("k", lambda x: x[:1]), r"k must .*found \(1, 3, 2, 16\)"),
        ("k of other heads", replaced("k", lambda x: x[:, :, :1]), r"k must .*\(2, 3, 1, 16\)"),
        ("v of another length", replaced("v", lambda x: x[:, :2]), r"v must .*\(2, 2, 2, 16\)"),
        ("3-D k", replaced("k", lambda x: x[0]), r"k must have .*found .*\(3, 2, 16\)"),
        ("cache_seqlens: more than the capacity", dict(cache_seqlens=6), r"k must fit .*8 .*found .*6"),
        ("longer than the cache", replaced("k v", lambda x: x.repeat(1, 3, 1, 1)), r"k must fit .*found .*9"),
        ("cos without sin", dict(rotary_sin=None), r"rotary_sin must .*rotary_cos.*found None"),
        ("sin without cos", dict(rotary_cos=None), r"rotary_cos must .*rotary_sin.*found None"),
        ("rotary_dim 18", lambda good: rotary_tables(good["q"].device, 9), r"rotary_dim.*16.*found 18"),
        ("rotary_dim 32", lambda good: rotary_tables(good["q"].device, 16), r"rotary_dim.*16.*found 32"),
        ("7 positions", lambda good: rotary_tables(good["q"].device, 8, rows=7), r"rotary_cos must .*8 .*found 7"),
        ("other sin", replaced("rotary_sin", lambda x: x[:, :4]), r"rotary_sin must .*\(8, 4\)"),
        ("3-D cos", replaced("rotary_cos", lambda x: x[None]), r"rotary_cos must .*\(1, 8, 8\)"),
        ("strided cos", replaced("rotary_cos", expanded), r"rotary_cos must be contiguous"),
    ],
    "kvcache paged": [
        ("block_table: 1-D", replaced("block_table", lambda x: x[0]), r"block_table must .*found \(2,\)"),
        ("block_table: other batch", replaced("block_table", lambda x: x[:1]), r"block_table must .*\(1, 2\)"),
        ("cache_batch_idx", dict(cache_batch_idx=torch.zeros(2).int()), r"cache_batch_idx .*block_table"),
        ("cache_seqlens: more than the pages", dict(cache_seqlens=6), r"block_table.* 8 .*found .*6"),
        ("pages of 0", replaced("k_cache v_cache", lambda x: x[:, :0]), r"page_size must .*found 0"),
    ],
    "_backward": [
        ("dq of another shape", replaced("dq", lambda x: x[:, :4]), r"dq must .*found \(2, 4, 4, 16\)"),
        ("dk of other heads", replaced("dk", lambda x: x.repeat(1, 1, 2, 1)), r"dk must .*\(2, 7, 4, 16\)"),
        ("out of another shape", replaced("out", lambda x: x[:1]), r"out must .*found \(1, 5, 4, 16\)"),
        ("lse transposed", replaced("softmax_lse", lambda x: x.mT), r"softmax_lse .*found \(2, 5, 4\)"),
        ("dv is dk", lambda good: dict(dv=good["dk"]), r"dv must have memory of its own.*found the memory of dk"),
        ("dv expanded", replaced("dv", lambda x: x[:1].expand(2, -1, -1, -1)), r"dv must not be expanded"),
        ("no rng_state", dict(dropout_p=0.5), r"rng_state must .*dropout_p.*found None"),
        ("rng_state of 3", dict(dropout_p=0.5, rng_state=torch.ones(3).long()), r"rng_state .*\(3,\)"),
    ],
    "_varlen_backward": [
        ("lse padded", replaced("softmax_lse", lambda x: x.reshape(2, 4, 5)), r"softmax_lse .*\(4, 10\), .*2, 4, 5"),
    ],
}
CONTENT_ERRORS = {
    "varlen": [
        ("cu_seqlens_q: not from 0", replaced("cu_seqlens_q", lambda x: x + 1), r"cu_seqlens_q must .*0.*found 1"),
        ("cu_seqlens_k: decreasing", dict(cu_seqlens_k=lengths(0, 9, 7)), r"cu_seqlens_k .*found 7 after 9"),
        ("cu_seqlens_q: past the end", dict(cu_seqlens_q=lengths(0, 5, 11)), r"cu_seqlens_q .*10.*found 11"),
        ("cu_seqlens_k: k past the end", dict(cu_seqlens_k=lengths(0, 5, 15)), r"cu_seqlens_k .*14.*found 15"),
    ],
    "varlen paged": [
        ("block_table: no such page", replaced("block_table", lambda x: x + 1), r"found 6 in column 1 for entry 0"),
        ("block_table: negative page", replaced("block_table", lambda x: x - 1), r"block_table must .*found -1"),
    ],
    "_varlen_forward": [
        ("seqused_k: too many", dict(seqused_k=lengths(7, 8)), r"seqused_k must .*7.*found 8"),
        ("seqused_k: negative", dict(seqused_k=lengths(-1, 7)), r"seqused_k must .*found -1"),
        ("leftpad_k: too much", dict(leftpad_k=lengths(0, 8)), r"leftpad_k must .*7.*found 8"),
    ],
    "kvcache": [
        ("cache_seqlens: past the end", dict(cache_seqlens=lengths(4, 9)), r"cache_seqlens .*8.*found 9"),
        ("cache_batch_idx: no such row", dict(cache_batch_idx=lengths(0, 2)), r"cache_batch_idx .*found 2"),
        ("cache_leftpad: too much", dict(cache_leftpad=lengths(0, 6)), r"cache_leftpad must .*5.*found 6"),
        ("cache_leftpad: negative", dict(cache_leftpad=lengths(-2, 0)), r"cache_leftpad must .*found -2"),
    ],
    "kvcache appending": [
        ("cache_seqlens: past the end", dict(cache_seqlens=lengths(4, 6)), r"cache_seqlens .*found 6"),
        ("queries past the tables", one_key_at_the_end, r"rotary_cos .*10 .*found 8"),
    ],
    "kvcache paged": [
        ("cache_seqlens: past the pages", dict(cache_seqlens=lengths(4, 6)), r"block_table.*found 6"),
        ("block_table: no such page", replaced("block_table", lambda x: x + 1), r"found 6 in column 1 for entry 0"),
    ],
}
# fmt: on


def tensor_type_errors(name):
    """Any query, key or value."""

    def as_type(dtype):
        return f"{name}: {dtype}", replaced(name, lambda x: x.to(dtype)), rf"must have dtype .*found {dtype}"

    return [
        (f"{name}: a list", {name: [1.0]}, rf"\b{name} must be a torch.Tensor, found list"),
        (f"{name}: None", {name: None}, rf"\b{name} must be a torch.Tensor, found NoneType"),
        *map(as_type, [torch.float64, torch.int32, torch.bool, torch.complex64]),
    ]


def tensor_value_errors(name, dims):
    says = rf"\b{name} must have {dims} dimensions .*found shape"
    return [
        (f"{name}: a dimension less", replaced(name, lambda x: x[0]), says),
        (f"{name}: a dimension more", replaced(name, lambda x: x[None]), says),
    ]


TENSORS = {  # function -> (name, number of dimensions)
    "func": [("q", 4), ("k", 4), ("v", 4)],
    "kvpacked": [("q", 4), ("kv", 5)],
    "qkvpacked": [("qkv", 5)],
    "varlen": [("q", 3), ("k", 3), ("v", 3)],
    "varlen_kvpacked": [("q", 3), ("kv", 4)],
    "varlen_qkvpacked": [("qkv", 4)],
    "kvcache": [("q", 4), ("k_cache", 4), ("v_cache", 4)],
}
NUMBER_TYPE_ERRORS = [
    (dict(dropout_p="0.1"), r"dropout_p must .*found str"),
    (dict(softmax_scale="1"), r"softmax_scale must .*found str"),
    (dict(softmax_scale=torch.ones(2)), r"softmax_scale must .*found a tensor of shape \(2,\)"),
    (dict(dropout_p=torch.ones(2, 5).bool()), r"dropout_p must be a real number, found a tensor of shape \(2, 5\)"),
    (dict(causal="no"), r"causal must be a bool( or a tensor \(batch,\))?, found 'no'"),
    (dict(causal=None), r"causal must be a bool( or a tensor \(batch,\))?, found None"),
    (dict(deterministic=2), r"deterministic must be a bool, found 2"),
    (dict(return_attn_probs="no"), r"return_attn_probs must be a bool, found 'no'"),
    (dict(rotary_interleaved="no"), r"rotary_interleaved must be a bool, found 'no'"),
    (dict(alibi_slopes=[0.1] * 4), r"alibi_slopes must .*found list"),
    (dict(alibi_slopes=torch.ones(4).half()), r"alibi_slopes must .*float32, found torch.float16"),
    (dict(alibi_slopes=torch.ones(4).double()), r"alibi_slopes must .*float32, found torch.float64"),
]
NUMBER_VALUE_ERRORS = [
    (dict(dropout_p=-0.1), r"dropout_p must .*found -0\.1"),
    (dict(dropout_p=1.0), r"dropout_p must .*found 1\.0"),
    (dict(dropout_p=1.5), r"dropout_p must .*found 1\.5"),
    (dict(dropout_p=float("nan")), r"dropout_p must .*found nan"),
    (dict(softmax_scale=-1.0), r"softmax_scale must .*found -1\.0"),
    (dict(softmax_scale=float("nan")), r"softmax_scale must .*found nan"),
    (dict(softmax_scale=float("inf")), r"softmax_scale must .*found inf"),
    (dict(softcap=float("nan")), r"softcap must .*found nan"),
    (dict(softcap=float("inf")), r"softcap must .*found inf"),
    (dict(window_size=None), r"window_size must .*found None"),
    (dict(window_size=3), r"window_size must .*found 3"),
    (dict(window_size=(1,)), r"window_size must .*found \(1,\)"),
    (dict(window_size=(1, 2, 3)), r"window_size must .*found \(1, 2, 3\)"),
    (dict(window_size=("a", 1)), r"window_size must .*found \('a', 1\)"),
    (dict(window_size=(1, None)), r"window_size must .*found \(1, None\)"),
    (dict(window_size=(1.5, 2)), r"window_size must .*found \(1\.5, 2\)"),
    (dict(window_size=(float("nan"), 2)), r"window_size must .*found \(nan, 2\)"),
    (dict(window_size=(2, float("inf"))), r"window_size must .*found \(2, inf\)"),
    (dict(alibi_slopes=torch.ones(2)), r"alibi_slopes must .*\(4,\) or \(2, 4\), found \(2,\)"),
    (dict(alibi_slopes=torch.ones(3, 4)), r"alibi_slopes must .*\(4,\) or \(2, 4\), found \(3, 4\)"),
    (dict(alibi_slopes=torch.ones(2, 4, 1)), r"alibi_slopes must .*found \(2, 4, 1\)"),
    (dict(alibi_slopes=torch.ones(4, requires_grad=True)), r"alibi_slopes must not require grad"),
    (dict(softmax_scale=torch.tensor(0.1, requires_grad=True)), r"softmax_scale must not require grad, since no"),
    (dict(softcap=torch.tensor(30.0, requires_grad=True)), r"softcap must not require grad, since no"),
    (dict(alibi_slopes=torch.ones(4, device="meta")), r"alibi_slopes must .*found it on meta"),
]
FLAGS = {"causal", "deterministic", "return_attn_probs"}
NUMBERS = {  # function -> the arguments of these tables that it has
    "func": {*FLAGS, "dropout_p", "softmax_scale", "softcap", "window_size", "alibi_slopes"},
    "varlen": {*FLAGS, "dropout_p", "softmax_scale", "softcap", "window_size", "alibi_slopes"},
    "kvcache": {"causal", "rotary_interleaved", "softmax_scale", "softcap", "window_size", "alibi_slopes"},
    "_backward": {"causal", "deterministic", "dropout_p", "softmax_scale", "softcap", "alibi_slopes"},
}


def number_errors(table):
    """The rows of `table` for each function in NUMBERS; an id is the argument and what the error says was found."""
    for function, names in NUMBERS.items():
        rows = [(f"{next(iter(change))}: {says.rpartition('found ')[2]}", change, says) for change, says in table]
        yield function, [(what, change, says) for what, change, says in rows if change.keys() <= names]


def params(error, *tables):
    return [
        pytest.param(error, function, change, says, id=f"{function}-{what}")
        for table in tables
        for function, rows in table
        for what, change, says in rows
    ]


BAD = [
    *params(TypeError, ((f, tensor_type_errors(name)) for f, tensors in TENSORS.items() for name, _ in tensors)),
    *params(ValueError, ((f, tensor_value_errors(*tensor)) for f, tensors in TENSORS.items() for tensor in tensors)),
    *params(TypeError, TYPE_ERRORS.items(), number_errors(NUMBER_TYPE_ERRORS)),
    *params(ValueError, VALUE_ERRORS.items(), number_errors(NUMBER_VALUE_ERRORS)),
]


@pytest.mark.parametrize("scale", [0.0, torch.zeros(())], ids=["a float", "a tensor"])
def test_the_order_of_another_function(scale, device):
    """None, 0.0 and True are attn_mask, dropout_p and is_causal of scaled_dot_product_attention."""
    q, k, v = (CALLS["func"][1](device)[name] for name in "qkv")
    with pytest.raises(ValueError, match="dropout_p must be a number if softmax_scale is 0, found None: to call with"):
        flash_attn.flash_attn_func(q, k, v, None, scale, True)


@pytest.mark.parametrize("name", CALLS)
def test_the_unchanged_calls_are_good(name, device):
    function, good = CALLS[name]
    function(**good(device))


@pytest.mark.parametrize(("error", "name", "change", "says"), BAD)
def test_bad_input(error, name, change, says, device):
    assert_refused(error, name, change, says, device)


@pytest.mark.parametrize(("error", "name", "change", "says"), params(ValueError, CONTENT_ERRORS.items()))
def test_bad_contents(error, name, change, says):
    """Found where reading a tensor waits for no device; on a GPU the caller answers for them."""
    assert_refused(error, name, change, says, torch.device("cpu"))


def assert_refused(error, name, change, says, device):
    function, good = CALLS[name]
    arguments = good(device)
    arguments |= change(arguments) if callable(change) else {name: on(device, x) for name, x in change.items()}
    tensors = [x for x in arguments.values() if torch.is_tensor(x) and not x.is_meta]
    before = [x.detach().clone() for x in tensors]
    with pytest.raises(error, match=says) as caught:
        function(**arguments)
    assert isinstance(caught.value, RuntimeError)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before)), "something was written"


def on(device, value):
    """A tensor of a table on the device of the test; "meta" stands for another device."""
    if not torch.is_tensor(value) or value.is_meta:
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


def test_more_heads_than_models_have_are_said_to_look_like_a_sequence():
    """Queries and keys of (batch, heads, seqlen, head_dim) that are alike are a legal call."""
    _library.warn_once.cache_clear()
    x = torch.randn(1, 2, 300, 16)
    with pytest.warns(RuntimeWarning, match=r"q has 300 heads. If the layout is \(batch, heads, .* transpose\(1, 2\)"):
        flash_attn.flash_attn_func(x, x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn.flash_attn_func(*3 * [x.transpose(1, 2)])


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v", "learnable_sink", "attn_bias"])
def test_a_cache_call_says_that_it_has_no_gradient(name):
    _library.warn_once.cache_clear()
    good = cache("cpu") if "cache" in name else appending("cpu")  # a cache that is written must not require grad
    good |= dict(learnable_sink=torch.zeros(good["q"].shape[2]), attn_bias=torch.zeros(1))
    good[name].requires_grad_()
    says = rf"{name} requires grad, but a call with a cache computes no gradients\. .*no_grad\(\)"
    with pytest.warns(RuntimeWarning, match=says):
        assert not flash_attn.flash_attn_with_kvcache(**good).requires_grad
    if name == "v":
        good["q"].requires_grad_()
        good["k"].requires_grad_()
        with pytest.warns(RuntimeWarning, match="flash_attn: q, k and v require grad, but"):
            flash_attn.flash_attn_with_kvcache(**good)
    _library.warn_once.cache_clear()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn.flash_attn_with_kvcache(**good)


ODD = {  # what callers pass -> (function, arguments), and the usual arguments that mean the same
    "tensors": (
        "varlen",
        dict(
            dropout_p=torch.tensor(0.0),
            softmax_scale=torch.tensor(0.5),
            softcap=torch.tensor(2),
            window_size=(torch.tensor(2), torch.tensor(-1)),
            max_seqlen_q=torch.tensor(5),
            deterministic=1,
        ),
        dict(softmax_scale=0.5, softcap=2.0, window_size=(2, -1), deterministic=True),
    ),
    "numpy": (
        "varlen",
        dict(
            dropout_p=np.float64(0),
            softmax_scale=np.float32(0.5),
            softcap=np.array(2.0),
            causal=np.True_,
            window_size=np.array([2, -1]),
            max_seqlen_q=np.int64(5),
            max_seqlen_k=np.array(7),
        ),
        dict(softmax_scale=0.5, softcap=2.0, window_size=(2, -1), causal=True),
    ),
    "whole numbers": (
        "varlen",
        dict(dropout_p=0, softmax_scale=1, softcap=2, window_size=[2.0, -1.0], max_seqlen_q=5.0),
        dict(softmax_scale=1.0, softcap=2.0, window_size=(2, -1)),
    ),
    "None": ("func", dict(dropout_p=None, softmax_scale=None, softcap=None, deterministic=None), {}),
    "None in decoding": ("kvcache", dict(softcap=None, num_splits=None, rotary_interleaved=None), {}),
    "lengths": ("kvcache", dict(cache_seqlens=np.int64(4), num_splits=2.0), dict(cache_seqlens=4, num_splits=2)),
    "a float and a tensor": (
        "kvcache",
        dict(cache_seqlens=4.0, num_splits=torch.tensor(2)),
        dict(cache_seqlens=4, num_splits=2),
    ),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_but_legal(what, device):
    name, odd, usual = ODD[what]
    function, good = CALLS[name]
    arguments = good(device)
    assert torch.equal(function(**arguments | odd), function(**arguments | usual))


NOT_DENSE = {  # what becomes of a tensor, and what is said of it
    "nested": (lambda x: torch.nested.nested_tensor(list(x)), "a nested one"),
    "jagged": (lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), "a nested one"),
    "sparse": (torch.Tensor.to_sparse, "torch.sparse_coo"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", NOT_DENSE)
@pytest.mark.parametrize(("function", "name"), [(f, name) for f, tensors in TENSORS.items() for name, _ in tensors])
def test_tensors_that_are_not_dense(function, name, kind, device):
    function, good = CALLS[function]
    arguments, (change, found) = good(device), NOT_DENSE[kind]
    with pytest.raises(TypeError, match=rf"\b{name} must be a dense tensor, found {found}"):
        function(**arguments | {name: change(arguments[name])})


@pytest.mark.multi_gpu
def test_tensors_of_two_gpus():
    q, k, v = dense("cuda:0").values()
    with pytest.raises(ValueError, match=r"k must be on cuda:0 .*found it on cuda:1"):
        flash_attn.flash_attn_func(q, k.to("cuda:1"), v)


@pytest.mark.cuda
def test_tensors_of_cpu_and_gpu(device):
    q, k, v = dense(device).values()
    with pytest.raises(ValueError, match=r"v must be on cuda.*found it on cpu"):
        flash_attn.flash_attn_func(q, k, v.cpu())
