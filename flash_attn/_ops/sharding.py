"""How ops divide their work among the processes that hold the parts of DTensors: rules for `_library.define`.

Attention divides batch and heads, or with packed tokens heads; norms, activations and cross entropy divide rows, that
is every dimension but the last, and activations without a gate also that; the rotation divides batch, sequence and
heads. Gradients of what is not divided, such as the weights of norms, are partial sums.

The rules take the arguments of the ops.
"""

from typing import Any

from torch import Tensor

from flash_attn._errors import ArgumentError
from flash_attn._reference.attention.options import Features, Options
from flash_attn._sharding import Layout, is_distributed

__all__ = ["is_distributed"]  # besides the rules


def local(x: Any) -> Any:
    """This process's part of a DTensor, differentiably; anything else as it is."""
    return x.to_local() if is_distributed(x) else x


def attention_fwd(q: Tensor, k: Tensor | None, v: Tensor | None, *arguments: Any) -> Layout:
    tensors, out, lse, divides = _attention(q, k, v, arguments)
    return Layout(tensors, (out, lse), divides)


def attention_fwd_plain_out(*arguments: Any) -> Layout:
    layout = attention_fwd(*arguments)
    return layout._replace(results=layout.results[:1])


def attention_fwd_features(q: Tensor, k: Tensor | None, v: Tensor | None, *arguments: Any) -> Layout:
    tensors, out, lse, divides = _attention(q, k, v, *_with_features(arguments))
    features = _with_features(arguments)[1]
    row_max, lse_lo = lse if features.row_max else None, None if features.attn_bias is None else lse
    return Layout(tensors, (out, lse, row_max, lse_lo), divides)


def attention_fwd_with_residue(q: Tensor, k: Tensor | None, v: Tensor | None, *arguments: Any) -> Layout:
    layout = attention_fwd_features(q, k, v, *arguments)
    return layout._replace(results=(*layout.results, layout.results[0]))


def attention_bwd(dout: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, *arguments: Any) -> Layout:
    tensors, out, lse, divides = _attention(q, k, v, arguments[7:])
    tensors |= {f"d{name}": tensors[name] for name in ("q", "k", "v")}
    softmax_d = " ".join([*lse.split()[:-1], "rounded"])
    return _bwd(tensors, out, lse, (softmax_d,), divides)


