"""The positional functions that other packages call in place of flash-attn 2.8's compiled module.

They reach them as `flash_attn_2_cuda` (see compat/) and as `flash_attn.flash_attn_interface.flash_attn_gpu`.

    fwd, varlen_fwd, bwd, varlen_bwd, fwd_kvcache

take their arguments by position only, in the order below, and return lists. Checks, kernels and the reference backend
are those of `flash_attn`. If a tensor is given for an output, the result is written to it, and it is returned.
`generator` must be None, as in 2.8: dropout draws from the default generator of the device.
"""

import torch

from flash_attn._ops import checks, flash_attn


def fwd(
    q,
    k,
    v,
    out,
    alibi_slopes,
    dropout_p,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    return_softmax,
    generator=None,
    /,
):
    """Returns [out, softmax_lse, S_dmask, rng_state]."""
    _check_generator(generator)
    return _forward(
        q,
        k,
        v,
        softmax_scale,
        causal,
        (window_left, window_right),
        return_softmax,
        out,
        dropout_p=dropout_p,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )


def varlen_fwd(
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    leftpad_k,
    block_table,
    alibi_slopes,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    zero_tensors,
    causal,
    window_left,
    window_right,
    softcap,
    return_softmax,
    generator=None,
    num_splits=0,
    /,
):
    """Returns [out, softmax_lse, S_dmask, rng_state]. zero_tensors changes nothing: every element is written."""
    _check_generator(generator)
    flash_attn.check_splits_of_pages(num_splits, block_table)
    return _forward(
        q,
        k,
        v,
        softmax_scale,
        causal,
        (window_left, window_right),
        return_softmax,
        out,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        block_table=block_table,
        num_splits=num_splits,
    )


def bwd(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    alibi_slopes,
    dropout_p,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    deterministic,
    generator=None,
    rng_state=None,
    /,
):
    """Returns [dq, dk, dv, softmax_d]."""
    _check_generator(generator)
    grads = _gradients(q, k, v, dq, dk, dv)
    softmax_d = flash_attn.backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        *grads,
        softmax_scale,
        causal,
        (window_left, window_right),
        rng_state,
        dropout_p=dropout_p,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    return [*grads, softmax_d]


def varlen_bwd(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    alibi_slopes,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    zero_tensors,
    causal,
    window_left,
    window_right,
    softcap,
    deterministic,
    generator=None,
    rng_state=None,
    /,
):
    """Returns [dq, dk, dv, softmax_d]. zero_tensors changes nothing: every element is written."""
    _check_generator(generator)
    grads = _gradients(q, k, v, dq, dk, dv)
    softmax_d = flash_attn.backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        *grads,
        softmax_scale,
        causal,
        (window_left, window_right),
        rng_state,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    return [*grads, softmax_d]


def fwd_kvcache(
    q,
    k_cache,
    v_cache,
    k,
    v,
    cache_seqlens,
    rotary_cos,
    rotary_sin,
    cache_batch_idx,
    cache_leftpad,
    block_table,
    alibi_slopes,
    out,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    rotary_interleaved,
    num_splits,
    /,
):
    """Returns [out, softmax_lse]."""
    result, softmax_lse, _ = flash_attn.decode(
        q,
        k_cache,
        v_cache,
        softmax_scale,
        causal,
        (window_left, window_right),
        cache_seqlens,
        k,
        v,
        rotary_cos,
        rotary_sin,
        None,
        out,
        rotary_interleaved=rotary_interleaved,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
    )
    return [result, softmax_lse]


def _forward(q, k, v, softmax_scale, causal, window_size, return_softmax, out, **options):
    results = flash_attn.forward(q, k, v, softmax_scale, causal, window_size, return_softmax, None, out, **options)
    return list(flash_attn.with_tensors(results))


def _gradients(q, k, v, dq, dk, dv):
    return [torch.empty_like(x) if dx is None else dx for x, dx in ((q, dq), (k, dk), (v, dv))]


def _check_generator(generator):
    if generator is not None:
        raise checks.ArgumentError(
            f"the `generator` argument is no longer supported: it must be None, found {generator!r}"
        )