def attention_bwd_plain(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Layout:
    tensors, out, lse, divides = _attention(q, k, v, arguments[2:])
    return _bwd(tensors, out, lse, (tensors["q"], tensors["k"], tensors["v"]), divides)


def attention_bwd_features(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Layout:
    *_, wants_dbias, sink, bias = arguments[:8]
    tensors, out, lse, divides = _attention(q, k, v, *_with_features(arguments[6:]))
    dsink = None if sink is None else tensors["learnable_sink"]
    dbias = tensors["attn_bias"] if wants_dbias else None
    return _bwd(tensors, out, lse, (tensors["q"], tensors["k"], tensors["v"], dsink, dbias), divides)


def _bwd(tensors, out, lse, results, divides):
    tensors |= dict(dout=out, out=out, out_lo=out, softmax_lse=lse, dlse=lse, lse_lo=lse)
    return Layout(tensors, results, divides, anchor="q", moves="dout dlse")


def _with_features(arguments):
    """The options of an op with features, and the features; `arguments` begin with the sink and the bias."""
    sink, bias, *others = arguments
    count = len(Options._fields)
    return others[:count], Features(sink, bias, *others[count : count + len(Features._fields) - 2])


def _attention(q, k, v, arguments, features=None):
    """The dimensions of all inputs, of out and of softmax_lse, and which of them may be divided."""
    options = Options(*arguments[: len(Options._fields)])
    if options.dropout_p:
        raise ArgumentError(
            f"dropout_p must be 0 for DTensors, found {options.dropout_p}: every process would drop the same "
            "weights of its part. Call to_local() on each"
        )
    varlen = options.cu_seqlens_q is not None
    rows, keys = ("rows", "keys") if varlen else ("batch rows", "batch keys")
    if options.block_table is not None:
        keys = "pages places"
    tensors = {
        "q": f"{rows} three heads dim" if k is None else f"{rows} heads dim",
        "k": f"{keys} two heads_k dim" if v is None else f"{keys} heads_k dim",
        "v": f"{keys} heads_k dim_v",
        "alibi_slopes": "batch heads"
        if options.alibi_slopes is not None and options.alibi_slopes.dim() == 2
        else "heads",
        "seqused_k": "batch",
        "leftpad_k": "batch",
        "block_table": "batch most",
    }
    heads = "heads+heads_k"
    divides = heads if varlen or options.block_table is not None else f"batch {heads}"
    if features is not None:
        sizes = dict(batch=q.shape[0], heads=q.shape[-2])
        tensors |= dict(learnable_sink="heads", causal="batch", seqused_q="batch")
        tensors |= dict(k_descale="batch heads_k", v_descale="batch heads_k")
        if features.key_ranges is not None:
            tensors["key_ranges"] = _if_whole(features.key_ranges, "batch heads rows bounds", **sizes)
        if features.attn_bias is not None:
            bias = features.attn_bias
            tensors["attn_bias"] = _if_whole(bias, "batch batch heads rows keys", **sizes)
            if max(bias.shape[:2]) > 1 and sizes["batch"] not in bias.shape[:2]:  # entries share it by turns
                divides = heads
    return tensors, f"{rows} heads dim_v" if v is not None else f"{rows} heads dim", _lse(varlen), divides


def _lse(varlen):
    return "heads rows" if varlen else "batch heads rows"


def _if_whole(x, names, **sizes):
    """The names of the dimensions of `x`, but "one" for those that entries or heads share."""
    whole = zip(names.split(), x.shape, strict=True)
    return " ".join(name if name not in sizes or 1 != size == sizes[name] else "one" for name, size in whole)


# ---------------------------------------------------------------------------------------------------------------------
# Layers


def _rows(x):
    """Names for the dimensions of rows (..., cols): those before the last, and whether they make one dimension."""
    names = [f"dim{i}" for i in range(x.dim() - 1)]
    return names, "*".join(names)


def layer_norm_fwd(
    x0: Tensor,
    x1: Any,
    residual: Any,
    weight: Tensor,
    bias: Any,
    weight1: Any,
    bias1: Any,
    colscale: Any,
    rowscale: Any,
    x0_subset: Any,
    out_subset: Any,
    rng_state: Any,
    dropout_p: float,
    eps: float,
    rowscale_const: float,
    out_rows: int,
    is_rms_norm: bool,
    zero_centered_weight: bool,
    h_dtype: Any,
    out_dtype: Any,
    return_mask: bool,
) -> Layout:
    _check_norm(dropout_p, x0_subset)
    tensors, whole, statistics, divides = _layer_norm(x0, rowscale)
    results = whole, whole if weight1 is not None else None, whole if h_dtype is not None else None
    return Layout(tensors, (*results, None, None, statistics, statistics), divides)


def layer_norm_bwd(
    dout: Tensor,
    dout1: Any,
    dh: Any,
    h: Tensor,
    x0: Any,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    bias: Any,
    weight1: Any,
    bias1: Any,
    colscale: Any,
    rowscale: Any,
    x0_subset: Any,
    out_subset: Any,
    rng_state: Any,
    mask0: Any,
    mask1: Any,
    dropout_p: float,
    rowscale_const: float,
    x0_rows: int,
    is_rms_norm: bool,
    zero_centered_weight: bool,
    dx0_dtype: Any,
    dx1_dtype: Any,
    dresidual_dtype: Any,
    out_dtype: Any,
) -> Layout:
    _check_norm(dropout_p, x0_subset)
    tensors, whole, statistics, divides = _layer_norm(h, rowscale)
    tensors |= dict(dout=whole, dout1=whole, dh=whole, h=whole, mean=statistics, rstd=statistics)
    rows = [None if dtype is None else whole for dtype in (dx0_dtype, dx1_dtype, dresidual_dtype)]
    parameters = [None if x is None else "cols" for x in (weight, bias, weight1, bias1, colscale)]
    results = (*rows, *parameters, None if out_dtype is None else whole)
    return Layout(tensors, results, divides, anchor="h", moves="dout dout1 dh")


def _check_norm(dropout_p, x0_subset):
    if dropout_p or x0_subset is not None:
        what = "dropout_p must be 0" if dropout_p else "x0_subset must be None"
        raise ArgumentError(f"{what} for DTensors, found another value: call to_local() on each")


def _layer_norm(x, rowscale):
    names, statistics = _rows(x)
    whole = " ".join([*names, "cols"])
    tensors = dict.fromkeys(("x0", "x1", "residual"), whole)
    tensors |= dict.fromkeys(("weight", "bias", "weight1", "bias1", "colscale"), "cols")
    if rowscale is not None:
        tensors["rowscale"] = " ".join(names) if rowscale.dim() == len(names) else statistics
    return tensors, whole, statistics or "one", " ".join(names)


def activation_fwd(x: Tensor, y: Tensor | None, activation: str) -> Layout:
    whole = _every(x)
    return Layout(dict(x=whole, y=whole), (whole,), whole)


def activation_bwd(dout: Tensor, x: Tensor, y: Tensor | None, activation: str) -> Layout:
    whole = _every(x)
    tensors = dict(dout=whole, x=whole, y=whole)
    return Layout(tensors, (whole, None if y is None else whole), whole, anchor="x", moves="dout")


def _every(x):
    return " ".join(f"dim{i}" for i in range(x.dim()))


def gated_fwd(x: Tensor, activation: str) -> Layout:
    names, _ = _rows(x)
    return Layout(dict(x=" ".join([*names, "both"])), (" ".join([*names, "half"]),), " ".join(names))


def gated_bwd(dout: Tensor, x: Tensor, activation: str) -> Layout:
    names, _ = _rows(x)
    both, half = (" ".join([*names, last]) for last in ("both", "half"))
    return Layout(dict(dout=half, x=both), (both,), " ".join(names), anchor="x", moves="dout")


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: Any, seqlen_offset: int, cu_seqlens: Any, *_: Any
) -> Layout:
    return _rotary(cu_seqlens, dict(), 1)


def rotary_(x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: Any, offset: int, cu_seqlens: Any, *_: Any) -> Layout:
    return _rotary(cu_seqlens, dict(), 0)


def rotary_into(
    x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: Any, offset: int, cu_seqlens: Any, *_: Any
) -> Layout:
    return _rotary(cu_seqlens, dict(out=""), 0)


def _rotary(cu_seqlens, others, results):
    whole = "batch rows heads dim" if cu_seqlens is None else "tokens heads dim"
    divides = "batch rows heads" if cu_seqlens is None else "heads"
    tensors = dict(x=whole, seqlen_offsets="batch") | dict.fromkeys(others, whole)
    return Layout(tensors, (whole,) * results, divides, is_linear=results == 1, local=_from_first_row)


def _from_first_row(arguments, starts):
    """A process's first token is not at the first position, if the mesh divides the sequence."""
    arguments["seqlen_offset"] += starts.get("rows", 0)


def xentropy_fwd(logits: Tensor, *_: Any) -> Layout:
    return _xentropy(("rows",) * 4)


def xentropy_bwd(dlosses: Tensor, logits: Tensor, *_: Any) -> Layout:
    return _xentropy(("rows classes",), moves="dlosses")


def xentropy_bwd_(dlosses: Tensor, logits: Tensor, *_: Any) -> Layout:
    return _xentropy((), moves="dlosses")


def xentropy_fwd_bwd(dlosses: Tensor, logits: Tensor, *_: Any) -> Layout:
    return _xentropy((*("rows",) * 4, "rows classes"), moves="dlosses")


def xentropy_fwd_bwd_(dlosses: Tensor, logits: Tensor, *_: Any) -> Layout:
    return _xentropy(("rows",) * 4, moves="dlosses")


def xentropy_redo_(dlogits: Tensor, dlosses: Tensor, expected: Tensor, *_: Any) -> Layout:
    return _xentropy((), moves="dlosses expected")


def xentropy_scale_(dlogits: Tensor, dlosses: Tensor, expected: Tensor, kept: Tensor) -> Layout:
    return _xentropy((), anchor="dlogits", moves="dlosses expected")


def _xentropy(results, anchor="logits", moves=""):
    tensors = dict(logits="rows classes", dlogits="rows classes")
    tensors |= dict.fromkeys(("labels", "lse", "dlosses", "expected", "kept"), "rows")
    return Layout(tensors, results, "rows", anchor=anchor, moves=moves)
